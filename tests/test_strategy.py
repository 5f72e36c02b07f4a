"""gt.strategy: a plan for any model, from the module alone; and that plan, run.

Oracles: one process in plain torch for gradients; gt.record for bytes; all plans of a small chain for the search.
"""
from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from math import comb, inf

import numpy as np
import pytest
import torch
from harness import PROGRAMS, RUN, good
from test_capture import gpt
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.cli.small_models import small_models
from globaltensor.pipelining.units import units_of
from globaltensor.planner import model_search
from globaltensor.planner.cut_bounds import bounds_of_cuts
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.mesh_costs import SAMPLES, MeshCosts
from globaltensor.planner.model_prices import ModelTask, ModelVariant, VariantPrices
from globaltensor.planner.model_search import model_shapes, model_variants, search_model
from globaltensor.planner.pins import PinError
from globaltensor.planner.space import BatchError, Fixed, all_cuts, kinds_of_schedules
from globaltensor.planner.unit_sums import ParameterCost, PassCost, UnitCost
from globaltensor.simulator.cluster import KNOWN, Cluster, KernelRate, Link
from globaltensor.tensors import gradients

SEED = 20_261_124
IDS = torch.arange(8 * 16).view(8, 16) % 64


class Residual(nn.Module):
    """A stranger's block, whose names say nothing."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def chain():
    return nn.Sequential(nn.Linear(8, 16), *[Residual(16) for _ in range(4)], nn.Linear(16, 4)).double()


def rows():
    return torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)


def small_gpt():
    return gpt(layers=3, device="cpu").double()


def tokens():
    return IDS, IDS.roll(1, 1)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def vision():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 5)
                         ).double()


def block():
    return next(one.module for one in small_models() if isinstance(one.module[0], nn.Embedding))


def long_tokens():
    ids = torch.arange(4 * 64).view(4, 64) % 256
    return ids, ids.roll(1, 1)


def images():
    return torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)


def heads():
    return nn.Sequential(nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True), nn.Linear(12, 4)).double()


def sequences():
    return torch.randn(8, 7, 12, dtype=torch.float64), torch.randn(8, 7, 4, dtype=torch.float64)


class Unused(nn.Module):
    """Modules and a parameter that forward does not use, one without elements, and a dict for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.pooler, self.head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4)
        self.extra, self.none = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"hidden": x, "out": self.head(x)}


def of_dict(output, targets):
    return F.mse_loss(output["out"], targets)


class Last(nn.Module):
    """What one recurrent layer gives for the last token."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.head = kind(12, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class Loop(nn.Module):
    """One layer runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.head(x)


def uneven():
    return nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 4)).double()


MODELS = {"chain": (chain, rows, F.mse_loss), "uneven": (uneven, rows, F.mse_loss),
          "loop": (lambda: Loop().double(), rows, F.mse_loss), "gpt": (small_gpt, tokens, cross_entropy),
          "unused": (lambda: Unused().double(), rows, of_dict),
          **{kind.__name__: (lambda kind=kind: Last(kind).double(), sequences, F.mse_loss)
             for kind in (nn.RNN, nn.LSTM, nn.GRU)},
          "heads": (heads, sequences, F.mse_loss), "block": (block, long_tokens, cross_entropy),
          "vision": (vision, images, F.mse_loss)}

RUNS = [("chain", 1, {}), ("chain", 2, {"dp": 2, "zero": 3}), ("chain", 4, {"dp": 2, "pp": 2, "schedule": "1f1b"}),
        ("chain", 3, {"pp": 3, "schedule": "zb-h1", "recompute": "full"}),
        ("chain", 2, {"tp": 2, "pins": ["*.a.*=tp:S(0)", "*.b.weight=tp:S(1)"]}),
        ("gpt", 2, {"tp": 2, "sp": False}), ("gpt", 2, {"tp": 2, "sp": True}),
        ("gpt", 4, {"dp": 2, "tp": 2, "zero": 1}),
        ("gpt", 2, {"pp": 2, "schedule": "interleaved", "chunks": 2}), ("gpt", 2, {"dp": 2, "recompute": "full"}),
        ("gpt", 2, {"tp": 2, "sp": True, "recompute": "selective"}), ("chain", 2, {"pp": 2, "recompute": "selective"}),
        ("vision", 2, {"dp": 2, "zero": 2}), ("vision", 2, {"pp": 2, "schedule": "gpipe"}),
        ("unused", 1, {}), ("unused", 2, {}), ("unused", 2, {"dp": 2, "zero": 1}),
        ("unused", 2, {"pp": 2, "schedule": "1f1b"}), *[(kind, 2, {"dp": 2}) for kind in ("RNN", "LSTM", "GRU")]]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, devices, fixed", RUNS, ids=str)
