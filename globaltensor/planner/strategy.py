"""A strategy: a whole parallel plan as one JSON object, to be printed, saved, edited and run.

    strategy = gt.Strategy.load("plan.json")         # what `globaltensor plan --save plan.json` wrote
    strategy["stages"][0]["zero"] = 1                # it is a dict
    strategy.check()                                 # raises, naming the key, for what cannot be
    runner, optimizer = strategy.apply(model, loss, torch.optim.AdamW)

    stages       one after the other: with `chunks`, stage s is on the ranks that the schedule says
      layers     names of modules of the model, in order; together all of them, each once
      ranks      of the world; `axes` arranges them, the first axis outermost
      plan       rows as those of gt.Plan, or "recognised": gt.Plan.of along "tp"; `sequence` is that function's
      batch      axis -> dim along which it splits the batch
      zero       0 to 3, along the axes that split the batch
      recompute  none, selective or full
      group      of the cluster's hosts, where these are of several kinds

All else says what was expected of the plan: seconds and bytes. Reading one needs neither the search nor scipy.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from globaltensor.errors import ArgumentError, counted, expect, expect_path, writing_to
from globaltensor.pictures.markup import element, html_table
from globaltensor.pipelining.runner import PipelineRunner
from globaltensor.planner.applying import apply_strategy
from globaltensor.planner.checking import StrategyError, check_strategy
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.units import at_least_text, bytes_text, seconds_text
from globaltensor.tracebacks import api_boundary


class Strategy(dict[str, Any]):
    """A plan as data; the docstring of `globaltensor.planner.strategy` lists its keys. It is the dict that JSON has."""

    @classmethod
    @api_boundary
    def load(cls, path: str | os.PathLike[str]) -> Strategy:
        """Read what `save` wrote. Raises StrategyError for what is not a JSON object of this format, or cannot be."""
        expect_path(path, "gt.Strategy.load of no file", 'gt.Strategy.load("plan.json")')
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise StrategyError(f"the strategy {os.fspath(path)} could not be read", str(error),
                                "a file that `globaltensor plan --save` wrote") from None
        if not isinstance(read, dict):
            raise StrategyError(f"{os.fspath(path)} holds no strategy", "it is not a JSON object",
                                "a file that `globaltensor plan --save` wrote")
        strategy = cls(read)
        strategy.check()
        return strategy

    @api_boundary
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        with writing_to(path, "a strategy into no file", 'strategy.save("plan.json")'):
            Path(path).write_text(self.as_text() + "\n")

    def as_text(self) -> str:
        """As JSON."""
        return json.dumps(self, indent=2)

    @api_boundary
    def check(self) -> None:
        """Raise StrategyError, naming the key, where the plan is none that could run."""
        check_strategy(self)

    @api_boundary
    def apply(self, model: nn.Module, loss: Callable[..., Any] | None,
              optimizer_class: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
              device: str = "cpu") -> tuple[PipelineRunner, torch.optim.Optimizer]:
        """Spread the model as the plan says, by gt.parallelize, gt.pipeline and gt.zero. (runner, optimizer).

        model            plain; it has the modules that the stages name. Changed in place
        loss             of the model's output and the targets, as that of gt.pipeline
        optimizer_class  called with the parameters: torch.optim.AdamW, or functools.partial(torch.optim.AdamW, lr=1e-4)
        device           the type of the devices: "cpu", "cuda", ...
        `runner.step(inputs, targets)` runs a batch of `global_batch` samples, in `micro_batches` parts. Raises
        StrategyError, before anything moves, for what is wrong with the plan or what the runtime cannot do.
        """
        _check_arguments_of_apply(model, loss, optimizer_class)
        self.check()
        if not self["feasible"]:
            raise StrategyError("this strategy says that nothing fits", "it has no stages to run",
                                f"what it names as smallest_change: {self.get('smallest_change')}")
        return apply_strategy(self, model, loss, optimizer_class, device)

    def __str__(self) -> str:
        return strategy_text(self)

    def _repr_html_(self) -> str:
        lines, rows = strategy_lines(self)
        above = [element("div", escape(line), class_="gt-picture", style="font-size:12px") for line in lines]
        cells = ([escape(cell) for cell in row] for row in rows)
        return "".join(above) + html_table(_head(self) if rows else (), cells)


def _check_arguments_of_apply(model: object, loss: object, optimizer_class: object) -> None:
    expect(model, nn.Module, "strategy.apply to no module", "strategy.apply(model, loss, torch.optim.AdamW)")
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss={loss!r:.60}", "it is called with the model's output and the targets",
                            "torch.nn.functional.cross_entropy, or None: then the model returns its loss")
    if not callable(optimizer_class):
        is_one = isinstance(optimizer_class, torch.optim.Optimizer)
        kind = type(optimizer_class).__name__ if is_one else "AdamW"
        raise ArgumentError(f"strategy.apply with a {kind} that is made" if is_one else
                            f"optimizer_class={optimizer_class!r:.60}", "it is called with the parameters of the "
                            "model once it is spread",
                            f"torch.optim.{kind}, or lambda p: torch.optim.{kind}(p, lr=1e-4)")


_HEAD = ("stage", "layers", "ranks", "axes", "zero", "recompute", "memory")


def _head(of: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_HEAD, "group") if of["feasible"] and any("group" in stage for stage in of["stages"]) else _HEAD


def strategy_text(of: Mapping[str, Any]) -> str:
    """What print shows: the plan in a few lines."""
    lines, rows = strategy_lines(of)
    return "\n".join([*lines, *(aligned([_head(of), *rows]) if rows else [])])


def strategy_lines(of: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """What is told of the whole plan, in lines, and of each stage, in a row."""
    if not of["feasible"]:
        changes = [f"  {'or' if k else 'try'} {name.replace('_', ' ')}: "
                   f"{at_least_text(change) if name == 'memory' else change}"
                   for k, (name, change) in enumerate(of["smallest_change"].items())]
        return [f"nothing fits: the least that a device needs is {bytes_text(of['needs'])}, it has "
                f"{bytes_text(of['device'])}", *changes], []
    rows: list[tuple[str, ...]] = []
    for index, stage in enumerate(of["stages"]):
        axes = " x ".join(f"{name} {size}" for name, size in stage["axes"].items())
        rows.append((str(index), _span_text(stage["layers"]), _ranks_text(stage["ranks"]), axes, str(stage["zero"]),
                     stage["recompute"], bytes_text(stage["memory"]["total"]) if "memory" in stage else "",
                     *([stage["group"]] if "group" in stage else [])))
    head = [f"{of['schedule']}, {counted(of['micro_batches'], 'micro-batch', 'micro-batches')} of {of['micro_batch']}, "
            f"global batch {of['global_batch']}, {of['devices']} devices of {of['cluster']}"]
    if "step_time" in of:
        parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in of["time"].items())
        head += [f"step {seconds_text(of['step_time'])} ({parts}); no plan takes less than "
                 f"{seconds_text(of['lower_bound'])}, {of['gap']:.1%} less"]
    return head, rows


def _span_text(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _ranks_text(ranks: list[int]) -> str:
    in_a_row = ranks == list(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) > 2
    return f"{ranks[0]} to {ranks[-1]}" if in_a_row else " ".join(map(str, ranks))
