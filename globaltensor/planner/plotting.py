"""A picture of a plan: its stages and their memory, the timetable of a step, and all candidates by time and memory.

    stages        a bar each: the bytes of a rank, by what they are for, beside what the device has
    candidates    a point each: full where the plan was simulated, hollow where its bound alone is known (with even
                  stages; a sample of them where there are many); the curve is what no other undercuts in both
    timetable     of a step, by the simulator

Needs matplotlib: pip install 'globaltensor[plot]'.
"""
from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from globaltensor.errors import ArgumentError
from globaltensor.planner.bounds import VariantCosts
from globaltensor.planner.cut_bounds import bounds_of_cuts
from globaltensor.planner.model_prices import ModelCandidate, ModelTask, VariantPrices
from globaltensor.planner.model_search import model_shapes, model_variants
from globaltensor.planner.pricing import Candidate, Task
from globaltensor.planner.space import MeshShape, even_cut, shapes, variants
from globaltensor.runtime.units import seconds_text
from globaltensor.schedules.timetable import ACTION_NAMES, FIRST_STAGE_COLOURS, Event, draw_panel, makespan_of
from globaltensor.simulator.engine import simulate
from globaltensor.simulator.gpt import RECOMPUTE

_SAMPLE = 1_200                                      # candidates drawn besides those that were simulated
_KINDS = {"parameters": "#4c78a8", "gradients": "#72b7b2", "optimizer": "#54a24b", "activations": "#f2a541",
          "temporary": "#b0b0b0"}
