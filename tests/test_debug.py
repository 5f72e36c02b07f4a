"""`gt.show` draws what the shards say, `gt.explain` tells what the dispatcher did."""
from __future__ import annotations

import copy
import itertools
import os
import pickle
import re
import sys
import warnings

import pytest
import torch

import globaltensor as gt
from globaltensor.boxings.plan import plan
from globaltensor.debug import show as drawing
from globaltensor.debug.explain import Explanation
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import layout
from globaltensor.runtime import agreement, exchange
from globaltensor.runtime.world import World, world

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
LINE, GRID = gt.placement("cpu", [0, 1, 2, 3]), gt.placement("cpu", [[0, 1], [2, 3]])


def zeros(*shape, where=GRID, sbp=B):
    return gt.zeros(*shape, placement=where, sbp=sbp)


# ------------------------------------------------------------------------------------------------------------- show


def test_a_drawing():
    assert gt.show(zeros(6, 8, sbp=(S(0), P))).splitlines() == [
        '[6, 8] float32 on placement("cpu", [[0, 1], [2, 3]]) (S(0), P), 192 bytes',
        "     0        8",
        "  0  +--------+",
        "     |        |",
        "     | 0 + 1  |",
        "     |        |",
        "  3  +--------+",
        "     |        |",
        "     | 2 + 3  |",
        "     |        |",
        "  6  +--------+",
        "+ is a pending sum (P)",
    ]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda drawn: pickle.loads(pickle.dumps(drawn))])
def test_a_drawing_is_copied_with_its_picture(copied):
    drawn = gt.show(zeros(6, 8, sbp=(S(0), P)))
    again = copied(drawn)
    assert (again, repr(again), again._repr_html_()) == (drawn, repr(drawn), drawn._repr_html_())


@pytest.mark.parametrize("what, told", [([zeros(2)], "show of a list\n"), (5, "show of an int\n"),
                                        (torch.ones(2), "show of a plain tensor\n")])
def test_what_is_no_global_tensor_is_not_drawn(what, told):
    with pytest.raises(GlobalTensorError, match=told):
        gt.show(what)


def test_warnings_are_at_the_line_of_the_program():
    x, w = zeros(4, 4, where=LINE, sbp=S(0)), zeros(4, 2, where=LINE, sbp=S(0))
    with warnings.catch_warnings(record=True) as caught, gt.boxing("warn"):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=re.escape(__name__) + "$")
        for _ in range(3):
            x @ w
        line = sys._getframe().f_lineno - 1
    one, = caught                                    # once for its line
    assert (os.path.abspath(one.filename), one.lineno) == (__file__, line)
    assert str(one.message).startswith("aten.mm.default needs")


def test_one_dim_uneven_permuted_and_empty():
    assert gt.show(zeros(2, where=gt.placement("cpu", [3, 1, 0]), sbp=S(0))).splitlines()[1:] == [
        "     0   1   2", "     +---+---+", "     | 3 | 1 |", "     +---+---+", "rank 0 holds nothing"]


def test_more_dims_are_a_table():
    assert gt.show(zeros(4, 2, 5, sbp=(S(0), S(2)))).splitlines()[1:] == [
        "  rank  at    slices           local shape  bytes",
        "  0     0, 0  [0:2, 0:2, 0:3]  [2, 2, 3]    48",
        "  1     0, 1  [0:2, 0:2, 3:5]  [2, 2, 2]    32",
        "  2     1, 0  [2:4, 0:2, 0:3]  [2, 2, 3]    48",
        "  3     1, 1  [2:4, 0:2, 3:5]  [2, 2, 2]    32",
    ]


def test_too_many_boxes_to_draw_are_a_table(monkeypatch):
    monkeypatch.setattr(drawing, "WIDTH", 20)
    assert "rank  at" in gt.show(zeros(4, 40, where=LINE, sbp=S(1)))


STATES = [B, P, gt.sbp.partial_max, S(0), S(1)]


@pytest.mark.parametrize("nd", list(itertools.product(STATES, STATES)), ids=str)
def test_every_formula_gives_the_value(nd):
    """What stands in a box, computed with the ranks' shards, is the value of the box."""
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = gt.from_full(value, GRID, (B, B)).to_global(sbp=nd)
    covered = torch.zeros(5, 3)
    for cell in drawing.cells(x.spec):
        at = tuple(slice(start, stop) for start, stop in cell.region)
        text = re.sub(r"\d+", lambda rank: f"x.shards[{rank[0]}]", cell.formula)
        for side in text.split(" = "):
            torch.testing.assert_close(eval(side, {"x": x, "max": lambda *t: torch.stack(t).amax(0)}), value[at])
        covered[at] += 1
    assert torch.equal(covered, torch.ones(5, 3))
    assert gt.show(x).count("\n") > 2


def test_show_communicates_nothing(monkeypatch, capsys):
    x, recorder = zeros(4, 4, sbp=(S(0), P)), gt.record()            # loaded before what it imports is replaced
    monkeypatch.setattr(exchange, "exchange", lambda *args, **kwargs: pytest.fail("communicates"))
    for name in ("exchange", "agree", "broadcast_object", "gather_objects"):
        monkeypatch.setattr(agreement, name, lambda *args, **kwargs: pytest.fail("communicates"))
    with recorder as moves:
        text = gt.show(x)
    assert not moves and capsys.readouterr().out == text + "\n"


def test_only_the_first_rank_prints(monkeypatch, capsys):
    x = zeros(4, 4)
    monkeypatch.setattr(World, "rank", 1)
    assert gt.show(x) and capsys.readouterr().out == ""


