"""A number wherever an op takes one, beside operands that are split, whole or pending: the value is plain torch's.

The calls are made from the table: each op with a sample, and its in-place and `out=` variants. A number replaces each
tensor that the op lets it replace (alone and in pairs), and each number that the sample has; what the op takes is for
plain torch to say. Every call is made three times: decided, taught to the native dispatcher, and run by it.
"""
from __future__ import annotations

import itertools
import math
import operator
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rule_samples import ELSEWHERE, SAMPLES, UNCHECKED, VALUELESS, Draw, made, name_of
from shards import gather, scatter, states
from torch.utils._pytree import tree_flatten

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, partial_max, partial_min, partial_sum, split
from globaltensor.op_table.table import TABLE
from globaltensor.op_table.variants import functional_of
from globaltensor.rules.call import Call, arguments

SEED = int(os.environ.get("NUMBERS_SEED") or 20_261_121)
NUMBERS = (2, 0, -0.5, True, 1.5 - 0.5j)
PLAIN = (torch.tensor(0.5), torch.tensor(3), torch.tensor(-1.5, dtype=torch.float64))
REFUSED = (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError)     # what no plain call takes
LAYOUTS = (partial_sum, broadcast, split(0), partial_max, partial_min)
print(f"tests/test_numbers.py: NUMBERS_SEED={SEED}")
aten = torch.ops.aten


def takes_numbers(name):
    """Gradients, losses and ops behind others get no number from a user, and do not check what they get."""
    return name in SAMPLES and name not in ELSEWHERE | UNCHECKED and not (
        name.startswith(("_", "globaltensor.")) or "backward" in name or "_loss" in name)


def variants(func):
    """The op itself, in place, and with `out=`."""
    name = func._schema.name.split("::")[1]
    found = [func]
    for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
        for overload in packet.overloads() if packet is not None else ():
            other = getattr(packet, overload)
            if other._schema.is_mutable and functional_of(other) is func:
                found.append(other)
    return found


def numbered(func, values, chooser):
    """The op's arguments, by name, with numbers in places that may take one."""
    told = arguments(func)
    tensors = [a.name for a in told if isinstance(values[a.name], torch.Tensor)]
    for name in [a.name for a in told if isinstance(values[a.name], (int, float)) and is_scalar(func, a.name)]:
        for number in NUMBERS:
            yield {**values, name: number}
    for name in tensors if len(tensors) > 1 else ():
        for number in (*NUMBERS, *PLAIN):
            yield {**values, name: number}
    for pair in itertools.combinations(tensors, 2) if len(tensors) > 2 else ():
        yield {**values, **{name: chooser.choice((*NUMBERS, *PLAIN)) for name in pair}}


def is_number(value):
    """A number, or a plain tensor that is used as one?"""
    return not isinstance(value, torch.Tensor) or any(value is p for p in PLAIN)


def drawn(sample):
    """How many tensors a sample has."""
    return sum(isinstance(value, Draw) for value in (*sample[0], *sample[1].values()))


def is_scalar(func, name):
    """Is this argument a number of any type?"""
    return any(a.name == name and "number" in str(a.type) for a in func._schema.arguments)


def called(func, values):
    """The tensors that the op returns for these arguments."""
    told = arguments(func)
    args, kwargs = [values[a.name] for a in told if not a.keyword], {a.name: values[a.name] for a in told if a.keyword}
    return [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]


def spread(t, where, generator, chooser, pending):
    """A global tensor of value t; `pending`: as a sum, maximum or minimum, where its dtype allows one."""
    real = t.dtype.is_floating_point
    ways = [partial_sum, partial_sum, partial_max, partial_min] if real else [partial_sum] * t.dtype.is_complex
    return scatter(t, where, (chooser.choice(pending and ways or states(t.dim(), False)),), generator)


def same(got, want, what):
    """`got` is a global tensor of this value; `what()` tells of what call."""
    assert got.is_global and got.shape == want.shape and got.dtype == want.dtype, f"{what()}: {got}, not {want}"
    value = gather(got)
    near = 1e-9 if want.dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(value, want, rtol=near * 100, atol=near, equal_nan=True,
                               msg=lambda m: f"{what()} -> {got.spec}, NUMBERS_SEED={SEED}\n{m}")


