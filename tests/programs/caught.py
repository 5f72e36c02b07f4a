"""Ranks that catch the error of a disagreement, or of a deadlock, and go on: later errors name that one."""
import sys

import globaltensor as gt

how = sys.argv[1]
odd = gt.rank() == 1
x = gt.ones(8, 4, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
try:
    if how == "values":
        (x * (gt.rank() + 1)).sum().item()
    if how == "targets":
        x.to_global(sbp=gt.sbp.split(1) if odd else gt.sbp.broadcast)
except gt.DisagreementError as error:
    print("caught", str(error).splitlines()[0], "at", error.where)
for _ in range(2):
    try:
        print("the value is", (x * 2).sum().item())
    except gt.GlobalTensorError as error:
        print(type(error).__name__, error)
