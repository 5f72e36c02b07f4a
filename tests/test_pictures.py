"""Pictures are well-formed, escaped, and say what the layouts, plans and schedules say; a notebook shows them, once."""
from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import product

import pytest
import torch

import globaltensor as gt
from globaltensor.boxings.flows import flows_of
from globaltensor.boxings.plan import plan, plan_bytes
from globaltensor.layouts.layout import layout
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import volume
from globaltensor.pictures.boxing_picture import boxing_picture
from globaltensor.pictures.layout_picture import layout_picture
from globaltensor.pictures.markup import Picture, colour_of, label
from globaltensor.pictures.timetable_picture import Timetable, timetable_picture
from globaltensor.runtime.world import world
from globaltensor.schedules.generators import generate
from globaltensor.simulator.cluster import hypothetical_placements
from globaltensor.simulator.costs import Costs
from globaltensor.simulator.engine import simulate

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
LINE, GRID = gt.placement("cpu", [0, 1, 2, 3]), gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture: Picture) -> ElementTree.Element:
    """Well-formed, and without what would need a script, an id or the network."""
    text = picture.svg()
    assert not re.search(r"<script|\bid=|href|url\(|nan\b", text)
    return ElementTree.fromstring(text)


def texts(picture: Picture) -> list[str]:
    return [node.text or "" for node in parsed(picture).iter(f"{SVG}text")]


def notes(picture: Picture) -> list[str]:
    return [node.text or "" for node in parsed(picture).iter(f"{SVG}title")]


# ---------------------------------------------------------------------------------------------------------- layouts


SHAPES = [(), (3,), (7, 5), (6, 8), (4, 5, 6), (0, 3), (1, 1)]


@pytest.mark.parametrize("shape, nd", [(shape, nd) for shape in SHAPES
                                       for nd in product([B, P, gt.sbp.partial_max, S(0), S(1)], repeat=2)
                                       if all(s.dim < len(shape) for s in nd)], ids=str)
def test_a_layout_is_drawn_for_every_rank(shape, nd):
    spec = gt.zeros(shape, placement=GRID, sbp=nd).spec
    picture = layout_picture(spec)
    drawn = texts(picture)
    for rank in range(4):
        assert drawn.count(f"rank {rank} ({rank // 2},{rank % 2})") == 1
    assert drawn.count("nothing") == sum(not volume(spec.region(rank)) for rank in range(4))
    held = {rank: f"rank {rank} holds [{', '.join(f'{a}:{b}' for a, b in spec.region(rank))}]" for rank in range(4)}
    told = [note.rpartition(", ")[0] for note in notes(picture) if note.startswith("rank ")]
    assert Counter(told) == Counter(text for rank, text in held.items() if volume(spec.region(rank)))
    hatched = len(re.findall(r"stroke-opacity", picture.svg()))
    assert (hatched > 0) == (any(s.is_partial for s in nd) and spec.numel > 0)


def test_what_is_broadcast_has_one_colour_and_what_is_split_has_several():
    def colours(nd):
        svg = layout_picture(gt.zeros(4, 4, placement=GRID, sbp=nd).spec).svg()
        return set(re.findall(r'fill="(#\w{6})"', svg))

    assert colours((B, B)) == {colour_of(0)}
    assert colours((S(0), B)) == {colour_of(0), colour_of(2)}
    assert colours((S(0), S(1))) == {colour_of(rank) for rank in range(4)}


def test_many_ranks_and_regions_stay_small():
    with hypothetical_placements():
        many = gt.placement("cpu", range(4096))
    spec = gt.zeros(4096, 8, placement=gt.placement("cpu", [0]), sbp=B).spec.on(layout(many, (S(0),)))
    began = time.perf_counter()
    picture = layout_picture(spec)
    assert len(picture.svg()) < 200_000 and time.perf_counter() - began < 5
    assert "... and 4,032 more ranks" in texts(picture) and "4,096 regions" in texts(picture)


def test_show_gives_the_text_and_a_picture(capsys, tmp_path):
    x = gt.zeros(6, 8, placement=GRID, sbp=(S(0), P))
    drawing = gt.show(x, file=str(tmp_path / "x.svg"))
    assert capsys.readouterr().out == f"{drawing}\n" and isinstance(drawing, str)
    assert drawing._repr_html_() == layout_picture(x.spec)._repr_html_()
    assert (tmp_path / "x.svg").read_text() == drawing.picture.svg() + "\n"
    assert repr(drawing).startswith("<drawing: [6, 8] float32 on placement") and "\n" not in repr(drawing)


