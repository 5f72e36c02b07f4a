"""Boxings at random, for the kernels of GPUs: shards of any strides and values, and what torch makes of them.

The same for the same seed, which a failure names: CUDA_SEED.
"""
from __future__ import annotations

import math
import os
import random

import torch
from cuda_library import Corner, Region, move

from globaltensor.boxings.copy_plan import CopyMove, ShardPlace, Strides

SEED = int(os.environ.get("CUDA_SEED") or 20_261_121)


def strange(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random, plain: bool = False) -> torch.Tensor:
    """Values of all kinds, specials of floats too, in memory of any order, offset and gaps."""
    ndim = len(shape)
    order = list(range(ndim))
    gap, offset = 1, 0
    if not plain:
        rng.shuffle(order)
        gap, offset = rng.choice([1, 1, 1, 2]), rng.choice([0, 0, 1, 3])
    stride, step = [0] * ndim, gap
    for dim in reversed(order):
        stride[dim], step = step, step * (shape[dim] + (0 if plain or step > 10_000 else rng.choice([0, 0, 0, 1, 3])))
    memory = torch.empty(offset + max(step, 1), dtype=dtype)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    if dtype.is_floating_point or dtype.is_complex:
        real = memory.view(dtype.to_real()) if dtype.is_complex else memory
        real.copy_(torch.randn(real.shape, generator=generator, dtype=torch.float64) * 10 ** rng.choice([-6, 0, 0, 3]))
        kinds = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 6e-8, 65519.0, 65520.0, 3e38, 1.0, -1.0])
        at = torch.randint(len(real), (len(real) // 8,), generator=generator)
        real[at] = kinds[torch.randint(len(kinds), at.shape, generator=generator)].to(real.dtype)
    else:
        memory.copy_(torch.randint(-2**62, 2**62, memory.shape, generator=generator).to(dtype)
                     if dtype != torch.bool else torch.rand(memory.shape, generator=generator) < 0.4)
    return memory.as_strided(shape, stride, offset)


def memory_of(t: torch.Tensor) -> torch.Tensor:
    """All of the storage of a tensor, the gaps too."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def reduced(terms: list[torch.Tensor], op: str, dtype: torch.dtype) -> torch.Tensor:
    """What a region is, by torch: the reduction in order, 16-bit floats in float32, rounded once."""
    if len(terms) == 1 and terms[0].dtype == dtype:
        return terms[0].clone()
    if dtype.is_complex:                             # torch multiplies by alpha = 1, which makes NaN of infinity
        return torch.view_as_complex(reduced([torch.view_as_real(t) for t in terms], op, dtype.to_real()).contiguous())
    narrow = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in terms]
    total = wide[0]
    for t in wide[1:]:
        if op == "sum":
            total = total | t if t.dtype == torch.bool else total + t
        else:
            total = torch.where((total > t if op == "max" else total < t) | (total != total), total, t)
    return total.float().to(dtype) if narrow else total.to(dtype)


def same(found: torch.Tensor, right: torch.Tensor, what: object) -> None:
    """Bit for bit; a NaN is a NaN."""
    found = found.cpu()
    if found.dtype.is_complex:
        found, right = torch.view_as_real(found), torch.view_as_real(right)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    wrong = (found.view(bits) != right.view(bits)) & ~((found != found) & (right != right))
    assert not wrong.any(), f"{what} CUDA_SEED={SEED}: {int(wrong.sum())} of {wrong.numel()} differ, first at " \
        f"{wrong.nonzero()[0].tolist()}: {found[wrong][0]} for {right[wrong][0]}"


class Job:
    """A boxing of one tensor at random: shards, regions, and what torch makes of them."""

    def __init__(self, rng: random.Random, device: torch.device, src: torch.dtype, dst: torch.dtype, op: str,
                 sizes: list[int], sources: int, targets: int, plain: bool = False) -> None:
        self.src, self.dst, self.op, self.device = src, dst, op, device
        grown = [[*sizes] for _ in range(sources + targets)]
        for shape in [] if plain else grown:
            for dim in range(len(sizes)):
                more = rng.choice([0, 0, 2, 16])
                if math.prod(n + 1 for n in shape) * (more + 1) < 50_000:
                    shape[dim] += more
        self.starts = [[rng.randint(0, big - n) for big, n in zip(shape, sizes)] for shape in grown]
        tensors = [strange(tuple(shape), dtype, rng, plain)
                   for shape, dtype in zip(grown, [src] * sources + [dst] * targets)]
        if targets and sources and src == dst and rng.random() < 0.2:          # in place: the same elements
            tensors[sources], self.starts[sources] = tensors[0], self.starts[0]
        self.tensors, self.count, self.sizes = tensors, sources, sizes
        self.parts = rng.choice([1, 1, 1, 2, 3])
        views = [t[tuple(slice(a, a + n) for a, n in zip(start, sizes))] for t, start in zip(tensors, self.starts)]
        storage = {id(t): memory_of(t).clone() for t in tensors}
        value = reduced(views[:sources], op, dst) if sources else torch.zeros(sizes, dtype=dst)
        self.right = []
        for t, start in list(zip(tensors, self.starts))[sources:]:
            held = storage[id(t)].as_strided(t.shape, t.stride(), t.storage_offset())
            held[tuple(slice(a, a + n) for a, n in zip(start, sizes))] = value
            self.right.append(storage[id(t)])
        moved = {id(t): memory_of(t).to(device, copy=True) for t in tensors}
        self.made = [moved[id(t)] for t in tensors]

    def move(self) -> CopyMove:
        held = [ShardPlace(m.data_ptr() + t.storage_offset() * t.itemsize, Strides(*t.stride()))
                for t, m in zip(self.tensors, self.made)]
        corners = [Corner(i if i < self.count else i - self.count, Strides(*start))
                   for i, start in enumerate(self.starts)]
        regions = [Region(len(self.sizes), self.count, len(self.tensors) - self.count, part, self.parts, 0,
                          Strides(*self.sizes)) for part in range(self.parts)]
        return move(regions, corners, held[:self.count], held[self.count:], self.src, self.dst, self.op)

    def check(self, what: object) -> None:
        for made, right in zip(self.made[self.count:], self.right):
            same(made, right, (what, self.src, self.dst, self.op, self.sizes, self.count, self.parts,
                               [t.stride() for t in self.tensors], self.starts))


def sizes_at_random(rng: random.Random, most: int = 3000) -> list[int]:
    while True:
        sizes = [rng.choice([0, 1, 1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 64, 65, 100, 257])
                 for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8]))]
        if math.prod(max(n, 1) for n in sizes) <= most and (0 not in sizes or rng.random() < 0.1):
            return sizes
