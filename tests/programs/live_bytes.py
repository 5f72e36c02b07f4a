"""A plan of a pipeline of two stages, each on two ranks of dp, under ZeRO: each rank prints planned over live bytes.

    python live_bytes.py MODEL MICRO_BATCH ZERO
"""
import sys

import torch

import globaltensor as gt
from benchmarks.planned import build, live_peak, take_step
from globaltensor.simulator.cluster import KNOWN

gt.init()
torch.set_num_threads(1)
name, micro_batch, zero = sys.argv[1], *map(int, sys.argv[2:])
one = build(name, small=name == "gpt")
strategy = gt.strategy(one.model, one.inputs, KNOWN["dgx-a100"], 4, loss=one.loss, targets=one.targets, dp=2, tp=1,
                       pp=2, schedule="1f1b", micro_batch=micro_batch, zero=zero, recompute="none")
runner, optimizer = strategy.apply(one.model, one.loss, torch.optim.AdamW)
take_step(one, runner, optimizer)
sys.stdout.write(f"{strategy['memory']['per_rank'][gt.rank() // 2] / live_peak(one, runner, optimizer)}\n")
