"""Every op end to end, forward and backward, against plain torch: many layouts of the inputs, sizes even and not.

A case is a line: name, function, inputs. An input is a shape (random float64), or a plain tensor for what is not
differentiable; strings mark what a function needs ("positive"). Each case runs on 2 ranks, 3 ranks and 2 x 2, in
layouts drawn from all combinations of S, B and P; what comes out is put together by hand and compared.
"""
from __future__ import annotations

import itertools
import math
import os
import random

import pytest
import torch
import torch.nn.functional as F
from harness import PYTHON, environment, good
from shards import B, P, gather, layouts, scatter
from torch.distributions import Multinomial, MultivariateNormal
from torch.nn.attention import SDPBackend

import globaltensor as gt
from globaltensor.algorithms import attention_kernels
from globaltensor.layouts.sbp import partial_max, partial_min, split
from globaltensor.runtime.torch_internals import TORCH

SEED = int(os.environ.get("OPS_SEED") or 20_261_121)
DRAWS = int(os.environ.get("OPS_DRAWS") or 5)        # per case and placement
print(f"tests/test_ops.py: OPS_SEED={SEED}")

PLACES = {"2": [0, 1], "3": [3, 1, 2], "2x2": [[4, 5], [6, 7]]}
aten = torch.ops.aten
S0, S1, S2 = split(0), split(1), split(2)
CASES: dict[str, tuple] = {}


def case(name, function, *inputs, grad=True, draws=1.0):
    assert name not in CASES, name
    CASES[name] = (function, inputs, grad, draws)


