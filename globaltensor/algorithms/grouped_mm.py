"""Experts on ranks of their own: ops whose rows belong where an index says, not where a layout does.

A layer of experts sorts its tokens by expert and multiplies each group by the matrix of its expert:

    sorted = tokens[order]              index: rows are picked              [s, h] from [n, h]
    mixed = grouped_mm(sorted, w, ends) rows [ends[e-1], ends[e]) times w[e]    [s, f]
    tokens' = mixed[back]               rows are picked again

With tokens cut by rows and the matrices by experts, both S(0), nothing of this is local, and what must move depends
on the data. Then each rank asks the others for exactly the rows that it needs (`boxings/rows.py`):

    index, index_select     the rows that the rank's part of the index names      take
    += at an index          the transpose: rows go to where they are added        give
    grouped_mm              the rows of the rank's experts, and back to equal parts; nothing where they lie so already

What moved is cut into equal parts again behind every op, since only layouts that are known beforehand can be kept in
recipes. Who knows the experts before the rows travel does better: `parallel/experts.py`.
"""
from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Spec, layout, spec
from globaltensor.layouts.regions import split_range
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.agreement import agree_on, checking
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.world import local_ranks_of

aten = torch.ops.aten
S0, S1, S2 = split(0), split(1), split(2)
Range = tuple[int, int]
Shards = dict[int, Tensor]


# --------------------------------------------------------------------------------------------------- rows by number


def _index(call: Call) -> Tensor | None:
    """The numbers of rows, where dim 0 alone is indexed, by one list of integers."""
    if "indices" in call.values:
        first, *others = call["indices"]
        found = first if all(t is None for t in others) else None
    else:
        found = call["index"] if call["dim"] == 0 else None
    return found if found is not None and found.dim() == 1 and found.dtype in (torch.int32, torch.int64) else None


def travels(call: Call) -> bool:
    """Are rows picked of a tensor that is cut by rows?"""
    own = getattr(call["self"], "spec", None)
    return own is not None and S0 in own.sbp and _index(call) is not None


def returns(call: Call) -> bool:
    """Are rows added to others, where the values are cut by rows and the target is not cut otherwise?

    An index that is cut too is left alone where the target is whole: then each rank adds its own, and a sum stays
    pending, as the gradient of a parameter should.
    """
    x, values = call["self"], call.get("values", call.get("source"))
    index = _index(call)
    if index is None or not call.get("accumulate", True) or not is_global(x) or not is_global(values):
        return False
    numbers = index.spec.sbp if is_global(index) else (broadcast,) * len(x.spec.sbp)
    fits = values.shape == (index.shape[0], *x.shape[1:]) and values.dtype == x.dtype != torch.bool
    return fits and S0 in values.spec.sbp and x.placement == values.placement and all(
        a == v or a.is_broadcast and not (v == S0 and i.is_split)
        for a, v, i in zip(x.spec.sbp, values.spec.sbp, numbers))


def take_rows(call: Call, run: Run) -> Any:
    """x[index]: each rank gets the rows that its part of the index names, and the result is cut as x is, and also
    where only the index is."""
    x, index = call["self"], _index(call)
    given = index.spec.sbp if is_global(index) else x.spec.sbp
    nd = tuple(S0 if s.is_broadcast and i == S0 else s for s, i in zip(x.spec.sbp, given))
    dst = x.spec.layout.with_sbp(nd)
    made = spec(dst, (index.shape[0], *x.shape[1:]), None, x.dtype)
    numbers = _numbers(call, index, x.shape[0], run)
    x, = run.redistribute([x], [x.spec.layout], str(call.func))
    if numbers is None:
        return run.wrap(made, {})
    wanted, back = _distinct(numbers, made)
    held = {rank: x.spec.region(rank)[0] for rank in x.placement.flat}
    found = run.row_exchange(_cut_axes(x.spec.layout), held, wanted, _row_shapes(made), str(call.func), x.spec.layout,
                             dst).gather(x.shards)
    return run.wrap(made, {r: t if back[r] is None else t.index_select(0, back[r].to(t.device))
                           for r, t in found.items()})


