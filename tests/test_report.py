"""A record of a run becomes a page that tells what was recorded; in a browser it opens, zooms, filters and is fast."""
from __future__ import annotations

import gzip
import json
import re
import statistics
import time

import numpy as np
import pytest
import torch
from browser import MISSING, chromium, no_complaints, open_report, use_theme
from harness import PROGRAMS, PYTHON, RUN, environment, good
from torch import nn

import globaltensor as gt
from globaltensor.cli.report import report_of, write_page
from globaltensor.pictures.packing import pack_column, unpack_column
from globaltensor.pictures.report import Panel, Report, bubble_table, idle_times, spelled_bytes, spelled_time
from globaltensor.pictures.report_page import page
from globaltensor.pictures.trace_report import ReportError, read_trace, trace_report
from globaltensor.schedules.generators import generate
from globaltensor.schedules.timetable import Event
from globaltensor.simulator.costs import Costs
from globaltensor.simulator.engine import simulate
from globaltensor.simulator.report import simulation_of_events, simulation_report
from globaltensor_command import main

S, B = gt.sbp.split, gt.sbp.broadcast
LINE = gt.placement("cpu", [0, 1, 2, 3])
in_a_browser = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: apt-get install chromium chromium-driver, and "
                                  "pip install 'globaltensor[browser]'")


def simulated(name="1f1b", ranks=4, micro_batches=8, times=("1", "2", "0", "0")):
    schedule = generate(name, ranks, micro_batches)
    return simulate(schedule, Costs.exact(times, schedule.stages, schedule.chunks), True)


def written(tmp_path, run=None):
    path = tmp_path / "page.html"
    write_page(path, simulation_report(run or simulated(), None, {"<b>": "1 < 2"}))
    return path


# ----------------------------------------------------------------------------------------------------- from a record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A record of a pipeline and of some boxings, and what was recorded."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    torch.manual_seed(0)
    places = [gt.placement("cpu", [0, 1]), gt.placement("cpu", [2, 3])]
    runner = gt.pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], places, "1f1b", micro_batches=4,
                         loss=nn.functional.mse_loss)
    w = gt.randn(64, 64, placement=LINE, sbp=S(0))
    with gt.record(file=path, pipeline=runner) as moves:
        runner.step(torch.ones(8, 8), torch.zeros(8, 8))
        for _ in range(3):
            (w @ w).to_global(sbp=S(1))
    return path, moves, runner


def test_a_record_is_written_and_told(recorded):
    path, moves, runner = recorded
    of = report_of(path)
    boxings, measured, alone = of.panels
    assert list(boxings.rows) == [f"rank {rank}" for rank in range(4)] and len(boxings.start) == sum(
        len({*move.src.placement.flat, *move.dst.placement.flat}) for move in moves)
    assert len(measured.start) == len(runner.events) and measured.is_pipeline and not boxings.is_pipeline
    assert len(alone.start) == sum(event.kind != "R" for event in runner.events)
    flows = {}
    for move in moves:
        for pair, n in move.flows.items():
            flows[pair] = flows.get(pair, 0) + n
    assert of.flows == flows and sum(flows.values()) > 0
    by_op, by_line = (next(table for table in of.tables if table.title.startswith(title))
                      for title in ("Bytes by op", "Bytes by line"))
    bytes_of_mm = sum(move.bytes for move in moves if move.op == "aten.mm.default")
    assert ["aten.mm.default", "3", spelled_bytes(bytes_of_mm)] in by_op.rows
    assert all(re.match(r".*test_report\.py:\d+$", row[0]) for row in by_line.rows)
    assert of.memory.peaks.min() > 1e6               # of this process
    assert any("its ranks waited" in note for note in of.notes)
    assert {table.title for table in of.tables} >= {f"Bubble: {panel.title}" for panel in (measured, alone)}


