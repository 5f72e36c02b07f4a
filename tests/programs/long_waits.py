"""Rank 0 waits for rank 1, again and again, and prints how much of a core it needs for that: long_waits.py TIMES."""
import sys
import time

import torch

import globaltensor as gt

where = gt.placement("cpu", [0, 1])


def meet() -> None:
    gt.from_local(torch.ones(4), where, gt.sbp.partial_sum).to_global(where, gt.sbp.broadcast)


meet()
taken = waited = 0.0
for _ in range(int(sys.argv[1])):
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:               # as long as it takes until another program gets its turn
        pass
    if gt.rank() == 1:
        time.sleep(0.1)
    began, at = time.thread_time(), time.perf_counter()
    meet()
    taken += time.thread_time() - began
    waited += time.perf_counter() - at
if gt.rank() == 0:
    print("waited", waited, "of a core", taken)
