"""A view is a view: what is written through one reaches its base, and what is read through one is what the base holds.

The oracle is plain torch, on the programs of `programs/views.py`: a table, and random ones that hypothesis draws from
the seed printed at the top of the run (set VIEWS_SEED for others).
"""
from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good
from hypothesis import HealthCheck, given, seed, settings, strategies
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.common_methods_invocations import op_db

import globaltensor as gt
from globaltensor.errors import InPlaceError, MixedPlacementError, PlacementError
from globaltensor.runtime.native import torch_ext

sys.path.insert(0, str(PROGRAMS))
import views

SEED = int(os.environ.get("VIEWS_SEED") or 20_261_122)
print(f"tests/test_views.py: VIEWS_SEED={SEED}")
EXAMPLES = 120
# What needs other memory than the view's; and a target of another shape than the result, which no global tensor takes.
REFUSED = {"as_strided", "addbmm"}
RANDOM = {"normal", "uniform", "exponential", "cauchy", "geometric", "log_normal", "bernoulli", "nn.functional.rrelu",
          "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout",
          "nn.functional.feature_alpha_dropout"}
THREE = gt.placement("cpu", [0, 1, 2])
B, S, P = gt.sbp.broadcast, gt.sbp.split, gt.sbp.partial_sum


@pytest.mark.check
@pytest.mark.parametrize("program", views.statements(views.WRITES))
def test_writes_through_views(program):
    for where, sbp in views.layouts(gt.world_size()):
        views.check_write(program, where, sbp)


@pytest.mark.parametrize("program", views.statements(views.MOVES_NOTHING))
def test_what_a_rank_can_write_by_itself_moves_nothing(program):
    x = gt.from_full(views.plain_x(), THREE, S(0))
    with gt.boxing("forbid"):
        views.execute(program, x)


@pytest.mark.parametrize("program, most", [("x[1:4] = y", 3 * 32), ("x[1] = y[0]", 2 * 32), ("x[0].cumsum_(0)", 2 * 32),
                                           ("x[2:4].tril_()", 2 * 64), ("x[1, torch.tensor([0, 2])] = 5.", 2 * 32)])
def test_a_write_moves_no_more_than_it_writes(program, most):
    """And reads no more, where it must."""
    x = gt.from_full(torch.rand(60, 4, dtype=torch.float64), THREE, S(0))
    y = gt.from_full(torch.rand(3, 4, dtype=torch.float64), THREE, S(1))
    with gt.record() as moves:
        exec(program, {"x": x, "y": y, "torch": torch})
    assert sum(move.bytes for move in moves) <= most


@pytest.mark.parametrize("program, most", [("x[2]", 32), ("x[59]", 32), ("x[10:50][3:5]", 40 * 32), ("x[7:9]", 64),
                                           ("x[::30, 1:]", 48), ("x.mT[:, 4]", 32)])
def test_a_read_moves_no_more_than_it_reads(program, most):
    """By way of Python, taught to the native dispatcher, and by it."""
    plain = torch.rand(60, 4, dtype=torch.float64)
    names = {"x": gt.from_full(plain, THREE, S(0))}
    for _ in range(3):
        with gt.record() as moves:
            found = eval(program, names).clone()
        assert sum(boxing.bytes for boxing in moves) <= most, list(moves)
        torch.testing.assert_close((eval(program, names) + found).full_tensor(), 2 * eval(program, {"x": plain}))


def test_a_base_of_views_is_not_turned():
    y = gt.from_full(torch.rand(4, 4), THREE, S(0)).requires_grad_() * 1
    y.unsqueeze_(0).squeeze_(0)
    y[1:] + 1
    y.t_()                                           # the view is gone
    view = y[1:]
    with pytest.raises(InPlaceError, match="t_ of a tensor whose gradient is wanted, and that has views"):
        y.t_()
    y.detach_()
    assert view.requires_grad


