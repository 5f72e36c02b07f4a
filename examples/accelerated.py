"""accelerate's Accelerator on a global GPT: dp x tp ranks, and three lines that differ from the program for one device.

    python examples/accelerated.py                              one process drives all ranks
    globaltensor run -n 4 examples/accelerated.py               one process per rank
    globaltensor run -n 4 examples/accelerated.py --resume      goes on where the last one was ended

`--plain` runs the same program without the three lines.
"""
from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import accelerate
import torch
from gpt import GPT
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import globaltensor as gt
from globaltensor.trainers.accelerate import Accelerator

VOCAB, SEQ, ROWS, BATCH, EPOCHS = 32, 12, 21, 4, 2                     # the last batch has one row


class Progress(dict[str, Any]):
    """What the loop itself has to remember: steps done, and their losses."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    load_state_dict = dict.update


def train(options: argparse.Namespace, accelerator: Any, model: Any, data: TensorDataset) -> Progress:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress(batches=0, losses=[])
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.out)
    for epoch in range(progress["batches"] // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        left = accelerator.skip_first_batches(loader, progress["batches"] % len(loader))
        left.set_epoch(epoch)
        for ids, target in left:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress["batches"] += 1
            progress["losses"].append(accelerator.gather(loss.detach()).item())
            if progress["batches"] % options.save == 0:
                accelerator.save_state(options.out)
            if progress["batches"] == options.kill:
                os._exit(3)                          # as if the machine had been taken away
    return progress


def main(argv: list[str] | None = None) -> tuple[list[float], list[int]]:
    parser = argparse.ArgumentParser(description="Train a small GPT with accelerate.")
    parser.add_argument("--out", default="accelerated-out")
    for name, default in ("dp", 2), ("tp", 2), ("accumulate", 2), ("save", 4), ("kill", 0):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    for name in "plain", "resume", "bf16":
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    library: Any = accelerate.Accelerator if options.plain else Accelerator                             # 1
    accelerator = library(cpu=True, gradient_accumulation_steps=options.accumulate,                     # 2
                          mixed_precision="bf16" if options.bf16 else "no",
                          dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5))
    accelerate.utils.set_seed(1)
    model = GPT(VOCAB, SEQ, 2, 16, 2, options.dropout)
    if not options.plain:
        ranks = torch.arange(options.dp * options.tp).view(options.dp, options.tp)
        gt.parallelize(model, gt.placement("cpu", ranks.tolist(), ("dp", "tp")))                        # 3
    text = torch.randint(VOCAB, (ROWS, SEQ + 1))
    data = TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())
    progress = train(options, accelerator, model, data)
    model.eval()
    said = []
    for ids, _ in accelerator.prepare(DataLoader(data, batch_size=BATCH)):
        with torch.no_grad():
            said.append(accelerator.gather_for_metrics(model(ids)[:, -1].argmax(-1)))
    accelerator.save_model(model, Path(options.out) / "model")
    return progress["losses"], torch.cat(said).tolist()


if __name__ == "__main__":
    result = main()
    if gt.rank() == 0:
        print(result)
