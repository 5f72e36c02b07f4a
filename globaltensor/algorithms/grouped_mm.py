"""Experts on ranks of their own: ops whose rows belong where an index says, not where a layout does.

A layer of experts sorts its tokens by expert and multiplies each group by the matrix of its expert:

    sorted = tokens[order]              index: rows are picked                  [s, h] from [n, h]
    mixed = grouped_mm(sorted, w, ends) rows [ends[e-1], ends[e]) times w[e]    [s, f]
    tokens' = mixed[back]               rows are picked again

With tokens cut by rows and the matrices by experts, both S(0), nothing of this is local, and what must be communicated
depends on the data. So each rank asks the others for exactly the rows that it needs (`boxings/rows.py`):

    index, index_select     the rows that the rank's part of the index names              gather
    += at an index          the transpose: rows go to where they are added                scatter_add
    grouped_mm              the rows of the rank's experts, and back to equal parts; nothing if they are there already

In a graph of torch.compile and on the meta device, which have no values, rows are taken and added by the rules of these
ops; groups on the meta device are taken for equal.

After every op its rows are cut into equal parts again, because recipes need layouts that are known beforehand. A layer
that knows the experts before its rows are sent does better: `parallel/experts.py`.
"""
from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.local_impls import check_range
from globaltensor.algorithms.run import Run, of_values
from globaltensor.layouts.global_like import GlobalLike, is_global, spec_of
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, dense, dense_in_order, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import Range, split_range
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.agreement import compare_plain
from globaltensor.runtime.dtypes import accumulation_dtype

S0, S1, S2 = split(0), split(1), split(2)


# --------------------------------------------------------------------------------------------------- rows by number


def _row_index(call: Call) -> Any:
    """The index, global or plain, if dim 0 alone is indexed, by one list of integers; else None."""
    if "indices" in call.values:
        first, others = call["indices"][:1], call["indices"][1:]
        index = first[0] if first and all(t is None for t in others) else None
    else:
        index = call["index"] if call["dim"] == 0 else None
    return index if index is not None and index.dim() == 1 and index.dtype in (torch.int32, torch.int64) else None


def gathers_rows(call: Call) -> bool:
    """Are rows picked from a tensor that is cut by rows?"""
    own = spec_of(call["self"])
    return own is not None and S0 in own.sbp and _row_index(call) is not None


def scatters_rows(call: Call) -> bool:
    """Are rows added to others, where the values are cut by rows and the target is not cut otherwise?

    If the index is cut too and the target is whole, the rule will do: each rank adds its own rows, and a sum stays
    pending, as the gradient of a parameter should.
    """
    x, values = call["self"], call.get("values", call.get("source"))
    index = _row_index(call)
    if index is None or not call.get("accumulate", True) or not is_global(x) or not is_global(values):
        return False
    index_sbp = index.spec.sbp if is_global(index) else x.spec.layout.replicated.sbp
    fits = values.shape == (index.shape[0], *x.shape[1:]) and values.dtype == x.dtype != torch.bool
    return fits and S0 in values.spec.sbp and x.placement == values.placement and all(
        a == v or a.is_broadcast and not (v == S0 and i.is_split)
        for a, v, i in zip(x.spec.sbp, values.spec.sbp, index_sbp))


@of_values
def take_rows(call: Call, run: Run) -> GlobalLike:
    """x[index]: each rank gets the rows that its part of the index names. The result is cut as x is, and along axes
    where x is whole, as the index is."""
    x, index = call["self"], _row_index(call)
    index_sbp = index.spec.sbp if is_global(index) else x.spec.sbp
    dst = x.spec.layout.with_sbp(tuple(S0 if s.is_broadcast and i == S0 else s for s, i in zip(x.spec.sbp, index_sbp)))
    shape = (index.shape[0], *x.shape[1:])
    picked = call.func is not torch.ops.aten.index_select.default    # x[index] keeps the order of the others in memory
    out = spec(dst, shape, dense(shape, (x.spec.numel, *x.spec.stride[1:])) if picked else None, x.dtype)
    numbers = _row_numbers(call, index, x.shape[0], run)
    x, = run.redistribute([x], [x.spec.layout], str(call.func))      # moves nothing; but a copy must be current
    if numbers is None:
        return run.wrap(out, {})
    wanted, entries = _distinct(numbers, out)
    held = {rank: x.spec.region(rank)[0] for rank in x.placement.flat}
    rows = run.row_exchange(_row_axes(x.spec.layout), held, wanted, _row_shapes(out), str(call.func), x.spec.layout,
                            dst).gather(x.shards)
    taken = {r: t.index_select(0, entries[r].to(t.device)) if r in entries else t for r, t in rows.items()}
    return run.wrap(out, {r: dense_in_order(t, out.stride) for r, t in taken.items()})