def test_what_is_planned_runs_and_gives_the_gradients_of_one_process(name, devices, fixed):
    build, data, loss = MODELS[name]
    torch.manual_seed(SEED)
    model, (inputs, targets) = build(), data()
    plain = copy.deepcopy(model)
    strategy = gt.strategy(model, inputs, devices=devices, micro_batch=2, **fixed)
    for p, q in zip(model.parameters(), plain.parameters()):
        assert type(p) is nn.Parameter and torch.equal(p, q), "planning leaves the model as it is"
    strategy.check()
    assert strategy["lower_bound"] <= strategy["step_time"]
    assert sum(strategy["time"].values()) == pytest.approx(strategy["step_time"], rel=1e-9)
    for key in fixed.keys() & {"zero", "recompute"}:
        assert {stage[key] for stage in strategy["stages"]} == {fixed[key]}
    for key in fixed.keys() & {"schedule", "chunks"}:
        assert strategy[key] == fixed[key]
    assert [stage["memory"]["total"] for stage in strategy["stages"]] and strategy["memory"]["per_rank"]
    check_gradients(strategy, model, plain, loss, inputs, targets)


def check_gradients(strategy, model, plain, loss, inputs, targets):
    """One step of the strategy gives the loss, the gradients and the parameters of one of the plain model."""
    expected = loss(plain(inputs), targets)
    expected.backward()
    runner, optimizer = strategy.apply(model, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.testing.assert_close(runner.step(inputs, targets).full_tensor(), expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name, devices, fixed", [
    ("gpt", 2, {"tp": 2, "sp": False}), ("gpt", 2, {"tp": 2, "sp": True}), ("gpt", 2, {"dp": 2, "zero": 0}),
    ("gpt", 4, {"dp": 2, "tp": 2, "zero": 1}), ("chain", 2, {"dp": 2, "zero": 1}), ("vision", 2, {"dp": 2, "zero": 0}),
    ("gpt", 2, {"tp": 2, "sp": True, "recompute": "selective"}), ("gpt", 4, {"dp": 4, "zero": 0}),
    ("gpt", 4, {"dp": 4, "zero": 1}), ("chain", 4, {"dp": 4, "zero": 0}), ("vision", 4, {"dp": 4, "zero": 0}),
    ("gpt", 2, {"dp": 2, "zero": 3}), ("gpt", 4, {"dp": 2, "tp": 2, "zero": 3}),
    ("heads", 2, {"dp": 2, "zero": 0}), ("heads", 4, {"dp": 4, "zero": 1}), ("heads", 2, {"pp": 2, "schedule": "1f1b"}),
    ("gpt", 4, {"dp": 2, "pp": 2, "schedule": "1f1b"}), ("chain", 4, {"dp": 2, "pp": 2, "schedule": "zb-h1"}),
    *[("uneven", 2, {"dp": 2, "zero": zero}) for zero in (0, 1, 2, 3)], ("uneven", 3, {"dp": 3, "zero": 1}),
    ("unused", 2, {"dp": 2, "zero": 0}), ("unused", 2, {"dp": 2, "zero": 3}),
    *[("loop", 2, {"dp": 2, "zero": zero}) for zero in (0, 3)],
    ("GRU", 2, {"dp": 2, "zero": 0}), ("RNN", 2, {"dp": 2, "zero": 0}),
    ("block", 4, {"dp": 2, "tp": 2, "zero": 0}), ("block", 8, {"dp": 2, "tp": 4, "zero": 0})],
    ids=str)
