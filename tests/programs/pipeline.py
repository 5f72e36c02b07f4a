"""Trains small models by pipeline schedules and writes what came out: <folder>/<rank>.json, case -> losses and bits.

Each case is a function of the number of ranks; the same in one process that drives all ranks, and in one for each.
"""
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt
from globaltensor.runtime.agreement import gather_objects

torch.set_default_dtype(torch.float64)


def place(*ranks, names=None):
    return gt.placement("cpu", list(ranks) if names is None else ranks[0], names)


class Net(nn.Module):
    """Token ids [b, t] -> logits [b, t, 11]: embedding, blocks with dropout, head. Cut anywhere."""

    def __init__(self, blocks=8, width=12, dropout=0.0, tied=False):
        super().__init__()
        self.token = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout),
                                                  nn.LayerNorm(width)) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def layers(self):
        return nn.Sequential(self.token, *self.blocks, self.head)


def loss_of(logits, targets):
    return F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))


def train(model, stages, places, schedule, steps=2, zero=0, lengths=(5,), loss=loss_of, batch=8, kept=False, **options):
    """Losses of some steps, the norm that was clipped, and the bits of all parameters and buffers afterwards. `kept`:
    gradients of a step are added to those of the one before it."""
    torch.manual_seed(1)
    runner = gt.pipeline(stages, places, schedule, loss=loss, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if zero:
        gt.zero(optimizer, "dp", zero)
    found = []
    for step in range(steps):
        ids = torch.randint(11, (batch, lengths[step % len(lengths)] + 1))
        value = runner.step(ids[:, :-1], ids[:, 1:]).item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        if not kept:
            optimizer.zero_grad()
        found += [value, norm]
    ids = torch.randint(11, (batch, lengths[0] + 1))
    model.eval()
    found.append(zlib.crc32(runner.eval(ids[:, :-1]).full_tensor().numpy().tobytes()))
    found.append(runner.eval(ids[:, :-1], ids[:, 1:]).item())
    bits = {name: zlib.crc32(t.full_tensor().numpy().tobytes()) for name, t in model.state_dict().items()}
    return {"steps": found, "bits": bits}


def simple(schedule, ranks, **options):
    torch.manual_seed(0)
    model = Net(**{k: options.pop(k) for k in ("dropout", "tied", "blocks") if k in options})
    return train(model, model.layers(), [place(r) for r in range(ranks)], schedule, **options)


class Skipping(nn.Module):
    """(x, skip) -> (next x, skip), for as long as nobody adds the skip in."""

    def __init__(self, adds):
        super().__init__()
        self.linear, self.adds = nn.Linear(6, 6), adds

    def forward(self, x, skip=None):
        skip = x if skip is None else skip
        x = torch.tanh(self.linear(x))
        return x + skip if self.adds else (x, skip)


def skip(ranks):
    torch.manual_seed(0)
    stages = nn.ModuleList(Skipping(k == ranks - 1) for k in range(ranks))
    runner = gt.pipeline(list(stages), [place(r) for r in range(ranks)], "1f1b", 3, F.mse_loss)
    x = torch.randn(7, 6)
    value = runner.step((x, x * 2), x).item()
    return {"steps": [value], "bits": {n: zlib.crc32(p.grad.full_tensor().numpy().tobytes())
                                       for n, p in stages.named_parameters()}}


class InTraining(nn.Module):
    """Gives two tensors in training and one otherwise; writes to its input."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.0)

    def forward(self, x, extra=None):
        x = self.linear(x.mul_(2) if extra is None else x.add_(extra))
        return (x, x.sin()) if self.dropout.training else x


def in_turn(ranks, changes, **options):
    """Steps between which something changes that decides what stages pass to each other."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(InTraining() for _ in range(ranks))
    runner = gt.pipeline([nn.Sequential(block) if not k else block for k, block in enumerate(blocks)],
                         [place(r) for r in range(ranks)], "1f1b", 3,
                         lambda y, x: F.mse_loss(y[0] if isinstance(y, tuple) else y, x), **options)
    x, found = torch.randn(8, 6), []
    for step in range(4):
        changes(blocks, step)
        found += [runner.step(x, x).item(), runner.eval(x, x).item()]
    return {"steps": found, "bits": {n: zlib.crc32(p.grad.full_tensor().numpy().tobytes())
                                     for n, p in blocks.named_parameters() if p.grad is not None}}


def freeze(blocks, step):
    for k, block in enumerate(blocks):
        block.requires_grad_((k + step) % 3 == 0 or k == len(blocks) - 1)


def switch(blocks, step):
    blocks.train(step % 2 == 0)


def normed(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(ranks) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6))))
    stages = [model[2 * k:2 * k + 2] for k in range(ranks)]
    runner = gt.pipeline(stages, [place(r) for r in range(ranks)], "1f1b", 3, F.mse_loss, recompute=True)
    x = torch.randn(8, 6)
    value = runner.step(x, x).item()
    return {"steps": [value], "bits": {n: zlib.crc32(t.full_tensor().numpy().tobytes())
                                       for n, t in model.state_dict().items()}}


