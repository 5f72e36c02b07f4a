"""Every op that runs split, a line each: name, rule, and further columns where a rank's local run differs.

Those of losses are in losses.py, those of mathematics that networks seldom need in mathematics.py.

`tests/test_rules.py` proves each line by brute force against plain torch. In-place, `out=` and foreach variants follow
from the functional op (`variants.py`). An op that is not here runs on whole operands: all-B.
"""
from __future__ import annotations

import torch

from globaltensor.algorithms import (
    batch_norm,
    counts,
    decompositions,
    fused_attention,
    group_norm,
    grouped_mm,
    halo,
    histograms,
    layer_norm,
    local_impls,
    masks,
    observers,
    pooling,
    random_ops,
    ring_attention,
    scans,
    shifts,
    strided_memory,
    summa,
)
from globaltensor.algorithms.halo_offers import offer_convolution, offer_convolution_backward, offer_pooling
from globaltensor.algorithms.reduction_offers import of_logsumexp, of_norm, of_reduction, of_scan, of_softmax
from globaltensor.layouts.sbp import broadcast, partial_max, partial_min, partial_sum
from globaltensor.op_table.line import (
    Line,
    always_decomposed,
    decomposed,
    group_counts,
    image_sized,
    lines,
    own_channels,
    scaled,
    shifted_diagonal,
    sized,
    strided,
)
from globaltensor.op_table.losses import TABLE
from globaltensor.rules import indices, layers
from globaltensor.rules.families import (
    along,
    broadcasting_addmm,
    contraction,
    copied,
    copied_over,
    fixed,
    keeping,
    masked_outputs,
    pointwise,
    reduction,
    zeroing,
)
from globaltensor.rules.shapes import (
    concatenated,
    diagonal,
    diagonal_backward,
    diagonal_scattered,
    expanded,
    factory_like,
    filled_like,
    halved,
    memory_like,
    padded,
    permuted,
    repeated,
    scattered_into,
    selected,
    sized_backward,
    sliced,
    split_list,
    squeezed,
    stacked,
    swapped,
    triangle,
    turned,
    unbound,
    unfolded,
    unfolded_backward,
    unsqueezed,
    viewed,
)
from globaltensor.runtime import custom_ops

__all__ = ["TABLE"]                                  # filled by the lines below

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------- element by element
lines("add.Tensor sub.Tensor rsub.Tensor", pointwise("a+b"))
lines("mul.Tensor", pointwise("a*b"))
lines("div.Tensor", pointwise("a*B"))
lines("mul.Scalar div.Scalar neg clone alias detach lift_fresh conj_physical deg2rad rad2deg", pointwise("a"))
lines("_conj _neg_view", pointwise("a"))
lines("add.Scalar sub.Scalar rsub.Scalar", pointwise("A"))
lines("lerp.Scalar", pointwise("a+b"))
lines("lerp.Tensor", pointwise("a*C+b*C"))
lines("addcmul", pointwise("a+b*c"))
lines("addcdiv", pointwise("a+b*C"))
lines("abs relu relu6 exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh "
      "cosh tanh asinh acosh atanh erf erfc erfinv sigmoid silu mish gelu hardtanh hardswish angle signbit "
      "hardsigmoid leaky_relu elu celu softplus softshrink hardshrink threshold sign sgn floor ceil round "
      "round.decimals trunc frac isnan isinf isposinf isneginf logical_not bitwise_not nan_to_num clamp clamp_min "
      "clamp_max pow.Tensor_Scalar pow.Scalar sinc logit "
      "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar remainder.Scalar fmod.Scalar "
      "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar where.ScalarSelf where.ScalarOther where.Scalar",
      pointwise())
lines("div.Tensor_mode div.Scalar_mode pow.Tensor_Tensor atan2 fmax fmin eq.Tensor ne.Tensor lt.Tensor "
      "le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor "
      "bitwise_xor.Tensor remainder.Tensor fmod.Tensor floor_divide clamp.Tensor clamp_min.Tensor clamp_max.Tensor "
      "hypot copysign.Tensor logaddexp logaddexp2 nextafter heaviside _prelu_kernel", pointwise())
