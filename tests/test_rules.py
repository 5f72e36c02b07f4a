"""The table of rules, proved by brute force: every line, every S, B and P of every operand, on 2 and 3 ranks.

The judge is the library's own, `gt.rules.check` (globaltensor/rules/proof.py): it finds which layouts of the operands
give which layouts of the results. A rule may not be unsound. What is true and does not follow from the rule must be
listed in `rule_samples.MISSING`, with the reason.

Values are random, so that nothing is true by accident. Where there are very many combinations, those of the derived
signatures are all tried, and as many others as `proof.MOST`, drawn from the seed.
"""
from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from rule_samples import ELSEWHERE, MISSING, SAMPLES, UNCHECKED, VALUELESS, made, name_of
from shards import gather, layouts, scatter
from torch.utils._pytree import tree_flatten

import globaltensor as gt
from globaltensor.errors import RuleError
from globaltensor.op_table.line import Line, always_decomposed
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call
from globaltensor.rules.families import fixed, reduction
from globaltensor.rules.language import signatures
from globaltensor.rules.proof import Case, text

SEED = int(os.environ.get("RULES_SEED") or 20_261_121)
print(f"tests/test_rules.py: RULES_SEED={SEED}")


def whole_line(line):
    """Is the rule never used, since the op is always decomposed, or is there none?"""
    return line.family is always_decomposed or (
        line.decomposition is not None and line.offer is None
        and line.applies is Line.__dataclass_fields__["applies"].default)


PROVED = {func: line for func, line in TABLE.items() if not whole_line(line)}


def proved(func, line, args, kwargs, parts, generator):
    """The case of one sample."""
    return Case(func, line, args, kwargs, parts, generator, checked_by_kernel=name_of(func) not in UNCHECKED,
                valueless=name_of(func) in VALUELESS)


def excused(name, signature):
    """Is this true signature left out on purpose?"""
    return any(test(*signature) for names, test, reason in MISSING if name in names)


def judged(func, number, parts, generator, chooser):
    """Unsound signatures, and true ones that are neither derived nor excused, of one sample."""
    args, kwargs = (made(x, generator) for x in SAMPLES[name_of(func)][number])
    case = proved(func, PROVED[func], args, kwargs, parts, generator)
    wrong, missing = case.judge(chooser)
    return case, wrong, {m for m in missing if not excused(name_of(func), m)}


@pytest.mark.parametrize("func", PROVED, ids=name_of)
def test_line(func):
    name = name_of(func)
    assert name in SAMPLES, f"the line of {name} has no sample in rule_samples.py"
    if name in ELSEWHERE:
        pytest.skip("no kernel for CPU")
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name}")
    for number, parts in itertools.product(range(len(SAMPLES[name])), (2, 3)):
        case, wrong, missing = judged(func, number, parts, generator, chooser)
        what = f"{name}, sample {number}, {parts} ranks, {case.rule}, RULES_SEED={SEED}"
        assert not wrong, f"unsound: {what}\n" + "\n".join(sorted(map(text, wrong)))
        for _ in range(8):                           # what was true by accident is not true of other values
            if missing:
                missing &= judged(func, number, parts, generator, chooser)[2]
        assert not missing, f"true, but not derived: {what}\n" + "\n".join(sorted(map(text, missing)))


# ------------------------------------------------------------------------------------------- the proof can fail

WRONG = [
    ("relu", fixed("i j -> i j", "a"), "relu is not linear"),
    ("add.Tensor", fixed("i j, i j -> i j", "a*b"), "a sum is not a product: one pending term is counted once"),
    ("mul.Tensor", fixed("i j, i j -> i j", "a+b"), "a product is not a sum"),
    ("_softmax", fixed("i j -> i j"), "softmax mixes its dim"),
    ("cumsum", fixed("i j -> i j", "a"), "cumsum depends on what came before"),
    ("mean", fixed("i j -> ", "a"), "a mean of parts is not a part of the mean"),
    ("amax", reduction(), "a maximum is not a sum"),
    ("mm", fixed("m k, k n -> m n", "a*B"), None),
    ("addmm", fixed("n, m k, k n -> m n", "b*c"), "the bias would be added once per rank"),
    ("t", fixed("i j -> i j", "a"), "the dims are swapped"),
    ("view", fixed("i j -> (i j)", "a"), "an uneven part lies elsewhere"),
    ("native_layer_norm", fixed("b d!, d!, d! -> b d!, b o!, b o!", "a*b+c;a;a"), "the norm is not linear"),
]