def test_times_of_the_file_are_those_of_the_record(recorded):
    path, moves, _ = recorded
    rows = [row for row in read_trace(path)["traceEvents"] if row["ph"] == "X" and row.get("cat") == "boxing"
            and row["pid"] == 0]
    own = [move for move in moves if 0 in (*move.src.placement.flat, *move.dst.placement.flat)]
    assert [row["dur"] for row in rows] == [pytest.approx(move.seconds * 1e6) for move in own]
    gaps = [(a["ts"] - b["ts"]) - (m.began - n.began) * 1e6 for a, b, m, n in zip(rows[1:], rows, own[1:], own)]
    assert max(map(abs, gaps)) < 1


def test_the_command_writes_a_page(recorded, tmp_path, capsys):
    path, *_ = recorded
    copy = tmp_path / "run.json.gz"
    copy.write_bytes(gzip.compress(path.read_bytes()))
    assert main(["report", str(copy), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(tmp_path / "run.html"), "bytes": (tmp_path / "run.html").stat().st_size}
    assert main(["report", str(path), "-o", str(tmp_path / "no" / "x.html")]) == 1
    assert "could not be written" in capsys.readouterr().err


def test_a_profile_of_all_ranks_is_told(tmp_path):
    w = gt.randn(16, 16, placement=LINE, sbp=S(0))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        w @ w
    gt.export_chrome_trace(profile, tmp_path / "trace.json")
    of = report_of(tmp_path / "trace.json")
    told, = of.panels
    assert {"cpu_op", "boxing"} <= {kind for _, kind in told.names} and of.flows is None and of.memory is not None
    ends = told.start + told.length
    for row in range(len(told.rows)):                # what stands in a row does not overlap
        part = slice(told.offsets[row], told.offsets[row + 1])
        assert (told.start[part][1:] >= ends[part][:-1] - 1e-9).all()
    assert any("boxing for" in detail and "bytes" in detail for detail in told.details)


@pytest.mark.processes
def test_two_processes_write_one_file(tmp_path):
    file = tmp_path / "run.json"
    good([*RUN, "-n", 2, PROGRAMS / "recorded.py", file], environment())
    alone = tmp_path / "alone.json"
    good([PYTHON, PROGRAMS / "recorded.py", alone], environment(GLOBALTENSOR_RANKS="2"))
    both, one = report_of(file), report_of(alone)
    assert both.flows == one.flows and list(both.panels[0].rows) == list(one.panels[0].rows) == ["rank 0", "rank 1"]
    assert [len(panel.start) for panel in both.panels[1:]] == [len(panel.start) for panel in one.panels[1:]]
    asked = [[panel.names[n] for n in panel.name].count(("to_global", "boxing"))
             for panel in (both.panels[0], one.panels[0])]
    assert asked == [4, 4]                           # two boxings, in the row of each rank
    assert dict(both.facts)["processes"] == "2" and dict(one.facts)["processes"] == "1"
    assert len(both.memory.rows) == 2 and len(one.memory.rows) == 1


def test_nothing_is_written_where_the_block_raises(tmp_path):
    with pytest.raises(ZeroDivisionError), gt.record(file=tmp_path / "x.json"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with gt.record(file=tmp_path / "empty.json"):
        pass
    assert "Nothing was recorded: the block had no boxing." in page(report_of(tmp_path / "empty.json"))


@pytest.mark.parametrize("arguments, what, fix", [
    (lambda path: dict(pipeline=3), "without a file", "file="),
    (lambda path: dict(file=3), "gt.record(file=3)", "run.json"),
    (lambda path: dict(file=path / "x.json", pipeline=3), "pipeline=int", "gt.pipeline"),
    (lambda path: dict(file="/"), "was not written", "a folder"),
    (lambda path: dict(file=path / "no" / "x.json"), "was not written", "a folder")])
def test_what_cannot_be_recorded_is_refused_before_the_block_runs(arguments, what, fix, tmp_path):
    with pytest.raises(gt.GlobalTensorError) as error, gt.record(**arguments(tmp_path)):
        pytest.fail("the block runs")
    assert what in error.value.what and fix in error.value.fix


BROKEN = {
    "cut off": (lambda data: data[:len(data) // 2], "ends in the middle"),
    "empty": (lambda data: b"", "it is empty"),
    "text": (lambda data: b"hello", "not JSON"),
    "foreign": (lambda data: b'{"traceEvents": []}', "of another program"),
    "a list": (lambda data: b"[1, 2]", "of another program"),
    "newer": (lambda data: data.replace(b'"format": 1', b'"format": 2'), "has format 2"),
    "no layouts": (lambda data: data.replace(b'"bytes"', b'"octets"'), "damaged"),
    "times of text": (lambda data: re.sub(rb'"dur": [\d.e-]+', b'"dur": "1"', data), "damaged"),
    "another schedule": (lambda data: data.replace(b"rank 1:", b"rank 9:"), "damaged"),
    "an action less": (lambda data: re.sub(rb'"stage": 1', b'"stage": 7', data), "damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_foreign_file_is_refused(name, recorded, tmp_path, capsys):
    change, why = BROKEN[name]
    (tmp_path / "x.json").write_bytes(change(recorded[0].read_bytes()))
    assert main(["report", str(tmp_path / "x.json")]) == 2
    told = capsys.readouterr().err
    assert why in told and "x.json" in told and "Traceback" not in told and not (tmp_path / "x.html").exists()


def test_a_broken_archive_and_a_missing_file_are_refused(recorded, tmp_path):
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(recorded[0].read_bytes())[:900])
    (tmp_path / "y.json.gz").write_bytes(b"no archive")
    for name in ("x.json.gz", "y.json.gz", "z.json"):
        with pytest.raises(ReportError, match="cannot be read"):
            read_trace(tmp_path / name)


# -------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("values", [[], [0], [5, 4, 3], [2 ** 32 - 1, 0, 2 ** 31], list(range(0, 5000, 7))])
@pytest.mark.parametrize("differences", [False, True])
def test_columns_come_back(values, differences):
    assert unpack_column(pack_column(np.array(values, np.int64), differences)).tolist() == values


def test_evenly_spaced_times_take_little_room():
    assert len(pack_column(np.arange(1_000_000) * 1234, True).text) < 10_000


def test_idle_times_add_up():
    of = Panel("p", ["a", "b", "none"], [0, 1, 2], np.array([0, 2, 3, 3]), np.array([1.0, 4.0, 0.0]),
               np.array([2.0, 1.0, 10.0]), np.array([0, 0, 0]), np.array([0, 1, 0]), [("forward, stage 0", "forward")])
    idle = idle_times(of)
    assert idle.work.tolist() == [3, 10, 0] and idle.before.tolist() == [1, 0, 0]
    assert idle.between.tolist() == [1, 0, 0] and idle.after.tolist() == [5, 0, 10]
    assert [row[-1] for row in bubble_table(of, "").rows] == ["70.0%", "0.0%", "100.0%", "56.7%"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"])
def test_a_simulation_is_told_as_it_is(name):
    run = simulated(name, 3, 6, ("1", "1", "1", "1/7"))
    of = simulation_report(run, None, {})
    told, = of.panels
    events = sorted(run.events(), key=lambda e: (e.rank, e.start))
    assert told.start.tolist() == pytest.approx([e.start for e in events], abs=1e-9)
    assert (told.start + told.length).tolist() == pytest.approx([e.end for e in events], abs=1e-9)
    assert told.item.tolist() == [e.micro_batch for e in events]
    idle = idle_times(told)
    assert idle.work.tolist() == pytest.approx([float(one) for one in run.work])
    assert float(of.memory.peaks.max()) > 0 and of.flows_unit == "transfers"


def test_the_memory_of_a_simulated_training_is_the_one_it_tells(tmp_path, capsys):
    options = ("--model gpt --layers 8 --hidden 1024 --heads 16 --seq 512 --tp 2 --pp 4 --dp 2 --micro-batch 1 "
               f"--global-batch 16 --schedule 1f1b --json --report {tmp_path / 'x.html'}")
    assert main(["simulate", *options.split()]) == 0
    told = json.loads(capsys.readouterr().out)["memory"]["per_rank"]
    assert spelled_bytes(max(told)) in (tmp_path / "x.html").read_text()


def test_a_schedule_is_simulated_with_the_measured_times():
    run = simulated("zb-h1", 3, 6, ("3", "2", "1", "0"))
    again = simulation_of_events(run.events(), run.schedule)
    assert float(again.makespan) == pytest.approx(float(run.makespan))
    noisy = [Event(e.rank, e.stage, e.kind, e.micro_batch, 2 * e.start, 2 * e.end) for e in run.events()]
    assert float(simulation_of_events(noisy, run.schedule).makespan) == pytest.approx(2 * float(run.makespan))


def test_units():
    assert [spelled_time(t, "s") for t in (2.5, 0.0025, 2.5e-6, 0)] == ["2.5 s", "2.5 ms", "2.5 us", "0 us"]
    assert spelled_time(2.5, "") == "2.5" and spelled_bytes(12_345_678) == "12.35 MB" and spelled_bytes(0) == "0 B"


def test_a_page_is_whole_and_escaped(tmp_path):
    bad = "</script><script>alert(1)</script>"
    about = {"format": 1, "ranks": 1, "processes": 1, "by": "rank", "flows": []}
    of = trace_report({"globaltensor": about, "traceEvents": [
        {"ph": "X", "name": bad, "cat": bad, "pid": 0, "tid": 0, "ts": 0, "dur": 5}]}, bad)
    html = page(of)
    assert "alert(1)</script>" not in html and html.count("</script>") == html.count("<script") and "http://" not in (
        html.replace("http://www.w3.org/2000/svg", ""))
    assert "<noscript>" in html and "<svg" in html[html.index("<noscript>"):]


# ------------------------------------------------------------------------------------------------------ in a browser


ON_SCREEN = """
const canvas = document.querySelectorAll("canvas.timeline")[arguments[0]], c = canvas.getContext("2d");
const panel = report.panels[arguments[0]], seen = {};
const image = c.getImageData(panel.left, 0, panel.inner, panel.tall).data;
for (let i = 0; i < image.length; i += 4) {
  const key = [image[i], image[i + 1], image[i + 2]].join(); seen[key] = (seen[key] || 0) + 1;
}
return seen;
"""


def on_screen(browser, panel=0):
    """colour -> pixels, of a timeline once it rests."""
    time.sleep(0.4)
    return browser.execute_script(ON_SCREEN, panel)


FORWARD, BACKWARD = "76,120,168", "84,162,75"


@in_a_browser
@pytest.mark.processes
def test_a_page_in_a_browser(tmp_path, recorded):
    """Loads, zooms by the wheel, moves by dragging, filters, tells what is below the mouse, follows the theme."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    with chromium() as browser:
        open_report(browser, written(tmp_path))
        view = lambda: browser.execute_script("return [report.view.t0, report.view.t1]")
        before, pixels = view(), on_screen(browser)
        total = sum(pixels.values())
        assert before == [0, 33] and pixels[FORWARD] / total == pytest.approx(8 / 33, abs=0.06)
        assert pixels[BACKWARD] / total == pytest.approx(16 / 33, abs=0.06)

        canvas = browser.find_element(By.CSS_SELECTOR, "canvas.timeline")
        ActionChains(browser).scroll_from_origin(origin(canvas), 0, -300).perform()
        time.sleep(0.3)
        zoomed = view()
        assert zoomed[1] - zoomed[0] == pytest.approx(33 * np.exp(-0.75), rel=0.02) and zoomed[0] > 5
        ActionChains(browser).drag_and_drop_by_offset(canvas, -120, 0).perform()
        time.sleep(0.3)
        moved = view()
        assert moved[0] > zoomed[0] and moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
        canvas.send_keys("0")
        time.sleep(0.2)
        assert view() == pytest.approx([0, 33], abs=0.4)

        browser.find_element(By.CSS_SELECTOR, "input[data-kind=forward]").click()
        assert FORWARD not in on_screen(browser) and BACKWARD in on_screen(browser)
        browser.find_element(By.CSS_SELECTOR, "input[data-kind=forward]").click()
        browser.find_element(By.ID, "ranks").send_keys("1-2")
        time.sleep(0.2)
        assert browser.execute_script("return Array.from(report.panels[0].shown)") == [1, 2]
        browser.find_element(By.ID, "ranks").send_keys("x")
        assert "0-7, 12" in browser.find_element(By.ID, "status").text
        browser.find_element(By.ID, "ranks").send_keys(Keys.BACKSPACE * 4)
        browser.find_element(By.ID, "names").send_keys("stage 3")
        seen = on_screen(browser)
        assert seen[FORWARD] / sum(seen.values()) == pytest.approx(2 / 33, abs=0.02)
        browser.find_element(By.ID, "names").send_keys(Keys.BACKSPACE * 8)

        canvas.send_keys("0")
        time.sleep(0.2)
        told = browser.execute_script("const p = report.panels[0]; return [p.at(p.left / p.ratio + 3, 5), "
                                      "p.at(p.left / p.ratio + 3, p.tall / p.ratio - 8)]")
        assert told[0].startswith("rank 0: forward, stage 0 (forward)\nmicro-batch 0\n") and told[1] == "rank 3: idle"
        use_theme(browser, dark=True)
        dark = on_screen(browser)
        assert "22,25,29" in dark and "255,255,255" not in dark and FORWARD in dark
        no_complaints(browser)

        path = tmp_path / "run.html"
        write_page(path, report_of(recorded[0]))
        open_report(browser, path)
        assert browser.execute_script("return report.panels.length") == 3
        assert "214,70,74" in on_screen(browser, 0) or len(on_screen(browser, 0)) > 2
        no_complaints(browser)


def origin(element):
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    return ScrollOrigin.from_element(element)


@in_a_browser
@pytest.mark.processes
def test_a_page_without_script(tmp_path):
    from selenium.webdriver.common.by import By
    with chromium(scripts=False) as browser:
        browser.get(f"file://{written(tmp_path)}")
        assert browser.find_elements(By.CSS_SELECTOR, "noscript svg rect")
        assert "1f1b" in browser.title and "With JavaScript" in browser.find_element(By.TAG_NAME, "body").text
        assert not browser.find_element(By.CSS_SELECTOR, ".controls").is_displayed()
        assert browser.find_element(By.XPATH, "//h2[starts-with(., 'Bubble')]").is_displayed()


MEASURE = """
const done = arguments[0];
(async () => {
  const took = [], end = report.view.t1;
  for (let i = 0; i < 40; i++) {
    const began = performance.now();
    if (i % 2) report.zoom(i % 20 < 10 ? .7 : 1 / .7, end * .4);
    else report.show(report.view.t0 + end * .01, report.view.t1 + end * .01);
    await new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)));
    took.push(performance.now() - began);
  }
  done([report.firstPicture, took]);
})();
"""


def measured(path, size):
    """Milliseconds until the first picture, and of the median zoom or move."""
    assert path.stat().st_size <= size
    with chromium() as browser:
        open_report(browser, path)
        first, took = browser.execute_async_script(MEASURE)
        no_complaints(browser)
    print(f"{path.stat().st_size:,} bytes, first picture {first:.0f} ms, median {statistics.median(took):.1f} ms")
    return first, statistics.median(took)


@in_a_browser
@pytest.mark.processes
def test_a_page_of_many_events_is_fast(tmp_path):
    first, frame = measured(written(tmp_path, simulated("1f1b", 300, 200)), 2_000_000)
    assert first < 5000 and frame < 200              # of a machine that does other things, too


@in_a_browser
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("noise", [False, True], ids=["a simulation", "times that vary"])
def test_a_page_of_three_thousand_ranks(tmp_path, noise):
    """3,000 ranks x 1,000 micro-batches: six million actions."""
    of = simulation_report(simulated("1f1b", 3000, 1000, ("1.234", "2.1", "0", "0.01")), None, {})
    if noise:
        generator, own = np.random.default_rng(0), of.panels[0]
        ends = own.start + own.length * generator.uniform(0.7, 1.0, len(own.start))
        start = own.start + (ends - own.start) * generator.uniform(0.0, 0.2, len(own.start))
        noisy = Panel("measured", own.rows, own.ranks, own.offsets, start, ends - start, own.name, own.item, own.names)
        of = Report(of.title, of.facts, [noisy], "s")
    path = tmp_path / "page.html"
    write_page(path, of)
    first, frame = measured(path, 20_000_000)
    assert first <= 2000 and frame <= 50