lines("ldexp.Tensor polar", pointwise("a*B"))
lines("complex", pointwise("a+b"))
lines("where.self", pointwise("A*b+A*c"))
lines("masked_fill.Scalar", zeroing("value", "a*B", "A*B"))
lines("masked_fill.Tensor", pointwise("a*B+B*c"))
lines("_to_copy", copied)
lines("copy fill.Tensor", copied_over)
lines("fill.Scalar zero zeros_like ones_like full_like empty_like", filled_like)
lines("view_as_real", fixed("d* -> d* r!", "a"))
lines("view_as_complex", fixed("d* r! -> d*", "a"), local_impl=local_impls.complex_pairs)
lines("threshold_backward gelu_backward sigmoid_backward tanh_backward silu_backward leaky_relu_backward "
      "hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward elu_backward "
      "softshrink_backward hardshrink_backward logit_backward", pointwise("a*B"))
lines("log_sigmoid_forward", pointwise(outputs=2), local_impl=local_impls.log_sigmoid)
lines("log_sigmoid_backward", pointwise("a*B*C"))
lines("_prelu_kernel_backward", pointwise("a*B*C", outputs=2))

# ------------------------------------------------------------------------------------------- contractions
lines("mm", fixed("m k, k n -> m n", "a*b"))
lines("bmm", fixed("b m k, b k n -> b m n", "a*b"))
lines("mv", fixed("m k, k -> m", "a*b"))
lines("dot vdot", fixed("k, k -> ", "a*b"))
lines("addmm", broadcasting_addmm("m k", "k n", "m n"))
lines("baddbmm", broadcasting_addmm("b m k", "b k n", "b m n"))
lines("addbmm", broadcasting_addmm("b m k", "b k n", "m n"))
lines("addmv", broadcasting_addmm("m k", "k", "m"))
lines("addr", broadcasting_addmm("m", "n", "m n"))
TABLE[custom_ops.contract] = Line(contraction, decomposition=summa.product, offer=summa.offer)
TABLE[custom_ops.linear] = Line(fixed("b* k, n k, n -> b* n", "a*b+c"), decomposition=summa.product, offer=summa.offer)
decomposed("_grouped_mm", grouped_mm.grouped_mm)
lines("convolution", layers.convolved, local_args=scaled("groups"), decomposition=halo.convolution,
      offer=offer_convolution)
lines("convolution_backward", masked_outputs(layers.convolved_backward, "output_mask"), local_args=own_channels,
      decomposition=halo.convolution_backward, offer=offer_convolution_backward)

# ---------------------------------------------------------------------------------------------- reductions
lines("sum sum.dim_IntList", reduction("a"))
lines("mean mean.dim", reduction("a", uncut=True), decomposition=decompositions.mean,
      offer=of_reduction(left=[partial_sum], passes=1))
lines("count_nonzero count_nonzero.dim_IntList", reduction())
lines("nansum", reduction(), decomposition=decompositions.of_all_dims, applies=lambda call: call["dim"] == [])
lines("maximum", keeping("max", pointwise()))
lines("minimum", keeping("min", pointwise()))
lines("amax", keeping("max", reduction(leaves="max")), local_impl=local_impls.extremum)
lines("amin", keeping("min", reduction(leaves="min")), local_impl=local_impls.extremum)
lines("any any.dim _is_any_true", reduction(leaves="max"))
lines("any.dims", reduction(leaves="max", or_none=True))
lines("all all.dim _is_all_true", reduction(leaves="min"))
lines("all.dims", reduction(leaves="min", or_none=True))
lines("max", reduction(uncut=True), decomposition=decompositions.whole_extremum,
      offer=of_reduction(left=[partial_max], passes=1))
lines("min", reduction(uncut=True), decomposition=decompositions.whole_extremum,
      offer=of_reduction(left=[partial_min], passes=1))
lines("max.dim min.dim", reduction(outputs=2, uncut=True), decomposition=scans.extreme,
      offer=of_scan(summaries=2, reduces=True))
lines("argmax argmin", reduction(uncut=True), decomposition=scans.extreme,
      offer=of_scan(summaries=2, reduces=True))
