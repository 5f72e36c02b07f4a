"""Writes in place that add up, or reduce, what is split: each rank does its own, and the result alone crosses ranks.

The bytes follow from the result: a sum of T bytes that is pending on n ranks takes 2 (n-1)/n T to become whole, and
(n-1)/n T to become split. Values are compared with plain torch, for every layout of every operand.
"""
from __future__ import annotations

import itertools

import pytest
import torch
from harness import PROGRAMS as FOLDER, RUN, environment, good
from shards import place

import globaltensor as gt

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
ROWS, COLUMNS = 7, 5                                 # of the target; uneven on all worlds
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


def columns(i, x):
    """The index for scatter: the same row for each element of a row of x."""
    return i[:, None].expand(-1, x.shape[1])


# what is done to t [ROWS, COLUMNS] by an index i and x, which has COLUMNS columns
PROGRAMS = {
    "index_add_": lambda t, i, x: t.index_add_(0, i, x, alpha=2),
    "scatter_add_": lambda t, i, x: t.scatter_add_(0, columns(i, x), x),
    "index_put_": lambda t, i, x: t.index_put_((i,), x, accumulate=True),
    "put_": lambda t, i, x: t.put_(columns(i, x) * t.shape[1] + 1, x, accumulate=True),
    "scatter_reduce_ sum": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "sum"),
    "scatter_reduce_ amax": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "amax"),
    "scatter_reduce_ amin": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "amin"),
    "scatter_ add": lambda t, i, x: t.scatter_(0, columns(i, x), x, reduce="add"),
    "scatter_ of a number": lambda t, i, x: t.scatter_(0, columns(i, x), 2.0, reduce="add"),
    "index_reduce_ amax": lambda t, i, x: t.index_reduce_(0, i, x, "amax"),
    "index_reduce_ amin": lambda t, i, x: t.index_reduce_(0, i, x, "amin"),
    "addmm_": lambda t, i, x: t.addmm_(torch.nn.functional.one_hot(i, t.shape[0]).t().to(x.dtype), x),
    "addr_": lambda t, i, x: t.addr_(t[:, 0].clone(), x.sum(0)),
}
# These must know the whole index, or all that is written to one place, so they gather or turn it.
OTHERS = {
    "mean": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "mean"),
    "mean without self": lambda t, i, x: t.index_reduce_(0, i, x, "mean", include_self=False),
    "sum without self": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "sum", include_self=False),
    "amax without self": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x, "amax", include_self=False),
    "product": lambda t, i, x: t.scatter_reduce_(0, columns(i, x), x.clamp(0.9, 1.1), "prod"),
    "scatter_ multiply": lambda t, i, x: t.scatter_(0, columns(i, x), x.clamp(0.9, 1.1), reduce="multiply"),
    "index_copy_": lambda t, i, x: t.index_copy_(0, i[:2] * 0 + torch.arange(2), x[:2]),
    "addcmul_": lambda t, i, x: t.addcmul_(x[:ROWS].clone(), x[1:ROWS + 1].clone()),
}


def operands(rows, dtype=torch.float64, seed=0):
    """t, i and x; one row of t is named by no index, the others by many."""
    draw = torch.Generator().manual_seed(seed)
    t, x = (torch.randn(n, COLUMNS, generator=draw).mul(4).to(dtype) for n in (ROWS, rows))
    return t, torch.randint(1, ROWS, (rows,), generator=draw), x


def received(moves):
    return sum(move.bytes for move in moves)


@pytest.mark.parametrize("name", [*PROGRAMS, *OTHERS])
@pytest.mark.parametrize("rows", [11, 2000])
def test_values_in_every_layout(name, rows):
    """Where few rows are written the source is moved, where many are, the result."""
    t, i, x = operands(rows)
    program = {**PROGRAMS, **OTHERS}[name]
    want = program(t.clone(), i, x)
    where = place([2, 0, 1])
    for of_t, of_i, of_x in itertools.product([B, S(0), S(1), P], [B, S(0)], [B, S(0), S(1), P]):
        target = gt.from_full(t, where, B).to_global(sbp=of_t)
        source = gt.from_full(x, where, B).to_global(sbp=of_x)
        for _ in range(2):                           # the second time by what was cached
            mine = target.clone()
            got = program(mine, gt.from_full(i, where, of_i), source)
            assert got is mine and got.sbp == (of_t,), (of_t, of_i, of_x)
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{of_t} {of_i} {of_x}\n{m}")


