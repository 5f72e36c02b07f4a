"""Rules, proved by brute force: every S, B and P of every operand, on a few ranks, against the op on the whole.

The operands are cut by hand, the op runs on every rank's parts with torch's own kernel, and what comes out is compared
with the op on the whole. So the *truth* is found: which layouts of the operands give which layouts of the results.
A rule is

    unsound      where it derives what is not true: the library would compute wrong numbers
    incomplete   where it does not derive what is true: the library may move more than it must

The shards are made and joined here with no arithmetic of the library's own, since they are what it is judged by.
"""
from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from globaltensor.errors import RuleError
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call, set_arguments
from globaltensor.rules.families import Family
from globaltensor.rules.language import fits, label_sizes, signatures, sized_rule
from globaltensor.runtime.custom_ops import overload_of
from globaltensor.runtime.torch_internals import OpOverload, tree_flatten
from globaltensor.tracebacks import api_boundary

Sides = tuple[tuple[Sbp, ...], tuple[Sbp, ...]]      # the layouts of the operands, and of the results


class Provable(Protocol):
    """What is proved of a line of the op table: its rule, and how a rank's local run differs from the op."""

    @property
    def family(self) -> Family: ...
    @property
    def local_args(self) -> Callable[..., Iterable[tuple[int | str, Any]]] | None: ...
    @property
    def local_impl(self) -> Callable[..., Any] | None: ...


_lines: Mapping[OpOverload, Provable] = {}
MOST = 1500                                          # combinations of layouts that are tried beside the derived ones


def look_lines_up_in(table: Mapping[OpOverload, Provable]) -> None:
    """Where `check` finds the line of an op: the op table is in a room above."""
    global _lines
    _lines = table


def sizes(n: int, parts: int) -> list[int]:
    """n things in parts as equal as can be, larger ones first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def random_like(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values of the same shape and dtype; floats are multiples of 2**-10, so that sums of them are exact."""
    if like.dtype == torch.bool:
        return torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    if not like.dtype.is_floating_point and not like.dtype.is_complex:
        return torch.randint(-5, 6, like.shape, generator=generator, device="cpu").to(like.dtype)
    values = torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu")
    return values.mul_(1024).round_().div_(1024) if like.dtype.is_floating_point else values


