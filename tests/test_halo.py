"""Images whose space is split: convolutions and pooling move the rows at the seams, and nothing else.

The bytes are counted here row by row, with no arithmetic of the library. Real processes run `programs/halo.py`.
"""
from __future__ import annotations

import copy
import itertools
import os
import random
import runpy

import pytest
import torch
from harness import PROGRAMS, PYTHON, ROOT, RUN, good, good_all, results
from shards import place, sizes
from test_networks import NETWORKS, train
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.errors import BoxingError

SEED = int(os.environ.get("HALO_SEED") or 20_261_122)
print(f"tests/test_halo.py: HALO_SEED={SEED}")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
F64 = torch.float64
NAMES = ("aten.convolution", "aten.max_pool", "aten.avg_pool")


def halo(rows, out, ranks, kernel, stride=1, padding=0, dilation=1):
    """Per rank, how many of the rows that its output rows are made of are another rank's; and those for the way back:
    how many of its own rows other ranks have a term of the gradient for."""
    ends = list(itertools.accumulate(sizes(rows, ranks), initial=0))
    made = list(itertools.accumulate(sizes(out, ranks), initial=0))
    asked = []
    for r in range(ranks):
        touched = [i * stride - padding + dilation * k for i in range(made[r], made[r + 1]) for k in range(kernel)]
        inside = range(max(min(touched), 0), min(max(touched) + 1, rows)) if touched else range(0)
        asked.append(set(inside))
    own = [set(range(ends[r], ends[r + 1])) for r in range(ranks)]
    there = [len(asked[r] - own[r]) for r in range(ranks)]
    back = [sum(len(asked[other] & own[r]) for other in range(ranks) if other != r) for r in range(ranks)]
    return there, back


def compare(f, operands, sbps, where, equal=False):
    """f on plain and on global operands, forward and backward; the boxings of our ops, without those of 0 bytes."""
    plain = [t.clone().requires_grad_() for t in operands]
    y = f(*plain)
    assert y.numel()
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(SEED))
    y.backward(grad)
    spread = [gt.from_full(t, where, nd).requires_grad_() for t, nd in zip(operands, sbps)]
    with gt.record() as moves:
        got = f(*spread)
        got.backward(gt.from_full(grad, where, sbps[0]))
    assert got.sbp == spread[0].sbp == spread[0].grad.sbp
    near = {"rtol": 0, "atol": 0} if equal else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got.detach().full_tensor(), y.detach(), **near)
    for p, q in zip(plain, spread):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-9)
    return [m.bytes for m in moves if m.op.startswith(NAMES) and m.bytes], y


def rand(*shape):
    return torch.randn(*shape, dtype=F64)


# --------------------------------------------------------------------------------------------------- convolution

SLIDES = [  # kernel, stride, padding, dilation, groups
    (3, 1, 1, 1, 1), (3, 1, 0, 1, 1), (3, 2, 1, 1, 1), (5, 1, 2, 1, 2), (3, 1, 2, 2, 1), (1, 1, 0, 1, 1),
    (1, 2, 0, 1, 1), (2, 3, 0, 1, 1), (4, 2, 1, 1, 4), (2, 1, 3, 1, 1), (3, 3, 4, 2, 1), (7, 2, 3, 1, 1)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [12, 11, 7], ids="rows={}".format)
