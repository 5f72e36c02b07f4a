"""torch's operator database on global tensors, beside plain torch: each op in a child process, in every mode.

A *case* is an op, a dtype, a sample of its arguments, layouts of the operands and a mode. Layouts are drawn: S, B and P
on placements that are permuted, of two axes and of 3 ranks that divide few sizes; operands are contiguous, transposed,
strided, conjugated or negated views, and some stay plain. What comes out is put together by hand and compared with
plain torch: values, shapes, dtypes, strides, bits of conjugation and negation. Random ops are compared with what one
rank gets from the same seed, and with their own laws.

A child streams a line of JSON for each case. Where it dies, or takes too long, the case that it had begun has failed.

    python tests/programs/op_database.py --seed 3 --share 0/10 --only softmax
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import random
import resource
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import globaltensor as gt
from globaltensor.errors import GlobalTensorError, RuleError

sys.path.insert(0, str(Path(__file__).parent.parent))
from shards import join, sizes

SECONDS = 120                                        # of a child's own time for an op
DEVICE = "cpu"                                       # on which all is
PLACEMENTS = ([3, 1, 2], [0, 1, 2], [[4, 5], [6, 7]], [[6, 1], [0, 5]], [[5], [2]], [4])
B, S, P = gt.sbp.broadcast, gt.sbp.split, gt.sbp.partial_sum
DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
NEAR = {torch.float32: 2e-4, torch.complex64: 2e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
             "zeros")

# Views that an operand may be: (the base of a tensor, the view of the base), and for which tensors.
VIEWS: dict[str, tuple[Callable, Callable, Callable]] = {
    "transposed": (lambda t: t.transpose(0, -1).contiguous(), lambda b: b.transpose(0, -1), lambda t: t.dim() > 1),
    "strided": (lambda t: t.repeat_interleave(2, -1), lambda b: b[..., ::2], lambda t: t.dim() > 0),
    "channels last": (lambda t: t.movedim(1, -1).contiguous(), lambda b: b.movedim(-1, 1), lambda t: t.dim() > 3),
    "conjugated": (lambda t: t.conj().resolve_conj(), torch.conj, torch.is_complex),
    "negated": (torch.neg, torch._neg_view, lambda t: t.is_floating_point() or t.is_complex()),
}

# Strides of results differ: gaps are closed, and what is made of other ops, or of parts with a halo, is as it is made.
# Of binary_cross_entropy torch's shape function tells otherwise than its kernel. masked.logaddexp expands its mask,
# which has no order in memory until it is boxed.
OTHER_ORDER = {
    "__rmatmul__", "as_strided_scatter", "diagonal_scatter", "log_softmax", "masked.logaddexp", "matmul",
    "max_pool2d_with_indices_backward", "select_scatter", "slice_scatter", "softmax",
    "torch.ops.aten._safe_softmax.default", "unsafe_chunk", "unsafe_split", "nn.functional.binary_cross_entropy",
    "nn.functional.one_hot", "nn.functional.softmin"}
# Kernels that say how operands must lie, or read them by other signs (torch's max_pool1d), and ops that speak of what
# lies around them in memory.
CONTIGUOUS_ONLY = {"as_strided", "as_strided_copy", "as_strided_scatter", "nn.functional.max_pool1d",
                   "torch._scaled_mm", "torch._scaled_mm_v2", "native_group_norm"}
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# What is not judged on a GPU: kernels that torch launches beside its dispatcher, by addresses, of which a global tensor
# has none; parts of attention that draw by themselves; and what writes to one place twice, in any order.
NOT_ON_GPUS = ("jiterator", "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward",
               "nn.functional.max_unpool")
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "pca_lowrank", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank", "uniform",
    *(f"nn.functional.{name}" for name in (
        "alpha_dropout", "dropout", "dropout2d", "dropout3d", "feature_alpha_dropout", "fractional_max_pool2d",
        "fractional_max_pool3d", "multi_head_attention_forward", "rrelu", "scaled_dot_product_attention")),
}


def kept_or_dropped(y: torch.Tensor, x: torch.Tensor, p: float = 0.5, training: bool = True, **_: Any) -> bool:
    """Each element is dropped, or kept and scaled; so many are dropped as p says, within 6 standard deviations."""
    if not training:
        return torch.equal(y, x)
    kept = torch.isclose(y, x / (1 - p)) if p < 1 else torch.zeros_like(x, dtype=torch.bool)
    return bool((kept | (y == 0)).all())


# What must hold of the result of a random op, called with these arguments.
LAWS: dict[str, Callable[..., bool]] = {
    **{f"nn.functional.{name}": kept_or_dropped for name in ("dropout", "dropout2d", "dropout3d")},
    "nn.functional.rrelu": lambda y, x, lower=1 / 8, upper=1 / 3, training=False, **_: bool(torch.where(
        x < 0, (y <= x * lower) & (y >= x * upper), y == x).all()),
    "bernoulli": lambda y, *_, **__: bool(((y == 0) | (y == 1)).all()),
    "exponential": lambda y, *_, **__: bool((y >= 0).all()),
    "geometric": lambda y, *_, **__: bool((y >= 1).all()),
    "log_normal": lambda y, *_, **__: bool((y >= 0).all()),
    "uniform": lambda y, x, low=0.0, high=1.0, **_: y.is_complex() or bool(((y >= low) & (y <= high)).all()),
    "multinomial": lambda y, p, n, replacement=False, **_: bool((p.gather(-1, y) > 0).all()) and (
        replacement or all(len(row.unique()) == n for row in y.reshape(-1, n))),
}


# ------------------------------------------------------------------------------------------------------- operands
def as_it_lies(t: torch.Tensor) -> tuple[Callable, Callable, None]:
    """The base and the view of tensors whose dims lie in memory as those of t do."""
    order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
    back = [order.index(d) for d in range(t.dim())]
    return (lambda t: t.permute(order).contiguous()), (lambda b: b.permute(back)), None


def pending(t: torch.Tensor, parts: int, rng: random.Random) -> list[torch.Tensor]:
    """Terms of a pending sum: multiples of t by small powers of two, which add up to t exactly, in this order."""
    factors = rng.choice({1: [(1,)],
                          2: [(2, -1), (-1, 2), (1, 0), (0, 1)],
                          3: [(1, 1, -1), (1, -1, 1), (-1, 1, 1), (2, -1, 0), (0, -1, 2), (0, 1, 0)]}[parts])
    if t.dtype in (torch.bool, torch.uint8):
        factors = (1,) + (0,) * (parts - 1)
    first = next(i for i, f in enumerate(factors) if f)
    finite = t.isfinite()
    return [torch.where(finite, t * f, t if i == first else torch.zeros_like(t)).to(t.dtype)
            for i, f in enumerate(factors)]


def lay(t: torch.Tensor, where: Any, nd_sbp: tuple, seed: int) -> Any:
    """A global tensor of value t, cut by hand."""
    rng, shards = random.Random(seed), [t]
    for sbp, parts in zip(nd_sbp, where.shape):
        shards = [term for shard in shards for term in (
            pending(shard, parts, rng) if sbp.is_partial else _parts(shard, sbp, parts))]
    return gt.from_shards(dict(zip(where.flat, shards)), where, nd_sbp)


def _parts(t: torch.Tensor, sbp: Any, parts: int) -> list[torch.Tensor]:
    if sbp.is_broadcast:
        return [t.clone() for _ in range(parts)]
    return [part.clone() for part in t.split(sizes(t.shape[sbp.dim], parts), sbp.dim)]


def name_of(op: Any) -> str:
    """With its variant."""
    return ".".join(filter(None, (op.name, op.variant_test_name)))


class Operand:
    """How one tensor of a sample is laid out: drawn once, made anew for each mode, as plain tensor and as global one.

    what    "plain", "global", or "one rank": the whole on one rank, to compare random ops with
    """

    def __init__(self, t: torch.Tensor, where: Any, rng: random.Random, views: bool = True) -> None:
        self.requires_grad = t.requires_grad
        self.t, self.where, self.seed = t.detach(), where, rng.randrange(2**31)
        self.stays_plain = t.layout is not torch.strided or rng.random() < 0.1
        dims = [S(d) for d in range(t.dim())]
        sums = [P] if t.dtype is not torch.bool and t.dtype.itemsize > 1 else []       # 8 bits hold no terms of a sum
        self.sbp = tuple(rng.choice([B, *sums, *dims, *dims]) for _ in where.shape)
        if sum(s.is_partial for s in self.sbp) > 1:  # the terms of terms would not add up exactly
            self.sbp = (*self.sbp[:-1], B)
        able = [name for name, (_, _, fits) in VIEWS.items() if t.layout is torch.strided and fits(t)]
        viewed = views and able and t.is_contiguous() and t.dtype.itemsize > 1 and rng.random() < 0.3
        self.view = rng.choice(able) if viewed else ""

    def __str__(self) -> str:
        layout = "plain" if self.stays_plain else "".join(map(str, self.sbp))
        return f"{self.view} {list(self.t.shape)} {layout}".strip()

    def make(self, what: str, t: torch.Tensor | None = None) -> Any:
        """It, or t, a tensor like it."""
        t = self.t if t is None else t
        if self.stays_plain and what == "global":
            what = "plain"
        if t.layout is not torch.strided:
            return t.clone().requires_grad_(self.requires_grad)
        base, view, _ = VIEWS[self.view] if self.view else as_it_lies(self.t)
        t = base(t)
        x = {"plain": lambda: t.clone(), "global": lambda: lay(t, self.where, self.sbp, self.seed),
             "one rank": lambda: gt.from_full(t, gt.placement(DEVICE, [0]), B)}[what]()
        return view(x).detach().requires_grad_(self.requires_grad)


class Call:
    """A sample of an op's arguments, with its tensors laid out as drawn."""

    def __init__(self, op: Any, sample: Any, where: Any, rng: random.Random) -> None:
        self.op, self.sample, self.where = op, sample, where
        leaves, self.tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        views = op.name not in CONTIGUOUS_ONLY
        self.leaves = [Operand(t, where, rng, views) if isinstance(t, torch.Tensor) else t for t in leaves]
        self.operands = [leaf for leaf in self.leaves if isinstance(leaf, Operand)]
        strided = [operand for operand in self.operands if operand.t.layout is torch.strided]
        if strided and all(operand.stays_plain for operand in self.operands):
            strided[0].stays_plain = False
        self.is_random, self.seed = op.name in RANDOM, rng.randrange(2**31)
        if self.is_random:                           # what is plain draws from torch's own generator
            for operand in strided:
                operand.stays_plain = False

    def __str__(self) -> str:
        rest = [leaf for leaf in self.leaves if not isinstance(leaf, Operand)]
        return f"{', '.join(map(str, self.operands))} {rest or ''} on {self.where.ranks}"

    def make(self, what: str, of: Callable[[Operand], torch.Tensor | None] = lambda _: None) -> list:
        """All leaves of the arguments."""
        return [leaf.make(what, of(leaf)) if isinstance(leaf, Operand) else leaf for leaf in self.leaves]

    def run(self, leaves: list) -> Any:
        """The op, called with these leaves of its arguments."""
        first, args, kwargs = tree_unflatten(leaves, self.tree)
        torch.manual_seed(self.seed)
        return self.op(tree_map(_own, first) if _writes(self.op) else first, *args, **kwargs)

    def processed(self, out: Any) -> Any:
        """What of the result has a definite derivative: of a matrix of eigenvectors, not the phases."""
        return self.sample.output_process_fn_grad(out)


