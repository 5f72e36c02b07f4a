"""Whole steps of training, compiled: forward, backward, the optimizer's step, zero_grad. As many graphs as plain torch.

Oracle: the same steps in plain torch, uncompiled for values and compiled for the number of graphs.
"""
from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from harness import PROGRAMS, RUN, good
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

SEED, STEPS = 59, 10
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B = gt.sbp.split, gt.sbp.broadcast
LONG = pytest.mark.long
PLACES = {"dp": ([0, 1], ("dp",)), "tp": ([0, 1], ("tp",)), "dp x tp": ([[0, 1], [2, 3]], ("dp", "tp"))}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


class Trained:
    """Losses, parameters, and how many graphs there were after each step."""

    def __init__(self, place, optimizer, compiled, stage=0, micro_batches=1):
        torch.manual_seed(SEED)
        self.model, self.graphs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), 0
        batches = torch.randn(STEPS, micro_batches, 4, 4)
        where = gt.placement("cpu", *PLACES[place]) if place else None
        if where is not None:
            gt.parallelize(self.model, where, {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}} if "tp" in place else {})
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        if stage:
            gt.zero(self.optimizer, "dp", stage)
        self.forward, self.take = self.model, self.optimizer.step
        step = self.step if micro_batches == 1 else self.accumulated
        if compiled == "optimizer":
            self.take = torch.compile(self.take, backend=self.counted)
        elif compiled == "model and optimizer":
            self.forward, self.take = (torch.compile(f, backend=self.counted) for f in (self.model, self.take))
        elif compiled:
            step = torch.compile(step, backend=self.counted)
        self.losses, self.counts, self.moved = [], [], []
        for batch in batches:
            if where is not None:
                batch = gt.from_full(batch, where, {"dp": S(1)} if "dp" in place else B)
            with gt.record() as moves:
                loss = step(batch).detach()
            self.moved.append(sum(move.op == "gradient" for move in moves))
            self.losses.append(loss.full_tensor() if place else loss)
            self.counts.append(self.graphs)
        self.parameters = [p.detach().full_tensor() if place else p.detach() for p in self.model.parameters()]

    def counted(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(self, batch):
        loss = F.mse_loss(self.forward(batch[0]), batch[0, :, 2:])
        loss.backward()
        self.take()
        self.optimizer.zero_grad()
        return loss

    def accumulated(self, batch):
        for x in batch:
            loss = F.mse_loss(self.forward(x), x[:, 2:])
            loss.backward()
        self.take()
        self.optimizer.zero_grad()
        return loss


def check(place, optimizer, compiled, **options):
    micro_batches = options.get("micro_batches", 1)
    ours = Trained(place, optimizer, compiled, **options)
    plain = Trained("", optimizer, "", micro_batches=micro_batches)
    torch.testing.assert_close((ours.losses, ours.parameters), (plain.losses, plain.parameters), msg=f"seed {SEED}")
    torch.compiler.reset()
    return ours, Trained("", optimizer, compiled, micro_batches=micro_batches)


def cases(*quick):
    return pytest.mark.parametrize("place, optimizer", [
        pytest.param(place, optimizer, marks=[] if (place, optimizer) in quick else LONG)
        for place in PLACES for optimizer in OPTIMIZERS])


@cases(("dp", "SGD foreach"))
def test_a_whole_step_is_compiled_for_the_first_gradients_and_once_more(place, optimizer):
    ours, plain = check(place, optimizer, "whole")
    assert ours.counts == plain.counts and ours.counts[0] > 0, (ours.counts, plain.counts)
    assert ours.counts[1] <= ours.counts[0] + 1 and ours.counts[1:] == ours.counts[1:2] * (STEPS - 1)
    assert ours.moved == ["dp" in place] * STEPS     # one boxing of all gradients a step, whoever asks first


@cases(("dp", "SGD foreach"), ("tp", "AdamW"), ("dp x tp", "AdamW fused"))
def test_a_compiled_optimizer_takes_gradients_that_are_pending(place, optimizer):
    ours, plain = check(place, optimizer, "optimizer")
    assert ours.counts == plain.counts, (ours.counts, plain.counts)
    assert ours.moved == ["dp" in place] * STEPS


@pytest.mark.parametrize("stage", [pytest.param(1, marks=LONG), 2, pytest.param(3, marks=LONG)])
def test_a_compiled_optimizer_under_zero(stage):
    ours, plain = check("dp", "SGD foreach", "optimizer", stage=stage)
    assert ours.counts == plain.counts and ours.counts[-1] > 0, (ours.counts, plain.counts)


def of_matrices(p):
    return [one for one in p if one.dim() == 2]


STEPPED = {f"{kind.__name__} {'foreach' if foreach else 'one by one'}":
           lambda p, kind=kind, options=options, foreach=foreach: kind(p, 0.01, foreach=foreach, **options)
           for kind, options in [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {}),
                                 (torch.optim.RMSprop, {}), (torch.optim.Adagrad, {})] for foreach in (False, True)}
