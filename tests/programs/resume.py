"""Trains a small model on all ranks from the last checkpoint in FOLDER to step STEPS, and saves one at every step.

The first process says, a line of JSON each: from which step it goes on and which processes there are; of each step the
samples, the learning rate and the bits of the loss; that it was saved; and in the end a hash of all weights.
"""
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast


class Samples(Dataset):
    """51 samples with noise, which is drawn anew in each epoch."""

    def __len__(self):
        return 51

    def __getitem__(self, i):
        return {"x": torch.sin(torch.arange(16.0) * i) + 0.1 * torch.randn(16), "kind": i % 4, "which": i}


def made(where):
    """All that a run has to remember."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 32),
                          nn.Dropout(0.3), nn.Linear(32, 4)).to_global(where, B)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8),
            "data": gt.data.DataLoader(Samples(), 8, where, S(0), shuffle=True, seed=3), "rng": torch.get_rng_state(),
            "step": 0}


def train(folder, where, steps, say):
    state = made(where)
    if (folder / "latest").exists():
        state = gt.load(state, folder)
        torch.set_rng_state(state["rng"])
    say({"from": state["step"], "pid": os.getpid()})
    while state["step"] < steps:
        for batch in state["data"]:
            loss = step(state, batch)
            say({"step": state["step"], "loss": loss.hex(), "samples": batch["which"].tolist(),
                 "rate": state["schedule"].get_last_lr()[0].hex()})
            gt.save(state, folder, keep=2)
            say({"saved": state["step"]})
            if state["step"] == steps:
                break
    say({"weights": weights(state)})


def step(state, batch):
    """One step; the state is then as it is to be saved."""
    loss = nn.functional.cross_entropy(state["model"](batch["x"]), batch["kind"])
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    state["step"] += 1
    state["rng"] = torch.get_rng_state()
    return loss.item()


def weights(state):
    """A hash of the parameters and of the optimizer's state."""
    moments = [t for each in state["optimizer"].state.values() for t in each.values()]
    found = hashlib.sha256()
    for t in [*state["model"].parameters(), *moments]:
        found.update((t.detach().full_tensor() if t.is_global else t).numpy().tobytes())
    return found.hexdigest()


def say(what):
    if gt.rank() == 0 or "pid" in what:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), gt.placement.all("cpu"), int(sys.argv[2]), say)