def has_order(call: Call) -> bool:
    """Do results lie as torch's own? Of images that are channels last, torch's shape functions tell otherwise than its
    kernels, and parts of one sample or channel do not tell. Two kernels of GPUs give others than those of a CPU."""
    last = any(operand.view == "channels last" or _is_channels_last(operand.t) for operand in call.operands)
    others = OTHER_ORDER if DEVICE == "cpu" else OTHER_ORDER | {"native_batch_norm", "native_dropout_backward"}
    return name_of(call.op) not in others and not (last and call.op.name.startswith("nn.functional."))


def _is_channels_last(t: torch.Tensor) -> bool:
    return t.dim() > 3 and t.layout is torch.strided and t.stride(1) < t.stride(-1)


def _writes(op: Any) -> bool:
    return op.name in ("resize_", "resize_as_", "cauchy", "exponential", "geometric", "log_normal", "uniform",
                       "bernoulli", "normal")


def _own(t: Any) -> Any:
    return t.clone() if isinstance(t, torch.Tensor) else t


# ------------------------------------------------------------------------------------------------------ comparison
def described(t: torch.Tensor) -> tuple:
    """All that can be asked of a tensor besides its values. Strides count where they say how memory is laid out."""
    strides = [stride for size, stride in zip(t.shape, t.stride()) if size > 1] if t.numel() and (
        t.layout is torch.strided) else []
    return tuple(t.shape), t.dtype, t.layout, strides, t.is_conj(), t.is_neg()


