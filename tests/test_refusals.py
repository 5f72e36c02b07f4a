"""What torch's kernels refuse is refused in every layout, in torch's words: also where a rank runs an op of ours
instead, or has a part in which the kernel finds nothing wrong.
"""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.tensors import backward

B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
X = torch.arange(8.).view(4, 2)
I, ONES = torch.tensor, torch.ones
# of x [4, 2]; `g` makes a tensor global
REFUSED = {
    "index_select, 2 dims": lambda x, g: x.index_select(0, g(I([[1, 0], [0, 2]]))),
    "index_select, 2 dims, from the end": lambda x, g: x.index_select(-2, g(I([[1, 0]]))),
    "index_select of bool": lambda x, g: x.index_select(0, g(I([True, False]))),
    "index_select of floats": lambda x, g: x.index_select(0, g(I([1., 0.]))),
    "gather, 1 dim": lambda x, g: x.gather(0, g(I([1, 0]))),
    "gather, 3 dims": lambda x, g: x.gather(0, g(I([[[1, 0]]]))),
    "gather, too wide": lambda x, g: x.gather(0, g(I([[1, 0, 1]]))),
    "gather of bool": lambda x, g: x.gather(0, g(I([[True, False]]))),
    "scatter, too wide": lambda x, g: x.scatter(0, g(I([[1, 0, 1]])), 1.),
    "scatter of too little": lambda x, g: x.scatter(0, g(I([[1, 0], [0, 1]])), g(X[:1])),
    "scatter of another dtype": lambda x, g: x.scatter(0, g(I([[1, 0]])), g(X.double())),
    "scatter_add of too little": lambda x, g: x.scatter_add(0, g(I([[1, 0], [0, 1]])), g(X[:1])),
    "scatter_add, bool": lambda x, g: x.scatter_add(0, g(I([[True, False]])), g(X)),
    "index_add, 2 dims": lambda x, g: x.index_add(0, g(I([[1, 0]])), g(X[:2])),
    "index_add, bool": lambda x, g: x.index_add(0, g(I([True, False])), g(X[:2])),
    "index_add of too much": lambda x, g: x.index_add(0, g(I([1, 0])), g(X[:3])),
    "index_add of another dtype": lambda x, g: x.index_add(0, g(I([1, 0])), g(X[:2].double())),
    "index_copy, 2 dims": lambda x, g: x.index_copy(0, g(I([[1, 0]])), g(X[:2])),
    "index_copy, int32": lambda x, g: x.index_copy(0, g(I([1, 0]).int()), g(X[:2])),
    "index_copy of too much": lambda x, g: x.index_copy(0, g(I([1, 0])), g(X[:3])),
    "index_copy of another dtype": lambda x, g: x.index_copy(0, g(I([1, 0])), g(X[:2].double())),
    "index_fill, 2 dims": lambda x, g: x.index_fill(0, g(I([[1, 0]])), 1.),
    "index_fill by a list": lambda x, g: x.index_fill(0, g(I([1, 0])), g(I([1.]))),
    "an index of floats": lambda x, g: x[g(I([1., 0.]))],
    "indices that do not broadcast": lambda x, g: x[g(I([1, 0])), g(I([1, 0, 1]))],
    "a mask that is too short": lambda x, g: x[g(I([True, False]))],
    "index_put, indices that do not broadcast": lambda x, g: x.index_put((g(I([1, 0])), g(I([1, 0, 1]))), g(I(1.))),
    "index_put of too much": lambda x, g: x.index_put((g(I([1, 0])),), g(ONES(3, 2))),
    "index_put of more dims": lambda x, g: x.index_put((g(I([1, 0])),), g(ONES(5, 2, 2))),
    "index_put of another dtype": lambda x, g: x.index_put((g(I([1, 0])),), g(I([1, 1]))),
    "index_put that adds too much": lambda x, g: x.index_put((g(I([1, 0])),), g(ONES(3, 2)), accumulate=True),
    "an assignment of more dims": lambda x, g: x.clone().__setitem__(g(I([0, 1])), g(ONES(5, 2, 2))),
    "an assignment of more dims to a row": lambda x, g: x.clone().__setitem__(0, g(ONES(2, 2))),
    "an assignment to indices that do not broadcast":
        lambda x, g: x.clone().__setitem__((g(I([1, 1])), g(I([0, 1, 0]))), g(I(1.))),
    "embedding of floats": lambda x, g: F.embedding(g(I([1., 0.])), x),
    "embedding of 3 dims": lambda x, g: F.embedding(g(I([1, 0])), x[..., None]),
    "classes of floats": lambda x, g: F.nll_loss(x, g(ONES(4)), reduction="sum"),
    "too few classes": lambda x, g: F.nll_loss(x, g(torch.zeros(3).long()), reduction="sum"),
    "weights of another dtype": lambda x, g: F.nll_loss(x, g(torch.zeros(4).long()), g(ONES(2).double())),
    "classes of images, int32": lambda x, g: F.nll_loss(x[None, :, :, None], g(torch.zeros(1, 2, 1).int())),
    "as_strided_scatter of a number": lambda x, g: torch.as_strided_scatter(x, g(I(1.)), (2,), (1,)),
    "as_strided_scatter of too much": lambda x, g: torch.as_strided_scatter(x, g(ONES(3)), (2,), (1,)),
    "as_strided beyond its memory": lambda x, g: x.as_strided((2, 2), (200, 200)),
    "as_strided beyond its memory, by an offset": lambda x, g: x.as_strided((2, 2), (2, 1), 5),
    "as_strided_scatter beyond its memory": lambda x, g: torch.as_strided_scatter(x, g(ONES(2)), (2,), (9,)),
    "expand to fewer dims": lambda x, g: x.expand(3),
    "expand to none": lambda x, g: x[:1, :1].expand(()),
    "expand_as of fewer dims": lambda x, g: x.expand_as(g(ONES(4))),
    "broadcast_to": lambda x, g: torch.broadcast_to(x, (3,)),
    "addr to 3 dims": lambda x, g: torch.addr(x[None], g(ONES(4)), g(ONES(2))),
    "addr of a number": lambda x, g: torch.addr(x, g(ONES(4)), g(I(1.))),
    "addr of a matrix": lambda x, g: torch.addr(x, g(ONES(1, 4)), g(ONES(2))),
    "trace of 3 dims": lambda x, g: torch.trace(x[None]),
    "trace of a row": lambda x, g: x[0].trace(),
    "dot of matrices": lambda x, g: torch.dot(x, g(X)),
    "vdot of matrices": lambda x, g: torch.vdot(x, g(X)),
    "mv of 3 dims": lambda x, g: torch.mv(x[None], g(X)),
    "bucketize by a matrix": lambda x, g: torch.bucketize(g(ONES(3)), x),
    "searchsorted in a number": lambda x, g: torch.searchsorted(x[0, 0], g(I(1.))),
    "batch norm of one dim": lambda x, g: F.batch_norm(x[0], None, None, training=True),
    "a convolution of other channels": lambda x, g: F.conv1d(x, g(ONES(3, 2, 1))),
    "a convolution of other channels by groups": lambda x, g: F.conv1d(x, g(ONES(4, 1, 1)), groups=2),
    "a convolution of no groups": lambda x, g: F.conv1d(x, g(ONES(3, 4, 1)), groups=0),
    "a convolution in no steps": lambda x, g: F.conv1d(x, g(ONES(3, 4, 1)), stride=0),
    "a convolution in steps back": lambda x, g: F.conv1d(x, g(ONES(3, 4, 1)), stride=-1),
    "a convolution of one point": lambda x, g: F.conv2d(x[None, None], g(ONES(3, 1, 2, 1)), dilation=0),
    "a transposed convolution of other channels": lambda x, g: F.conv_transpose1d(x[None], g(ONES(3, 2, 1))),
    "unfold in no steps": lambda x, g: F.unfold(x[None], 1, stride=0),
    "std of integers": lambda x, g: x.long().std(),
    "var of integers along a dim": lambda x, g: x.long().var(0),
    "masked_scatter by floats": lambda x, g: x.masked_scatter(g(X), x),
    "multi_margin_loss of floats": lambda x, g: F.multi_margin_loss(x, g(ONES(4))),
    "the greatest of nothing": lambda x, g: x[:0].max(),
}