def test_colours_are_for_terminals_and_rich_is_optional(monkeypatch, capsys):
    x = zeros(4, 4, sbp=(S(0), S(1)))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")              # a dumb one has none
    gt.show(x)
    coloured = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = gt.show(x)
    assert capsys.readouterr().out == text + "\n" != coloured
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[\d;]*m", "", coloured) == text + "\n"


@pytest.mark.parametrize("shape, nd", [((6, 8), (S(0), P)), ((7,), (S(0), B)), ((), (B, P)), ((4, 5, 6), (S(0), S(2))),
                                       ((0, 3), (S(0), B)), ((4, 5, 6), (S(2), S(2)))])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(tmp_path, shape, nd, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{kind}"
    gt.show(gt.zeros(shape, placement=GRID, sbp=nd), file=str(path))
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<svg"}[kind])


def test_a_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GlobalTensorError, match=r"pip install 'globaltensor\[plot\]'"):
        gt.show(zeros(4), file=str(tmp_path / "x.png"))


# ---------------------------------------------------------------------------------------------------------- explain


def step():
    x = gt.ones(64, 32, placement=LINE, sbp=S(0))
    v = gt.ones(32, 16, placement=LINE, sbp=S(0), requires_grad=True)
    y = x @ v
    z = y.to_global(sbp=S(1))
    z.sum().backward()
    return v


def rows(explanation, op):
    return [row for row in explanation.rows if row.op == op]


def test_an_op_is_told_with_what_was_boxed_and_the_next_best():
    found = gt.explain(step)
    forward, *_ = rows(found, "mm")
    assert forward.chosen == "S(0), B -> S(0)" and forward.boxed == "mat2: S(0) -> B"
    assert forward.bytes == 32 * 16 * 4 * 3 // 4     # what a rank lacks of the weight
    assert forward.second and forward.dearer > 0 and forward.second != forward.chosen
    assert re.search(r"test_debug\.py:\d+$", forward.where)
    assert isinstance(found, Explanation) and found.result.grad.sum().item() == 64 * 32 * 16


def test_explicit_boxings_and_the_backward_are_told():
    found = gt.explain(step)
    asked = rows(found, "to_global")
    assert [row.chosen for row in asked] == ["S(0) -> S(1)", "B -> S(0)"]          # and its gradient's
    assert len(rows(found, "mm")) == 2                                             # forward, and the weight's gradient
    assert all(row.second == "" for row in asked)


def test_bytes_are_those_of_the_record():
    step()
    with gt.record() as moves:
        step()
    found = gt.explain(step)
    assert [m.bytes for row in found.rows for m in row.moves] == [m.bytes for m in moves]
    assert found.bytes == sum(m.bytes for m in moves) > 0
    assert f"moved {found.bytes:,} bytes" in str(found)


def test_a_boxing_that_moves_nothing_and_a_choice_without_another():
    x, y = (gt.ones(4096, placement=LINE, sbp=s) for s in (S(0), B))
    row, = gt.explain(lambda: x * y).rows
    assert row.chosen == "S(0), S(0) -> S(0)" and row.boxed == "other: B -> S(0)" and row.bytes == 0
    row, = gt.explain(lambda: torch.sort(x)).rows
    assert row.chosen == "B -> B, B" and row.boxed == "self: S(0) -> B" and row.bytes > 0 and row.second == ""


def test_the_dearer_one_is_dearer_by_its_boxing():
    x = gt.ones(64, 64, placement=LINE, sbp=S(0))
    row, = gt.explain(lambda: torch.relu(x)).rows
    assert (row.chosen, row.second) == ("S(0) -> S(0)", "S(1) -> S(1)")
    way = plan(layout(LINE, (S(0),)), layout(LINE, (S(1),)), (64, 64), x.spec.nbytes, world().machine)
    assert row.dearer == pytest.approx(way.seconds(x.spec.nbytes), rel=0.01)


def test_in_place_decomposed_foreach_and_ruleless_ops_have_their_rows():
    x = gt.ones(8, 6, placement=LINE, sbp=S(0))
    labels = gt.zeros(8, placement=LINE, sbp=S(0), dtype=torch.int64)
    assert gt.explain(lambda: x.add_(1)).rows[0].op == "add_.Tensor"
    assert gt.explain(lambda: torch.nn.functional.cross_entropy(x, labels)).rows
    found = gt.explain(lambda: torch._foreach_mul([x] * 9, 2.0))
    assert found.rows[0].chosen == "S(0) x9 -> S(0) x9"
    assert gt.explain(lambda: x.sum().item()).result == 96.0


def test_equal_rows_are_folded_and_placements_named():
    x = gt.ones(8, 6, placement=LINE, sbp=S(0))

    def repeat(times):
        y = x
        for _ in range(times):
            y = torch.relu(y)
        return y

    text = str(gt.explain(repeat, times=5))
    assert "relu x5" in text and text.count("relu") == 1 and f"all on {LINE}" in text
    other = gt.placement("cpu", [5, 4])
    text = str(gt.explain(lambda: torch.relu(torch.relu(x).to_global(other, S(0)))))
    assert f"S(0) -> S(0)   on {LINE}" in text and f"S(0) -> S(0) on {other}" in text


def test_nothing_is_left_behind():
    x = gt.ones(8, 6, placement=LINE, sbp=S(0))
    with pytest.raises(ZeroDivisionError):
        gt.explain(lambda: 1 / 0)
    with gt.record() as moves:
        torch.relu(x)
    assert not moves and not gt.explain(lambda: None).rows
    assert str(gt.explain(lambda: torch.ones(2) + 1)).endswith("0 rows; 0 boxings moved 0 bytes")