lines("logsumexp", reduction(uncut=True), decomposition=decompositions.logsumexp, offer=of_logsumexp())
lines("prod prod.dim_int", reduction(uncut=True), decomposition=scans.split_product, offer=of_scan(reduces=True))
lines("median nanmedian", reduction(uncut=True))
lines("median.dim nanmedian.dim mode kthvalue", reduction(outputs=2, uncut=True))
lines("aminmax", reduction(outputs=2, uncut=True), decomposition=decompositions.both_extrema,
      offer=of_reduction(left=[partial_min, partial_max], passes=2))
decomposed("histc", histograms.histc)
decomposed("histogram.bin_ct histogram.bins_tensor", histograms.histogram)
lines("var.correction", reduction(uncut=True), decomposition=decompositions.variance,
      offer=of_reduction(lambda call: (partial_sum,), left=[partial_sum]))
lines("std.correction", reduction(uncut=True), decomposition=decompositions.variance,
      offer=of_reduction(lambda call: (partial_sum, partial_sum)))
lines("var_mean.correction", reduction(outputs=2, uncut=True), decomposition=decompositions.variance,
      offer=of_reduction(lambda call: (partial_sum,), left=[partial_sum, partial_sum]))
lines("std_mean.correction", reduction(outputs=2, uncut=True), decomposition=decompositions.variance,
      offer=of_reduction(lambda call: (partial_sum, partial_sum), left=[broadcast, partial_sum]))
lines("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", reduction(uncut=True),
      decomposition=decompositions.vector_norm, offer=of_reduction(of_norm, passes=3))
decomposed("_foreach_norm.Scalar", decompositions.foreach_norm)
decomposed("_amp_foreach_non_finite_check_and_unscale_", decompositions.unscale)
decomposed("_foreach_max", lambda call, run: [run(aten.max.default, x) for x in call.tensors])
lines("cumsum", along("a"), decomposition=scans.cumsum, offer=of_scan())
lines("cumprod", along(), decomposition=scans.cumprod, offer=of_scan())
lines("cummax cummin sort sort.stable", along(outputs=2))
lines("topk", along(outputs=2, resizes=True), decomposition=scans.topk,
      offer=of_scan(kept=lambda call: call["k"], summaries=2, resized=True))
lines("logcumsumexp argsort argsort.stable", along())
lines("flip", along("a", name="dims"), decomposition=shifts.flip_wider, applies=shifts.is_hard_to_flip)
lines("roll", along("a", name="dims"), decomposition=shifts.shifted, offer=shifts.offer_shifts)
lines("_softmax", along(), decomposition=decompositions.softmax, offer=of_softmax())
lines("_safe_softmax", along(), decomposition=decompositions.safe_softmax, offer=of_softmax())
lines("_log_softmax", along(), decomposition=decompositions.log_softmax, offer=of_softmax())
lines("_softmax_backward_data", along("a*B", operands=2), decomposition=decompositions.softmax_backward,
      offer=of_softmax(backward=True))
lines("_log_softmax_backward_data", along("a*B", operands=2), decomposition=decompositions.log_softmax_backward,
      offer=of_softmax(backward=True))

# --------------------------------------------------------------------------------------- views and shapes
lines("view _unsafe_view", viewed, local_args=sized("size"), local_impl=local_impls.view)
lines("t transpose.int", permuted(swapped))
lines("permute", permuted(lambda call, n: [d % n for d in call["dims"]]))
lines("expand", expanded, local_args=sized("size"))
lines("unsqueeze", unsqueezed)
lines("squeeze squeeze.dim squeeze.dims", squeezed, local_impl=local_impls.squeeze)
lines("select.int", selected)
lines("slice.Tensor", sliced)
lines("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes", split_list)
lines("unbind.int", unbound)
lines("cat", concatenated, decomposition=shifts.shifted, offer=shifts.offer_shifts)
lines("stack", stacked)
lines("repeat", repeated)
lines("select_backward", sized_backward, local_args=sized("input_sizes"))
lines("slice_backward", sized_backward, local_args=sized("input_sizes"), decomposition=shifts.shifted,
      offer=shifts.offer_shifts)