def refusal(program, *args):
    """The error's type, and the first line of its text."""
    with pytest.raises(Exception) as caught:
        program(*args)
    return type(caught.value), str(caught.value).split("\n")[0]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_the_same_words(name):
    want = refusal(REFUSED[name], X.clone(), lambda t: t)
    for ranks in ([0, 1], [0, 1, 2, 3, 4]):          # among five, some have nothing
        where = gt.placement("cpu", ranks)
        for sbp in (S(0), S(1), B, P):
            x = gt.from_full(X, where, B).to_global(sbp=sbp)
            for g in (lambda t: t, lambda t: gt.from_full(t, where, B)):
                assert refusal(REFUSED[name], x, g) == want, (ranks, sbp)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_class_of_one_row_may_be_a_list(reduction):
    row, target = X[0].clone(), I([1])
    for sbp in (S(0), B):
        loss = F.nll_loss(gt.from_full(row, gt.placement("cpu", [0, 1]), sbp), target, reduction=reduction)
        assert torch.equal(loss.full_tensor(), F.nll_loss(row, target, reduction=reduction))


@pytest.mark.parametrize("start", [lambda out, x: backward.backward(out), lambda out, x: backward.grad(out, x)])
def test_a_complex_loss_needs_a_gradient_to_start_from(start):
    """As torch's own engine says, whom these stand for without native code."""
    x = gt.ones(4, dtype=torch.complex64, placement=gt.placement("cpu", [0, 1]), sbp=S(0), requires_grad=True)
    with pytest.raises(RuntimeError, match="only for real scalar outputs but got torch.complex64"):
        start(x.sum(), x)
    backward.backward(x.sum(), torch.ones((), dtype=torch.complex64))
    assert torch.equal(x.grad.full_tensor(), torch.ones(4, dtype=torch.complex64))


