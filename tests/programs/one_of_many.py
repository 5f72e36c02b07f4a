"""The first steps of the example GPT on one rank of a large world. Messages to the others are dropped, and what they
would send is zeros, which are numbers of tokens too; so only time and memory mean something.

Prints the seconds of making the model global and of each step, and the MB that the first step leaves behind; then the
milliseconds of the decisions of the first step, the median and the slowest tenth. With a second argument, the ranks
are on four axes, and its "uneven" makes sizes that no axis divides.
"""
import pathlib
import statistics
import sys
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.dispatch import core
from globaltensor.runtime import agreement, collectives, machine, world

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from gpt import GPT

RANKS, TP, AXES = int(sys.argv[1]), 8, sys.argv[2] if len(sys.argv) > 2 else ""


class Done:
    """A message or a collective that has ended."""

    def wait(self, *_):
        return True

    is_completed = wait


def receive(tensor, *_):
    """From a peer, who sends zeros."""
    tensor.zero_()
    return Done()


def collective(call):
    """Of peers who give zeros, too; only a sum has something of our own."""
    if call.result is not call.source:
        call.result.zero_()
    return Done()


@contextmanager
def no_wait(*_):
    yield []


dist.isend, dist.irecv = lambda *_: Done(), receive
collectives._start, collectives._group_of = collective, lambda ranks, type: None
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


decisions = []


def timed(*call, decide=core.decide):
    began = time.thread_time()                       # of the CPU, whatever else runs
    decision = decide(*call)
    decisions.append((time.thread_time() - began) * 1e3)
    return decision


core.decide = timed
if AXES:
    names, axes = ("pod", "dp", "sp", "tp"), (-1, 16, 8, TP)
    vocabulary, length, hidden, rows = (251, 67, 72, 265) if AXES == "uneven" else (256, 64, 64, 256)
else:
    names, axes = ("dp", "tp"), (-1, TP)
    vocabulary, length, hidden, rows = 256, 64, 64, RANKS // TP
model = GPT(vocabulary, length, 2, hidden, 8)
ids = torch.randint(vocabulary, (rows, length + 1))
where = gt.placement("cpu", torch.arange(RANKS).reshape(axes), axis_names=names)
layout = [gt.sbp.split(0) if name in ("pod", "dp") else gt.sbp.broadcast for name in names]


def step():
    own = gt.from_full(ids, where, layout)
    F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


spread = lap(lambda: gt.parallelize(model, where, gt.Plan.of(model, "tp")))
before = resident()
first = lap(step)
slowest = sorted(decisions)[len(decisions) * 9 // 10]
print(spread, first, lap(step), resident() - before, statistics.median(decisions), slowest)
