"""The plots and tables of docs/performance.md, made from benchmarks/results: python docs/pictures/performance.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a plot is docs/pictures/NAME.svg. Each plot holds the
hash of what it was made from, by which a test finds one that is stale. Text and lines follow the reader's light or dark
theme.
"""
from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGE = HERE.parent / "performance.md"
RESULTS = HERE.parent.parent / "benchmarks" / "results"
COLOURS = ("#0a84d6", "#d2691e", "#2e9e5b", "#9a5bd0", "#8a8f98")     # told apart on white and on black
INK = "#010203"                                      # stands for the colour of text, which the theme chooses
THEME = "<style>svg{--ink:#24292f}@media(prefers-color-scheme:dark){svg{--ink:#e6edf3}}</style>"
STYLE = {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
         "savefig.transparent": True, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
         "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK}
KIB = {"KB": 1 << 10, "MB": 1 << 20}

Rows = list[dict[str, str]]


def tables(name: str) -> list[Rows]:
    """The tables of a result file. Where a column ends is where all of its lines are blank, twice in a row."""
    blocks = re.split(r"\n\s*\n", (RESULTS / f"{name}.txt").read_text())
    texts = []
    for block in blocks:
        lines = [line for line in block.splitlines() if line.startswith("  ")]
        if len(lines) > 1 and len(lines) >= len(block.splitlines()) - 1 and block is not blocks[0]:
            texts.append(lines)
    return [_rows(lines) for lines in texts]


def _rows(lines: list[str]) -> Rows:
    width = max(map(len, lines))
    blank = "".join(" " if all(line.ljust(width)[k] == " " for line in lines) else "x" for k in range(width))
    spans = [match.span() for match in re.finditer(r"x(?:x| (?! ))*", blank)]
    head, *rows = [[line.ljust(width)[a:b].strip() for a, b in spans] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """The first number of a cell: 3.6 of `3.6 (3.51)`."""
    return float(cell.split()[0].replace(",", ""))


def size(cell: str) -> int:
    amount, unit = cell.split()
    return int(amount) * KIB[unit]


# -------------------------------------------------------------------------------------------------------------- plots


def boxing(axes: Any) -> None:
    rows = [row for row in tables("boxing-2-ranks")[0] if row["dtype"] == "float32"]
    for panel, move in zip(axes, ("P -> B", "S -> B", "P -> S", "S -> S"), strict=True):
        own = [row for row in rows if row["boxing"] == move]
        for colour, way in zip(COLOURS, ("direct", "MPI", "DTensor", "gloo", "ceiling"), strict=True):
            panel.plot([size(row["size"]) for row in own], [number(row[way]) for row in own], "o-", color=colour, ms=3,
                       label={"direct": "globaltensor", "ceiling": "measured limit", "MPI": "Open MPI"}.get(way, way))
        panel.set(xscale="log", yscale="log", title=move, xlabel="bytes")
    axes[0].set_ylabel("microseconds")


def strategies(axes: Any) -> None:
    for panel, ranks in zip(axes, (2, 4), strict=True):
        rows = tables(f"strategies-{ranks}-ranks")[0]
        names = [row["strategy"] for row in rows]
        megabytes = {label: [number(row[f"bytes {label}"]) / 1e6 for row in rows] for label in ("moved", "kept")}
        _bars(panel, names, megabytes, f"{ranks} ranks", "MB of a rank in a step")


def pipeline(axes: Any) -> None:
    for panel, ranks in zip(axes, ("2", "4"), strict=True):
        rows = [row for row in tables("pipeline")[0] if row["ranks"] == ranks]
        times = {"globaltensor": [number(row["step ms"]) for row in rows],
                 "torch": [0.0 if row["torch's"] == "-" else number(row["torch's"]) for row in rows]}
        _bars(panel, [row["schedule"] for row in rows], times, f"{ranks} stages", "ms for a step")


def hosts(axes: Any) -> None:
    rows = tables("hosts")[1]
    arms = [column for column in rows[0] if " of " in column]
    for panel, grid in zip(axes, dict.fromkeys(row["hosts x ranks"] for row in rows), strict=True):
        ratios = {row["link"]: [math.nan if row[arm] == "-" else number(row[arm]) for arm in arms]
                  for row in rows if row["hosts x ranks"] == grid}
        _bars(panel, [arm.partition(" of ")[0] for arm in arms], ratios, f"{grid} ranks", "")
        panel.axhline(1, color=INK, lw=0.6)
    axes[0].set_ylabel("of the time of torch's")


def scaling(axes: Any) -> None:
    measured, simulated, _ = tables("scaling")
    for panel, kind in zip(axes, ("strong", "weak"), strict=True):
        for colour, (label, rows, own, count) in zip(COLOURS, (
                ("measured, on two cores", measured, kind, "ranks"),
                ("simulated, a core each", simulated, f"{kind}, this machine", "devices"),
                ("simulated, 1.3B on dgx-h100", simulated, f"{kind}, 1.3B on dgx-h100", "devices")), strict=False):
            kept = [row for row in rows if own in row.values()]
            panel.plot([number(row[count]) for row in kept], [number(row["efficiency"]) for row in kept], "o-", ms=3,
                       color=colour, label=label)
        panel.set(xscale="log", ylim=(0, 1.1), title=kind, xlabel="ranks")
    axes[0].set_ylabel("efficiency")


def compiled(axes: Any) -> None:
    rows = [row for row in tables("compile")[0] if row["hidden"] == "256"]
    arms = [row["arm"] for row in rows if not row["arm"].endswith("compiled")]
    by_arm = {row["arm"]: number(row["tokens/s"]) for row in rows}
    groups = {"eager": [by_arm[arm] for arm in arms], "compiled": [by_arm[f"{arm} compiled"] for arm in arms]}
    _bars(axes[0], arms, groups, "", "tokens/s")


def generate(axes: Any) -> None:
    rows = [row for row in tables("generate")[0] if row["arm"].startswith("globaltensor")]
    _bars(axes[0], [f"{row['model']}, {row['arm'].removeprefix('globaltensor ')}" for row in rows],
          {"globaltensor": [number(row["bytes a token"]) / 1e3 for row in rows]}, "", "KB a token, of a rank")


def checkpoint(axes: Any) -> None:
    rows = [row for row in tables("checkpoint")[0] if "cache" not in row["what"]]
    rates = {(row["way"], row["what"]): number(row["GB/s"]) for row in rows}
    ways, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("way", "what"))
    groups = {way: [rates.get((way, name), math.nan) for name in names] for way in ways}     # not all ways save
    _bars(axes[0], names, groups, "", "GB/s")


def faults(axes: Any) -> None:
    rows = [row for row in tables("faults")[0] if row["limit s"] in ("2", "5", "10", "20")]
    for colour, limit in zip(COLOURS, ("2", "5", "10", "15"), strict=False):
        slowest = sorted(number(row["max s"]) for row in rows if row["limit s"] == limit)
        if slowest:
            axes[0].plot(slowest, [(k + 1) / len(slowest) for k in range(len(slowest))], "o-", ms=3, color=colour,
                         label=f"{len(slowest)} faults with a limit of {limit} s")
    axes[0].set(xscale="log", xlabel="seconds until all were told, slowest run", ylabel="share of the faults")


def soak(axes: Any) -> None:
    kinds = ("KILL", "SEGV", "STOP", "preemption", "full", "slow", "cut")
    groups = {}
    for seed, rows in zip((5, 6, 7), tables("soak"), strict=True):
        groups[f"seed {seed}"] = [sum(number(row[kind]) for row in rows if row[kind] != "-") for kind in kinds]
    _bars(axes[0], list(kinds), groups, "", "faults survived")


def _bars(panel: Any, names: list[str], groups: dict[str, list[float]], title: str, unit: str) -> None:
    wide = 0.8 / len(groups)
    for k, (colour, (label, values)) in enumerate(zip(COLOURS, groups.items(), strict=False)):
        places = [x + (k - (len(groups) - 1) / 2) * wide for x in range(len(names))]
        panel.bar(places, values, wide, color=colour, label=label)
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    panel.set(title=title, ylabel=unit)


class Plot(NamedTuple):
    """What draws it, from which result files, in how many panels."""

    draw: Callable[[Any], None]
    files: tuple[str, ...]
    panels: int = 1


PLOTS = {"performance-boxing": Plot(boxing, ("boxing-2-ranks",), 4),
         "performance-strategies": Plot(strategies, ("strategies-2-ranks", "strategies-4-ranks"), 2),
         "performance-pipeline": Plot(pipeline, ("pipeline",), 2),
         "performance-hosts": Plot(hosts, ("hosts",), len({row["hosts x ranks"] for row in tables("hosts")[1]})),
         "performance-scaling": Plot(scaling, ("scaling",), 2),
         "performance-compile": Plot(compiled, ("compile",)),
         "performance-generate": Plot(generate, ("generate",)),
         "performance-checkpoint": Plot(checkpoint, ("checkpoint",)),
         "performance-faults": Plot(faults, ("faults",)),
         "performance-soak": Plot(soak, ("soak",))}


def source_hash(plot: Plot) -> str:
    """Of the result files and of this file: a plot with another one is stale."""
    texts = [(RESULTS / f"{name}.txt").read_bytes() for name in plot.files]
    return hashlib.sha256(b"".join([*texts, Path(__file__).read_bytes()])).hexdigest()


def drawn(name: str) -> str:
    """A plot as SVG."""
    plot = PLOTS[name]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots(1, plot.panels, squeeze=False)
        plot.draw(axes[0])
        handles, labels = axes[0][0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": f"matplotlib {matplotlib.__version__}",
                                                     "Description": source_hash(plot)})
    return text.getvalue().replace(INK, "var(--ink)").replace("<defs>", THEME + "<defs>", 1)


