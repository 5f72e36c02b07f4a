"""transformers' Trainer for global models: training, evaluation, saving, resuming, accumulation, bf16.

    from globaltensor.trainers.huggingface import Trainer, TrainingArguments
    gt.parallelize(model, gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")))
    Trainer(model, TrainingArguments("out"), train_dataset=data).train()

The two are transformers' own classes, with other doors. The batch of a step (`per_device_train_batch_size`, as there is
one device) is split along "dp". What is saved is what transformers saves for a model on one device, and loads in it:
`optimizer.pt` has whole tensors.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from globaltensor.checkpoint.huggingface import INDEX, SINGLE, load_safetensors
from globaltensor.checkpoint.torch_files import save
from globaltensor.errors import ArgumentError
from globaltensor.parallel.optimizer_state import globalize_state
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.world import rank
from globaltensor.tracebacks import api_boundary
from globaltensor.trainers.one_program import placement_of, seen_as_one_process, to_batch, to_plain

_INSTEAD = {"deepspeed": "gt.zero(optimizer, stage=1), in Trainer(optimizers=(optimizer, None))",
            "fsdp": "gt.zero(optimizer, stage=3), in Trainer(optimizers=(optimizer, None))",
            "parallelism_config": "the axes of the model's placement",
            "push_to_hub": "model.push_to_hub(...) on rank 0, from the folder"}


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]  # it is Any to mypy
    """transformers' own. Raises ArgumentError for what only a trainer of theirs could do: deepspeed, fsdp,
    parallelism_config, push_to_hub."""

    @api_boundary
    def __post_init__(self) -> None:
        for name, instead in _INSTEAD.items():
            if value := getattr(self, name, None):
                raise ArgumentError(f"TrainingArguments({name}={value!r}) for a global model",
                                    "it splits or moves a model itself, and global parameters lie as they do", instead)
        with seen_as_one_process():
            super().__post_init__()
            assert self.device is not None           # asked for here, as accelerate looks at the environment once

    @property
    def should_save(self) -> bool:
        """One rank writes."""
        return rank() == 0

    @property
    def should_log(self) -> bool:
        return rank() == 0


class Trainer(transformers.Trainer):  # type: ignore[misc]  # it is Any to mypy
    """transformers' own, of a model whose parameters are global. Raises GlobalTensorError for a plain one."""

    @api_boundary
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, TrainingArguments):
            raise ArgumentError(f"a Trainer of globaltensor with {type(self.args).__name__} of transformers",
                                "each process would take itself for one of several replicas",
                                "from globaltensor.trainers.huggingface import TrainingArguments")
        self.where = placement_of(self.model)

    def is_local_process_zero(self) -> bool:
        return rank() == 0

    is_world_process_zero = is_local_process_zero

    def _prepare_inputs(self, inputs: Any) -> Any:
        return to_batch(super()._prepare_inputs(inputs), self.where)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss as a plain number, which the loop adds up; outputs stay global."""
        result = super().compute_loss(*args, **kwargs)
        return (to_plain(result[0]), *result[1:]) if isinstance(result, tuple) else to_plain(result)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss, logits and labels, whole: metrics are computed of them."""
        return to_plain(super().prediction_step(*args, **kwargs))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return to_plain(super()._get_grad_norm(*args, **kwargs))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or self.args.output_dir
        if self.args.should_save:
            os.makedirs(folder, exist_ok=True)
        self.model.save_pretrained(folder)           # of all processes; the first one writes
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self.optimizer.state_dict(), os.path.join(output_dir, OPTIMIZER_NAME))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:                    # all processes have the same
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        gather_objects(None, "saving a checkpoint")  # nobody goes on, and ends the job, before it is whole

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _has_weights(resume_from_checkpoint):
            load_safetensors(self.model, resume_from_checkpoint)
        else:                                        # adapters of peft, and files of torch
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if _has_weights(self.state.best_model_checkpoint):
            load_safetensors(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        optimizer: Any = self.optimizer
        globalize_state(getattr(optimizer, "optimizer", optimizer))          # accelerate wraps it


def _has_weights(folder: str) -> bool:
    """Has it a whole model's, in safetensors? transformers' own trainer reads them by their names in the files, and
    leaves what it cannot find, such as fused experts."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (SINGLE, INDEX))