def compare(func, values, where, generator, chooser):
    """One call on global operands in layouts drawn at random, beside the same call on plain ones; was there one?"""
    written = {a.name for a in arguments(func) if a.written}
    names = [n for n, v in values.items() if isinstance(v, torch.Tensor) and not is_number(v)]
    try:
        want = called(func, {n: v.clone() if n in written else v for n, v in values.items()})
    except REFUSED:
        return False
    pending = {chooser.choice(names), *[n for n in names if chooser.random() < 0.3]}
    own = {n: spread(values[n], where, generator, chooser, n in pending) for n in names}
    for _ in range(3):
        given = {**values, **{n: t.clone() if n in written else t for n, t in own.items()}}
        got = called(func, given)
        assert len(got) == len(want), f"{func}({given})"
        for g, w in zip(got, want) if name_of(func) not in VALUELESS else ():
            same(g, w, lambda given=given: f"{func}({given})")
    return True


def calls(func, variant, every):
    """The arguments among `every` that plain torch takes for a variant, with tensors to write its results to."""
    told = arguments(variant)
    for given in every:
        if any(a.written and a.name in given and is_number(given[a.name]) for a in told):
            continue                         # nobody writes to a number
        outs = [a.name for a in told if a.name not in given]
        try:
            given = {**given, **dict(zip(outs, called(func, given) if outs else ()))}
            called(variant, {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()})
        except REFUSED:
            continue
        yield given


def test_every_op_of_the_table():
    where = gt.placement("cpu", [0, 1])
    seen = set()
    for func in filter(lambda func: takes_numbers(name_of(func)), TABLE):
        generator, chooser = torch.Generator().manual_seed(SEED), random.Random(f"{SEED} {name_of(func)}")
        args, kwargs = (made(x, generator) for x in max(SAMPLES[name_of(func)], key=drawn))
        every = list(numbered(func, dict(Call(func, args, kwargs).values), chooser))
        for variant in variants(func):
            taken = list(calls(func, variant, every))
            for given in taken if variant is func else chooser.sample(taken, min(3, len(taken))):
                compare(variant, given, where, generator, chooser)
                seen.add(name_of(variant))
    assert {"mul.Tensor", "add_.Tensor", "mul.out", "rsub.Scalar", "addmm", "where.ScalarSelf", "clamp"} <= seen


# ------------------------------------------------------------------------------------------------- lists of tensors


def foreach_ops():
    """torch's foreach ops that write nowhere or in place."""
    every = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("aten::_foreach_")}      # dir(aten) has those that were used
    for name in sorted(every):
        for overload in getattr(aten, name).overloads():
            if not getattr(getattr(aten, name), overload)._schema.arguments[-1].is_out:
                yield getattr(getattr(aten, name), overload)


def foreach_values(func, number, numbers, tensors):
    """Arguments for a foreach op, where it takes a number, numbers or a tensor for all; None for another op."""
    values = {}
    for a in func._schema.arguments:
        kind = str(a.type)
        if kind == "List[Tensor]":
            values[a.name] = next(tensors)
        elif "number" in kind:
            values[a.name] = numbers if kind.startswith("List") else number
        elif kind == "Tensor":
            values[a.name] = torch.tensor([0.5, -2.0]) if a.name == "scalars" else torch.tensor(-0.5)
        elif a.has_default_value():
            values[a.name] = a.default_value
        else:
            return None
    return values if len(values) > 1 else None


SQUARES = ((4, 4), (3, 3))                           # of which products have the shape of sums


@pytest.mark.sample(3)
@pytest.mark.parametrize("sbp", LAYOUTS, ids=str)
def test_every_foreach_op(sbp):
    generator = torch.Generator().manual_seed(SEED)
    where = gt.placement("cpu", [0, 1])
    seen = set()
    for func, number, sizes in itertools.product(foreach_ops(), (2, -0.5, 0, math.inf), (((6, 4), (5,)), SQUARES)):
        lists = [[torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 for n in sizes] for _ in range(3)]
        numbers = [number, 3 if number is True else -1.5]
        values = foreach_values(func, number, numbers, iter(lists))
        if values is None:
            continue
        written = {a.name for a in arguments(func) if a.written}
        plain = {n: [t.clone() for t in v] if n in written else v for n, v in values.items()}
        try:
            want = called(func, plain) or plain["self"]
        except REFUSED:
            continue
        for _ in range(3):
            own = {n: [scatter(t, where, (sbp,), generator) for t in v] if any(v is x for x in lists) else v
                   for n, v in values.items()}
            got = called(func, own) or own["self"]
            for g, w in zip(got, want, strict=True):
                same(g, w, lambda own=own: f"{func}({own})")
        seen.add(name_of(func))
    assert {"_foreach_mul.Scalar", "_foreach_add_.ScalarList", "_foreach_div.Tensor", "_foreach_pow.ScalarAndTensor",
            "_foreach_addcmul.ScalarList", *["_foreach_mm"] * hasattr(aten, "_foreach_mm")} <= seen


