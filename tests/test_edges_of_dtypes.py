"""Values at the edges of what their dtype can hold: sums that wrap, sums that halves cannot hold, and infinities beside
operands that are cut. The value is plain torch's.
"""
from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from shards import gather, scatter

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, partial_sum, split
from globaltensor.runtime.dtypes import SIGNED

SEED = int(os.environ.get("SEED") or 20_261_129)
print(f"tests/test_edges_of_dtypes.py: SEED={SEED}")
TWO, GRID = gt.placement("cpu", [0, 1]), gt.placement("cpu", [[0, 1], [2, 3]])
B, S, P = broadcast, split, partial_sum

WRAPPED = {
    "to floats": lambda x, on: x.float(), "to doubles": lambda x, on: x.double(), "by a float": lambda x, on: x * 0.5,
    "quotient": lambda x, on: x / 2, "floats": lambda x, on: x + on(torch.ones(3)),
    "degrees": lambda x, on: torch.deg2rad(x),
    "to wider integers": lambda x, on: x.long(), "sum": lambda x, on: x.sum(),
    "mean": lambda x, on: x.mean(dtype=torch.float64),
    "wider integers": lambda x, on: x + on(torch.ones(3, dtype=torch.int64)),
    "written": lambda x, on: on(torch.zeros(3)).add_(x),
    "cumulative": lambda x, on: x.cumsum(0), "joined": lambda x, on: torch.cat([x, on(torch.ones(2))]),
    "chosen": lambda x, on: torch.where(on(torch.tensor([True, False, True])), x, on(torch.ones(3))),
    "stacked": lambda x, on: torch.stack([x, on(torch.ones(3))]), "copied": lambda x, on: on(torch.zeros(3)).copy_(x),
    "product": lambda x, on: x * on(torch.full((3,), 2.0)),
    "narrower": lambda x, on: x.to(torch.int8), "same": lambda x, on: x * 3,
    "list": lambda x, on: torch._foreach_mul([x, x], 0.5)[1],
    "quotients": lambda x, on: torch._foreach_div([x, x], 2)[1],
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
@pytest.mark.parametrize("program", WRAPPED)
def test_a_pending_sum_of_integers_wraps_before_it_meets_others(program, dtype):
    most = torch.iinfo(dtype).max
    terms = [torch.full((3,), most, dtype=dtype), torch.tensor([0, 1, most], dtype=dtype)]
    want = WRAPPED[program](terms[0] + terms[1], lambda t: t)
    got = WRAPPED[program](gt.from_shards(dict(enumerate(terms)), TWO, P), lambda t: gt.from_full(t, TWO, B))
    assert got.dtype == want.dtype
    torch.testing.assert_close(gather(got), want)


INDEX = torch.tensor([1, 3, 0])
MOVES = {
    "roll": lambda x: x.roll(1, 0), "roll all": lambda x: x.roll(3), "flip": lambda x: x.flip(0),
    "flip columns": lambda x: x.flip(1), "rot90": lambda x: x.rot90(), "rot180": lambda x: x.rot90(2),
    "cat": lambda x: torch.cat([x, x], 0), "stack": lambda x: torch.stack([x, x]),
    "index_select": lambda x: x.index_select(0, INDEX), "columns": lambda x: x.index_select(1, INDEX[::2]),
    "index": lambda x: x[INDEX], "column index": lambda x: x[:, [1, 0]], "take": lambda x: x.take(INDEX),
    "gather": lambda x: x.gather(0, torch.ones(4, 3).long()), "take_along_dim": lambda x: x.take_along_dim(
        torch.zeros(4, 3).long(), 1), "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tile": lambda x: x.tile(2, 1), "narrow": lambda x: x.narrow(0, 1, 2), "step": lambda x: x[::2],
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)), "reshape": lambda x: x.reshape(2, 6), "t": lambda x: x.t().contiguous(),
    "chunk": lambda x: x.chunk(2)[1], "unfold": lambda x: x.unfold(0, 2, 1).clone(),
    "index_copy": lambda x: x.index_copy(0, INDEX[:1], x[:1]), "scatter": lambda x: x.scatter(
        0, torch.zeros(1, 3).long(), x), "masked_fill": lambda x: x.masked_fill(torch.ones(4, 3).bool(), 1),
    "index_put": lambda x: x.index_put((INDEX,), x[:3]), "tril": lambda x: x.tril(), "diagonal": lambda x: x.diagonal(),
    "slice_scatter": lambda x: x.slice_scatter(x[:2], 0, 1, 3),
}
DTYPES = [torch.bool, *SIGNED, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.complex32,
          torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_moves_elements_takes_the_dtypes_that_it_takes_on_one_device(dtype):
    """Bit by bit, with the largest values and infinities."""
    full = torch.tensor([0, 1, 2, 3, 100, 200, 2 ** 15, 2 ** 31, 2 ** 62, 5, 6, 7]).view(4, 3)
    full[0, 0] = -1 if dtype in SIGNED else 0        # the largest of them
    full = (full % 1000 if dtype.is_complex else full).to(dtype)       # torch adds an infinite one and zero to nan
    done = 0
    for name, program in MOVES.items():
        try:
            want = program(full)
        except (NotImplementedError, RuntimeError):
            continue                                 # torch has no kernel, in no layout
        for sbp in (S(0), S(1)):
            got = program(gt.from_full(full, TWO, sbp)).full_tensor()
            assert got.dtype == want.dtype and got.shape == want.shape, (name, sbp)
            assert got.contiguous().view(torch.uint8).tolist() == want.contiguous().view(torch.uint8).tolist(), (
                name, sbp)
        done += 1
    assert done > len(MOVES) // 2


LOSSES = {name: getattr(F, name) for name in (
    "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy_with_logits")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_means_of_losses_that_halves_cannot_sum(loss, dtype):
    x, y = torch.full((400, 500), 3.0, dtype=dtype), torch.ones(400, 500, dtype=dtype)
    want, got = LOSSES[loss](x, y), LOSSES[loss](*(gt.from_full(t, TWO, S(0)) for t in (x, y)))
    assert got.dtype == dtype
    torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss"])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16),
                                    (torch.bfloat16, torch.float16), (torch.float16, torch.int64)], ids=str)