def test_a_view_moves_nothing_until_it_is_read():
    x = gt.from_full(views.plain_x(), THREE, S(0))
    with gt.record() as moves:
        row, (a, b) = x[1], x.split(3)
        assert row.shape == (4,) and a.stride() == (4, 1) and not moves
        row.sum(), row.sum(), a.sum(), b.sum()
        assert len(moves) == 2                       # one for the row, one for both halves
        assert moves[0].src is x.spec.layout and " -> " in str(moves[0])
        x.add_(1)
        row.sum()
        assert len(moves) == 3


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@seed(SEED)
@given(strategies.data())
def test_random_programs(data):
    views.check_random(lambda choices: data.draw(strategies.sampled_from(list(choices))), gt.world_size())


def test_gradients_through_written_views():
    plain = torch.rand(6, 4, dtype=torch.float64)
    for sbp in (S(0), S(1), B):
        grads = []
        for x in (plain.clone().requires_grad_(), gt.from_full(plain, THREE, sbp).requires_grad_()):
            y = x * 1
            y[2][1] = 7
            y[1:3].mul_(2)
            y[3] = x[0] * 2
            row = y[5]
            row.add_(x[1])
            (y * y).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1].full_tensor(), grads[0])


def _pruned(model):
    prune.l1_unstructured(model, "weight", 0.5)
    return model.weight


def _initialized(model):
    nn.init.sparse_(model.weight, 0.5, generator=torch.Generator().manual_seed(0))
    return (model.weight == 0).sum(0)


def _orthogonal(model):
    return parametrizations.orthogonal(model).weight @ model.weight.T


@pytest.mark.parametrize("change", [_pruned, _initialized, _orthogonal], ids=lambda change: change.__name__)
@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_what_torch_does_to_weights(change, sbp):
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    ours = nn.Linear(6, 4).double()
    ours.load_state_dict(model.state_dict())
    ours.to_global(THREE, lambda name, p: sbp if p.dim() == 2 else B)
    torch.testing.assert_close(change(ours).full_tensor(), change(model))


def test_views_that_are_read_late():
    """By way of `.data`, a detached alias, and the gradient."""
    x = gt.from_full(views.plain_x(), THREE, S(0)).requires_grad_()
    v = x.data[1:3]
    x.data.fill_(5)
    assert v.mean().item() == 5
    with torch.no_grad():
        x.fill_(6)
    assert v.mean().item() == 6
    x.sum().backward()
    flat = x.grad.view(-1)
    (x * 2).sum().backward()
    assert flat.sum().item() in (24, 72) and x.grad.view(-1).sum().item() == 72


def test_a_copy_between_placements():
    for src, dst in (((THREE, S(0)), (gt.placement("cpu", [1, 2]), S(1))), ((gt.placement("cpu", [3]), B), (THREE, P))):
        grads = []
        zeros = torch.zeros(6, 4, dtype=torch.float64)
        ours = gt.from_full(views.plain_x(), *src), gt.from_full(zeros, *dst)
        for a, b in ((views.plain_x(), zeros), ours):
            a.requires_grad_()
            c = b * 1
            c.copy_(a)
            c[1:3].copy_(a[0])
            (c * c).sum().backward()
            grads.append((c, a.grad))
        for want, got in zip(*grads):
            torch.testing.assert_close(got.full_tensor(), want)
        assert c.placement == dst[0]


def test_arrays_are_read_only():
    x = gt.from_full(views.plain_x(), THREE, S(0))
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[:] = 1
    array = np.array(x)
    array[:] = 1
    assert torch.equal(x.full_tensor(), views.plain_x())


CUTS = {"slice": lambda x: x[:, 1:], "step": lambda x: x[:, ::2], "transposed": lambda x: x.t()[:8].t(),
        "row": lambda x: x[1]}


@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=str)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_windows_of_views(sbp, cut):
    """torch.stft makes them by strides, of whatever it is given; where rows are whole, nothing moves."""
    where, plain = gt.placement("cpu", [0, 1]), torch.rand(4, 24, dtype=torch.float64, requires_grad=True)
    x = gt.from_full(plain.detach(), where, B).to_global(sbp=sbp).detach().requires_grad_()
    options = {"window": torch.hann_window(6).double(), "center": False, "return_complex": True}
    with gt.boxing("forbid" if sbp == B or sbp == S(0) and cut(x).dim() == 2 else "auto"):
        got = torch.stft(cut(x), 6, 2, **options)
    want = torch.stft(cut(plain), 6, 2, **options)
    torch.testing.assert_close(got.full_tensor(), want)
    for y in (got, want):
        y.abs().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    if sbp != P:
        written = gt.from_full(plain.detach(), where, sbp), plain.detach().clone()
        for t in written:
            row = cut(t)
            row.as_strided((*row.shape[:-1], 2, 3), (*row.stride()[:-1], 3 * row.stride(-1), row.stride(-1))).fill_(7)
        assert torch.equal(written[0].full_tensor(), written[1])