DTYPES_REFUSED = {
    "softmax": lambda x: F.softmax(x, 0), "log_softmax": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x[None]), "group_norm": lambda x: F.group_norm(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 3, 1, 1), "foreach_norm": lambda x: torch._foreach_norm([x], 1),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
}


@pytest.mark.parametrize("name", DTYPES_REFUSED)
def test_dtypes_that_kernels_refuse(name):
    """Also where the op is done by others, along a split dim, which take them."""
    for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64):
        x = torch.arange(12).view(6, 2).to(dtype)
        try:
            DTYPES_REFUSED[name](x)
            continue
        except (NotImplementedError, RuntimeError) as error:
            want = type(error), str(error).split("\n")[0]
        for sbp in (S(0), S(1), B):
            global_x = gt.from_full(x, gt.placement("cpu", [0, 1]), sbp)
            assert refusal(DTYPES_REFUSED[name], global_x) == want, (dtype, sbp)


def ops_on_lists():
    """Ops in place: their name, how many lists they take, and what comes after these."""
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min", "pow", "copy"):
        yield f"_foreach_{name}_", 2, ()
    yield from [("_foreach_addcmul_", 3, ()), ("_foreach_addcdiv_", 3, ([0.5],)), ("_foreach_lerp_", 2, (0.5,)),
                ("_foreach_lerp_", 3, ())]


def test_lists_are_refused_for_the_shapes_of_whole_tensors():
    """Parts may fit by accident, as one element beside one, and write what nobody asked for."""
    where, shapes = gt.placement("cpu", [0, 1]), [(4,), (2,), (1,), (4, 3), (2, 3), (1, 4), ()]
    pairs = [(a, b) for a in shapes for b in shapes]
    for name, lists, rest in ops_on_lists():
        for own, other in pairs:
            def call(make, own=own, other=other, op=getattr(torch, name), lists=lists, rest=rest):
                op([make(own)], *[[make(other)] for _ in range(lists - 1)], *rest)

            try:
                call(torch.ones)
                continue
            except RuntimeError as error:
                want = str(error)
            for sbp in (*map(S, range(len(own))), B):
                for its in (B, *map(S, range(len(other)))):
                    mixed = iter([sbp] + [its] * lists)
                    with pytest.raises(RuntimeError) as caught:
                        call(lambda shape, mixed=mixed: gt.ones(shape, placement=where, sbp=next(mixed)))
                    assert str(caught.value).split("\n")[0] == want, (name, own, other, sbp, its)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_fused_step_refuses_a_state_of_another_shape(optimizer):
    """torch's kernel, which checks nothing, reads beyond its end."""
    where = gt.placement("cpu", [0, 1])
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    states = []
    for n in (2, 4):
        p = torch.nn.Parameter(gt.ones(n, placement=where, sbp=S(0)))
        p.grad = gt.ones(n, placement=where, sbp=S(0))
        stepped = optimizer([p], lr=0.1, fused=True, **options)
        if states:
            stepped.load_state_dict(states[0])
            with pytest.raises(gt.GlobalTensorError, match=r"has shape \(2,\), its parameter \(4,\)"):
                stepped.step()
        else:
            stepped.step()
            states.append(stepped.state_dict())
