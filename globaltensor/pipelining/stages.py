"""Cutting a model into stages: by hand, by the names of its modules, or into parts of equal cost.

    stages=[first, second]              modules; a stage may also be a list of modules that run one after the other
    stages=["blocks.2", "blocks.4"]     of a sequence: where each stage after the first begins, by name
    stages=4                            of a sequence: so many stages, the most expensive as cheap as possible

A *sequence* is an nn.Sequential, or a list of modules: each takes what the one before it returns. By default cost is
estimated by parameters: a linear layer takes as many products per row as it has weights. `measured` measures it.
"""
from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from globaltensor.errors import GlobalTensorError, counted
from globaltensor.runtime.agreement import broadcast_object


class StageError(GlobalTensorError, ValueError):
    """Invalid stages: fewer layers than stages, a name that no layer has, a stage that is not a module."""


def cut_sequence(model: Any, stages: int | Sequence[str], cost: Callable[[nn.Module], float] | None = None
                 ) -> list[nn.Module]:
    """The stages of a sequence of layers.

    stages   how many, or the names of the layers with which the second, third, ... stage begins
    cost     of one layer, in any unit
    Raises StageError where there are fewer layers than stages, or where no layer has a given name.
    """
    layers = sequence_layers(model)
    if isinstance(stages, int):
        starts = balanced([(cost or parameters)(layer) for _, layer in layers], stages)
    else:
        starts = [0, *(_layer_index(name, layers) for name in stages)]
        if any(a >= b for a, b in zip(starts, starts[1:])):
            raise StageError(f"stages that begin with {', '.join(stages)}",
                             "in the model they do not come in this order, or the first stage is empty",
                             f"some of {', '.join(name for name, _ in layers[1:])}, in this order")
    ends = [*starts[1:], len(layers)]
    return [nn.Sequential(*(layer for _, layer in layers[a:b])) for a, b in zip(starts, ends)]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins, so that the most expensive is as cheap as possible, and then all as even as possible.

    Dynamic programming over (stages, layers): the best cut of the first n layers into k stages is the best cut of the
    first b < n into k - 1, for some b at which the last stage begins. O(stages * layers^2).
    """
    n = len(costs)
    if not 1 <= stages <= n:
        raise StageError(f"{counted(stages, 'stage')} of {counted(n, 'layer')}", "every stage has at least one layer",
                         f"{counted(n, 'stage')} or fewer, or more layers")
    total = [0.0, *accumulate(costs)]
    if not all(isinstance(cost, (int, float)) and 0 <= cost < math.inf for cost in costs):
        raise StageError(f"layers that cost {', '.join(map(str, costs))}", "each costs a number, 0 or more",
                         "cost=lambda layer: sum(p.numel() for p in layer.parameters())")
    # For the first n layers: the largest cost of a stage, the sum of squares (smaller is more even), the last begin.
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [(float("inf"), 0.0, 0)] * n
    begins: list[list[int]] = []
    for _ in range(stages):
        longer = [(float("inf"), 0.0, 0)] * (n + 1)  # the same with one stage more
        for end in range(1, n + 1):
            last = [total[end] - total[begin] for begin in range(end)]
            # tuples compare in turn: the most expensive stage first, evenness among equals, then the earlier begin, so
            # that every process cuts alike
            longer[end] = min((max(best[begin][0], last[begin]), best[begin][1] + last[begin] ** 2, begin)
                              for begin in range(end))
        best = longer
        begins.append([begin for _, _, begin in best])
    starts, end = [], n
    for row in reversed(begins):
        end = row[end]
        starts.append(end)
    return starts[::-1]


def parameters(layer: nn.Module) -> float:
    """The estimated cost of a layer: its parameters, except those of embeddings, which are looked up."""
    count = sum(p.numel() for m in layer.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(False))
    return count + 1.0                               # a layer without parameters is not free


def measured(model: nn.Module, *inputs: Any, runs: int = 3) -> Callable[[nn.Module], float]:
    """A cost to cut by: the seconds that the forward of each module of a plain model takes on these inputs. The minimum
    of some runs, in evaluation, as measured on rank 0: all processes must cut alike. Backward passes take longer, but
    by about the same factor in all modules."""
    spent: list[dict[nn.Module, float]] = []
    began: dict[nn.Module, float] = {}

    def before(m: nn.Module, *_: Any) -> None:
        began[m] = time.perf_counter()

    def after(m: nn.Module, *_: Any) -> None:
        spent[-1][m] += time.perf_counter() - began[m]

    modes = {module: module.training for module in model.modules()}
    hooks = [hook for module in modes
             for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))]
    try:
        model.eval()
        with torch.no_grad():
            for _ in range(runs):
                spent.append(defaultdict(float))
                model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    # the minimum: whatever else runs on the machine only ever adds
    least = [min(seconds[module] for seconds in spent) for module in modes]
    cost = dict(zip(modes, broadcast_object(least, 0, "the cost of layers")))
    return lambda layer: cost[layer]


def sequence_layers(model: Any) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence, by name."""
    if isinstance(model, nn.Sequential):
        children = list(model.named_children())
        if len(children) == 1 and isinstance(children[0][1], nn.Sequential):
            outer, inner = children[0]
            return [(f"{outer}.{name}", layer) for name, layer in sequence_layers(inner)]
        return children
    if isinstance(model, (list, tuple, nn.ModuleList)) and all(isinstance(layer, nn.Module) for layer in model):
        return [(str(k), layer) for k, layer in enumerate(model)]
    raise StageError(f"a {type(model).__name__} cannot be cut", "its forward may do anything with its layers",
                     "an nn.Sequential, a list of layers, or the stages by hand: [first, second]")


def _layer_index(name: str, layers: Sequence[tuple[str, nn.Module]]) -> int:
    names = [own for own, _ in layers]
    if name not in names:
        raise StageError(f"no layer is called {name!r}", f"the layers are {', '.join(names[:12])}"
                         + (", ..." if len(names) > 12 else ""), "one of these")
    return names.index(name)


def as_modules(stages: Sequence[Any]) -> list[nn.Module]:
    """Stages as modules: a list of modules becomes one that runs them in order."""
    if not isinstance(stages, Iterable):
        raise StageError(f"a pipeline of a {type(stages).__name__}", "its stages are modules",
                         "gt.pipeline([first, second], placements), or an nn.Sequential")
    modules = []
    for k, stage in enumerate(stages):
        if isinstance(stage, (list, tuple)) and stage and all(isinstance(m, nn.Module) for m in stage):
            stage = nn.Sequential(*stage)
        if not isinstance(stage, nn.Module):
            raise StageError(f"stage {k} is a {type(stage).__name__}", "a stage is a module, or a list of them",
                             "nn.Sequential(...)")
        modules.append(stage)
    return modules