# ------------------------------------------------------------------------------------------- as programs write them

SPELLINGS = {
    **{name: lambda n, x, f=getattr(operator, name): (f(n, x), f(x, n))
       for name in "add sub mul truediv floordiv mod pow".split()},
    **{f"torch.{name}": lambda n, x, f=getattr(torch, name): (f(n, x), f(x, n))
       for name in "add sub mul div true_divide floor_divide remainder pow float_power xlogy".split()},
    "alpha": lambda n, x: (torch.add(n, x, alpha=2), torch.sub(n, x, alpha=2.5), torch.add(x, n, alpha=2),
                           torch.rsub(x, n, alpha=2), torch.add(x, x, alpha=n), torch.sub(x, x, alpha=n)),
    "in place": lambda n, x: (x.clone().add_(n), x.clone().sub_(n), x.clone().mul_(n), x.clone().div_(n)),
    "out": lambda n, x: (torch.add(n, x, out=x.clone()), torch.mul(n, x, out=x * 1), torch.div(x, n, out=x.clone())),
    "iadd": lambda n, x: operator.iadd(x.clone(), n),
    "rounded": lambda n, x: (torch.div(n, x, rounding_mode="floor"), torch.div(x, n, rounding_mode="trunc")),
    "where": lambda n, x: (torch.where(x > 0, n, x), torch.where(x > 0, x, n), x.masked_fill(x > 0, n)),
    "lerp addcmul": lambda n, x: (x.lerp(x * 2, n), x.addcmul(x, x, value=n), x.addcdiv(x, x, value=n)),
    "addmm": lambda n, x: (torch.addmm(x @ x.T, x, x.T, beta=n, alpha=n), torch.baddbmm(
        (x @ x.T)[None], x[None], x.T[None], beta=n)),
    "clamp": lambda n, x: (x.clamp(min=n), x.clamp_max(n), F.threshold(x, n, n), F.leaky_relu(x, n)),
    "compared": lambda n, x: (x > n, n <= x, x == n, torch.copysign(x, n), torch.fmod(x, n)),
    "filled": lambda n, x: (x.clone().fill_(n), torch.full_like(x, n), x.new_full((3,), n), F.pad(x, (1, 1), value=n)),
    "sum": lambda n, x: sum([x, x], n),
}
GIVEN = (2, 0, -0.5, True, 1.5 - 0.5j, math.inf, -math.inf, np.float64(0.5), np.float32(0.5), np.int64(3),
         torch.tensor(0.5), torch.tensor(3), torch.tensor(True))


@pytest.mark.check
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelled_as_in_programs(name):
    generator = torch.Generator().manual_seed(SEED)
    where = gt.placement("cpu", [0, 1])
    full = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    taken = 0
    for number, sbp in itertools.product(GIVEN, LAYOUTS):
        try:
            want = tree_flatten(SPELLINGS[name](number, full))[0]
        except REFUSED:
            continue
        taken += 1
        for _ in range(2):
            got = tree_flatten(SPELLINGS[name](number, scatter(full, where, (sbp,), generator)))[0]
            for g, w in zip(got, want, strict=True):
                same(g, w, lambda number=number: f"{name} of {number!r} and a tensor in {sbp}")
    assert taken


CASTS = {                                            # of values into a tensor of integers
    "fill_": lambda x, v: (x * 1).fill_(v[1]), "copy_": lambda x, v: (x * 1).copy_(v),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([1]), v[1]),
    "masked_fill": lambda x, v: x.masked_fill(x > 3, v[1]),
    "slice_scatter": lambda x, v: x.slice_scatter(v[None], 0, 1, 2),
    "select_scatter": lambda x, v: x.select_scatter(v, 0, 1), "diagonal_scatter": torch.diagonal_scatter,
    "an assignment": lambda x, v: torch.ops.aten.copy(x, v)}


@pytest.mark.parametrize("name", CASTS)
def test_a_pending_sum_that_is_cast_to_integers_is_reduced_first(name):
    """Each of its terms would be rounded."""
    where = gt.placement("cpu", [0, 1])
    x, value = torch.arange(12).view(4, 3), torch.tensor([1.2, -2.3, 3.6])
    parts = {0: value - 0.7, 1: torch.full_like(value, 0.7)}
    for sbp in (gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast):
        got = CASTS[name](gt.from_full(x, where, sbp), gt.from_shards(parts, where, gt.sbp.partial_sum))
        assert torch.equal(got.full_tensor(), CASTS[name](x, value)), sbp
