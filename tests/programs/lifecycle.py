"""Trains by gt.resume, and something happens to it: lifecycle.py FOLDER STEPS [FAULT RANK STEP].

The first rank writes of each step that it has done its number and the bits of the loss into FOLDER/said. The fault
happens once, to the rank named, before that step. """
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import globaltensor as gt

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
fault, victim, when = (sys.argv[3], int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 3 else ("", -1, 0)

where = gt.placement.all("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 4)).to_global(where, gt.sbp.broadcast)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
samples = [{"x": torch.sin(torch.arange(16.0) * i), "kind": i % 4} for i in range(48)]
loader = gt.data.DataLoader(samples, 12, where, gt.sbp.split(0), shuffle=True, seed=3)
state = gt.resume({"model": model, "optimizer": optimizer, "data": loader, "step": 0}, folder / "checkpoint")


def say(**what):
    if gt.rank() == 0:
        with open(folder / "said", "a") as file:
            file.write(json.dumps(what) + "\n")


def strike():
    """Once: the file says that it has happened."""
    mark = folder / "struck"
    if gt.rank() != victim or state["step"] + 1 != when or mark.exists():
        return
    mark.touch()
    match fault:
        case "KILL" | "SEGV" | "STOP" | "TERM" | "USR1":
            os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))
        case "launcher TERM" | "launcher USR1":
            os.kill(os.getppid(), getattr(signal, f"SIG{fault.split()[1]}"))
        case "raise":
            raise ValueError("bad luck")


say(ranks=gt.world_size(), start=state["step"], restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
while state["step"] < steps:
    for batch in loader:
        strike()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["kind"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        say(step=state["step"], loss=loss.item().hex())
        asked_to_end = gt.preempted()
        if asked_to_end or state["step"] % 3 == 0 or state["step"] == steps:
            if asked_to_end:
                time.sleep(float(os.environ.get("SAVES_FOR", 0)))
            gt.save(state, folder / "checkpoint", keep=2)
        if asked_to_end:
            say(ended=state["step"])
            sys.exit(gt.REQUEUE)
        if state["step"] == steps:
            break
