"""Sample arguments for every line of the table, and what is true of an op but left out of its rule, with the reason.

Sizes: 6 is cut evenly by 2 and 3 ranks, 5 and 4 unevenly, 2 and 1 leave 3 ranks (and 2) with empty parts.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draw:
    """A tensor still to be drawn."""

    make: Callable[[torch.Generator], torch.Tensor]


def r(*shape):
    """Normal numbers."""
    return Draw(lambda g: torch.randn(shape, generator=g, dtype=torch.float64))


def u(*shape):
    """Numbers in (0.1, 0.9), for functions that are not defined everywhere."""
    return Draw(lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1)


def w(*shape):
    """Numbers far from 0."""
    return Draw(lambda g: torch.randn(shape, generator=g, dtype=torch.float64) * 5)


def z(*shape):
    """-1, 0, 1 and 2."""
    return Draw(lambda g: torch.randint(-1, 3, shape, generator=g).double())


def w2(*shape):
    """Numbers in (2, 5)."""
    return Draw(lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * 3 + 2)


def some(*shape, of):
    """Numbers drawn from these."""
    return Draw(lambda g: torch.tensor(of, dtype=torch.float64)[torch.randint(len(of), shape, generator=g)])


def odd(*shape):
    """Some of nan, inf, -inf, 1 and 2."""
    return some(*shape, of=(torch.nan, torch.inf, -torch.inf, 1, 2))


def holes(*shape):
    """Some nan among 1 and 2."""
    return some(*shape, of=(torch.nan, 1, 2))


def nothing(*shape):
    return Draw(lambda g: torch.zeros(shape, dtype=torch.float64))


def i(high, *shape):
    """Indices."""
    return Draw(lambda g: torch.randint(high, shape, generator=g))


def maxima(n, *lead):
    """Where kernels of 2 in each of n dims may find the maxima of a plane of 4 in each."""
    at = [2 * torch.arange(2).view(2, *[1] * (n - 1 - d)) * 4 ** (n - 1 - d) for d in range(n)]
    steps = [4 ** (n - 1 - d) for d in range(n)]
    return Draw(lambda g: sum(first + step * torch.randint(2, (*lead, *[2] * n), generator=g)
                              for first, step in zip(at, steps)))


def b(*shape):
    """Truths, of both kinds."""
    return Draw(lambda g: torch.rand(shape, generator=g) < 0.5)


def order(n, *rest, keep=None):
    """Indices below n that are all different along the first dim; `keep` of them."""
    return Draw(lambda g: torch.rand((n, *rest), generator=g).argsort(0)[:keep])


SAMPLES: dict[str, list[tuple[tuple, dict]]] = {}


def sample(names, *args, **kwargs):
    for name in names.split():
        SAMPLES.setdefault(name, []).append((args, kwargs))


def samples(names, *many, rest=(), **kwargs):
    """Each of `many` is the tensors of a sample; `rest` the arguments after them."""
    for one in many:
        sample(names, *one, *rest, **kwargs)


def made(value, generator):
    """Sample arguments with their tensors drawn."""
    if isinstance(value, Draw):
        return value.make(generator)
    if isinstance(value, dict):
        return {k: made(v, generator) for k, v in value.items()}
    return type(value)(made(v, generator) for v in value) if isinstance(value, (list, tuple)) else value


def name_of(func):
    return str(func).removeprefix("aten.").removesuffix(".default")


# ------------------------------------------------------------------------------------------ element by element
ONE = ((u(6, 4),), (u(5, 3),), (u(2, 1, 3),))
ZEROS = ((z(6, 4),), (z(5, 3),))
TWO = ((u(6, 4), u(6, 4)), (u(5, 3), u(3)), (u(5, 1, 3), u(1, 4, 3)), (u(2), u(5, 2)), (u(4), u()))
TWO_ZEROS = ((z(6, 4), z(6, 4)), (z(5, 3), z(3)))
THREE = ((u(6, 4), u(6, 4), u(6, 4)), (u(5, 3), u(5, 1), u(3)), (u(2, 3), u(), u(2, 3)))
WHOLE_NUMBERS = (i(8, 6, 4), i(8, 5, 3))

samples("neg clone alias detach lift_fresh conj_physical deg2rad rad2deg _neg_view abs relu relu6 exp exp2 "
        "expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh cosh tanh asinh atanh "
        "erf erfc erfinv sigmoid silu mish gelu hardtanh hardswish angle signbit hardsigmoid leaky_relu elu celu "
        "softplus softshrink hardshrink sign sgn digamma lgamma i0 special_i1 "
        "sinc logit log_sigmoid_forward", *ONE)
samples("neg exp clone sigmoid", (u(),))
samples("isnan isinf isposinf isneginf nan_to_num", (odd(6, 4),), (odd(5, 3),))
samples("logical_not", *ZEROS)
samples("floor ceil round trunc frac acosh", (Draw(lambda g: torch.randn(6, 4, generator=g).double() * 3 + 5),))
samples("floor round trunc frac", *[(r(5, 3),)])
sample("round.decimals", r(6, 4), decimals=1)
sample("bitwise_not", i(8, 5, 3))
for rest in ((2,), (0.5,)):
    samples("mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar clamp_min clamp_max remainder.Scalar "
            "fmod.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", (w(6, 4),), (w(5, 3),), rest=rest)
samples("eq.Scalar ne.Scalar", *ZEROS, rest=(2,))
samples("pow.Tensor_Scalar", *ONE, rest=(3,))
samples("add.Tensor sub.Tensor mul.Tensor div.Tensor", *ONE[:2], rest=(2.5,))
samples("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", *[(n, 3) for n in WHOLE_NUMBERS])
samples("clamp threshold", *ONE, rest=(0.3, 0.6))
for n in ((6, 4), (5, 3)):
    sample("pow.Scalar", 2.5, r(*n))
    sample("polygamma", 2, u(*n))
    sample("where.ScalarSelf", b(*n), 2.0, r(*n))
    sample("where.ScalarOther", b(*n), r(*n), 2.0)
    sample("where.Scalar", b(*n), 2.0, 3.0)
samples("add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor pow.Tensor_Tensor atan2 maximum minimum fmax fmin "
        "lt.Tensor le.Tensor gt.Tensor ge.Tensor remainder.Tensor floor_divide hypot "
        "logaddexp logaddexp2 ldexp.Tensor polar complex", *TWO[:2], TWO[3])
samples("eq.Tensor ne.Tensor logical_and logical_or logical_xor nextafter heaviside", *TWO_ZEROS)
samples("copysign.Tensor", (w(6, 4), w(6, 4)), (w(5, 3), w(4, 1, 3)))
samples("fmod.Tensor", (w(6, 4), u(6, 4)), (w(5, 3), u(3)))
samples("add.Tensor mul.Tensor div.Tensor maximum rsub.Tensor", TWO[2], TWO[4])
samples("copy", (r(6, 4), r(6, 4)), (r(6, 4), r(4)), (i(9, 5, 3), r(5, 3)), (r(5, 3), i(9, 3)))
samples("div.Tensor_mode", *TWO[:2], rounding_mode="floor")
samples("div.Scalar_mode", *ONE[:2], rest=(0.3,), rounding_mode="trunc")
samples("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", (i(8, 6, 4), i(8, 6, 4)), (i(8, 5, 3), i(8, 3)))
samples("lerp.Tensor addcmul addcdiv clamp.Tensor", *THREE)
samples("lerp.Scalar", *TWO[:3], rest=(0.3,))
samples("clamp_min.Tensor clamp_max.Tensor", *TWO[:3])
samples("where.self", (b(6, 4), r(6, 4), r(6, 4)), (b(5, 1), r(3), r(5, 3)), (b(5, 3), r(), r(1, 3)))
for value in (0, 2, 0.0):
    samples("masked_fill.Scalar", (r(6, 4), b(6, 4)), (r(5, 3), b(3)), rest=(value,))
samples("masked_fill.Tensor", (r(6, 4), b(6, 4), r()), (r(5, 3), b(3), r()))
for dtype in (torch.float32, torch.int64, torch.bool, torch.float64, torch.complex128):
    samples("_to_copy", (z(6, 4) if dtype == torch.bool else w(6, 4),), (i(9, 5, 3),), dtype=dtype)
samples("zero zeros_like ones_like empty_like", *ONE[:3])
samples("fill.Scalar full_like", *ONE[:3], rest=(2.5,))
samples("fill.Tensor", *[(x, r()) for x, in ONE[:3]])
samples("bucketize.Tensor", (r(5, 3), Draw(lambda g: torch.randn(6, generator=g).double().sort().values)))
samples("view_as_real _conj", (Draw(lambda g: torch.randn(5, 3, generator=g, dtype=torch.complex128)),))
samples("view_as_complex", (r(5, 3, 2),), (r(6, 2),))
samples("gelu_backward sigmoid_backward tanh_backward silu_backward mish_backward logit_backward", *TWO[:2])
samples("hardswish_backward hardsigmoid_backward", (r(6, 4), w(6, 4)), (r(5, 3), w(5, 3)))
samples("native_dropout_backward", (r(6, 4), b(6, 4), 2.0), (r(5, 3), b(5, 3), 2.0))
samples("threshold_backward softshrink_backward hardshrink_backward", *TWO[:1], (r(5, 3), r(5, 3)), rest=(0.4,))
samples("leaky_relu_backward", *TWO[:1], (r(5, 3), r(5, 3)), rest=(0.1, False))
samples("hardtanh_backward", *TWO[:1], (r(5, 3), r(5, 3)), rest=(-0.5, 0.5))
samples("softplus_backward", *TWO[:1], (r(5, 3), r(5, 3)), rest=(1.0, 20.0))
for x in (6, 4), (5, 3):
    sample("elu_backward", r(*x), 1.0, 1.0, 1.0, False, r(*x))
samples("log_sigmoid_backward", (r(6, 4), r(6, 4), u(6, 4)), (r(5, 3), r(5, 3), u(5, 3)))
samples("rrelu_with_noise_backward", (r(6, 4), r(6, 4), u(6, 4), 0.1, 0.3, True, False))
samples("_prelu_kernel", (r(6, 4), r(1, 4)), (r(5, 3), r(1, 3)))
samples("_prelu_kernel_backward", (r(6, 4), r(6, 4), r(1, 4)), (r(5, 3), r(5, 3), r(1, 3)))

# ------------------------------------------------------------------------------------------------ contractions
for m, k, n in ((6, 4, 6), (5, 3, 2), (2, 1, 5)):
    sample("mm", r(m, k), r(k, n))
    sample("bmm", r(n, m, k), r(n, k, m))
    sample("mv", r(m, k), r(k))
    sample("dot vdot", r(m), r(m))
    for bias in ((n,), (m, n), (m, 1), (1, n), ()):
        sample("addmm", r(*bias), r(m, k), r(k, n))
    sample("addmm", r(n), r(m, k), r(k, n), beta=0.5, alpha=2.0)
    sample("baddbmm", r(1, m), r(n, m, k), r(n, k, m))
    sample("baddbmm", r(n, m, m), r(n, m, k), r(n, k, m))
    sample("addbmm", r(m, m), r(n, m, k), r(n, k, m))
    sample("addmv", r(m), r(m, k), r(k))
    sample("addr", r(m, n), r(m), r(n))
    sample("globaltensor.contract", "bmk,bkn->bmn", r(2, m, k), r(2, k, n))
    sample("globaltensor.contract", "bmk,nk->bmn", r(2, m, k), r(n, k))
    sample("globaltensor.contract", "bmn,bmk->nk", r(2, m, n), r(2, m, k))
    sample("globaltensor.linear", r(2, m, k), r(n, k), r(n))
    sample("globaltensor.linear", r(m, k), r(n, k), None)
    sample("_cdist_forward", r(m, k), r(n, k), 2.0, None)
    sample("_cdist_backward", r(m, n), r(m, k), r(n, k), 2.0, u(m, n))
    sample("_pdist_backward", r(m * (m - 1) // 2), r(m, k), 2.0, u(m * (m - 1) // 2))
samples("_linalg_det _linalg_slogdet", (r(3, 3),), (r(5, 2, 2),), (r(2, 3, 2, 2),))
samples("_linalg_solve_ex", (r(3, 3), r(3)), (r(3, 3), r(3, 4)), (r(5, 2, 2), r(5, 2, 3)), (r(5, 2, 2), r(5, 2)),
        (r(2, 2), r(4, 2, 3)))
sample("_linalg_solve_ex", r(4, 2, 2), r(4, 3, 2), left=False)
sample("linalg_cross", r(5, 3), r(5, 3))
sample("linalg_cross", r(3, 4), r(3, 4), dim=0)


def definite(*shape):
    """Symmetric matrices with positive eigenvalues, far from each other."""
    n = shape[-1]

    def make(g):
        a = torch.randn(shape, generator=g, dtype=torch.float64)
        return 0.1 * (a + a.mT) + torch.diag(torch.arange(1, n + 1).double())
    return Draw(make)


def rising(*shape):
    return Draw(lambda g: torch.randn(shape, generator=g, dtype=torch.float64).sort(-1).values)


def z_complex(*shape):
    return Draw(lambda g: torch.randn(shape, generator=g, dtype=torch.complex128))


SPECIAL = " ".join(f"special_{name}" for name in (
    "i0e i1e entr erfcx log_ndtr ndtri airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0").split())
POLYNOMIALS = " ".join(f"special_{name}" for name in (
    *(f"{kind}chebyshev_polynomial_{k}" for kind in ("", "shifted_") for k in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"))
samples(f"{SPECIAL} frexp.Tensor", *ONE)
samples("copysign.Scalar", (w(6, 4),), (w(5, 3),), rest=(-1.5,))
samples("igamma igammac", *TWO[:3])
samples("special_zeta", (w2(6, 4), u(6, 4)), (w2(5, 3), u(3)))
samples(POLYNOMIALS, (u(6, 4), i(4, 6, 4)), (u(5, 3), i(4, 3)))
for end, one in (("x_scalar", (0.3, i(4, 5, 3))), ("n_scalar", (u(5, 3), 3))):
    samples(" ".join(f"{name}.{end}" for name in POLYNOMIALS.split()), one)
samples("special_zeta.other_scalar", (w2(5, 3),), rest=(0.5,))
for _name, _of in (("xlogy", (0, 0.5, 2)), ("special_xlog1py", (-1, -0.5, 1))):     # some logarithms are -inf
    samples("xlogy.Tensor" if _name == "xlogy" else _name, (z(6, 4), some(6, 4, of=_of)), (z(5, 3), some(3, of=_of)),
            (z(5, 1, 3), some(1, 4, 3, of=_of)))
    samples("xlogy.Scalar_Other" if _name == "xlogy" else f"{_name}.other_scalar", *ZEROS, rest=(float(_of[0]),))
samples("xlogy.Scalar_Self special_xlog1py.self_scalar special_zeta.self_scalar", (2.5, u(6, 4)), (2.5, u(5, 3)))
samples("_standard_gamma_grad", *TWO[:1], (u(5, 3), u(5, 3)))
samples("_dirichlet_grad", (u(6, 4), u(6, 4), w2(6, 4)), (u(5, 3), u(5, 3), w2(5, 3)))
WHOLE = ((i(8, 6, 4), i(3, 6, 4)), (i(8, 5, 3), i(3, 5, 3)))
SHIFTS = " ".join(f"bitwise_{way}_shift" for way in ("left", "right"))
samples("gcd lcm __lshift__.Tensor __rshift__.Tensor __ilshift__.Tensor __irshift__.Tensor "
        + " ".join(f"{name}.Tensor" for name in SHIFTS.split()), *WHOLE)
samples("__lshift__.Scalar __rshift__.Scalar __ilshift__.Scalar __irshift__.Scalar floor_divide.Scalar "
        "isin.Tensor_Scalar " + " ".join(f"{name}.Tensor_Scalar" for name in SHIFTS.split()),
        *[(n,) for n in WHOLE_NUMBERS], rest=(2,))
samples("bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor "
        + " ".join(f"{name}.Scalar_Tensor" for name in SHIFTS.split()), *[(5, n) for n in WHOLE_NUMBERS])
samples("remainder.Scalar_Tensor", (5, w(6, 4)), (5, w(5, 3)))
samples("bucketize.Scalar", (0.3, rising(6)), (0.3, rising(5)))
samples("linalg_lu linalg_ldl_factor_ex cholesky cholesky_inverse linalg_eig _linalg_eigvals",
        (definite(3, 3),), (definite(5, 3, 3),), (definite(2, 3, 2, 2),))
samples("linalg_lu", (r(5, 4, 3),), (r(2, 3, 4),))


def whole_pivots(*shape):
    return Draw(lambda g: torch.arange(1, shape[-1] + 1, dtype=torch.int32).expand(shape).clone())


for batch in ((), (5,), (6,), (2, 3)):
    two = definite(*batch, 3, 3), whole_pivots(*batch, 3)
    samples("linalg_lu_solve linalg_ldl_solve", (*two, r(*batch, 3, 4)))
    sample("linalg_lu_solve", *two, r(*batch, 4, 3), left=False, adjoint=True)
    for rest in ((), (False,), (True, False)):
        sample("lu_unpack", *two, *rest)
    samples("cholesky_solve", (r(*batch, 3, 4), definite(*batch, 3, 3), False))
    sample("triangular_solve", r(*batch, 3, 4), definite(*batch, 3, 3))
    sample("linalg_householder_product", r(*batch, 3, 2), u(*batch, 2))
    sample("ormqr", r(*batch, 3, 2), u(*batch, 2), r(*batch, 3, 4))
    sample("ormqr", r(*batch, 3, 2), u(*batch, 2), r(*batch, 4, 3), False, True)
sample("linalg_lu_solve", definite(5, 3, 3), whole_pivots(5, 3), r(1, 3, 4))
sample("_trilinear", r(6, 2), r(4, 2, 3), r(6, 3), [1, 3], [0], [1, 2], [2, 3])
sample("_trilinear", r(5, 4), r(3, 4, 2), r(5, 2), [1, 3], [0], [1, 2], [2, 3])
sample("_trilinear", r(5, 4), r(5, 3), r(5, 2), [1, 3], [1, 2], [2, 3], [0])
for dim in (0, 1, -1):
    samples("renorm", (w(6, 4),), (w(5, 2, 3),), rest=(2, dim, 1.5))
samples("linalg_cholesky_ex linalg_inv_ex linalg_matrix_exp linalg_lu_factor_ex linalg_qr _linalg_eigh _linalg_svd",
        (definite(3, 3),), (definite(5, 3, 3),), (definite(2, 3, 2, 2),))
for n in ((6, 4, 3), (5, 2, 3)):
    sample("linalg_qr", r(*n))
    sample("linalg_qr", r(*n), "complete")
    sample("linalg_qr", r(*n), "r")
    sample("_linalg_svd", r(*n), False, False)
sample("_linalg_eigh", definite(5, 3, 3), "U", False)
samples("linalg_solve_triangular", (definite(3, 3), r(3, 4)), (definite(5, 2, 2), r(5, 2, 3)),
        (definite(2, 2), r(4, 2, 3)), upper=True)
sample("linalg_solve_triangular", definite(5, 2, 2), r(5, 3, 2), upper=False, left=False)
for n in ((6, 4), (5, 3), (2, 5, 3)):
    last = len(n) - 1
    sample("_fft_c2c", z_complex(*n), [last], 0, True)
    sample("_fft_c2c", z_complex(*n), [0], 1, False)
    sample("_fft_c2c", z_complex(*n), [0, 1], 0, True)
    sample("_fft_r2c", r(*n), [last], 0, True)
    sample("_fft_r2c", r(*n), [0], 0, False)
    sample("_fft_c2r", z_complex(*n), [last], 0, 2 * n[-1] - 2)
    sample("_fft_c2r", z_complex(*n), [0], 0, 2 * n[0] - 1)
for n, k in ((6, 4), (5, 3)):
    sample("_euclidean_dist", r(n, k), r(4, k))
    sample("_euclidean_dist", r(2, n, k), r(2, 4, k))
    sample("searchsorted.Tensor", rising(k), r(n, 3))
    sample("searchsorted.Tensor", rising(n, k), r(n, 3), right=True)
    sample("searchsorted.Tensor", nothing(n, k), r(n, 3), sorter=Draw(lambda g, n=n, k=k: torch.rand(n, k).argsort(-1)))
    sample("isin.Tensor_Tensor", i(9, n, k), i(9, 3))
    sample("isin.Tensor_Tensor", i(9, n, k), i(9, 3, 2), invert=True)
    sample("take", r(n, k), i(n * k, 5, 2))
    sample("grid_sampler_3d", r(n, k, 2, 2, 2), r(n, 2, 3, 1, 3), 0, 0, False)
    for mask in ([True, True], [True, False], [False, True]):
        sample("grid_sampler_3d_backward", r(n, k, 2, 3, 1), r(n, k, 2, 2, 2), r(n, 2, 3, 1, 3), 0, 0, False, mask)
    for way in ("bilinear", "bicubic"):
        sample(f"_upsample_{way}2d_aa", r(n, k, 4, 4), [3, 3], False)
        sample(f"_upsample_{way}2d_aa_backward", r(n, k, 3, 3), [3, 3], [n, k, 4, 4], False)


def convolutions(space, groups, transposed, n=5, c=6):
    """Channels c -> 4, or 12 with groups."""
    o, k, size = 12 if groups > 1 else 4, 2, (3,) * space
    weight = (c, o // groups, *(k,) * space) if transposed else (o, c // groups, *(k,) * space)
    one = [1] * space
    out = tuple(s + 1 if transposed else s - 1 for s in size)
    rest = (one, [0] * space, one, transposed, [0] * space, groups)
    for bias in (r(o), None):
        sample("convolution", r(n, c, *size), r(*weight), bias, *rest)
    for mask in ([True, True, True], [False, True, False]):
        sample("convolution_backward", r(n, o, *out), r(n, c, *size), r(*weight), [o], *rest, mask)


for space, groups, transposed in ((1, 1, False), (2, 1, False), (3, 1, False), (1, 6, False), (2, 2, False),
                                  (1, 1, True), (1, 3, True), (2, 6, True)):
    convolutions(space, groups, transposed)
for groups, weight, stride, padding in ((1, (4, 3, 2, 3), [2, 3], [0, 0]), (2, (4, 1, 2, 3), [2, 3], [0, 1]),
                                        (4, (4, 1, 1, 2), [1, 2], [0, 0])):          # kernels that do not overlap
    o, out = weight[1] * groups, (6 * stride[0], 4 * stride[1] - 2 * padding[1])
    rest = (stride, padding, [1, 1], True, [0, 0], groups)
    sample("convolution", r(5, 4, 6, 4), r(*weight), r(o), *rest)
    sample("convolution_backward", r(5, o, *out), r(5, 4, 6, 4), r(*weight), [o], *rest, [True, True, True])
for n, c in ((2, 2), (1, 6)):
    convolutions(1, 1, False, n, c)
    convolutions(1, 1, True, n, c)
convolutions(1, 2, False, 2)

# -------------------------------------------------------------------------------------------------- reductions
REDUCED = ((u(6, 4),), (u(5, 2, 3),))
samples("sum mean prod max min median nanmedian argmax argmin", *REDUCED, (u(1, 5),))
samples("all count_nonzero", *ZEROS, (z(5, 2, 3),))
samples("_is_all_true _is_any_true", (b(6, 4),), (b(5, 2, 3),))
samples("any", (nothing(6, 4),), (nothing(5, 3),))
samples("nansum", (holes(6, 4),), (holes(5, 3),))
for dims in ([0], [1], [0, -1], []):
    for keep in (False, True):
        samples("sum.dim_IntList mean.dim amax amin logsumexp", *REDUCED, rest=(dims, keep))
        samples("nansum", (holes(6, 4),), (holes(5, 2, 3),), rest=(dims, keep))
        samples("linalg_vector_norm", *REDUCED, rest=(3, dims, keep))
        samples("var.correction std.correction var_mean.correction std_mean.correction", *REDUCED, rest=(dims,),
                keepdim=keep)
        samples("norm.ScalarOpt_dim", *REDUCED, rest=(2, dims, keep))
        samples("any.dims all.dims", (b(6, 4),), (b(5, 2, 3),), rest=(dims, keep))
    if not dims:                                     # None is all dims there, and an empty list is none of them
        samples("any.dims all.dims", (b(6, 4),), (b(5, 2, 3),), rest=(None, True))
    if dims:
        samples("count_nonzero.dim_IntList", (b(6, 4),), (b(5, 2, 3),), rest=(dims,))
SAMPLES["logsumexp"] = [s for s in SAMPLES["logsumexp"] if s[0][1]]
samples("norm.Scalar", *REDUCED, rest=(2,))
samples("norm.ScalarOpt_dim_dtype", *REDUCED, rest=(2, [0], False), dtype=torch.float64)
samples("sum.dim_IntList", (w(6, 4),), rest=([0],), dtype=torch.int64)
samples("sum", (i(9, 5, 3),), (b(5, 3),))
samples("mean", (r(5, 1),), (r(2, 3),))
for dim in (0, 1, -1):
    for keep in (False, True):
        samples("max.dim min.dim argmax argmin prod.dim_int median.dim nanmedian.dim mode", *REDUCED, rest=(dim, keep))
        samples("any.dim all.dim", (b(6, 4),), (b(5, 2, 3),), rest=(dim, keep))
        samples("kthvalue", *REDUCED, rest=(2, dim, keep))
    samples("cumsum cumprod logcumsumexp cummax cummin sort argsort", *REDUCED, rest=(dim,))
    samples("sort.stable argsort.stable", *REDUCED, stable=True, dim=dim)
    samples("aminmax", *REDUCED, dim=dim)
    samples("topk", *REDUCED, rest=(2, dim))
    samples("_softmax _log_softmax", *REDUCED, rest=(dim, False))
    samples("_safe_softmax", *REDUCED, rest=(dim,))
    samples("_softmax_backward_data _log_softmax_backward_data", (r(6, 4), r(6, 4)), (r(5, 3), r(5, 3)),
            rest=(dim, torch.float64))
samples("aminmax", *REDUCED)
samples("cumsum", (w(6, 4),), rest=(0,), dtype=torch.int64)
samples("flip", (r(6, 4),), (r(5, 3, 4),), rest=([0, -1],))
samples("flip", (r(5, 3, 4),), rest=([1],))
for k in range(-1, 4):
    samples("rot90", (r(6, 4),), (r(5, 3, 4),), rest=(k, [0, 1]))
sample("rot90", r(5, 3, 4), 1, [-1, 1])
samples("roll", (r(6, 4),), (r(5, 3, 4),), rest=([1], [0]))
samples("roll", (r(5, 3),), rest=([2], []))

# ---------------------------------------------------------------------------------------------- views and shapes
for src, dst in (((6, 4), (24,)), ((6, 4), (2, 3, 4)), ((6, 4), (6, 2, 2)), ((6, 4), (4, 6)), ((5, 3), (15,)),
                 ((4, 3), (-1, 2)), ((6, 1, 4), (6, 4)), ((5, 3), (5, 1, 3)), ((1, 6), (6,)), ((2, 3, 4), (6, 4)),
                 ((6, 6), (36,)), ((3, 2, 5), (3, 10)), ((1, 5), (1, 5)), ((6, 0), (0, 6)), ((6, 0), (6, 0)),
                 ((), (1, 1)), ((12, 5), (3, 4, 5)), ((8, 4), (2, 4, 4)), ((4, 6), (8, 3)),
                 ((8, 3), (2, 12))):
    sample("view _unsafe_view", r(*src), list(dst))
sample("as_strided_scatter", r(6, 4), r(2, 3), [2, 3], [5, 2], 1)
samples("t", (r(6, 4),), (r(5,),), (r(),))
for dims in ((0, 1), (-1, 0), (1, 1)):
    samples("transpose.int", (r(6, 4),), (r(5, 3, 2),), rest=dims)
sample("permute", r(5, 3, 4), [2, 0, 1])
sample("permute", r(5, 3, 4), [-1, 0, 1])
for src, dst in (((1, 4), (3, 4)), ((5, 1), (2, 5, 3)), ((4,), (2, -1)), ((1, 5), (1, 5)), ((5, 3), (-1, -1))):
    sample("expand", r(*src), list(dst))
for dim in (0, 1, -1):
    samples("unsqueeze", (r(6, 4),), (r(5,),), rest=(dim,))
    samples("squeeze.dim", (r(6, 4),), (r(1, 5),), (r(5, 1),), (r(2, 3, 1),), rest=(dim,))
    samples("select.int", (r(6, 4),), (r(5, 1, 3),), rest=(dim, 0))
    samples("select_backward", (r(5, 4),), rest=([4, 5, 4] if dim == 0 else [5, 4, 4], dim, 1))
    samples("slice.Tensor", (r(6, 4),), (r(5, 3),), rest=(dim, 1, 3))
    samples("slice.Tensor", (r(6, 4),), rest=(dim, 0, 9223372036854775807))
    samples("slice.Tensor", (r(6, 4),), rest=(dim, 0, None, 2))
    samples("split.Tensor unsafe_split.Tensor", (r(6, 4),), (r(5, 3),), rest=(2, dim))
    samples("unbind.int", (r(6, 4),), (r(2, 1, 3),), rest=(dim,))
    sample("split_with_sizes unsafe_split_with_sizes", r(5, 5), [2, 3], dim)
    sample("cat", [r(6, 4), r(6, 4)], dim)
    sample("cat", [r(5, 5), r(5, 5), r(0)], dim)
    sample("stack", [r(5, 4), r(5, 4)], dim)
samples("squeeze", (r(6, 1, 4),), (r(1, 2),), (r(2, 3),), (r(1, 1),))
samples("squeeze.dims", (r(6, 1, 4),), (r(2, 1, 3),), rest=([0, 1],))
sample("slice_backward", r(2, 4), [6, 4], 0, 1, 3, 1)
sample("slice_backward", r(5, 2), [5, 6], 1, 2, 4, 1)
sample("slice_scatter", r(6, 4), r(2, 4), 0, 1, 3)
sample("slice_scatter", r(5, 4), r(5, 2), 1, 0, 2)
sample("select_scatter", r(6, 4), r(4), 0, 1)
sample("select_scatter", r(5, 3), r(5), 1, 1)
sample("repeat", r(6, 4), [1, 2])
sample("repeat", r(5, 3), [2, 1, 1])
samples("diagonal diagonal_copy", (r(6, 4),), (r(5, 3, 3),))
samples("diagonal diagonal_copy", (r(5, 3, 3),), rest=(1, 1, 2))
samples("diag_embed", (r(5, 3),), (r(4),))
sample("diag_embed", r(5, 3), 0, 0, 1)
sample("diagonal_backward", r(5, 3), [5, 3, 3], 0, 1, 2)
sample("diagonal_scatter", r(5, 3, 3), r(5, 3), 0, 1, 2)
sample("unfold", r(6, 4), 0, 2, 1)
sample("unfold", r(5, 3), 1, 2, 1)
sample("unfold_backward", r(5, 4, 2), [6, 4], 0, 2, 1)
sample("unfold_backward", r(5, 1, 2), [6, 4], 0, 2, 1)           # which repeats the column
for size, step in ((2, 2), (2, 3), (3, 3)):          # side by side: cut between windows
    sample("unfold", r(12, 4), 0, size, step)
    sample("unfold_backward", r(5 if step == 2 else 4, 4, size), [12 - 2 * (step == 2), 4], 0, size, step)
sample("unfold", r(2, 13), 1, 2, 2)
for value in (0, 1.5):
    sample("constant_pad_nd", r(6, 4), [1, 1], value)
    sample("constant_pad_nd", r(5, 3, 2), [0, 0, 1, 0], value)
for diagonal in (0, 1, -2):
    samples("tril triu", (r(6, 4),), (r(2, 5, 3),), rest=(diagonal,))
samples("glu", (r(6, 4),), rest=(1,))
samples("glu", (r(6, 5),), rest=(0,))
sample("glu_backward", r(6, 2), r(6, 4), 1)
sample("glu_backward", r(3, 5), r(6, 5), 0)
for size in ([6, 4], [6, 7], [3]):
    samples("new_zeros new_ones new_empty", (r(6, 4),), rest=(size,))
    samples("new_full", (r(6, 4),), rest=(size, 2.0))
sample("new_empty_strided", r(6, 4), [6, 4], [1, 6])
sample("new_empty_strided", r(5, 3), [5, 3], [3, 1])

# ------------------------------------------------------------------------------------------------------- indexing
for rows in (6, 5, 2):
    sample("embedding", r(rows, 4), i(rows, 5, 2))
    for frequency in (False, True):
        sample("embedding_dense_backward", r(5, 2, 4), i(rows, 5, 2), rows, 1, frequency)
    sample("embedding_dense_backward", r(5, 3), i(rows, 5), rows, -1, False)
    sample("globaltensor.embedding_backward", r(5, 2, 4), i(rows, 5, 2), r(rows, 0), 1)
    sample("globaltensor.embedding_backward", r(5, 3), i(rows, 5), r(rows, 0), -1)
    sample("index.Tensor", r(rows, 4), [i(rows, 5)])
    sample("index.Tensor", r(3, rows), [None, i(rows, 5, 2)])
    sample("index.Tensor", r(rows, 3, 4), [i(rows, 5), None, i(4, 5)])
    sample("index.Tensor", r(rows, 3, 4), [None, i(3, 5), i(4, 1)])
    sample("index_select", r(rows, 3), 0, i(rows, 5))
    sample("index_select", r(3, rows), -1, i(rows, 4))
    sample("gather", r(rows, 3), 0, i(rows, 5, 3))
    sample("gather", r(4, rows), 1, i(rows, 4, 2))
    sample("gather", r(4, rows), -1, i(rows, 3, 2))
    sample("scatter_add", r(rows, 3), 0, i(rows, 5, 3), r(5, 3))
    sample("scatter_add", r(4, rows), 1, i(rows, 4, 3), r(4, 5))
    sample("index_add", r(rows, 3), 0, i(rows, 5), r(5, 3))
    sample("index_add", r(4, rows), 1, i(rows, 3), r(4, 3), alpha=2.0)
    sample("index_put", r(rows, 3), [i(rows, 5)], r(5, 3), True)
    sample("index_put", r(3, rows), [None, i(rows, 5)], r(3, 1), True)
    sample("index_put", r(rows, 3), [i(rows, 5), i(3, 5)], r(5), True)
    short = rows // 2
    for value in (0, 2.0):
        sample("scatter.value", r(rows, 3), 0, order(rows, 3, keep=short), value)
        sample("index_fill.int_Scalar", r(rows, 3), 0, order(rows, keep=short), value)
    sample("scatter.src", r(rows, 3), 0, order(rows, 3, keep=short), r(short, 3))
    sample("scatter.src", r(rows, 4), 0, order(rows, 3, keep=short), r(rows, 4))
    for how in ("add", "multiply"):
        sample("scatter.reduce", r(rows, 3), 0, i(rows, 4, 3), r(4, 3), reduce=how)
        sample("scatter.value_reduce", r(rows, 3), 0, i(rows, 4, 3), 2.0, reduce=how)
    for how in ("sum", "mean", "amax", "amin", "prod"):
        for with_self in (True, False) if rows > 4 else (True,):     # 4 rows leave one that is not written
            sample("scatter_reduce.two", r(rows, 3), 0, i(rows, 4, 3), r(4, 3), how, include_self=with_self)
            if how != "sum":
                sample("index_reduce", r(rows, 3), 0, i(rows, 4), r(4, 3), how, include_self=with_self)
    sample("scatter_reduce.two", r(3, rows), 1, i(rows, 3, 4), r(3, 5), "amax")
    sample("index_reduce", r(3, rows), 1, i(rows, 4), r(3, 4), "amin")
    sample("scatter_reduce.two", i(9, rows), 0, i(rows, 4), i(9, 4), "sum")
    sample("put", r(rows, 3), i(3 * rows, 5), r(5), True)
    sample("put", r(rows, 3), i(3 * rows, 2, 3), r(3, 2), True)
    sample("put", r(rows, 3), order(3 * rows, keep=short), r(short), False)
    sample("index_copy", r(rows, 3), 0, order(rows, keep=short), r(short, 3))
    sample("index_fill.int_Tensor", r(rows, 3), 0, order(rows, keep=short), r())
    sample("index_put", r(rows, 3), [order(rows, keep=short)], r(short, 3), False)
    sample("index_put", r(rows, 3), [order(rows, keep=short)], r(3), False)
    sample("index_put", r(rows, 3), [order(rows, keep=short), i(3, short)], r(short), False)
    sample("index_put", r(rows, 2, 3), [order(rows, keep=short), None, i(3, short)], r(2), False)
    sample("index_put", r(rows, 3), [b(rows, 3)], r(), False)
    sample("index_put", r(rows, 3), [b(rows)], r(1), True)
    sample("index_put", r(rows, 3), [Draw(lambda g, n=rows: torch.arange(n) > 0)], r(rows - 1, 3), False)

# --------------------------------------------------------------------------------------------------- networks' own
for n, weight, bias in ((6, r(4), r(4)), (5, r(4), None), (2, None, None)):
    sample("native_layer_norm", r(n, 4), [4], weight, bias, 1e-5)
    sample("_fused_rms_norm", r(n, 4), [4], weight, 1e-5)
sample("native_layer_norm", r(5, 2, 3), [2, 3], r(2, 3), r(2, 3), 1e-5)
sample("native_layer_norm_backward", r(6, 4), r(6, 4), [4], r(6, 1), u(6, 1), r(4), r(4), [True, True, True])
sample("native_layer_norm_backward", r(5, 2, 3), r(5, 2, 3), [3], r(5, 2, 1), u(5, 2, 1), r(3), None,
       [True, True, False])
sample("native_layer_norm_backward", r(5, 3), r(5, 3), [3], r(5, 1), u(5, 1), None, None, [True, False, False])
sample("_fused_rms_norm_backward", r(6, 4), r(6, 4), [4], u(6, 1), r(4), [True, True])
sample("native_group_norm", r(5, 6, 2), r(6), r(6), 5, 6, 2, 3, 1e-5)
sample("native_group_norm", r(4, 6), None, None, 4, 6, 1, 2, 1e-5)
sample("native_group_norm_backward", r(5, 6, 2), r(5, 6, 2), r(5, 3), u(5, 3), r(6), 5, 6, 2, 3, [True, True, True])
sample("native_group_norm_backward", r(4, 6, 2), r(4, 6, 2), r(4, 2), u(4, 2), None, 4, 6, 2, 2, [True, False, False])
for training in (True, False):
    sample("native_batch_norm", r(5, 6), r(6), r(6), r(6), u(6), training, 0.1, 1e-5)
    sample("native_batch_norm", r(4, 3, 2), r(3), r(3), r(3), u(3), training, 0.1, 1e-5)
sample("native_batch_norm", r(5, 3, 2), None, None, None, None, True, 0.1, 1e-5)
sample("native_batch_norm_backward", r(5, 6), r(5, 6), r(6), None, None, r(6), u(6), True, 1e-5, [True, True, True])
sample("native_batch_norm_backward", r(5, 3), r(5, 3), r(3), r(3), u(3), r(3), u(3), True, 1e-5, [True, True, True])
sample("native_batch_norm_backward", r(5, 3, 2), r(5, 3, 2), r(3), None, None, r(3), u(3), True, 1e-5,
       [False, True, True])
sample("globaltensor.squares_around", r(5, 3), r(3))
sample("globaltensor.squares_around", r(4, 6, 3), r(6))
sample("globaltensor.norm_gradient", r(5, 3), r(5, 3), r(3), r(3), r(3), r(3))
sample("globaltensor.norm_gradient", r(4, 6, 3), r(4, 6, 3), r(6), r(6), r(6), r(6))
sample("native_batch_norm_backward", r(5, 4), r(5, 4), r(4), r(4), u(4), r(0), r(0), False, 1e-5, [True, True, True])
sample("native_batch_norm_backward", r(4, 3), r(4, 3), None, r(3), u(3), r(0), r(0), False, 1e-5, [True, False, False])
sample("native_group_norm", r(2, 4, 3), r(4), None, 2, 4, 3, 4, 1e-5)
sample("native_group_norm_backward", r(2, 4, 3), r(2, 4, 3), r(2, 4), u(2, 4), r(4), 2, 4, 3, 4, [True, True, True])
sample("native_layer_norm_backward", r(2, 4), r(2, 4), [4], r(2, 1), u(2, 1), r(4), r(4), [True, True, True])
sample("native_batch_norm", r(5, 2), r(2), r(2), r(2), u(2), True, 0.1, 1e-5)
sample("native_batch_norm", r(2, 3), r(3), r(3), r(3), u(3), False, 0.1, 1e-5)
sample("native_batch_norm_backward", r(5, 2), r(5, 2), None, None, None, r(2), u(2), True, 1e-5, [True, True, True])
sample("native_batch_norm_backward", r(2, 3), r(2, 3), r(3), r(3), u(3), r(0), r(0), False, 1e-5, [True, True, True])
sample("_weight_norm_interface", r(5, 3), u(5, 1), 0)
sample("_weight_norm_interface_backward", r(5, 3), r(5, 3), u(5, 1), u(5, 1), 0)


def attentions(batch, heads, groups, queries, keys, causal, mask):
    q, k, v = (batch, heads, queries, 4), (batch, groups, keys, 4), (batch, groups, keys, 4)
    sample("_scaled_dot_product_flash_attention_for_cpu", r(*q), r(*k), r(*v), 0.0, causal, attn_mask=mask)
    sample("_scaled_dot_product_flash_attention_for_cpu_backward", r(*q), r(*q), r(*k), r(*v), r(*q), r(*q[:3]), 0.0,
           causal, attn_mask=mask)


attentions(2, 6, 6, 4, 5, False, None)
attentions(5, 2, 2, 3, 3, True, None)
attentions(2, 2, 2, 2, 2, False, None)
attentions(2, 6, 3, 4, 4, False, None)
attentions(2, 3, 3, 4, 4, False, r(4, 4))
attentions(2, 3, 3, 5, 4, False, r(2, 1, 5, 4))
for n in (1, 2, 3):
    space, large, ends = (3,) * n, (6,) * n, [1, 1] * n
    linear = ("linear1d", "bilinear2d", "trilinear3d")[n - 1]
    for batch in ((5, 6), (2, 4), (1, 2)):
        x, big, padded = (*batch, *space), (*batch, *large), (*batch, *(5,) * n)
        sample(f"upsample_{linear}", r(*x), list(large), False)
        sample(f"upsample_{linear}_backward", r(*big), list(large), list(x), False)
        sample(f"upsample_nearest{n}d _upsample_nearest_exact{n}d", r(*x), list(large))
        sample(f"upsample_nearest{n}d_backward _upsample_nearest_exact{n}d_backward", r(*big), list(large), list(x))
        sample(f"reflection_pad{n}d replication_pad{n}d", r(*x), ends)
        sample(f"reflection_pad{n}d_backward replication_pad{n}d_backward", r(*padded), r(*x), ends)
        if n == 1:
            continue
        two, four = [2] * n, (4,) * n
        sample(f"avg_pool{n}d", r(*batch, *four), two)
        sample(f"avg_pool{n}d_backward", r(*batch, *two), r(*batch, *four), two, two, [0] * n, False, True, None)
        sample(f"_adaptive_avg_pool{n}d adaptive_max_pool{n}d", r(*batch, *four), two)
        sample(f"_adaptive_avg_pool{n}d_backward", r(*batch, *two), r(*batch, *four))
        sample(f"adaptive_max_pool{n}d_backward", r(*batch, *two), r(*batch, *four), i(4**n, *batch, *two))
        sample(f"max_pool{n}d_with_indices", r(*batch, *four), two)
        sample(f"max_pool{n}d_with_indices_backward", r(*batch, *two), r(*batch, *four), two, two, [0] * n, [1] * n,
               False, maxima(n, *batch))
        places = Draw(lambda g, s=(*batch, *two), m=4**n: torch.stack(
            [torch.randperm(m, generator=g)[:2**len(s[2:])] for _ in range(s[0] * s[1])]).view(s))
        sample(f"max_unpool{n}d", r(*batch, *two), places, *([[4, 4]] if n == 2 else [[4, 4, 4], two, [0] * n]))
sample("avg_pool2d max_pool2d_with_indices", r(5, 4, 4), [2, 2])
sample("upsample_bicubic2d", r(5, 6, 3, 3), [6, 6], False)
sample("upsample_bicubic2d_backward", r(5, 6, 6, 6), [6, 6], [5, 6, 3, 3], False)
for batch in ((5,), (2,), ()):
    for kernel, stride in (([2, 2], [2, 2]), ([2, 2], [2, 1]), ([1, 3], [1, 2])):
        sample("im2col", r(*batch, 2, 12, 5), kernel, [1, 1], [0, 0], stride)
        columns = (12 // kernel[0]) * ((5 - kernel[1]) // stride[1] + 1)
        sample("col2im", r(*batch, 2 * kernel[0] * kernel[1], columns), [12, 5], kernel, [1, 1], [0, 0], stride)
    sample("im2col", r(*batch, 2, 3, 3), [2, 2], [1, 1], [0, 0], [1, 1])
    sample("col2im", r(*batch, 8, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])
sample("pixel_shuffle", r(5, 24, 2, 2), 2)
sample("pixel_shuffle", r(5, 12, 2, 2), 2)
sample("pixel_unshuffle", r(5, 6, 4, 4), 2)
sample("pixel_unshuffle", r(1, 2, 2, 6), 2)
sample("channel_shuffle", r(5, 6, 2), 2)
sample("channel_shuffle", r(2, 6, 2), 2)
for n in (6, 5, 2):
    sample("affine_grid_generator", r(n, 2, 3), [n, 4, 3, 2], False)
    sample("affine_grid_generator", r(n, 3, 4), [n, 4, 3, 2, 2], True)
    for space in (2, 3):
        x, out = (n, 3, *(4,) * space), (n, 3, *(2,) * space)
        rest = [2] * space, [2] * space
        sample(f"fractional_max_pool{space}d", r(*x), *rest, u(n, 3, space))
        sample(f"fractional_max_pool{space}d_backward", r(*out), r(*x), *rest, i(4 ** space, *out))
        sample(f"fractional_max_pool{space}d", r(*x[1:]), *rest, u(1, 3, space))
sample("grid_sampler_2d", r(2, 1, 2, 2), r(2, 1, 3, 2), 0, 0, False)
sample("grid_sampler_2d_backward", r(2, 1, 1, 3), r(2, 1, 2, 2), r(2, 1, 3, 2), 0, 0, False, [True, True])
sample("grid_sampler_2d_backward", r(2, 1, 1, 3), r(2, 1, 2, 2), r(2, 1, 3, 2), 0, 0, False, [True, False])
sample("grid_sampler_2d_backward", r(2, 1, 1, 3), r(2, 1, 2, 2), r(2, 1, 3, 2), 0, 0, False, [False, True])
sample("grid_sampler_2d", r(5, 3, 2, 2), r(5, 4, 3, 2), 0, 0, False)
sample("grid_sampler_2d_backward", r(5, 3, 4, 3), r(5, 3, 2, 2), r(5, 4, 3, 2), 0, 0, False, [True, True])

# ---------------------------------------------------------------------------------------------------------- losses
PAIRS = ((r(6, 4), r(6, 4)), (r(5, 3), r(5, 3)))
for how in (0, 1, 2):
    samples("mse_loss smooth_l1_loss huber_loss soft_margin_loss", *PAIRS, rest=(how,))
    for weight in (None, r(3)):
        sample("binary_cross_entropy", u(5, 3), u(5, 3), weight, how)
        sample("binary_cross_entropy_with_logits", r(5, 3), u(5, 3), weight, None, how)
        sample("binary_cross_entropy_with_logits", r(5, 3), u(5, 3), None, weight, how)
    for x, y in PAIRS:
        grad = r(*x.make(torch.Generator()).shape) if how == 0 else r()
        sample("mse_loss_backward soft_margin_loss_backward", grad, x, y, how)
        sample("smooth_l1_loss_backward huber_loss_backward", grad, x, y, how, 0.5)
        for weight in (None, x):
            sample("binary_cross_entropy_backward", grad, u(*x.make(torch.Generator()).shape), y, weight, how)
    for n, classes in ((6, 6), (5, 4), (2, 2)):
        for weight in (None, u(classes)):
            targets = i(classes, n)
            sample("nll_loss_forward", r(n, classes), targets, weight, how, 1)
            sample("nll_loss_backward", r(n) if how == 0 else r(), r(n, classes), targets, weight, how, 1, u())
            space = i(classes, n, 2, 3)
            sample("nll_loss2d_forward", r(n, classes, 2, 3), space, weight, how, -100)
            grad = r(n, 2, 3) if how == 0 else r()
            sample("nll_loss2d_backward", grad, r(n, classes, 2, 3), space, weight, how, -100, u())
    sample("nll_loss_forward", r(5), i(5), None, how, -100)
    sample("nll_loss_backward", r(), r(5), i(5), None, how, -100, u())

    for n, classes in ((6, 4), (5, 3), (2, 2)):
        grad = r(n) if how == 0 else r()
        for weight in (None, u(classes)):
            sample("multi_margin_loss", w(n, classes), i(classes, n), 1, 1.0, weight, how)
            sample("multi_margin_loss_backward", grad, w(n, classes), i(classes, n), 2, 1.0, weight, how)
        sample("multilabel_margin_loss_forward", w(n, classes), i(classes, n, classes), how)
        sample("multilabel_margin_loss_backward", grad, w(n, classes), i(classes, n, classes), how,
               Draw(lambda g, n=n, c=classes: (torch.rand(n, c, generator=g) < 0.5).double()))
    sample("multi_margin_loss", r(5), i(5, 1), 1, 1.0, None, how)
    sample("multi_margin_loss_backward", r(), r(5), i(5), 1, 1.0, None, how)
    sample("multilabel_margin_loss_forward", r(5), i(5, 5), how)
    sample("multilabel_margin_loss_backward", r(), r(5), i(5, 5), how,
           Draw(lambda g: (torch.rand(5, generator=g) < 0.5).double()))


def of_length(k, n):
    return Draw(lambda g: torch.full((n,), k))


for n in (6, 5, 2):
    asked, kept = (r(4, n, 5), i(4, n, 2), i(4, 2 * n)), (r(n), r(n, 4, 5))
    for targets in asked[1:]:
        sample("_ctc_loss", asked[0], targets, [4] * n, [2] * n, 4)
    sample("_ctc_loss_backward", r(n), asked[0], asked[1 + (n == 5)], [4] * n, [2] * n, *kept, 4)
    lengths = of_length(4, n), of_length(2, n)       # of targets one behind the other: tests/test_independent_rows.py
    sample("_ctc_loss.Tensor", *asked[:2], *lengths, 4)
    if n == 5:
        sample("_ctc_loss_backward.Tensor", r(n), *asked[:2], *lengths, *kept, 4)

sample("mkldnn_rnn_layer", r(3, 5, 6), r(16, 6), r(16, 4), r(16), r(16), r(5, 4), r(5, 4), False, [], 2, 4, 1, True,
       False, False, True)
sample("mkldnn_rnn_layer_backward", r(3, 5, 6), r(16, 6), r(16, 4), r(16), r(16), r(5, 4), r(5, 4), r(3, 5, 4), r(5, 4),
       r(5, 4), r(3, 5, 4), None, None, False, 2, 4, 1, True, True, False, [], False, r(0))

# Kernels that this build of torch has for other devices only; and those of LSTMs, whose workspace has no value to
# compare: tests/test_networks.py compares the rest.
ELSEWHERE = {"_fused_rms_norm_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}

# What has no value to compare.
VALUELESS = {"empty_like", "new_empty", "new_empty_strided"}

# Kernels that read beyond operands whose shapes do not fit together: only those that do are tried.
# (Of contractions, einsum takes sizes 1 and 0 for equal.)
UNCHECKED = {
    "globaltensor.contract", "convolution_backward", "_cdist_backward", "_pdist_backward", "linalg_ldl_solve",
    "linalg_lu_solve", "lu_unpack", "linalg_householder_product", "ormqr", "_dirichlet_grad",
    *(f"fractional_max_pool{n}d{end}" for n in (2, 3) for end in ("", "_backward")),
    "_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor", "multi_margin_loss",
    "multi_margin_loss_backward", "multilabel_margin_loss_forward", "multilabel_margin_loss_backward",
    "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward", "native_group_norm_backward",
    "_weight_norm_interface", "_weight_norm_interface_backward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    *(f"grid_sampler_{n}d{end}" for n in (2, 3) for end in ("", "_backward")),
    *(f"{name}{n}d{end}" for n in (1, 2, 3) for name in ("reflection_pad", "replication_pad", "avg_pool", "max_unpool",
                                                         "_adaptive_avg_pool", "adaptive_max_pool", "max_pool")
      for end in ("", "_backward", "_with_indices", "_with_indices_backward")),
}

# (names, which true signatures, why they are left out)
MISSING: list[tuple[set[str], Callable, str]] = []


def missing(names, which, why):
    MISSING.append((set(names.split()), which, why))


def pending(*operands):
    """Just these operands are pending sums."""
    return lambda inputs, outputs: all(s.is_partial == (q in operands) for q, s in enumerate(inputs))


def any_pending(inputs, outputs):
    return any(s.is_partial for s in inputs)


def any_split(inputs, outputs):
    return any(s.is_split for s in inputs)


missing("masked_fill.Scalar", pending(0), "0.0 is not told from other floats: a decision holds for all of them")
missing("nextafter", lambda inputs, outputs: True, "the change is less than the tolerance of the comparison")
missing("_cdist_backward", pending(1, 2), "linear in both points together, but for p = 2 only")
missing("_pdist_backward", pending(1), "linear in the points, but for p = 2 only")
missing("gather scatter.src scatter_add index_put", any_split,
        "an index that is shorter than the operand, cut so that its parts begin where the operand's do")
missing("native_batch_norm", any_pending, "linear in the input and the running mean together, in eval mode")
missing("native_batch_norm_backward", any_pending, "linear in the input and the mean together")
missing("_scaled_dot_product_flash_attention_for_cpu_backward", any_pending, "linear in value and output together")
missing("binary_cross_entropy binary_cross_entropy_with_logits binary_cross_entropy_backward mse_loss_backward "
        "nll_loss_forward nll_loss2d_forward", any_pending,
        "operands of a loss that are pending sums are reduced first")
missing("fractional_max_pool2d fractional_max_pool3d", pending(1),
        "places are rounded: of small images a term may tell them as the sum does")
missing("rrelu_with_noise_backward", lambda inputs, outputs: True, "in training the input does not matter")
missing("view _unsafe_view", any_split, "a tensor without elements")
missing("_linalg_solve_ex", any_split, "batches that broadcast")
missing("slice.Tensor", any_split, "a step that divides the parts")
missing("cat", any_split, "an operand without elements, which is skipped")
missing("new_zeros new_ones new_full", any_split, "a result of another shape that is cut anew")