@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_as_strided_of_views(sbp):
    """Of the memory at the end of the chain; also written to. Of a view, no offset in its memory."""
    for view in (lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x[2:4].t(), lambda x: x[1:5].t()[1:]):
        plain, x = plain_pair = views.plain_x(), gt.from_full(views.plain_x(), THREE, sbp)
        for t in plain_pair:
            view(t).as_strided((2, 2), (2, 5)).mul_(-1)
        torch.testing.assert_close(x.full_tensor(), plain)
    assert torch.equal(x.as_strided((3,), (5,), 1).full_tensor(), plain.as_strided((3,), (5,), 1))
    if sbp != B:
        for beyond in (lambda: x[1:].as_strided((2,), (3,), 1), lambda: x[:2].as_strided((30,), (3,))):
            with pytest.raises((PlacementError, RuntimeError), match="strides speak of memory|out of bounds"):
                beyond().sum()


VIEWS_IN_MEMORY = {
    "itself": lambda x: x, "turned": lambda x: x.t(), "rows": lambda x: x[1:], "columns": lambda x: x[:, ::2],
    "turned rows": lambda x: x[2:5].t()}


@pytest.mark.parametrize("kind", ["copy", "scatter"])
@pytest.mark.parametrize("view", VIEWS_IN_MEMORY)
@pytest.mark.parametrize("sbp", [S(0), S(1), B, gt.sbp.partial_sum], ids=str)
def test_copies_of_strided_memory(sbp, view, kind):
    """Right, or refused where the memory has gaps that a boxing closes."""
    def run(x):
        x = VIEWS_IN_MEMORY[view](x)
        if kind == "copy":
            return torch.as_strided_copy(x, (2, 3), (5, 1))
        return torch.as_strided_scatter(x, torch.arange(-6., 0, dtype=x.dtype).view(2, 3), (2, 3), (5, 1))

    want = run(views.plain_x())
    for _ in range(2):                               # decided, and known
        try:
            got = run(gt.from_full(views.plain_x(), THREE, sbp))
            got.shards                               # noqa: B018  done when it is read
        except PlacementError as error:
            assert "strides speak of memory" in str(error) and view in ("columns",) and sbp != B
            return
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0)


@pytest.mark.parametrize("change", [lambda x: x[:, 0:2].fill_diagonal_(-1), lambda x: x[1:5].fill_diagonal_(-1),
                                    lambda x: x.fill_diagonal_(-1, True)])
def test_diagonals_of_views(change):
    for sbp in (S(0), S(1), B):
        plain, x = views.plain_x(), gt.from_full(views.plain_x(), THREE, sbp)
        change(plain), change(x)
        torch.testing.assert_close(x.full_tensor(), plain)


TURNS = {"t_": lambda v: v.t_(), "transpose_": lambda v: v.transpose_(0, 1), "unsqueeze_": lambda v: v.unsqueeze_(0),
         "squeeze_": lambda v: v.unsqueeze_(1).squeeze_(1)}


@pytest.mark.skipif(torch_ext is None, reason="torch has no way to do it in Python")
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("written_after", [False, True])
def test_gradients_of_views_that_were_turned_in_place(turn, mode, written_after):
    """As square ones, which would take a gradient that is not turned."""
    def gradient(x):
        y = x.requires_grad_() * 1
        v = y[:].mT[1:]
        with mode():
            turn(v)
        if written_after:
            with torch.no_grad():
                v.mul_(2)
        return torch.autograd.grad((v * torch.arange(12.0, dtype=torch.float64).reshape(v.shape)).sum(), x)[0]

    x = torch.rand(4, 4, dtype=torch.float64)
    for sbp in (S(0), S(1), B, P):
        found = gradient(gt.from_full(x.detach(), THREE, sbp))
        torch.testing.assert_close(found.full_tensor(), gradient(x.clone()), msg=str(sbp))