def test_means_of_losses_of_two_dtypes(loss, dtypes):
    x, y = (torch.arange(6.0).view(3, 2).mul(k).to(dtype) for k, dtype in zip((3, 5), dtypes))
    want, got = LOSSES[loss](x, y), LOSSES[loss](*(gt.from_full(t, TWO, S(0)) for t in (x, y)))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("shapes", [((4, 3), (4, 1)), ((4, 3), (3,)), ((0, 3), (3,)), ((0, 3), (1, 3)), ((0,), ())],
                         ids=str)
@pytest.mark.parametrize("sbp", [S(0), gt.sbp.broadcast], ids=str)
def test_a_mean_is_that_of_operands_that_are_broadcast_to_each_other(shapes, sbp):
    x, y = (torch.rand(shape, generator=torch.Generator().manual_seed(SEED)) for shape in shapes)
    got = F.soft_margin_loss(*(gt.from_full(t, TWO, sbp if t.dim() else gt.sbp.broadcast) for t in (x, y)))
    torch.testing.assert_close(got.full_tensor(), F.soft_margin_loss(x, y), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_of_rows_that_halves_cannot_count(dtype):
    rows = torch.randn(70_000, 2, generator=torch.Generator().manual_seed(SEED)).to(dtype) - 20
    targets = torch.zeros(70_000, dtype=torch.int64)
    got = F.cross_entropy(*(gt.from_full(t, TWO, S(0)) for t in (rows, targets)))
    assert got.dtype == dtype
    torch.testing.assert_close(got.full_tensor().double(), F.cross_entropy(rows.double(), targets), rtol=1e-2, atol=0)


@pytest.mark.parametrize("sbp", [S(0), B, P], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex32], ids=str)
def test_norms_whose_squares_halves_cannot_hold(dtype, sbp):
    grads = [torch.full((400, 2), 200.0).to(dtype), torch.full((5,), 3.0).to(dtype)]
    want = torch.stack([g.to(torch.complex64 if dtype.is_complex else torch.float32).norm() for g in grads])
    norms = torch._foreach_norm([scatter(g, TWO, (sbp,), torch.Generator().manual_seed(SEED)) for g in grads], 2)
    assert {n.dtype for n in norms} == {dtype.to_real()}
    torch.testing.assert_close(torch.stack([gather(n).float() for n in norms]), want, rtol=2e-2, atol=0)


PRODUCTS = {                                         # of which one factor has an inf, beside an addend
    "linear": (F.linear, (6, 4), (2, 4), (2,)), "addmm": (torch.addmm, (2,), (6, 4), (4, 2)),
    "addmv": (torch.addmv, (6,), (6, 4), (4,)), "addcmul": (torch.addcmul, (4,), (6, 1), (6, 4)),
    "baddbmm": (torch.baddbmm, (2, 4, 2), (2, 4, 6), (2, 6, 2)),
}


