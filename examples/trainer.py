"""transformers' Trainer on a global Llama: dp x tp ranks, and three lines that differ from the program for one device.

    python examples/trainer.py                                  one process drives all ranks
    globaltensor run -n 4 examples/trainer.py                   one process per rank
    globaltensor run -n 4 examples/trainer.py --resume          goes on where the last one was ended

`--plain` runs the same program without the three lines.
"""
from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import transformers

import globaltensor as gt
from globaltensor.trainers import huggingface

SEQ, ROWS = 16, 64


class EndsAt(transformers.TrainerCallback):
    """The job is ended here, as if the machine had been taken away."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os._exit(3)


def main(argv: list[str] | None = None) -> tuple[list[float], Any]:
    parser = argparse.ArgumentParser(description="Train a small Llama with transformers' Trainer.")
    parser.add_argument("--out", default="trainer-out")
    for name, default in ("dp", 2), ("tp", 2), ("steps", 6), ("accumulate", 1), ("kill", 0):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in "plain", "resume", "bf16":
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    library: Any = transformers if options.plain else huggingface                    # 1
    transformers.set_seed(1)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0))
    if not options.plain:
        ranks = torch.arange(options.dp * options.tp).view(options.dp, options.tp)
        gt.parallelize(model, gt.placement("cpu", ranks.tolist(), ("dp", "tp")))     # 2
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 96, (ROWS, SEQ)).tolist()]
    arguments = library.TrainingArguments(                                           # 3
        options.out, max_steps=options.steps, per_device_train_batch_size=4, per_device_eval_batch_size=8,
        gradient_accumulation_steps=options.accumulate, learning_rate=1e-2, logging_steps=1, save_steps=2,
        eval_strategy="no", bf16=options.bf16, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False)
    trainer = library.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:12],
                              callbacks=[EndsAt(options.kill)] if options.kill else None)
    trainer.train(resume_from_checkpoint=options.resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(options.out)
    prompt = torch.tensor([data[0]["input_ids"][:4]])
    words = model.generate(prompt, max_new_tokens=4, do_sample=False)
    return [*losses, evaluated], words.tolist()


if __name__ == "__main__":
    result = main()
    if gt.rank() == 0:
        print(result)