STEPPED["Muon"] = lambda p: torch.optim.Muon(of_matrices(p), 0.01)
TAKEN_AS = {"method": lambda optimizer: optimizer.step, "function": lambda optimizer: lambda: optimizer.step()}
WITH_GRADIENTS = [2, 2, 1, 2, 0, 1, 2]               # so many of the layers have one, step by step


def stepped(make, stage, backend, taken_as):
    """The parameters after some steps, and how many graphs there were after each."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    where = gt.placement("cpu", *PLACES["dp"])
    optimizer = make((gt.parallelize(layers, where, {}) if stage is not None else layers).parameters())
    if stage:
        gt.zero(optimizer, "dp", stage)
    graphs, counts = [], []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    take = TAKEN_AS[taken_as](optimizer)
    take = torch.compile(take, backend=counted) if backend else take
    for n in WITH_GRADIENTS:
        x = torch.randn(4, 4)
        layers[:n](gt.from_full(x, where, S(0)) if stage is not None else x).square().mean().backward(
            ) if n else optimizer.zero_grad()
        take()
        optimizer.zero_grad()
        counts.append(len(graphs))
    return [p.detach().full_tensor() if stage is not None else p.detach() for p in layers.parameters()], counts


QUICK = {("Muon", 1, "eager", "function"), ("Adam one by one", 2, "aot_eager", "method"),
         ("RMSprop foreach", 3, "eager", "function"), ("Adagrad foreach", 2, "aot_eager", "method")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, stage, backend, taken_as", [
    pytest.param(*case, marks=[] if case in QUICK else LONG, id=" ".join(map(str, case)))
    for case in [*product(STEPPED, (1, 2, 3), ("eager", "aot_eager"), TAKEN_AS),
                 ("AdamW foreach", 2, "inductor", "method")]])
def test_compiled_optimizers_under_zero_where_gradients_are_missing_at_times(name, stage, backend, taken_as):
    got, counts = stepped(STEPPED[name], stage, backend, taken_as)
    want, _ = stepped(STEPPED[name], None, None, taken_as)
    _, plain_counts = stepped(STEPPED[name], None, backend, taken_as)
    torch.testing.assert_close(got, want, msg=f"seed {SEED}")
    assert counts[-1] > 0, counts
    assert all(n <= most for n, most in zip(counts, plain_counts, strict=True)), (counts, plain_counts)


def test_one_graph_of_a_step_under_zero_is_an_error_that_says_why():
    layer = gt.parallelize(nn.Linear(4, 4), gt.placement("cpu", *PLACES["dp"]), {})
    optimizer = gt.zero(torch.optim.SGD(layer.parameters(), 0.1, foreach=True), "dp", 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="before a step of an optimizer under gt.zero"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.usefixtures("real_processes")
def test_no_function_of_the_library_is_compiled_by_itself():
    """In a new process, in which nothing has been compiled before."""
    assert good([sys.executable, PROGRAMS / "compiled_by_itself.py"], timeout=300).split() == ["right"]


def test_micro_batches_of_a_compiled_model_are_reduced_once():
    ours, plain = check("dp", "SGD foreach", "model and optimizer", micro_batches=3)
    assert ours.counts == plain.counts and ours.moved[2:] == [1] * (STEPS - 2), (ours.counts, ours.moved)


def test_an_error_of_a_reduction_in_a_guard_is_raised():
    parameter = nn.Parameter(gt.ones(2, placement=gt.placement("cpu", [0, 1], ("dp",)), sbp=B))
    x = gt.from_full(torch.ones(4, 2), parameter.placement, S(0))
    optimizer = torch.optim.SGD([parameter], 0.5)
    take = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        optimizer.zero_grad()
        (x * parameter).sum().backward()
        take()
    optimizer.zero_grad()
    (x * parameter).sum().backward()
    with pytest.raises(RuntimeError, match="gradient needs a boxing"), gt.boxing("forbid"):
        take()
    assert parameter.full_tensor().tolist() == [-3.0, -3.0]
    take()
    assert parameter.full_tensor().tolist() == [-5.0, -5.0]


@LONG
@pytest.mark.processes
def test_every_process_makes_its_graphs_at_the_same_steps():
    said = good([*RUN, "-n", "2", PROGRAMS / "compiled_steps.py"], timeout=300).split()
    assert said == ["right", "right"], said