def add_rows(call: Call, run: Run) -> Any:
    """x[index] += values: each rank adds up what it has for one row, and its owner the rest."""
    x, index, values = call["self"], _index(call), call.get("values", call.get("source"))
    dst = values.spec.layout
    x, values = run.redistribute([x, values], [dst, dst], str(call.func))
    numbers = _numbers(call, index, x.shape[0], run)
    if numbers is None:
        return run.wrap(x.spec, {})
    wanted, back = _distinct(numbers, values.spec)
    held = {rank: x.spec.region(rank)[0] for rank in x.placement.flat}
    sums = {r: t if back[r] is None else _summed(t, back[r].to(t.device), len(wanted[r]))
            for r, t in values.shards.items()}
    given = run.row_exchange(_cut_axes(dst), held, wanted, _row_shapes(x.spec), str(call.func), dst,
                             dst).scatter_add(sums)
    return run.wrap(spec(dst, tuple(x.shape), None, x.dtype),
                    {r: torch.add(x.shards[r], t, alpha=call.get("alpha", 1)) for r, t in given.items()})


def _summed(t: Tensor, back: Tensor, n: int) -> Tensor:
    """Rows that go to the same row added up, in float32 for the 16-bit floats."""
    dtype = accumulation_dtype(t.dtype)
    return t.new_zeros((n, *t.shape[1:]), dtype=dtype).index_add_(0, back, t.to(dtype)).to(t.dtype)


def _cut_axes(of: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, s in enumerate(of.sbp) if s == S0)


def _row_shapes(of: Spec) -> dict[int, tuple[int, ...]]:
    return {rank: of.local_shape(rank)[1:] for rank in of.placement.flat}


def _whole(t: Tensor, run: Run, op: str) -> Tensor | None:
    """A small tensor's whole value, on the CPU; None on a process that has no part of it."""
    if not is_global(t):
        if checking():
            agree_on(t, f"a plain operand of {op}")
        return t.cpu()
    whole, = run.redistribute([t], [t.spec.layout.replicated], op)
    return next(iter(whole.shards.values())).cpu() if whole.shards else None


def _numbers(call: Call, index: Tensor, n: int, run: Run) -> Tensor | None:
    """The index on every rank, counted from the start. Raises IndexError for a row that is not there."""
    found = _whole(index, run, str(call.func))
    own = next(t for t in call.tensors if is_global(t))
    if found is None or not own.shards:
        return None
    found = found.long()
    wrong = (found < -n) | (found >= n)
    if wrong.any():
        raise IndexError(f"index {int(found[wrong][0])} is out of bounds for dimension 0 with size {n}")
    return torch.where(found < 0, found + n, found)


def _distinct(numbers: Tensor, of: Spec) -> tuple[Shards, dict[int, Tensor | None]]:
    """For every rank's part of the index, the rows that it names, ascending; and which of them each entry is, None
    where the entries are these rows as they stand."""
    found: dict[Range, tuple[Tensor, Tensor | None]] = {}
    for rank in of.placement.flat:
        part = of.region(rank)[0]
        if part not in found:
            own = numbers[slice(*part)]
            ascending = bool((own[1:] > own[:-1]).all())
            found[part] = (own, None) if ascending else torch.unique(own, return_inverse=True)
    parts = {rank: found[of.region(rank)[0]] for rank in of.placement.flat}
    return {r: p[0] for r, p in parts.items()}, {r: p[1] for r, p in parts.items()}


# ----------------------------------------------------------------------------------------------- groups of rows


class _Lie(NamedTuple):
    """How the operands and the result of a grouped product lie on one axis; `grouped`: its ranks share the rows."""

    a: Sbp
    b: Sbp
    out: Sbp
    grouped: bool


def _rows_by_experts(a: Sbp, b: Sbp) -> _Lie:
    """Rows [s, k] times experts [e, k, n] -> [s, n]."""
    if b == S2:
        return _Lie(broadcast, S2, S1, False)
    if b == S1:
        return _Lie(S1, S1, partial_sum, False)
    cut_rows = broadcast if a.is_broadcast else S0
    return _Lie(cut_rows, S0, S0, True) if b == S0 else _Lie(cut_rows, broadcast, cut_rows, cut_rows == S0)


