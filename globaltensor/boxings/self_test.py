"""The self-test of a device's kernels: do they make what torch ops on the CPU make, to the bit?

A case is a boxing in small: tensors of a dtype in a source memory, regions of them that are copied or reduced into
tensors in a target memory. All source memory is random, and every byte of the target memory is compared, those between
the tensors too, so that a store past an end is found as well. The cases vary what kernels distinguish:

    sizes and offsets        words of 1 to 16 bytes, heads and tails, rows, several dims
    strides                  contiguous, transposed, every other element
    sources and targets      none (zeros), one (a copy), several (sums, maxima, minima); one target or two
    parts                    a region of which another rank would do the rest

Each kernel does its cases in launches that are small enough for a table to travel with them; then those that passed
are done all at once, with a table in the device's memory.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from globaltensor.boxings.copy_plan import CopyMove, CopyPlan, move_array
from globaltensor.boxings.kernel_program import OPS, KernelProgram, pack_corner, pack_region
from globaltensor.layouts.regions import Region
from globaltensor.runtime import philox
from globaltensor.runtime.device_kernels import BOXING_KERNELS
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.kernel_library import KernelLibrary

_SIZES: tuple[tuple[int, ...], ...] = ((1,), (67,), (1000,), (7, 33), (33, 40), (64, 64), (3, 65, 9), (2, 5, 4, 12))
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
_EACH = 68                                           # cases of a kernel, of which there are three
_KEY = 0xFEDCBA9876543210


class Operand(NamedTuple):
    """A tensor in the source or target memory: where it begins, in bytes, and how it lies."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return self._cut(memory, self.dtype, self.size, self.stride)

    def bits(self, memory: torch.Tensor) -> torch.Tensor:
        """Its elements as integers, of which a NaN equals itself."""
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(self.dtype.itemsize, torch.int64)
        words = self.dtype.itemsize // whole.itemsize
        return self._cut(memory, whole, (*self.size, words), (*(words * step for step in self.stride), 1))

    def _cut(self, memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
             ) -> torch.Tensor:
        end = len(memory) - (len(memory) - self.offset) % dtype.itemsize
        return memory[self.offset:end].view(dtype).as_strided(size, stride)


class BoxingCase(NamedTuple):
    """One boxing in small: the reduction of some sources, or zeros, in each of the targets."""

    sources: tuple[Operand, ...]
    targets: tuple[Operand, ...]
    op: str
    parts: int                                       # in which the region is done, one by one

    def text(self) -> str:
        """For the report of a failure."""
        first = self.targets[0]
        return f"{len(self.sources)} sources of {first.size} {str(first.dtype)[6:]}, {self.op or 'copied'}"


