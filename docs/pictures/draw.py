"""Draw the pictures of docs/pictures.md anew: python docs/pictures/draw.py

layouts.svg, boxing.svg and timetable.svg need nothing; report.png is a screenshot, by Chromium (see tests/browser.py).
"""
from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import globaltensor as gt
from globaltensor.pictures.boxing_picture import boxing_picture
from globaltensor.pictures.layout_picture import layout_picture
from globaltensor.pictures.markup import Picture, element
from globaltensor.pictures.timetable_picture import timetable_picture
from globaltensor.schedules.generators import generate
from globaltensor.simulator.costs import Costs
from globaltensor.simulator.engine import simulate
from globaltensor_command import main as globaltensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum


def in_columns(pictures: list[Picture], columns: int = 2, gap: float = 16.0) -> Picture:
    """Pictures beside and below each other, as one."""
    elements, top, widest = [], 0.0, 0.0
    for first in range(0, len(pictures), columns):
        left, lowest = 0.0, 0.0
        for one in pictures[first:first + columns]:
            elements.append(element("g", "".join(one.elements), transform=f"translate({left:.0f} {top:.0f})"))
            left, lowest = left + max(one.width, 500) + gap, max(lowest, one.height)
        top, widest = top + lowest + gap, max(widest, left)
    return Picture(widest - gap, top - gap, elements)


def layouts() -> Picture:
    """The same tensor in four layouts, one of them uneven."""
    grid = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
    return in_columns([layout_picture(gt.zeros(7, 8, placement=grid, sbp=sbp).spec) for sbp in (
        (S(0), S(1)), (S(0), B), (S(0), P), (S(1), S(1)))])


def boxing() -> Picture:
    """An all-to-all, uneven."""
    line = gt.placement("cpu", [0, 1, 2, 3])
    x = gt.zeros(8, 6, placement=line, sbp=S(0))
    with gt.record() as moves:
        x.to_global(sbp=S(1))
    return boxing_picture(x.spec, x.spec.on(moves[0].dst), moves[0].flows, "to_global")


def timetable() -> Picture:
    """1F1B beside a schedule without bubbles."""
    runs = {}
    for name in ("1f1b", "zb-v"):
        schedule = generate(name, 4, 8)
        run = simulate(schedule, Costs.exact(["1", "1", "1", "0"], schedule.stages, schedule.chunks), record=True)
        runs[str(run)] = run.events()
    return timetable_picture(runs)


def report(path: Path) -> None:
    """A screenshot of the page of a simulated GPT."""
    from browser import chromium, open_report
    with tempfile.TemporaryDirectory() as folder, chromium(1200, 1000) as browser:
        page = Path(folder) / "report.html"
        globaltensor("simulate --model gpt --layers 64 --hidden 8192 --heads 64 --seq 2048 --tp 8 --pp 16 --dp 4 "
                     f"--micro-batch 1 --global-batch 256 --schedule 1f1b --report {page}".split())
        open_report(browser, page)
        browser.execute_script("window.scrollTo(0, document.querySelector('.controls').offsetTop - 60)")
        browser.set_script_timeout(10)
        browser.execute_async_script("setTimeout(arguments[0], 600)")
        browser.save_screenshot(str(path))


if __name__ == "__main__":
    gt.init(ranks=4)
    for name, picture in (("layouts", layouts()), ("boxing", boxing()), ("timetable", timetable())):
        picture.save(str(HERE / f"{name}.svg"))
    report(HERE / "report.png")