@pytest.mark.parametrize("nd", [(S(0), S(0)), (S(0), B), (S(1), S(0)), (B, P), (S(0), S(1))], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_on_two_axes(name, nd):
    t, i, x = operands(1500)
    want = PROGRAMS[name](t.clone(), i, x)
    where = place([[0, 1], [3, 2]])
    index = tuple(s if s == S(0) else B for s in nd)
    for of_t in ((B, B), (S(0), B), nd):
        got = PROGRAMS[name](gt.from_full(t, where, B).to_global(sbp=of_t), gt.from_full(i, where, index),
                             gt.from_full(x, where, B).to_global(sbp=nd))
        assert got.sbp == of_t
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", PROGRAMS)
def test_dtypes(dtype, name):
    t, i, x = operands(60 if dtype == torch.bfloat16 else 900)   # of which torch's own sums of many are far off
    t, x = (of.abs().mul(0.3).round().to(dtype) for of in (t, x))
    try:
        want = PROGRAMS[name](t.clone(), i, x)
    except RuntimeError:
        pytest.skip("not in torch")
    for of_t in (B, S(0)):
        got = PROGRAMS[name](gt.from_full(t, place([0, 1, 2]), of_t), *(gt.from_full(of, place([0, 1, 2]), S(0))
                                                                        for of in (i, x)))
        near = {"rtol": 0.05, "atol": 2.0} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got.full_tensor(), want, **near)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "addr_"])
def test_the_result_alone_is_moved(name, ranks):
    where, (t, i, x) = place(list(range(ranks))), operands(24_000)
    t = t.repeat(160, 1)[:1024]                      # even, so that the arithmetic is simple
    nbytes, index, source = t.numel() * 8, gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0))
    by_row = name in ("index_add_", "index_put_")    # where all lie alike, rows travel by number (test_experts.py)
    # of a maximum each rank must have what the target holds, so one that is split is gathered
    for of_t, times in ((B, 2), (S(0), 2 if "am" in name else 1))[:1 if by_row else 2]:
        target = gt.from_full(t, where, of_t)
        with gt.record() as moves:
            PROGRAMS[name](target, index, source)
        assert received(moves) == times * nbytes * (ranks - 1) // ranks, (of_t, [str(m) for m in moves])
    plain = t.clone()
    with gt.record() as moves:
        PROGRAMS[name](plain, index, source)
    torch.testing.assert_close(plain, PROGRAMS[name](t.clone(), i, x))
    assert received(moves) == 2 * nbytes * (ranks - 1) // ranks, [str(m) for m in moves]


@pytest.mark.parametrize("how", ["sum", "amax", "amin"])
def test_out_of_place_a_result_is_left_pending(how):
    where, (t, i, x) = place([0, 1, 2]), operands(500)
    operand = gt.from_full(t, where, B), gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0))
    with gt.record() as moves:
        many = operand[0].scatter_reduce(0, columns(*operand[1:]), operand[2], how)
        rows = operand[0].index_reduce(0, *operand[1:], how) if how != "sum" else many
    assert not received(moves) and many.sbp[0].is_partial and many.sbp == rows.sbp
    for got in (many, rows):
        torch.testing.assert_close(got.full_tensor(), t.scatter_reduce(0, columns(i, x), x, how))


def test_few_rows_into_a_long_target_move_themselves():
    where, (_, i, x) = place([0, 1, 2]), operands(6)
    table = gt.zeros(3000, COLUMNS, placement=where, sbp=B, dtype=torch.float64)
    with gt.record() as moves:
        table.index_add_(0, gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0)))
    assert received(moves) <= 6 * (COLUMNS + 1) * 8


def test_elementwise_products_move_once():
    """t += a * b of parts: the product is gathered, not both of its factors."""
    where, (_, _, x) = place([0, 1]), operands(4000)
    a, b = gt.from_full(x, where, S(0)), gt.from_full(x + 1, where, S(0))
    t = gt.zeros(4000, COLUMNS, placement=where, sbp=B, dtype=torch.float64)
    with gt.record() as moves:
        t.addcmul_(a, b, value=2)
    assert received(moves) == x.numel() * 8 // 2 and t.sbp == (B,)
    torch.testing.assert_close(t.full_tensor(), 2 * x * (x + 1))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "index_reduce" not in name and "scatter_ " not in name])