@pytest.mark.parametrize("slide", SLIDES, ids=str)
def test_convolution(slide, rows, ranks):
    """Forward the halo of the input crosses, backward that of the input again and that of its gradient."""
    torch.manual_seed(SEED)
    kernel, stride, padding, dilation, groups = slide
    where = place(list(range(ranks)))

    def f(x, w, b):
        return F.conv2d(x, w, b, stride, padding, dilation, groups)

    operands = [rand(2, 4, rows, 9), rand(8, 4 // groups, kernel, min(kernel, 3)), rand(8)]
    moved, y = compare(f, operands, [S(2), B, B], where)
    there, back = (max(n) * 2 * 4 * 9 * 8 for n in halo(rows, y.shape[2], ranks, kernel, stride, padding, dilation))
    assert moved == [n for n in (there, there, back) if n]


def test_the_halo_of_a_3x3_convolution_is_a_row_each_way():
    where = place([0, 1, 2, 3])
    moved, _ = compare(lambda x, w: F.conv2d(x, w, padding=1), [rand(1, 5, 32, 16), rand(5, 5, 3, 3)], [S(2), B], where)
    row = 5 * 16 * 8
    assert moved == [2 * row, 2 * row, 2 * row]      # of the ranks in the middle; a gather would be 24 rows


@pytest.mark.parametrize("space, dim", [(1, 2), (2, 3), (3, 2), (3, 4)])
def test_convolutions_of_1_to_3_dims(space, dim):
    torch.manual_seed(SEED)
    f = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    moved, y = compare(lambda x, w, b: f(x, w, b, 2, 1), [rand(2, 3, *[7] * space), rand(4, 3, *[3] * space), rand(4)],
                       [S(dim), B, B], place([0, 1, 2]))
    there, back = (max(n) * 2 * 3 * 7 ** (space - 1) * 8 for n in halo(7, 4, 3, 3, 2, 1))
    assert y.shape[dim] == 4 and moved == [there, there, back]


GRIDS = {  # sbp of image, weight, bias, output; groups. 4 channels in, 8 out
    "batch and rows": ((S(0), S(2)), (B, B), (B, B), (S(0), S(2)), 1),
    "rows and batch": ((S(2), S(0)), (B, B), (B, B), (S(2), S(0)), 1),
    "rows and columns": ((S(2), S(3)), (B, B), (B, B), (S(2), S(3)), 1),
    "rows twice": ((S(2), S(2)), (B, B), (B, B), (S(2), S(2)), 1),
    "output channels": ((B, S(2)), (S(0), B), (S(0), B), (S(1), S(2)), 1),
    "input channels": ((S(1), S(2)), (S(1), B), (B, B), (P, S(2)), 1),
    "groups": ((S(1), S(2)), (S(0), B), (S(0), B), (S(1), S(2)), 4),
    "input channels, and a whole weight": ((S(1), S(2)), (B, B), (B, B), (B, S(2)), 1),
    "a weight that is split like a rank's part": ((S(0), S(2)), (S(0), S(1)), (B, S(0)), (S(0), S(2)), 1),
    "a copy": ((B, S(2)), (B, B), (B, B), (B, S(2)), 1),
    "a pending image": ((P, S(2)), (B, B), (B, B), (B, S(2)), 1),
    "a pending weight": ((S(0), S(2)), (P, B), (B, P), (S(0), S(2)), 1),
}


@pytest.mark.parametrize("slide", [(3, 1, 1), (3, 2, 1), (5, 2, 0)], ids=str)
@pytest.mark.parametrize("rows", [8, 7], ids="rows={}".format)
@pytest.mark.parametrize("name", GRIDS)
def test_the_other_axis_may_be_cut_too(name, rows, slide):
    torch.manual_seed(SEED)
    *nds, out, groups = GRIDS[name]
    where, (kernel, stride, padding) = place([[3, 0], [1, 2]]), slide
    operands = [rand(3, 4, rows, 6), rand(8, 4 // groups, kernel, kernel), rand(8)]
    plain = [t.clone().requires_grad_() for t in operands]
    y = F.conv2d(*plain, stride, padding, 1, groups)
    grad = torch.randn_like(y)
    y.backward(grad)
    spread = [gt.from_full(t, where, nd).requires_grad_() for t, nd in zip(operands, nds)]
    got = F.conv2d(*spread, stride, padding, 1, groups)
    assert got.sbp == out
    got.backward(gt.from_full(grad, where, got.spec.layout.dual.sbp))
    torch.testing.assert_close(got.detach().full_tensor(), y.detach())
    for p, q in zip(plain, spread):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_groups_that_do_not_fit_the_ranks_are_made_whole():
    torch.manual_seed(SEED)
    x, w, where = rand(2, 4, 8, 5), rand(4, 1, 3, 3), place([[0, 1], [2, 3], [4, 5]])
    got = F.conv2d(gt.from_full(x, where, (S(1), S(2))), gt.from_full(w, where, (S(0), B)), padding=1, groups=4)
    assert got.sbp == (B, S(2))
    torch.testing.assert_close(got.full_tensor(), F.conv2d(x, w, padding=1, groups=4))


def test_data_parallel_ranks_do_not_hear_of_each_others_images():
    where = place([[0, 1], [2, 3]], ("dp", "sp"))
    moved, _ = compare(lambda x, w: F.conv2d(x, w, padding=1), [rand(4, 3, 8, 5), rand(3, 3, 3, 3)],
                       [(S(0), S(2)), B], where)
    assert moved == [2 * 3 * 5 * 8] * 3              # a row of two images


@pytest.mark.parametrize("seed", range(SEED, SEED + 60))
def test_any_convolution(seed):
    """Drawn: sizes, kernels, which dims are cut. Ranks without rows; windows over several ranks, or over the edge."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    space = rng.choice([1, 2, 2, 3])
    where = place(rng.choice([[0, 1], [2, 0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]], [[1], [0]]]))
    while True:
        size = [rng.randint(1, 9) for _ in range(space)]
        kernel, stride, padding, dilation = ([rng.randint(least, most) for _ in size]
                                             for least, most in ((1, 4), (1, 4), (0, 4), (1, 3)))
        if all(n + 2 * p >= d * (k - 1) + 1 for n, k, p, d in zip(size, kernel, padding, dilation)):
            break
    groups = rng.choice([1, 1, 2])
    nd = tuple(S(rng.choice([0, *range(2, 2 + space)])) for _ in range(where.ndim))
    f = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    compare(lambda x, w, b: f(x, w, b, stride, padding, dilation, groups),
            [rand(rng.randint(1, 3), 4, *size), rand(2, 4 // groups, *kernel), rand(2)], [nd, B, B], where)


def test_what_is_frozen_is_not_asked_for():
    """With a frozen weight only the gradient of the image moves backward; for an image of data nothing does but the
    window again."""
    where, row = place([0, 1]), 3 * 5 * 8
    for image in (True, False):
        x, w = (gt.from_full(t, where, s) for t, s in ((rand(1, 3, 8, 5), S(2)), (rand(3, 3, 3, 3), B)))
        (x if image else w).requires_grad_()
        with gt.record() as found:
            F.conv2d(x, w, padding=1).sum().backward()
        kinds = [(type(m.src).__name__, m.bytes) for m in found if m.op.startswith(NAMES) and m.bytes]
        assert kinds == [("Layout", row), ("RankRegions" if image else "Layout", row)]


def test_a_plain_weight_counts_as_broadcast():
    torch.manual_seed(SEED)
    x, w = rand(2, 3, 8, 5), nn.Parameter(rand(4, 3, 3, 3))
    got = F.conv2d(gt.from_full(x, place([0, 1]), S(2)), w, padding=1)
    assert got.sbp == (S(2),)
    torch.testing.assert_close(got.full_tensor(), F.conv2d(x, w, padding=1))


def test_transposed_convolutions_are_left_to_their_rule():
    x, w = rand(2, 3, 4, 5), rand(3, 2, 3, 3)
    got = F.conv_transpose2d(gt.from_full(x, place([0, 1]), S(2)), gt.from_full(w, place([0, 1]), B), stride=2)
    assert got.sbp == (S(0),)                        # split along the batch instead, by an all-to-all
    torch.testing.assert_close(got.full_tensor(), F.conv_transpose2d(x, w, stride=2))


def test_a_mistake_is_told_of_the_whole_image():
    """In torch's words, as if the space were whole; a part of the image, or a window, is none of the user's concern."""
    x, w, said = rand(2, 3, 8, 5), gt.from_full(rand(4, 5, 3, 3), place([0, 1]), B), set()
    for nd in (S(0), S(2)):
        with pytest.raises(RuntimeError) as error:
            F.conv2d(gt.from_full(x, place([0, 1]), nd), w)
        said.add(str(error.value))
    assert len(said) == 1


def said_of(f):
    try:
        return list(f().shape)
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_options_that_torch_refuses_are_refused_in_every_layout(transposed):
    x, w, where = rand(2, 3, 8), rand(3, 3, 3), place([0, 1])
    for stride, padding, dilation, more in itertools.product((1, 2, 0, -1), (0, -1), (1, 0, -1), (0, -1)):
        options = None, [stride], [padding], [dilation], transposed, [more], 1
        told = said_of(lambda: torch.ops.aten.convolution(x, w, *options))
        for nd in (S(0), S(1), S(2), B):
            ours = gt.from_full(x, where, nd), gt.from_full(w, where, B)
            assert said_of(lambda: torch.ops.aten.convolution(*ours, *options)) == told, (options, nd)


def test_halos_are_boxings_like_all_others():
    """They can be forbidden, and have a budget."""
    x, w = (gt.from_full(t, place([0, 1]), s) for t, s in ((rand(1, 3, 8, 5), S(2)), (rand(3, 3, 3, 3), B)))
    row = 3 * 5 * 8
    with gt.boxing("forbid"), pytest.raises(BoxingError, match="convolution"):
        F.conv2d(x, w, padding=1)
    with gt.boxing(budget=row):
        F.conv2d(x, w, padding=1)
    with gt.boxing(budget=row - 1), pytest.raises(BoxingError, match="convolution"):
        F.conv2d(x, w, padding=1)
    with gt.boxing("forbid"):
        F.conv2d(x, w[:, :, :1, :1])                 # a kernel of one row needs no halo


def test_16_bits_and_other_memory_formats():
    torch.manual_seed(SEED)
    where = place([0, 1, 2])
    x, w = (t.to(memory_format=torch.channels_last) for t in (torch.randn(2, 4, 9, 6), torch.randn(4, 4, 3, 3)))
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        plain = [t.detach().to(dtype).clone().requires_grad_() for t in (x, w)]
        spread = [gt.from_full(t.detach(), where, s).requires_grad_() for t, s in zip(plain, (S(2), B))]
        for t in plain, spread:
            F.avg_pool2d(F.conv2d(*t, padding=1), 3, 2, 1).square().sum().backward()
        for p, q in zip(plain, spread):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=near, atol=near * float(p.grad.abs().max()))


# ------------------------------------------------------------------------------------------------------- pooling

MAX = [  # kernel, stride, padding, dilation, ceil
    (2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 1, True), (2, 3, 1, 2, True), (3, 2, 1, 2, False),
    (1, 2, 0, 1, False)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [12, 11, 5], ids="rows={}".format)
@pytest.mark.parametrize("slide", MAX, ids=str)
def test_max_pool(slide, rows, ranks):
    """The values, to the bit, the indices, and the bytes: backward only the halo of the gradient."""
    torch.manual_seed(SEED)
    kernel, stride, padding, dilation, _ = slide
    x, where = rand(2, 3, rows, 7), place(list(range(ranks)))
    x[0, 0], x[1, 1] = -torch.inf, 0.0                # nothing but the lowest; nothing but ties
    moved, y = compare(lambda x: F.max_pool2d(x, *slide), [x], [S(2)], where, equal=True)
    there, back = (max(n) * 2 * 3 * 7 * 8 for n in halo(rows, y.shape[2], ranks, kernel, stride, padding, dilation))
    assert moved == [n for n in (there, back) if n]
    got, expected = (F.max_pool2d(t, *slide, return_indices=True)[1] for t in (gt.from_full(x, where, S(2)), x))
    assert got.sbp == (S(2),) and got.full_tensor().equal(expected)


AVERAGE = [  # kernel, stride, padding, ceil, count_include_pad, divisor
    (2, 2, 0, False, True, None), (3, 2, 1, False, True, None), (3, 2, 1, True, True, None),
    (3, 2, 1, False, False, None), (4, 3, 2, True, False, None), (3, 1, 1, True, False, 5), (2, 3, 0, True, True, None)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [12, 11, 5], ids="rows={}".format)
@pytest.mark.parametrize("slide", AVERAGE, ids=str)
def test_avg_pool(slide, rows, ranks):
    torch.manual_seed(SEED)
    kernel, stride, padding, *_ = slide
    where = place(list(range(ranks)))
    moved, y = compare(lambda x: F.avg_pool2d(x, *slide), [rand(2, 3, rows, 7)], [S(2)], where)
    there, back = (max(n) * 2 * 3 * 7 * 8 for n in halo(rows, y.shape[2], ranks, kernel, stride, padding))
    assert moved == [n for n in (there, back) if n]


@pytest.mark.parametrize("f", [F.max_pool2d, F.avg_pool2d, F.max_pool3d, F.avg_pool3d, F.max_pool1d, F.avg_pool1d],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [[0, 1, 2], [[0, 1], [2, 3]]], ids=str)
def test_pooling_of_any_dims(f, ranks):
    """Every way to cut batch, channels and space; images without a batch too."""
    where, space = place(ranks), int(f.__name__[-2])
    for lead, nd in itertools.product(((2, 3), (3,)), itertools.product(range(2 + space), repeat=where.ndim)):
        torch.manual_seed(SEED)
        x = rand(*lead, *(7, 6, 5)[:space])
        if len(lead) <= max(nd) < x.dim():
            compare(lambda x: f(x, 3, 2, 1), [x], [tuple(map(S, nd))], where)
            if "max" in f.__name__:
                got, expected = (f(t, 3, 2, 1, return_indices=True)[1]
                                 for t in (gt.from_full(x, where, tuple(map(S, nd))), x))
                assert got.full_tensor().equal(expected), nd


def test_a_mean_over_split_space_is_a_sum_of_means():
    """A mean over all of space moves a number per channel, and nothing backward."""
    torch.manual_seed(SEED)
    x, where = rand(2, 3, 9, 5), place([0, 1])
    plain, spread = x.clone().requires_grad_(), gt.from_full(x, where, S(2)).requires_grad_()
    F.adaptive_avg_pool2d(plain, 1).sigmoid().sum().backward()
    with gt.record() as moves:
        F.adaptive_avg_pool2d(spread, 1).sigmoid().sum().backward()
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
    assert spread.grad.sbp == (S(2),) and [m.bytes for m in moves if m.bytes] == [2 * 3 * 8]


# ------------------------------------------------------------------------------------------------ whole networks


@pytest.mark.parametrize("ranks, nd", [([0, 1], S(2)), ([0, 1, 2], S(2)), ([0, 1], S(3)), ([0, 1, 2, 3], S(2)),
                                       ([[0, 1], [2, 3]], (S(0), S(2)))], ids=str)
@pytest.mark.parametrize("n", [4, 3])
def test_a_residual_network_trains_as_on_one_device(ranks, nd, n):
    make, data, labels = NETWORKS["residual"]
    torch.manual_seed(SEED)
    plain, x, target = make().double(), data(n).double(), labels(n)
    where = place(ranks)
    model = copy.deepcopy(plain).to_global(where, B)
    expected = train(plain, x, target)
    label_nd = [S(0) if s == S(0) else B for s in (nd if isinstance(nd, tuple) else (nd,))]
    with gt.record() as moves:
        got = train(model, gt.from_full(x, where, nd), gt.from_full(target, where, label_nd))
    torch.testing.assert_close(got, expected)
    gathered = [m for m in moves if m.bytes > 8 * 16 * 4 and m.op not in ("gradient", "full_tensor")
                and not m.op.startswith(NAMES)]
    if len(where.flat) == 2:
        assert not gathered, "\n".join(map(str, gathered))


def test_what_a_residual_network_moves():
    """Halos of its 3x3 convolutions, forward and twice backward; nothing for kernels that do not reach over a seam."""
    make, data, labels = NETWORKS["residual"]
    torch.manual_seed(SEED)
    model, where = make().double(), place([0, 1])
    model = model.to_global(where, B)
    with gt.record() as moves:
        train(model, gt.from_full(data(4).double(), where, S(2)), gt.from_full(labels(4), where, B), steps=1)
    image, row = 4 * 3 * 8 * 8, 4 * 8 * 4 * 8         # a row of the images, and one behind the pooling
    moved = [m.bytes for m in moves if m.op.startswith(NAMES) and m.bytes]
    assert moved == [image, row, row, row, row, row, row, image]


# ------------------------------------------------------------------------------------------------- real processes


@pytest.mark.long
@pytest.mark.processes
def test_in_real_processes(tmp_path):
    """The same values and the same bytes in one process, over shared memory, and over gloo."""
    program, seen = PROGRAMS / "halo.py", []
    ways = {"alone": ([PYTHON], {"GLOBALTENSOR_RANKS": "2"}), "shared": ([*RUN, "-n", 2], {}),
            "gloo": ([*RUN, "-n", 2], {"GLOBALTENSOR_NATIVE": "0"})}
    for name in ways:
        (tmp_path / name).mkdir()
    good_all(*[([*launch, program, tmp_path / name], more) for name, (launch, more) in ways.items()])
    for name in ways:
        found = results(tmp_path / name)
        assert sorted(found) == ([0] if name == "alone" else [0, 1])
        seen += found.values()
    assert all(other["moves"] == seen[0]["moves"] and seen[0]["moves"] for other in seen)
    for other in seen:
        torch.testing.assert_close([torch.tensor(v, dtype=F64) for v in other["values"]],
                                   [torch.tensor(v, dtype=F64) for v in seen[0]["plain"]])


# ---------------------------------------------------------------------------------------------------- the example


@pytest.fixture
def vision():
    return runpy.run_path(str(ROOT / "examples" / "vision.py"))


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (1, 3), (2, 1)], ids=str)
def test_the_example_trains_as_plain_torch(vision, grid, capsys):
    losses, worst = vision["main"](f"--steps 3 --size 16 --batch 8 --verify --dp {grid[0]} --sp {grid[1]}".split())
    assert worst < 1e-5 and losses[-1] < losses[0]
    assert "bytes" in capsys.readouterr().out


@pytest.mark.processes
def test_the_example_in_processes():
    options = "--steps 2 --size 16 --batch 4 --dp 1 --sp 2 --verify".split()
    said = good([*RUN, "-n", 2, ROOT / "examples" / "vision.py", *options])
    assert said.count("largest difference") == 1


