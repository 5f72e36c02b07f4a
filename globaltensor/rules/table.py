"""Every op that runs split, a line each: name, rule, and a third column where the local run differs.

`tests/test_rules.py` proves each line by brute force against plain torch. In-place and `out=` variants follow their
functional op, foreach and fused ones the pointwise op they are made of; an op that is not here runs on all-B.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor import library
from globaltensor.rules import random, rewrites, runners
from globaltensor.rules.families import (along, broadcasting_addmm, concatenated, contraction, convolution, convolution_backward,
                                         copied, embedding, embedding_backward, expanded, factory_like, fixed, gathered, indexed,
                                         linear_by_scalar, padded, permuted, pointwise, reduction, reduction_of, repeated,
                                         selected, sized_backward, sliced, split_list, squeezed, stacked, swapped,
                                         unbound, unsqueezed, viewed)
from globaltensor.rules.line import Line, sized

aten = torch.ops.aten
TABLE: dict[OpOverload, Line] = {}


def op(name: str) -> OpOverload:
    """aten.add.Tensor from "add.Tensor", aten.relu.default from "relu"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def lines(names: str, family: Any, **third: Any) -> None:
    """The same line for several ops."""
    for name in names.split():
        TABLE[op(name)] = Line(family, **third)


# ---------------------------------------------------------------------------------------- element by element
lines("add.Tensor sub.Tensor", linear_by_scalar("a+b", "A"))
lines("rsub.Tensor", pointwise("a+b"))
lines("mul.Tensor", linear_by_scalar("a*b", "a"))
lines("div.Tensor", linear_by_scalar("a*B", "a"))
lines("mul.Scalar div.Scalar neg positive clone alias detach lift_fresh real imag view_as_real", pointwise("a"))
lines("add.Scalar sub.Scalar rsub.Scalar", pointwise("A"))
lines("lerp.Scalar", pointwise("a+b"))
lines("lerp.Tensor", pointwise("a*C+b*C"))
lines("addcmul", pointwise("a+b*c"))
lines("addcdiv", pointwise("a+b*C"))
lines("abs relu relu6 exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh "
      "cosh tanh asinh acosh atanh erf erfc erfinv sigmoid silu mish gelu hardtanh hardswish "
      "hardsigmoid leaky_relu elu celu softplus softshrink hardshrink threshold sign sgn floor ceil round round.decimals "
      "trunc frac isnan isinf isposinf isneginf logical_not bitwise_not nan_to_num clamp clamp_min clamp_max "
      "pow.Tensor_Scalar pow.Scalar digamma lgamma i0 sinc logit heaviside "
      "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar remainder.Scalar fmod.Scalar "
      "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", pointwise())
lines("div.Tensor_mode div.Scalar_mode pow.Tensor_Tensor atan2 maximum minimum fmax fmin eq.Tensor ne.Tensor lt.Tensor "
      "le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor "
      "bitwise_xor.Tensor remainder.Tensor fmod.Tensor floor_divide clamp.Tensor clamp_min.Tensor clamp_max.Tensor "
      "hypot copysign.Tensor xlogy.Tensor logaddexp nextafter", pointwise())
lines("where.self", pointwise("A*b+A*c"))
lines("where.ScalarSelf where.ScalarOther where.Scalar", pointwise())
lines("masked_fill.Scalar", pointwise())
lines("masked_fill.Tensor", pointwise())
lines("_to_copy", copied)
lines("copy", pointwise("b"), patch=None)
lines("fill.Scalar zero zeros_like ones_like full_like empty_like", factory_like)
lines("fill.Tensor", pointwise("B"))
lines("threshold_backward gelu_backward sigmoid_backward tanh_backward silu_backward leaky_relu_backward "
      "hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward "
      "softshrink_backward hardshrink_backward", pointwise("a*B"))
lines("elu_backward", pointwise("a*B"))

