"""From collated samples to global tensors: which rows a process loads, and which shards it cuts from them.

    rows 0 ... 6 of a global batch, split(0) over dp = 2, broadcast over tp = 2

        process that drives      loads rows     shards
        rank 0 (dp 0, tp 0)      0 ... 3        {0: rows 0 ... 3}
        rank 3 (dp 1, tp 1)      4 ... 6        {3: rows 4 ... 6}
        all of them              0 ... 6        {0: 0 ... 3, 1: 0 ... 3, 2: 4 ... 6, 3: 4 ... 6}

A process loads the rows that its ranks need, once, and collates them once; every shard is a slice of the result. A
process that needs no rows (a tail shorter than the ranks, or no rank in the placement) loads one sample to learn shapes
and dtypes, and keeps no row of it.
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
from globaltensor.runtime import lineage
from globaltensor.runtime.agreement import checksum
from globaltensor.runtime.memory import require
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.redistribution import resolve_layout


class BatchCutter:
    """The layout of batches on a placement. Raises SbpError for an sbp that no batch can have."""

    def __init__(self, placement: Any, sbp: Any) -> None:
        self.placement = resolve_layout(placement, broadcast, 0).placement
        self.sbp = nd_sbp(sbp, self.placement.names, self.placement.ndim)
        for s in self.sbp:
            if s.is_partial:
                raise SbpError(f"a batch with the sbp {s}", "samples are read whole, they are not sums",
                               "gt.sbp.split(0), or gt.sbp.broadcast")
            if s.is_split and s.dim < 0:
                raise SbpError(f"a batch with split({s.dim})", "the tensors of a batch may differ in their dims, so "
                               "dims are counted from the start", "gt.sbp.split(1)")
        self.local_ranks = local_ranks_of(self.placement)

    def layout(self, ndim: int) -> Layout:
        """The layout of a tensor of `ndim` dims: broadcast along axes that split a dim it does not have."""
        nd: NdSbp = tuple(broadcast if s.is_split and s.dim >= ndim else s for s in self.sbp)
        return layout(self.placement, nd)

    def rows(self, total: int) -> tuple[int, int]:
        """Start and stop of the rows that this process needs of a batch of `total`."""
        ranges = [self.layout(1).region((total,), r)[0] for r in self.local_ranks]
        ranges = [(start, stop) for start, stop in ranges if start < stop]
        return (min(start for start, _ in ranges), max(stop for _, stop in ranges)) if ranges else (0, 0)

    def to_global(self, loaded: Any, total: int) -> tuple[Any, list[str]]:
        """The same structure with a global tensor of `total` rows for each tensor, without communication; and a
        description that must be the same on all ranks: the place, shape and dtype of each tensor."""
        start, stop = self.rows(total)
        described: list[str] = []
        dims: list[int] = []

        def tensor(t: torch.Tensor, path: str) -> GlobalTensor:
            x = self._tensor_to_global(t, total, start, stop)
            described.append(f"{path} {list(x.shape)} {x.dtype}".lstrip())
            dims.append(x.dim())
            return x

        def plain(values: Any, path: str) -> Any:
            one_for_none = start == stop and len(values) == 1          # the sample that was loaded for its shapes
            return values[:0] if one_for_none else values

        batch = map_structure(loaded, tensor, plain)
        far = [s.dim for s in self.sbp if s.is_split and dims and s.dim >= max(dims)]
        if far:
            raise SbpError(f"a batch with split({far[0]})", f"none of its tensors has more than {max(dims)} dims",
                           "gt.sbp.split(0)")
        return batch, described

    def checksums(self, loaded: Any, total: int) -> dict[int, list[int]]:
        """Of the rows that each rank of this process has of a batch, whole: a checksum for each tensor. Those of ranks
        that share rows must be the same, whichever columns each keeps."""
        start, _ = self.rows(total)
        tensors: list[torch.Tensor] = []

        def keep(t: torch.Tensor, path: str) -> torch.Tensor:
            tensors.append(t)
            return t

        map_structure(loaded, keep, lambda values, path: values)
        ends = {r: self.layout(1).region((total,), r)[0] for r in self.local_ranks}
        return {r: [checksum(t[first - start:stop - start]) for t in tensors]
                for r, (first, stop) in ends.items() if first < stop}

    def _tensor_to_global(self, t: torch.Tensor, total: int, start: int, stop: int) -> GlobalTensor:
        if isinstance(t, GlobalTensor):
            raise GlobalTensorError("a dataset or collate_fn that returns global tensors", "each process reads samples "
                                    "for itself, in workers that are not ranks", "plain tensors")
        require(t, "a collated tensor")
        expected = max(stop - start, 1)              # without rows, one sample is loaded for its shapes
        if t.dim() == 0 or t.shape[0] != expected:
            raise ShapeError(f"a collated tensor of shape {list(t.shape)} from {expected} samples",
                             "dim 0 of every tensor of a batch is the samples",
                             "a collate_fn that returns one row per sample, and lists for the rest")
        of = spec(self.layout(t.dim()), (total, *t.shape[1:]), None, t.dtype)
        loaded = ((start, stop), *((0, n) for n in t.shape[1:]))
        source, shards, used = t.detach()[:stop - start], {}, set()
        for r in self.local_ranks:
            region = of.region(r)
            part = source[slices(region, loaded)]
            part = part.to(world().device(self.placement.type, r), non_blocking=True).contiguous()
            # Two ranks with the same rows must not share memory: an op in place would run on it twice.
            shards[r] = part.clone() if region in used and part.device == source.device else part
            used.add(region)
        return lineage.begin_lineage(GlobalTensor.wrap(of, shards))


def map_structure(value: Any, tensor: Callable[[torch.Tensor, str], Any], plain: Callable[[Any, str], Any],
                   path: str = "") -> Any:
    """The same structure, with `tensor(t, path)` for every tensor and `plain(values, path)` for every list without
    tensors."""
    def mapped(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        return {key: map_structure(v, tensor, plain, f"{path}[{key!r}]") for key, v in items}

    kind = type(value)
    if isinstance(value, torch.Tensor):
        return tensor(value, path)
    if isinstance(value, Mapping):
        items = mapped(value.items())
        try:
            return kind(items)
        except TypeError:                            # a mapping whose constructor takes something else
            return items
    if isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields")
        if not named and not any(isinstance(v, (torch.Tensor, Mapping, list, tuple)) or _is_record(v) for v in value):
            return plain(value, path)
        parts = mapped(enumerate(value)).values()
        return kind(*parts) if named else kind(parts)
    if _is_record(value):
        return dataclasses.replace(value, **mapped((f.name, getattr(value, f.name))
                                                   for f in dataclasses.fields(value) if f.init))
    return value


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
