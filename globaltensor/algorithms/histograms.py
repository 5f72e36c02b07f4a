"""Histograms: each rank counts its part, and the counts are left pending. Where the caller gives no range, that of the
data is boxed."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.decompositions import as_global, extrema
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shards, spec
from globaltensor.layouts.sbp import partial_sum
from globaltensor.rules.call import Call


def _counted_parts(call: Call, run: Run, ranged: bool) -> tuple[GlobalLike, GlobalLike | None]:
    """What is counted, and its weights, if any, laid out like it; without pending sums. In a graph, which has no
    values, it is whole, unless its range is told."""
    like = next(t for t in call.tensors if is_global(t))
    x, weight = as_global(run, call["self"], like, str(call.func)), call.get("weight")
    tensors = [x] if weight is None else [x, as_global(run, weight, like, str(call.func))]
    same = weight is None or weight.shape == x.shape         # else it is an error, which torch tells of the whole
    home = x.spec.layout.without_partials if same and (ranged or not x.traced) else x.spec.layout.replicated
    moved = run.redistribute(tensors, [home] * len(tensors), str(call.func))
    return moved[0], moved[1] if weight is not None else None


def _whole_range(run: Run, x: GlobalLike, op: str) -> dict[int, tuple[float, float]]:
    """The least and the greatest element of all parts, on each rank."""
    if x.device.type == "meta":
        return dict.fromkeys(x.shards, (0.0, 1.0))
    low, high = run.redistribute(extrema(run, x, list(range(x.dim()))), [x.spec.layout.replicated] * 2, op)
    return {rank: (low.shards[rank].item(), high.shards[rank].item()) for rank in x.shards}


def _counts_of_parts(run: Run, x: GlobalLike, counts: Shards, bins: int, dtype: torch.dtype) -> GlobalLike:
    """A sum over the parts of x."""
    home: Layout = x.spec.layout
    terms = home.with_sbp(tuple(partial_sum if s.is_split else s for s in home.sbp))
    return run.wrap(spec(terms, (bins,), None, dtype), counts)


def histc(call: Call, run: Run) -> Any:
    """histc: of the range that it is told, or of that of the data, where its ends are equal."""
    bins, low, high = call["bins"], call["min"], call["max"]
    x, _ = _counted_parts(call, run, low != high)
    ranges = dict.fromkeys(x.shards, (low, high))
    if low == high and x.numel() and not x.traced:
        # of one value torch counts in (value - 1, value + 1); of a part it would take the ends of that part
        ranges = {rank: ends if ends[0] != ends[1] else (ends[0] - 1, ends[1] + 1)
                  for rank, ends in _whole_range(run, x, str(call.func)).items()}
    counts = {rank: call.func(part, bins, *ranges[rank]) for rank, part in x.shards.items()}
    return _counts_of_parts(run, x, counts, bins, x.dtype)


def histogram(call: Call, run: Run) -> tuple[GlobalLike, GlobalLike]:
    """torch.histogram, of so many bins or of their edges."""
    bins, options = call["bins"], {}
    x, weight = _counted_parts(call, run, call.get("range") is not None or isinstance(bins, torch.Tensor))
    if isinstance(bins, torch.Tensor):
        edges = as_global(run, bins, x, str(call.func))
        wanted: dict[int, Any] = run.redistribute([edges], [edges.spec.layout.replicated], str(call.func))[0].shards
        number = bins.numel() - 1
    else:
        wanted, number = dict.fromkeys(x.shards, bins), bins
        ends = dict.fromkeys(x.shards, call["range"])
        if call["range"] is None and x.numel() and not x.traced:
            ends = _whole_range(run, x, str(call.func))
        options = {rank: {"range": of} for rank, of in ends.items()}
    counts, edges_of = {}, {}
    for rank, part in x.shards.items():
        counts[rank], edges_of[rank] = call.func(part, wanted[rank], weight=None if weight is None else
                                                 weight.shards[rank], density=False, **options.get(rank, {}))
    edges = run.wrap(spec(x.spec.layout.replicated, (number + 1,), None, x.dtype), edges_of)
    total = _counts_of_parts(run, x, counts, number, x.dtype)
    if call["density"]:
        whole, = run.redistribute([total], [total.spec.layout.replicated], str(call.func))
        shares = {rank: of / (edges_of[rank].diff() * of.sum()) for rank, of in whole.shards.items()}
        total = run.wrap(whole.spec, shares)
    return total, edges