lines("slice_scatter", scattered_into, decomposition=shifts.shifted, offer=shifts.offer_shifts)
lines("select_scatter", scattered_into)
lines("diagonal diagonal_copy", diagonal)
lines("diag_embed", diagonal_backward)
lines("diagonal_backward", diagonal_backward, local_args=sized("input_sizes"))
lines("diagonal_scatter", diagonal_scattered)
lines("unfold", unfolded)
lines("unfold_backward", unfolded_backward, local_args=sized("input_sizes"))
lines("constant_pad_nd", padded, decomposition=shifts.shifted, offer=shifts.offer_shifts)
decomposed("as_strided_copy", strided_memory.as_strided_copy)
decomposed("_new_zeros_with_same_feature_meta", strided_memory.zeros_in_memory_like)
lines("as_strided_scatter", fixed("d*!, s*! -> d*!", "a+b"), decomposition=strided_memory.as_strided_scatter,
      applies=strided_memory.must_be_boxed)
lines("tril triu", triangle, local_args=shifted_diagonal)
lines("rot90", turned)
lines("glu", halved())
lines("glu_backward", halved(operands=2))
lines("new_zeros new_ones new_full new_empty", factory_like, local_args=sized("size"))
lines("new_empty_strided", memory_like, local_args=strided)

# ------------------------------------------------------------------------------------------------ indexing
lines("embedding", indices.embedded, local_impl=local_impls.own_embedding)
lines("embedding_dense_backward", indices.embedded_backward)
TABLE[custom_ops.embedding_backward] = Line(indices.embedded_backward_rows,
      local_impl=local_impls.own_embedding_backward)
lines("index.Tensor", indices.indexed, local_impl=local_impls.own_index, decomposition=masks.take_named,
      applies=masks.takes_named)
lines("index_select", indices.index_selected, local_impl=local_impls.own_index_select,
      decomposition=grouped_mm.take_rows, applies=grouped_mm.gathers_rows)
lines("gather", indices.gathered, local_impl=local_impls.own_gather)
lines("scatter.src", indices.scattered("a*B+B*c"), local_impl=local_impls.own_scatter)
lines("scatter.value", indices.scattered_value, local_impl=local_impls.own_scatter)
lines("scatter_add", indices.scattered("a+B*c", index="k"), local_impl=local_impls.own_scatter)
lines("scatter.reduce scatter.value_reduce scatter_reduce.two", indices.scatter_reduced,
      local_impl=local_impls.own_scatter)
lines("index_reduce", indices.index_reduced, local_impl=local_impls.own_scatter)
lines("put", indices.put_flat)
decomposed("bincount", counts.bincount)
lines("index_add", indices.index_written("a+B*c"), local_impl=local_impls.own_index_add,
      decomposition=grouped_mm.add_rows, applies=grouped_mm.scatters_rows)
lines("index_copy index_fill.int_Tensor", indices.index_written("a*B+B*c", index="k!"), local_impl=local_impls.own_rows)
lines("index_fill.int_Scalar", indices.index_filled, local_impl=local_impls.own_rows)
lines("index_put", indices.index_assigned, local_impl=local_impls.own_index_put, decomposition=masks.write_named,
      applies=masks.writes_named)

# ------------------------------------------------------------------------------------------------- networks' own
lines("native_layer_norm", layers.normalized("b* d*!, d*!, d*! -> b* d*!, b* o*!, b* o*!", "A*b+c;A;A"),
      decomposition=layer_norm.layer_norm, offer=layer_norm.offer_statistics(2))
lines("native_layer_norm_backward", masked_outputs(layers.normalized(
    "b* d*!, b* d*!, b* o*!, b* o*!, d*!, d*! -> b* d*!, d*!, d*!", "a*B*C*D*e;a*B*C*D;a"), "output_mask"),
      decomposition=layer_norm.layer_norm_backward, offer=layer_norm.offer_statistics(together=2))
lines("_fused_rms_norm", layers.normalized("b* d*!, d*! -> b* d*!, b* o*!", "A*b;A"),
      decomposition=layer_norm.rms_norm, offer=layer_norm.offer_statistics(1))
lines("_fused_rms_norm_backward", masked_outputs(layers.normalized(
    "b* d*!, b* d*!, b* o*!, d*! -> b* d*!, d*!", "a*B*C*d;a*B*C"), "output_mask"),
      decomposition=layer_norm.rms_norm_backward, offer=layer_norm.offer_statistics(together=1))