def _columns_by_rows(a: Sbp, b: Sbp) -> _Lie:
    """Columns [m, s] times rows [s, n] -> [e, m, n], a sum over the rows of every expert."""
    if a.is_broadcast and (b.is_broadcast or b == S1):
        return _Lie(a, b, S2 if b == S1 else broadcast, False)
    if a == S0 and b.is_broadcast:
        return _Lie(S0, broadcast, S1, False)
    return _Lie(S1, S0, S0, True)


def grouped_mm(call: Call, run: Run) -> Any:
    """Matrices for groups of rows: each rank does the groups of its own experts, and shares their rows with the ranks
    that hold the same ones. Groups of columns, and of nothing, are done whole on every rank."""
    a, b = (_made_global(call[name], call, run) for name in ("self", "mat2"))
    ends = None if call["offs"] is None else _whole(call["offs"], run, str(call.func))
    dtype, op = call["out_dtype"] or a.dtype, str(call.func)
    lie = {(2, 3): _rows_by_experts, (2, 2): _columns_by_rows}.get((a.dim(), b.dim()))
    if lie is None or call["bias"] is not None:
        return _everywhere(call, a, b, ends, dtype, run)
    axes = [lie(x, y) for x, y in zip(a.sbp, b.sbp)]
    home = a.spec.layout
    dsts = [home.with_sbp(tuple(x.a for x in axes)), home.with_sbp(tuple(x.b for x in axes))]
    a, b = run.redistribute([a, b], dsts, op)
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (call["offs"].shape[0], a.shape[0], b.shape[1])
    made = spec(home.with_sbp(tuple(x.out for x in axes)), shape, None, dtype)
    if ends is None or not a.shards:
        return run.wrap(made, {})
    grouped = tuple(axis for axis, x in enumerate(axes) if x.grouped)
    way = _by_rows if b.dim() == 3 else _by_columns
    return run.wrap(made, way(call, run, a, b, made, ends.tolist(), grouped))


def _by_rows(call: Call, run: Run, a: Any, b: Any, made: Spec, ends: list[int], grouped: tuple[int, ...]) -> Shards:
    """Rows to their experts, times the matrices, and back to equal parts."""
    own = {rank: b.spec.region(rank)[0] for rank in a.placement.flat}
    shared = [axis for axis in grouped if not b.sbp[axis].is_split]
    groups = {rank: _share(_group(ends, own[rank], a.shape[0]), a.placement, rank, shared) for rank in own}
    held = {rank: a.spec.region(rank)[0] for rank in own}
    local = _ranges(a.shards, held, groups, a.spec, call, run, _row_shapes(a.spec))
    products = {r: _product(call, t, b.shards[r], ends, own[r], groups[r][0]) for r, t in local.items()}
    return _ranges(products, groups, {rank: made.region(rank)[0] for rank in own}, made, call, run,
                   _row_shapes(made), grouped)


def _by_columns(call: Call, run: Run, a: Any, b: Any, made: Spec, ends: list[int], grouped: tuple[int, ...]) -> Shards:
    """Both operands' rows to their experts, whose products stay."""
    own = {rank: made.region(rank)[0] for rank in a.placement.flat}
    groups = {rank: _group(ends, own[rank], ends[-1] if ends else 0) for rank in own}
    held = {rank: b.spec.region(rank)[0] for rank in own}
    widths = {rank: (n,) for rank, (n, _) in ((rank, a.spec.local_shape(rank)) for rank in own)}
    left = _ranges({r: t.t() for r, t in a.shards.items()}, held, groups, a.spec, call, run, widths, grouped)
    right = _ranges(b.shards, held, groups, b.spec, call, run, _row_shapes(b.spec), grouped)
    return {r: _product(call, t.t(), right[r], ends, own[r], groups[r][0]) for r, t in left.items()}


