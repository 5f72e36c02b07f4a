"""Expert parallelism: whole experts on different ranks, and tokens that travel to those that they chose.

A module of experts is given tokens [n, h], the experts that each chose, [n, k], and what their answers weigh, [n, k];
it gives [n, h]. How it does that is its own affair: it may sort, loop over experts, or gather their matrices. So
nothing is put in its place; two hooks show it other tokens. Rank by rank, each as many rows:

    rank 0 holds experts 0 1      row   token   expert            a row for every choice, in the order of the experts,
    rank 1 holds experts 2 3      0     a       0                 with the ranks that hold them
                                  1     c       1
    a chose 0 and 2               2     a       2
    b chose 2 and 3               3     b       2                 rank 1 has the most: rank 0 repeats its last row
    c chose 1 and 3               4     b       3                 (weight 0), and its part is as long
                                  5     c       3

Now equal parts of the rows are the experts' own, and all that the module does with them is local: sorting leaves them
with their ranks. A token that chose several experts of one rank travels there once; what they give is added up before
it comes back (as in DeepSeek-V3's dispatch, arXiv:2412.19437). Forward and backward each take two such all-to-alls of
rows, `boxings/rows.py`; the numbers alone, of 8 bytes a choice, are known to all ranks.

Lepikhin et al., GShard, arXiv:2006.16668, drop the tokens beyond a capacity. Here none is dropped: the parts are as
long as the fullest, for which all would wait anyway.
"""
from __future__ import annotations

import inspect
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import split_range
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tensors.materialize import named_tensors
from globaltensor.tensors.parameter_swap import swap_in, swap_out


class Slots(NamedTuple):
    """Rows in the order of their experts, equally many for every block of experts. Of each: its token, which of the
    token's choices it is, its expert, and whether it counts."""

    token: Tensor
    choice: Tensor
    expert: Tensor
    counts: Tensor


