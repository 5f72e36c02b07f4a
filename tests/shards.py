"""Shards made and put together by hand: what the library is tested against, so it uses none of its arithmetic."""
from __future__ import annotations

import itertools

import pytest
import torch

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, partial_sum
from globaltensor.rules.proof import cut, join, random_like, sizes, states  # noqa: F401  (the tests import them here)

B, P = broadcast, partial_sum


def place(ranks, axis_names=None):
    """A placement; the test is skipped in a world that is too small for it."""
    if max(torch.tensor(ranks).flatten().tolist()) >= gt.world_size():
        pytest.skip(f"a world of {gt.world_size()} ranks")
    return gt.placement("cpu", ranks, axis_names)


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
