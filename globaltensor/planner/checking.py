"""What is wrong with a strategy, said before anything moves: the key, its value, what it may be.

Every key has a row in one of three tables, with a function that says what is wrong with a value ("" for nothing). Then
what goes together: ranks and axes, the batch and what splits it, stages and the schedule.
"""
from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import Any

from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.sbp import read_sbp
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.gpt import RECOMPUTE

FORMAT = "globaltensor-strategy-1"
RECOGNISED = "recognised"


class StrategyError(GlobalTensorError, ValueError):
    """A strategy that cannot be: a key that is missing or wrong, ranks that overlap, a batch that does not come out."""


def check_strategy(of: Mapping[str, Any]) -> None:
    """Raise StrategyError, naming the key, where the plan is none that could run."""
    _check_whole(of)
    if of["feasible"]:
        for index, stage in enumerate(of["stages"]):
            _check_stage(stage, f"stages[{index}]", of)
        _check_stages_together(of)


def _whole_number(least: int) -> Callable[[Any], str]:
    def problem_of(value: Any) -> str:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if fits else f"it is a whole number, {least} or more"
    return problem_of


def _one_of(*choices: Any) -> Callable[[Any], str]:
    def problem_of(value: Any) -> str:
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
        return "" if fits else f"it is one of {', '.join(map(json.dumps, choices))}"
    return problem_of


def _seconds(value: Any) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
    return "" if fits else "it is a number, 0 or more"


def _dict(value: Any) -> str:
    return "" if isinstance(value, dict) else "it is an object"


def _list(value: Any) -> str:
    return "" if isinstance(value, list) and value else "it is a list, and not empty"


def _names(value: Any) -> str:
    return _list(value) or ("" if all(isinstance(name, str) and name for name in value) else "it is a list of names")


def _distinct_ranks(value: Any) -> str:
    bad = _list(value) or next(filter(None, map(_whole_number(0), value)), "")
    return "it is a list of ranks, 0 or more, each once" if bad or len(set(value)) < len(value) else ""


_ALWAYS: dict[str, Callable[[Any], str]] = {"format": _one_of(FORMAT), "feasible": _one_of(True, False)}
_NEEDED: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("devices", "global_batch", "micro_batch", "micro_batches", "chunks"), _whole_number(1)),
    "schedule": _one_of(*GENERATORS), "stages": _list}
_EXPECTED: dict[str, Callable[[Any], str]] = {            # may be absent
    **dict.fromkeys(("step_time", "lower_bound", "gap", "search_seconds", "tokens_per_second", "tflops_per_device"),
                    _seconds), "candidates": _whole_number(0), "time": _dict, "memory": _dict}
_OF_STAGE: dict[str, Callable[[Any], str]] = {
    "layers": _names, "ranks": _distinct_ranks, "axes": _dict, "batch": _dict, "zero": _one_of(0, 1, 2, 3),
    "recompute": _one_of(*RECOMPUTE)}
_OTHER_KEYS = {"cluster", "dtype", "model", "menu", "runners_up", "needs", "device", "smallest_change", "fixed",
               "inputs", "whole", "why_whole", "left_out", "explanation"}
_OTHER_KEYS_OF_STAGE = {"plan", "sequence", "forward", "backward", "bytes", "memory", "group"}


def _check_values(of: Mapping[str, Any], rows: Mapping[str, Callable[[Any], str]], where: str, needed: bool) -> None:
    for key, problem_of in rows.items():
        if key not in of:
            if needed:
                raise StrategyError(f"the strategy has no {where}{key}", "it is needed to run", f'"{key}": ...')
            continue
        if problem := problem_of(of[key]):
            raise StrategyError(f"{where}{key} is {json.dumps(of[key], default=repr):.80}", problem)