def test_the_bytes_of_a_stage_are_those_of_the_record(name, devices, fixed):
    build, data, loss = MODELS[name]
    model, (inputs, targets) = build(), data()
    here = dataclasses.replace(KNOWN["dgx-a100"], transport="one process")
    whole = {"global_batch": 6} if devices == 3 else {}
    strategy = gt.strategy(model, inputs, here, devices, loss=loss, targets=targets, micro_batch=2, **fixed, **whole)
    inputs, targets = inputs[:strategy["global_batch"]], targets[:strategy["global_batch"]]
    runner, optimizer = strategy.apply(model, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in range(2):                               # the second step is like all others
        with gt.record() as moves:
            runner.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
    told = [str(move) for move in moves if move.bytes]
    assert sum(stage["bytes"][axis] for stage in strategy["stages"] for axis in ("tp", "dp")) == sum(
        move.bytes for move in moves if move.op not in ("the pipeline", "the loss of a pipeline")), told


class Beside(nn.Module):
    """More experts than run where equal layers are a chain: stacked, added up, or each added to what it takes."""

    def __init__(self, how):
        super().__init__()
        self.how, self.gate = how, nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(5))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        if self.how == "stacked":
            return torch.stack([m(x) * weights[..., :1] for m in self.experts]).sum(0)
        for m in self.experts if self.how == "chain" else ():
            x = m(x)
        for m in self.experts if self.how == "residual" else ():
            x = x + m(x)
        return sum(m(x) for m in self.experts) if self.how == "added" else x * weights[..., :1]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("how", ["stacked", "added", "residual", "chain"])
def test_the_bytes_of_equal_members_that_are_no_chain_are_those_of_the_record(how, mesh):
    model, x, y = Beside(how), *torch.randn(2, 8, 6, 8)
    here = dataclasses.replace(KNOWN["dgx-a100"], transport="one process")
    devices = mesh["tp"] * mesh.get("dp", 1)
    planned = gt.strategy(model, x, here, devices, loss=F.mse_loss, targets=y, **mesh,
                          micro_batch=8 // mesh.get("dp", 1))
    runner, optimizer = planned.apply(model, F.mse_loss, torch.optim.SGD)
    for _ in range(2):
        with gt.record() as moves:
            runner.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
    stated, = planned["stages"]
    assert stated["bytes"]["tp"] + stated["bytes"]["dp"] == sum(
        move.bytes for move in moves if move.op not in ("the pipeline", "the loss of a pipeline"))


WIDE = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))      # along tp a pending sum comes out of it


@pytest.mark.parametrize("fixed", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 4, "micro_batch": 2}], ids=str)
@pytest.mark.parametrize("told", [{}, {"loss": F.mse_loss, "targets": torch.zeros(8, 64)}], ids=["alone", "with loss"])
def test_a_pending_sum_that_comes_out_is_reduced_by_the_loss(fixed, told):
    here = dataclasses.replace(KNOWN["dgx-a100"], flops=1e12, memory_bandwidth=1e11, local=Link(1e-6, 1e10),
                               transport="one process")
    model, inputs = copy.deepcopy(WIDE), torch.randn(8, 64)
    strategy = gt.strategy(model, inputs, here, 4, zero=0, **fixed, **told)
    runner, _ = strategy.apply(model, F.mse_loss, torch.optim.SGD)
    with gt.record() as moves:
        runner.step(inputs, torch.zeros(8, 64))
        assert model[0].weight.grad is not None      # reduced by now
    stage, = strategy["stages"]
    assert stage["bytes"]["tp"] + stage["bytes"]["dp"] == sum(
        move.bytes for move in moves if move.op != "the loss of a pipeline"), str(moves)
    assert "tp" not in fixed or stage["bytes"]["tp"]