def ints(high, *shape, seed=0):
    """Indices."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape):
    """Values in (0.1, 1)."""
    return ("positive", shape)


def each(names, *inputs, source=torch, **options):
    """A case per name of a function."""
    for name in names.split():
        case(f"{name} {'x'.join(str(i) for i in inputs)}"[:60], getattr(source, name), *inputs, **options)


# --------------------------------------------------------------------------------------------- element by element
each("relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh hardswish hardsigmoid leaky_relu "
     "logsigmoid softshrink hardshrink sigmoid tanh", (4, 5), source=F, draws=0.4)
each("abs exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh atanh erf erfc erfinv expm1 log2 "
     "log10 log1p exp2 reciprocal square sign floor ceil round trunc frac lgamma digamma i0 sinc nan_to_num neg logit "
     "deg2rad isfinite isnan signbit positive", positive(5, 3), draws=0.4)
each("add sub mul div remainder fmod pow atan2 maximum minimum fmax fmin hypot copysign xlogy logaddexp logaddexp2 "
     "float_power isclose", positive(4, 3), positive(4, 3), draws=0.6)
each("eq ne lt le gt ge logical_and floor_divide heaviside", positive(4, 3), positive(3), grad=False, draws=0.4)
each("add sub mul div", (4, 1, 3), (5, 1))
case("add scalar", lambda x: (x + 2, 3 - x, x / 2, 2 / x, x * 3, x ** 2, 2 ** x, x - 1), positive(5, 3))
case("add plain tensor", lambda x: x + torch.arange(3.0, dtype=torch.float64) * 2, (5, 3))
case("add alpha", lambda x, y: torch.add(x, y, alpha=2.5) - torch.sub(x, y, alpha=0.5), (4, 3), (3,))
case("lerp", torch.lerp, (4, 3), (4, 3), (3,))
case("lerp scalar", lambda x, y: torch.lerp(x, y, 0.3), (4, 3), (4, 3))
case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (4, 3), (4, 1), (3,))
case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), (4, 3), (4, 1), positive(3))
case("where", lambda x, y, z: torch.where(x > 0, y, z), (4, 3), (4, 1), (3,))
case("where scalar", lambda x, y: (torch.where(x > 0, y, 2.0), torch.where(x > 0, 2.0, y)), (4, 3), (3,))
case("masked_fill", lambda x, m: (x.masked_fill(m, 2.0), x.masked_fill(m, 0)), (4, 3), ints(2, 4, 1).bool())
case("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), (4, 3), ints(2, 3).bool(), ())
case("clamp", lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp(max=0.1)), (4, 5))
case("clamp tensor", lambda x, low: torch.clamp(x, low, low + 1), (4, 5), (5,))
case("to", lambda x: (x.to(torch.float32), x.to(torch.complex128), (x * 3).to(torch.int64), x > 0), (4, 5))
case("to from int", lambda x: (x.double(), x.to(torch.int32), x.bool()), ints(9, 5, 3))
case("complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x).conj()), (5, 3, 2))
case("pairs of empty parts", lambda x: torch.view_as_real(torch.view_as_complex(F.pad(x, (0, -3)))) ** 2, (1, 4, 5),
     draws=4)
case("logsumexp of complex", lambda x: torch.view_as_real(torch.view_as_complex(x).logsumexp(0)), (5, 3, 2))
case("polar", lambda r, t: torch.view_as_real(torch.polar(r, t)), positive(4, 3), (4, 3))
case("prelu", F.prelu, (4, 5, 2), (5,))
case("threshold", lambda x: F.threshold(x, 0.1, 0.2), (4, 5))
case("glu", lambda x: (F.glu(x, 1), F.glu(x, 0)), (4, 6))
case("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 1], dtype=torch.float64)), (5, 3), grad=False)
case("bits", lambda x, y: (x & y, x | y, x ^ y, ~x, x & 3), ints(8, 5, 3), ints(8, 3, seed=1))

case("0-dim indices and sources", lambda x, y: (
    x.scatter_add(0, torch.tensor(1), y), x.scatter(0, torch.tensor([1]), y), x.gather(0, torch.tensor(2)),
    x.index_put((torch.tensor(1),), y, accumulate=True), x.index_select(0, torch.tensor(1))), (5,), ())
case("rows by a 0-dim index", lambda x: x.index_select(0, torch.tensor(1)), (4, 3))
case("determinants of matrices with gaps", lambda x, y: (
    x[..., ::2].det(), torch.linalg.slogdet(x[..., ::2])[1], torch.linalg.solve(x[..., ::2], y),
    x[:, :, ::2][::2].det()), (3, 4, 8), (3, 4, 2), draws=2)
case("means of integers", lambda x: (F.avg_pool1d(x, 2), F.avg_pool2d(x, 2)), ints(9, 3, 5, 6), grad=False)
case("means of integers over edges", lambda x: (F.avg_pool1d(x, 7, 3, 3, True), F.avg_pool2d(x, 3, 2, 1)),
     ints(19, 2, 4, 9) - 9, grad=False, draws=3)
case("mask: index_put", lambda m: m.index_put((torch.tensor([1, 0]),), torch.tensor(True), accumulate=True),
     ints(2, 5).bool(), grad=False)
case("mask: logsumexp", lambda m: m.logsumexp(0), ints(2, 5, 3).bool(), grad=False)
case("group_norm of one channel", lambda x: F.group_norm(x, 1), (4, 1, 3), grad=False)
if TORCH < "2.14":                                   # which refuses it
    case("group_norm of no channel", lambda x: F.group_norm(x, 1), (2, 0, 3), grad=False)

# ---------------------------------------------------------------------------------------------------- contractions
case("mm", torch.mm, (4, 5), (5, 6), draws=3)
case("mm uneven", torch.mm, (3, 1), (1, 5))
case("bmm", torch.bmm, (4, 2, 5), (4, 5, 3))
case("mv", torch.mv, (4, 5), (5,))
case("dot", torch.dot, (5,), (5,))
case("addmm", torch.addmm, (6,), (4, 5), (5, 6), draws=2)
case("addmm column", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), (4, 1), (4, 5), (5, 6))
case("baddbmm", torch.baddbmm, (4, 2, 3), (4, 2, 5), (4, 5, 3))
case("addbmm", torch.addbmm, (2, 3), (4, 2, 5), (4, 5, 3))
case("addmv", torch.addmv, (4,), (4, 5), (5,))
case("addr", torch.addr, (3, 4), (3,), (4,))
case("outer", torch.outer, (5,), (4,))
case("vector @ matrix", lambda x, y: x @ y, (4,), (4, 5))
case("matmul 4d", torch.matmul, (2, 4, 3, 5), (2, 4, 5, 3), draws=2)
case("matmul broadcast", torch.matmul, (4, 1, 3, 5), (2, 5, 3))
case("matmul 3d 2d", lambda x, w: x @ w, (4, 3, 5), (5, 6))
case("linear", F.linear, (4, 3, 6), (8, 6), (8,), draws=3)
case("linear 2d", F.linear, (5, 6), (4, 6), (4,), draws=2)
case("linear no bias", F.linear, (4, 3, 6), (8, 6))
case("einsum", lambda q, k: torch.einsum("bqhd,bshd->bhqs", q, k), (2, 3, 4, 5), (2, 3, 4, 5), draws=2)
case("einsum permuted", lambda q, k: torch.einsum("bhqs,bshd->bqhd", q, k), (2, 4, 3, 5), (2, 5, 4, 3), draws=2)
case("einsum outer", lambda x, y: torch.einsum("bi,bj->jbi", x, y), (3, 4), (3, 5), draws=2)
case("einsum trace", lambda x, y: torch.einsum("ijk,kl->jl", x, y), (2, 3, 4), (4, 5))
case("tensordot", lambda x, y: torch.tensordot(x, y, 2), (2, 3, 4), (3, 4, 5))
case("cdist", torch.cdist, (4, 3), (5, 3))
case("bilinear", F.bilinear, (4, 3), (4, 2), (5, 3, 2), (5,))
case("cross", torch.linalg.cross, (4, 3), (4, 3))
# of nothing, or of one
case("softmax of nothing", lambda x: F.softmax(x, 0), (0, 4))
case("log_softmax of nothing", lambda x: F.log_softmax(x, 1), (4, 0))
case("index_select without dims", lambda x, i: x.index_select(0, i), (), ints(1, 1))
case("index_add without dims", lambda x, i, y: x.index_add(0, i, y), (), ints(1, 1), ())
case("group norm of channels last", lambda x, y: F.group_norm(x.transpose(-1, -2).reshape(2, 8, 4, 4) + y, 4),
     (2, 16, 8), (2, 8, 4, 4))
case("a sparse embedding", lambda w: F.embedding(ints(5, 3), w, sparse=True).square(), (5, 4), grad=False)
# an operand that is repeated along a dim of size 1, or that lacks the dim
case("cross of a row", torch.linalg.cross, (4, 3), (1, 3))
case("cross of a row and a column", torch.linalg.cross, (1, 5, 3), (4, 1, 3))
case("pdist", F.pdist, (4, 3))
case("cdist of batches and one", torch.cdist, (1, 4, 3), (5, 3, 3))
case("cdist of batches and none", torch.cdist, (4, 3), (5, 2, 3))
case("cdist of batches of batches", torch.cdist, (2, 3, 4, 3), (3, 5, 3))
case("linear with one bias", F.linear, (5, 4), (6, 4), (1,))
case("weight norm of few rows", lambda v, g: torch._weight_norm(v, g, 0), positive(2, 5), (2, 1))
case("kron", torch.kron, (2, 3), (3, 2))

# ------------------------------------------------------------------------------------------------------ reductions
for dim in (None, 0, (0, 2)):
    given = {} if dim is None else {"dim": dim}
    for name in "sum mean std var nansum amax amin logsumexp var_mean std_mean count_nonzero".split():
        if dim is None and name == "logsumexp":
            continue
        case(f"{name} {dim}", lambda x, f=getattr(torch, name), k=given: f(x, **k), (5, 3, 4))
    case(f"norm {dim}", lambda x, k=given: torch.linalg.vector_norm(x, **k), (5, 3, 4))
for name in "sum mean amax logsumexp var".split():
    case(f"{name} keepdim", lambda x, f=getattr(torch, name): f(x, dim=(1,), keepdim=True), (4, 5, 3))
each("prod max min median any all argmax", (5, 3), draws=0.5)
for p in (0, 1, 2, 3, float("inf"), -float("inf")):
    case(f"norm p={p}", lambda x, p=p: torch.linalg.vector_norm(x, p, dim=0), (5, 3))
for name in "max min median cummax cummin argmax argmin any all prod cumsum cumprod logcumsumexp aminmax".split():
    has = name != "aminmax" or TORCH >= "2.12"     # a gradient
    case(f"{name} along", lambda x, f=getattr(torch, name): f(x, dim=1), (3, 5), grad=has)
    case(f"{name} along, short", lambda x, f=getattr(torch, name): f(x, dim=0), (2, 3), draws=0.5, grad=has)
case("max keepdim", lambda x: x.max(0, keepdim=True), (5, 3))
case("ties", lambda x: (x.max(0), x.min(0), x.argmax(0)), ints(2, 7, 3).double())
case("extrema of all", lambda x: (x.argmax(), x.argmin(), x.argmax(keepdim=True), *x.aminmax()),
     ints(3, 5, 3, 2).double(), grad=False, draws=2)     # with ties: the first in the order of the whole
case("extrema of all, nan", lambda x: (x.argmax(), x.argmin(), *x.aminmax(dim=0)),
     torch.tensor([[1, math.nan, 3], [math.nan, 5, -1], [2, 2, 9]]).double(), grad=False)
case("extrema of few", lambda x: (x.argmax(), x.argmin(), *x.aminmax()), torch.full((1, 2), -math.inf), grad=False)
case("histc", lambda x: (x.histc(5, -1, 1), x.histc(4, 0.5, 0.5), x.histc(3)), (5, 7), grad=False, draws=2)
case("histc of one value", lambda x: (x.histc(4), x.histc(4, 2, 2), x.histc(2, 0, 2)), torch.full((3, 2), 2.),
     grad=False)
case("histogram", lambda x, w: (*torch.histogram(x, 4),
                                *torch.histogram(x, 3, range=(-1., 1.), weight=w, density=True)),
     (5, 7), ("positive", (5, 7)), grad=False, draws=2)
case("histogram of edges", lambda x, e: torch.histogram(x, e, density=True), (5, 7),
     torch.tensor([-2., -0.5, 0, 3]).double(), grad=False)
case("infinite", lambda x: (x.max(0), x.amax(0), x.argmax(0), x.logsumexp(0)), torch.full((4, 3), -torch.inf).double(),
     grad=False)
case("topk", lambda x: x.topk(2, 0), (5, 3))
case("topk wide", lambda x: x.topk(4, 0, largest=False), (5, 3))
case("topk infinite", lambda x: x.topk(3, 0).values, torch.full((4, 3), -torch.inf).double(), grad=False)
case("sort", lambda x: (x.sort(0), x.argsort(1, descending=True)), (5, 3))
case("kthvalue", lambda x: x.kthvalue(2, 0), (5, 3))
case("mode", lambda x: x.mode(0), ints(3, 7, 3).double(), grad=False)
case("quantile", lambda x: x.quantile(0.3), (5, 3))
case("softmax", lambda x: (x.softmax(0), x.softmax(1)), (5, 3), draws=2)
case("log_softmax", lambda x: (x.log_softmax(0), x.log_softmax(-1)), (5, 3), draws=2)
case("normalize", lambda x: F.normalize(x, dim=0), (5, 3))
case("cosine_similarity", F.cosine_similarity, (5, 3), (5, 3))
case("cov", torch.cov, (3, 5))

# ----------------------------------------------------------------------------------------------------------- shapes
case("view", lambda x: (x.view(8, 3), x.view(2, 12), x.view(-1), x.view(2, 2, 2, 3)), (4, 2, 3), draws=2)
case("view uneven", lambda x: (x.view(3, 10), x.view(15, 2), x.reshape(30)), (5, 3, 2))
case("view of ones", lambda x: (x.view(5, 3), x.view(1, 5, 1, 3)), (5, 1, 3))
case("heads", lambda x: x.view(2, 3, 4, 2).transpose(1, 2), (2, 3, 8), draws=2)
case("merge heads", lambda x: x.transpose(1, 2).reshape(2, 3, 8), (2, 4, 3, 2), draws=2)
case("transpose", lambda x: (x.transpose(0, 2), x.mT, x.permute(2, 0, 1), x.movedim(0, 1)), (4, 5, 3))
case("t", lambda x: x.t(), (4, 5))
case("expand", lambda x: (x.expand(4, 5, 3), x.expand(2, -1, -1, 3)), (4, 1, 3))
case("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[:, None]), (4, 5))
case("squeeze", lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((0, 1))), (2, 1, 3))
case("select", lambda x: (x[1], x[:, -1], x.select(1, 0)), (5, 3))
case("slice", lambda x: (x[1:3], x[:, ::2], x[-2:], x[:], x[..., 1:], x[3:3]), (5, 4))
case("split", lambda x: (x.split(2, 0), x.chunk(2, 1), x.split([1, 4], 0), x.unbind(1), x.tensor_split(2)), (5, 4))
case("cat", lambda x, y: (torch.cat([x, y]), torch.cat([y, x], -1)), (5, 3), (5, 3))
case("cat uneven", lambda x, y: torch.cat([x, y, x]), (5, 3), (2, 3))
case("stack", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], 2)), (5, 3), (5, 3))
case("repeat", lambda x: (x.repeat(2, 1), x.repeat(2, 1, 3), x.tile(2, 2), x.repeat_interleave(2, 0)), (5, 3))
case("flip", lambda x: (x.flip(0), x.flip([0, 1]), x.roll(1, 0), x.roll(2), x.rot90()), (5, 3))
case("tril", lambda x: (x.tril(), x.triu(1), x.tril(-1)), (2, 5, 4), draws=2)
case("diagonal", lambda x: (x.diagonal(), x.diagonal(1, 1, 2), torch.diag_embed(x), x[0].trace()), (3, 4, 5))
case("unfold", lambda x: (x.unfold(1, 2, 1), x.unfold(0, 3, 2)), (5, 4))
case("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 1), value=1.5), F.pad(x, (0, 1, 2, 0))), (5, 4))
case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 0, 2), (5, 4), (5, 2))
case("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, 1), (5, 4), (4,))
case("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y), (5, 4), (4,))
case("as_strided", lambda x: x.as_strided((2, 2), (1, 2)), (5, 4))
case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (5,), (3,))
case("diff", torch.diff, (5, 4))
case("factories", lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(5, 7),
                             x.new(2, 3).zero_(), x.new_full((5, 4), 3.0), x.new_ones(2, 5, 4)), (5, 4), grad=False)

# --------------------------------------------------------------------------------------------------------- indexing
case("embedding", F.embedding, ints(7, 5, 2), (7, 4), draws=3)
case("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=2), ints(7, 5, 2), (7, 4))
case("embedding by frequency", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), ints(3, 5, 2), (7, 4))
case("one_hot", lambda x: F.one_hot(x, 6), ints(6, 5), grad=False)
case("index", lambda x, i: (x[i], x[:, i % 3], x[i, i % 3]), (5, 3), ints(5, 4, 2))
case("index apart", lambda x, i: x[i, :, i], (5, 3, 5), ints(5, 4))
case("index negative", lambda x, i: x[i - 3], (5, 3), ints(5, 4))
case("index mask", lambda x: x[x > 0], (5, 3))
case("index_select", lambda x, i: (x.index_select(0, i), x.index_select(1, i % 3)), (5, 3), ints(5, 4), draws=2)
case("gather", lambda x, i: (x.gather(1, i), x.gather(0, i[:2])), (5, 4), ints(4, 5, 3), draws=2)
case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (5, 4), ints(4, 5, 3))
case("take", torch.take, (5, 4), ints(20, 3))
case("scatter", lambda x, i, s: (x.scatter(0, i, s), x.scatter(0, i, 2.0), x.scatter(0, i, 0)), (5, 3),
     torch.tensor([[0, 4, 2], [3, 1, 0]]), (2, 3), draws=2)
case("scatter short", lambda x, i, s: x.scatter(1, i, s), (5, 4), torch.tensor([[0, 2], [3, 1]]), (4, 3), grad=False)
case("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), (5, 3), ints(5, 4, 3), (4, 3), draws=2)
case("scatter_reduce", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (5, 3), ints(5, 4, 3), (4, 3))
case("index_add", lambda x, i, s: x.index_add(0, i, s, alpha=0.5), (5, 3), ints(5, 4), (4, 3), draws=2)
case("index_copy", lambda x, i, s: x.index_copy(0, i, s), (5, 3), torch.tensor([3, 0]), (2, 3))
case("index_fill", lambda x, i: (x.index_fill(0, i, 2.0), x.index_fill(1, i % 3, 0)), (5, 3), ints(5, 2))
case("index_put", lambda x, i, s: x.index_put((i,), s), (5, 3), torch.tensor([3, 0]), (2, 3))
case("index_put accumulate", lambda x, i, s: x.index_put((i,), s, accumulate=True), (5, 3), ints(5, 4), (4, 3), draws=2)
case("index_put two", lambda x, i, s: x.index_put((i, i % 3), s, accumulate=True), (5, 3), ints(5, 4), (4,))
case("index_put mask", lambda x, s: x.index_put((x > 0,), s), (5, 3), ())
case("masked_select", lambda x: x.masked_select(x > 0), (5, 3))
case("uint8 masks", lambda x: (x[(x > 0).to(torch.uint8)], x[torch.tensor([1, 0, 1, 0, 1], dtype=torch.uint8)]), (5, 3))
case("tensor_split by a tensor", lambda x, at: x.tensor_split(at), (5, 3), torch.tensor([1, 3]))
case("combinations", lambda x: (torch.combinations(x), torch.combinations(x, 3, True)), (5,))
case("vander", lambda x: (torch.vander(x, 3), torch.linalg.vander(x)), (5,), grad=False)
case("packed sequences", lambda x: torch.nn.utils.rnn.pack_sequence([x, x[:3]]).data, (5, 3))
case("multinomial density", lambda x: Multinomial(3, x).log_prob(torch.full((5, 4), 0.75).double()), positive(5, 4))
case("normal density", lambda x: MultivariateNormal(x.sum(0), x.T @ x + torch.eye(4)).log_prob(x), (5, 4))
case("nonzero", lambda x: (x > 0).nonzero(), (5, 3), grad=False)


def in_place(x, y):
    z = x.clone()
    z += y
    z.mul_(2).add_(1).clamp_(min=-3)
    z[z > 2] = 2.0
    w = torch.empty_like(z)
    w.copy_(z)
    w.div_(y.exp()).sub_(x)
    w.transpose_(0, 1).cumsum_(0)
    return z, w


def in_place_through_views(x, y):
    z = x.clone()
    z[1] = y[0]
    z[:, 1] = 0.0
    z[2:4] = z[2:4] + x[:2]
    z[0, 0] = 5.0
    z.t()[:, 2] = y[1]
    return z


case("in place", in_place, (5, 3), (5, 3), draws=3)
case("in place through views", in_place_through_views, (5, 3), (5, 3), draws=3)
case("in place fill", lambda x: (x.clone().fill_(2), x.clone().zero_(), x.clone().masked_fill_(x > 0, 0)), (5, 3))
case("in place scatter", lambda x, i, s: (x.clone().scatter_(0, i, s), x.clone().scatter_add_(0, i, s),
                                          x.clone().index_put_((i[0],), s[:1])),
     (5, 3), torch.tensor([[0, 4, 2], [3, 1, 0]]), (2, 3))
case("in place shape", lambda x: (x.clone().unsqueeze_(0), x.clone().t_(), x.clone().squeeze_(0)), (5, 3))
case("out", lambda x, y: (torch.add(x, y, out=x.new_zeros(5, 3)), torch.maximum(x, y, out=x.new_zeros(5, 3))),
     (5, 3), (3,), grad=False)

# ------------------------------------------------------------------------------------------------------ networks' own
case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 5, 6), (6,), (6,), draws=2)
case("layer_norm two dims", lambda x: F.layer_norm(x, (5, 6)), (4, 5, 6))
case("layer_norm no bias", lambda x, w: F.layer_norm(x, (6,), w), (5, 6), (6,))
case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (4, 5, 6), (6,))
case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (4, 6, 5), (6,), (6,), draws=2)
case("group_norm of images", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5, 2), (4,), (4,), draws=2)
case("layer_norm of images", lambda x, w, b: F.layer_norm(x, (4, 5, 2), w, b), (3, 4, 5, 2), (4, 5, 2), (4, 5, 2))
case("group_norm uneven", lambda x: F.group_norm(x, 3), (5, 6, 2, 2))
case("instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), (4, 3, 5), (3,), (3,))
case("weight_norm", lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), (5, 3), (4, 3), (4, 1))


def batch_norm(training, running=True):
    def function(x, w, b):
        mean, var = (x.new_full((3,), v) for v in (0.5, 2.0)) if running else (None, None)
        y = F.batch_norm(x, mean, var, w, b, training, momentum=0.3)
        return (y, mean, var) if running else y

    return function


for shape in ((4, 3, 5), (5, 3, 2, 3), (7, 3)):
    case(f"batch_norm {shape}", batch_norm(True), shape, (3,), (3,), draws=2)
case("batch_norm eval", batch_norm(False), (5, 3, 4), (3,), (3,))
case("batch_norm without statistics", batch_norm(True, running=False), (5, 3, 4), (3,), (3,))
case("batch_norm plain", lambda x: F.batch_norm(x, None, None, None, None, True), (5, 3, 4))

for n in (1, 2, 3):
    space = (5,) * n
    case(f"conv{n}d", lambda x, w, b, f=getattr(F, f"conv{n}d"): f(x, w, b, padding=1, stride=2), (4, 4, *space),
         (6, 4, *(3,) * n), (6,))
    case(f"conv{n}d uneven", lambda x, w, f=getattr(F, f"conv{n}d"): f(x, w), (3, 5, *space), (3, 5, *(2,) * n),
         draws=0.5)
    case(f"conv{n}d groups", lambda x, w, b, f=getattr(F, f"conv{n}d"): f(x, w, b, groups=4), (2, 8, *space),
         (12, 2, *(2,) * n), (12,))
    case(f"conv_transpose{n}d", lambda x, w, b, f=getattr(F, f"conv_transpose{n}d"): f(x, w, b, stride=2, padding=1),
         (4, 4, *space), (4, 6, *(3,) * n), (6,))
    case(f"conv_transpose{n}d groups", lambda x, w, f=getattr(F, f"conv_transpose{n}d"): f(x, w, groups=4),
         (2, 8, *space), (8, 3, *(2,) * n), draws=0.5)
    for name in ("max_pool", "avg_pool"):
        case(f"{name}{n}d", lambda x, f=getattr(F, f"{name}{n}d"): f(x, 2, padding=1), (5, 4, *space), draws=0.5)
    for name in ("adaptive_avg_pool", "adaptive_max_pool"):
        case(f"{name}{n}d", lambda x, f=getattr(F, f"{name}{n}d"): (f(x, 3), f(x, 1)), (5, 4, *space), draws=0.5)
    for mode in ("nearest", "nearest-exact", ("linear", "bilinear", "trilinear")[n - 1]):
        case(f"interpolate{n} {mode}", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), (5, 3, *space),
             draws=0.4)
    for mode in ("reflect", "replicate", "circular"):
        case(f"pad{n} {mode}", lambda x, m=mode, k=n: F.pad(x, (1, 2) * k, mode=m), (5, 3, *space), draws=0.4)
case("depthwise", lambda x, w: F.conv2d(x, w, groups=6), (2, 6, 5, 5), (6, 1, 3, 3), draws=2)
case("depthwise, fewer channels than ranks", lambda x, w: F.conv1d(x, w, groups=2), (2, 2, 4), (2, 1, 3), draws=2)
for n, space in enumerate(((6,), (4, 6), (4, 3, 2)), 1):
    for mode in ("nearest", "nearest-exact"):
        case(f"interpolate{n} {mode} by whole numbers", lambda x, m=mode, s=space: (
            F.interpolate(x, scale_factor=3, mode=m), F.interpolate(x, [k * 2 for k in s[:-1]] + [s[-1] + 1], mode=m),
            F.interpolate(x, scale_factor=2.1, mode=m)), (3, 2, *space), draws=2)
    case(f"conv_transpose{n}d of tiles", lambda x, w, b, f=getattr(F, f"conv_transpose{n}d"): f(x, w, b, stride=2),
         (3, 2, *space), (2, 3, *[2] * n), (3,), draws=2)
case("windows side by side", lambda x: (x.unfold(1, 2, 2), x.unfold(2, 3, 3), x.unfold(1, 1, 2)), (2, 8, 6), draws=3)
case("patches side by side", lambda x: F.fold(F.unfold(x, 2, stride=2) * 2, (8, 6), 2, stride=2), (2, 3, 8, 6), draws=2)
case("interpolate bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (3, 2, 4, 4))
case("unfold fold", lambda x: F.fold(F.unfold(x, 2), (5, 5), 2), (3, 4, 5, 5))
case("pixel_shuffle", lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), (3, 8, 4, 4))
case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (3, 4, 2, 2))
case("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (2, 3, 4, 4), (2, 3, 5, 2))
case("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (3, 2, 4, 4))
case("local_response_norm", lambda x: F.local_response_norm(x, 2), (3, 4, 3, 3))

attend = F.scaled_dot_product_attention
MASK = torch.ones(3, 3).tril().bool()
case("attention", attend, (2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), draws=2)
case("attention causal", lambda q, k, v: attend(q, k, v, is_causal=True), *[(2, 4, 5, 8)] * 3, draws=2)
case("attention masked", lambda q, k, v: attend(q, k, v, attn_mask=MASK), *[(2, 4, 3, 8)] * 3, draws=2)
case("attention mask of batch", lambda q, k, v, m: attend(q, k, v, attn_mask=m), *[(2, 4, 3, 8)] * 3,
     ints(2, 2, 1, 3, 3).bool() | torch.eye(3).bool())
case("attention bias", lambda q, k, v, m: attend(q, k, v, attn_mask=m), *[(2, 2, 3, 8)] * 3, (2, 3, 3))
case("attention grouped", lambda q, k, v: attend(q, k, v, enable_gqa=True), (2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8))
case("attention 3d", lambda q, k, v: attend(q, k, v, is_causal=True), *[(4, 3, 8)] * 3)


def attention_by_hand(q, k, v):
    scores = (q @ k.transpose(-2, -1)) / 8 ** 0.5
    return scores.masked_fill(~MASK, -torch.inf).softmax(-1) @ v


case("attention by hand", attention_by_hand, *[(2, 4, 3, 8)] * 3, draws=2)

# ------------------------------------------------------------------------------------------------------------ losses
TARGETS = torch.tensor([0, 4, -100, 2, 1])
CLASS_WEIGHT = torch.tensor([0.5, 1, 2, 0.3, 1.5], dtype=torch.float64)
for how in ("mean", "sum", "none"):
    for name in "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss".split():
        case(f"{name} {how}", lambda x, y, f=getattr(F, name), r=how: f(x, y, reduction=r), (5, 3), positive(5, 3))
    case(f"soft_margin_loss {how}", lambda x, y, r=how: F.soft_margin_loss(x, y, reduction=r), (5, 3),
         ints(2, 5, 3) * 2 - 1)
    case(f"binary_cross_entropy {how}", lambda x, y, r=how: F.binary_cross_entropy(x, y.sigmoid(), reduction=r),
         positive(5, 3), (5, 3))
    case(f"binary_cross_entropy_with_logits {how}", lambda x, y, r=how: F.binary_cross_entropy_with_logits(
        x, y, CLASS_WEIGHT[:3], pos_weight=CLASS_WEIGHT[1:4], reduction=r), (5, 3), positive(5, 3))
    case(f"cross_entropy {how}", lambda x, y, r=how: F.cross_entropy(x, y, reduction=r), (5, 5), TARGETS, draws=3)
    case(f"cross_entropy weighted {how}", lambda x, y, r=how: F.cross_entropy(
        x, y, CLASS_WEIGHT, reduction=r), (5, 5), TARGETS, draws=2)
    case(f"cross_entropy smoothed {how}", lambda x, y, r=how: F.cross_entropy(
        x, y, CLASS_WEIGHT, reduction=r, label_smoothing=0.1), (5, 5), TARGETS, draws=2)
    case(f"cross_entropy probabilities {how}", lambda x, y, r=how: F.cross_entropy(
        x, y.softmax(1), CLASS_WEIGHT, reduction=r, label_smoothing=0.1), (5, 5), (5, 5))
    case(f"cross_entropy images {how}", lambda x, y, r=how: F.cross_entropy(x, y, reduction=r, ignore_index=1),
         (3, 5, 2, 2), ints(5, 3, 2, 2))
    case(f"cross_entropy 3d {how}", lambda x, y, r=how: F.cross_entropy(x, y, reduction=r), (3, 5, 2), ints(5, 3, 2))
    case(f"cross_entropy one {how}", lambda x, y, r=how: F.cross_entropy(x, y, reduction=r), (5,), torch.tensor(3))
    case(f"cosine_embedding_loss {how}", lambda x, y, r=how: F.cosine_embedding_loss(
        x, y, torch.ones(5, dtype=torch.float64), reduction=r), (5, 3), (5, 3))
    case(f"triplet_margin_loss {how}", lambda x, y, z, r=how: F.triplet_margin_loss(x, y, z, reduction=r),
         (5, 3), (5, 3), (5, 3))
    case(f"multi_margin_loss {how}", lambda x, y, r=how: F.multi_margin_loss(x, y, reduction=r), (5, 5),
         TARGETS.clamp(min=0), draws=0.5)
    for dims, meant in (((), 0), ((), [0]), ((4,), [2]), ((1, 3), 1)):
        case(f"multi_margin_loss {dims} {meant} {how}", lambda x, y, r=how: F.multi_margin_loss(x, y, reduction=r),
             dims, torch.tensor(meant), draws=0.5)
    case(f"soft_margin_loss of nothing {how}",
         lambda x, r=how: F.soft_margin_loss(x, torch.ones(3), reduction=r), (0, 3))
    case(f"nll_loss of one class {how}", lambda x, r=how: F.nll_loss(x, torch.tensor([0]), reduction=r), (1,))
    case(f"multilabel_margin_loss 0d {how}", lambda x, y, r=how: F.multilabel_margin_loss(x, y, reduction=r),
         (), torch.tensor(0), draws=0.5)
    case(f"multilabel_soft_margin_loss {how}", lambda x, y, r=how: F.multilabel_soft_margin_loss(x, y, reduction=r),
         (5, 3), positive(5, 3))
case("ctc_loss of one", lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([1, 2]), torch.tensor(6), torch.tensor(2)),
     (6, 3), draws=0.5)
case("ctc_loss", lambda x: F.ctc_loss(x.log_softmax(-1), ints(3, 2, 2) + 1, torch.tensor([4, 4]), torch.tensor([2, 2])),
     (4, 2, 5), draws=0.5)


def build(spec, generator):
    """An input's plain value, and whether it takes a gradient."""
    if isinstance(spec, torch.Tensor):
        return spec.clone(), spec.is_floating_point() or spec.is_complex()
    if spec and spec[0] == "positive":
        return torch.rand(spec[1], generator=generator, dtype=torch.float64) * 0.9 + 0.1, True
    return torch.randn(spec, generator=generator, dtype=torch.float64), True