def test_gradients(name):
    leaves = operands(700)
    grads = []
    for of_t, of_x in ((None, None), (B, S(0)), (S(0), S(0)), (S(1), S(0)), (B, S(1))):
        t, i, x = leaves
        if of_t is not None:
            where = place([0, 1, 2])
            t, i, x = (gt.from_full(t, where, of_t), gt.from_full(i, where, S(0)), gt.from_full(x, where, of_x))
        t, x = t.detach().requires_grad_(), x.detach().requires_grad_()
        result = PROGRAMS[name](t * 2, i, x)
        (result ** 2).sum().backward()
        grads.append([g.full_tensor() if of_t is not None else g for g in (t.grad, x.grad)])
    for got in grads[1:]:
        torch.testing.assert_close(got, grads[0])


VIEWS = {"rows": lambda t: t[1:], "columns": lambda t: t[:, :3], "every other": lambda t: t[::2],
         "one of many": lambda t: t.expand(1, -1, -1)[0], "turned": lambda t: t.t().contiguous().t()}


@pytest.mark.parametrize("of_t", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_as_targets(view, of_t):
    t, i, x = operands(900)
    where = place([0, 1, 2])

    def written(t, i, x, columns_of):
        base = t.clone()
        own = VIEWS[view](base)
        own.index_add_(0, i % own.shape[0], columns_of(x, own.shape[1]))
        own.scatter_reduce_(0, columns(i % own.shape[0], own), columns_of(x, own.shape[1]), "amax")
        return base, own

    wants = written(t, i, x, lambda x, n: x[:, :n])
    gots = written(gt.from_full(t, where, of_t), gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0)),
                   lambda x, n: x[:, :n])
    for got, want in zip(gots, wants):
        torch.testing.assert_close(got.full_tensor(), want)


def test_explain_names_it():
    where, (t, i, x) = place([0, 1]), operands(4000)
    told = gt.explain(lambda: gt.from_full(t, where, B).index_add_(0, gt.from_full(i, where, S(0)),
                                                                   gt.from_full(x, where, S(0))))
    row, = [row for row in told.rows if "index_add_" in row.op]
    assert row.algorithm == "its result, copied" and "B, B, B" in row.second and row.dearer > 0


# ------------------------------------------------------------------------------------------------------ bincount

WEIGHTS = {"none": None, "float32": torch.float32, "float64": torch.float64, "int32": torch.int32, "bool": torch.bool}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_bincount_counts_parts(dtype, weights):
    where, (_, i, x) = place([0, 1, 2]), operands(1000)
    w = None if WEIGHTS[weights] is None else x[:, 0].to(WEIGHTS[weights])
    i = i.to(dtype)
    for least, of_w in itertools.product((0, 3, 20), (S(0), B, None)):
        want = torch.bincount(i, w, minlength=least)
        own = w if w is None or of_w is None else gt.from_full(w, where, of_w)
        with gt.record() as moves:
            got = torch.bincount(gt.from_full(i, where, S(0)), own, minlength=least)
        assert received(moves) <= 100, [str(m) for m in moves]
        assert got.dtype == want.dtype and got.sbp == (P,)
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("i, w, error", [
    (torch.tensor([3, -1, 2]), None, "non-negative"), (torch.tensor([0.5, 1.0]), None, "not implemented"),
    (torch.tensor([1, 2]), torch.ones(3), "same length"), (torch.tensor([[1, 2]]), None, "1-d")])
def test_what_bincount_refuses(i, w, error):
    with pytest.raises(RuntimeError, match=error):
        torch.bincount(i, w)
    with pytest.raises(RuntimeError, match=error):
        torch.bincount(gt.from_full(i, place([0, 1]), S(0)), w)


@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
def test_bincount_of_nothing(sbp):
    none = gt.from_full(torch.empty(0, dtype=torch.int64), place([0, 1]), sbp)
    assert torch.bincount(none).shape == (0,) and torch.bincount(none, minlength=2).full_tensor().tolist() == [0, 0]


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", "0"])
def test_in_real_processes_as_on_one_device(native):
    good([*RUN, "-n", "3", FOLDER / "written_results.py"], environment(GLOBALTENSOR_NATIVE=native), timeout=180)
