"""The trainers that people use already, on global tensors: programs that change a line or two.

    from globaltensor.trainers.huggingface import Trainer, TrainingArguments     # of transformers
    from globaltensor.trainers.accelerate import Accelerator                     # of accelerate
    from globaltensor.trainers.lightning import GlobalTensorStrategy             # for Lightning's Trainer

A trainer is made for one process per device, each with rows of its own, and would wrap the model in DDP. Here it runs
as on one device: in every process it sees one process alone, reads the same whole batches, and its model is global. So
batch sizes and step counts are those of the program for one device, whatever the number of ranks.
"""
