"""From what a process has collated to global tensors: where the rows lie, and who holds what of each tensor.

    rows 0 ... 6 of a global batch, split(0) over dp = 2, whole along tp = 2

        process that drives      loads rows     shards
        rank 0 (dp 0, tp 0)      0 ... 3        {0: rows 0 ... 3}
        rank 3 (dp 1, tp 1)      4 ... 6        {3: rows 4 ... 6}
        all of them              0 ... 6        {0: 0 ... 3, 1: 0 ... 3, 2: 4 ... 6, 3: 4 ... 6}

A process loads the rows that its ranks need, once, and collates them once; every shard is a slice of that. One that
needs none (a tail shorter than the ranks, or none of its ranks in the placement) loads one sample to learn shapes and
dtypes, and keeps no row of it.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError, SbpError, ShapeError
from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.regions import slices
from globaltensor.layouts.sbp import NdSbp, broadcast, nd_sbp
from globaltensor.runtime.memory import require
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.global_tensor import GlobalTensor, resolve_layout


class Cutter:
    """How batches lie on a placement. Raises SbpError for an sbp that no batch can have."""

    def __init__(self, placement: Any, sbp: Any) -> None:
        self.placement = resolve_layout(placement, broadcast, 0).placement
        self.sbp = nd_sbp(sbp, self.placement.names, self.placement.ndim)
        for s in self.sbp:
            if s.is_partial:
                raise SbpError(f"a batch with the sbp {s}", "samples are read whole, they are no sums",
                               "gt.sbp.split(0), or gt.sbp.broadcast")
            if s.is_split and s.dim < 0:
                raise SbpError(f"a batch with split({s.dim})", "the tensors of a batch may differ in their dims, so "
                               "dims are counted from the start", "gt.sbp.split(1)")
        self.mine = local_ranks_of(self.placement)

    def layout(self, ndim: int) -> Layout:
        """The layout of a tensor of `ndim` dims: broadcast along axes that split a dim it does not have."""
        nd: NdSbp = tuple(broadcast if s.is_split and s.dim >= ndim else s for s in self.sbp)
        return layout(self.placement, nd)

    def rows(self, total: int) -> tuple[int, int]:
        """Start and stop of the rows that this process needs of a batch of `total`."""
        found = [self.layout(1).region((total,), r)[0] for r in self.mine]
        found = [(start, stop) for start, stop in found if start < stop]
        return (min(start for start, _ in found), max(stop for _, stop in found)) if found else (0, 0)

    def make(self, loaded: Any, total: int) -> tuple[Any, list[str]]:
        """The same structure with a global tensor of `total` rows for each tensor, moving nothing between ranks; and
        what all ranks must have alike of it: where in it there is a tensor, of what shape and dtype."""
        start, stop = self.rows(total)
        said: list[str] = []

        def tensor(t: torch.Tensor, path: str) -> GlobalTensor:
            made = self._make(t, total, start, stop)
            said.append(f"{path} {list(made.shape)} {made.dtype}".lstrip())
            return made

        def plain(values: Any, path: str) -> Any:
            stands_in = start == stop and len(values) == 1
            return values[:0] if stands_in else values

        return _each(loaded, tensor, plain), said

    def _make(self, t: torch.Tensor, total: int, start: int, stop: int) -> GlobalTensor:
        if t.is_global:
            raise GlobalTensorError("a dataset or collate_fn that gives global tensors", "samples are read by each "
                                    "process for itself, in workers that are no ranks", "plain tensors")
        require(t, "a collated tensor")
        expected = max(stop - start, 1)              # one sample stands in where there are no rows
        if t.dim() == 0 or t.shape[0] != expected:
            raise ShapeError(f"a collated tensor of shape {list(t.shape)} from {expected} samples",
                             "dim 0 of every tensor of a batch is the samples",
                             "a collate_fn that gives one row per sample, and lists for the rest")
        of = spec(self.layout(t.dim()), (total, *t.shape[1:]), None, t.dtype)
        have = ((start, stop), *((0, n) for n in t.shape[1:]))
        source, shards, taken = t.detach()[:stop - start], {}, set()
        for r in self.mine:
            region = of.region(r)
            part = source[slices(region, have)]
            part = part.to(world().device(self.placement.type, r), non_blocking=True).contiguous()
            shards[r] = part.clone() if region in taken and part.device == source.device else part
            taken.add(region)
        return GlobalTensor.wrap(of, shards)


def _each(value: Any, tensor: Callable, plain: Callable, path: str = "") -> Any:
    """The same structure, with `tensor(t, path)` of every tensor and `plain(values, path)` of every list of things."""
    def inside(held: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        return {key: _each(v, tensor, plain, f"{path}[{key!r}]") for key, v in held}

    if isinstance(value, torch.Tensor):
        return tensor(value, path)
    if isinstance(value, Mapping):
        made = inside(value.items())
        try:
            return type(value)(made)
        except TypeError:                            # a mapping that is made in another way
            return made
    if isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields")
        if not named and not any(isinstance(v, (torch.Tensor, Mapping, list, tuple)) or _is_record(v) for v in value):
            return plain(value, path)
        parts = inside(enumerate(value)).values()
        return type(value)(*parts) if named else type(value)(parts)
    if _is_record(value):
        return dataclasses.replace(value, **inside((f.name, getattr(value, f.name))
                                                   for f in dataclasses.fields(value) if f.init))
    return value


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