# ------------------------------------------------------------------------------------------------------------- tables

COLUMNS = {"boxing-2-ranks": ("boxing", "size", "ceiling", "direct", "python", "gloo", "MPI", "DTensor"),
           "pipeline": ("schedule", "ranks", "step ms", "torch's", "bubble", "simulated", "peak MB", "tokens/s"),
           "soak": ("on", "faults", "KILL", "SEGV", "STOP", "preemption", "full", "slow", "cut", "steps", "different",
                    "left behind")}
SHOWN: dict[str, Callable[[dict[str, str]], bool]] = {      # of long tables; all of the others
    "boxing-2-ranks": lambda row: row["dtype"] == "float32" and row["size"] in ("1 KB", "256 KB", "64 MB"),
    "scaling": lambda row: row.get("devices") not in ("2", "64", "256")}


def table(name: str) -> str:
    """The tables of a result file, as Markdown."""
    texts = []
    for rows in tables(name):
        head = COLUMNS.get(name, tuple(rows[0]))
        if not rows[0].keys() >= {*head}:            # another table of the file
            continue
        lines = [[row[column] for column in head] for row in rows if SHOWN.get(name, lambda row: True)(row)]
        texts.append("\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines]))
    return "\n\n".join(texts)


def filled(page: str) -> str:
    """The page, with its tables anew."""
    return re.sub(r"(?s)<!-- table ([\w-]+) -->.*?<!-- end -->",
                  lambda match: f"<!-- table {match[1]} -->\n\n{table(match[1])}\n\n<!-- end -->", page)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))
    for name in PLOTS:
        (HERE / f"{name}.svg").write_text(drawn(name))


if __name__ == "__main__":
    main()
