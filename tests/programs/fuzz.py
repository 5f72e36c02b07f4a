"""Random programs on global tensors, beside the same programs on plain ones: values, gradients, shapes, strides.

A program is text, drawn while plain torch runs it, so that every statement is one that plain torch can do:

    a = leaf(0, (5, 3), "float64", True, 1, ["S(0)", "B"])
    b = a.transpose(0, 1)[1:3]
    c = box(b, ["P", "S(1)"])
    b2 = c * 1; b2[0].add_(c[1])
    backward((b2 * weights(b2)).sum())

It is then run on global tensors, three times: decided, taught to the native dispatcher, and run by it. `TABLE` has what
statements are made of. Values are small integers as long as they can be, so that comparisons, sorts and indices do not
depend on the rounding of sums, whose order layouts change: `exact` variables.

Run as a program, it draws one program each of COUNT seeds from SEED on, and prints what came of them as JSON. The last
program it began is in FILE, for the case that it dies. It runs on several processes too, each of which prints that.

    python tests/programs/fuzz.py SEED COUNT FILE
"""
from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.errors import DisagreementError, GlobalTensorError, TransportError
from globaltensor.rules.proof import cut

Choose = Callable[[Sequence], Any]
PLACES = [[0, 1], [0, 1, 2], [1, 0, 2], [3], [[0, 1], [2, 3]], [[4, 5, 6], [1, 2, 3]], [[2], [0]]]
SHAPES = [(6, 4), (5, 3), (4, 4), (2, 3, 4), (3, 1, 4), (2, 2, 3, 2), (7,), (4,), (1, 5), (), (0, 3), (8, 6), (3, 4)]
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))     # each has a gradient of its own of what it had as its part
LARGEST, ELEMENTS = 1e6, 400                         # values and sizes beyond these are not drawn

# What statements are made of, a line each: `{x}` a tensor; `{y}`, `{z}` others that broadcast with it; `{s}` another of
# its shape; `{w}` any other; `{k}` integers, `{m}` a mask of its shape; `{d}`, `{e}` dims of x; `{i}`, `{j}` indices
# along d, `{a}:{b}` a range there; `{n}` a number; `{q}` a positive one; `{size}` sizes with as many elements.