@pytest.mark.parametrize("told", [{}, {"loss": F.mse_loss, "targets": torch.zeros(8, 64)}], ids=["alone", "with loss"])
def test_on_a_slow_link_nothing_is_split_that_has_to_be_reduced(told):
    slow = Cluster("slow", 2, 1e12, 0.5, 1e9, 1e11, Link(1e-3, 1e7), Link(1e-3, 1e7))
    one = gt.strategy(WIDE, torch.zeros(8, 64), slow, 2, **told)
    assert one["stages"][0]["axes"] == {"dp": 1, "tp": 1}
    assert gt.strategy(WIDE, torch.zeros(8, 64), slow, 2, tp=2, **told)["step_time"] > slow.local.latency


# -------------------------------------------------------------------------------------------- small chains, all plans


def small_task(draw: random.Random) -> ModelTask:
    """Up to 6 units with any costs, on up to 8 devices."""
    n = draw.randint(1, 6)
    cluster = Cluster("small", draw.choice([2, 4, 8]), 1e12, 0.5, 10 ** draw.uniform(4, 7), 1e11,
                      Link(1e-6, 1e10), Link(1e-5, 10 ** draw.uniform(8, 10)), 0, draw.choice([0, 1e-6]),
                      draw.choice([0, 1e-6]), draw.choice([0, 1e-4]))
    costs = {(tp, "whole" if tp == 1 else "recognised"): mesh_costs(draw, n, cluster, tp) for tp in (1, 2)}
    return ModelTask(costs, np.array([draw.random() < 0.7 for _ in range(n)]), cluster, draw.randint(1, 8),
                     draw.choice([1, 2, 4, 6, 8]), Fixed(schedule=draw.choice([None, "1f1b", "gpipe", "zb-h1"])))