lines("native_group_norm", layers.group_norm("n (g c) s*!, (g c), (g c) -> n (g c) s*!, n g, n g", "A*b+c;A;A"),
      local_args=group_counts, local_impl=local_impls.contiguous_norm,
      decomposition=group_norm.group_norm_forward, offer=group_norm.offer_group_norm(2))
lines("native_group_norm_backward", masked_outputs(layers.group_norm(
    "n (g c) s*!, n (g c) s*!, n g, n g, (g c) -> n (g c) s*!, (g c), (g c)", "a*B*C*D*e;a*B*C*D;a"), "output_mask"),
    local_args=group_counts, local_impl=local_impls.contiguous_norm,
    decomposition=group_norm.group_norm_backward, offer=group_norm.offer_group_norm(together=2))
lines("mkldnn_rnn_layer", fixed("t! n f!, g! f!, g! h!, x*!, y*!, n h!, n h! -> t! n h!, n h!, n h!, w!",
                                "A*B*C*D*E*F*G;A*B*C*D*E*F*G;A*B*C*D*E*F*G;D", nonempty="n"),
      local_impl=local_impls.lstm_layer)
lines("mkldnn_rnn_layer_backward", fixed(
    "t! n f!, g! f!, g! h!, x*!, y*!, n h!, n h!, t! n h!, n h!, n h!, t! n h!, n h!, n h!, w! -> "
    "t! n f!, g! f!, g! h!, g!, g!, n h!, n h!", nonempty="n"), local_impl=local_impls.lstm_layer_backward)
lines("native_batch_norm", layers.batch_norm,
      decomposition=batch_norm.whole_batch_forward, applies=batch_norm.in_training)
lines("native_batch_norm_backward", masked_outputs(layers.batch_norm_backward, "output_mask"),
      decomposition=batch_norm.whole_batch_backward, applies=batch_norm.trained, local_impl=local_impls.contiguous_norm)
TABLE[custom_ops.squares_around] = Line(fixed("n c y*, c -> c"))
TABLE[custom_ops.norm_gradient] = Line(fixed("n c y*, n c y*, c, c, c, c -> n c y*", "a*f+d*f+b*e*f+c*e*f"))
decomposed("_native_batch_norm_legit _native_batch_norm_legit.no_stats _batch_norm_with_update cudnn_batch_norm",
           batch_norm.as_native)
decomposed("batch_norm_backward cudnn_batch_norm_backward", batch_norm.as_native_backward)
lines("_fused_moving_avg_obs_fq_helper", always_decomposed, decomposition=observers.size_buffers,
      applies=observers.is_fresh)
# Of split or pending tensors torch can make no nested one: its encoder then keeps the padding.
decomposed("_nested_tensor_from_mask_left_aligned", lambda call, run: False)
decomposed("_has_same_storage_numel", lambda call, run: True)        # forward AD asks; a global tensor has no memory
lines("_weight_norm_interface", layers.weight_norm())
lines("_weight_norm_interface_backward", layers.weight_norm(backward=True))
lines("_scaled_dot_product_flash_attention_for_cpu", layers.attention(), decomposition=ring_attention.ring_forward,
      offer=ring_attention.offer_forward)
lines("_scaled_dot_product_flash_attention_for_cpu_backward", layers.attention(backward=True),
      decomposition=ring_attention.ring_backward, offer=ring_attention.offer_backward)
for _name in ("flash", "efficient", "cudnn"):
    decomposed(f"_scaled_dot_product_{_name}_attention", fused_attention.as_on_cpu)
    decomposed(f"_scaled_dot_product_{_name}_attention_backward", fused_attention.as_on_cpu_backward)

for _n in (1, 2, 3):
    for _name in (f"upsample_{('linear1d', 'bilinear2d', 'trilinear3d')[_n - 1]}", f"upsample_nearest{_n}d",
                  f"_upsample_nearest_exact{_n}d", *(["upsample_bicubic2d"] if _n == 2 else [])):
        lines(_name, layers.spatial(_n, "a"))
        lines(f"{_name}_backward", layers.spatial(_n, "a"), local_args=sized("input_size"))
    for _name in (f"reflection_pad{_n}d", f"replication_pad{_n}d"):
        lines(_name, layers.spatial(_n, "a"))
        lines(f"{_name}_backward", layers.spatial(_n, "a", operands=2))
