"""A global tensor prints as torch prints its value, and only what is printed is moved."""
from __future__ import annotations

import warnings

import pytest
import torch

import globaltensor as gt

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TWO = gt.placement("cpu", [0, 1])
SHAPES = [(7,), (2000,), (200, 300), (5, 3000), (20, 30, 40), (3, 4, 5, 6, 7), (1500, 1), (1500, 0), (7, 7, 7, 7)]


@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_text_is_torch_s(sbp, dtype):
    torch.manual_seed(0)
    for shape in SHAPES:
        if (len(shape) < 2 and sbp == S(1)) or (dtype is torch.bool and sbp == P):
            continue
        t = (torch.randn(shape) * 3).to(dtype)
        assert repr(gt.from_full(t, TWO, sbp)).startswith(repr(t).removesuffix(")"))


# tensor, print options, and the items that the rank that prints receives at most
MOVED = {
    "rows": ((2000, 3000), S(0), {}, 6 * 3),
    "columns": ((2000, 3000), S(1), {}, 6 * 3),
    "a copy": ((2000, 3000), B, {}, 0),
    "a pending sum": ((2000, 3000), P, {}, 6 * 6),
    "fewer": ((50, 50), S(0), {"edgeitems": 1, "threshold": 10}, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_only_the_edges_are_moved(name):
    shape, sbp, options, items = MOVED[name]
    x = gt.from_full(torch.randn(shape), TWO, sbp)
    try:
        torch.set_printoptions(**options)
        with gt.record() as moves:
            text = repr(x)
        assert text.startswith(repr(x.full_tensor()).removesuffix(")")) and "..." in text
    finally:
        torch.set_printoptions(profile="default")
    assert sum(move.bytes for move in moves) == 4 * items, moves


@pytest.mark.parametrize("shape, options", [((), {}), ((4, 4), {}), ((50, 50), {"edgeitems": 1, "threshold": 10})])
@pytest.mark.parametrize("sbp", [S(0), B, P], ids=str)
def test_to_print_is_never_refused(sbp, shape, options):
    """In a program of several processes it moves nothing, so that it costs no budget either."""
    if not shape and sbp == S(0):
        return
    x = gt.from_full(torch.randn(shape), TWO, sbp)
    try:
        torch.set_printoptions(**options)
        text, formatted = repr(x), f"{x}"
        for how in ({"mode": "forbid"}, {"budget": 0}, {"mode": "warn"}):
            with gt.boxing(**how), warnings.catch_warnings(action="error"):
                assert repr(x) == text and f"{x}" == formatted
    finally:
        torch.set_printoptions(profile="default")


def test_formats():
    x = gt.full((), 2.5, placement=TWO, sbp=P)
    assert f"{x}" == f"{torch.tensor(2.5)}" and f"{x:.2f}" == "2.50" and str(x) == repr(x)
    y = gt.ones(3, placement=TWO, sbp=S(0))
    assert f"{y}" == repr(y)