def same(got, want, what):
    """A result, global or not, is what plain torch gives; and each shard has the shape its layout says."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for i, (g, w) in enumerate(zip(got, want)):
            same(g, w, f"{what}[{i}]")
        return
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{what}: {got} is not {want}"
        return
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}"
    if got.is_global:
        for r, shard in got.shards.items():
            assert tuple(shard.shape) == got.spec.local_shape(r), f"{what}: shard {r} is {tuple(shard.shape)}"
            assert shard.dtype == want.dtype, f"{what}: shard {r} is {shard.dtype}"
        got = gather(got.detach())
    near = 1e-4 if want.dtype in (torch.float32, torch.complex64) else 1e-8
    torch.testing.assert_close(got, want.detach(), rtol=near * 10, atol=near, equal_nan=True,
                               msg=lambda m: f"{what}\n{m}")


def flat(out):
    return [t for o in out for t in flat(o)] if isinstance(out, (tuple, list)) else [out]


def run(name, where, nds, generator):
    """One case in one choice of layouts."""
    function, specs, grad, _ = CASES[name]
    built = [build(s, generator) for s in specs]
    plain = [v.clone().requires_grad_(d and grad) for v, d in built]
    globals_ = [scatter(v, where, nd, generator).requires_grad_(d and grad) for (v, d), nd in zip(built, nds)]
    what = f"{name} on {where} of {', '.join(map(str, nds))}, OPS_SEED={SEED}"
    want = function(*plain)
    got = function(*globals_)
    same(got, want, what)
    weighted = [(g, w, torch.randn(w.shape, generator=generator, dtype=w.dtype)) for g, w in zip(flat(got), flat(want))
                if isinstance(w, torch.Tensor) and w.requires_grad]
    if not grad or not weighted:
        return
    sum((w * c).sum().real for _, w, c in weighted).backward()
    sum((g * c).sum().real for g, _, c in weighted).backward()
    for i, (g, w) in enumerate(zip(globals_, plain)):
        if w.grad is not None:
            assert g.grad is not None, f"{what}: no gradient for input {i}"
            same(g.grad, w.grad, f"{what}, gradient {i}")


def choices(name, axes, chooser):
    """Some of the combinations of layouts of a case's inputs, the plain ones first."""
    function, specs, _, draws = CASES[name]
    built = [build(s, torch.Generator())[0] for s in specs]
    ways = [layouts(v.dim(), axes, pending=v.dtype != torch.bool) for v in built]
    first = list(itertools.product(*[[w[0], *w[-1:]] for w in ways]))[:2]
    return first + [tuple(chooser.choice(w) for w in ways) for _ in range(max(int(DRAWS * draws), 1))]


