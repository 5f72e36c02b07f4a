"""Two ranks save and load in turns, each in its own view of a folder, where what the other did is seen late."""
import sys
from pathlib import Path

import torch

import globaltensor as gt

folder, count = Path(sys.argv[1]), int(sys.argv[2])
where = gt.placement.all("cpu")


def state(n):
    return {"x": gt.full((1000, 50), float(n), placement=where, sbp=gt.sbp.split(0)), "n": n}


for n in range(1, count + 1):
    saved = gt.save(state(n), folder, keep=2, asynchronous=n % 2 == 0)
    if n % 2 == 0:
        saved.wait()
    again = gt.load(state(0), folder)
    assert again["n"] == n and torch.equal(again["x"].full_tensor(), torch.full((1000, 50), float(n))), (n, again)
print("all came back")