OVERLAPS = {                                         # of a vector; True: refused
    "x[1:].copy_(x[:-1])": True, "x[1:].mul_(x[:-1])": True, "x[1:] = x[:-1]": True, "x.div_(x[0])": True,
    "x[1:].addcmul_(x[:-1], x[:-1])": True, "x[1:].lerp_(x[:-1], 0.5)": True, "x[:2] += x[0]": True,
    "x.index_add_(0, i, x[:3])": True, "x.index_copy_(0, i, x[:3])": True, "x.scatter_(0, i, x[:3])": True,
    "x.scatter_(0, torch.arange(6), x)": True, "x.index_put_((torch.arange(6),), x)": True,
    "x[1:].index_add_(0, i, x[:3])": True, "torch._foreach_mul_([x[1:]], [x[:-1]])": True,
    "x.view(2, 3).t().contiguous().t()[1:].add_(x[3:])": False, "x[::2].add_(x[1::2])": False, "x[1:] *= 2": False,
    "x[:3].copy_(x[3:])": False, "x[2:4].mul_(x[2:4])": False, "x[::2].copy_(x[:3])": False, "x.mul_(x)": False,
    "x[:2].fill_(x[0])": False, "x.masked_fill_(x > 0, x[0])": False, "x[2:].index_add_(0, i, x[:3].clone())": False,
    "x.copy_(x.flip(0))": False,
}


@pytest.mark.parametrize("text", OVERLAPS)
def test_writes_to_memory_that_is_read(text):
    """Refused as torch does, in its words, also where what is read was boxed."""
    def refusal(x):
        for _ in range(3):                           # with native code the second is cached
            try:
                exec(text, {"torch": torch}, {"x": x, "i": torch.tensor([2, 1, 0])})
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return ""

    want = torch.arange(1.0, 7.0)
    assert bool(text_of := refusal(want)) == OVERLAPS[text]
    for sbp in (S(0), B):
        x = gt.from_full(torch.arange(1.0, 7.0), THREE, B).to_global(sbp=sbp)
        other = gt.from_full(torch.ones(6), THREE, B).to_global(sbp=sbp)
        for _ in range(3):                           # whether or not such a call came before, of other memory
            other[1:].copy_(x[:-1])
            other.index_add_(0, torch.tensor([2, 1, 0]), x[:3])
        assert refusal(x) == text_of, sbp
        torch.testing.assert_close(x.full_tensor(), want)


MASKS = {                                            # of a vector of bools
    "x[x] = 0": False, "x[x] = torch.tensor(False)": False, "x.index_put_((x,), torch.tensor([False]))": False,
    "x[x.view(6)] = 0": False, "x[~x] = x[0].clone()": False, "x[x] = x[x]": True, "x[1:][x[:-1]] = 0": True,
    "x.index_put_((x,), torch.tensor(True), accumulate=True)": True,
}


@pytest.mark.parametrize("text", MASKS)
def test_a_mask_may_be_what_it_fills(text):
    def result(x):
        try:
            exec(text, {"torch": torch}, {"x": x})
        except RuntimeError as error:
            assert "single memory location" in str(error), text
            return None
        return x

    mask = torch.tensor([True, False, True, True, False, True])
    assert ((want := result(mask.clone())) is None) == MASKS[text]
    for sbp in (S(0), B):
        got = result(gt.from_full(mask, THREE, B).to_global(sbp=sbp))
        assert (got is None) == MASKS[text] and (got is None or torch.equal(got.full_tensor(), want)), sbp


