"""A job that waits until FOLDER/attacked is there, communicating all the while, and then checks a sum."""
from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import globaltensor as gt

folder = Path(sys.argv[1])
placement = gt.placement.all("cpu")
x = gt.ones(4, placement=placement, sbp=gt.sbp.split(0))
Path(folder, f"started {gt.rank()}").touch()
for _ in range(600):
    seen = torch.full((1,), float(gt.rank() == 0 and (folder / "attacked").exists()))
    over = gt.from_local(seen, placement, gt.sbp.partial_sum)
    if over.item():
        break
    time.sleep(0.1)
print(f"rank {gt.rank()}: {x.sum().item()}")