def sparse(chooser, items, count):
    """So many of them, in any order."""
    items = list(items)
    return [items[k] for k in torch.randperm(len(items), generator=chooser)[:count]]


@pytest.mark.parametrize("program", PRODUCTS)
def test_no_factor_that_is_cut_becomes_a_pending_sum_beside_an_infinity(program):
    f, *shapes = PRODUCTS[program]
    chooser = torch.Generator().manual_seed(SEED)
    ways = [list(itertools.product((B, *(S(d) for d in range(len(shape)))), repeat=2)) for shape in shapes]
    for sbps in sparse(chooser, itertools.product(*ways), 60):
        for q in range(len(shapes)):
            operands = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
            operands[q].view(-1)[0] = torch.inf
            want = f(*operands)
            got = f(*(gt.from_full(t, GRID, sbp) for t, sbp in zip(operands, sbps)))
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{program} {sbps}, {q}: {m}")


def test_a_row_with_an_infinity_has_no_softmax():
    rows = torch.tensor([[0, torch.inf, 1, 2], [-torch.inf] * 4, [0, 1, -torch.inf, 2]])
    want = torch.ops.aten._safe_softmax(rows, 1)
    for sbp in (S(0), S(1), B):
        got = torch.ops.aten._safe_softmax(gt.from_full(rows, TWO, sbp), 1)
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
                                   torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.uint64], ids=str)
def test_a_pending_sum_of_what_the_kernel_cannot_add_is_reduced(dtype):
    whole = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp="B").to(dtype)
    for sbp in ("B", "S(0)"):
        got = whole.to_global(sbp="P").to_global(sbp=sbp)
        assert got.dtype == dtype and torch.equal(got.full_tensor().to(torch.complex64), torch.ones(4) + 0j)


NUMBERS = {"true": True, "integer": 2, "negative": -1, "float": 2.5, "complex": 2 + 1j, "nan": float("nan")}
WITH_NUMBERS = {
    "+": lambda x, n: x + n, "-": lambda x, n: x - n, "n -": lambda x, n: n - x, "*": lambda x, n: x * n,
    "/": lambda x, n: x / n, "n /": lambda x, n: n / x, "//": lambda x, n: x // n, "n //": lambda x, n: n // x,
    "%": lambda x, n: x % n, "n %": lambda x, n: n % x, "**": lambda x, n: x ** n, "n **": lambda x, n: n ** x,
    "==": lambda x, n: x == n, "<": lambda x, n: x < n, "&": lambda x, n: x & n, "<<": lambda x, n: x << n,
    "rsub": torch.rsub, "fmod": torch.fmod, "clamp": torch.clamp, "xlogy": torch.xlogy,
    "float_power": torch.float_power,
    "floor": lambda x, n: torch.div(x, n, rounding_mode="floor"), "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "trunc": lambda x, n: torch.div(x, n, rounding_mode="trunc"), "value": lambda x, n: torch.addcmul(x, x, x, value=n),
    "lerp": lambda x, n: torch.lerp(x, x, n), "list": lambda x, n: torch._foreach_add([x], n)[0],
    "masked_fill": lambda x, n: x.masked_fill(x == 1, n), "where": lambda x, n: torch.where(x == 1, n, x),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([0]), n), "new_full": lambda x, n: x.new_full((3,), n),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_python_beside_every_dtype(number, dtype):
    full, n, wrong = torch.tensor([1.0, 0.0, 1.0]).to(dtype), NUMBERS[number], []
    for (name, program), sbp in itertools.product(WITH_NUMBERS.items(), (B, S(0), P)):
        found = []
        for x in (full, gt.from_full(full, TWO, sbp)):
            try:
                found.append(program(x, n))
            except Exception as error:               # of whichever type it is
                found.append(error)
        want, got = found
        if isinstance(want, NotImplementedError):
            continue                                 # no kernel: see test_refused_dtypes.py
        if isinstance(want, Exception) or isinstance(got, Exception):
            good = isinstance(got, type(want))
        else:
            good = got.dtype == want.dtype and torch.equal(*(torch.nan_to_num(
                t.to(torch.complex128)) for t in (got.full_tensor(), want)))
        if not good:
            wrong.append(f"{name} {sbp}: {got!r} for {want!r}"[:200])
    assert not wrong, "\n".join(wrong)