# Exact of exact operands; of others right up to rounding.
SMOOTH = """
    {x} + {y}
    {x} - {y}
    {x} * {y}
    {n} - {x}
    {n} * {x}
    {x} + {n}
    {n} + {x} * {n}
    -{x}
    {x}.add({y}, alpha={q})
    torch.where({m}, {x}, {y})
    torch.where({m}, {x}, {n})
    torch.where({m}, {n}, {x})
    {x}.masked_fill({m}, {n})
    {x}.sum()
    {x}.sum({d})
    {x}.sum({d}, keepdim=True)
    {x}.sum(({d}, {e}))
    {x}.cumsum({d})
    {x}.amax({d})
    {x}.amin({d}, keepdim=True)
    {x}.abs()
    {x}.relu()
    {x}.square()
    {x}.clone()
    {x}.contiguous()
    {x}.detach()
    {x}.clamp({a}, {b})
    torch.maximum({x}, {y})
    torch.minimum({x}, {y})
    torch.cat([{x}, {s}], {d})
    torch.stack([{x}, {s}], {d})
    torch.cat({x}.split({q}, {d})[::-1], {d})
    torch.stack({x}.unbind({d}), {e})
    {x}.flip({d})
    {x}.roll({a}, {d})
    {x}.repeat_interleave(2, {d})
    {x}.index_select({d}, torch.tensor([{i}, {j}, {i}]) % {x}.shape[{d}])
    {x}.gather({d}, torch.tensor({i}).expand({x}.shape) % {x}.shape[{d}])
    {x}.tril()
    {x}.triu({a})
    {x}.diag_embed()
    {x}[{i}]
    {x}[{i}, ..., {j}]
    {x}[[{i}, {j}]]
    {x}[:, [{i}, {j}]]
    {x}[[{i}, {j}], [{j}, {i}]]
    {x}[torch.tensor([{i}, {j}]), 1:]
    {x}[{k}]
    {x}[..., {k}]
    {x}.take({k})
    {x} @ {w}
    {x} @ {x}.mT
    {x}.mT @ {w}
    torch.matmul({x}, {w}.transpose(-1, -2))
    torch.einsum("...i,...j->...ij", {x}, {s})
    torch.einsum("ij,kj->ik", {x}, {w})
    torch.einsum("bij,bjk->bik", {x}, {w})
    torch.einsum("ij->j", {x})
    torch.outer({x}, {w})
    torch.dot({x}, {s})
    torch.addmm({y}, {x}, {w}, beta={q}, alpha={n})
    torch.bmm({x}, {w})
    F.linear({x}, {w})
    F.linear({x}, {w}, {y})
    F.pad({x}, ({a}, {b}))
    F.embedding({k}, {x})
    F.one_hot({k})
    {x}.scatter({d}, {k}, {n})
    {x}.scatter_add({d}, {k}, {w})
    {x}.index_add({d}, {k}, {w})
    {x}.index_fill({d}, {k}, {n})
    {x}.index_copy({d}, torch.tensor([{i}]), {w})
    {x}.masked_scatter({m}, {w})
    {x}.prod({d})
    {x}.to(torch.float32)
    {x}.double()
    {x}.float()
    {x}.lerp({y}, {n})
    torch.addcmul({x}, {y}, {z}, value={n})
    {x}.new_zeros({size}) + {x}.reshape({size})
    torch.zeros_like({x})
    torch.ones_like({x}) * {n}
    {x}.new_full({size}, {n})
    {x}.reshape({size})
    {x}.flatten()
    {x}.nan_to_num()
    torch.broadcast_tensors({x}, {y})[0]
    torch.meshgrid({x}, {w}, indexing="ij")[0]
    torch.tensordot({x}, {w}, dims=1)
    torch.kron({x}, {w})
    {x}.trace()
    {x}.diff(dim={d})
    {x}.expand({q}, *{x}.shape).sum(0)
    {x}.nansum({d})
    {x}.slice_scatter({w}, {d}, {a}, {b})
    {x}.select_scatter({w}, {d}, {i})
    {x}.diagonal_scatter({w})
    {x}.tile({q})
    {x}.repeat({q}, 1)
    torch.atleast_2d({x})
    {x}.conj()
    F.mse_loss({x}, {s}, reduction="sum")
    F.l1_loss({x}, {s}, reduction="none")
    F.max_pool1d({x}, 2, ceil_mode=True)
    F.unfold({x}.reshape(1, 1, *{x}.shape), 2)
    torch.complex({x}, {s})
    torch.view_as_real(torch.complex({x}, {s}))
    {x}.real
    torch.vstack([{x}, {x}])
    {x}[{m}]
    {x}[{m}].sum()
    {x}[{k}, {k}]
    {x}[:, None, {k}]
    {x}[-1:, {k}]
    {x}[torch.tensor([{i}, -1])]
    {x}.flip({d})[::2]
    {x}.take_along_dim(torch.tensor({i}).expand({x}.shape) % {x}.shape[{d}], {d})
    torch.cat([{x}, {w}], {d})
    torch.cat([row.unsqueeze(0) * {n} for row in {x}])
    sum(part.sum() for part in {x}.split({q}, {d}))
    sum(row * {n} for row in {x})
    torch.where({x} > {y}, {x}, {n})
    torch.where({m}, torch.tensor({n}), {x})
    {x} + torch.tensor({n})
    {x} * torch.tensor({n}, dtype=torch.float64)
    {x}.to({y}.dtype)
    {x}.type_as({y})
    {x}.to(torch.complex128)
    {x}.sum(dtype=torch.float64)
    {x}.sum({d}, dtype=torch.float32)
    {x}.expand_as({x})
    {x}.index_put(({k},), torch.tensor({n}, dtype={x}.dtype))
    {x}.clone().detach().requires_grad_()
    torch.addr({x}, {y}, {w})
    {x}.mv({w})
    {x}.inner({w})
    {x}.cumsum({d}).diff(dim={d}, prepend={x}.narrow({d}, {i}, 1))
    torch.trapezoid({x}, dim={d})
    torch.cross({x}, {y}, dim={d})
    torch.block_diag({x}, {w})
    torch.cartesian_prod({x}, {w})
    torch.combinations({x}, 2)
    torch.rot90({x}, {a}, ({d}, {e}))
    {x}.fliplr()
    torch.hstack([{x}, {s}])
    torch.dstack([{x}, {s}])
    torch.column_stack([{x}, {w}])
    torch.concat([{x}.mT, {s}.mT], {d})
    {x}.scatter_reduce({d}, {k}, {w}, "amax")
    {x}.scatter_reduce({d}, {k}, {w}, "sum", include_self=False)
    {x}.index_reduce({d}, torch.tensor([{i}]), {w}, "amin")
    {x}.aminmax(dim={d})[1]
    {x}.amax(({d}, {e}))
    {x}.sum().expand({size})
    {x}.new_ones(3).cumsum(0) + {x}.sum()
    F.pad({x}, ({a}, 1), mode="replicate")
    F.pad({x}, (1, {a}), mode="circular")
    F.pad({x}, (-1, {a}))
    F.max_pool2d({x}, 2)
    F.leaky_relu({x}, 0.5)
    F.hinge_embedding_loss({x}, {s}.sign(), reduction="sum")
    F.conv1d({x}, {x}[:1])
    F.fold(F.unfold({x}.reshape(1, 1, *{x}.shape), 2), {x}.shape, 2)
    F.embedding_bag({k}, {x}, mode="sum")
    F.bilinear({x}, {s}, {w})
    F.feature_alpha_dropout({x}, 0.5, training=False)
    F.dropout({x}, 0.5, training=False)
    {x}.addcdiv({y}, {q} + torch.zeros_like({z}))
    {x}.squeeze().unsqueeze({d})
    {x}.where({m}, 0)
    torch.where({x} > 0)[0]
    {x}.view({x}.shape)[..., None].expand(*{x}.shape, 2).reshape(-1)
    {x}.T.reshape({size})
    {x}.mT.contiguous().view(-1)
    {x}.transpose({d}, {e}).reshape(-1)[{a}:{b}]
    {x}.unfold({d}, 2, 2).sum(-1)
    {x}.as_strided((2, 2), (1, 2))
    {x}.to(memory_format=torch.contiguous_format)
    {x}.cpu()
    {x}.type(torch.float64)
    {x}.numel() * {x}
    {x}.shape[{d}] - {x}
    {x}.masked_fill({m}, {x}.sum())
    torch.stack([{x}, {s}, {x}])[1:, ..., 0]
    torch.split({x}, [1, {x}.shape[{d}] - 1], {d})[1]
    torch.cumulative_trapezoid({x}, dim={d})
    torch.chain_matmul({x}, {x}.mT, {x})
    torch.einsum("i...->...", {x})
    torch.einsum("ij,ij->ij", {x}, {s})
    torch.einsum("ij,i->j", {x}, {w})
    torch.einsum("ii->i", {x})
    torch.einsum("ij,jk,kl->il", {x}, {w}, {w}.mT)
    {x}[..., None, :] * {x}[..., :, None]
    {x} @ {x}[0]
    {x}[0] @ {x}.mT
    {x}.mT @ {x}
    {x}[({i},)]
    {x}[{i}:{i}]
    {x}[{x}.sum({d}) > 0]
    {x}[torch.arange({x}.shape[0]) % 2 == 0]
    {x}[..., torch.tensor([True, False]).repeat({x}.shape[-1])[:{x}.shape[-1]]]
    {x}[None, {i}, ..., None]
    {x}[torch.tensor([[{i}, {j}], [{j}, {i}]])]
    {x}.index_put(({k},), {w})
    {x}.logsumexp({d}).detach() * 0 + {x}.sum({d})
    torch.utils.checkpoint.checkpoint(lambda v: v * v + v, {x}, use_reentrant=False)
    torch.vmap(lambda v: v * 2 + v.sum())({x})
    torch.vmap(torch.dot)({x}, {s})
    torch.func.grad(lambda v: (v ** 2).sum())({x})
    torch.func.jvp(lambda v: v * v, ({x},), ({s},))[1]
"""