@pytest.mark.sample(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_op(name, place):
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name} {place}")
    where = gt.placement("cpu", PLACES[place])
    for nds in choices(name, where.ndim, chooser):
        run(name, where, nds, generator)


# ------------------------------------------------------------------------- ops of devices that are not here, on CPU


NO_POINTS = """
import torch, globaltensor as gt
x = gt.from_full(torch.zeros(0, 3), gt.placement("cpu", [0, 1]), gt.sbp.split(0)).requires_grad_()
torch.pdist(x).sum().backward()
assert x.grad.shape == (0, 3)
"""


def test_distances_of_no_points():
    """In a child: torch's kernel dies of them, on plain tensors too."""
    good([PYTHON, "-c", NO_POINTS], environment())


ATTENTION = {                                        # per kernel of a GPU: what it takes between value and dropout
    "flash": lambda mask: (), "efficient": lambda mask: (mask, True), "cudnn": lambda mask: (mask, True)}


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("place", PLACES)
def test_attention_of_gpus(place, kernel):
    """torch's ops for the kernels of GPUs run as that for a CPU: heads cut evenly and not, 2 x 2, masks."""
    generator, where = torch.Generator().manual_seed(SEED % 2**31), gt.placement("cpu", PLACES[place])
    forward, backward = (getattr(aten, f"_scaled_dot_product_{kernel}_attention{end}") for end in ("", "_backward"))
    op = aten._scaled_dot_product_flash_attention_for_cpu
    for causal, nd in itertools.product((False, True), layouts(4, where.ndim)):
        plain = [torch.randn(4, 6, n, 8, generator=generator, dtype=torch.float64) for n in (3, 5, 5)]
        bias = torch.randn(4, 6, 3, 5, generator=generator, dtype=torch.float64)
        bias = bias if kernel != "flash" and not causal else None
        lying, masks = [scatter(t, where, nd, generator) for t in plain], [bias, bias]
        want = op(*plain, is_causal=causal, attn_mask=bias)
        if bias is not None:
            masks[1] = scatter(bias, where, nd, generator)
        got = forward(*lying, *ATTENTION[kernel](masks[1]), is_causal=causal)
        same(got[:2], want, f"{causal} {nd}")
        grad = torch.randn(4, 6, 3, 8, generator=generator, dtype=torch.float64)
        wanted = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *plain, *want, 0.0, causal,
                                                                           attn_mask=bias)
        spread = scatter(grad, where, nd, generator)
        if kernel == "efficient":
            grads = backward(spread, *lying, masks[1], *got, 0.0, [True, True, True, False], causal)
        else:
            seeds, ends = (None, None), (*got[2:6], 0.0, causal)
            grads = (backward(spread, *lying, *got[:2], *ends, *seeds) if kernel == "flash" else
                     backward(spread, *lying, *got[:2], *seeds, masks[1], *ends))
        same(grads[:3], wanted, f"backward {causal} {nd}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_made_of_ops_is_that_of_the_kernel(dtype, monkeypatch):
    """What a GPU does where torch has no kernel for it, beside the kernel of a CPU."""
    monkeypatch.setattr(attention_kernels, "_kernel_for", lambda *_: SDPBackend.MATH)
    generator, near = torch.Generator().manual_seed(SEED % 2**31), 2e-2 if dtype == torch.bfloat16 else 1e-5
    for heads, causal, masked in itertools.product((6, 2), (False, True), (False, True)):
        q, k, v = (torch.randn(2, h, n, 8, generator=generator).to(dtype) for h, n in ((6, 5), (heads, 7), (heads, 7)))
        mask = torch.randn(5, 7, generator=generator).to(dtype).masked_fill(torch.eye(5, 7).bool(), -torch.inf)
        mask[3] = -torch.inf                         # sees nothing
        options = {"attn_mask": mask if masked and not causal else None}
        want = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **options)
        got = attention_kernels.attention_on_gpu(q, k, v, 0.0, causal, **options)
        grad = torch.randn(2, 6, 5, 8, generator=generator).to(dtype)
        wanted = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, *want, 0.0, causal, **options)
        grads = attention_kernels.attention_gradients_on_gpu(grad, q, k, v, *want, 0.0, causal, **options)
        for a, b in zip((*got, *grads), (*want, *wanted), strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=near, atol=near, msg=f"{heads} {causal} {masked}")


