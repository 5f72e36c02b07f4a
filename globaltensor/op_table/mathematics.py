"""Lines of the table: special functions, linear algebra, Fourier transforms, distances, searches and sampling."""
from __future__ import annotations

import torch

from globaltensor.algorithms import decompositions, searches, strided_memory
from globaltensor.op_table.line import TABLE, decomposed, grid_sized, lines, sized
from globaltensor.rules import layers
from globaltensor.rules.families import along, fixed, masked_outputs, pointwise
from globaltensor.rules.numerics import (
    by_cholesky,
    by_factors,
    factors,
    reflected,
    renormed,
    searched,
    solved,
    solved_triangular,
    transformed,
    trilinear,
    unpacked,
)

__all__ = ["TABLE"]                                  # filled by the lines below, and by table.py

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- special functions
lines("digamma polygamma lgamma i0 special_i0e special_i1 special_i1e special_entr special_erfcx "
      "special_log_ndtr special_ndtri special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 "
      "special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 "
      "special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
      "special_spherical_bessel_j0 copysign.Scalar", pointwise())
lines("igamma igammac special_zeta", pointwise())
decomposed("mvlgamma", decompositions.by_torch("CompositeExplicitAutograd"))
# x log y is not linear in x: 0 log 0 is 0, where terms of x that are not 0 give infinities
lines("xlogy.Tensor special_xlog1py", pointwise())
lines("xlogy.Scalar_Other special_xlog1py.other_scalar xlogy.Scalar_Self special_xlog1py.self_scalar "
      "special_zeta.self_scalar special_zeta.other_scalar remainder.Scalar_Tensor floor_divide.Scalar "
      "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor gcd lcm _standard_gamma_grad "
      "_dirichlet_grad", pointwise())
for _name in ("__lshift__", "__rshift__", "__ilshift__", "__irshift__"):
    lines(f"{_name}.Tensor {_name}.Scalar", pointwise())
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    lines(f"{_name}.Tensor {_name}.Tensor_Scalar {_name}.Scalar_Tensor", pointwise())
for _name in ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
              "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
              "shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
              "laguerre_polynomial_l", "legendre_polynomial_p"):
    lines(f"special_{_name} special_{_name}.x_scalar special_{_name}.n_scalar", pointwise())
lines("frexp.Tensor", pointwise(outputs=2))

# ------------------------------------------------------------------------------------------------- linear algebra
lines("linalg_cross", along("a*b", operands=2))
for _name, _values in (("det", "b*"), ("slogdet", "b*, b*")):
    lines(f"_linalg_{_name}", fixed(f"b* m! n! -> {_values}, b* m! n!, b* p!"),
          decomposition=strided_memory.factored_by_columns, applies=strided_memory.lies_otherwise)
lines("_linalg_solve_ex", solved, decomposition=strided_memory.factored_by_columns,
      applies=strided_memory.lies_otherwise)
lines("linalg_solve_triangular", solved_triangular)
lines("linalg_cholesky_ex linalg_inv_ex", fixed("b* m! n! -> b* m! n!, b*"))
lines("linalg_matrix_exp", fixed("b* m! n! -> b* m! n!"))
lines("_linalg_eigh", factors("b* m!, b* m! n!", "b* m!, v!", lambda call: call["compute_v"]))
lines("_linalg_svd", factors("b* m! k!, b* k!, b* l! n!", "u!, b* k!, v!", lambda call: call["compute_uv"]))
lines("linalg_qr", factors("b* m! k!, b* k! n!", "q!, b* k! n!", lambda call: call["mode"] != "r"))
lines("linalg_lu_factor_ex", fixed("b* m! n! -> b* m! n!, b* k!, b*"))
lines("linalg_ldl_factor_ex", fixed("b* m! n! -> b* m! n!, b* m!, b*"))
lines("linalg_lu", factors("b* m! k!, b* k! l!, b* k! n!", "p!, b* k! l!, b* k! n!", lambda call: call["pivot"]))
lines("lu_unpack", unpacked)
lines("linalg_lu_solve", by_factors)
lines("linalg_ldl_solve", fixed("b* m! n!, b* m!, b* n! k -> b* n! k", "A*B*c"))
lines("cholesky cholesky_inverse", fixed("b* m! n! -> b* m! n!"))
lines("cholesky_solve", by_cholesky)
lines("triangular_solve", fixed("b* n! k, b* m! n! -> b* n! k, b* m! n!", "a*B;b"))
lines("linalg_householder_product", fixed("b* m! n!, b* k! -> b* m! n!"))
lines("ormqr", reflected)
lines("linalg_eig", fixed("b* m! n! -> b* m!, b* m! n!"))
lines("_linalg_eigvals", fixed("b* m! n! -> b* m!"))
lines("renorm", renormed)
decomposed("linalg_pinv.atol_rtol_tensor", decompositions.by_torch("CompositeExplicitAutogradNonFunctional"))
lines("_trilinear", trilinear)
decomposed("trace", decompositions.trace)

# -------------------------------------------------------------------------------------------- Fourier transforms
lines("_fft_c2c _fft_r2c _fft_c2r", transformed)

# ------------------------------------------------------------------------------------------ distances, searches
lines("_cdist_forward _euclidean_dist", fixed("b* m d!, b* n d! -> b* m n"))
# of an empty part the gradient's kernel forgets which dims were repeated
lines("_cdist_backward", fixed("b* m n, b* m d, b* n d, b* m n -> b* m d", "a*B*C*D", nonempty="b* m n d"),
      decomposition=decompositions.empty_distances_backward, applies=lambda call: not call.tensors[0].numel())
# of no points the kernel dies
lines("_pdist_backward", fixed("p!, m! d, p! -> m! d", "a*B*C"),
      decomposition=decompositions.empty_distances_backward, applies=lambda call: not call.tensors[0].numel())
decomposed("dist", lambda call, run: run(aten.linalg_vector_norm.default,
                                         run(aten.sub.Tensor, call["self"], call["other"]), call["p"]))
for _name, _family in (("bucketize.Tensor", fixed("d*, k -> d*")), ("searchsorted.Tensor", searched)):
    lines(_name, _family, decomposition=searches.search_without_nan, applies=searches.searches_split_floats)
lines("isin.Tensor_Tensor", fixed("d*, k*! -> d*"))
lines("isin.Tensor_Scalar", pointwise())
decomposed("isin.Scalar_Tensor", decompositions.holds_number)
decomposed("equal", decompositions.equal)
decomposed("prims::item", lambda call, run: run(aten._local_scalar_dense.default, call["a"]))
decomposed("allclose", decompositions.by_torch("CompositeExplicitAutograd"))
lines("bucketize.Scalar", fixed("k -> "))
lines("take", fixed("s*!, i* -> i*", "a*B"))

# --------------------------------------------------------------------------------------------- sampling of images
lines("affine_grid_generator", layers.affine_grid, local_args=grid_sized)
for _n, _out, _in in ((2, "p q", "y! x!"), (3, "o p q", "z! y! x!")):
    lines(f"grid_sampler_{_n}d", fixed(f"n c {_in}, n {_out} i! -> n c {_out}", "a*B"))
    lines(f"grid_sampler_{_n}d_backward", masked_outputs(fixed(
        f"n c {_out}, n c {_in}, n {_out} i! -> n c {_in}, n {_out} i!", "a*C;a*b*C"), "output_mask", always={1}))
for _name in ("bilinear", "bicubic"):
    lines(f"_upsample_{_name}2d_aa", layers.spatial(2, "a"))
    lines(f"_upsample_{_name}2d_aa_backward", layers.spatial(2, "a"), local_args=sized("input_size"))