def cut(t: torch.Tensor, sbp: Sbp, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of `t` on one axis of `parts` ranks; the terms of a pending sum are random."""
    if sbp.is_split:
        return [x.clone() for x in t.split(sizes(t.shape[sbp.dim], parts), sbp.dim)]
    if sbp.is_broadcast:
        return [t.clone() for _ in range(parts)]
    terms = [random_like(t, generator) for _ in range(parts - 1)]
    if sbp.op in ("max", "min"):                     # the value somewhere, and what it beats elsewhere
        below = [t - x.abs() if sbp.op == "max" else t + x.abs() for x in terms]
        return [*below[:1], t.clone(), *below[1:]]
    if t.dtype == torch.bool:
        return [*[torch.zeros_like(t) for _ in terms], t.clone()]
    return [*terms, t - sum(terms)]


def join(parts: Sequence[torch.Tensor], sbp: Sbp) -> torch.Tensor:
    """The value of shards on one axis. Raises AssertionError where broadcast shards differ."""
    if sbp.is_split:
        return torch.cat(list(parts), sbp.dim)
    if sbp.is_broadcast:
        for other in parts[1:]:
            torch.testing.assert_close(other, parts[0], rtol=1e-9, atol=1e-12, equal_nan=True,
                                       msg="broadcast shards differ")
        return parts[0]
    if sbp.op == "sum":
        return sum(parts[1:], parts[0])
    return torch.stack(list(parts)).amax(0) if sbp.op == "max" else torch.stack(list(parts)).amin(0)


def states(ndim: int, pending: bool = True) -> list[Sbp]:
    """Every sbp of a tensor of `ndim` dims on one axis."""
    return [broadcast, *([partial_sum] if pending else []), *[split(d) for d in range(ndim)]]


class Case:
    """One op with sample arguments, on one axis of `parts` ranks.

    checked_by_kernel   the kernel refuses parts that do not fit together; False where it would read beyond them, so
                        that only consistent parts may be tried
    valueless           the values of the results mean nothing (torch.empty_like)
    """

    def __init__(self, func: OpOverload, line: Provable, args: Sequence[Any], kwargs: dict[str, Any], parts: int,
                 generator: torch.Generator, *, checked_by_kernel: bool = True, valueless: bool = False) -> None:
        self.func, self.line, self.parts = func, line, parts
        self.checked_by_kernel, self.valueless = checked_by_kernel, valueless
        self.call = Call(func, tuple(args), kwargs)
        self.rule = sized_rule(line.family(self.call), self.call.shapes)
        self.full = self.results([t.clone() for t in self.call.tensors])
        self.shards = [{s: cut(t, s, parts, generator) for s in states(t.dim(), t.dtype.is_floating_point)}
                       for t in self.call.tensors]

    def results(self, tensors: Sequence[torch.Tensor], rank: int | None = None,
                local_args: Iterable[tuple[int | str, Any]] = (), local_impl: Callable[..., Any] | None = None
                ) -> list[torch.Tensor]:
        """The tensors that the op returns for these operands."""
        args, kwargs = self.call.arguments_with(tensors)
        set_arguments(args, kwargs, local_args)
        out = local_impl(rank, args, kwargs) if local_impl else self.func(*args, **kwargs)
        return [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    def derived(self, nonempty: tuple[str, ...] | None = None) -> set[Sides]:
        """Signatures that are legal for these sizes."""
        of = label_sizes(self.rule, self.call.shapes)
        rule = self.rule if nonempty is None else replace(self.rule, nonempty=nonempty)
        return {(sig.inputs, sig.outputs) for sig in signatures(rule) if fits(rule, (sig,), (self.parts,), of)}

    def _single(self, inputs: tuple[Sbp, ...]) -> bool:
        """Is a dim cut that has one element or none and stays whole? Then one rank has it all."""
        return any(s.is_split and t.shape[s.dim] < 2 and dims[s.dim][0].endswith("!")
                   for s, t, dims in zip(inputs, self.call.tensors, self.rule.inputs))

    def _consistent(self, inputs: tuple[Sbp, ...]) -> bool:
        """Do the parts fit together? No dim cut that stays whole or is made of several, no part empty, and parts of
        one label and size equal in all operands."""
        for dims, state in zip(self.rule.inputs, inputs):
            dim = dims[state.dim] if state.is_split else ("",)
            if dim[0] == "1" or dim[0].endswith("!") or len(dim) > 1:
                return False
        for rank in range(self.parts):
            lengths: dict[tuple[str, int], int] = {}
            for q, (dims, state) in enumerate(zip(self.rule.inputs, inputs)):
                whole, part = self.call.tensors[q].shape, self.shards[q][state][rank].shape
                if 0 in part and 0 not in whole:
                    return False
                for d, n, own in zip(dims, whole, part):
                    if d[0] != "1" and lengths.setdefault((d[0].rstrip("!"), n), own) != own:
                        return False
        return True

    def parts_of(self, inputs: tuple[Sbp, ...], first: Sbp | None = None) -> list[list[torch.Tensor]] | None:
        """Per rank what the op returns; None where it raises. `first` is the layout that output 0 shall have."""
        line, tensors, full = self.line, self.call.tensors, self.full[0]
        operands, outputs, recipe = [], [], None
        if line.local_args or line.local_impl:       # these ask where their part lies
            where = placement("cpu", range(self.parts))
            operands = [spec(layout(where, (s,)), tuple(t.shape), None, t.dtype) for s, t in zip(inputs, tensors)]
            outputs = [spec(layout(where, (first,)), tuple(full.shape), None, full.dtype)] if first else []
            recipe = SimpleNamespace(func=self.func, shapes=[o.shape for o in operands], outputs=outputs,
                                     regions=[{r: o.region(r) for r in range(self.parts)} for o in operands])
        returned = []
        for rank in range(self.parts):
            local = [self.shards[q][s][rank].clone() for q, s in enumerate(inputs)]
            try:
                own = line.local_args(self.call, operands, outputs, rank) if line.local_args else ()
                impl = line.local_impl
                run = (lambda r, a, k, impl=impl: impl(recipe, r, a, k)) if impl else None
                returned.append(self.results(local, rank, own, run))
            except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
                return None                          # the op refuses these parts: nothing is true of them
        return returned if all(len(own) == len(self.full) for own in returned) else None

    def holds(self, k: int, state: Sbp, parts: list[torch.Tensor]) -> bool:
        """Are these parts of result k, laid out so, the whole?"""
        full = self.full[k]
        if state.is_split:
            own = [p.shape[state.dim] if p.dim() == full.dim() else -1 for p in parts]
            if own != sizes(full.shape[state.dim], self.parts):
                return False
        elif any(p.shape != full.shape for p in parts):
            return False
        if state.is_partial and full.dtype == torch.bool and state.op == "sum":
            return False
        if self.valueless:
            return True
        near = 1e-5 if full.dtype in (torch.float32, torch.complex64) else 1e-9
        try:
            got = join(parts, state)
        except (RuntimeError, AssertionError):       # parts that cannot be joined, broadcast parts that differ
            return False
        return got.shape == full.shape and got.dtype == full.dtype and (
            torch.allclose(got, full, rtol=near * 100, atol=near, equal_nan=True))

    def truth(self, inputs: tuple[Sbp, ...], derived: Sequence[tuple[Sbp, ...]]) -> set[tuple[Sbp, ...]]:
        """All layouts of the results that are true for these of the operands; those `derived` are tried too."""
        # local_args are told how the result is laid out, which operands alone do not decide: new_zeros has sizes of its
        # own
        firsts = states(self.full[0].dim()) if self.line.local_args else [None]
        true: set[tuple[Sbp, ...]] = set()
        for first in firsts:
            parts = self.parts_of(inputs, first)
            if parts is None:
                continue
            choices = []
            for k, full in enumerate(self.full):
                look = dict.fromkeys([*states(full.dim()), *[outs[k] for outs in derived]])
                choices.append([s for s in look if (k or first is None or s == first)
                                and self.holds(k, s, [p[k] for p in parts])])
            true |= set(itertools.product(*choices))
        return true

    def judge(self, chooser: random.Random) -> tuple[set[Sides], set[Sides]]:
        """What the rule derives that is not true, and what is true that it does not derive."""
        derived = self.derived()
        unsound: set[Sides] = set()
        missing: set[Sides] = set()
        every = list(itertools.product(*[list(s) for s in self.shards]))
        known = {inputs for inputs, _ in derived}
        with_empty = {inputs for inputs, _ in self.derived(nonempty=())}  # the kernel took some empty parts, not all
        others = [inputs for inputs in every if inputs not in with_empty and not self._single(inputs)]
        if not self.checked_by_kernel:
            others = [inputs for inputs in others if self._consistent(inputs)]
        if len(others) > MOST:
            others = chooser.sample(others, MOST)
        for inputs in [*known, *others]:
            outcomes = [outs for ins, outs in derived if ins == inputs]
            if inputs in known and any(s not in self.shards[q] for q, s in enumerate(inputs)):
                continue                             # a pending sum of integers
            true = self.truth(inputs, outcomes)
            unsound |= {(inputs, outs) for outs in outcomes if outs not in true}
            if inputs not in known:
                # Equal shards are a pending maximum as well: true of every broadcast result, and of no use.
                missing |= {(inputs, outs) for outs in true if not any(s.op in ("max", "min") for s in outs)}
        return unsound, missing


def text(signature: Sides) -> str:
    """S(0), B -> S(0)"""
    return " -> ".join(", ".join(map(str, side)) for side in signature)


@dataclass(frozen=True)
class Verdict:
    """What `check` found: `sound` signatures hold; `missing` ones hold too but do not follow from the rule."""

    op: str
    sound: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: {len(self.sound)} signatures hold", *(f"    {row}" for row in self.sound)]
        if self.missing:
            lines += ["true, but not derived from the rule:", *(f"    {row}" for row in self.missing)]
        return "\n".join(lines)


@api_boundary
def check(op: Any, samples: Iterable[Sequence[Any]], *, ranks: Sequence[int] = (2, 3), seed: int = 0) -> Verdict:
    """Prove an op's rule by brute force, in this process and without communication.

    op        an op of torch.ops, a torch.library custom op, or its name "mine::twice"; it has a rule (`gt.rule`)
    samples   argument tuples for it, a dict of keyword arguments last where there are any; plain CPU tensors, float64
              for the closest comparison, of sizes that the numbers of ranks divide and of some that they do not
    ranks     the numbers of ranks to cut operands for

    Every S, B and P of every operand is cut, run on every rank's parts and compared with the op on the whole. The time
    grows with (2 + dims) ** operands.

    Raises RuleError where the rule is unsound, with the signatures that give wrong numbers, and where the op has no
    rule. Returns a Verdict; where its `missing` is not empty, a better rule would let the op run without a boxing.
    """
    func = overload_of(op)
    line = _lines.get(func)
    if line is None:
        raise RuleError(f"{func._schema.name} has no rule to check", "an op without a rule runs on broadcast operands",
                        f'gt.rule("{func._schema.name}", "i j -> i j", "a")')
    generator, chooser = torch.Generator().manual_seed(seed), random.Random(seed)
    sound: dict[str, None] = {}
    missing: dict[str, None] = {}
    for sample in samples:
        args, kwargs = (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], dict) else (sample, {})
        for parts in ranks:
            case = Case(func, line, args, kwargs, parts, generator)
            wrong, more = case.judge(chooser)
            if wrong:
                shapes = ", ".join(str(list(t.shape)) for t in case.call.tensors)
                rows = "".join(f"\n    {row}" for row in sorted(map(text, wrong)))
                raise RuleError(f"the rule of {func._schema.name} is unsound for {shapes} on {parts} ranks:{rows}",
                                "these layouts give other numbers than the op on the whole tensors",
                                "upper-case letters for operands that enter nonlinearly, ! for dims that stay whole")
            sound |= dict.fromkeys(sorted(map(text, case.derived())))
            missing |= dict.fromkeys(sorted(map(text, more)))
    return Verdict(func._schema.name, tuple(sound), tuple(missing))
