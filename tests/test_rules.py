"""The table of rules, proved by brute force: every line, every S, B and P of every operand, on 2 and 3 ranks.

The operands are cut by hand, the op runs on every rank's parts with torch's own kernel (and the line's local_args and
local_impl, as dispatch does it), and what comes out is compared with the op on the whole. So the *truth* is found:
which layouts of the operands give which layouts of the results. A rule is

    unsound     where it derives what is not true; that must not be
    incomplete  where it does not derive what is true; that must be listed in `rule_samples.MISSING`, with the reason

Values are random, so that nothing is true by accident. Where there are very many combinations, those of the derived
signatures are all tried, and as many others as `MOST`, drawn from the seed.
"""
from __future__ import annotations

import itertools
import os
import random
from types import SimpleNamespace

import pytest
import torch
from rule_samples import ELSEWHERE, MISSING, SAMPLES, UNCHECKED, VALUELESS, made, name_of
from shards import cut, gather, join, layouts, scatter, sizes, states
from torch.utils._pytree import tree_flatten

import globaltensor as gt
from globaltensor.dispatch.choose import _fits as fits
from globaltensor.dispatch.choose import label_sizes
from globaltensor.errors import RuleError
from globaltensor.layouts.layout import layout, spec
from globaltensor.op_table.line import Line
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call
from globaltensor.rules.families import fixed, reduction
from globaltensor.rules.language import signatures

SEED = int(os.environ.get("RULES_SEED") or 20_261_121)
MOST = 1500
print(f"tests/test_rules.py: RULES_SEED={SEED}")


def whole_line(line):
    """Is the rule never used, since the op is always decomposed?"""
    return line.decomposition is not None and line.applies is Line.__dataclass_fields__["applies"].default


PROVED = {func: line for func, line in TABLE.items() if not whole_line(line)}