def mesh_costs(draw: random.Random, n: int, cluster: Cluster, tp: int) -> MeshCosts:
    where = gt.placement("meta", [[0, 1], [2, 3]], ("dp", "tp")) if tp == 2 else gt.placement(
        "meta", [[0], [1]], ("dp", "tp"))
    few, many = [], []
    for k in range(n):
        work = [10 ** draw.uniform(5, 8) for _ in range(3)]
        kept, passed, size = (draw.randint(100, 100_000) for _ in range(3))
        own = gt.zeros(size // tp * tp, placement=where, sbp=(gt.sbp.broadcast, gt.sbp.split(0)), dtype=torch.float32)
        parameter = ParameterCost(f"p{k}", (size // tp * tp,), torch.float32, own.spec.layout, own.spec.layout)
        for samples, several in zip(SAMPLES, (few, many)):
            passes = [PassCost([one * samples / tp], [one * samples / 10], {"tp": 1e-6 * samples} if tp > 1 else {},
                               kinds=[0])
                      for one in work]
            several.append(UnitCost(*passes, kept * samples, passed * samples, passed * samples, passed * samples,
                                    parameters=[parameter], selected=kept * samples // 4,
                                    first=[kept * samples, size], later=[(kept + passed) * samples],
                                    again=PassCost([work[0] * samples / tp / 3], [0.0], kinds=[0])))
    return MeshCosts(few, many, cluster, tp)


class OfChoice(VariantPrices):
    """Each rank of the pipeline recomputes as it is told."""

    recompute: tuple[str, ...] = ()

    def fastest_recompute(self, units, rank):
        return self.recompute[rank], self.peak_of_rank(units, rank, self.recompute[rank]).total

    def ways(self, cut):
        """All that ranks may recompute, so that they fit: nothing, where that fits, takes least."""
        fit = [[name for name in ("none", "selective", "full")
                if self.peak_of_rank(own, rank, name).total <= self.task.cluster.memory * (1 + 1e-9)]
               for rank, own in enumerate(self.dealt(cut)[2])]
        return itertools.product(*(names[:1] if names[:1] == ["none"] else names for names in fit))


def fastest_of_all(task: ModelTask) -> float:
    """Of all plans, by loops over every shape, variant and cut, and all that ranks may recompute."""
    best = inf
    for shape in model_shapes(task):
        for schedule, chunks in kinds_of_schedules(shape.pp, task.units):
            if shape.pp > 1 and not task.fixed.allows("schedule", schedule):
                continue
            for zero in range(4) if shape.dp > 1 else (0,):
                prices = OfChoice(task, ModelVariant(shape, zero, schedule, chunks))
                for at in itertools.combinations(range(1, task.units), shape.pp * chunks - 1):
                    cut = tuple(b - a for a, b in itertools.pairwise((0, *at, task.units)))
                    for recompute in prices.ways(cut):
                        prices.recompute = recompute
                        best = min(best, prices.price(cut).seconds)
    return best


def on_cores(task: ModelTask, cores: int) -> ModelTask:
    """The same where the devices of a host share so many cores."""
    return on_cluster(task, cores=cores)


def on_cluster(task: ModelTask, **changes) -> ModelTask:
    cluster = dataclasses.replace(task.cluster, **changes)
    costs = {key: MeshCosts(one.few, one.many, cluster, one.tp) for key, one in task.costs.items()}
    return dataclasses.replace(task, cluster=cluster, costs=costs)


def with_host(task: ModelTask, full: float, selective: float) -> ModelTask:
    """The same where recomputation takes so many seconds of the host for each op, on one mesh, whose ranks have the
    memory for either way of it."""
    kernels = (KernelRate("product", 1e-6, 2e-12, 1e-11), KernelRate("full", full, 0.0, 0.0),
               KernelRate("selective", selective, 0.0, 0.0))
    shape = max(model_shapes(task), key=lambda shape: (shape.pp <= 2, shape.pp, shape.micro_batch))
    prices = VariantPrices(task, ModelVariant(shape, 0, task.fixed.schedule or "1f1b", 1))
    units = np.array_split(np.arange(task.units), shape.pp)
    needed = [max(prices.peak_of_rank(own, rank, how).total for rank, own in enumerate(units))
              for how in ("selective", "full")]
    fixed = dataclasses.replace(task.fixed, dp=shape.dp, tp=shape.tp, pp=shape.pp, micro_batch=shape.micro_batch)
    return dataclasses.replace(on_cluster(task, kernels=kernels, memory=max(needed)), fixed=fixed)


def compare_with_all(seed: int, cores: int = 0, host: tuple[float, float] | None = None) -> None:
    task = on_cores(small_task(random.Random(seed)), cores)
    task = task if host is None else with_host(task, *host)
    result, best = search_model(task), fastest_of_all(task)
    assert (result.best.seconds if result.best else inf) == best, seed
    assert result.lower_bound == best, seed
    assert all(one is None or one.seconds >= best for one in result.menu.values()), seed


def test_nothing_is_faster_than_what_is_found():
    for seed in range(SEED, SEED + 25):
        compare_with_all(seed)


def test_nothing_is_faster_where_ranks_share_cores():
    for seed in range(SEED + 50, SEED + 62):
        compare_with_all(seed, cores=1 + seed % 2)


def test_nothing_is_faster_where_recomputation_takes_the_host():
    for seed in range(SEED + 400, SEED + 460):
        compare_with_all(seed, host=((1e-5, 1e-3), (1e-3, 1e-5))[seed % 2])


def test_ranks_that_share_cores_take_turns():
    def seconds(cores: int, **fixed) -> float:
        cluster = dataclasses.replace(KNOWN["dgx-a100"], cores=cores)
        return gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64), cluster, 4, **fixed)["step_time"]

    for fixed, busy in (({"dp": 4, "zero": 0, "micro_batch": 2}, 4), ({"dp": 2, "tp": 1, "pp": 1, "micro_batch": 4}, 2),
                        ({"dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "micro_batch": 2}, 2)):
        for cores in (1, 2, 8):
            times = max(busy / cores, 1.0)
            assert seconds(cores, **fixed) == pytest.approx(times * seconds(0, **fixed)), (fixed, cores)


@pytest.mark.long
def test_nothing_is_faster_in_a_thousand_chains():
    for seed in range(10 * SEED, 10 * SEED + 1_000):
        compare_with_all(seed)


@pytest.mark.parametrize("many, exact", [(4096, True), (1, False)])
def test_bounds_hold_where_cuts_are_many(monkeypatch, many, exact):
    def is_complete(units: int, stages: int, most: int = 1) -> bool:
        return comb(units - 1, stages - 1) <= min(most, many)

    monkeypatch.setattr(model_search, "is_complete", is_complete)
    for seed in (*range(SEED + 200, SEED + 206), *range(SEED + 400, SEED + 420)):
        task = small_task(random.Random(seed))
        task = task if seed < SEED + 400 else with_host(task, 1e-5, 1e-3)
        result, best = search_model(task), fastest_of_all(task)
        assert result.lower_bound <= best <= (result.best.seconds if result.best else inf), seed
        assert not exact or result.best is None or result.lower_bound == best == result.best.seconds, seed


@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_cuts_are_below_the_simulator(seed):
    draw = random.Random(SEED + 300 + seed)
    task = dataclasses.replace(small_task(draw), fixed=Fixed())
    several = [variant for shape in model_shapes(task) for variant in model_variants(task, shape)]
    for variant in draw.sample(several, min(len(several), 40)):
        prices = VariantPrices(task, variant)
        every = all_cuts(task.units, len(prices.rank_of))
        bounds = bounds_of_cuts(prices, np.array(every).reshape(len(every), -1))
        for one, bound in zip(map(prices.price, every), bounds.tolist()):
            assert bound <= one.seconds, (variant, one.cut)
            assert not one.fits or prices.least() <= one.seconds, (variant, one.cut)


@pytest.mark.parametrize("seed", range(6))
def test_more_is_never_slower(seed):
    task = small_task(random.Random(SEED + 100 + seed))

    def seconds(**changes) -> float:
        changed = dataclasses.replace(task, **changes)
        if "cluster" in changes:
            costs = {key: MeshCosts(one.few, one.many, changes["cluster"], one.tp) for key, one in task.costs.items()}
            changed = dataclasses.replace(changed, costs=costs)
        result = search_model(changed)
        return result.best.seconds if result.best else inf

    base = seconds()
    assert seconds(devices=task.devices + 1) <= base and seconds(devices=2 * task.devices) <= base
    assert seconds(cluster=dataclasses.replace(task.cluster, memory=task.cluster.memory * 3)) <= base
    for link in ("local", "remote"):
        own = getattr(task.cluster, link)
        faster = dataclasses.replace(task.cluster, **{link: Link(own.latency, own.bandwidth * 4)})
        assert seconds(cluster=faster) <= base * (1 + 1e-9)


# -------------------------------------------------------------------------------------------------- models, and units


def test_units_are_what_a_pipeline_can_cut():
    assert [unit.parts for unit in units_of(chain()).units] == [(str(k),) for k in range(6)]
    assert [unit.parts for unit in units_of(small_gpt()).units] == [
        ("token", "position.weight"), ("blocks.0",), ("blocks.1",), ("blocks.2",), ("norm",), ("head",)]
    whole = units_of(Residual(4))
    assert [part for unit in whole.units for part in unit.parts] == ["a", "b"]


class Listed(nn.Module):
    """Linear layers in a list, whose forward torch.fx does not follow. `uses`: what it does with them."""

    def __init__(self, uses):
        super().__init__()
        self.uses, self.layers, self.head = uses, nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.uses(self.layers, x if x.shape[0] < 100 else x + 1))


def one_behind_the_other(layers, x):
    for layer in layers:
        x = layer(x).relu() if layer is layers[3] else layer(x)
    return x


USES = {
    "one behind the other": (one_behind_the_other, ""),
    "beside each other": (lambda layers, x: torch.stack([layer(x) for layer in layers]).sum(0),
                          "layer 1, a Linear, does not"),
    "two of the first": (lambda layers, x: layers[3](layers[2](x := layers[0](x)) + layers[1](x)),
                         "SkippedLayer"),
    "the second again": (lambda layers, x: layers[3](layers[2](layers[1](layers[0](x)))) + layers[1](x),
                         "does not run right"),
    "not the last but one": (lambda layers, x: [x := layers[0](x), layers[1](x), y := layers[2](x), layers[3](y)][-1],
                             "layer 2, a Linear, does not take what layer 1 gave"),
    "something between": (lambda layers, x: layers[3](layers[2](layers[1](layers[0](x))) * 2), "SkippedLayer"),
}


@pytest.mark.parametrize("use", USES)
def test_only_layers_that_run_one_behind_the_other_are_units(use):
    """They would be planned as stages that cannot run; one that can is run."""
    torch.manual_seed(0)
    uses, why = USES[use]
    model, x, y = Listed(uses).double(), *torch.randn(2, 8, 8, dtype=torch.float64)
    planned = gt.strategy(model, x, devices=2, loss=F.mse_loss, targets=y, **({} if why else {"pp": 2}))
    assert why in planned.get("why_whole", "") and bool(why) == bool(planned.get("why_whole"))
    want = F.mse_loss(model(x), y).detach()
    runner, _ = planned.apply(model, F.mse_loss, torch.optim.SGD)
    torch.testing.assert_close(runner.step(x, y).full_tensor(), want)


def test_selective_recomputation_lies_between_none_and_full():
    model = gpt(4)
    none, selective, full = (gt.strategy(model, IDS, devices=1, micro_batch=8, recompute=how)
                             for how in ("none", "selective", "full"))
    kept = [one["stages"][0]["memory"]["activations"] for one in (none, selective, full)]
    assert kept[0] > kept[1] > kept[2]
    again = [one["stages"][0]["backward"] for one in (none, selective, full)]
    assert again[0] < again[1] < again[2]


@pytest.mark.parametrize("full, selective", [(1e-6, 1e-3), (1e-3, 1e-6)])
def test_the_fastest_recomputation_that_fits_is_chosen(full, selective):
    """Which one that is depends on what it costs the host."""
    kernels = tuple(KernelRate(kind, start, 0.0, 1e-11) for kind, start in (
        ("product", 1e-6), ("pointwise", 1e-6), ("full", full), ("selective", selective)))
    of = dataclasses.replace(KNOWN["dgx-a100"], kernels=kernels)
    model, fixed = gpt(4), {"devices": 2, "micro_batch": 4, "tp": 1, "pp": 2, "dp": 1, "schedule": "gpipe"}
    each = {how: gt.strategy(model, IDS, of, recompute=how, **fixed) for how in ("none", "selective", "full")}
    needs = {how: max(one["memory"]["per_rank"]) for how, one in each.items()}
    assert needs["full"] < needs["selective"] < needs["none"]
    best = gt.strategy(model, IDS, of, memory=needs["selective"] + 1, **fixed)
    assert {stage["recompute"] for stage in best["stages"]} <= {"none", "full" if full < selective else "selective"}
    assert best["lower_bound"] <= best["step_time"] <= min(each[how]["step_time"] for how in ("selective", "full"))
    assert best["step_time"] < max(each[how]["step_time"] for how in ("selective", "full"))


def test_a_deep_model_costs_as_much_to_run_as_a_flat_one():
    def costs(layers):
        model = gpt(layers)
        strategy = gt.strategy(model, IDS, devices=2, tp=1, micro_batch=1)
        return strategy["stages"][0], sum(p.numel() for p in model.blocks[0].parameters())

    few, many = costs(4), costs(12)
    assert many[0]["forward"] > few[0]["forward"]
    per_layer = (many[0]["memory"]["parameters"] - few[0]["memory"]["parameters"]) / 8 / 4
    assert per_layer == pytest.approx(few[1] / (2 if few[0]["zero"] == 3 else 1))


# ---------------------------------------------------------------------------------------------------------- bad input


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum().item() > 0 else x


def test_a_forward_that_looks_at_values_is_named_by_its_line():
    with pytest.raises(CaptureError, match="test_strategy.py"):
        gt.strategy(Looks(), torch.zeros(4, 4), devices=2)


@pytest.mark.parametrize("options, error, told", [
    ({"dp": 3}, BatchError, "a global batch of 8"),
    ({"dp": 2, "micro_batch": 3}, BatchError, "micro-batches of 3 on dp 2"),
    ({"pp": 7, "devices": 8}, BatchError, "the model has 6 units"),
    ({"pp": 4, "schedule": "zb-v"}, BatchError, "pp 4 with 2 stages on each rank"),
    ({"pp": 2, "schedule": "1f1b", "chunks": 2}, BatchError, "1f1b with 2 stages on each rank"),
    ({"pp": 2, "schedule": "interleaved", "chunks": 1}, BatchError, "interleaved with 1 stages on each rank"),
    ({"schedule": "zb-v", "chunks": 3}, BatchError, "zb-v with 3 stages on each rank"),
    ({"pp": 2, "chunks": 9}, BatchError, "a schedule with 9 stages on each rank"),
    ({"dp": 4, "tp": 4}, BatchError, "16 ranks on 4"),
    ({"zero": 4}, gt.GlobalTensorError, "zero=4"), ({"schedule": "zigzag"}, gt.GlobalTensorError, "schedule='zigzag'"),
    ({"schedule": "gpip"}, gt.GlobalTensorError, "try:   schedule='gpipe'"),
    ({"schedule": "1F1B"}, gt.GlobalTensorError, "try:   schedule='1f1b'"),
    ({"pins": ["*.a.weight=tp:S(0)", "1.*=tp:S(1)"]}, PinError, "*.a.weight=tp:S(0) and 1.*=tp:S(1) contradict"),
    ({"pins": ["*.a.bias=tp:S(1)"]}, PinError, "*.a.bias=tp:S(1)"),
    ({"pins": ["*.a.bias=tp:P"]}, PinError, "no rule"),
    ({"pins": ["*.c=tp:S(0)"]}, PinError, "fits no name"), ({"pins": ["*.a.*"]}, PinError, "cannot be read"),
    ({"pins": ["*.a.bias=ep:S(0)"]}, PinError, "the axes are dp, tp"),
    ({"cluster": "nowhere"}, ValueError, "no cluster"),
])
def test_what_cannot_be_planned_is_said(options, error, told):
    with pytest.raises(error) as caught:
        gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64), **{"devices": 4} | options)
    assert told in str(caught.value)


def test_of_small_layers_no_plan_along_tp_is_made():
    small, large = (nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n)).to("meta")
                    for n in (32, 4096))
    with pytest.raises(BatchError, match="the best layouts of its graph split no parameter"):
        gt.strategy(small, torch.zeros(8, 32), devices=2, tp=2)
    assert gt.strategy(large, torch.zeros(8, 4096), devices=2, tp=2)["stages"][0]["plan"]["0.weight"]["tp"] == "S(0)"


