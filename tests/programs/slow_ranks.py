"""Eight ranks train, save and load for some minutes, and none of them is fast: slow_ranks.py MINUTES FOLDER.

Rank 5 takes ten times as long as the others for a step. Every minute another rank, first in a step, then in a save,
then in a load, sits in a C call that keeps the interpreter's lock for 30 seconds. Nobody may take that for a death:
rank 0 prints how many steps, saves and calls there were, and the last loss.
"""
import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import globaltensor as gt
from globaltensor.checkpoint import loading, saving

minutes, folder = float(sys.argv[1]), Path(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
slow, calls, armed = 5, 0, ""


def keep_the_lock(*_):
    ctypes.PyDLL(None).usleep(30_000_000)


def before(module, name, place):
    """There the rank whose turn it is keeps the lock."""
    then = getattr(module, name)

    def function(*args, **keywords):
        global armed
        if armed == place:
            armed = ""
            keep_the_lock()
        return then(*args, **keywords)

    setattr(module, name, function)


before(saving, "write_hashed", "save")
before(loading, "read_manifest", "load")
where = gt.placement("cpu", list(range(ranks)))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
gt.to_global(model, where, gt.sbp.broadcast)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = gt.randn(16 * ranks, 64, placement=where, sbp=gt.sbp.split(0))
began, steps, saves, loss = time.monotonic(), 0, 0, x.sum()
while True:
    step_began = time.perf_counter()
    loss = (model(x) - x).square().mean()
    loss.backward()
    if armed == "step":
        armed = ""
        keep_the_lock()
    optimizer.step()
    optimizer.zero_grad()
    if rank == slow:
        time.sleep(min(9 * (time.perf_counter() - step_began), 5))   # not of a call of 30 s
    steps += 1
    if steps % 20 == 0:
        passed = gt.from_local(torch.tensor([time.monotonic() - began]), where, gt.sbp.partial_max).item()
        if passed > 60 * minutes:
            break
        if passed // 60 >= calls:                    # of the next rank, in the next place
            armed = ("step", "save", "load")[calls % 3] if rank == (3 * calls + 1) % ranks else ""
            calls += 1
        gt.save(model.state_dict(), folder)
        gt.load(model.state_dict(), folder)
        saves += 1
if rank == 0:
    print(f"{steps} steps, {saves} saves, {calls} calls, loss {loss.item()}")
else:
    loss.item()