_COLOURS = ("#4c78a8", "#f2a541", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#8a8a8a")
_LIMIT = "#c03030"
_MOST_RANKS = 32


class Point(NamedTuple):
    """A candidate: seconds of a step, bytes of its fullest rank, which axes it has. `simulated`: else its bound."""

    seconds: float
    memory: float
    kind: str
    simulated: bool


def candidate_points(task: Task, simulated: Sequence[Candidate], seed: int = 0) -> list[Point]:
    """The plans that were simulated, and a sample of all others, each with what it recomputes at the least."""
    draw = random.Random(seed)
    points = [Point(one.seconds, one.fullest, _axes_kind(one.plan.dp, one.plan.tp, one.plan.pp), True)
              for one in simulated]
    several = shapes(task.gpt, task.devices, task.global_batch, task.fixed)
    for shape in draw.sample(several, min(len(several), _SAMPLE)):
        points += _bounds_of(task, shape, draw)
    return points


def _bounds_of(task: Task, shape: MeshShape, draw: random.Random) -> list[Point]:
    """One variant of a shape, under what it may recompute, chosen by chance."""
    possible = list(variants(task.gpt, shape, task.fixed))
    if not possible:
        return []
    variant, fixed = draw.choice(possible), task.fixed
    recompute = fixed.recompute or draw.choice(RECOMPUTE)
    cut = np.array([even_cut(task.gpt.layers, shape.pp * variant.chunks)])
    bounds = VariantCosts(replace(task, fixed=replace(fixed, recompute=recompute)), variant).of_cuts(cut, float("inf"))
    kind = _axes_kind(shape.dp, shape.tp, shape.pp)
    return [Point(float(bounds.seconds[0]), float(bounds.memory.max()), kind, False)]


def points_of_model(task: ModelTask, simulated: Sequence[ModelCandidate], seed: int = 0) -> list[Point]:
    """The same of a model."""
    draw = random.Random(seed)
    points = [Point(one.seconds, one.fullest, _axes_kind(*_axes_of(one)), True) for one in simulated]
    several = model_shapes(task)
    for shape in draw.sample(several, min(len(several), _SAMPLE)):
        possible = list(model_variants(task, shape))
        if possible:
            prices = VariantPrices(task, draw.choice(possible))
            cut = even_cut(task.units, len(prices.rank_of))
            points.append(Point(float(bounds_of_cuts(prices, np.array([cut]))[0]), max(prices.memory(cut)),
                                _axes_kind(shape.dp, shape.tp, shape.pp), False))
    return points


def _axes_of(one: ModelCandidate) -> tuple[int, int, int]:
    shape = one.variant.shape
    return shape.dp, shape.tp, shape.pp


def draw_model_plan(path: str | os.PathLike[str], strategy: Mapping[str, Any], task: ModelTask, best: ModelCandidate,
                    simulated: Sequence[ModelCandidate]) -> None:
    """The picture of a model's plan. Raises ArgumentError where it cannot be drawn, or be written."""
    events = simulate(best.run.schedule, best.run.costs, record=True).events()
    try:
        draw_plan(path, strategy, events, points_of_model(task, simulated))
    except ImportError:
        raise ArgumentError("a picture of a plan", "it needs matplotlib", "pip install 'globaltensor[plot]'") from None
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{os.fspath(path)} could not be written", str(error), "plan.png") from None


def _axes_kind(dp: int, tp: int, pp: int) -> str:
    return " x ".join(name for name, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size > 1) or "one device"


def draw_plan(path: str | os.PathLike[str], strategy: Mapping[str, Any], events: Sequence[Event],
              points: Sequence[Point]) -> None:
    """Write the picture, of the format that the ending of the name says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = max(e.rank for e in events) + 1
    table = min(0.36, 9 / ranks) * ranks + 1.0
    above = max(4.4, 0.3 * min(ranks, _MOST_RANKS) + 1.4)
    figure = Figure(figsize=(15, above + table + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(above, table))
    figure.suptitle(_title(strategy), x=0.01, ha="left", fontsize=12)
    _draw_stages(figure.add_subplot(grid[0, 0]), strategy)
    _draw_candidates(figure.add_subplot(grid[0, 1]), strategy, points)
    _draw_timetable(figure.add_subplot(grid[1, :]), strategy, events)
    figure.savefig(path, dpi=110)


def _title(of: Mapping[str, Any]) -> str:
    return (f"{of['devices']:,} devices of {of['cluster']}, global batch {of['global_batch']:,}: "
            f"{seconds_text(of['step_time'])} a step; no plan takes less than {seconds_text(of['lower_bound'])}")


def _plain(panel: Any, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_facecolor("#f7f7f7")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _draw_stages(panel: Any, of: Mapping[str, Any]) -> None:
    """A bar for the ranks of each place in the pipeline, with all of their stages."""
    by_ranks: dict[tuple[int, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for index, stage in enumerate(of["stages"]):
        by_ranks.setdefault(tuple(stage["ranks"]), []).append((index, stage))
    drawn = list(by_ranks.items())[:_MOST_RANKS]
    start, device = np.zeros(len(drawn)), of["memory"]["device"]
    unit, name = _unit_of_bytes(device)
    for kind, colour in _KINDS.items():
        sizes = np.array([sum(stage["memory"][kind] for _, stage in own) for _, own in drawn]) / unit
        if sizes.any():
            panel.barh(range(len(drawn)), sizes, left=start, height=0.72, color=colour, label=kind)
        start = start + sizes
    if start.max() > 0.25 * device / unit:
        panel.axvline(device / unit, color=_LIMIT, linewidth=1.2, linestyle="--", label="device")
    else:                                            # bars would be slivers beside it
        panel.text(0.99, 0.02, f"a device has {device / unit:,.4g} {name}", transform=panel.transAxes, ha="right",
                   fontsize=8, color=_LIMIT)
    panel.set_xlim(0, 1.06 * max(start.max(), device / unit if start.max() > 0.25 * device / unit else 0))
    panel.set_yticks(range(len(drawn)), [_ranks_label(ranks, own) for ranks, own in drawn], fontsize=8)
    panel.set_ylim(max(len(drawn), 3) - 0.4, -0.6)
    panel.set_xlabel(f"{name} of a rank")
    more = len(by_ranks) - len(drawn)
    _plain(panel, "stages" + (f" (and {more} more)" if more else ""))
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize=7.5, columnspacing=0.9,
                 handlelength=1.1, handletextpad=0.5, borderaxespad=0.2)


def _ranks_label(ranks: Sequence[int], own: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    stage = own[0][1]
    axes = " x ".join(f"{name} {size}" for name, size in stage["axes"].items() if size > 1)
    more = "".join([f", ZeRO {stage['zero']}" if stage["zero"] else "",
                    f", recompute {stage['recompute']}" if stage["recompute"] != "none" else ""])
    spans = [f"{index}: {_span(one['layers'])}" for index, one in own]
    where = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    several = "\n".join(spans if len(spans) < 3 else [spans[0], f"... {spans[-1]}"])
    return f"{several}\n{where}{': ' * bool(axes)}{axes}{more}"


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _unit_of_bytes(size: float) -> tuple[float, str]:
    return (1e9, "GB") if size >= 1e9 else (1e6, "MB")


def _draw_candidates(panel: Any, of: Mapping[str, Any], points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    device = of["memory"]["device"]
    unit, name = _unit_of_bytes(device)
    kinds = sorted({point.kind for point in points}, key=lambda kind: (kind.count(" x "), kind))
    for kind, colour in zip(kinds, _COLOURS):
        for simulated in (False, True):
            own = [p for p in points if p.kind == kind and p.simulated == simulated]
            if own:
                panel.scatter([p.seconds for p in own], [p.memory / unit for p in own], s=20 if simulated else 12,
                              facecolors=colour if simulated else "none", edgecolors=colour,
                              linewidths=0.6 if not simulated else 0.4, alpha=0.9 if simulated else 0.55, zorder=3)
        panel.scatter([], [], s=26, color=colour, label=kind)
    for axis, scale in ((panel.xaxis, panel.set_xscale), (panel.yaxis, panel.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    panel.axhline(device / unit, color=_LIMIT, linewidth=1.2, linestyle="--")
    front = pareto_front(points)
    panel.plot([p.seconds for p in front], [p.memory / unit for p in front], color="#606060", linewidth=0.9, zorder=2,
               drawstyle="steps-post")
    fullest = max(of["memory"]["per_rank"]) / unit
    panel.scatter([of["step_time"]], [fullest], s=190, marker="*", color="#111111", zorder=5, label="this plan")
    panel.axvline(of["lower_bound"], color="#111111", linewidth=0.8, linestyle=":", label="lower bound")
    panel.text(0.01, device / unit, "device", transform=panel.get_yaxis_transform(), va="bottom", fontsize=8,
               color=_LIMIT)
    panel.set_xlabel("seconds of a step")
    panel.set_ylabel(f"{name} of the fullest rank")
    full = sum(p.simulated for p in points)
    _plain(panel, f"candidates: {full:,} simulated (full), bounds of {len(points) - full:,} others (hollow)")
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other undercuts in both time and memory, in the order of time."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point.memory < front[-1].memory:
            front.append(point)
    return front


def _draw_timetable(panel: Any, of: Mapping[str, Any], events: Sequence[Event]) -> None:
    from matplotlib.patches import Patch

    longest = makespan_of(events)
    draw_panel(panel, events, longest)
    kinds = [kind for kind in ACTION_NAMES if any(e.kind == kind for e in events)]
    panel.legend(handles=[Patch(color=FIRST_STAGE_COLOURS[kind], label=ACTION_NAMES[kind]) for kind in kinds],
                 loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    panel.set_xlabel("seconds")
    parts = ", ".join(f"{name} {seconds / of['step_time']:.0%}" for name, seconds in of["time"].items())
    _plain(panel, f"timetable: {of['schedule']}, {of['micro_batches']} micro-batches of {of['micro_batch']} "
                  f"({parts})")
