"""Operands whose dims lie in memory in another order: those of the results lie in the order that plain torch gives.

Programs ask for strides, and whether a tensor is contiguous. The operator database's operands mostly are.
"""
from __future__ import annotations

import random
from copy import deepcopy

import pytest
import torch
from moves import layouts
from rule_samples import ELSEWHERE, SAMPLES, made, name_of
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import globaltensor as gt
from globaltensor.errors import GlobalTensorError
from globaltensor.op_table.table import TABLE

RANKS = [0, 1, 2]
# What is computed across ranks, or made of other ops, has the order that these give: docs/limits.md.
OTHER_ORDER = {"_log_softmax_backward_data", "_safe_softmax", "_softmax_backward_data", "_weight_norm_interface",
               "huber_loss_backward", "log_sigmoid_forward", "mse_loss_backward",
               "native_batch_norm_backward", "native_group_norm_backward", "nll_loss2d_forward",
               "smooth_l1_loss_backward"}
CONTIGUOUS_ONLY = {"_pdist_backward", "_unsafe_view", "native_group_norm", "_weight_norm_interface_backward",
                   "nll_loss2d_backward"}            # torch's kernels refuse others
OPS = {name_of(func): func for func in TABLE
       if name_of(func) in SAMPLES and name_of(func) not in {*ELSEWHERE, *CONTIGUOUS_ONLY, *OTHER_ORDER}
       and not any(result.alias_info for result in func._schema.returns)}


def turned(t):
    """The same values, the last dim outermost in memory."""
    return t.permute(tuple(range(t.dim())[::-1])).contiguous().permute(tuple(range(t.dim())[::-1]))


def globally(t, where, sbp):
    """That, global."""
    own = f"S({t.dim() - 1 - int(sbp[2])})" if sbp[0] == "S" else sbp
    return gt.from_full(t.permute(tuple(range(t.dim())[::-1])), where, own).permute(tuple(range(t.dim())[::-1]))


def order(t):
    """Strides of the dims that have more than one element."""
    return [step for step, n in zip(t.stride(), t.shape) if n > 1]


@pytest.mark.parametrize("name", OPS)
def test_results_lie_in_memory_as_plain_ones(name):
    where, func, tried = gt.placement("cpu", RANKS), OPS[name], 0
    for sample in SAMPLES[name][:1]:
        values, tree = tree_flatten(made(list(sample), torch.Generator().manual_seed(0)))
        at = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        tensors = [turned(values[i]) for i in at]

        def call(tensors, values=values, tree=tree, at=at):
            own = dict(zip(at, tensors))
            args, kwargs = tree_unflatten([own.get(i, v) for i, v in enumerate(values)], tree)
            return [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]

        want = call([t.clone() for t in tensors])
        for sbps in [sbps for sbps in layouts(tensors) if "P" in sbps or len({*sbps}) == 1]:
            try:
                results = call([globally(t, where, sbp) for t, sbp in zip(tensors, sbps)])
            except GlobalTensorError:
                continue                             # refused: other tests say which
            for got, plain in zip(results, want, strict=True):
                tried += 1
                if got.is_global and plain.numel():
                    assert order(got) == order(plain), f"{sbps}: strides {got.stride()}, not {plain.stride()}"
    assert tried


def in_memory(t):
    """Its strides, and its elements as they lie in memory."""
    return t.stride(), t.as_strided((t.numel(),), (1,)).tolist()


CL = torch.channels_last
FORMATS = {
    "resize_": lambda x, like: x.resize_(2, 3, 2, 2, memory_format=CL),
    "resize_ to fewer": lambda x, like: x.resize_(2, 3, 2, 1, memory_format=CL),
    "resize_ to the same": lambda x, like: x.resize_(2, 3, 2, 2).resize_(2, 3, 2, 2, memory_format=CL),
    "resize_as_": lambda x, like: x.resize_as_(like, memory_format=CL),
    "resize_as_ without": lambda x, like: x.resize_as_(like),
    "resize_as_ as it lies": lambda x, like: x.resize_as_(like, memory_format=torch.preserve_format),
    "of a plain one": lambda x, like: torch.arange(24.0).resize_as_(like, memory_format=CL),
    "of a plain one as it lies": lambda x, like: torch.arange(24.0).resize_as_(like,
                                                                               memory_format=torch.preserve_format),
}