def arrange_slots(chosen: Tensor, blocks: list[tuple[int, int]], share: int) -> Slots:
    """Slots for the experts that each token chose, [n, k]. `blocks` of experts lie on one rank each, or on `share`.

    Lengths are rounded up, by an eighth at most, so that few different ones occur and recipes are found again.
    """
    experts, k = chosen.reshape(-1), chosen.shape[1]
    # stable: every process must come to the same slots
    order = torch.argsort(experts, stable=True)
    edges = torch.searchsorted(experts[order], torch.tensor([first for first, _ in blocks], device="cpu")).tolist()
    groups = [order[i:j] for i, j in pairwise([*edges, len(order)])]
    most = max(map(len, groups))
    step = 1 << max(most.bit_length() - 4, 0)
    length = -(-most // step) * step
    # ranks that share a block take equal parts of it
    length = -(-length // share) * share
    entries, chose = [], []
    for block, ((first, _), own) in enumerate(zip(blocks, groups)):
        near = order.new_tensor([split_range(len(experts), len(blocks), block)[0]])      # one that its rank may have
        entries.append(torch.cat([own, (own[-1:] if len(own) else near).expand(length - len(own))]))
        chose.append(experts[entries[-1]] if len(own) else torch.full_like(entries[-1], first))
    entry, place = torch.cat(entries), torch.arange(length, device="cpu")
    return Slots(entry // k, entry % k, torch.cat(chose), torch.cat([place < len(own) for own in groups]))


class TokenExchange:
    """The two hooks of one module: `to_experts` brings its tokens to the ranks of their experts, `combine` back."""

    def __init__(self) -> None:
        self.calls: list[tuple[ReorderedAxes, Tensor, Tensor] | None] = []       # that have begun, innermost last

    def to_experts(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A forward pre-hook. What it does not recognise it leaves alone: that runs as well, and moves more."""
        matrices: Any = next((p for p in module.parameters(recurse=False) if p.dim() == 3), None)
        self.calls.append(None)
        if len(args) != 3 or matrices is None:
            return None
        tokens, chosen, weights = args
        if not isinstance(tokens, GlobalTensor) or tokens.dim() != 2 or not chosen.numel():
            return None
        home, axes = tokens.placement, range(tokens.placement.ndim)
        expert_axes = [axis for axis in axes if matrices.sbp[axis] == split(0)]
        tokens = tokens.to_global(sbp=tuple(s if s == split(0) else broadcast for s in tokens.sbp))
        token_axes = [axis for axis in axes if axis not in expert_axes and tokens.sbp[axis] == split(0)]
        blocks = sorted({(a, b) for a, b in (matrices.spec.region(rank)[0] for rank in home.flat) if a < b})
        ranks = prod(home.shape[axis] for axis in expert_axes)       # more than blocks, where experts are few
        slots = arrange_slots((chosen.full_tensor() if isinstance(chosen, GlobalTensor) else chosen).cpu(), blocks,
                         prod(home.shape[axis] for axis in token_axes) * (1 if len(blocks) == ranks else ranks))
        cutting = [*expert_axes, *token_axes]
        reordered = ReorderedAxes(home, [*cutting, *(axis for axis in axes if axis not in cutting)], len(cutting))
        token: Any
        token, choice, counts = (reordered.deal(t) for t in (slots.token, slots.choice, slots.counts))
        picked = token.to_global(sbp=tuple(
            split(0) if axis in expert_axes and tokens.sbp[axis].is_broadcast else broadcast for axis in axes))
        weights = weights[picked].gather(1, choice[:, None]) * counts[:, None]
        self.calls[-1] = reordered, tokens, token
        for _, owner, key, parameter, _ in named_tensors(module):
            swap_in(owner, key, reordered.relabel(parameter))
        experts = from_full(slots.expert[:, None], reordered.placement, broadcast)
        return reordered.reorder_rows(tokens[picked]), experts, reordered.reorder_rows(weights)

    def combine(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A forward hook: what the experts of a token gave, added up where the token was."""
        call = self.calls.pop()
        if call is None:
            return output
        for _, owner, key, _, _ in named_tensors(module):
            swap_out(owner, key)
        if not isinstance(output, Tensor):           # the module raised an error
            return output
        tokens: Any
        reordered, tokens, token = call
        rows = reordered.restore(output)
        sums = rows.new_zeros((tokens.shape[0], rows.shape[1])).index_add(0, token, rows)
        return sums.to_global(sbp=tokens.sbp)


class ReorderedAxes:
    """The ranks of `home` on a placement with the axes in another order, those of the experts first.

    Rows are cut by the outermost axis first. Sorted by expert, the first of them belong to the first experts, so these
    must lie along the outermost axis. Every rank keeps what it has; only which part of the whole that is changes.
    """

    def __init__(self, home: placement, order: list[int], cutting: int) -> None:
        self.home, self.order = home, order
        self.rows = tuple(split(0) if axis < cutting else broadcast for axis in range(home.ndim))
        ranks = torch.tensor(home.ranks, device="cpu").permute(order).tolist()
        names = home.axis_names and [home.axis_names[axis] for axis in order]
        self.placement = home if order == sorted(order) else placement(home.type, ranks, names)

    def deal(self, rows: Tensor) -> Tensor:
        """A broadcast tensor at home that gives each rank, where it is split, the part of `rows` that is the rank's on
        the reordered placement."""
        if self.placement is not self.home:
            src, dst = layout(self.placement, self.rows), layout(self.home, self._restored(self.rows))
            dealt, shape = torch.empty_like(rows), tuple(rows.shape)
            for rank in self.home.flat:
                dealt[slice(*dst.region(shape, rank)[0])] = rows[slice(*src.region(shape, rank)[0])]
            rows = dealt
        return from_full(rows, self.home, broadcast)

    def relabel(self, x: Any) -> Any:
        """A tensor at home as one on the reordered placement: the same shards."""
        if self.placement is self.home:
            return x
        return Relabel.apply(x, layout(self.placement, tuple(x.sbp[axis] for axis in self.order)), self.order)

    def reorder_rows(self, x: Any) -> Any:
        """The same of rows, which must lie at home as `deal` dealt them, however they came to be."""
        return self.relabel(x if self.placement is self.home else x.to_global(sbp=self._restored(self.rows)))

    def restore(self, x: Any) -> Any:
        """Rows on the reordered placement as a tensor at home: the same shards."""
        if self.placement is self.home:
            return x
        x = x.to_global(sbp=self.rows)
        inverse = [self.order.index(axis) for axis in range(self.home.ndim)]
        return Relabel.apply(x, layout(self.home, self._restored(x.sbp)), inverse)

    def _restored(self, sbp: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(sbp[self.order.index(axis)] for axis in range(self.home.ndim))


class Relabel(torch.autograd.Function):
    """The same shards on the same ranks, as a tensor on a placement whose axes have another order.

    A gradient may come split along an axis where x is broadcast. Its part by one order is not its part by the other, so
    it is gathered first.
    """

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, dst: Layout, order: list[int]) -> GlobalTensor:
        ctx.src, ctx.order = x.spec.layout, order
        return GlobalTensor.wrap(spec(dst, x.spec.shape, x.spec.stride, x.spec.dtype), x.shards)

    @staticmethod
    @row_by_row
    def backward(ctx: Any, grad: GlobalTensor) -> tuple[Any, ...]:
        reordered = [ctx.src.sbp[axis] for axis in ctx.order]
        grad = grad.to_global(sbp=tuple(s if s.is_split else broadcast if g.is_split else g
                                        for s, g in zip(reordered, grad.sbp)))
        inverse = [ctx.order.index(axis) for axis in range(len(reordered))]
        restored = tuple(grad.sbp[axis] for axis in inverse)
        return Relabel.apply(grad, ctx.src.with_sbp(restored), inverse), None, None


def stacked_parameters(name: str, layer: nn.Module) -> list[str]:
    """The parameters of a module of experts that have an expert per entry of dim 0."""
    own = dict(layer.named_parameters(recurse=False))
    matrices = [p for p in own.values() if p.dim() == 3]
    if not matrices or name.rpartition(".")[2] != "experts":
        return []
    return [key for key, p in own.items() if p.dim() in (2, 3) and p.shape[0] == matrices[0].shape[0]]


def takes_choices(layer: nn.Module) -> bool:
    """Is it called with tokens, the experts that each chose, and their weights?"""
    names = list(inspect.signature(layer.forward).parameters)
    return len(names) == 3 and "index" in names[1] and "weight" in names[2]