# ------------------------------------------------------------------------------------------- contractions
lines("mm", fixed("m k, k n -> m n", "a*b"))
lines("bmm", fixed("b m k, b k n -> b m n", "a*b"))
lines("mv", fixed("m k, k -> m", "a*b"))
lines("dot vdot", fixed("k, k -> ", "a*b"))
lines("addmm", broadcasting_addmm("m k", "k n", "m n"))
lines("baddbmm", broadcasting_addmm("b m k", "b k n", "b m n"))
lines("addmv", broadcasting_addmm("m k", "k", "m"))
TABLE[library.contract] = Line(contraction)
TABLE[library.linear] = Line(fixed("b* k, n k, n -> b* n", "a*b+c"))
lines("convolution", convolution)
lines("convolution_backward", convolution_backward)

# ---------------------------------------------------------------------------------------------- reductions
lines("sum sum.dim_IntList", reduction("a"))
lines("mean mean.dim", reduction("a"), rewrite=rewrites.mean, when=rewrites.reduces_split)
lines("amax", reduction("A", leaves="max", nonempty=True))
lines("amin", reduction("A", leaves="min", nonempty=True))
lines("max min", reduction(whole=True), rewrite=rewrites.whole_max, when=rewrites.reduces_split)
lines("max.dim min.dim", reduction(outputs=2, whole=True))
lines("argmax argmin", reduction(whole=True))
lines("any any.dim any.dims all all.dim all.dims prod prod.dim_int logsumexp median nanmedian", reduction(whole=True))
lines("median.dim mode kthvalue", reduction(outputs=2, whole=True))
lines("var.correction std.correction", reduction(whole=True), rewrite=rewrites.variance, when=rewrites.reduces_split)
lines("var_mean.correction std_mean.correction", reduction(outputs=2, whole=True), rewrite=rewrites.variance,
      when=rewrites.reduces_split)
lines("linalg_vector_norm", reduction(whole=True), rewrite=rewrites.vector_norm, when=rewrites.reduces_split)
lines("cumsum", along("a"))
lines("cumprod logcumsumexp", along())
lines("sort sort.stable topk", along(outputs=2))
lines("argsort argsort.stable flip", along("A"))
lines("flip", along("a", name="dims"))
lines("roll", along("a", name="dims"))
lines("_softmax", along(), rewrite=rewrites.softmax, when=rewrites.reduces_split)
lines("_log_softmax", along(), rewrite=rewrites.log_softmax, when=rewrites.reduces_split)
lines("_softmax_backward_data", along("a*B", operands=2), rewrite=rewrites.softmax_backward,
      when=rewrites.reduces_split)
lines("_log_softmax_backward_data", along("a*B", operands=2), rewrite=rewrites.log_softmax_backward,
      when=rewrites.reduces_split)

# --------------------------------------------------------------------------------------- views and shapes
lines("view _unsafe_view reshape", viewed, patch=sized("size"), runner=runners.view)
TABLE[aten.reshape.default] = Line(viewed, patch=sized("shape"))
lines("t transpose.int", permuted(swapped))
lines("permute", permuted(lambda call, n: [d % n for d in call["dims"]]))
lines("expand", expanded, patch=sized("size"))
lines("unsqueeze", unsqueezed)
lines("squeeze squeeze.dim squeeze.dims", squeezed)
lines("select.int", selected)
lines("slice.Tensor", sliced)
lines("split.Tensor split_with_sizes", split_list)
lines("unbind.int", unbound)
lines("cat", concatenated)
lines("stack", stacked)
lines("repeat", repeated)
lines("select_backward slice_backward", sized_backward, patch=sized("input_sizes"))
lines("constant_pad_nd", padded)
lines("tril triu", fixed("b* i! j! -> b* i! j!", "a"))
lines("new_zeros new_ones new_full new_empty new_empty_strided", factory_like, patch=sized("size"))

# ------------------------------------------------------------------------------------------------ indexing
lines("embedding", embedding, runner=runners.embedding)
lines("embedding_dense_backward", embedding_backward)
lines("index.Tensor", indexed)
lines("index_select", gathered("select"))
lines("gather", gathered("gather"))