@pytest.mark.parametrize("name, family, why", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_rule_is_caught(name, family, why):
    func = next(f for f in PROVED if name_of(f) == name)
    generator = torch.Generator().manual_seed(SEED % 2**31)
    found = set()
    for number, parts in itertools.product(range(len(SAMPLES[name])), (2, 3)):
        args, kwargs = (made(x, generator) for x in SAMPLES[name][number])
        try:
            case = proved(func, Line(family), args, kwargs, parts, generator)
        except (RuleError, IndexError):
            continue                                 # a sample of another number of dims
        if all(len(dims) == t.dim() for dims, t in zip(case.rule.inputs, case.call.tensors)):
            wrong, missing = case.judge(random.Random(0))
            found |= wrong if why else missing
    assert found, why or "a rule that leaves out what is true is caught too"


# --------------------------------------------------------------------------------------------- several axes


@pytest.mark.parametrize("name", ["mm", "addmm", "add.Tensor", "sum.dim_IntList", "permute", "embedding", "where.self",
                                  "view", "gather", "nll_loss_backward", "native_layer_norm", "tril"])
def test_two_axes_are_a_product_of_one(name):
    """Pairs of signatures, on 2 x 2 ranks, through the library's own run of the op."""
    chooser = random.Random(f"{SEED} {name}")
    func = next(f for f in PROVED if name_of(f) == name)
    generator = torch.Generator().manual_seed(SEED % 2**31)
    where = gt.placement("cpu", [[0, 1], [2, 3]])
    for number in range(len(SAMPLES[name])):
        args, kwargs = (made(x, generator) for x in SAMPLES[name][number])
        call = Call(func, args, kwargs)
        want = proved(func, PROVED[func], args, kwargs, 2, generator).full
        pairs = list(itertools.product(signatures(PROVED[func].rule(call)), repeat=2))
        for pair in chooser.sample(pairs, min(len(pairs), 30)):
            if any(s.is_partial and not t.dtype.is_floating_point
                   for sig in pair for s, t in zip(sig.inputs, call.tensors)):
                continue
            operands = [scatter(t, where, tuple(sig.inputs[q] for sig in pair), generator)
                        for q, t in enumerate(call.tensors)]
            same(func, call, operands, want)


def same(func, call, operands, want):
    """The op on global operands gives what it gives on plain ones."""
    args, kwargs = call.full_arguments()
    for (_, index), name, t in zip(call.slots, call.names, operands):
        at = call.position(name)
        holder = args if isinstance(at, int) else kwargs
        holder[at] = t if index is None else [t if i == index else other for i, other in enumerate(holder[at])]
    got = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
    what = f"{name_of(func)} of {[t.spec for t in operands]}, RULES_SEED={SEED}"
    assert len(got) == len(want), what
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == w.dtype, what
        for r, shard in g.shards.items():
            assert tuple(shard.shape) == g.spec.local_shape(r), f"{what}: {g.spec}"
        if name_of(func) not in VALUELESS:
            near = 1e-5 if w.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(gather(g), w, rtol=near * 100, atol=near, equal_nan=True,
                                       msg=lambda m, g=g: f"{what} -> {g.spec}\n{m}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("func", PROVED, ids=name_of)
def test_dispatch(func):
    """Every line as dispatch runs it, in layouts drawn at random: boxing, local arguments, decompositions, and all."""
    name = name_of(func)
    if name in ELSEWHERE:
        pytest.skip("no kernel for CPU")
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name}")
    places = [gt.placement("cpu", ranks) for ranks in ([0, 1], [2, 0, 1], [[0, 1], [2, 3]])]
    for number in range(len(SAMPLES[name])):
        for where in places:
            args, kwargs = (made(x, generator) for x in SAMPLES[name][number])
            call = Call(func, args, kwargs)
            want = proved(func, PROVED[func], args, kwargs, 2, generator).full
            for _ in range(2):
                nds = [chooser.choice(layouts(t.dim(), where.ndim, t.dtype.is_floating_point)) for t in call.tensors]
                same(func, call, [scatter(t, where, nd, generator) for t, nd in zip(call.tensors, nds)], want)