@pytest.mark.parametrize("name", ["cudnn_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit"])
def test_other_names_of_batch_norm(name):
    """They become native_batch_norm, forward and backward."""
    generator, where = torch.Generator().manual_seed(SEED % 2**31), gt.placement("cpu", [0, 1])
    x, grad = (torch.randn(5, 3, 4, generator=generator, dtype=torch.float64) for _ in "xg")
    w, b, mean, var = (torch.rand(3, generator=generator, dtype=torch.float64) + 0.5 for _ in "wbmv")
    training = [] if name == "_batch_norm_with_update" else [True]
    own = [scatter(t, where, (s,), generator) for t, s in zip((x, w, b, mean, var), (S0, B, B, B, B))]
    got = getattr(aten, name).default(*own, *training, 0.1, 1e-5)
    want = aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)
    same(got[:3], want, name)
    same(own[3:], [mean, var], name)
    wanted = aten.native_batch_norm_backward(grad, x, w, mean, var, *want[1:], True, 1e-5, [True] * 3)
    grad = scatter(grad, where, (S0,), generator)
    if name == "cudnn_batch_norm":
        same(aten.cudnn_batch_norm_backward(own[0], grad, own[1], *own[3:], *got[1:3], 1e-5, got[3]), wanted, name)
    elif name == "_batch_norm_with_update":
        back = aten.batch_norm_backward(grad, own[0], own[1], *own[3:], *got[1:3], True, 1e-5, [True] * 3, got[3])
        same(back, wanted, name)