for _n in (2, 3):
    lines(f"avg_pool{_n}d", layers.spatial(_n, "a"), decomposition=pooling.avg_pool, offer=offer_pooling)
    lines(f"avg_pool{_n}d_backward", layers.spatial(_n, "a", operands=2), decomposition=pooling.avg_pool_backward,
          offer=offer_pooling)
    lines(f"max_pool{_n}d_with_indices", layers.spatial(_n, outputs=2), decomposition=pooling.max_pool,
          offer=offer_pooling)
    lines(f"max_pool{_n}d_with_indices_backward", layers.spatial(_n, "a*C", operands=3),
          decomposition=pooling.max_pool_backward, offer=offer_pooling)
    lines(f"_adaptive_avg_pool{_n}d", layers.spatial(_n, "a"))
    lines(f"_adaptive_avg_pool{_n}d_backward", layers.spatial(_n, "a", operands=2))
    lines(f"adaptive_max_pool{_n}d", layers.spatial(_n, outputs=2))
    lines(f"adaptive_max_pool{_n}d_backward", layers.spatial(_n, "a*C", operands=3))
    lines(f"fractional_max_pool{_n}d", layers.fractional(_n))
    lines(f"fractional_max_pool{_n}d_backward", layers.spatial(_n, "a*C", operands=3))
    lines(f"max_unpool{_n}d", layers.spatial(_n, "a*B", operands=2))
lines("im2col", layers.columns(apart=True))
lines("col2im", layers.columns(apart=False), local_args=image_sized)
lines("pixel_shuffle", layers.shuffled(up=True))
lines("pixel_unshuffle", layers.shuffled(up=False))
lines("_pack_padded_sequence", fixed("t! b! f*!, l! -> p! f*!, s!"), decomposition=decompositions.packed_sequence)
lines("channel_shuffle", fixed("n c! s* -> n c! s*", "a"))

# ------------------------------------------------------------------------------------------------ random numbers
# Always decomposed; their in-place variants have lines of their own.
for _names, _draw, *_parameters in (
        ("uniform", random_ops.draw_uniform), ("normal_functional", random_ops.draw_normal),
        ("exponential", random_ops.draw_exponential), ("log_normal", random_ops.draw_log_normal),
        ("cauchy", random_ops.draw_cauchy), ("geometric", random_ops.draw_geometric),
        ("random random.from random.to", random_ops.draw_integers), ("bernoulli.p", random_ops.draw_bernoulli),
        ("bernoulli.Tensor", random_ops.draw_bernoulli_each, "p"),
        ("bernoulli", random_ops.draw_bernoulli_each, "self"),
        ("rand_like rand_like.generator", random_ops.draw_uniform),
        ("randn_like randn_like.generator", random_ops.draw_standard_normal),
        ("randint_like randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype",
         random_ops.draw_integers)):
    decomposed(_names, random_ops.like(_draw, *_parameters))
for _names, _draw, *_parameters in (
        ("uniform_", random_ops.draw_uniform), ("normal_", random_ops.draw_normal),
        ("exponential_", random_ops.draw_exponential), ("log_normal_", random_ops.draw_log_normal),
        ("cauchy_", random_ops.draw_cauchy), ("geometric_", random_ops.draw_geometric),
        ("random_ random_.from random_.to", random_ops.draw_integers), ("bernoulli_.float", random_ops.draw_bernoulli),
        ("bernoulli_.Tensor", random_ops.draw_bernoulli_each, "p")):
    decomposed(_names, random_ops.fill(_draw, *_parameters))
decomposed("randint_like.Tensor randint_like.Tensor_generator", random_ops.randint_like_tensor)
lines("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", pointwise(),
      decomposition=random_ops.normal_around)
lines("native_dropout", pointwise(outputs=2), decomposition=random_ops.native_dropout)
lines("native_dropout_backward", pointwise("a*B"))
lines("rrelu_with_noise rrelu_with_noise_", pointwise(), decomposition=random_ops.rrelu)
lines("rrelu_with_noise_backward", pointwise("a*B*C"))
