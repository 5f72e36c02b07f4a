"""Assigning elements by number to a tensor that is split along the dims that are named: the values travel, the tensor
does not; and the last of those that go to one place stays, as on one device.
"""
from __future__ import annotations

import pytest
import torch
from harness import PROGRAMS as FOLDER, RUN, environment, good

import globaltensor as gt

B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
THREE, GRID = gt.placement("cpu", [0, 1, 2]), gt.placement("cpu", [[0, 1], [2, 3]])
LAYOUTS = [(THREE, S(0)), (THREE, S(1)), (THREE, S(2)), (THREE, B), (THREE, P), (gt.placement("cpu", range(8)), S(0)),
           (GRID, (S(0), S(1))), (GRID, (S(1), S(0))), (GRID, (S(0), S(0))), (GRID, (S(2), S(1))), (GRID, (S(0), P))]


def i(*numbers):
    return torch.tensor(numbers)


def assigned(x, at, values):
    x[at] = values
    return x


# of x [7, 5, 3] and v, as large as x
PROGRAMS = {
    "rows, some twice": lambda x, v: x.index_put_((i(6, -3, 4, 4),), v[:4]),
    "one value for rows": lambda x, v: x.index_put((i(6, 0, 2),), v[0, 0]),
    "two dims": lambda x, v: assigned(x, (i(6, 0, 2, 0), i(0, 1, 2, 1)), v[:4, 0]),
    "indices that broadcast": lambda x, v: x.index_put_((i(6, 0)[:, None], i(0, 1)), v[0, 0]),
    "dims that are apart": lambda x, v: assigned(x, (i(6, 0, 2), slice(None), i(0, 1, 2)), v[:3, :, 0]),
    "the last dims": lambda x, v: assigned(x, (slice(None), i(4, -1, 2), i(0, 1, 2)), v[:1, :3, 0]),
    "all dims": lambda x, v: assigned(x, (i(6, 0, 2), i(4, -1, 2), i(0, 1, 2)), v[0, 0, 0]),
    "rows of one rank": lambda x, v: assigned(x, i(0, 1, 0), v[:3]),
    "no rows": lambda x, v: assigned(x, torch.empty(0, dtype=torch.int64), v[0]),
    "index_copy": lambda x, v: x.index_copy_(0, i(6, 0, 2, 0), v[:4]),
    "index_copy of columns": lambda x, v: x.index_copy(-1, i(2, 0), v[..., :2]),
    "index_copy of a 0-dim index": lambda x, v: x.index_copy(1, torch.tensor(3), v[:, :1]),
    "index_fill": lambda x, v: x.index_fill_(0, i(6, 0, -2), 1),
    "index_fill of a tensor": lambda x, v: x.index_fill(1, i(4, 0), v[0, 0, 0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_elements_that_are_assigned(dtype, name):
    draw = torch.Generator().manual_seed(1)
    x, v = (torch.randint(-4, 4, (7, 5, 3), generator=draw).to(dtype) for _ in range(2))
    want = PROGRAMS[name](x.clone(), v)
    for where, sbp in LAYOUTS:
        if dtype == torch.bool and P in (sbp if isinstance(sbp, tuple) else (sbp,)):
            continue                                 # bools have no sums
        got = PROGRAMS[name](gt.from_full(x, where, B).to_global(sbp=sbp), gt.from_full(v, where, B))
        assert torch.equal(got.full_tensor(), want) and got.stride() == want.stride(), sbp


MASK = torch.arange(35).view(7, 5) % 3 == 0
BY_MASK = {
    "a mask": lambda x, v: assigned(x, MASK, v),
    "a mask of rows": lambda x, v: assigned(x, MASK[:, 0], v),
    "a mask of columns": lambda x, v: assigned(x, (slice(None), MASK[0]), v),
    "a mask of a row": lambda x, v: assigned(x, (1, MASK[1]), v),
    "a mask beside a column": lambda x, v: assigned(x, (MASK[:, 0], -2), v),
    "a mask beside a new dim": lambda x, v: assigned(x, (1, MASK[1], None, 0), v),
    "index_put": lambda x, v: x.index_put((MASK,), v),
    "index_put_": lambda x, v: x.index_put_((MASK,), v),
    "accumulated": lambda x, v: x.index_put_((MASK,), v, accumulate=True),
    "numbers": lambda x, v: x.index_put_((i(0, 2),), v),
}


@pytest.mark.parametrize("name", BY_MASK)
@pytest.mark.parametrize("dtype, value", [
    (torch.bfloat16, torch.tensor(-1e4)), (torch.float32, torch.tensor([3])), (torch.float64, torch.tensor(0.1)),
    (torch.int64, torch.tensor([[2.7]])), (torch.uint8, torch.tensor(300)), (torch.bool, torch.tensor(3)),
    (torch.complex64, torch.tensor(2)), (torch.float32, torch.tensor(1j))], ids=str)
def test_one_value_of_another_dtype_is_cast_where_a_mask_names_what_is_written(dtype, value, name):
    """Else it is an error, as of plain tensors."""
    def run(x):
        try:
            return BY_MASK[name](x, value)
        except RuntimeError as error:
            return str(error).partition(",")[0]

    want = run(torch.ones(7, 5, 3, dtype=dtype))
    for where, sbp in LAYOUTS:
        if dtype != torch.bool or P not in (sbp if isinstance(sbp, tuple) else (sbp,)):          # bools have no sums
            got = run(gt.from_full(torch.ones(7, 5, 3, dtype=dtype), where, B).to_global(sbp=sbp))
            assert got.startswith(want) if isinstance(want, str) else torch.equal(got.full_tensor(), want), sbp


@pytest.mark.parametrize("name", ["one value for rows", "dims that are apart", "index_copy of columns", "index_fill"])
def test_their_gradients(name):
    def run(spread):
        x, v = (spread(torch.linspace(0, 1, 105).view(7, 5, 3) + n).requires_grad_() for n in range(2))
        (PROGRAMS[name](x * 2, v * 3) ** 2).sum().backward()
        return [t.grad.full_tensor() if isinstance(t.grad, gt.GlobalTensor) else t.grad for t in (x, v)]

    for where, sbp in LAYOUTS:
        grads = run(lambda t, on=where, sbp=sbp: gt.from_full(t, on, B).to_global(sbp=sbp).detach())
        for got, want in zip(grads, run(torch.clone)):
            assert got is want is None or torch.allclose(got, want), sbp


CACHE, ROW = (8, 64, 16), 8 * 16 * 4
WRITES = {
    "a length for each row": lambda cache, n, k: assigned(cache, (torch.arange(8), n), k),
    "index_put": lambda cache, n, k: cache.view(-1, 16).index_put_((n,), k),
    "index_copy": lambda cache, n, k: cache.view(-1, 16).index_copy_(0, n, k),
    "index_fill": lambda cache, n, k: cache.view(-1, 16).index_fill_(0, n, 1.),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_moves_are_the_values(name):
    where = gt.placement("cpu", [0, 1])
    cache = gt.zeros(*CACHE, placement=where, sbp=S(0))
    n = gt.full((8,), 5, placement=where, sbp=S(0))
    k = gt.ones(8, 16, placement=where, sbp=S(0))
    with gt.record() as moves:
        WRITES[name](cache, n, k)
    assert sum(m.bytes for m in moves) <= ROW + 8 * 8, [(m.op, m.bytes) for m in moves]


def masked(x, v, mask, dim):
    """Rows taken and written by a mask, in every form."""
    at, n = (slice(None),) * dim + (mask,), int(mask.sum())
    doubled = x * 2
    written, added = doubled.clone(), doubled.clone()
    written[at] = v.narrow(dim, 0, n) * 3
    added[at] += 1
    put = torch.ops.aten.index_put(doubled, [*[None] * dim, mask], v.narrow(dim, 0, n), True)
    return doubled[at], written, added, put


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("named", ["some", "none"])
def test_a_mask_of_a_dim(named, dim):
    draw = torch.Generator().manual_seed(dim)
    x, v = (torch.randn(7, 5, 3, generator=draw) for _ in range(2))
    mask = torch.randn(x.shape[dim], generator=draw) > (0 if named == "some" else 9)
    plain = x.clone().requires_grad_(), v.clone().requires_grad_()
    want = masked(*plain, mask, dim)
    sum((t ** 2).sum() for t in want).backward()
    for where, sbp in LAYOUTS:
        for mask_sbp in (None, B, S(0)):
            on = [gt.from_full(t, where, B).to_global(sbp=sbp).detach().requires_grad_() for t in (x, v)]
            own = mask if mask_sbp is None else gt.from_full(mask, where, mask_sbp)
            got = masked(*on, own, dim)
            sum((t ** 2).sum() for t in got).backward()
            for a, b in zip([*got, *(t.grad for t in on)], [*want, *(t.grad for t in plain)], strict=True):
                torch.testing.assert_close(a.full_tensor(), b, msg=f"{sbp}, mask {mask_sbp}")


def test_by_a_mask_its_rows_move_as_by_their_numbers():
    where = gt.placement("cpu", [0, 1])
    x = gt.randn(1024, 64, placement=where, sbp=S(0))
    mask = gt.arange(1024, placement=where, sbp=S(0)) % 64 == 0
    with gt.record() as moves:
        by_mask, numbers = x[mask], mask.nonzero()[:, 0]
    assert by_mask.sbp == x[numbers].sbp == (S(0),) and torch.equal(by_mask.full_tensor(), x[numbers].full_tensor())
    assert sum(m.bytes for m in moves) <= 1024 + 1024 + 16 * 64 * 4 < x.numel() * 4 / 8
    with pytest.raises(IndexError, match="shape of the mask"):
        x[mask[:8]]


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_single_rows_of_another_process(tmp_path, native):
    good([*RUN, "-n", 2, FOLDER / "single_elements.py", tmp_path], environment(GLOBALTENSOR_NATIVE=native), timeout=120)