WINDOWS = {
    "unfold": lambda x: x.unfold(0, 3, 1), "as_strided": lambda x: x.as_strided((4, 3), (1, 1)),
    "of rows": lambda x: x.view(2, 3).unfold(1, 2, 1), "turned": lambda x: x.unfold(0, 3, 1).t(),
    "some": lambda x: x.unfold(0, 3, 1)[1:, :2], "apart": lambda x: x.as_strided((2, 2), (3, 2)),
}
WINDOW_WRITES = {
    "index": lambda w: w.__setitem__(torch.tensor([0, 1]), 7.), "mask": lambda w: w.__setitem__(w > 2, 7.),
    "masked_fill_": lambda w: w.masked_fill_(w < 2, 7.), "fill": lambda w: w.index_fill_(0, torch.tensor([1]), 7),
    "accumulate": lambda w: w.index_put_((torch.tensor([1]),), torch.tensor(7.), accumulate=True),
    "scatter_": lambda w: w.scatter_(0, torch.zeros_like(w[:1], dtype=torch.int64), 7.), "add_": lambda w: w.add_(1),
    "mul_": lambda w: w.mul_(w.clone()), "fill_": lambda w: w.fill_(7), "copy_": lambda w: w.copy_(w.clone()),
    "select": lambda w: w[0].add_(1), "relu_": lambda w: w.sub_(3).relu_(), "cumsum_": lambda w: w[1:].cumsum_(0),
    "out": lambda w: torch.add(w[:1].clone(), 1, out=w[:1]),
}


@pytest.mark.parametrize("write", WINDOW_WRITES)
@pytest.mark.parametrize("view", WINDOWS)
def test_writes_into_windows_that_overlap(view, write):
    """Each element has one value, whichever windows are written to."""
    want = torch.arange(6.)
    WINDOW_WRITES[write](WINDOWS[view](want))
    for sbp in (S(0), P, B):
        x = gt.from_full(torch.arange(6.), THREE, B).to_global(sbp=sbp)
        other = x[1:]
        assert other.sum() == 15
        WINDOW_WRITES[write](WINDOWS[view](x))
        assert torch.equal(x.full_tensor(), want), sbp
        assert torch.equal(other.full_tensor(), want[1:]), sbp


@pytest.mark.parametrize("sbp", [S(0), S(1), P, B], ids=str)
def test_writes_into_a_column_of_windows_that_overlap(sbp):
    """Windows that need no boxing, and a column of them that does."""
    want = torch.arange(28.).view(7, 4)
    x = gt.from_full(want.clone(), THREE, B).to_global(sbp=sbp)
    for y in (want, x):
        y.unfold(0, 2, 1)[:, 1].index_fill_(0, torch.tensor([0, 3]), 0)
    assert torch.equal(x.full_tensor(), want)


EXPANDED = {
    "one": lambda x: x.expand(3, 4)[2, 2].add_(5), "assigned": lambda x: x.expand(3, 4)[2, 2].copy_(x[0, 0] * 7),
    "filled": lambda x: x.expand(3, 4)[2].zero_(), "diagonal": lambda x: x.expand(3, 4).fill_diagonal_(7),
    "column": lambda x: x.expand(2, 3, 4)[1, 1:, 2].mul_(2), "flat": lambda x: x.expand(3, 4)[:, 1].cumsum_(0),
    "turned": lambda x: x.expand(3, 4)[1:].t()[1].copy_(torch.ones(2) * 8),
    "scattered": lambda x: x.expand(3, 4).diagonal().mul_(3), "row": lambda x: x.expand(3, 4)[1:].mul_(3),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_writes_into_what_was_expanded(name):
    """A view of it whose elements are apart in memory takes them; any other is refused."""
    def result(x):
        try:
            EXPANDED[name](x)
        except RuntimeError:
            return None
        return x

    want = result(torch.arange(1.0, 4.0).view(3, 1))
    assert (want is None) == (name == "row")
    for sbp in (S(0), S(1), B, P):
        got = result(gt.from_full(torch.arange(1.0, 4.0).view(3, 1), THREE, B).to_global(sbp=sbp))
        assert (got is None) == (want is None)
        if got is not None:
            assert torch.equal(got.full_tensor(), want), sbp


def test_errors():
    x = gt.from_full(views.plain_x(), THREE, S(0))
    with pytest.raises(RuntimeError, match="more than one element"):
        x[1].expand(3, 4).add_(1)
    with pytest.raises(InPlaceError, match="several elements are one in memory"):
        x[1].expand(3, 4).masked_fill_(x[:3] > 3, 1)
    with pytest.raises(InPlaceError, match="needs a boxing"):
        x.view(torch.int32)[2].add_(1)
    with pytest.raises(MixedPlacementError):
        x[0] = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp=B)
    for wrong in ("x[0].add_(torch.ones(3))", "x[1:3].copy_(torch.ones(5))", "x[2].view(torch.int64).mul_(0.5)"):
        with pytest.raises(RuntimeError):
            views.execute(wrong, x)
    assert torch.equal(x.full_tensor(), views.plain_x())