def whole(t: Any) -> Any:
    """The value of a result, put together by hand."""
    if not (isinstance(t, torch.Tensor) and t.is_global):
        return t.detach() if isinstance(t, torch.Tensor) else t
    t = t.detach().resolve_conj().resolve_neg()
    for rank, shard in t.shards.items():
        assert tuple(shard.shape) == tuple(t.spec.local_shape(rank)), f"shard {rank} has shape {tuple(shard.shape)}"
        assert shard.dtype == t.dtype, f"shard {rank} is {shard.dtype}"
    shards = [t.shards[rank] for rank in t.placement.flat]
    for sbp, parts in zip(reversed(t.sbp), reversed(t.placement.shape)):
        shards = [_joined(shards[i:i + parts], sbp) for i in range(0, len(shards), parts)]
    return shards[0]


def _joined(parts: list[torch.Tensor], sbp: Any) -> torch.Tensor:
    """The value of shards on one axis."""
    if sbp.is_broadcast:                             # to some kernels it matters where in memory operands lie
        near = NEAR.get(parts[0].dtype, 1e-9)
        for other in parts[1:]:
            torch.testing.assert_close(_wide(other), _wide(parts[0]), rtol=near * 10, atol=near, equal_nan=True,
                                       msg="broadcast shards differ")
        return parts[0]
    return join(parts, sbp)