def test_where_nothing_fits_the_least_change_is_named():
    def planned(**options):
        return gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64), **{
            "devices": 2, "dp": 2, "zero": 0, "micro_batch": 4, "recompute": "none", "memory": 40_000} | options)

    one = planned()
    one.check()
    assert not one["feasible"] and one["needs"] > one["device"] == 40_000
    changes = one["smallest_change"]
    assert "memory" in changes and "KB" in str(one)
    for name, value in changes.items():
        assert planned(**{name: value})["feasible"], name
    assert not planned(memory=changes["memory"] - 2)["feasible"], "and no less is enough"


def test_an_infeasible_plan_is_not_applied():
    one = gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64), devices=1, memory=1.0)
    with pytest.raises(gt.StrategyError, match="nothing fits"):
        one.apply(chain(), F.mse_loss, torch.optim.SGD)


def test_planning_leaves_nothing_to_be_reduced():
    gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64), devices=4)
    assert not gradients.pending


def test_dgx_a100_is_the_usual_cluster():
    assert gt.strategy(chain(), torch.zeros(8, 8, dtype=torch.float64))["cluster"] == KNOWN["dgx-a100"].name


@pytest.mark.processes
def test_processes_plan_together():
    assert good([*RUN, "-n", 2, PROGRAMS / "planned_together.py"]) == "planned together\n" * 2