def _group(ends: list[int], own: Range, last: int) -> Range:
    """The rows of these experts. Those behind the last group are nobody's: who has the last expert keeps them."""
    first, stop = own
    start = ends[first - 1] if first else 0
    return start, start if first == stop else last if stop == len(ends) else ends[stop - 1]


def _share(group: Range, where: Any, rank: int, shared: list[int]) -> Range:
    """The part of a group's rows that falls to a rank, of those that hold the same experts."""
    start, stop = group
    for axis in shared:
        first, last = split_range(stop - start, where.shape[axis], where.coords[rank][axis])
        start, stop = start + first, start + last
    return start, stop


def _ranges(shards: Shards, held: dict[int, Range], wanted: dict[int, Range], of: Spec, call: Call,
            run: Run, row: dict[int, tuple[int, ...]], axes: tuple[int, ...] | None = None) -> Shards:
    """Each rank's range of rows, from those that the others hold; as they are where it holds them already."""
    if held == wanted:
        return shards
    numbers = {part: torch.arange(*part) for part in set(wanted.values())}
    rows = {r: numbers[w] for r, w in wanted.items()}
    return run.row_exchange(_cut_axes(of.layout) if axes is None else axes, held, rows, row, str(call.func), of.layout,
                            of.layout).gather(shards)


def _product(call: Call, a: Tensor, b: Tensor, ends: list[int], own: Range, start: int) -> Tensor:
    """One rank's groups: the op itself, with the ends counted from its first row."""
    first, stop = own
    n = a.shape[-1 if b.dim() == 2 else 0]           # rows in all
    size = (n, b.shape[2]) if b.dim() == 3 else (stop - first, a.shape[0], b.shape[1])
    dtype = call["out_dtype"] or a.dtype
    if not n or first == stop:
        return a.new_zeros(size, dtype=dtype)
    offs = torch.tensor([min(max(end - start, 0), n) for end in ends[first:stop]], dtype=torch.int32, device=a.device)
    left, right = _fitting(a), _fitting(b)
    if left is not None and right is not None:
        return call.func(left, right, offs, None, call["out_dtype"]).contiguous()
    edges = [0, *offs.tolist()]                      # parts so narrow that the kernel does not take them
    if b.dim() == 2:
        return torch.stack([(a[:, i:j] @ b[i:j]).to(dtype) for i, j in pairwise(edges)])
    return torch.cat([(a[i:j] @ b[e]).to(dtype) for e, (i, j) in enumerate(pairwise(edges))]
                     + [a.new_zeros((n - edges[-1], b.shape[2]), dtype=dtype)])


def _fitting(t: Tensor) -> Tensor | None:
    """A matrix as the kernel wants it, rows or columns a multiple of 16 bytes apart (a boxing may have left them the
    other way round); None where there is no such way."""
    for way in (lambda: t, t.contiguous, lambda: t.mT.contiguous().mT):
        found = way()
        near, far = sorted(found.stride()[-2:])
        if near == 1 and far * t.element_size() % 16 == 0:
            return found
    return None


def _everywhere(call: Call, a: Any, b: Any, ends: Tensor | None, dtype: torch.dtype, run: Run) -> Any:
    """The op as it is, on every rank."""
    home = a.spec.layout.replicated
    a, b = run.redistribute([a, b], [home, home], str(call.func))
    shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (*a.shape[:-1], b.shape[2])
    offs = {r: ends if ends is None else ends.to(t.device) for r, t in a.shards.items()}
    return run.wrap(spec(home, shape, None, dtype), {r: call.func(
        t, b.shards[r], offs[r], call["bias"], call["out_dtype"]).contiguous() for r, t in a.shards.items()})


def _made_global(t: Tensor, call: Call, run: Run) -> Any:
    """A plain operand counts as broadcast."""
    if is_global(t):
        return t
    other = next(x for x in call.tensors if is_global(x))
    home = layout(other.placement, other.spec.layout.replicated.sbp)
    ranks = local_ranks_of(other.placement)
    return run.wrap(spec(home, tuple(t.shape), None, t.dtype), {r: t.contiguous() for r in ranks})