# ------------------------------------------------------------------------------------------------ what is not sent


def moved(function, *inputs):
    """Bytes received by the rank that receives most, forward and backward, but for reading the gradients."""
    generator = torch.Generator().manual_seed(SEED % 2**31)
    where = gt.placement("cpu", [0, 1])
    made = []
    for spec, sbp in inputs:
        value, differentiable = build(spec, generator)
        made.append(scatter(value, where, (sbp,), generator).requires_grad_(differentiable))
    with gt.record() as moves:
        out = flat(function(*made))[0]
        out.backward(torch.ones_like(out))
    return sum(m.bytes for m in moves)


QUIET = {
    "element by element": (lambda x, y: F.gelu(x * 2 + y).exp() - x, ((4, 6), S0), ((4, 6), S0)),
    "bias over a split batch": (lambda x, y: x + y, ((4, 6), S0), ((6,), B)),
    "linear, split batch": (F.linear, ((4, 3, 6), S0), ((8, 6), B), ((8,), B)),
    "linear, split sequence": (F.linear, ((4, 2, 6), S1), ((8, 6), B), ((8,), B)),
    "linear, columns": (F.linear, ((4, 3, 6), B), ((8, 6), S0), ((8,), S0)),
    "linear, rows": (F.linear, ((4, 3, 6), S2), ((8, 6), S1), ((8,), B)),
    "two linears of a feed-forward": (lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b),
                                      ((4, 3, 6), B), ((8, 6), S0), ((6, 8), S1)),
    "heads": (lambda x: x.view(2, 3, 4, 2).transpose(1, 2).exp().transpose(1, 2).reshape(2, 3, 8), ((2, 3, 8), S2)),
    "attention, split heads": (lambda q, k, v: attend(q, k, v, is_causal=True), *[((2, 4, 3, 8), S1)] * 3),
    "attention by hand, split heads": (attention_by_hand, *[((2, 4, 3, 8), S1)] * 3),
    "attention, split batch, a mask for all": (lambda q, k, v: attend(q, k, v, attn_mask=MASK),
                                               *[((2, 4, 3, 8), S0)] * 3),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((4, 2, 6), S1), ((6,), B), ((6,), B)),
    "group_norm, split channels": (lambda x, w: F.group_norm(x, 2, w), ((2, 6, 5), S1), ((6,), S0)),
    "batch_norm, split channels": (lambda x, w: F.batch_norm(x, None, None, w, None, True),
                                   ((4, 6, 5), S1), ((6,), S0)),
    "convolution, split batch": (F.conv2d, ((4, 3, 5, 5), S0), ((2, 3, 3, 3), B)),
    "convolution, split output": (F.conv2d, ((2, 3, 5, 5), B), ((4, 3, 3, 3), S0)),
    "convolution, split groups": (lambda x, w: F.conv2d(x, w, groups=4), ((2, 4, 5, 5), S1), ((4, 1, 3, 3), S0)),
    "pooling": (lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2), ((4, 4, 8, 8), S1)),
    "transposed convolution of tiles": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 3, 4, 5), S2),
                                        ((3, 2, 2, 2), B)),
    "transposed convolution of tiles, in groups": (lambda x, w: F.conv_transpose1d(x, w, stride=3, groups=2),
                                                   ((2, 4, 6), S2), ((4, 1, 3), B)),
    "windows side by side": (lambda x: x.unfold(1, 2, 2) * 2, ((5, 8), S1)),
    "patches side by side": (lambda x: F.fold(F.unfold(x, 2, stride=2) * 2, (8, 6), 2, stride=2), ((2, 3, 8, 6), S2)),
    "embedding, cut vocabulary": (F.embedding, (ints(8, 4, 3), B), ((8, 6), S0)),
    "embedding, cut columns": (F.embedding, (ints(8, 4, 3), B), ((8, 6), S1)),
    "embedding, split batch": (F.embedding, (ints(8, 4, 3), S0), ((8, 6), B)),
    "mean of a split batch": (lambda x: x.pow(2).mean(), ((5, 3), S0)),
    "mse, mean": (lambda x, y: F.mse_loss(x, y), ((5, 3), S0), ((5, 3), S0)),
    "softmax of rows": (lambda x: x.softmax(-1), ((4, 6), S0)),
    "dims that move": (lambda x: x.transpose(0, 1).unsqueeze(0).expand(2, -1, -1).permute(2, 0, 1), ((4, 6), S0)),
    "slices along another dim": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)[:, 1:].flip(1), ((5, 6), S0)),
}


