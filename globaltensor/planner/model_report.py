"""A strategy from what the search for a model gives. Its keys are those of planner/strategy.py.

The time of a step is that of the rank that ends last: what its ops compute; what it waits for within a pass, and for
reductions at the end; the bubble; the optimizer, with what a step takes besides. They add up to it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
from torch import nn

from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.parallel.zero import split_layout
from globaltensor.pipelining.units import Units
from globaltensor.planner.checking import FORMAT
from globaltensor.planner.model_prices import (
    RECOMPUTES,
    ModelCandidate,
    ModelTask,
    ModelVariant,
    VariantPrices,
    units_of_stages,
)
from globaltensor.planner.model_search import ModelSearch, least_memory_of_model, search_model
from globaltensor.planner.op_costs import OpCosts
from globaltensor.planner.space import BatchError, divisors
from globaltensor.planner.strategy import Strategy
from globaltensor.planner.unit_sums import UnitCost
from globaltensor.simulator.cluster import Cluster, hypothetical_placements
from globaltensor.simulator.groups import ClusterGroups

Machines = Cluster | ClusterGroups

_MOST_TIMES = 64                                     # more devices than these are not tried


def model_strategy(model: nn.Module, units: Units, task: ModelTask, result: ModelSearch, seconds: float,
                   exact: Callable[[VariantPrices], list[UnitCost] | None], machines: Machines,
                   whole: Mapping[str, str], inputs: Sequence[str], tokens: int,
                   left_out: Mapping[str, str]) -> Strategy:
    """The strategy of a search of so many seconds.

    exact      the units of the best plan on all ranks of a stage with these prices
    whole      ops planned on whole operands, with a line of each
    left_out   plans that cannot be run without values, and why
    """
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    about: dict[str, Any] = {
        "search_seconds": seconds, "candidates": result.weighed, "devices": task.devices, "cluster": machines.name,
        "global_batch": task.global_batch, "dtype": "bfloat16" if "bfloat16" in dtypes else min(dtypes, default=""),
        "model": {"model": type(model).__name__, "units": len(units.units),
                  "parameters": sum(p.numel() for p in model.parameters())},
        "fixed": {name: value for name, value in vars(task.fixed).items() if value is not None and name != "excluded"},
        "inputs": list(inputs), "whole": dict(whole), "left_out": dict(left_out)} | (
            {"why_whole": units.why} if units.why else {})
    menu = [_other(name, one) for name, one in result.menu.items()]
    head: dict[str, Any] = {"format": FORMAT, "feasible": result.best is not None}
    best = result.best
    if best is None:
        needs = least_memory_of_model(task)
        return Strategy(head | about | {"needs": needs, "device": task.cluster.memory,
                                        "smallest_change": smallest_changes_of_model(task, needs), "menu": menu})
    prices, shape = priced(best), best.variant.shape
    stages = _planned_stages(units, best, machines, exact)
    per_rank = [0.0] * shape.pp
    for stage, rank in zip(stages, prices.rank_of):
        per_rank[rank] += stage["memory"]["total"]
    return Strategy(head | {
        "step_time": best.seconds, "lower_bound": result.lower_bound, "gap": 1 - result.lower_bound / best.seconds,
        **about, "micro_batch": shape.micro_batch, "micro_batches": prices.micro_batches,
        "schedule": best.variant.schedule, "chunks": best.variant.chunks, "time": times_of_parts(best),
        "tokens_per_second": task.global_batch * tokens / best.seconds,
        "tflops_per_device": prices.mesh.operations * task.global_batch / best.seconds / task.devices / 1e12,
        "stages": stages, "memory": {"per_rank": per_rank, "device": min(best.rooms)}, "menu": menu,
        "runners_up": [_other(candidate_text(one), one) for one in result.runners_up]})


def priced(one: ModelCandidate) -> VariantPrices:
    """The numbers that a plan was priced by."""
    assert one.prices is not None                    # `price` made it
    return one.prices


def candidate_text(one: ModelCandidate) -> str:
    """A plan in a line: `dp 8 x tp 4 x pp 2, zero 1, zb-h1, micro-batch 2`; of ranks with meshes of their own each:
    `dp 2, zero 1 | dp 1 x tp 2, 1f1b, micro-batch 2`."""
    shape = one.variant.shape
    kinds = sorted(set(one.recompute), reverse=True)
    several = list(dict.fromkeys(mesh.variant for mesh in one.meshes))
    meshes = [_mesh_text(one.variant, shape.pp)] if len(several) < 2 else [" | ".join(
        _mesh_text(mesh.variant, 1) for mesh in one.meshes)]
    words = [*meshes, one.variant.schedule * (shape.pp > 1),
             f"chunks {one.variant.chunks}" * (one.variant.chunks > 1),
             "" if kinds == ["none"] else f"recompute {' and '.join(kinds)}", f"micro-batch {shape.micro_batch}"]
    return ", ".join(filter(None, words))


def _mesh_text(of: ModelVariant, pp: int) -> str:
    shape = of.shape
    axes = [f"{name} {size}" for name, size in (("dp", shape.dp), ("tp", shape.tp), ("pp", pp)) if size > 1]
    return ", ".join(filter(None, [" x ".join(axes) or "one device", "sp" * (shape.kind == "sequence"),
                                   f"zero {of.zero}" * bool(of.zero)]))


def _other(name: str, one: ModelCandidate | None) -> dict[str, Any]:
    if one is None:
        return {"name": name, "step_time": None, "memory": None, "feasible": False}
    return {"name": name, "plan": candidate_text(one), "step_time": one.seconds, "memory": one.fullest,
            "feasible": True}


def times_of_parts(best: ModelCandidate) -> dict[str, float]:
    """Where the time of a step goes, on the rank that ends last."""
    run, first, rank_of = best.run, float(min(best.run.first)), priced(best).rank_of
    totals = [float(last) - first + end + step for last, end, step in zip(run.last, best.ends, best.optimizer)]
    rank = int(np.argmax(totals))
    own = np.concatenate([units for s, units in enumerate(units_of_stages(best.cut)) if rank_of[s] == rank])
    prices = priced(best).of_rank(rank)
    again = (prices.passes(best.recompute[rank])[1] - prices.passes("none")[1])[own].sum()
    compute = (float(prices.of.compute[own].sum() + again) + prices.cluster.micro_batch_overhead)
    compute = min(compute * prices.micro_batches, float(run.busy[rank]))
    return {"compute": compute, "communication": float(run.busy[rank]) - compute + best.ends[rank],
            "bubble": float(run.last[rank]) - first - float(run.busy[rank]), "optimizer": best.optimizer[rank]}


def _planned_stages(units: Units, best: ModelCandidate, machines: Machines,
                    exact_of: Callable[[VariantPrices], list[UnitCost] | None]) -> list[dict[str, Any]]:
    stages, whole, m = [], priced(best), priced(best).micro_batches
    cuts = units_of_stages(best.cut)
    for index, own in enumerate(cuts):
        rank = int(whole.rank_of[index])
        prices = whole.of_rank(rank)
        shape, exact = prices.variant.shape, exact_of(prices)
        group, rows = shape.dp * shape.tp, {pattern: {axis: str(how) for axis, how in row.items()}
                                            for pattern, row in prices.task.plans[shape.tp, shape.kind].items()}
        recompute = best.recompute[rank]
        forward, inputs, weights = (float(one[own].sum()) for one in prices.passes(recompute))
        # one run tells of all ranks what ops gather of split parameters: with two of them, as searched, it is no less
        prices = prices if exact is None or prices.variant.zero < 3 or shape.pp == 1 else prices.with_bytes_of(exact)
        last = index == len(cuts) - 1
        crosses = not last and int(whole.rank_of[index + 1]) != rank
        mine = np.concatenate([units for s, units in enumerate(cuts) if whole.rank_of[s] == rank])
        layers = list(dict.fromkeys(part for k in own for part in units.units[k].parts))
        stages.append({
            "layers": layers, "axes": {"dp": shape.dp, "tp": shape.tp}, "plan": rows, "batch": {"dp": 0},
            "ranks": list(best.meshes[rank].ranks if best.meshes else range(rank * group, (rank + 1) * group)),
            "zero": prices.variant.zero,
            "recompute": recompute, "forward": forward, "backward": inputs + weights,
            "bytes": {"tp": round(_bytes_along(prices, exact, own, "tp") * m),
                      "dp": (round(_bytes_along(prices, exact, own, "dp") * m)
                             + _bytes_of_updates(prices, exact, own, mine)),
                      "next": round(float(prices.of.passed[own[-1]]) * m) if crosses else 0},
            "memory": _memory_of_rank(prices, best, own, rank, cuts)} | (
                {"group": machines.names(best.meshes[rank].groups)} if isinstance(machines, ClusterGroups) else {}))
    return stages


def _bytes_along(prices: VariantPrices, exact: list[UnitCost] | None, own: np.ndarray, axis: str) -> float:
    """Bytes that a rank receives along an axis for a micro-batch."""
    if exact is None:
        return float((prices.of.tp_bytes if axis == "tp" else prices.of.dp_bytes)[own].sum())
    return sum(one.bytes.get(axis, 0.0) for k in own for one in (exact[k].forward, exact[k].inputs, exact[k].weights))


def _bytes_of_updates(prices: VariantPrices, exact: list[UnitCost] | None, own: np.ndarray, mine: np.ndarray) -> int:
    """Bytes of gradients and of parameters that the busiest rank of each receives in a step for a stage. Gradients of
    all stages of a rank, `mine`, move together, and so do parameters."""
    shape, zero, m = prices.variant.shape, prices.variant.zero, prices.micro_batches
    total = 0
    with hypothetical_placements():
        where = placement("meta", [[i * shape.tp + k for k in range(shape.tp)] for i in range(shape.dp)], ("dp", "tp"))
        costs = OpCosts(prices.task.cluster, where)
        parameters = prices.mesh.parameters if exact is None else [unit.parameters for unit in exact]
        stage = {p.name for k in own for p in parameters[k]}
        gradients, gathers = [], []
        for one in {p.name: p for k in mine for p in parameters[k]}.values():
            lies, gradient = (layout(where, of.sbp) if of is not None else None for of in (one.lies, one.gradient))
            assert lies is not None                  # a parameter lies somehow
            part = split_layout(lies, one.shape, "dp") if zero and shape.dp > 1 else None
            if gradient is not None:
                if shape.dp == 1:
                    gradient = gradient.along({"dp": broadcast})
                gradients.append((one, gradient, part or lies, prices.times if part else 1))
            if part is not None and (zero == 3 or gradient is not None):         # who learns nothing stays as it is
                gathers.append((one, part, lies, one.gathers * m if zero == 3 else 1))
        for moves in gradients, gathers:
            received: dict[int, int] = {}
            together = sum(one.nbytes for one, src, dst, _ in moves if src is not dst)
            for one, src, dst, times in moves:
                if one.name in stage:
                    for rank, nbytes in costs.received(src, dst, one.shape, one.dtype.itemsize, together).items():
                        received[rank] = received.get(rank, 0) + nbytes * times
            total += max(received.values(), default=0)
    return total


def _memory_of_rank(prices: VariantPrices, best: ModelCandidate, own: np.ndarray, rank: int, cuts: list[np.ndarray]
            ) -> dict[str, float]:
    """Bytes of one stage. What is temporary on a rank with several stages is shared out by their units."""
    stages = [units for s, units in enumerate(cuts) if prices.rank_of[s] == rank]
    mine, of, states = np.concatenate(stages), prices.unit_bytes(best.recompute[rank]), prices.states
    peak = prices.peak_of_rank(mine, rank, best.recompute[rank])

    def share(each: np.ndarray) -> float:
        return float(each[own].sum()) / max(float(each[mine].sum()), 1e-9)

    parts = {"parameters": float(prices.mesh.sizes[own].sum()) * states.parameters,
             "gradients": peak.gradients * share(of.gradients),
             "optimizer": float(prices.mesh.learned[own].sum()) * states.optimizer,
             "activations": peak.activations * share(of.kept)}
    held = float(prices.mesh.sizes[mine].sum()) * states.parameters + float(
        prices.mesh.learned[mine].sum()) * states.optimizer
    temporary = (peak.total - held - peak.gradients - peak.activations) * len(own) / len(mine)
    return parts | {"temporary": temporary, "total": sum(parts.values()) + temporary}


# ----------------------------------------------------------------------------------------------------- nothing fits


def smallest_changes_of_model(task: ModelTask, needs: float) -> dict[str, Any]:
    """Of each kind of change the least with which something fits, each tried."""

    def fits(other: ModelTask) -> bool:
        try:
            return search_model(other, first=True).best is not None
        except BatchError:
            return False

    fixed, changes = task.fixed, dict[str, Any]()
    tries: dict[str, Sequence[Any]] = {
        "recompute": RECOMPUTES[RECOMPUTES.index(fixed.recompute) + 1:] if fixed.recompute in RECOMPUTES else (),
        "micro_batch": [b for b in divisors(task.global_batch)[::-1] if b < (fixed.micro_batch or 1)],
        "zero": list(range(fixed.zero + 1, 4)) if fixed.zero is not None else []}
    for name, values in tries.items():
        enough = next((v for v in values if fits(replace(task, fixed=replace(fixed, **{name: v})))), None)
        if enough is not None:
            changes[name] = enough
    most = task.cluster.hosts * task.cluster.devices_per_host or task.devices * _MOST_TIMES
    more = _least_number(lambda n: fits(replace(task, devices=n)), task.devices, most)
    if more is not None:
        changes["devices"] = more
    enough_bytes = ceil(needs)
    if fits(_on_larger(task, float(enough_bytes))):
        changes["memory"] = enough_bytes
    return changes


def _on_larger(task: ModelTask, memory: float) -> ModelTask:
    return replace(task, cluster=replace(task.cluster, memory=memory))


def _least_number(enough: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least of more than `low`, by doubling and halving; None where `most` is not enough."""
    high = min(2 * low, most)
    while high < most and not enough(high):
        low, high = high, min(2 * high, most)
    if high <= low or not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