# Not exact.
ROUNDED = """
    {x} / {q}
    {x} / ({y}.abs() + 1)
    {n} / ({x}.abs() + 1)
    1 / ({x} * {x} + {q})
    {x}.mean()
    {x}.mean({d})
    {x}.mean({d}, keepdim=True)
    {x}.var({d})
    {x}.std()
    torch.std_mean({x}, {d})[1]
    {x}.sin()
    {x}.tanh()
    {x}.sigmoid()
    ({x} / 8).exp()
    ({x}.abs() + 1).log()
    ({x}.abs() + 1).sqrt()
    ({x}.abs() + 1).rsqrt()
    ({x}.abs() + {q}) ** {n}
    {q} ** ({x} / 8)
    {x}.softmax({d})
    {x}.log_softmax({d})
    {x}.logsumexp({d})
    {x}.norm()
    ({x} + 0.5).norm(dim={d})
    F.layer_norm({x}, {x}.shape[-1:])
    F.layer_norm({x}, {x}.shape[-1:], {y}, {y})
    F.gelu({x})
    F.silu({x})
    F.elu({x})
    F.softplus({x})
    F.glu({x}, {d})
    F.normalize({x} + 0.5, dim={d})
    F.cosine_similarity({x} + 0.5, {s} + 0.5, {d})
    F.mse_loss({x}, {s})
    F.smooth_l1_loss({x}, {s})
    F.cross_entropy({x}, {k})
    F.cross_entropy({x}, {x}.softmax(1))
    F.binary_cross_entropy_with_logits({x}, {m}.to({x}.dtype))
    F.kl_div({x}.log_softmax({d}), {s}.softmax({d}), reduction="batchmean")
    F.scaled_dot_product_attention({x}, {s}, {s})
    F.group_norm({x}, 1)
    F.rms_norm({x}, {x}.shape[-1:])
    F.avg_pool1d({x}, 2)
    F.interpolate({x}, scale_factor=2)
    F.conv1d({x}, {w})
    torch.cdist({x} + 0.5, {w} * 2)
    torch.cov({x})
    torch.logaddexp({x}, {y})
    torch.atan2({x} + 0.25, {y} + 0.5)
    torch.hypot({x} + 0.5, {y})
    torch.linalg.vector_norm({x} + 0.5, dim={d})
    torch.linalg.inv({x} @ {x}.mT + 50 * torch.eye({x}.shape[-2], dtype={x}.dtype))
    torch.addcdiv({x}, {y}, {z}.abs() + 1)
    {x}.cumprod({d}) / 64
    {x}.logcumsumexp({d})
    F.conv2d({x}, {w})
    F.conv1d({x}, {w}, padding=1)
    F.conv_transpose1d({x}, {x}[:1].transpose(0, 1))
    F.batch_norm({x}, None, None, training=True)
    F.instance_norm({x})
    F.adaptive_avg_pool1d({x}, {q})
    F.avg_pool2d({x}, 2)
    F.interpolate({x}, size=5, mode="linear")
    F.pairwise_distance({x} + 0.5, {s})
    F.multi_margin_loss({x}, {k})
    F.nll_loss({x}.log_softmax(1), {k})
    F.huber_loss({x}, {s})
    F.poisson_nll_loss({x} / 8, {s}.abs())
    F.softmin({x}, {d})
    F.hardswish({x} + 0.25)
    F.mish({x})
    F.selu({x})
    F.scaled_dot_product_attention({x}, {s}, {x}, is_causal=True)
    F.multilabel_soft_margin_loss({x}, {m}.to({x}.dtype))
    {x}.var(({d}, {e}))
    torch.var_mean({x}, {d}, keepdim=True)[0]
    {x}.norm(p=1, dim={d})
    {x}.norm(p=3)
    torch.linalg.norm({x} + 0.5)
    torch.linalg.solve({x} @ {x}.mT + 50 * torch.eye({x}.shape[-2], dtype={x}.dtype), {x})
    torch.linalg.cholesky({x} @ {x}.mT + 50 * torch.eye({x}.shape[-2], dtype={x}.dtype))
    torch.linalg.det({x} @ {x}.mT + 5 * torch.eye({x}.shape[-2], dtype={x}.dtype))
    torch.corrcoef({x} + torch.arange({x}.shape[-1], dtype={x}.dtype) ** 2)
    torch.renorm({x} + 0.5, 2, {d}, 1.0)
    torch.quantile({x} + 0.1 * torch.arange({x}.numel(), dtype={x}.dtype).reshape({x}.shape), 0.3, dim={d})
    torch.fft.rfft({x}, dim={d}).abs()
    torch.fft.fft({x}, dim={d}).real
    torch.func.vjp(torch.sin, {x})[1]({s})[0]
    torch.func.hessian(lambda v: (v ** 3).sum())({x}.flatten()[:4] / 4)
    torch.func.jacrev(lambda v: v.sin().sum(0))({x})
    {x}.sinc()
    {x}.erf()
    {x}.expm1() / 8
    torch.special.xlogy({x}, {y}.abs() + 1)
    {x}.float_power(2)
    {x}.true_divide({q})
    {x}.mean(dtype=torch.float64)
    {x}.nanmean({d})
    F.layer_norm({x}.mT, {x}.mT.shape[-1:])
    F.linear({x}, {x}, {y}).softmax(-1)
"""

