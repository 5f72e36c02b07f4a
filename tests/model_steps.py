"""A step of training of a model as it is and as a global one, each model in a process of its own: what differs?

    python tests/model_steps.py FAMILY [NAME ...]    prints a line of JSON for each model and layout

The process is forked from one that has imported what takes seconds, so one that dies or hangs is an outcome too.
"""
from __future__ import annotations

import copy
import importlib
import json
import math
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import children
import numpy
import torch
from torch import Tensor, nn

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

S, B = gt.sbp.split, gt.sbp.broadcast
MEMORY = 8 << 30                                     # of a child, in bytes
BATCH, SEED = 3, 5                                   # uneven on two ranks: one has two samples, one has one


class Family(NamedTuple):
    """Models of a family: their names, ways to build one by name, and inputs for it."""

    names: list[str]
    attempts: Callable[[str], Iterator[tuple[str, Callable[[], nn.Module]]]]
    inputs: Callable[[nn.Module, int, int], dict[str, Any]]


class Step(NamedTuple):
    """What a step of training computed."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    after: dict[str, Tensor]


def seed(n: int) -> None:
    torch.manual_seed(n)
    random.seed(n)
    numpy.random.seed(n)


def floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from floats(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from floats(v)
    elif hasattr(value, "sample"):                   # diffusers
        yield value.sample


def loss_of(out: Any) -> Tensor:
    """A number that depends on every element of an output, on each in a way of its own."""
    terms = [(t * torch.cos(torch.arange(t.numel(), dtype=t.dtype)).view(t.shape)).sum() / max(t.numel(), 1)
             for t in floats(out) if t.requires_grad]
    return sum(terms[1:], terms[0])


def train(model: nn.Module, batch: dict[str, Any]) -> Step:
    """A step of SGD."""
    seed(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = loss_of(model(**batch))
    loss.backward()
    grads = {name: None if p.grad is None else full(p.grad).clone() for name, p in model.named_parameters()}
    optimizer.step()
    return Step(full(loss.detach()), grads, {name: full(t.detach()) for name, t in model.state_dict().items()})


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if t.is_global else t


def differences(got: Step, want: Step) -> str:
    """Which value is wrong first, or ""."""
    scale = max((g.abs().max().item() for g in want.grads.values() if g is not None and g.numel()), default=0.0)
    if error := _wrong(got.loss, want.loss, 0.0):
        return f"loss: {error}"
    for name, grad in want.grads.items():
        mine = got.grads[name]
        if (mine is None) != (grad is None):
            return f"grad of {name}: {'none' if mine is None else 'one'}, and not in plain torch"
        if grad is not None and (error := _wrong(mine, grad, scale)):
            return f"grad of {name}: {error}"
    for name, t in want.after.items():
        if error := _wrong(got.after[name], t, 0.1 * scale):
            return f"after the step, {name}: {error}"
    return ""


def _wrong(got: Tensor, want: Tensor, scale: float) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    if not got.numel():
        return ""
    if not got.is_floating_point() and not got.is_complex():
        return "" if torch.equal(got, want) else "other numbers"
    if not torch.equal(got.isnan(), want.isnan()):
        return "nan"
    error = (got - want).nan_to_num().abs().max().item()
    return "" if error <= 1e-4 * want.nan_to_num().abs().max().item() + 1e-5 * scale + 1e-7 else f"off by {error:.3g}"


# --------------------------------------------------------------------------------------------------------- layouts


def data_parallel(model: nn.Module) -> None:
    model.to_global(gt.placement("cpu", [0, 1]), B)


def recognised(model: nn.Module) -> None:
    P = gt.placement("cpu", [0, 1], axis_names=("tp",))
    gt.parallelize(model, P, gt.Plan.of(model, "tp"))


def weights_split(model: nn.Module) -> None:
    """Every parameter split, along dim 0 and 1 in turns."""
    turns = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    model.to_global(gt.placement("cpu", [0, 1]), lambda name, t: S(turns[name] % min(t.dim(), 2))
                    if name in turns and t.dim() else B)


def global_inputs(batch: dict[str, Any], model: nn.Module, split: bool) -> dict[str, Any]:
    P = next(model.parameters()).placement
    return {k: gt.from_full(t, P, S(0) if split and t.dim() and t.shape[0] == BATCH else B)
            if isinstance(t, Tensor) else t for k, t in batch.items()}


def build_plain(family: Family, name: str) -> tuple[str, nn.Module, dict[str, Any], Step]:
    """The first way to build a small model that trains, with its inputs and what a step computes."""
    why = []
    for how, build in family.attempts(name):
        for dtype in (torch.float64, torch.float32):
            for mode in (True, False):
                try:
                    seed(SEED)
                    model = build().to(dtype).train(mode)
                    for part in model.modules():
                        for rate in ("p", "drop_prob"):
                            if isinstance(getattr(part, rate, None), float):
                                setattr(part, rate, 0.0)
                    batch = {k: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
                             for k, t in family.inputs(model, BATCH, SEED).items()}
                    first = train(copy.deepcopy(model), batch)
                    others = [_other_luck(copy.deepcopy(model), batch, n) for n in (1, 2, 3)]
                except Exception as error:
                    why.append(f"{how}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}")
                    break
                if math.isfinite(first.loss.item()) and all(torch.allclose(one, first.loss, rtol=1e-6)
                                                            for one in others):
                    return f"{how}, {dtype}, {'train' if mode else 'eval'}", model, batch, first
                why.append(f"{how}: random, or not finite: {first.loss.item()}")
    raise LookupError("; ".join(dict.fromkeys(why)))


def _other_luck(model: nn.Module, batch: dict[str, Any], n: int) -> Tensor:
    seed(SEED + n)
    return loss_of(model(**batch)).detach()


def outcomes(family: Family, name: str) -> Iterator[dict[str, Any]]:
    """What is right, refused or wrong, by layout."""
    start = time.time()
    try:
        how, model, batch, want = build_plain(family, name)
    except LookupError as error:
        yield dict(name=name, layout="", status="not built", detail=str(error), seconds=time.time() - start)
        return
    layouts = {"dp": data_parallel, "tp" if gt.Plan.of(model, "tp") else "split":
               recognised if gt.Plan.of(model, "tp") else weights_split}
    for layout, lay in layouts.items():
        start, status, detail = time.time(), "right", how
        try:
            mine = copy.deepcopy(model)
            lay(mine)
            wrong = differences(train(mine, global_inputs(batch, mine, layout == "dp")), want)
            if wrong:
                status, detail = "wrong", f"{wrong}   ({how})"
        except GlobalTensorError as error:
            status, detail = "refused", f"{type(error).__name__}: {error}   ({how})"
        except BaseException as error:
            status, detail = "raised", f"{type(error).__name__}: {error}   ({how})\n{traceback.format_exc()[-3000:]}"
        yield dict(name=name, layout=layout, status=status, detail=detail, seconds=time.time() - start)


def in_a_child(family: Family, name: str, timeout: int = 120) -> list[dict[str, Any]]:
    """`outcomes`, in a child process of its own: one that dies or hangs is one outcome more."""

    def run(name: str) -> list[dict[str, Any]]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        return list(outcomes(family, name))

    came = children.outcomes([name], run, timeout)[name]
    return [dict(name=name, layout="?", status=came, detail="", seconds=timeout)] if isinstance(came, str) else came


def main(name: str, *models: str) -> None:
    families = importlib.import_module("model_families")
    family = families.FAMILIES[name]()
    for model in models or family.names:
        for outcome in in_a_child(family, model):
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