def _wide(t: torch.Tensor) -> torch.Tensor:
    """In a dtype that can be compared."""
    t = t.resolve_conj().resolve_neg()
    return t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t


def compare(got: Any, like: Any, values: Any, mode: str, strides: bool, valued: bool) -> None:
    """Raises AssertionError where a result is not described as `like`, or has other values than `values`."""
    if isinstance(like, (tuple, list)) and not isinstance(like, torch.Size):
        assert type(got) is type(like) and len(got) == len(like), f"{type(got)} of {len(got)}, not {len(like)}"
        for one in zip(got, like, values):
            compare(*one, mode, strides, valued)
    elif not isinstance(like, torch.Tensor):
        assert got == values or (isinstance(got, float) and math.isclose(got, values, rel_tol=1e-7)) or (
            got != got and values != values), f"{got} is not {values}"
    else:
        assert isinstance(got, torch.Tensor), f"{got} is not a tensor"
        mine, torchs = described(got), described(like)
        for name, one, other in zip(("shape", "dtype", "layout", "strides", "is_conj", "is_neg"), mine, torchs):
            if name in ("is_conj", "is_neg") and (mode in DERIVATIVES or DEVICE != "cpu"):
                continue                             # torch's formulas for subclasses are others, or its kernels'
            assert one == other or (name == "strides" and not strides), f"{name} {one} is not {other}"
        assert got.requires_grad == like.requires_grad or "inference" in mode, f"requires_grad is {got.requires_grad}"
        if valued:
            near = NEAR.get(like.dtype, 1e-7) * (10 if mode in DERIVATIVES else 1)
            torch.testing.assert_close(_wide(whole(got)), _wide(whole(values)), rtol=near * 10, atol=near,
                                       equal_nan=True, check_layout=False)


def differentiable(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]


def weights(call: Call, out: list[torch.Tensor], what: str) -> list[Any]:
    """Random gradients of results, laid out anew."""
    rng, generator = random.Random(call.seed), torch.Generator().manual_seed(call.seed)
    operands = [Operand(torch.randn(t.shape, dtype=t.dtype, generator=generator).to(DEVICE), call.where, rng)
                for t in out]
    return [operand.make(what) for operand in operands]