@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_resize_takes_its_memory_format(name, sbp):
    x, like = torch.arange(24.0), torch.zeros(2, 3, 2, 2)
    where = gt.placement("cpu", RANKS)
    ours = [gt.from_full(t, where, sbp) for t in (x, like)]
    assert (in_memory(FORMATS[name](ours[0], ours[1].contiguous(memory_format=CL)))
            == in_memory(FORMATS[name](x, like.contiguous(memory_format=CL))))


def test_a_memory_format_does_not_hang_on_calls_before():
    """The same call on a tensor in another layout, and at a size whose strides are those of contiguous memory."""
    plain = torch.arange(24.0).view(4, 6)
    for shape in ((6, 1, 2, 2), (2, 3, 2, 2)):
        for call in (torch.Tensor.contiguous, torch.clone):
            for sbp in ("S(0)", "S(1)", "B", "P") * 2:
                x = gt.from_full(plain, gt.placement("cpu", RANKS), sbp)
                got, want = (call(t.view(shape), memory_format=CL) for t in (x, plain))
                assert (got.stride(), got.tolist()) == (want.stride(), want.tolist()), (shape, call, sbp)


IMAGES = {                                           # [n, 8, 4, 4], in several orders in memory
    "tokens, reshaped": lambda n: torch.randn(n, 16, 8).transpose(1, 2).reshape(n, 8, 4, 4),
    "tokens, unflattened": lambda n: torch.randn(n, 16, 8).transpose(1, 2).unflatten(2, (4, 4)),
    "channels last": lambda n: torch.randn(n, 8, 4, 4).contiguous(memory_format=torch.channels_last),
    "transposed": lambda n: torch.randn(n, 4, 4, 8).transpose(1, 3),
    "sliced": lambda n: torch.randn(n, 8, 4, 8)[..., ::2],
    "contiguous": lambda n: torch.randn(n, 8, 4, 4),
}
WEIGHTS = {name: torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 0.1
           for name, shape in {"conv": (8, 8, 3, 3), "depth": (8, 1, 3, 3), "point": (8, 8, 1, 1),
                               "turned": (8, 8, 2, 2)}.items()}
STEPS = {
    "conv2d": lambda x: F.conv2d(x, WEIGHTS["conv"], padding=1),
    "depthwise": lambda x: F.conv2d(x, WEIGHTS["depth"], padding=1, groups=8),
    "pointwise": lambda x: F.conv2d(x, WEIGHTS["point"]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHTS["turned"], stride=2)[..., :4, :4],
    "group_norm": lambda x: F.group_norm(x, 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "relu": F.relu,
    "add": lambda x: x + x.contiguous(),
    "cat": lambda x: torch.cat([x[:, :4], x[:, 4:].contiguous()], 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 4),
    "interpolate": lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1))[..., 1:-1, 1:-1],
    "pixel_shuffle": lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2),
    "softmax": lambda x: x.softmax(1),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), WEIGHTS["point"][:, :, 0, 0]).permute(0, 3, 1, 2),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}
ROWS = [(2, 2), (2, 3), (3, 3), (3, 4), (3, 5), (2, 1)]        # ranks, and images: some have one, or none


def dims_in_memory(t):
    """Its dims that have more than one element, the outermost in memory first."""
    return sorted((d for d, n in enumerate(t.shape) if n > 1), key=lambda d: -t.stride(d))


@pytest.mark.parametrize("seed", range(8))
def test_parts_lie_in_memory_as_the_whole(seed):
    """Else a kernel that is chosen by the strides of the whole reads a part wrongly, or what is not the part's: a rank
    that has one image may get another order from a kernel than one that has two."""
    print("seed", seed)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(60):
        ranks, n = draw.choice(ROWS)
        image, steps = draw.choice(list(IMAGES)), draw.choices(list(STEPS), k=draw.randrange(1, 4))
        plain, sbp = IMAGES[image](n), draw.choice([0, 0, 1, 2, 3])
        where = gt.placement("cpu", list(range(ranks)))
        order = [*dims_in_memory(plain), *(d for d in range(4) if plain.shape[d] == 1)]
        x = gt.from_full(plain.permute(order), where, f"S({order.index(sbp)})")
        x = x.permute([order.index(d) for d in range(4)])
        program = f"{n} images, {ranks} ranks, S({sbp}), {image}: {', '.join(steps)}"
        for step in steps:
            x, plain = STEPS[step](x), STEPS[step](plain)
            torch.testing.assert_close(x.full_tensor(), plain, rtol=1e-3, atol=1e-3,
                                       msg=lambda m, program=program: f"{program}\n{m}")
            for part in x.shards.values():
                order = [d for d in dims_in_memory(x) if part.shape[d] > 1]
                assert not part.numel() or dims_in_memory(part) == order, program