# ------------------------------------------------------------------------------------------- networks' own
lines("native_layer_norm", fixed("b* d*!, d*!, d*! -> b* d*!, b*, b*", "A*b+c;A;A"))
lines("_scaled_dot_product_flash_attention_for_cpu",
      fixed("b h q d!, b h s! d!, b h s! d! -> b h q d!, b h q", "A*B*c;A*B", nonempty=True))
lines("nll_loss_forward", fixed("n* c!, n*, c! -> , ", "a*B*C;B*C"), rewrite=rewrites.nll_mean,
      when=rewrites.nll_is_mean)
lines("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy", reduction_of(),
      rewrite=rewrites.mean_loss, when=rewrites.loss_needs_global_count)


# ------------------------------------------------------------------------------------------ variants of an op


@lru_cache(None)
def line_of(func: OpOverload) -> Line | None:
    """The line of an op, or of the functional op that it is the in-place variant of."""
    found = TABLE.get(func)
    if found is None and func._schema.is_mutable:
        packet, overload = func._schema.name.split("::")[1], func._overloadname
        functional = getattr(aten, packet.rstrip("_"), None) if packet.endswith("_") else None
        if functional is not None and overload in functional.overloads():
            found = TABLE.get(getattr(functional, overload))
    return found


FOREACH = {"add": "a+b", "sub": "a+b", "mul": "a*b", "div": "a*B", "lerp": "a+b", "addcmul": "a+b*c",
           "addcdiv": "a+b*C", "copy": "b", "zero": "", "neg": "a"}


@lru_cache(None)
def foreach_algebra(func: OpOverload) -> str | None:
    """The algebra of element i of a foreach or fused op; None for an op that is neither."""
    name = func._schema.name.split("::")[1].strip("_")
    if name.startswith("fused_adam") or name.startswith("fused_sgd") or name.startswith("fused_adagrad"):
        return "A"
    return FOREACH.get(name.removeprefix("foreach_"), "A") if name.startswith("foreach_") else None


# ------------------------------------------------------------------------------------------------ random numbers
# Always rewritten; their in-place variants have lines of their own.
for _names, _draw, *_parameters in (
        ("uniform", random.uniform), ("normal_functional", random.normal), ("exponential", random.exponential),
        ("log_normal", random.log_normal), ("cauchy", random.cauchy), ("geometric", random.geometric),
        ("random random.from random.to", random.integers), ("bernoulli.p", random.bernoulli),
        ("bernoulli.Tensor", random.bernoulli_each, "p"), ("bernoulli", random.bernoulli_each, "self"),
        ("rand_like rand_like.generator", random.uniform), ("randn_like randn_like.generator", random.standard_normal),
        ("randint_like randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype",
         random.integers)):
    lines(_names, factory_like, rewrite=random.like(_draw, *_parameters))
for _names, _draw, *_parameters in (
        ("uniform_", random.uniform), ("normal_", random.normal), ("exponential_", random.exponential),
        ("log_normal_", random.log_normal), ("cauchy_", random.cauchy), ("geometric_", random.geometric),
        ("random_ random_.from random_.to", random.integers), ("bernoulli_.float", random.bernoulli),
        ("bernoulli_.Tensor", random.bernoulli_each, "p")):
    lines(_names, factory_like, rewrite=random.fill(_draw, *_parameters))
lines("randint_like.Tensor randint_like.Tensor_generator", factory_like, rewrite=random.randint_like_tensor)
lines("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", pointwise(), rewrite=random.normal_around)
lines("native_dropout", pointwise(outputs=2), rewrite=random.native_dropout)
lines("native_dropout_backward", pointwise("a*B"))
lines("rrelu_with_noise rrelu_with_noise_", pointwise(), rewrite=random.rrelu)
lines("rrelu_with_noise_backward", pointwise("a*B*C"))