@of_values
def add_rows(call: Call, run: Run) -> GlobalLike:
    """x[index] += values: each rank adds up what it has for a row, and the row's owner adds up the ranks' sums."""
    x, index, values = call["self"], _row_index(call), call.get("values", call.get("source"))
    dst = values.spec.layout
    x, values = run.redistribute([x, values], [dst, dst], str(call.func))
    numbers = _row_numbers(call, index, x.shape[0], run)
    if numbers is None:
        return run.wrap(x.spec, {})
    wanted, entries = _distinct(numbers, values.spec)
    held = {rank: x.spec.region(rank)[0] for rank in x.placement.flat}
    sums = {r: _sum_rows(t, entries[r].to(t.device), len(wanted[r])) if r in entries else t
            for r, t in values.shards.items()}
    added = run.row_exchange(_row_axes(dst), held, wanted, _row_shapes(x.spec), str(call.func), dst,
                             dst).scatter_add(sums)
    copied = "indices" in call.values                # index_put writes to a copy of x, index_add to new memory
    out = spec(dst, tuple(x.shape), dense(x.spec.shape, x.spec.stride) if copied else None, x.dtype)
    return run.wrap(out, {r: dense_in_order(torch.add(x.shards[r], t, alpha=call.get("alpha", 1)), out.stride)
                          for r, t in added.items()})


def _sum_rows(t: Tensor, rows: Tensor, n: int) -> Tensor:
    """The sums, for each of n rows, of the entries that go there; in float32 for the 16-bit floats."""
    dtype = accumulation_dtype(t.dtype)
    return t.new_zeros((n, *t.shape[1:]), dtype=dtype).index_add_(0, rows, t.to(dtype)).to(t.dtype)


def _row_axes(of: Layout) -> tuple[int, ...]:
    """The axes that cut the rows."""
    return tuple(axis for axis, s in enumerate(of.sbp) if s == S0)


def _row_shapes(of: Spec) -> dict[int, Shape]:
    """Per rank, the shape of a row."""
    return {rank: of.local_shape(rank)[1:] for rank in of.placement.flat}


def _whole_value(t: Tensor | GlobalLike, run: Run, op: str, where: placement) -> Tensor | None:
    """The whole value, on the CPU, of a small operand of an op on placement `where`; None on a process that holds no
    part of it."""
    if not is_global(t):
        compare_plain(t, f"a plain operand of {op}", where.flat)
        return t.cpu()
    whole, = run.redistribute([t], [t.spec.layout.replicated], op)
    return next(iter(whole.shards.values())).cpu() if whole.shards else None


def _row_numbers(call: Call, index: Tensor | GlobalLike, n: int, run: Run) -> Tensor | None:
    """The whole index, counted from the start. Raises OutOfRangeError for a row that does not exist."""
    own = next(t for t in call.tensors if is_global(t))
    numbers = _whole_value(index, run, str(call.func), own.spec.placement)
    if numbers is None or not own.shards:
        return None
    numbers = numbers.long()
    check_range(numbers, n, "index", lowest=-n if "indices" in call.values else 0)      # as in x[-1]
    return torch.where(numbers < 0, numbers + n, numbers)


def _distinct(numbers: Tensor, of: Spec) -> tuple[Shards, Shards]:
    """For every rank's part of the index, the rows that it names, ascending and each once; and for each entry, which
    of these it is. A rank whose entries are these rows already is left out of the second."""
    distinct: dict[Range, tuple[Tensor, Tensor | None]] = {}         # ranks with the same part share the work
    for rank in of.placement.flat:
        part = of.region(rank)[0]
        if part not in distinct:
            own = numbers[slice(*part)]
            ascending = bool((own[1:] > own[:-1]).all())
            distinct[part] = (own, None) if ascending else torch.unique(own, return_inverse=True)
    parts = {rank: distinct[of.region(rank)[0]] for rank in of.placement.flat}
    return ({r: rows for r, (rows, _) in parts.items()},
            {r: entries for r, (_, entries) in parts.items() if entries is not None})


# ----------------------------------------------------------------------------------------------- groups of rows


class GroupedSbps(NamedTuple):
    """The sbps of a grouped product on one axis; `grouped`: the ranks along it share the rows."""

    a: Sbp
    b: Sbp
    out: Sbp
    grouped: bool