def _check_known(of: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in of:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            raise StrategyError(f"a strategy has no {where}{key}", f"the keys are {', '.join(sorted(known))}", *near)


def _check_whole(of: Mapping[str, Any]) -> None:
    _check_values(of, _ALWAYS, "", True)
    _check_known(of, {*_ALWAYS, *_NEEDED, *_EXPECTED, *_OTHER_KEYS}, "")
    if of["feasible"]:
        _check_values(of, _NEEDED, "", True)
        _check_values(of, _EXPECTED, "", False)


def _check_stage(stage: Any, where: str, of: Mapping[str, Any]) -> None:
    if not isinstance(stage, dict):
        raise StrategyError(f"{where} is {json.dumps(stage, default=repr):.80}", "it is an object")
    _check_values(stage, _OF_STAGE, f"{where}.", True)
    _check_known(stage, {*_OF_STAGE, *_OTHER_KEYS_OF_STAGE}, f"{where}.")
    axes, ranks = stage["axes"], stage["ranks"]
    for name, size in axes.items():
        if problem := _whole_number(1)(size):
            raise StrategyError(f"{where}.axes.{name} is {size!r}", problem)
    if not axes or prod(axes.values()) != len(ranks):
        shape = " x ".join(f"{name} {size}" for name, size in axes.items()) or "none"
        raise StrategyError(f"{where}.axes: {shape}, for {len(ranks)} ranks",
                            "the sizes of the axes multiply to the number of ranks")
    if strange := [rank for rank in ranks if rank >= of["devices"]]:
        raise StrategyError(f"{where}.ranks has {strange[0]}", f"there are {of['devices']} devices, 0 to "
                            f"{of['devices'] - 1}")
    for axis, dim in stage["batch"].items():
        if axis not in axes or not isinstance(dim, int) or isinstance(dim, bool) or dim:
            raise StrategyError(f"{where}.batch.{axis} is {dim!r}", "an axis of the stage splits dim 0 of the batch",
                                f'"batch": {{"{next(iter(axes))}": 0}}')
    _check_split_batch(stage, where, of)
    if stage["zero"] and not stage["batch"]:
        raise StrategyError(f"{where}.zero is {stage['zero']}", "no axis splits the batch, and ZeRO works along such",
                            "zero 0")
    _check_layouts(stage, where)


def _check_split_batch(stage: dict[str, Any], where: str, of: Mapping[str, Any]) -> None:
    """`micro_batch` is that of a rank of the first stage; the others split the same samples."""
    split, numbers = prod(stage["axes"][axis] for axis in stage["batch"]), (of["micro_batches"], of["micro_batch"])
    samples, rest = divmod(of["global_batch"], numbers[0])
    if where == "stages[0]" or rest:
        if split * numbers[1] * numbers[0] != of["global_batch"]:
            raise StrategyError(f"global_batch is {of['global_batch']}, and {where}.batch splits it over {split} ranks "
                                f"in {numbers[0]} micro-batches of {numbers[1]}",
                                "the three multiply to the global batch", f"global_batch {split * prod(numbers)}")
    elif samples % split:
        raise StrategyError(f"{where}.batch splits {samples} samples over {split} ranks",
                            f"a micro-batch has {samples} samples, and each rank as many of them",
                            f"an axis of {max(n for n in range(1, split) if samples % n == 0)}")


def _check_layouts(stage: dict[str, Any], where: str) -> None:
    axes, plan = stage["axes"], stage.get("plan", RECOGNISED)
    if stage.get("sequence", "") not in ("", *axes):
        raise StrategyError(f"{where}.sequence is {stage['sequence']!r}", f"it is one of the axes {', '.join(axes)}")
    if isinstance(plan, str) and plan == RECOGNISED:
        return
    if not isinstance(plan, dict):
        raise StrategyError(f"{where}.plan is {plan!r:.80}", f'it is rows of layouts, or "{RECOGNISED}"',
                            '{"*.up.weight": {"tp": "S(0)"}}')
    for pattern, row in plan.items():
        if not isinstance(row, dict):
            raise StrategyError(f"{where}.plan[{pattern!r}] is {row!r:.80}", "a row says how along each axis",
                                '{"tp": "S(0)"}')
        for axis, how in row.items():
            if axis not in axes:
                raise StrategyError(f"{where}.plan[{pattern!r}] names the axis {axis!r}",
                                    f"the stage's axes are {', '.join(axes)}")
            if read_sbp(how) is None:
                raise StrategyError(f"{where}.plan[{pattern!r}].{axis} is {how!r}", "that is not an sbp", "S(0)")


def _check_stages_together(of: Mapping[str, Any]) -> None:
    stages, chunks = of["stages"], of["chunks"]
    fixed = GENERATORS[of["schedule"]][1]
    if fixed not in (None, chunks):
        raise StrategyError(f"chunks is {chunks}", f"{of['schedule']} has {fixed} stages on a rank", f"chunks {fixed}")
    if len(stages) % chunks:
        raise StrategyError(f"stages has {len(stages)} entries", f"chunks is {chunks}: it divides them",
                            f"{len(stages) // chunks * chunks or chunks} stages")
    pipeline = len(stages) // chunks
    turns = of["schedule"] in ("zb-v", "dualpipe-v")
    holders: dict[int, int] = {}                     # rank of the world -> rank of the pipeline
    for index, stage in enumerate(stages):
        at = 2 * pipeline - 1 - index if turns and index >= pipeline else index % pipeline
        if set(stage["ranks"]) != set(stages[at]["ranks"]):
            raise StrategyError(f"stages[{index}].ranks are not those of stages[{at}]",
                                f"{of['schedule']} has both on the same rank of the pipeline")
        for rank in stage["ranks"]:
            if holders.setdefault(rank, at) != at:
                raise StrategyError(f"stages[{index}].ranks has {rank}, which stages[{holders[rank]}].ranks has too",
                                    "stages on different ranks of the pipeline share none")
    names: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name in stage["layers"]:
            if name in names:
                raise StrategyError(f"stages[{index}].layers has {name!r}, which stages[{names[name]}].layers has "
                                    "too", "each layer is in one stage, once")
            names[name] = index