def events(ranks):
    torch.manual_seed(0)
    model = Net()
    runner = gt.pipeline(model.layers(), [place(r) for r in range(ranks)], "zb-h1", 4, loss_of)
    runner.step(torch.zeros(8, 5, dtype=torch.long), torch.zeros(8, 5, dtype=torch.long)).item()
    seen = runner.gathered_events()
    ordered = all(a.end <= b.start for r in range(ranks) for own in [[e for e in seen if e.rank == r]]
                  for a, b in zip(own, own[1:]))
    return {"steps": [len(seen), ordered], "bits": {}}


def hybrid(schedule, names, zero=0, **options):
    """Two stages of two ranks each, split along dp or tp."""
    torch.manual_seed(0)
    model = Net(tied=options.pop("tied", False))
    places = [place([[0], [1]] if names == "dp" else [[0, 1]], names=("dp", "tp")),
              place([[2], [3]] if names == "dp" else [[2, 3]], names=("dp", "tp"))]
    if names == "tp":
        rows = {"*.0.weight": {"tp": gt.sbp.split(0)}, "*.0.bias": {"tp": gt.sbp.split(0)},
                "head.weight": {"tp": gt.sbp.split(0)}}
        gt.parallelize(model, places[0], gt.Plan(rows))
    return train(model, model.layers(), places, schedule, zero=zero, **options)


def uneven():
    """A stage on three ranks, the other on one."""
    torch.manual_seed(0)
    model = Net()
    places = [place([0, 1, 2], names=("dp",)), place([3], names=("dp",))]
    return train(model, model.layers(), places, "1f1b", batch=9)