def backward(call: Call, what: str, twice: bool) -> Any:
    """The gradients of the operands; twice: the gradients of their weighted sum."""
    leaves = call.make(what)
    taken = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    out = differentiable(call.processed(call.run(leaves)))
    if not taken or not out:
        return None
    grads = torch.autograd.grad(out, taken, weights(call, out, what), create_graph=twice, allow_unused=True)
    if not twice:
        return [g for g in grads if g is not None], [g is None for g in grads]
    out = differentiable(grads)
    if not out:
        return None
    grads = torch.autograd.grad(out, taken, weights(call, out, what), allow_unused=True)
    return [g for g in grads if g is not None], [g is None for g in grads]


def forward_derivatives(call: Call, what: str) -> Any:
    """The result and its tangents."""
    generator = torch.Generator().manual_seed(call.seed)

    def tangent(operand: Operand) -> torch.Tensor | None:
        return torch.randn(operand.t.shape, dtype=operand.t.dtype, generator=generator).to(DEVICE)

    duals = [operand.requires_grad for operand in call.operands]
    if not any(duals):
        return None
    tangents = iter([t.detach() for t, leaf in zip(call.make(what, lambda o: tangent(o) if o.requires_grad else None),
                                                   call.leaves) if isinstance(leaf, Operand)])
    with forward_ad.dual_level():
        leaves = [forward_ad.make_dual(t.detach(), tangent) if leaf.requires_grad else t for t, leaf, tangent in (
            (t, leaf, next(tangents)) if isinstance(leaf, Operand) else (t, _Constant, None)
            for t, leaf in zip(call.make(what), call.leaves))]
        out = [forward_ad.unpack_dual(t) for t in tree_leaves(call.processed(call.run(leaves)))
               if isinstance(t, torch.Tensor)]
        return [p for p, _ in out], [t for _, t in out if t is not None], [t is None for _, t in out]


class _Constant:
    requires_grad = False


def within(mode: Callable, inside: bool) -> Callable[[Call, str], Any]:
    """The op in a mode of torch; `inside`: the operands are made there too."""
    def run(call: Call, what: str) -> Any:
        if inside:
            with mode():
                return call.run([t.detach() if isinstance(t, torch.Tensor) else t for t in call.make(what)])
        leaves = call.make(what)
        with mode():
            return call.run(leaves)
    return run


def forward(call: Call, what: str) -> Any:
    return call.run(call.make(what))


# mode -> what it does, and for which ops in a floating-point dtype
MODES: dict[str, tuple[Callable[[Call, str], Any], Callable[[Any], bool]]] = {
    "forward": (forward, lambda op: True),
    "second": (forward, lambda op: True),
    "backward": (functools.partial(backward, twice=False), lambda op: op.supports_autograd),
    "second backward": (functools.partial(backward, twice=False), lambda op: op.supports_autograd),
    "double backward": (functools.partial(backward, twice=True), lambda op: op.supports_gradgrad),
    "forward AD": (forward_derivatives, lambda op: op.supports_forward_ad),
    "no_grad": (within(torch.no_grad, False), lambda op: True),
    "inference_mode": (within(torch.inference_mode, False), lambda op: True),
    "inference_mode inside": (within(torch.inference_mode, True), lambda op: True),
}
DERIVATIVES = ("backward", "second backward", "double backward", "forward AD")


def judge(call: Call, mode: str) -> str:
    """"right", or "none" where plain torch gives nothing to compare with. Raises what the global tensors raise."""
    run = MODES[mode][0]
    try:
        like = run(call, "plain")
    except Exception:                                # not of this sample
        return "none"
    if like is None:
        return "none"
    values = run(call, "one rank") if call.is_random else like
    got = run(call, "global")
    if got is None:                                  # torch's formulas for subclasses see that nothing depends on them
        # where a formula of torch divides, zero has an error of rounding
        assert all((t.abs() < 1e-12).all() for t in like[0]), "no derivative, and torch has one that is not zero"
        return "right"
    compare(got, like, values, mode, mode not in DERIVATIVES and has_order(call), call.op.name not in UNDEFINED)
    if mode == "forward" and call.op.name in LAWS:
        first, args, kwargs = tree_unflatten(call.make("plain"), call.tree)
        assert LAWS[call.op.name](whole(got), first, *args, **kwargs), "the law of this random op does not hold"
    return "right"


