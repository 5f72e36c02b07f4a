"""`x[1:3, 0] = value` where the index cuts through a split dim.

torch makes a view of the elements and writes into it. Of a split dim there is no such view: it would have to be moved,
and a moved view is a copy. So every rank writes the part of the elements that it holds, of its own.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Spec
from globaltensor.runtime.memory import require


def assign(x: Any, index: Any, value: Any) -> None:
    """x[index] = value; an index that is not plain, or cuts no split dim, goes torch's own way."""
    if isinstance(value, torch.Tensor) and not is_global(value):
        require(value, "the value of an assignment x[...] = t")
    ranges = _ranges(index, x.spec) if is_global(x) else None
    if ranges is None or not _cuts_split(ranges, x.spec):
        torch.Tensor.__setitem__(x, index, value)
    elif torch.is_grad_enabled() and (x.requires_grad or getattr(value, "requires_grad", False)):
        _Assign.apply(x, value, index, ranges)
    else:
        _write(x, value, ranges)
        torch.autograd.graph.increment_version(x)


class _Assign(torch.autograd.Function):
    """The write as autograd sees it: no gradient for what was overwritten, its gradient for the value."""

    @staticmethod
    def forward(ctx: Any, x: Any, value: Any, index: Any, ranges: Any) -> Any:
        _write(x, value, ranges)
        ctx.index, ctx.value = index, value.shape if isinstance(value, torch.Tensor) else None
        ctx.of_global = is_global(value)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        rest = grad.clone()
        assign(rest, ctx.index, 0)
        if ctx.value is None or not ctx.needs_input_grad[1]:
            return rest, None, None, None
        part = grad[ctx.index].sum_to_size(ctx.value)
        return rest, part if ctx.of_global else part.full_tensor(), None, None


def _write(x: Any, value: Any, ranges: list[tuple[range, bool]]) -> None:
    """Every rank writes what it holds of the elements; of a pending sum the first rank the value, the others zero."""
    sizes = [len(r) for r, _ in ranges]
    kept = [n for n, (_, whole) in zip(sizes, ranges) if whole]
    held = _held(value, x.spec.layout)
    for rank, shard in x.shards.items():
        part = held[rank] if isinstance(held, dict) else torch.as_tensor(held)
        part = part.detach().to(shard.device, shard.dtype).expand(kept).reshape(sizes)
        theirs, ours = [], []
        for (r, _), (start, stop) in zip(ranges, x.spec.region(rank)):
            first = max(-(-(start - r.start) // r.step), 0)
            last = max(min(-(-(stop - r.start) // r.step), len(r)), first)
            theirs.append(slice(first, last))
            ours.append(slice(r.start + first * r.step - start, max(r.start + last * r.step - start, 0), r.step)
                        if last > first else slice(0, 0))
        first_term = all(i == 0 or s.op != "sum" for i, s in zip(x.placement.coords[rank], x.sbp))
        shard[tuple(ours)] = part[tuple(theirs)] if first_term else 0


def _ranges(index: Any, of: Spec) -> list[tuple[range, bool]] | None:
    """Per dim the positions that are written, and whether the dim is kept (not by an int); None for other indices."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(i is None or not (i is Ellipsis or isinstance(i, (slice, int))) or isinstance(i, bool) for i in given):
        return None
    if given.count(Ellipsis) > 1 or len(given) - given.count(Ellipsis) > of.ndim:
        return None
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    full = [*given[:at], *[slice(None)] * (of.ndim - len(given) + given.count(Ellipsis)), *given[at + 1:]]
    found = []
    for i, n in zip(full, of.shape):
        if isinstance(i, int):
            if not -n <= i < n:
                return None                          # torch says what is wrong
            found.append((range(i % n, i % n + 1), False))
        else:
            found.append((range(*i.indices(n)), True))
    return found if all(r.step > 0 for r, _ in found) else None


def _cuts_split(ranges: list[tuple[range, bool]], of: Spec) -> bool:
    return any(s.is_split and (not ranges[s.dim][1] or ranges[s.dim][0] != range(of.shape[s.dim])) for s in of.sbp)


def _held(value: Any, where: Layout) -> Any:
    """The value whole on every rank."""
    if not is_global(value):
        return value
    return move_shards([Move(value.spec, value.shards, where.replicated)], "setitem")[0]