@pytest.mark.long
def test_in_place_ops_of_torch_on_views():
    """Every op of torch's database that has an in-place variant, on slices that cut the split dim."""
    wrong, calls = [], 0
    for op in op_db:
        function = op.get_inplace()
        dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in op.dtypes), None)
        if function is None or dtype is None or op.name in REFUSED:
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 4):
            t = sample.input
            if not isinstance(t, torch.Tensor) or not t.dim() or not t.numel():
                continue
            for base, sbp, view in ((torch.cat([t[:1], t, t[-1:]]), S(0), lambda b: b[1:-1]),
                                    (torch.stack([t, t], -1), S(t.dim()), lambda b: b[..., 1])):
                want, x = base.clone(), gt.from_full(base, THREE, sbp)
                try:
                    function(view(want), *sample.args, **sample.kwargs)
                except (RuntimeError, ValueError):   # not of this sample
                    continue
                calls += 1
                function(view(x), *sample.args, **sample.kwargs)
                if op.name not in RANDOM and not torch.allclose(x.full_tensor(), want, equal_nan=True):
                    wrong.append((op.name, sbp, sample))
    assert calls > 600 and not wrong, wrong


def test_a_gradient_that_is_a_view():
    views.check_gradient_that_is_a_view()


def test_without_native_code():
    good([PYTHON, PROGRAMS / "views.py", SEED, 20], environment(GLOBALTENSOR_NATIVE="0"), timeout=120)


@pytest.mark.processes
@pytest.mark.parametrize("ranks, native", [(2, "1"), pytest.param(3, "0", marks=pytest.mark.long)])
def test_on_processes(ranks, native):
    good([*RUN, "-n", ranks, PROGRAMS / "views.py", SEED, 20], environment(GLOBALTENSOR_NATIVE=native), timeout=240)


_LAZY = {"conjugated": lambda x: x.conj(), "adjoint": lambda x: x.mH, "negated": torch._neg_view,
         "both": lambda x: torch._neg_view(x.conj()), "neither": lambda x: x}
_BOXED = {"row": lambda x: x[0], "slice": lambda x: x[1:], "slice of a row": lambda x: x[0][1:],
          "flat": lambda x: x.reshape(-1), "windows": lambda x: x.unfold(0, 2, 1), "diagonal": lambda x: x.diagonal()}
_ENDED = {"real": lambda x: x.real, "imag": lambda x: x.imag, "conjugated": lambda x: x.conj().real,
          "part": lambda x: x[..., 0].real, "part of the real": lambda x: x.real[0],
          "negated": lambda x: torch._neg_view(x).imag, "pairs": lambda x: torch.view_as_real(x.resolve_conj())}


@pytest.mark.parametrize("lazy", _LAZY)
@pytest.mark.parametrize("boxed", _BOXED)
def test_what_is_lazy_ends_beyond_a_boxing(boxed, lazy):
    """A boxing sends elements as they are read, so a view that ends the conjugation finds none."""
    def derived(x, end):
        x = x.detach().requires_grad_()
        y = end(_BOXED[boxed](_LAZY[lazy](x)))
        y.square().sum().backward()
        return [t.full_tensor() if isinstance(t, gt.GlobalTensor) else t for t in (y.detach(), x.grad)]

    x = torch.randn(4, 3, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    three, grid = gt.placement("cpu", [0, 1, 2]), gt.placement("cpu", [[0, 1], [2, 3]])
    for where, sbp in ((three, "S(0)"), (three, "S(1)"), (grid, ("S(0)", "S(2)"))):
        for name, end in _ENDED.items():
            for _ in range(2):
                for got, want in zip(derived(gt.from_full(x, where, sbp), end), derived(x, end), strict=True):
                    torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