class Memory:
    """Bytes from which operands are cut, one after the other."""

    def __init__(self) -> None:
        self.used = 0

    def cut(self, size: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Operand:
        """Room for a tensor whose memory is in some order, with an offset that need not suit wide words."""
        order = list(range(len(size)))
        if rng.random() < 0.4:
            rng.shuffle(order)
        stride, step = [0] * len(size), rng.choice([1, 1, 1, 1, 2])
        for dim in reversed(order):
            stride[dim], step = step, step * (size[dim] + rng.choice([0, 0, 0, 3]))
        begin = (self.used + 31) // 16 * 16 + rng.choice([0, 0, 1, 3]) * dtype.itemsize
        self.used = begin + step * dtype.itemsize
        return Operand(begin, size, tuple(stride), dtype)


def kernel_faults(library: KernelLibrary, index: int) -> dict[str, str]:
    """What is wrong with the kernels of a library on a device, by kernel; empty where nothing is."""
    return {**_boxing_faults(BoxingTrial(library, index)), **_random_faults(torch.device(library.type, index))}


# ------------------------------------------------------------------ boxings
class BoxingTrial:
    """All cases, their memory on the CPU and on the device, and the launches that do them there."""

    def __init__(self, library: KernelLibrary, index: int) -> None:
        self.library, self.index = library, index
        rng, read, written = random.Random(7), Memory(), Memory()
        self.cases = {kernel: list(_cases(kernel, rng, read, written)) for kernel in BOXING_KERNELS[:3]}
        generator = torch.Generator("cpu").manual_seed(7)
        self.source, self.before = (torch.randint(256, (memory.used + 64,), dtype=torch.uint8, generator=generator,
                                                  device="cpu") for memory in (read, written))
        for case in (case for some in self.cases.values() for case in some):
            _fill_sources(case, self.source, generator)
        self.device = torch.device(library.type, index)
        self.on_device = self.source.to(self.device)

    def wrong(self, cases: Sequence[BoxingCase], together: bool) -> list[BoxingCase]:
        """Those of the cases whose targets are not what torch ops make; done in one launch, or in small ones."""
        target = self.before.to(self.device)
        moves = [_move_of(case, self.on_device, target) for case in cases]
        for some in [moves] if together else _small_launches(self.library, moves):
            self.library.reduce(self.index, move_array(some))
        result, expected = target.cpu(), self.before.clone()
        for case in cases:
            _do_by_torch(case, self.source, expected)
        bad = [case for case in cases if any(not torch.equal(t.bits(result), t.bits(expected)) for t in case.targets)]
        return bad or ([] if torch.equal(result, expected) else [*cases[:1]])       # a store beside all targets


def _boxing_faults(trial: BoxingTrial) -> dict[str, str]:
    faults: dict[str, str] = {}
    good: list[BoxingCase] = []
    for kernel, cases in trial.cases.items():
        if bad := trial.wrong(cases, together=False):
            faults[kernel] = f"{len(bad)} of {len(cases)} boxings are wrong, such as {bad[0].text()}"
        else:
            good += cases
    if not good:
        faults["tables"] = "no kernel is right that could read them"
    elif bad := trial.wrong(good, together=True):
        faults["tables"] = f"{len(bad)} of {len(good)} boxings are wrong when done together, such as {bad[0].text()}"
    return faults


def _cases(kernel: str, rng: random.Random, read: Memory, written: Memory) -> Iterator[BoxingCase]:
    dtypes = {"copies": (*_FLOATS, *_INTEGERS, torch.complex64, torch.complex128),
              "float sums": (*_FLOATS, torch.complex64), "integer sums": _INTEGERS}[kernel]
    for i in range(_EACH):
        dtype, size = dtypes[i % len(dtypes)], _SIZES[i // 2 % len(_SIZES)]
        count = i % 9 and 1 if kernel == "copies" else 2 + i % 3
        op = "" if count < 2 else "sum" if dtype.is_complex else ("sum", "sum", "max", "min")[i % 4]
        sources = tuple(read.cut(size, dtype, rng) for _ in range(count))
        targets = tuple(written.cut(size, dtype, rng) for _ in range(1 + (i % 5 == 0)))
        yield BoxingCase(sources, targets, op, rng.choice([1, 1, 1, 2, 3]))


def _fill_sources(case: BoxingCase, memory: torch.Tensor, generator: torch.Generator) -> None:
    """Numbers where random bytes would be infinities or no truths."""
    for operand in case.sources:
        t = operand.within(memory)
        if operand.dtype.is_floating_point or operand.dtype.is_complex:
            real = torch.view_as_real(t) if operand.dtype.is_complex else t
            real.copy_(torch.randn(real.shape, generator=generator, dtype=torch.float32, device="cpu"))
        elif operand.dtype == torch.bool:
            t.copy_(torch.rand(t.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.4)


def _do_by_torch(case: BoxingCase, source: torch.Tensor, target: torch.Tensor) -> None:
    terms = [operand.within(source) for operand in case.sources]
    dtype = case.targets[0].dtype
    if not terms:
        value = torch.zeros(case.targets[0].size, dtype=dtype, device="cpu")
    else:
        value = terms[0].to(accumulation_dtype(dtype)) if len(terms) > 1 else terms[0]
        for term in terms[1:]:
            value = (torch.add if case.op == "sum" else torch.maximum if case.op == "max" else torch.minimum)(
                value, term.to(value.dtype))
    for operand in case.targets:
        operand.within(target).copy_(value)


def _move_of(case: BoxingCase, source: torch.Tensor, target: torch.Tensor) -> CopyMove:
    size, parts = case.targets[0].size, range(case.parts)
    regions = b"".join(pack_region(len(case.sources), len(case.targets), part, case.parts, 0, size) for part in parts)
    places = [*range(len(case.sources)), *range(len(case.targets))]
    corners = b"".join(pack_corner(place, (0,) * len(size)) for place in places)
    program = KernelProgram(regions, corners, case.parts, OPS[case.op], (), ())
    plan = CopyPlan(program, case.targets[0].dtype, max(len(case.sources), len(case.targets)))
    return plan.at(*({i: operand.within(memory) for i, operand in enumerate(operands)}
                     for memory, operands in ((source, case.sources), (target, case.targets))))


def _small_launches(library: KernelLibrary, moves: list[CopyMove]) -> Iterator[list[CopyMove]]:
    """Some moves at a time, so few that their table travels with the launch."""
    if len(moves) > 8 or (len(moves) > 1 and library.room(move_array(moves))):
        yield from _small_launches(library, moves[:len(moves) // 2])
        yield from _small_launches(library, moves[len(moves) // 2:])
    else:
        yield moves


# ------------------------------------------------------------------ random numbers
_SLICES: tuple[tuple[tuple[int, ...], Region], ...] = (
    ((5003,), ((1, 5002),)), ((64, 48), ((0, 64), (16, 32))), ((33, 17), ((4, 30), (3, 5))),
    ((2**20, 2**20, 2**20), ((2**20 - 1, 2**20), (17, 19), (5, 600))))
_DRAWS: dict[str, tuple[tuple[torch.dtype, ...], Callable[..., torch.Tensor], dict[str, float]]] = {
    "uniform": (_FLOATS, philox.uniform, {"low": -2.5, "high": 1.7}),
    "normal": (_FLOATS, philox.normal, {"mean": 0.3, "std": 1.7}),
    "exponential": (_FLOATS, philox.exponential, {"lambd": 0.7}),
    "integers": ((torch.int8, torch.int32, torch.int64, torch.float32), philox.integers, {"low": -3, "high": 100}),
    "bernoulli": ((torch.bool, torch.float32, torch.bfloat16), philox.bernoulli, {"p": 0.3})}


def _random_faults(device: torch.device) -> dict[str, str]:
    """Each law over some slices, beside what philox.py makes of them by torch ops on the CPU."""
    faults: dict[str, str] = {}

    def compare(law: str, what: str, draw: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> None:
        if law not in faults:
            with philox.twin():
                right = draw(_KEY, *arguments, device="cpu", **options)
            if not torch.equal(draw(_KEY, *arguments, device=device, **options).cpu(), right):
                faults[law] = f"{what} are wrong"

    for shape, region in _SLICES:
        compare("words", f"those of {region} of {shape}", philox.random_words, shape, region, stream=7)
        for law, (dtypes, draw, parameters) in _DRAWS.items():
            for dtype in dtypes:
                what = f"{str(dtype)[6:]} numbers of {region} of {shape}"
                compare(law, what, draw, shape, region, dtype, **parameters)
    compare("integers", "numbers of 64 bits", philox.integers, (300,), ((0, 300),), torch.int64,
            low=-2**63, high=2**63 - 1)
    return faults
