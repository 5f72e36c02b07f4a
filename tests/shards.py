"""Shards made and put together by hand: what the library is tested against, so it uses none of its arithmetic."""
from __future__ import annotations

import itertools

import pytest
import torch

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, partial_sum, split

B, P = broadcast, partial_sum


def place(ranks, axis_names=None):
    """A placement; the test is skipped in a world that is too small for it."""
    if max(torch.tensor(ranks).flatten().tolist()) >= gt.world_size():
        pytest.skip(f"a world of {gt.world_size()} ranks")
    return gt.placement("cpu", ranks, axis_names)


def sizes(n, parts):
    """n things in parts as equal as can be, larger ones first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def some(like, generator):
    """Random values of the same shape and dtype."""
    if like.dtype == torch.bool:
        return torch.rand(like.shape, generator=generator) < 0.5
    if not like.dtype.is_floating_point and not like.dtype.is_complex:
        return torch.randint(-5, 6, like.shape, generator=generator).to(like.dtype)
    values = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return values.mul_(1024).round_().div_(1024) if like.dtype.is_floating_point else values    # sums stay exact


def cut(t, sbp, parts, generator):
    """The shards of `t` on one axis of `parts` ranks; the terms of a pending sum are random."""
    if sbp.is_split:
        return [x.clone() for x in t.split(sizes(t.shape[sbp.dim], parts), sbp.dim)]
    if sbp.is_broadcast:
        return [t.clone() for _ in range(parts)]
    terms = [some(t, generator) for _ in range(parts - 1)]
    if sbp.op in ("max", "min"):                     # the value somewhere, and what it beats elsewhere
        below = [t - x.abs() if sbp.op == "max" else t + x.abs() for x in terms]
        return [*below[:1], t.clone(), *below[1:]]
    if t.dtype == torch.bool:
        return [*[torch.zeros_like(t) for _ in terms], t.clone()]
    return [*terms, t - sum(terms)]


def join(parts, sbp):
    """The value of shards on one axis."""
    if sbp.is_split:
        return torch.cat(parts, sbp.dim)
    if sbp.is_broadcast:
        for other in parts[1:]:
            torch.testing.assert_close(other, parts[0], rtol=1e-9, atol=1e-12, equal_nan=True,
                                       msg="broadcast shards differ")
        return parts[0]
    if sbp.op == "sum":
        return sum(parts[1:], parts[0])
    return torch.stack(parts).amax(0) if sbp.op == "max" else torch.stack(parts).amin(0)


def scatter(t, where, nd_sbp, generator):
    """A global tensor of value `t`, cut by hand, outermost axis first."""
    shards = [t]
    for sbp, parts in zip(nd_sbp, where.shape):
        shards = [x for shard in shards for x in cut(shard, sbp, parts, generator)]
    return gt.from_shards(dict(zip(where.flat, shards)), where, nd_sbp)


def gather(x):
    """The value of a global tensor, put together by hand, innermost axis first."""
    shards = [x.shards[r] for r in x.placement.flat]
    for sbp, parts in zip(reversed(x.sbp), reversed(x.placement.shape)):
        shards = [join(shards[i:i + parts], sbp) for i in range(0, len(shards), parts)]
    return shards[0]


def states(ndim, pending=True):
    """Every sbp of a tensor of `ndim` dims on one axis."""
    return [broadcast, *([partial_sum] if pending else []), *[split(d) for d in range(ndim)]]


def layouts(ndim, axes, pending=True):
    """Every nd-sbp."""
    return list(itertools.product(states(ndim, pending), repeat=axes))


SHAPES = [(7, 5), (1, 3), (0, 4), (2, 9), (), (5,), (3, 4, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64]


def fulls(seed=0):
    """Tensors of every shape and dtype, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        t = torch.randn(shape, generator=generator) * 100
        made[f"{dtype} {list(shape)}"] = (t > 0) if dtype == torch.bool else t.to(dtype)
    return made


def lay(t, layout):
    """A tensor in a layout; splits of dims that it lacks become broadcasts."""
    if layout is None:
        return t.clone()
    ranks, nd = layout
    return gt.from_full(t, place(ranks), tuple(broadcast if s.is_split and s.dim >= t.dim() else s for s in nd))