@pytest.mark.processes
def test_a_notebook_has_one_output():
    """In a real kernel: a picture from the returned object, and nothing printed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = ("import globaltensor as gt\ngt.init(ranks=2)\nP = gt.placement('cpu', [0, 1])\n"
            "x = gt.ones(4, 6, placement=P, sbp=gt.sbp.split(0))", "gt.show(x)",
            "with gt.record() as moves:\n    x.to_global(sbp=gt.sbp.broadcast)\nmoves",
            "gt.Plan({'*': {'tp': 'S(0)'}})", "gt.explain(lambda: x @ x.T)", "print(gt.show(x))")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    for cell in book.cells[1:5]:
        only, = cell.outputs
        assert only.output_type == "execute_result" and "gt-picture" in only.data["text/html"], cell.source
    assert [one.output_type for one in book.cells[5].outputs] == ["stream"]


def test_lines_of_an_explanation_end_in_names_and_not_in_arrows():
    x = gt.ones(4, 6, placement=LINE, sbp=S(0))
    html = gt.explain(lambda: torch.clamp_min(x, 0) @ x.T)._repr_html_()
    assert "clamp_<wbr>min" in html
    assert html.count("-&gt;") == html.count('<span style="white-space:nowrap">-&gt;</span>') > 0


def test_a_strategy_is_lines_and_a_table():
    stage = {"layers": ["a", "<b>"], "ranks": [0, 1], "axes": {"dp": 2, "tp": 1}, "zero": 1, "recompute": "none"}
    strategy = gt.Strategy({"feasible": True, "schedule": "1f1b", "micro_batches": 1, "micro_batch": 4,
                            "global_batch": 8, "devices": 2, "cluster": "mine", "stages": [stage]})
    line = "1f1b, 1 micro-batch of 4, global batch 8, 2 devices of mine"
    html = strategy._repr_html_()
    assert str(strategy).splitlines() == [line, "stage  layers        ranks  axes         zero  recompute  memory",
                                          "0      a to <b> (2)  0 1    dp 2 x tp 1  1     none"]
    assert f">{line}</div>" in html and "a to &lt;b&gt; (2)" in html and html.count("<tr>") == 2
    lacking = gt.Strategy({"feasible": False, "needs": 9e9, "device": 8e9,
                           "smallest_change": {"devices": "16", "micro_batch": 2}})
    assert str(lacking).splitlines() == ["nothing fits: the least that a device needs is 9 GB, it has 8 GB",
                                         "  try devices: 16", "  or micro batch: 2"]
    assert lacking._repr_html_().count("<div") == 3 and "<tr>" not in lacking._repr_html_()


# ---------------------------------------------------------------------------------------------------------- boxings


PAIRS = [((S(0), B), (B, S(1))), ((P, S(0)), (B, B)), ((S(0), P), (S(0), S(1))), ((B, B), (S(0), P)),
         ((S(1), S(1)), (S(0), S(0)))]


@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (8, 8), (2, 3)])
def test_flows_are_what_the_plan_moves(src, dst, shape):
    before, after = layout(GRID, src), layout(GRID, dst)
    its = plan(before, after, shape, 4 * shape[0] * shape[1], world().machine)
    flows = flows_of(its, shape, 4)
    received = {rank: sum(n for (_, to), n in flows.items() if to == rank) for rank in range(4)}
    assert received == plan_bytes(its, shape, 4) and all(a != b for a, b in flows)


@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
def test_a_boxing_has_an_arrow_for_each_pair(src, dst):
    x = gt.randn(8, 6, placement=GRID, sbp=(B, B)).to_global(sbp=src)
    with gt.record() as moves:
        x.to_global(sbp=dst)
    move, = moves
    told = [note for note in notes(boxing_picture(x.spec, x.spec.on(move.dst), move.flows)) if " -> rank " in note]
    assert told == [f"rank {a} -> rank {b}: {n:,} bytes" for (a, b), n in sorted(move.flows.items())]
    received = {b: sum(n for (_, to), n in move.flows.items() if to == b) for _, b in move.flows}
    assert max(received.values(), default=0) == move.bytes
    assert ("arrow" if told else "nothing moves") in move._repr_html_() or told


def test_many_ranks_are_a_matrix():
    x = gt.zeros(100, 4, placement=LINE, sbp=S(0)).spec
    with hypothetical_placements():
        many = [gt.placement("cpu", range(n)) for n in (12, 200)]
    for where in many:
        n = len(where.flat)
        flows = {(a, (a + 1) % n): 8 * (a + 1) for a in range(n)}
        told = notes(boxing_picture(x.on(layout(where, (S(0),))), x.on(layout(where, (S(1),))), flows))
        sums = sum(int(note.rpartition(": ")[2].removesuffix(" bytes").replace(",", "")) for note in told)
        assert sums == sum(flows.values()) and len(told) <= 64 * 64


def test_a_boxing_to_windows_is_drawn():
    spec = gt.zeros(8, 2, placement=LINE, sbp=S(0)).spec
    halo = rank_regions(LINE, {r: ((max(2 * r - 1, 0), min(2 * r + 3, 8)), (0, 2)) for r in range(4)})
    assert texts(boxing_picture(spec, spec.on(halo), {(0, 1): 8})).count("irregular") == 4


def test_a_record_is_a_list_and_a_table():
    x = gt.ones(8, 8, placement=LINE, sbp=S(0))
    with gt.record() as moves:
        for _ in range(3):
            x.to_global(sbp=B)
        x.to_global(sbp=S(1))
    assert isinstance(moves, list) and len(moves) == 4 and moves == list(moves)
    lines = str(moves).splitlines()
    assert len(lines) == 4 and "to_global x3" in lines[1] and lines[-1].startswith("4 boxings, 4 of which moved")
    assert f"{moves.bytes:,}" in lines[-1] and moves.bytes == sum(move.bytes for move in moves)
    assert lines[-1].endswith(f"; all on {LINE}") and "  S(0) -> B  " in lines[1] and "placement" not in lines[1]
    assert all(abs(time.time() - move.began) < 60 for move in moves)
    assert [a.began <= b.began for a, b in zip(moves, moves[1:])] == [True] * 3
    assert "to_<wbr>global x3" in moves._repr_html_() and str(gt.boxings.watch.Record()) == (
        "0 boxings, 0 of which moved 0 bytes, in 0.000 ms")


# --------------------------------------------------------------------------------------- plans, timetables, checkpoints


def test_what_a_program_named_is_escaped():
    bad = "<script>alert(1)</script>&\"'"
    plan_ = gt.Plan({f"{bad} ->": {"tp": S(0)}})
    plan_.whole["<b>"] = "<i>"
    for html in (plan_._repr_html_(), Picture(9, 9, [label(0, 0, bad)]).svg()):
        assert "<script" not in html and "<b>" not in html and "<i>" not in html and "&lt;script&gt;" in html
    drawing = gt.show(gt.zeros(4, placement=gt.placement("cpu", [0, 1], axis_names=("<b>",)), sbp=S(0)))
    assert "<b>" not in drawing._repr_html_()


@pytest.mark.parametrize("name, ranks, micro_batches", [("1f1b", 4, 8), ("zb-v", 3, 6), ("gpipe", 1, 1)])
def test_a_timetable_has_a_bar_for_each_action(name, ranks, micro_batches):
    schedule = generate(name, ranks, micro_batches)
    run = simulate(schedule, Costs.exact(["1", "1", "1", "0"], schedule.stages, schedule.chunks), True)
    told = notes(timetable_picture({"step": run.events()}))
    assert len(told) == len(run.events()) == len(schedule)
    assert f"bubble {float(run.bubble_rate):.1%}" in str(run) and "<svg" in run._repr_html_()
    assert str(run.events()).startswith("rank 0") and not str(Timetable()).startswith("rank")


def test_a_large_timetable_is_drawn_in_shares():
    schedule = generate("1f1b", 64, 128)
    run = simulate(schedule, Costs.exact(["1", "2", "0"][:2] + ["0", "0"], 64, 1), True)
    picture = timetable_picture({"": run.events()})
    assert not notes(picture) and len(picture.svg()) < 1_500_000
    assert any("one rank of 2" in text for text in texts(picture))
    plain = simulate(schedule, Costs.exact(["1", "2", "0", "0"], 64, 1))
    assert plain._repr_html_() == str(plain)


def test_a_checkpoint_is_shown_without_loading_it(tmp_path, capsys):
    pytest.importorskip("safetensors")
    state = {"w<b>": gt.ones(7, 5, placement=LINE, sbp=S(0)), "b": torch.zeros(3), "n": 4,
             "g": gt.ones(8, 6, placement=GRID, sbp=(S(0), S(1))), "none": gt.ones(0, 2, placement=LINE, sbp=B)}
    gt.save(state, tmp_path / "run")
    shown = gt.show(tmp_path / "run")
    out = capsys.readouterr().out
    assert out == f"{shown}\n" and "4 tensors, 344 bytes" in out and "3 x [2, 5], 1 x [1, 5]" in out
    for file in (tmp_path / "run").glob("step-*/*.safetensors"):
        file.unlink()                                # they are not read
    html = gt.show(tmp_path / "run" / "step-00000001")._repr_html_()
    assert "w<b>" not in html and "w&lt;b&gt;" in html and html.count("<rect") == 4 + 1 + 4
    with pytest.raises(gt.CheckpointError, match="no checkpoint in"):
        gt.show(tmp_path)
    manifest = next((tmp_path / "run").glob("step-*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes()[:200])
    with pytest.raises(gt.CheckpointError, match="damaged"):
        gt.show(tmp_path / "run")