NESTED = [                                           # shape, its view, placement axes, sbp before, sbp after
    ((8, 4), (2, 4, 4), (2, 2), (S0, S0), (S0, S1)),
    ((2, 4, 4), (8, 4), (2, 2), (S0, S1), (S0, S0)),
    ((8, 3), (2, 12), (2, 2), (S0, S0), (S0, S1)),
    ((12, 4), (2, 6, 4), (2, 3), (S0, S0), (S0, S1)),
    ((8, 4), (2, 2, 2, 4), (2, 2, 2), (S0, S0, S0), (S0, S1, S2)),
]


@pytest.mark.parametrize("shape, size, axes, before, after", NESTED)
def test_an_inner_dim_is_split_where_the_outer_one_is_cut_up(shape, size, axes, before, after):
    where = gt.placement("cpu", torch.arange(math.prod(axes)).view(axes))
    t = torch.arange(float(math.prod(shape))).view(shape)
    for _ in range(3):                               # decided, taught to the native dispatcher, and run by it
        with gt.boxing("forbid"):
            y = gt.from_full(t, where, before).requires_grad_().view(size)
            assert y.sbp == after
        torch.testing.assert_close(gather(y), t.view(size), rtol=0, atol=0)


@pytest.mark.parametrize("k, before, after", [(1, S0, S1), (3, S1, S0), (0, S0, S0), (5, S0, S1)])
def test_a_turn_keeps_the_dim_that_is_not_reversed(k, before, after):
    t = torch.arange(20.).view(5, 4)
    with gt.boxing("forbid"):
        y = gt.from_full(t, gt.placement("cpu", [0, 1, 2]), before).rot90(k)
    assert y.sbp == (after,)
    torch.testing.assert_close(gather(y), t.rot90(k), rtol=0, atol=0)


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_sent(name):
    assert moved(*QUIET[name]) == 0


@pytest.mark.parametrize("place", PLACES)
def test_extrema_of_pending_extrema_stay_pending(place):
    """max(P, P), max(P, B) and amax(P), where P is pending by max; with a sum, or a minimum, they do not."""
    generator, where = torch.Generator().manual_seed(SEED % 2**31), gt.placement("cpu", PLACES[place])
    x, y = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in "xy")
    for name, most in (("maximum", partial_max), ("minimum", partial_min)):
        extremum, reduced = getattr(torch, name), getattr(torch, f"a{name[:3]}")
        for b in (most, B):
            for _ in range(3):                       # decided, taught to the native dispatcher, and run by it
                given = [scatter(t, where, (s,) * where.ndim, generator) for t, s in ((x, most), (y, b))]
                with gt.boxing("forbid"):
                    got, row = extremum(*given), reduced(given[0], 1)
                assert got.sbp == row.sbp == (most,) * where.ndim
                same(got, extremum(x, y), name), same(row, reduced(x, 1), name)
        same(extremum(scatter(x, where, (P,) * where.ndim, generator), given[0]), extremum(x, x), name)
        other = scatter(y, where, (partial_min if most is partial_max else partial_max,) * where.ndim, generator)
        same(extremum(given[0], other), extremum(x, y), name)


