"""A boxing as one op of a graph: what torch.compile finds where shards move.

    globaltensor::box(shards, layouts, sizes, op, purpose, unrelated) -> shards

`shards` are those of all tensors that move together, tensor by tensor, ranks ascending; so are the results. `layouts`
is a text, as the graphs that torch keeps on disk outlive this process: per tensor src, dst and dtype, read once.
`sizes` are shape and strides of each tensor, and may be symbols. So many boxings just before it are `unrelated`: they
do not lead to what it moves (trace_order.py). Autograd is above it, as above every boxing.

The op has an ordered effect. So boxings happen in one order on every rank, whatever else its graph holds; none is
computed again in backward, or dropped where a rank only sends. It is the order of the program, but for those that
inductor is told to merge (graph_merging.py).

What moves nothing (B to S, B to P) is not a boxing in a graph: it is slices and zeros, which inductor fuses.
"""
from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch

from globaltensor.boxings.run_steps import Move
from globaltensor.boxings.watch import EXPLICIT
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, dense, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions, rank_regions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.sbp import nd_sbp
from globaltensor.runtime import custom_ops, trace_order
from globaltensor.runtime.graph_effects import call_effect
from globaltensor.runtime.torch_internals import is_of_a_trace, order_effects
from globaltensor.runtime.world import local_ranks_of

Moved = tuple[Layout, Layout, torch.dtype, int]      # src, dst, dtype and number of dims of a tensor
_Tensor = tuple[Spec, list[int], Layout, list[int]]  # spec and own ranks of a tensor, where it was and where it goes


def any_of_a_trace(moves: Sequence[Move]) -> bool:
    """Are these the shards of a trace?"""
    return any(is_of_a_trace(shard) for move in moves for shard in move.shards.values())


def box_in_graph(moves: Sequence[Move], op: str, purpose: str) -> list[Shards]:
    """What `move_shards` does, as ops of the graph that is being traced."""
    placed = [_locally(move) for move in moves]
    todo = [move for move, shards in zip(moves, placed) if shards is None]
    if todo:
        shards = [move.shards[rank].resolve_conj().resolve_neg()
                  for move in todo for rank in _own_ranks(move.spec.layout)]
        sizes = [n for move in todo for n in (*move.spec.shape, *move.spec.stride)]
        if purpose == EXPLICIT:                      # else agreed on by the line of code, and each rank has its own
            purpose = f"to_global({todo[0].dst}) in a compiled graph"
        results = iter(call_effect(custom_ops.box, shards, _text_of_layouts(todo), sizes, op, purpose,
                                 trace_order.next_boxing(move.lineage for move in todo)))
    return [{rank: next(results) for rank in _own_ranks(move.dst)} if shards is None else shards
            for move, shards in zip(moves, placed)]


def _own_ranks(of: Layout) -> list[int]:
    return sorted(local_ranks_of(of.placement))


def _locally(move: Move) -> Shards | None:
    """The new shards where no rank needs another one's; None where one does."""
    own, dst = move.spec, move.dst
    if own.layout is dst:
        return move.shards
    regions = isinstance(own.layout, RankRegions) or isinstance(dst, RankRegions)
    if regions or own.placement != dst.placement or not all(
            s == d or s.is_broadcast and not (d.is_split and d in own.sbp[axis + 1:])    # whose parts are split already
            for axis, (s, d) in enumerate(zip(own.sbp, dst.sbp))):
        return None
    parts: Shards = {}
    for rank, shard in move.shards.items():
        for dim, ((start, stop), (first, last)) in enumerate(zip(own.region(rank), dst.region(own.shape, rank))):
            if (start, stop) != (first, last):
                shard = shard.narrow(dim, first - start, last - first)
        others = any(i and d.is_partial and d.op == "sum" and s.is_broadcast
                     for i, s, d in zip(dst.placement.coords[rank], own.sbp, dst.sbp))
        parts[rank] = torch.zeros_like(shard) if others else shard.clone()
    return parts


def _text_of_layouts(moves: Sequence[Move]) -> str:
    return repr([(_layout_text(move.spec.layout), _layout_text(move.dst), str(move.spec.dtype).partition(".")[2],
                  move.spec.ndim) for move in moves])


def _layout_text(of: Layout) -> tuple[Any, ...]:
    where = of.placement
    regions = tuple(of.rule.region(rank) for rank in where.flat) if isinstance(of, RankRegions) else None
    return where.type, where.ranks, where.axis_names, tuple(map(repr, of.sbp)), regions


@remembered
def _read_layouts(text: str) -> list[Moved]:
    return [(_layout_from_text(src), _layout_from_text(dst), getattr(torch, dtype), ndim)
            for src, dst, dtype, ndim in ast.literal_eval(text)]


def _layout_from_text(text: tuple[Any, ...]) -> Layout:
    kind, ranks, names, sbps, regions = text
    where = placement(kind, ranks, names)
    sbp = nd_sbp(sbps, where.names, where.ndim)
    return layout(where, sbp) if regions is None else rank_regions(where, dict(zip(where.flat, regions)), sbp)


def _moved_tensors(layouts: str, sizes: Sequence[int]) -> list[_Tensor]:
    """Spec and own ranks of each tensor, before and after."""
    tensors: list[_Tensor] = []
    numbers = iter(sizes)
    for src, dst, dtype, ndim in _read_layouts(layouts):
        shape, stride = (tuple(next(numbers) for _ in range(ndim)) for _ in range(2))
        tensors.append((spec(src, shape, stride, dtype), _own_ranks(src), dst, _own_ranks(dst)))
    return tensors


@remembered
def _known_tensors(layouts: str, *sizes: int) -> list[_Tensor]:
    return _moved_tensors(layouts, sizes)


def _new_shape(own: Spec, dst: Layout, rank: int) -> tuple[Shape, Shape]:
    size = dst.local_shape(own.shape, rank)
    return size, dense(size, dense(own.shape, own.stride))


def _fake(shards: Sequence[torch.Tensor], layouts: str, sizes: Sequence[int], op: str, purpose: str, unrelated: int
          ) -> list[torch.Tensor]:
    """What comes out, as every process can tell it of its own ranks."""
    tensors = _moved_tensors(layouts, sizes)
    device = shards[0].device if shards else torch.device(tensors[0][2].placement.type)
    return [torch.empty_strided(*_new_shape(own, dst, rank), dtype=own.dtype, device=device)
            for own, _, dst, ranks in tensors for rank in ranks]


def implement_box(move_shards: Any) -> None:
    """Register the op; `move_shards` moves shards that are there."""

    def run(shards: Sequence[torch.Tensor], layouts: str, sizes: Sequence[int], op: str, purpose: str, unrelated: int
            ) -> list[torch.Tensor]:
        tensors, left = _known_tensors(layouts, *sizes), iter(shards)
        moves = [Move(own, dict(zip(ranks, left)), dst) for own, ranks, dst, _ in tensors]
        return [moved[rank] for (*_, ranks), moved in zip(tensors, move_shards(moves, op, purpose)) for rank in ranks]

    custom_ops.implement(custom_ops.box, run)
    custom_ops.tell_shapes(custom_ops.box, _fake)
    order_effects(custom_ops.box)