KEPT = {                                             # what plain torch gives of channels-last images is so, too
    **{name: STEPS[name] for name in ("conv2d", "depthwise", "pointwise", "max_pool2d", "avg_pool2d", "relu",
                                      "interpolate", "pad")},
    "conv2d, dilated": lambda x: F.conv2d(x, WEIGHTS["conv"], padding=2, dilation=2),
    "conv2d of a weight": lambda x: F.conv2d(x.contiguous(), WEIGHTS["conv"].contiguous(memory_format=CL)),
    "conv2d, strided": lambda x: F.conv2d(x, WEIGHTS["conv"], stride=2, padding=1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHTS["turned"], stride=2),
    "roll": lambda x: x.roll(1, 1),
    "roll of rows": lambda x: x.roll((1, 1), (2, 3)),
    "roll of images": lambda x: x.roll(1, 0),
    "reflection_pad2d": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication_pad2d": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "avg_pool2d of windows": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
}


@pytest.mark.parametrize("name", KEPT)
def test_channels_last_images_stay_so_however_they_are_cut(name):
    """Also where a rank has one image or row, of which its kernel cannot tell the order."""
    where = gt.placement("cpu", [0, 1])
    for n in (1, 2, 3, 4):
        plain = torch.randn(n, 8, 4, 4).contiguous(memory_format=CL).requires_grad_()
        want = KEPT[name](plain)
        seed = torch.randn(want.shape).contiguous(memory_format=CL)
        grad, = torch.autograd.grad(want, plain, seed)
        for sbp in ("S(0)", "S(1)", "S(2)", "S(3)", "B"):
            x, its = (gt.from_full(t.detach().contiguous(), where, sbp).contiguous(memory_format=CL)
                      for t in (plain, seed))
            got = KEPT[name](x.requires_grad_())
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)
            assert order(got) == order(want), f"{n} images, {sbp}: {got.stride()}, not {want.stride()}"
            back, = torch.autograd.grad(got, x, its)
            torch.testing.assert_close(back.full_tensor(), grad, rtol=1e-4, atol=1e-4)
            assert order(back) == order(grad), f"{n} images, {sbp}, gradient: {back.stride()}, not {grad.stride()}"


LYING = {"channels last": torch.randn(2, 4, 6, 6).contiguous(memory_format=CL), "transposed": torch.randn(4, 6).t(),
         "sliced": torch.randn(6, 8, 4)[:, ::2].transpose(0, 2), "contiguous": torch.randn(4, 6)}


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("name", LYING)
def test_plain_tensors_keep_their_order_on_the_way_in(name, sbp):
    t, where = LYING[name], gt.placement("cpu", RANKS)
    dim = int(sbp[2]) if sbp[0] == "S" else None
    joined = torch.cat([t] * 3, dim) if sbp[0] == "S" else t * 3 if sbp == "P" else t
    results = {"from_full": gt.from_full(t, where, sbp), "from_local": gt.from_local(deepcopy(t), where, sbp),
               "from_shards": gt.from_shards(dict.fromkeys(RANKS, deepcopy(t)), where, sbp)}
    for way, x in results.items():
        values = t if way == "from_full" else joined
        torch.testing.assert_close(x.full_tensor(), values, msg=way)
        assert dims_in_memory(x) == dims_in_memory(t), way
        assert x.stride() == x.clone().stride(), way
        for part in x.shards.values():
            dims = [d for d in dims_in_memory(x) if part.shape[d] > 1]
            assert not part.numel() or dims_in_memory(part) == dims, way
        x.mul_(2)                                    # parts of ranks are no one memory
        torch.testing.assert_close(x.full_tensor(), values * 2, msg=way)


@pytest.mark.parametrize("spread", ["to_global", "parallelize"])
def test_a_channels_last_module_stays_so(spread):
    plain = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)).to(memory_format=CL)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=CL)
    want = plain(images).detach()
    where = gt.placement("cpu", [0, 1], axis_names=("dp",))
    model = gt.to_global(plain, where, "B") if spread == "to_global" else gt.parallelize(plain, where)
    assert all(p.is_contiguous(memory_format=CL) for p in model.parameters() if p.dim() == 4)
    got = model(gt.from_full(images, where, "S(0)"))
    assert got.is_contiguous(memory_format=CL)
    torch.testing.assert_close(got.full_tensor(), want)
    got.sum().backward()
    assert all(p.grad.is_contiguous(memory_format=CL) for p in model.parameters() if p.dim() == 4)