STATISTICS = {                                       # name -> most bytes, function, inputs
    "batch_norm of a split batch: two rows of channels, and two back": (
        4 * 3 * 8, batch_norm(True, running=False), ((4, 3, 8, 8), S0), ((3,), B), ((3,), B)),
    "group_norm of split images: two rows of samples' channels, and two back": (
        4 * 6 * 8, lambda x, w: F.group_norm(x, 3, w, w), ((1, 6, 8, 8), S2), ((6,), B)),
    "group_norm of split channels that fit no groups": (
        4 * 6 * 8, lambda x: F.group_norm(x, 3), ((1, 6, 8, 8), S1)),
    "layer_norm of split images: two numbers a sample, and two back": (
        4 * 2 * 8, lambda x, w: F.layer_norm(x, (6, 8, 8), w), ((2, 6, 8, 8), S2), ((6, 8, 8), B)),
    "softmax along a split dim: a maximum and a sum a row, and a sum back": (
        3 * 4 * 8, lambda x: x.softmax(1), ((4, 64), S1)),
    "cross entropy of a cut vocabulary: two numbers a row, two for the loss, and one a row back": (
        3 * 5 * 8 + 2 * 8, lambda x, y: F.cross_entropy(x, y), ((5, 64), S1), (ints(64, 5), B)),
    "a log-probability of a cut vocabulary: two numbers a row, and none back": (
        2 * 5 * 8, lambda x, y: x.log_softmax(1).gather(1, y), ((5, 64), S1), (ints(64, 5, 1), B)),
    "argmax along a split dim: the best of each part and where": (
        2 * 4 * 8, lambda x: x + 0 * x.argmax(1, keepdim=True), ((4, 64), S1)),
    "extrema of all: the best of each part and where": (
        2 * 2 * 8, lambda x: x + 0 * (x.argmax() + x.detach().aminmax()[0]), ((4, 64), S1)),
    "histograms: nothing but the range, and the counts where they are read": (
        2 * 8 + 5 * 8, lambda x: x + 0 * (x.detach().histc(5, -1, 1) + torch.histogram(x.detach(), 5)[0]).max(),
        ((4, 64), S1)),
    "cumsum along a split dim: a sum of each part": (
        4 * 8, lambda x: x.detach().cumsum(1) + 0 * x, ((4, 64), S1)),
    "the norm of a split tensor: one number": (8, lambda x: torch.linalg.vector_norm(x), ((4, 64), S1)),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_only_statistics_are_sent(name):
    most, function, *inputs = STATISTICS[name]
    assert moved(function, *inputs) <= most


OF_NOTHING = {
    "matmul of two dtypes": lambda x, i: x.reshape(3, 0, 1).long().mT @ x.reshape(3, 0, 1),
    "einsum of two dtypes": lambda x, i: torch.einsum("ij,kj->ik", x[:1].mT[:, :0], i[:, :0].long()),
    "einsum of one term": lambda x, i: torch.einsum("ij,kj->ik", i[:, :1].double(), i[:, :1]),
    "einsum of bools": lambda x, i: torch.einsum("ij,kj->ik", i[:, :1] > 3, i[:, 1:2] > 3),
    "cdist of two dtypes": lambda x, i: torch.cdist(x.float(), i.double()),
}


@pytest.mark.parametrize("function", OF_NOTHING.values(), ids=OF_NOTHING)
def test_dtypes_do_not_matter_where_there_is_nothing_to_add_up(function):
    x, i = torch.rand(0, 3, dtype=torch.float64), torch.arange(12).reshape(4, 3)
    plain = function(x, i)
    where = gt.placement("cpu", [0, 1])
    for a, b in itertools.product((S0, S1, B), repeat=2):
        found = function(gt.from_full(x, where, a), gt.from_full(i, where, b))
        torch.testing.assert_close(found.full_tensor(), plain, msg=f"{a} {b}")


NO_ROWS = {                                          # some of torch's shape functions refuse what its kernels take
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, x[:0] * 2),
    "index_add in place": lambda x, i: x.clone().index_add_(0, i, x[:0] * 2),
    "index_reduce in place": lambda x, i: x.detach().clone().index_reduce_(0, i, x[:0].detach(), "amax") * x,
    "index_copy": lambda x, i: x.index_copy(0, i, x.index_select(0, i) * 2),
    "experts that no token chose": lambda x, i: x.new_zeros(6, 3).index_copy_(
        0, i, F.linear(x.index_select(0, i), x[:3])),
}


@pytest.mark.parametrize("function", NO_ROWS.values(), ids=NO_ROWS)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_an_index_may_name_no_rows(function):
    index = torch.empty(0, dtype=torch.int64)

    def values(x):
        out = function(x.requires_grad_(), index)
        out.square().sum().backward()
        return out.detach(), x.grad

    data = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    expected = values(data.clone())
    for sbp in (S0, S1, B):
        found = values(gt.from_full(data, gt.placement("cpu", [0, 1]), sbp))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, msg=f"{sbp}")


@pytest.mark.parametrize("sbp", [S0, B], ids=str)
def test_an_assignment_may_have_no_indices(sbp):
    def written(x):
        return x.index_put([], torch.ones(1), True)

    where = gt.placement("cpu", [0, 1])
    assert written(gt.from_full(torch.ones(0), where, sbp)).full_tensor().equal(written(torch.ones(0)))
    for function in (written, lambda x: torch.ops.aten.index(x, [])):
        with pytest.raises(IndexError, match="at least one index must be provided"):
            function(gt.from_full(torch.ones(3), where, sbp))


@pytest.mark.parametrize("sbp", [S0, B], ids=str)
@pytest.mark.parametrize("shapes", [((5, 5, 5, 5, 5), (1, 1, 1, 4, 4)), ((5, 5, 5, 5), (1, 1, 4, 4))], ids=str)
def test_a_grid_that_does_not_fit_is_torchs_error(shapes, sbp):
    where = gt.placement("cpu", [0, 1])
    with pytest.raises(RuntimeError, match="expected grid and input to have same batch size"):
        torch.grid_sampler_2d(*[gt.from_full(torch.rand(shape), where, sbp) for shape in shapes], 0, 0, True)


def test_inference_mode_runs_split():
    """There torch hands over ops that it otherwise takes apart first."""
    where = gt.placement("cpu", [0, 1])
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    with torch.inference_mode(), gt.record() as moves:
        g, h = gt.from_full(x, where, S0), gt.from_full(w, where, B)
        got = F.layer_norm(g @ h, (8,)).reshape(4, 2, 4).flatten(1).softmax(-1)
        want = F.layer_norm(x @ w, (8,)).reshape(4, 2, 4).flatten(1).softmax(-1)
        same(got, want, "inference mode")
    assert got.sbp == (S0,) and not sum(m.bytes for m in moves)


@pytest.mark.parametrize("sbp", [S0, P], ids=str)
@pytest.mark.parametrize("ranks", [[0, 1], [2, 0, 1, 4, 3]], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9])
def test_a_search_comes_upon_nan_as_on_one_device(n, ranks, sbp):
    """torch's binary search takes nan for less than all: how many of a row it comes upon depends on the whole row."""
    numbers, where = torch.tensor([-math.inf, -1.0, 0, 0, 2, 3, 3, 5, math.inf]), gt.placement("cpu", ranks)
    values = torch.tensor([-math.inf, -2, -1, 0, 1, 2, 3, 4, math.inf, math.nan])
    for k, right in itertools.product(range(n + 1), (False, True)):
        row = torch.cat([numbers[9 - k:], torch.full((n - k,), math.nan)])[:n]
        rows = torch.stack([row, row.nan_to_num(9.0)])
        cut = gt.from_full(row, where, sbp)
        want = torch.searchsorted(row, values, right=right)
        assert torch.searchsorted(cut, values, right=right).full_tensor().equal(want), (row, right)
        assert torch.bucketize(values, cut, right=right).full_tensor().equal(want), (row, right)
        cut, both = gt.from_full(rows, where, split(1) if sbp == S0 else P), values.repeat(2, 1)
        want = torch.searchsorted(rows, both, right=right)
        assert torch.searchsorted(cut, both, right=right).full_tensor().equal(want), (row, right)