# ------------------------------------------------------------------------------------------------------- factories
def factory(op: Any, sample: Any, where: Any, rng: random.Random) -> str:
    """A factory of torch, and ours with a layout."""
    make, kwargs = getattr(gt, op.name), {k: v for k, v in sample.kwargs.items() if k != "device"}
    like = op(sample.input, *sample.args, **sample.kwargs)
    seed, choices = rng.randrange(2**31), [B, P, *[S(d) for d in range(like.dim())]]

    def run(placement: Any, nd_sbp: Any) -> Any:
        torch.manual_seed(seed)
        return make(sample.input, *sample.args, **kwargs, placement=placement, sbp=nd_sbp)

    sbp = tuple(rng.choice(choices[:1] + choices[1 + (like.dtype is torch.bool):]) for _ in where.shape)
    values = run(gt.placement(DEVICE, [0]), B) if op.name in RANDOM else like
    compare(run(where, sbp), like, values, "forward", True, op.name not in UNDEFINED)
    return "right"


# -------------------------------------------------------------------------------------------------------- children
def dtypes_of(op: Any, rng: random.Random) -> list[torch.dtype]:
    """The first of DTYPES that the op has, and another one; none for an op that other devices have."""
    have = [d for d in DTYPES if d in op.supported_dtypes(DEVICE)] or sorted(op.supported_dtypes(DEVICE), key=str)
    return have[:1] + rng.sample(have[1:], min(1, len(have[1:])))


def cases(op: Any, seed: int, samples: int) -> Iterator[tuple[str, Any, Any]]:
    """(what it is, sample, placement) of an op."""
    rng = random.Random(f"{seed} {op.name} {op.variant_test_name}")
    for k, dtype in enumerate(dtypes_of(op, rng)):
        grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex) and (
            dtype in op.supported_backward_dtypes(DEVICE))
        torch.manual_seed(rng.randrange(2**31))
        drawn = list(itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=grad), 1500))
        for i in rng.sample(range(len(drawn)), min(len(drawn), max(1, samples >> k))):
            yield f"{str(dtype)[6:]} sample {i}", drawn[i], gt.placement(DEVICE, rng.choice(PLACEMENTS))


def serve(op: Any, seed: int, samples: int, say: Callable[[dict], None]) -> None:
    """Judge all cases of an op, and say before and after each what is done and how it went."""
    for name, sample, where in cases(op, seed, samples):
        rng = random.Random(f"{seed} {op.name} {op.variant_test_name} {name}")
        call = Call(op, sample, where, rng)
        if not call.operands:
            if op.name in FACTORIES:
                judged(say, "forward", f"{name} on {where.ranks}", functools.partial(factory, op, sample, where, rng))
            continue
        grad = any(operand.requires_grad for operand in call.operands)
        for mode, (_, has) in MODES.items():
            if has(op) and (grad or mode not in DERIVATIVES):
                judged(say, mode, f"{name}: {call}", functools.partial(judge, call, mode))


def judged(say: Callable[[dict], None], mode: str, case: str, run: Callable[[], str]) -> None:
    say({"begun": mode, "case": case})
    answer: dict[str, Any] = {"mode": mode, "case": case}
    try:
        answer["is"] = run()
    except RuleError as error:                       # ours, not the user's
        answer |= {"is": "wrong", "why": f"{type(error).__name__}: {error}"}
    except GlobalTensorError as error:
        answer |= {"is": "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        answer |= {"is": "wrong", "why": f"{type(error).__name__}: {error}"[:700],
                   "trace": "".join(traceback.format_tb(error.__traceback__)[-6:])}
    say(answer)
    if "CUDA error" in answer.get("why", ""):        # after which the GPU serves this process no more
        os._exit(1)


def answers(ops: list, seed: int, samples: int) -> Iterator[tuple[Any, dict]]:
    """(op, answer) of all ops."""
    while ops:
        done = yield from from_child(ops, *(forked(ops[0], seed, samples) if DEVICE == "cpu" else started(len(ops))))
        ops = ops[done:]