class _Nap(torch.autograd.Function):
    """Takes a while on the ranks that do the work, forward and backward."""

    seconds = 0.0

    @staticmethod
    def forward(ctx, x):
        if x.shards:
            time.sleep(_Nap.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if grad.shards:
            time.sleep(_Nap.seconds)
        return grad


class Napping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return _Nap.apply(x * self.weight)


def timed(run):
    """Seconds of the slower rank, after a run without naps that finds out what there is to know."""
    seconds = 0.0
    for _Nap.seconds in (0.0, 0.1):
        gather_objects((), "a start together")
        began = time.perf_counter()
        run()
        seconds = max(gather_objects((time.perf_counter() - began,), "an end together"))[0]
    return seconds


def overlap():
    """4 micro-batches through 2 stages that sleep."""
    places, x = [place(0), place(1)], torch.ones(4, 2)
    found = {}
    for name in ("gpipe", "1f1b", "zb-h1"):
        runner = gt.pipeline([Napping(), Napping()], places, name, 4, lambda y: y.mean())
        found[name] = timed(lambda: runner.step(x))
    found["eval"] = timed(lambda: runner.eval(x))
    stages = [gt.to_global(Napping(), where) for where in places]
    parts = [gt.from_full(part, places[0], gt.sbp.broadcast) for part in x.chunk(4)]

    def forward():
        return sum(stages[1](stages[0](part).to_global(places[1])).mean() for part in parts)

    found["eager forward"] = timed(forward)
    found["eager"] = timed(lambda: forward().backward())
    return {"seconds": found}


class Dying(nn.Linear):
    def forward(self, x):
        Dying.calls = getattr(Dying, "calls", 0) + 1
        if gt.rank() == 2 and Dying.calls == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def dies():
    """Rank 2 of 4 ends in its second step."""
    stages = [Dying(4, 4) for _ in range(4)]
    runner = gt.pipeline(stages, [place(r) for r in range(4)], "1f1b", 4, F.mse_loss)
    began = time.perf_counter()
    try:
        for _ in range(20):
            began = time.perf_counter()
            runner.step(torch.ones(8, 4), torch.ones(8, 4))         # the line that must be named
    finally:
        print(f"after {time.perf_counter() - began:.2f} s", flush=True)


class Rounding(nn.Linear):
    rounds = False

    def forward(self, x):
        return super().forward(x).float() if self.rounds else super().forward(x)


def misfits():
    """Errors: of stages that do not fit, of a loss and its targets after a step, of a stage that changes by itself."""
    found = {}

    def caught(name, run):
        try:
            run()
        except gt.GlobalTensorError as error:
            found[name] = [type(error).__name__, str(error)]

    x, places = torch.ones(4, 4), [place(0), place(1)]
    caught("error", lambda: gt.pipeline([nn.Linear(4, 5), nn.Linear(6, 4)], places, "1f1b", 4, F.mse_loss).step(x, x))
    stages = gt.pipeline([Rounding(4, 4), nn.Linear(4, 4)], places, "1f1b", 2, lambda y, x: F.mse_loss(y.double(), x))
    stages.step(x, x)
    caught("rows", lambda: stages.step(x, torch.ones(8, 4)))
    stages.stages[0].rounds = True
    caught("later", lambda: stages.step(x, x))
    return found


def cases(ranks):
    for name in ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        yield name, lambda name=name: simple(name, ranks)
    yield "few micro-batches", lambda: simple("zb-v", ranks, micro_batches=1)
    yield "uneven micro-batches", lambda: simple("interleaved", ranks, micro_batches=3)
    yield "fewer rows than micro-batches", lambda: simple("zb-h1", ranks, batch=3)
    yield "dropout", lambda: simple("1f1b", ranks, dropout=0.3)
    yield "recomputed dropout", lambda: simple("zb-h1", ranks, dropout=0.3, recompute=True)
    yield "tied", lambda: simple("1f1b", ranks, tied=True)
    yield "tied on one rank", lambda: simple("zb-v", ranks, tied=True)
    yield "lengths", lambda: simple("1f1b", ranks, steps=3, lengths=(5, 3, 7))
    yield "skip", lambda: skip(ranks)
    yield "batch norm", lambda: normed(ranks)
    yield "events", lambda: events(ranks)
    yield "frozen in turn", lambda: in_turn(ranks, freeze)
    yield "training and not", lambda: in_turn(ranks, switch, recompute=True)
    if ranks == 4:
        yield "dp", lambda: hybrid("1f1b", "dp")
        yield "dp, zero 1", lambda: hybrid("1f1b", "dp", zero=1)
        yield "dp, zero 1, gradients that stay", lambda: hybrid("1f1b", "dp", zero=1, kept=True)
        yield "dp, zero 2", lambda: hybrid("zb-h1", "dp", zero=2, tied=True)
        yield "tp", lambda: hybrid("interleaved", "tp")
        yield "tp, zb-v", lambda: hybrid("zb-v", "tp", recompute=True)
        yield "three and one", uneven


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    apart = {"overlap": overlap, "dies": dies, "misfits": misfits}
    known = {**dict(cases(gt.world_size())), **apart}
    found = {name: known[name]() for name in wanted or [name for name in known if name not in apart]}
    (folder / f"{gt.rank()}.json").write_text(json.dumps(found))