def _rows_by_experts(a: Sbp, b: Sbp) -> GroupedSbps:
    """Of rows [s, k] times experts [e, k, n] -> [s, n], from the sbps of these operands."""
    if b == S2:
        return GroupedSbps(broadcast, S2, S1, False)
    if b == S1:
        return GroupedSbps(S1, S1, partial_sum, False)
    rows = broadcast if a.is_broadcast else S0
    return GroupedSbps(rows, S0, S0, True) if b == S0 else GroupedSbps(rows, broadcast, rows, rows == S0)


def _columns_by_rows(a: Sbp, b: Sbp) -> GroupedSbps:
    """Of columns [m, s] times rows [s, n] -> [e, m, n], a sum over the rows of every expert."""
    if a.is_broadcast and (b.is_broadcast or b == S1):
        return GroupedSbps(a, b, S2 if b == S1 else broadcast, False)
    if a == S0 and b.is_broadcast:
        return GroupedSbps(S0, broadcast, S1, False)
    return GroupedSbps(S1, S0, S0, True)


class _Groups(NamedTuple):
    """A grouped product whose operands have been redistributed: what all of its steps need."""

    call: Call
    run: Run
    out: Spec
    ends: list[int]                                  # of the groups' rows
    axes: tuple[int, ...]                            # along which ranks share the rows


def grouped_mm(call: Call, run: Run) -> GlobalLike:
    """Matrices for groups of rows: each rank does the groups of its own experts, and shares their rows with the ranks
    that have the same experts. Without groups, or with groups of columns, every rank does all of it."""
    op = str(call.func)
    other = next(t for t in call.tensors if is_global(t))
    a, b = (as_global(run, call[name], other, op) for name in ("self", "mat2"))
    ends = None if call["offs"] is None else _ends_of_groups(call["offs"], a, run, op)
    dtype = call["out_dtype"] or a.dtype
    sbps = {(2, 3): _rows_by_experts, (2, 2): _columns_by_rows}.get((a.dim(), b.dim()))
    if sbps is None or call["bias"] is not None:
        return _on_every_rank(call, a, b, ends, dtype, run)
    axes = [sbps(x, y) for x, y in zip(a.spec.sbp, b.spec.sbp)]
    home = a.spec.layout
    dsts = [home.with_sbp(tuple(x.a for x in axes)), home.with_sbp(tuple(x.b for x in axes))]
    a, b = run.redistribute([a, b], dsts, op)
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (call["offs"].shape[0], a.shape[0], b.shape[1])
    out = spec(home.with_sbp(tuple(x.out for x in axes)), shape, None, dtype)
    if ends is None or not a.shards:
        return run.wrap(out, {})
    groups = _Groups(call, run, out, ends.tolist(), tuple(axis for axis, x in enumerate(axes) if x.grouped))
    return run.wrap(out, (_by_rows if b.dim() == 3 else _by_columns)(groups, a, b))


def _ends_of_groups(offs: Tensor | GlobalLike, a: GlobalLike, run: Run, op: str) -> Tensor | None:
    """Where the groups of the rows of `a` end, on the CPU; None on a process that holds no part of them."""
    if a.spec.placement.type != "meta":
        return _whole_value(offs, run, op, a.spec.placement)
    n, groups = a.shape[-2], offs.shape[0]
    return torch.tensor([split_range(n, groups, i)[1] for i in range(groups)], dtype=torch.int32, device="cpu")


def _by_rows(groups: _Groups, a: GlobalLike, b: GlobalLike) -> Shards:
    """Rows go to their experts, are multiplied there, and go back to equal parts."""
    experts = {rank: b.spec.region(rank)[0] for rank in a.placement.flat}
    shared = [axis for axis in groups.axes if not b.spec.sbp[axis].is_split]
    rows = {rank: _own_share(_rows_of(groups.ends, own, a.shape[0]), a.placement, rank, shared)
            for rank, own in experts.items()}
    held = {rank: a.spec.region(rank)[0] for rank in experts}
    local = _rows_of_holders(groups, a.shards, held, rows, a.spec, _row_shapes(a.spec), _row_axes(a.spec.layout))
    products = {r: _product(groups, t, b.shards[r], experts[r], rows[r][0]) for r, t in local.items()}
    parts = {rank: groups.out.region(rank)[0] for rank in experts}
    return _rows_of_holders(groups, products, rows, parts, groups.out, _row_shapes(groups.out), groups.axes)


