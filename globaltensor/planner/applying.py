"""A strategy run: what one would write by hand with gt.parallelize, gt.pipeline and gt.zero.

    gt.parallelize    the parameters of each stage, by its rows
    recomputation     the blocks of a stage that recomputes run again in backward, whole or in part (recomputing.py)
    gt.pipeline       the stages on their ranks, by the schedule; one stage alone is a pipeline of one
    gt.zero           along the axis that splits the batch, of each stage's parameters as it says

Stages may have axes of different sizes: what passes between them is boxed from one mesh to the other.

What cannot be done so is refused before anything moves.
"""
from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from globaltensor.layouts.placement import placement
from globaltensor.parallel.plan import OF_MODULES, Plan, parallelize
from globaltensor.parallel.zero import zero, zero_by_parameter
from globaltensor.pipelining.layer_lists import WholeModel
from globaltensor.pipelining.runner import PipelineRunner, pipeline
from globaltensor.planner.checking import RECOGNISED, StrategyError
from globaltensor.planner.recomputing import recompute_block

Stage = Mapping[str, Any]


def apply_strategy(strategy: Mapping[str, Any], model: nn.Module, loss: Callable[..., Any] | None,
                   optimizer_class: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
                   device: str) -> tuple[PipelineRunner, torch.optim.Optimizer]:
    """The model spread as a checked strategy says, ready to be trained."""
    stages: list[Stage] = strategy["stages"]
    modules = dict(model.named_modules())
    _check_layers(stages, model, modules)
    axis = _check_runnable(stages)
    names = tuple(stages[0]["axes"])
    places = [placement(device, _arranged(stage["ranks"], list(stage["axes"].values())), names) for stage in stages]
    parallelize(model, places[0], _plan_of_stages(stages, model))
    for stage in stages:
        for name in stage["layers"] if stage["recompute"] != "none" else ():
            if name in modules and is_block(modules[name]):
                recompute_block(modules[name], stage["recompute"])
    several = len(stages) > 1
    runner = pipeline(model if several else [WholeModel(model)], places, strategy["schedule"],
                      strategy["micro_batches"], loss,
                      starts=[stage["layers"][0] for stage in stages[1:]] if several else None,
                      chunks=strategy["chunks"], batch=axis, inputs=strategy.get("inputs", ()) if several else ())
    optimizer, parameters = optimizer_class(model.parameters()), dict(model.named_parameters(remove_duplicate=False))
    if not several and stages[0]["zero"]:
        zero(optimizer, axis, stages[0]["zero"], model if stages[0]["zero"] == 3 else None)
    elif any(stage["zero"] for stage in stages):
        by_parameter = _zero_of_parameters(stages, parameters)
        zero_by_parameter(optimizer, axis, lambda p: by_parameter.get(id(p), 0))
    return runner, optimizer


def _zero_of_parameters(stages: list[Stage], parameters: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """The stage of ZeRO of each parameter: that of the first stage which has it."""
    of: dict[int, int] = {}
    for stage in stages:
        for name, p in parameters.items():
            if any(f"{name}.".startswith(f"{layer}.") for layer in stage["layers"]):
                of.setdefault(id(p), stage["zero"])
    return of


def is_block(module: nn.Module) -> bool:
    """Is it made of others? A single layer keeps its input anyway, so there is nothing to compute again."""
    return any(True for _ in module.children())


def _check_layers(stages: list[Stage], model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """All names are modules, and every parameter is in one."""
    names = [name for stage in stages for name in stage["layers"]]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in modules and name not in parameters:
            raise StrategyError(f"a {type(model).__name__} has no {name!r}", "the layers of a stage are its modules, "
                                "and parameters of its own", *difflib.get_close_matches(name, modules, 1))
    for parameter, _ in model.named_parameters():
        if parameter not in names and not any(parameter.startswith(f"{name}.") for name in names):
            missing = parameter.rpartition(".")[0] or parameter
            raise StrategyError(f"no stage has {parameter}", "the layers of the stages are all of the model",
                                f'"layers": [..., "{missing}"] in one of the stages')


def _check_runnable(stages: list[Stage]) -> str:
    """What the runtime cannot do is refused. The axis that splits the batch."""
    first = stages[0]
    for index, stage in enumerate(stages):
        if list(stage["axes"]) != list(first["axes"]) or list(stage["batch"]) != list(first["batch"]):
            raise StrategyError(f"stages[{index}].axes are {', '.join(stage['axes'])}",
                                "all stages have axes of the same names in the same order, of any sizes: gt.pipeline "
                                "keeps how a parameter lies along each", f"axes {', '.join(first['axes'])}")
    if len(first["batch"]) > 1:
        raise StrategyError(f"stages[0].batch names {', '.join(first['batch'])}", "gt.pipeline splits a batch along "
                            "one axis", "one axis")
    return next(iter(first["batch"]), "dp")


def _arranged(ranks: list[int], shape: list[int]) -> Any:
    """Ranks as nested lists of this shape."""
    return torch.tensor(ranks, device="cpu").view(shape).tolist()


def _plan_of_stages(stages: list[Stage], model: nn.Module) -> Plan:
    """One table for the whole model: the rows of each stage, for the names in it."""
    plans = [_plan_of_stage(stage, model) for stage in stages]
    if all(plan == plans[0] for plan in plans):
        return plans[0]
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    modules = [name for name, _ in model.named_modules()]
    rows: dict[str, Any] = {}
    for stage, plan in zip(stages, plans):
        inside = tuple(f"{layer}." for layer in stage["layers"])
        for pattern, row in plan.items():
            suffix = next((suffix for suffix in OF_MODULES if pattern.endswith(suffix)), "")
            for name in (*tensors, *modules) if suffix else tensors:
                if f"{name}.".startswith(inside) and fnmatch.fnmatchcase(name, pattern.removesuffix(suffix)):
                    rows.setdefault(f"{name}{suffix}", row)
    return Plan(rows)


def _plan_of_stage(stage: Stage, model: nn.Module) -> Plan:
    rows = stage.get("plan", RECOGNISED)
    if rows != RECOGNISED:
        return Plan(rows)
    return Plan.of(model, "tp", stage.get("sequence", "")) if stage["axes"].get("tp", 1) > 1 else Plan()