# Of exact operands only: what rounding would change.
EXACT = """
    {x}.count_nonzero({d})
    {x}.logical_not()
    {x}.argmax({d})
    {x} > {y}
    {x} <= {n}
    {x} == {y}
    {n} < {x}
    ({x} > {n}).any({d})
    ({x} > {n}).all()
    ~({x} > {y}) & ({x} != {n})
    {m}.logical_xor({x} > 0)
    {x}.sort(dim={d}, stable=True)[0]
    {x}.sort(dim={d}, descending=True, stable=True)[1]
    {x}.argsort(dim={d}, stable=True)
    {x}.detach().topk(1, {d})[0]
    {x}.max({d})[0]
    {x}.min({d})[1]
    {x}.max()
    {x}.argmax()
    {x}.argmin({d})
    {x}.cummax({d})[0]
    {x}.detach().median({d})[0]
    {x}.sign()
    {x}.floor()
    {x} // {q}
    {x} % {q}
    {x}.remainder({y}.abs() + 1)
    {x}.round()
    {x}.to(torch.int64)
    {x}.long() % {q}
    {x}.long().abs() % 3
    {x}.bool()
    {x}[{x} > {n}]
    {x}.nonzero()
    {x}.unique()
    {x}.bincount()
    torch.searchsorted({x}.flatten().sort()[0], {y})
    torch.bucketize({x}, torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64))
    F.hardtanh({x}, {a}, {b})
    F.threshold({x}, {a}, {n})
    F.relu6({x})
    {x}.masked_select({x} > 0)
    {x}.clamp(min={y})
    {x} & {q}
    torch.isin({x}, {w})
    {x}.allclose({y})
    {x}.heaviside({y})
    {x}.item() if {x}.numel() == 1 else {x}.sum().item()
"""

VIEWS = """
    {x}.transpose({d}, {e})
    {x}.permute(*range({d}, {x}.dim()), *range({d}))
    {x}.mT
    {x}.t()
    {x}.view({size})
    {x}.view(-1)
    {x}.view_as({x})
    {x}.reshape({size})
    {x}.flatten(0, 1)
    {x}.unflatten({d}, (-1, 2))
    {x}.unsqueeze({d})
    {x}.squeeze()
    {x}.squeeze({d})
    {x}.expand(2, *{x}.shape)
    {x}.select({d}, {i})
    {x}[{i}]
    {x}[..., {i}]
    {x}[{a}:{b}]
    {x}[:, {a}:{b}]
    {x}[..., ::2]
    {x}[{i}:, None]
    {x}.narrow({d}, {i}, 1)
    {x}.split({q}, {d})[-1]
    {x}.chunk(2, {d})[0]
    {x}.tensor_split(3, {d})[1]
    {x}.unbind({d})[{i}]
    {x}.diagonal()
    {x}.diagonal({a})
    {x}.unfold({d}, 2, 1)
    {x}.movedim({d}, {e})
    {x}.detach()
    {x}.real
    torch.view_as_real({x})
    torch.view_as_complex({x})
    {x}.ravel()
    {x}.swapaxes({d}, {e})
    {x}.data
    {x}[None]
    {x}[-1]
    {x}[-2:, ..., None]
    {x}.T
    {x}.chunk(2, {d})[-1][..., :1]
    {x}[{a}:][::2]
    {x}.view_as({s})
    {x}.to({x}.dtype)
    {x}.contiguous()
"""

WRITES = """
    {x}.add_({y})
    {x}.add_({n})
    {x}.mul_({n})
    {x}.mul_({y})
    {x}.sub_({y}, alpha={q})
    {x}.neg_()
    {x}.zero_()
    {x}.fill_({n})
    {x}.copy_({y})
    {x}.copy_({x}.flip(0))
    {x}.clamp_({a}, {b})
    {x}.masked_fill_({m}, {n})
    {x}.relu_()
    {x}.abs_()
    {x}.square_()
    {x}.cumsum_({d})
    {x}.tril_()
    {x}.index_fill_({d}, torch.tensor([{i}]), {n})
    {x}.index_add_({d}, torch.tensor([{i}]), {w})
    {x}.index_copy_({d}, torch.tensor([{i}]), {w})
    {x}.scatter_({d}, {k}, {n})
    {x}.scatter_add_({d}, {k}, {w})
    {x}.lerp_({y}, {n})
    {x}.addcmul_({y}, {z})
    {x}.fill_diagonal_({n})
    {x}.t_()
    {x}.unsqueeze_({d})
    {x}.squeeze_()
    {x}.transpose_({d}, {e})
    {x}[{i}] = {n}
    {x}[{i}] = {w}
    {x}[{a}:{b}] = {n}
    {x}[{a}:{b}] *= {n}
    {x}[{i}:] += {y}
    {x}[:, {a}:{b}] = {w}
    {x}[..., {i}] -= {n}
    {x}[{i}, ..., {j}] = {n}
    {x}[[{i}, {j}]] = {n}
    {x}[torch.tensor([{i}, {j}]), 0] = {n}
    {x}[{m}] = {n}
    {x}[{m}] += {n}
    {x}[{k}] = {n}
    {x}[...] = {y}
    {x} += {y}
    {x} *= {n}
    {x}.index_put_(({k},), torch.tensor({n}, dtype={x}.dtype), accumulate=True)
    torch.add({x}, {n}, out={x})
    torch.mul({s}, {n}, out={x})
    torch._foreach_add_([{x}, {s}], {n})
    torch._foreach_mul_(list({x}.unbind()), [{n}] * len({x}))
    {x}.data.add_({n})
    {x}.put_({k}.flatten()[:1], torch.tensor([{n}], dtype={x}.dtype))
    {x}.swapaxes({d}, {e})[{i}] = {n}
    {x}.diagonal().fill_({n})
    {x}.view(-1)[::2].add_({n})
    for row in {x}: row.mul_({n})
    for row in {x}.unbind({d}): row.fill_({n})
    for i, row in enumerate({x}): row[..., 0] = i
    for part in {x}.chunk(2, {d}): part.add_({n})
    for part in {x}.split({q}, {d}): part[..., :1] = {n}
    for part in {x}.split({q}, {d}): part.copy_(part.flip(0))
    {x}[{i}][..., 0] = {n}
    {x}[{a}:][..., ::2] = {n}
    {x}[{a}:][..., -1].mul_({n})
    {x}[{i}:].mT[0].zero_()
    {x}.view(-1)[{a}:{b}].add_({n})
    {x}.reshape(-1)[{a}] = {n}
    {x}.narrow({d}, {i}, 1).zero_()
    {x}.select({d}, {i}).copy_({w})
    {x}.unsqueeze(0)[0, {i}] = {n}
    {x}[None][..., {i}] = {n}
    {x}.detach().mul_({n})
    {x}.detach()[{i}] = {n}
    {x}.data[{i}] = {n}
    {x}.data = ({x} * {n}).detach()
    {x}.detach_()
    {x}.requires_grad_()
    {x}.requires_grad_(False)
    {x}[{m}] = {x}[{m}] * {n}
    {x}[torch.tensor([{i}, -1])] = {n}
    {x}[torch.tensor([{i}])] += {n}
    {x}.masked_scatter_({m}, {w})
    {x}[..., [0]] = {n}
    {x}[-1] = {x}[0].clone()
    {x}[..., ::2] = {x}[..., ::2].flip(0)
    {x}.to({x}.dtype).add_({n})
    {x}.contiguous().mul_({n})
    {x}.real.add_({n})
"""


def lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


TABLE = {"smooth": lines(SMOOTH), "rounded": lines(ROUNDED), "exact": lines(EXACT), "view": lines(VIEWS),
         "write": lines(WRITES)}
KINDS = ["smooth"] * 6 + ["rounded"] * 3 + ["exact"] * 3 + ["view"] * 6 + ["write"] * 5 + [
    "leaf", "leaf", "plain", "box", "box", "box", "move", "read", "gradient", "local", "whole"]
# Refused of a tensor that has views; the last two are torch's own error, once one is made anew.
ON_BASES = ("{x}.t_", "{x}.unsqueeze_", "{x}.squeeze_", "{x}.transpose_", "{x}.detach_()", "{x}.requires_grad_(False)")
# What takes nothing but sizes or a dtype of its other operand.
LIKE = ("torch.broadcast_tensors", "torch.meshgrid", "{x}.view_as", "{x}.to({y}", "{x}.type_as")
IN_INFERENCE = "with torch.inference_mode(): "
BLOCKS = [""] * 12 + ["with torch.no_grad(): ", IN_INFERENCE, "with torch.enable_grad(): "]


# -------------------------------------------------------------------------------------------------- the two worlds


def values(number: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Small integers, none twice in a row of 7."""
    t = (torch.arange(torch.Size(shape).numel()) * 5 + number) % 7 - 3
    t = t > 0 if dtype == "bool" else t % 3 if dtype == "int64" else t.to(getattr(torch, dtype))
    return t.reshape(shape).clone()


def weights(t: torch.Tensor) -> torch.Tensor:
    """What makes a number of a tensor, a different one for each element."""
    return (torch.arange(t.numel(), dtype=torch.float64) % 5 - 1.5).reshape(t.shape)


def loss(*tensors: torch.Tensor) -> Any:
    """A number that every one of them has a part in, not linearly."""
    return sum(((t.abs() if t.is_complex() else t).double() * weights(t)).sum()
               + ((t.abs() if t.is_complex() else t).double() ** 2).sum() / 8 for t in tensors)


class Plain:
    """What the names of a program mean in plain torch."""

    def leaf(self, number: int, shape: Sequence[int], dtype: str, grad: bool, place: int, sbp: list[str]) -> Any:
        return values(number, shape, dtype).requires_grad_(grad)

    def box(self, t: torch.Tensor, sbp: list[str]) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    def move(self, t: torch.Tensor, place: int, sbp: list[str]) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    def local(self, t: torch.Tensor, place: int, sbp: list[str]) -> torch.Tensor:
        """What ranks make together that have `t` each."""
        for s, ranks in zip(sbp, torch.tensor(PLACES[place]).shape):
            t = t if s == "B" else t * ranks if s == "P" else torch.cat([t] * ranks, int(s[2]))
        return t.clone(memory_format=torch.contiguous_format)

    def whole(self, t: torch.Tensor) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format)


class Global(Plain):
    """What they mean here."""

    def leaf(self, number: int, shape: Sequence[int], dtype: str, grad: bool, place: int, sbp: list[str]) -> Any:
        where = placement(place)
        shards, own = [values(number, shape, dtype)], gt.from_full(values(number, shape, dtype), where, sbp).spec
        for s, parts in zip(own.sbp, where.shape):   # by hand, so that all terms of a pending sum are something
            shards = [x for shard in shards for x in cut(shard, s, parts, torch.Generator().manual_seed(number))]
        return gt.from_shards(dict(zip(where.flat, shards)), where, sbp).requires_grad_(grad)

    def box(self, t: Any, sbp: list[str]) -> Any:
        return self.own(t, t.to_global(sbp=sbp)) if t.is_global else super().box(t, sbp)

    def move(self, t: Any, place: int, sbp: list[str]) -> Any:
        if not t.is_global:                          # plain[global of no dims] is plain: torch reads it as a number
            return gt.from_full(t.clone(memory_format=torch.contiguous_format), placement(place), sbp)
        return self.own(t, t.to_global(placement(place), sbp))

    def local(self, t: torch.Tensor, place: int, sbp: list[str]) -> Any:
        # a copy: of `t` itself the first rank's part is the memory, and parts keep their order in it
        return gt.from_local(t.clone(memory_format=torch.contiguous_format), placement(place), sbp)

    def whole(self, t: Any) -> torch.Tensor:
        return t.full_tensor().clone(memory_format=torch.contiguous_format)

    def own(self, t: Any, boxed: Any) -> Any:
        """With strides that no layout decides. (`to_global` of what is laid out so already is the tensor itself.)"""
        return boxed.clone(memory_format=torch.contiguous_format) if boxed is t else boxed.contiguous()


def placement(place: int) -> Any:
    return gt.placement("cpu", PLACES[place])


def names_of(world: Plain) -> dict[str, Any]:
    return {"torch": torch, "F": F, "leaf": world.leaf, "box": world.box, "move": world.move, "local": world.local,
            "whole": world.whole, "values": values, "weights": weights, "loss": loss}


# ------------------------------------------------------------------------------------------------- drawing a program


def is_as_before(t: torch.Tensor, before: torch.Tensor) -> bool:
    return t.shape == before.shape and bool(((t == before) | (t != t) & (before != before)).all())


class Drawing:
    """A program as it is drawn, and what plain torch has of its variables."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.names = names_of(Plain())
        self.statements: list[str] = []
        self.templates: list[str] = []               # which line of the table each is of
        self.tensors: dict[str, torch.Tensor] = {}
        self.place: dict[str, int | None] = {}       # None: a plain tensor
        self.inexact: set[str] = set()
        self.places = choose([[0], [1], [1], [2], [3], [4], [4], [5], [6], [1, 4], [0, 1], [4, 3], [1, 2]])
        for _ in range(choose([1, 2, 2, 3])):
            self.leaf()

    def sbps(self, place: int, ndim: int) -> list[str]:
        kinds = ["B", "P", *[f"S({d})" for d in range(ndim)] * 2]
        return [self.choose(kinds) for _ in torch.tensor(PLACES[place]).shape]

    def leaf(self) -> None:
        place, shape = self.choose(self.places), self.choose(SHAPES)
        dtype = self.choose(["float64"] * 6 + ["float32", "int64", "bool"])
        grad = dtype.startswith("float") and self.choose([True, True, False])
        number = len(self.statements)
        sbp = ["B" if s == "P" and dtype == "bool" else s for s in self.sbps(place, len(shape))]
        self.add(f"{{new}} = leaf({number}, {shape}, {dtype!r}, {grad}, {place}, {sbp})", "leaf", place)

    def add(self, statement: str, template: str, place: int | None = None, exact: bool = True) -> bool:
        """Run a statement in plain torch, and take it up if that could."""
        new = f"t{len(self.statements)}"
        statement = statement.replace("{new}", new)
        self.names.pop(new, None)
        try:
            exec(statement, self.names)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, AttributeError):
            return False
        value = self.names.get(new)
        if isinstance(value, torch.Tensor):
            if not self.is_small(value):
                return False
            self.tensors[new], self.place[new] = value, place
            if not exact:
                self.inexact.add(new)
        self.statements.append(statement)
        self.templates.append(template)
        return True

    def is_small(self, t: torch.Tensor) -> bool:
        t = t.detach()
        return t.numel() <= ELEMENTS and t.dim() <= 5 and (
            not t.numel() or t.dtype == torch.bool or bool(t.abs().max() < LARGEST))

    def step(self) -> bool:
        """One statement more; False where the program cannot go on."""
        self.tensors = {name: t for name, t in self.tensors.items() if is_usable(t)}
        kind = self.choose(KINDS)
        if kind == "leaf":
            self.leaf()
        elif kind == "plain":
            shape, dtype = self.choose(SHAPES), self.choose(["float64", "float64", "int64", "bool"])
            grad = ".requires_grad_()" if dtype == "float64" and self.choose([True, False, False]) else ""
            self.add(f"{{new}} = values({len(self.statements)}, {shape}, {dtype!r}){grad}", "plain", None)
        elif kind in ("box", "move"):
            self.boxing(kind)
        elif kind in ("local", "whole"):
            self.crossing(kind)
        elif kind == "read":
            self.statements.append(f"read({self.choose(list(self.tensors))})")
            self.templates.append("read")
        elif kind == "gradient":
            self.gradient()
        else:
            return self.operation(kind)
        return True

    def boxing(self, kind: str) -> None:
        name = self.choose([name for name in self.tensors if self.place[name] is not None])
        place = self.place[name] if kind == "box" else self.choose(self.places)
        t = self.tensors[name]
        sbp = self.sbps(place, t.dim())
        if t.dtype == torch.bool:
            sbp = ["B" if s == "P" else s for s in sbp]
        argument = "" if kind == "box" else f"{place}, "
        self.add(f"{{new}} = {kind}({name}, {argument}{sbp})", kind, place, name not in self.inexact)

    def crossing(self, kind: str) -> None:
        """Between plain tensors and global ones."""
        names = [n for n, t in self.tensors.items() if (self.place[n] is None) == (kind == "local")
                 and not (kind == "local" and (t.dtype == torch.bool or PROCESSES > 1 and t.requires_grad))]
        if names:
            name, place = self.choose(names), self.choose(self.places) if kind == "local" else None
            how = f", {place}, {self.sbps(place, self.tensors[name].dim())}" if place is not None else ""
            self.add(f"{{new}} = {kind}({name}{how})", kind, place, name not in self.inexact)

    def gradient(self) -> None:
        """A gradient in the midst of the program, sometimes one that can be differentiated again."""
        leaves = [n for n, t in self.tensors.items() if t.is_leaf and t.requires_grad]
        used = [n for n, t in self.tensors.items() if not t.is_leaf and t.requires_grad]
        if leaves and used:
            leaf, of, again = self.choose(leaves), self.choose(used), self.choose([True, False])
            # torch cannot derive twice by an empty view whose base was written to: as_strided's formula says a plain 0
            again = again and self.tensors[of].numel() > 0
            if self.place[leaf] in (None, self.place[of]):
                # strides of gradients are autograd's own business
                self.add(f"{{new}} = torch.autograd.grad(loss({of}), {leaf}, create_graph={again}, retain_graph=True)"
                         "[0].contiguous()", "gradient", self.place[leaf], False)

    def operation(self, kind: str) -> bool:
        template = self.choose(TABLE[kind])
        for _ in range(3):                           # operands that fit are not always drawn at once
            before = len(self.statements)
            if not self.fill(template, kind):
                return False
            if len(self.statements) > before:
                break
        return True

    def fill(self, template: str, kind: str) -> bool:
        """One statement made of a template, if plain torch can do it; False where the program cannot go on."""
        text, used = self.filled(template, kind)
        if text is None:
            return True
        exact = kind in ("smooth", "exact", "view") and not used & self.inexact
        if kind == "exact" and not exact:
            return True
        places = {self.place[name] for name in used} - {None}
        if template.startswith(LIKE):                # such a result of a plain x is plain
            places = {self.place[re.findall(r"\bt\d+\b", text)[0]]}
        if len(places) > 1:
            return True
        if kind == "write" and any(self.tensors[n].requires_grad for n in used) and not all(
                self.tensors[n].is_floating_point() for n in used):
            return True                              # gradients of integers: torch refuses some of them, by kernel
        place = next(iter(places), None)
        block = self.choose(BLOCKS)
        if kind == "write" and any(self.tensors[name].is_inference() for name in used):
            block = IN_INFERENCE                     # elsewhere torch allows it by accident only
        elif ".data =" in text or block == IN_INFERENCE and "requires_grad_()" in text:
            block = ""                               # of a leaf made there, kernels of torch record what they happen to
        if text.startswith("for "):
            block = block.replace(": ", ":\n    ")
        if kind != "write":
            return self.add(f"{block}{{new}} = {text}", template, place, exact) or True
        versions = {name: t._version for name, t in self.tensors.items() if not t.is_inference()}
        before = {name: t.detach().clone() for name, t in self.tensors.items()}
        if not self.add(f"{block}{text}", template):             # some kernels write before they refuse
            return all(t._version == versions[n] for n, t in self.tensors.items() if n in versions) and all(
                is_as_before(t, before[n]) for n, t in self.tensors.items())
        if not all(self.is_small(t) for t in self.tensors.values() if is_usable(t)):
            self.statements.pop(), self.templates.pop()
            return False
        if used & self.inexact or any(c in template for c in (".lerp_",)):
            self.inexact |= set(self.tensors)        # some of them are its views
        return True

    def filled(self, template: str, kind: str) -> tuple[str | None, set[str]]:
        """A template with its slots filled, and the variables in it; None where there is nothing to fill in."""
        at = {"x": self.choose(list(self.tensors))}
        x, used = self.tensors[at["x"]], {at["x"]}
        slots = set(re.findall(r"{(\w+)}", template))
        if kind == "write" and (self.place[at["x"]] is None or overlaps_itself(x)):
            return None, used
        if template.startswith(ON_BASES) and not x._is_view() and any(
                share_memory(t, x) for t in self.tensors.values() if t is not x):
            return None, used
        ndim = x.dim()
        if "conv" in template and not x.numel():     # which torch gets wrong itself
            return None, used
        if slots & {"d", "e"} and not ndim:
            return None, used
        d = self.choose(range(ndim)) if ndim else 0
        size = x.shape[d] if ndim else 1
        at["d"], at["n"] = str(d), str(self.choose([2, -1, 0.5, 3, 0, True, 1.0]))
        for slot in sorted(slots - set(at)):
            if slot == "e":
                at[slot] = str(self.choose(range(-ndim, ndim)))
            elif slot in "ij":
                if not size:
                    return None, used
                at[slot] = str(self.choose(range(size)))
            elif slot in "ab":
                at[slot] = str(self.choose([0, 1, 2]) if slot == "a" else self.choose([3, 4]))
            elif slot == "q":
                at[slot] = str(self.choose([1, 2, 3]))
            elif slot == "size":
                at[slot] = str(self.sizes(x))
            else:
                name = self.other(slot, x, at["x"])
                if name is None:
                    return None, used
                used |= {name} & set(self.tensors)
                if kind == "write" and (slot == "w" or name != at["x"]) and (
                        name not in used or share_memory(self.tensors[name], x)):
                    name += ".clone()"
                at[slot] = name
        text = template.format(**at)
        return text, {name for name in used if re.search(rf"\b{name}\b", text)}

    def other(self, slot: str, x: torch.Tensor, own: str) -> str | None:
        """Another operand beside x: a variable, or an expression made of x."""
        place = self.place[own]
        near = [n for n, t in self.tensors.items() if self.place[n] in (None, place) or place is None]
        if slot == "m":
            masks = [n for n in near if self.tensors[n].dtype == torch.bool and broadcast(self.tensors[n], x)]
            if own not in self.inexact:
                masks.append(f"({own}.real > 0)" if x.is_complex() else f"({own} > 0)")
            return self.choose(masks) if masks else None
        if slot == "k":
            integers = [n for n in near if self.tensors[n].dtype == torch.int64]
            return self.choose([*integers, "torch.tensor([0, 1])", "torch.tensor(1)", "torch.tensor([[1, 0], [0, 0]])"])
        if slot == "s":
            alike = [n for n in near if self.tensors[n].shape == x.shape]
            return self.choose([*alike, f"({own} * 2)", f"{own}.flip(0)"])
        if slot in "yz":
            fitting = [n for n in near if broadcast(self.tensors[n], x)]
            return self.choose([*fitting, *fitting, f"{own}[:1]", f"({own} - 1)", f"{own}[..., :1]"])
        return self.choose([*near, f"{own}.mT", f"{own}[:1]", f"{own}[..., :1]", f"{own}.flip(0)[0]",
                            f"values(1, {tuple(x.shape[::-1])}, 'float64')"])

    def sizes(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes with as many elements: two dims melted, one cut, or all in one."""
        shape = list(x.shape)
        ways = [[-1], [1, *shape], [*shape, 1]]
        for i, n in enumerate(shape):
            ways += [[*shape[:i], 2, n // 2, *shape[i + 1:]]] if n % 2 == 0 and n else []
            ways += [[*shape[:i], n // 2, 2, *shape[i + 1:]]] if n % 2 == 0 and n else []
            ways += [[*shape[:i], n * shape[i + 1], *shape[i + 2:]]] * 3 if i + 1 < len(shape) else []
        return tuple(self.choose(ways)) if x.numel() else tuple(shape)

    def finish(self) -> None:
        """Backward from some of what can be differentiated."""
        self.tensors = {name: t for name, t in self.tensors.items() if is_usable(t)}
        used = [n for n, t in self.tensors.items() if not t.is_leaf and t.requires_grad]
        leaves = [n for n, t in self.tensors.items() if t.is_leaf and t.requires_grad]
        if used and leaves:
            place = self.place[self.choose(used)]
            ends = [n for n in used if self.place[n] == place]
            ends = sorted({self.choose(ends) for _ in range(3)})
            self.add(f"loss({', '.join(ends)}).backward()", "backward")


def is_usable(t: torch.Tensor) -> bool:
    """Not a view whose base was written so that autograd gives it up: it raises whatever it is asked next."""
    try:
        return t.is_leaf or t.grad_fn is not None
    except RuntimeError:
        return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are parts of the two one memory? What a write does to operands that overlap its target, torch leaves open."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.untyped_storage().nbytes() > 0


def overlaps_itself(t: torch.Tensor) -> bool:
    """An expanded or unfolded tensor, into which torch advises against writing."""
    index = torch.arange(t.untyped_storage().nbytes() // t.itemsize)
    return index.as_strided(t.shape, t.stride(), t.storage_offset()).unique().numel() < t.numel()


def broadcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the two broadcast, to no more dims than the second has?"""
    try:
        return torch.broadcast_shapes(a.shape, b.shape) == b.shape
    except RuntimeError:
        return False


def draw(choose: Choose) -> Drawing:
    """A program of 5 to 30 statements."""
    drawing = Drawing(choose)
    for _ in range(choose(range(5, 31))):
        if not drawing.step():
            break
    drawing.finish()
    return drawing


# --------------------------------------------------------------------------------------------------- running it twice


class Refused(Exception):
    """A structured error of the library's, at a statement."""


def check(program: Drawing, times: int = 3) -> None:
    """Run a program here as in plain torch. AssertionError where they differ; Refused."""
    boxing: set[str] = set()                         # statements that box something
    for nth in range(times):
        plain, ours = names_of(Plain()), names_of(Global())
        loose: set[str] = set()                      # variables whose strides come of a boxing, which makes them anew
        for statement, template in zip(program.statements, program.templates):
            if template == "read":
                name = statement[5:-1]
                compare(name, plain[name], ours[name], statement)
                continue
            exec(statement, plain)
            try:
                if nth:
                    exec(statement, ours)
                else:
                    with gt.record() as moves:
                        exec(statement, ours)
                    boxing |= {statement} if moves else set()
            except (DisagreementError, TransportError):
                raise
            except GlobalTensorError as error:
                raise Refused(f"{error.what}  [{statement}]") from error
            except Exception as error:
                if "view size is not compatible" in str(error) and loose & names_in(statement):
                    raise Refused(f"a view of other strides than plain torch's [{statement}]") from error
                error.add_note(f"at {statement}")
                raise
            for name in [n for n, value in plain.items() if isinstance(value, torch.Tensor) and is_usable(value)]:
                compare_meta(name, plain[name], ours[name], statement)
                if strides(plain[name]) != strides(ours[name]):
                    assert name in loose or statement in boxing or loose & names_in(statement), (
                        f"after {statement}, {name} has strides {ours[name].stride()}, not {plain[name].stride()}")
                    loose.add(name)
        for name, value in plain.items():
            if isinstance(value, torch.Tensor) and is_usable(value):
                compare(name, value, ours[name], "the end")
                if value.is_leaf and value.grad is not None:
                    assert ours[name].grad is not None, f"the gradient of {name} is None"
                    compare(f"{name}.grad", value.grad, ours[name].grad, "the end")
            elif isinstance(value, (bool, int, float)):
                assert value == ours[name], f"{name}: {value}, here {ours[name]}"


def described(t: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and flags."""
    return tuple(t.shape), t.dtype, t.requires_grad, t.is_leaf, t.is_conj(), t.is_inference()


def strides(t: torch.Tensor) -> list[int]:
    """Where they say something: of dims with more than one index, if there are elements."""
    return [s for n, s in zip(t.shape, t.stride()) if n > 1] if t.numel() else []


def names_in(statement: str) -> set[str]:
    return set(re.findall(r"\bt\d+\b", statement))


def compare_meta(name: str, plain: torch.Tensor, ours: torch.Tensor, statement: str) -> None:
    assert described(plain) == described(ours), (
        f"after {statement}, {name} is {described(ours)}, in plain torch {described(plain)}")


def compare(name: str, plain: torch.Tensor, ours: torch.Tensor, statement: str) -> None:
    got = ours.detach().full_tensor() if ours.is_global else ours.detach()
    torch.testing.assert_close(got, plain.detach(), rtol=1e-4 if plain.dtype == torch.float32 else 1e-7, atol=1e-5,
                               equal_nan=True, msg=lambda m: f"at {statement}, {name}: {m}")


def main(first: int, count: int, file: Path) -> None:
    """Programs of so many seeds; prints how many statements they had, and of the programs that were refused or failed
    the seeds and why."""
    statements = 0
    refused: dict[int, str] = {}
    failed: dict[int, str] = {}
    for seed in range(first, first + count):
        program = draw(random.Random(seed).choice)
        statements += len(program.statements)
        if gt.rank() == 0:
            file.write_text(f"SEED={seed}\n" + "\n".join(program.statements))
        try:
            check(program)
        except Refused as refusal:
            refused[seed] = str(refusal)
        except Exception as error:                   # of any kind: what plain torch does not raise is a failure
            failed[seed] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    print(json.dumps({"programs": count, "statements": statements, "refused": refused, "failed": failed}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