class Case:
    """One op with sample arguments, on one axis of `parts` ranks."""

    def __init__(self, func, line, args, kwargs, parts, generator):
        self.func, self.line, self.parts = func, line, parts
        self.call = Call(func, args, kwargs)
        self.rule = line.family(self.call)
        self.where = gt.placement("cpu", list(range(parts)))
        self.full = self.results(self.clone(self.call.tensors))
        self.shards = [{s: cut(t, s, parts, generator) for s in states(t.dim(), t.dtype.is_floating_point)}
                       for t in self.call.tensors]

    def clone(self, tensors):
        return [t.clone() for t in tensors]

    def results(self, tensors, rank=None, local_args=(), local_impl=None):
        """The tensors that the op returns for these operands."""
        args, kwargs = self.call.full_arguments()
        for (at, index), name, tensor in zip(self.call.slots, self.call.names, tensors):
            at = self.call.position(name)
            holder = args if isinstance(at, int) else kwargs
            if index is None:
                holder[at] = tensor
            else:
                holder[at] = [tensor if i == index else t for i, t in enumerate(holder[at])]
        for at, value in local_args:
            (args if isinstance(at, int) else kwargs)[at] = value
        out = local_impl(rank, args, kwargs) if local_impl else self.func(*args, **kwargs)
        return [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    def derived(self, nonempty=None):
        """Signatures that are legal for these sizes."""
        of = label_sizes(self.rule, self.call.shapes)
        full = self.rule.nonempty if nonempty is None else nonempty
        return {(sig.inputs, sig.outputs) for sig in signatures(self.rule)
                if fits((sig,), (self.parts,), of, dict(self.rule.even), full)}

    def single(self, inputs):
        """Is a dim cut that has one element or none and stays whole? Then one rank has it all."""
        return any(s.is_split and t.shape[s.dim] < 2 and dims[s.dim][0].endswith("!")
                   for s, t, dims in zip(inputs, self.call.tensors, self.rule.inputs))

    def consistent(self, inputs):
        """Do the parts fit together? No dim cut that stays whole or is made of several, no part empty, and parts of
        one label and size equal in all operands."""
        for dims, state in zip(self.rule.inputs, inputs):
            dim = dims[state.dim] if state.is_split else ("",)
            if dim[0] == "1" or dim[0].endswith("!") or len(dim) > 1:
                return False
        for rank in range(self.parts):
            found = {}
            for q, (dims, state) in enumerate(zip(self.rule.inputs, inputs)):
                whole, part = self.call.tensors[q].shape, self.shards[q][state][rank].shape
                if 0 in part and 0 not in whole:
                    return False
                for d, n, own in zip(dims, whole, part):
                    if d[0] != "1" and found.setdefault((d[0].rstrip("!"), n), own) != own:
                        return False
        return True

    def parts_of(self, inputs, first=None):
        """Per rank what the op returns; None where it raises. `first` is the layout that output 0 shall have."""
        tensors = self.call.tensors
        operands = [spec(layout(self.where, (s,)), tuple(t.shape), None, t.dtype) for s, t in zip(inputs, tensors)]
        full = self.full[0]
        outputs = [spec(layout(self.where, (first,)), tuple(full.shape), None, full.dtype)] if first else []
        recipe = SimpleNamespace(func=self.func, shapes=[o.shape for o in operands], outputs=outputs,
                                 boxes=[{r: o.box(r) for r in range(self.parts)} for o in operands])
        local_impl = self.line.local_impl
        found = []
        for rank in range(self.parts):
            local = [self.shards[q][s][rank].clone() for q, s in enumerate(inputs)]
            try:
                own = self.line.local_args(self.call, operands, outputs, rank) if self.line.local_args else ()
                run = (lambda r, a, k: local_impl(recipe, r, a, k)) if local_impl else None
                found.append(self.results(local, rank, own, run))
            except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
                return None
        return found if all(len(f) == len(self.full) for f in found) else None

    def holds(self, k, state, parts):
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
        if name_of(self.func) in VALUELESS:
            return True
        near = 1e-5 if full.dtype == torch.float32 else 1e-9
        try:
            got = join(parts, state)
        except (RuntimeError, AssertionError):
            return False
        return got.shape == full.shape and got.dtype == full.dtype and (
            torch.allclose(got, full, rtol=near * 100, atol=near, equal_nan=True))

    def truth(self, inputs, told):
        """All layouts of the results that are true for these of the operands; `told` are looked at in any case."""
        firsts = states(self.full[0].dim()) if self.line.local_args else [None]
        found = set()
        for first in firsts:
            parts = self.parts_of(inputs, first)
            if parts is None:
                continue
            ways = []
            for k, full in enumerate(self.full):
                look = dict.fromkeys([*states(full.dim()), *[outs[k] for outs in told]])
                ways.append([s for s in look if (k or first is None or s == first)
                             and self.holds(k, s, [p[k] for p in parts])])
            found |= set(itertools.product(*ways))
        return found

    def judge(self, chooser):
        """What the rule derives that is not true, and what is true that it does not derive."""
        derived = self.derived()
        wrong, missing = set(), set()
        every = list(itertools.product(*[list(s) for s in self.shards]))
        known = {ins for ins, _ in derived}
        with_empty = {ins for ins, _ in self.derived(nonempty=())}   # the kernel took these empty parts, but not all
        others = [ins for ins in every if ins not in with_empty and not self.single(ins)]
        if name_of(self.func) in UNCHECKED:
            others = [ins for ins in others if self.consistent(ins)]
        if len(others) > MOST:
            others = chooser.sample(others, MOST)
        for inputs in [*known, *others]:
            told = [outs for ins, outs in derived if ins == inputs]
            if inputs in known and any(s not in self.shards[q] for q, s in enumerate(inputs)):
                continue                             # a pending sum of integers
            true = self.truth(inputs, told)
            wrong |= {(inputs, outs) for outs in told if outs not in true}
            if inputs not in known:
                missing |= {(inputs, outs) for outs in true if not any(s.op in ("max", "min") for s in outs)}
        return wrong, missing


def text(signature):
    """S(0), B -> S(0)"""
    return " -> ".join(", ".join(map(str, side)) for side in signature)


def excused(name, signature):
    """Is this true signature left out on purpose?"""
    return any(test(*signature) for names, test, reason in MISSING if name in names)


def judged(func, number, parts, generator, chooser):
    """Unsound signatures, and true ones that are neither derived nor excused, of one sample."""
    args, kwargs = (made(x, generator) for x in SAMPLES[name_of(func)][number])
    case = Case(func, PROVED[func], args, kwargs, parts, generator)
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
            case = Case(func, Line(family), args, kwargs, parts, generator)
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
        want = Case(func, PROVED[func], args, kwargs, 2, generator).full
        pairs = list(itertools.product(signatures(PROVED[func].family(call)), repeat=2))
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
        if not w.numel() and name_of(func) == "native_batch_norm":
            continue                                 # torch's meta kernel makes more of these than its CPU kernel
        assert g.shape == w.shape and g.dtype == w.dtype, what
        for r, shard in g.shards.items():
            assert tuple(shard.shape) == g.spec.local_shape(r), f"{what}: {g.spec}"
        if name_of(func) not in VALUELESS:
            near = 1e-5 if w.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(gather(g), w, rtol=near * 100, atol=near, equal_nan=True,
                                       msg=lambda m, g=g: f"{what} -> {g.spec}\n{m}")


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
            want = Case(func, PROVED[func], args, kwargs, 2, generator).full
            for _ in range(2):
                nds = [chooser.choice(layouts(t.dim(), where.ndim, t.dtype.is_floating_point)) for t in call.tensors]
                same(func, call, [scatter(t, where, nd, generator) for t, nd in zip(call.tensors, nds)], want)