def _by_columns(groups: _Groups, a: GlobalLike, b: GlobalLike) -> Shards:
    """The rows of both operands go to their experts, whose products stay there."""
    experts = {rank: groups.out.region(rank)[0] for rank in a.placement.flat}
    last = groups.ends[-1] if groups.ends else 0
    rows = {rank: _rows_of(groups.ends, own, last) for rank, own in experts.items()}
    held = {rank: b.spec.region(rank)[0] for rank in experts}
    widths = {rank: a.spec.local_shape(rank)[:1] for rank in experts}
    left = _rows_of_holders(groups, {r: t.t() for r, t in a.shards.items()}, held, rows, a.spec, widths, groups.axes)
    right = _rows_of_holders(groups, b.shards, held, rows, b.spec, _row_shapes(b.spec), groups.axes)
    return {r: _product(groups, t.t(), right[r], experts[r], rows[r][0]) for r, t in left.items()}


def _rows_of(ends: list[int], experts: Range, last: int) -> Range:
    """The rows of these experts. Rows behind the last group belong to nobody: who has the last expert keeps them."""
    first, stop = experts
    start = ends[first - 1] if first else 0
    return start, start if first == stop else last if stop == len(ends) else ends[stop - 1]


def _own_share(rows: Range, where: placement, rank: int, shared: list[int]) -> Range:
    """A rank's part of its experts' rows, which it shares with the ranks along these axes."""
    start, stop = rows
    for axis in shared:
        first, last = split_range(stop - start, where.shape[axis], where.coords[rank][axis])
        start, stop = start + first, start + last
    return start, stop


def _rows_of_holders(groups: _Groups, shards: Shards, held: dict[int, Range], wanted: dict[int, Range], of: Spec,
                     row: dict[int, Shape], axes: tuple[int, ...]) -> Shards:
    """Each rank's wanted range of rows, from those that the others hold; the shards themselves if they are that."""
    if held == wanted:
        return shards
    numbers = {part: torch.arange(*part, device="cpu") for part in set(wanted.values())}
    return groups.run.row_exchange(axes, held, {r: numbers[rows] for r, rows in wanted.items()}, row,
                                   str(groups.call.func), of.layout, of.layout).gather(shards)


def _product(groups: _Groups, a: Tensor, b: Tensor, experts: Range, start: int) -> Tensor:
    """One rank's groups: the op itself, with the ends counted from the rank's first row."""
    call, (first, stop) = groups.call, experts
    n = a.shape[-1 if b.dim() == 2 else 0]           # rows in all
    size = (n, b.shape[2]) if b.dim() == 3 else (stop - first, a.shape[0], b.shape[1])
    dtype = call["out_dtype"] or a.dtype
    if not n or first == stop:                       # the kernel refuses empty operands
        return a.new_zeros(size, dtype=dtype)
    ends = [min(max(end - start, 0), n) for end in groups.ends[first:stop]]
    offs = torch.tensor(ends, dtype=torch.int32, device=a.device)
    left, right = _for_kernel(a), _for_kernel(b)
    if left is not None and right is not None:
        return call.func(left, right, offs, None, call["out_dtype"]).contiguous()
    edges = [0, *ends]                               # parts too narrow for the kernel: group by group
    if b.dim() == 2:
        return torch.stack([(a[:, i:j] @ b[i:j]).to(dtype) for i, j in pairwise(edges)])
    return torch.cat([(a[i:j] @ b[e]).to(dtype) for e, (i, j) in enumerate(pairwise(edges))]
                     + [a.new_zeros((n - edges[-1], b.shape[2]), dtype=dtype)])


def _for_kernel(t: Tensor) -> Tensor | None:
    """A matrix as the kernel needs it: rows or columns that begin at multiples of 16 bytes. A boxing may have left them
    the other way round, so each is tried. None if neither will do."""
    for variant in (lambda: t, t.contiguous, lambda: t.mT.contiguous().mT):
        candidate = variant()
        near, far = sorted(candidate.stride()[-2:])
        if near == 1 and far * t.element_size() % 16 == 0:
            return candidate
    return None


def _on_every_rank(call: Call, a: GlobalLike, b: GlobalLike, ends: Tensor | None, dtype: torch.dtype, run: Run
                   ) -> GlobalLike:
    """The op itself, on whole operands."""
    home = a.spec.layout.replicated
    a, b = run.redistribute([a, b], [home, home], str(call.func))
    shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (*a.shape[:-1], b.shape[2])
    offs = {r: ends if ends is None else ends.to(t.device) for r, t in a.shards.items()}
    return run.wrap(spec(home, shape, None, dtype), {r: call.func(
        t, b.shards[r], offs[r], call["bias"], call["out_dtype"]).contiguous() for r, t in a.shards.items()})