def forked(op: Any, seed: int, samples: int) -> tuple[int, int]:
    """A child that judges an op, and the end of the pipe to which it says how it goes."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        judge_all([op], seed, samples, its)
        os._exit(0)
    os.close(its)
    return child, ours


def started(left: int) -> tuple[int, int]:
    """A process that judges the last ops until one ends it: a GPU takes long to begin, and does not serve forks."""
    ours, its = os.pipe()
    command = [sys.executable, "-W", "ignore", *sys.argv, "--last", str(left), "--say", str(its)]
    child = os.posix_spawn(sys.executable, command, os.environ,
                           file_actions=[(os.POSIX_SPAWN_DUP2, its, its), (os.POSIX_SPAWN_CLOSE, ours)])
    os.close(its)
    return child, ours


def judge_all(ops: list, seed: int, samples: int, its: int) -> None:
    """Judge ops, and say into a pipe how it goes."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS * len(ops), SECONDS * len(ops)))
    with os.fdopen(its, "w") as pipe:
        def say(answer: dict) -> None:
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()

        try:
            for op in ops:
                say({"begun": "forward", "case": "", "next": True})
                serve(op, seed, samples, say)
        except BaseException:
            say({"mode": "forward", "case": "", "is": "wrong", "why": traceback.format_exc()[-1500:]})


def from_child(ops: list, child: int, ours: int) -> Iterator[tuple[Any, dict]]:
    """The answers of a child; at last what became of it, where it did not end well. Returns how many ops it judged."""
    begun, number = {"begun": "forward", "case": ""}, 0
    with os.fdopen(ours) as pipe:
        for line in lines(pipe, child):
            answer = json.loads(line)
            if "begun" in answer:
                begun = answer
                number += "next" in answer
            else:
                yield ops[number - 1], answer
    _, status = os.waitpid(child, 0)
    number = max(number, 1)
    if status:
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
        yield ops[number - 1], {"mode": begun["begun"], "case": begun["case"], "is": "wrong",
                                "why": f"the process died: {ended}"}
    return number


def lines(pipe: Any, child: int) -> Iterator[str]:
    """The lines that a child says; it is killed where it says nothing for long."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        rest = ""
        while selector.select(5 * SECONDS):
            if not (read := os.read(pipe.fileno(), 65536).decode()):
                return
            *whole_lines, rest = (rest + read).split("\n")
            yield from whole_lines
    os.kill(child, signal.SIGKILL)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", help="K/N: every Nth op from the Kth on")
    parser.add_argument("--samples", type=int, default=4, help="samples of an op")
    parser.add_argument("--only", nargs="*", help="names of ops")
    parser.add_argument("--device", default="cpu", help="its type")
    parser.add_argument("--last", type=int, default=0, help="so many of the ops")
    parser.add_argument("--say", type=int, help="the file descriptor to which answers go")
    parser.add_argument("--trace", action="store_true", help="where errors were raised")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    DEVICE = options.device
    if DEVICE == "cpu":
        gt.placement("cpu", [0])                     # the world begins here, not in each child
    else:
        torch._C._set_cudnn_allow_tf32(False)        # the oracle is as exact as one device is
    gc.freeze()                                      # so that children share what is here
    gc.disable()
    first, step = map(int, options.share.split("/"))
    ops = [op for op in op_db if op.name in options.only] if options.only else op_db[first % step::step]
    if DEVICE != "cpu":
        ops = [op for op in ops if not op.name.startswith(NOT_ON_GPUS)]
    ops = ops[-options.last:]
    if options.say:
        judge_all(ops, options.seed, options.samples, options.say)
        return
    counts: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    failures, began = [], time.process_time()
    for op, answer in answers(ops, options.seed, options.samples):
        counts[answer["mode"]][answer["is"]] += 1
        if answer["is"] in ("wrong", "refused"):
            trace = answer.pop("trace", "")
            failures.append({"op": name_of(op), **answer})
            print(json.dumps(failures[-1]), *([trace] if options.trace else []), file=sys.stderr, flush=True)
    used = time.process_time() - began + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(json.dumps({"entries": len(ops), "counts": counts, "failures": failures, "seconds": round(used)}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
