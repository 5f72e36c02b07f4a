"""Lightning's Trainer on a global GPT: dp x tp ranks, and one line that differs from the program for one device.

    python examples/lightning_trainer.py                        one process drives all ranks
    globaltensor run -n 4 examples/lightning_trainer.py         one process per rank
    globaltensor run -n 4 examples/lightning_trainer.py --resume    goes on where the last one was ended

`--plain` runs the same program without the line.
"""
from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from gpt import GPT
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import globaltensor as gt
from globaltensor.trainers.lightning import GlobalTensorStrategy

VOCAB, SEQ, ROWS, BATCH, EPOCHS = 32, 12, 21, 4, 3                     # the last batch has one row


class Language(lightning.LightningModule):
    """A GPT that is trained to say the next word."""

    def __init__(self, kill: int) -> None:
        super().__init__()
        self.gpt, self.kill = GPT(VOCAB, SEQ, 2, 16, 2), kill
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if self.kill and self.global_step == self.kill:
            os._exit(3)                              # as if the machine had been taken away
        ids, target = batch
        loss = F.cross_entropy(self.gpt(ids).flatten(0, 1), target.flatten())
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        ids, target = batch
        said = self.gpt(ids)
        self.log("val_loss", F.cross_entropy(said.flatten(0, 1), target.flatten()), prog_bar=True)
        self.log("val_right", (said.argmax(-1) == target).float().mean())

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.gpt(batch[0])[:, -1].argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def main(argv: list[str] | None = None) -> tuple[list[float], list[float], list[int]]:
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning.")
    parser.add_argument("--out", default="lightning-out")
    for name, default in ("dp", 2), ("tp", 2), ("accumulate", 2), ("kill", 0):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="32-true")
    for name in "plain", "resume":
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    ranks = torch.arange(options.dp * options.tp).view(options.dp, options.tp).tolist()
    lightning.seed_everything(1, verbose=False)
    module = Language(options.kill)
    text = torch.randint(VOCAB, (ROWS, SEQ + 1))
    data = TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())
    loader, rest = DataLoader(data, batch_size=BATCH), DataLoader(data, batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, default_root_dir=options.out, precision=options.precision,
        strategy="auto" if options.plain else GlobalTensorStrategy(gt.placement("cpu", ranks, ("dp", "tp"))),
        accumulate_grad_batches=options.accumulate, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
        callbacks=[ModelCheckpoint(options.out, monitor="val_loss", save_last=True)])
    trainer.fit(module, loader, rest, ckpt_path=Path(options.out) / "last.ckpt" if options.resume else None)
    validated = trainer.validate(module, rest, verbose=False)[0]
    said: Any = trainer.predict(module, rest)
    return module.losses, [*validated.values()], torch.cat(said).tolist()


if __name__ == "__main__":
    result = main()
    if gt.rank() == 0:
        print(result)
