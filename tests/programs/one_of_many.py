"""The first steps of the example GPT on one rank of a large world. Nothing comes from the others: messages to them are
dropped, and what they would send is whatever lies in memory, so only time and memory mean something.

Prints the seconds of making the model global and of each step, and the MB that the first step leaves behind.
"""
import pathlib
import sys
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.runtime import agreement, collectives, machine, world

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from gpt import GPT

RANKS, TP = int(sys.argv[1]), 8


class Done:
    """A message or a collective that has ended."""

    def wait(self, *_):
        return True

    is_completed = wait


class Message:
    """To or from a peer."""

    def __init__(self, move, tensor, peer, *_):
        self.peer = peer


@contextmanager
def no_wait(*_):
    yield []


dist.P2POp, dist.batch_isend_irecv = Message, lambda messages: [Done() for _ in messages]
collectives._start, collectives._group_of = lambda call: Done(), lambda ranks, type: None
collectives._check_next = lambda ranks, tag: []
agreement._all_gather = lambda mine, sizes, what, tag: [mine] * len(sizes)
for module in list(sys.modules.values()):
    if module.__name__.startswith("globaltensor") and hasattr(module, "waiting_for"):
        module.waiting_for = no_wait
world.begin(world.World(RANKS, (5,), machine.gloo, "stand-in"))


def resident():
    """MB."""
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6


def lap(do):
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


model = GPT(256, 64, 2, 64, 8)
ids = torch.randint(256, (RANKS // TP, 65))
where = gt.placement("cpu", torch.arange(RANKS).reshape(-1, TP), axis_names=("dp", "tp"))


def step():
    own = gt.from_full(ids, where, (gt.sbp.split(0), gt.sbp.broadcast))
    F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


spread = lap(lambda: gt.parallelize(model, where, gt.Plan.of(model, "tp")))
before = resident()
first = lap(step)
print(spread, first, lap(step), resident() - before)
