"""Models larger than a host: built on the meta device, laid out there, and given memory last, each rank its own parts.

    with torch.device("meta"):
        model = Big(config)                          # shapes, no memory
    gt.parallelize(model, placement, plan)           # layouts, still none
    gt.materialize(model)                            # each rank allocates its parts, and initialises them
    gt.load_safetensors(model, folder)               # or this, or gt.load({"model": model}, folder): from files

What a constructor writes is lost on the meta device, so it is done again by the modules themselves, innermost first:
by the `_init_weights(module)` of the nearest model around a module, as models of transformers and many others have it;
else, or for what that leaves, by its own `reset_parameters()`, as torch's layers have it. Both run on global tensors.
Their random numbers depend on the seed and the element's index, so every layout gives the same model, one rank too.

Has a tensor been written? Its version tells, except where `.data` was: so the first element of every shard is NaN
before, which no initialisation leaves.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from globaltensor.errors import GlobalTensorError, expect
from globaltensor.runtime.agreement import gather_objects
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.parameter_swap import convert, weights_made_again
from globaltensor.tracebacks import api_boundary

M = TypeVar("M", bound=nn.Module)
_DEVICE = "device_to_be"                             # set on a tensor without memory: the type of its placement to be


class NamedTensor(NamedTuple):
    """Where a module keeps a tensor."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    kind: str                                        # "_parameters" or "_buffers"


def named_tensors(module: nn.Module) -> Iterator[NamedTensor]:
    """Everything that a module holds, tied tensors each time."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    yield NamedTensor(f"{prefix}.{key}" if prefix else key, owner, key, tensor, kind)


def set_device_to_be(tensor: Tensor, device: str) -> None:
    """Note on which type of device a tensor of the meta device shall get memory."""
    setattr(tensor, _DEVICE, device)


@api_boundary
def materialize(module: M) -> M:
    """Give a model that was built on the meta device its memory and its initial values, in place; collective.

    Each rank allocates and initialises its own parts only, of the placement that `gt.parallelize` or `gt.to_global` was
    given. The numbers are those of global random ops under the seed: the same for every layout and number of ranks.
    What a constructor does after its layers are made (a weight scaled by depth) is not done again. Returns the module;
    one that has its memory already is left as it is.

    Raises GlobalTensorError on every rank for a tensor that is not global yet, and, naming it, for one that no
    `_init_weights` or `reset_parameters` has written.
    """
    expect(module, nn.Module, "gt.materialize of no module", "gt.materialize(model)")
    fill_unloaded(module, ())
    return module


def fill_unloaded(module: nn.Module, loaded: Collection[str]) -> None:
    """Allocate what is on the meta device, and initialise all of it but the names in `loaded`, which the caller will
    write: their modules may initialise them, too."""
    slots = [slot for slot in named_tensors(module) if slot.tensor.is_meta]
    for slot in slots:
        _check_planned(slot)
    allocated: dict[int, Tensor] = {}
    with weights_made_again(module):
        for slot in slots:
            if id(slot.tensor) not in allocated:     # tied tensors get one memory
                allocated[id(slot.tensor)] = convert(slot.tensor, partial(_with_parts, getattr(slot.tensor, _DEVICE)))
            getattr(slot.owner, slot.kind)[slot.key] = allocated[id(slot.tensor)]
    slots = [slot._replace(tensor=allocated[id(slot.tensor)]) for slot in slots]
    # tied ones may be in a file under one of their names
    filled = {id(slot.tensor) for slot in slots if slot.name in loaded}
    left = [_Unwritten(slot, slot.tensor._version) for slot in slots if id(slot.tensor) not in filled]
    by_owner: dict[nn.Module, list[_Unwritten]] = {}
    for one in left:
        by_owner.setdefault(one.slot.owner, []).append(one)
    with torch.no_grad():
        _initialize(module, None, by_owner, {})
    for one in left:
        if not one.written():
            raise _uninitialized(one.slot, module)


def _check_planned(slot: NamedTensor) -> None:
    if not isinstance(slot.tensor, GlobalTensor):
        raise GlobalTensorError(f"{slot.name!r} is on the meta device, and not global",
                                "where each rank's part of it shall be is not known",
                                "gt.parallelize(model, placement) first")
    if getattr(slot.tensor, _DEVICE, "meta") == "meta":
        raise GlobalTensorError(f"{slot.name!r} is on {slot.tensor.placement}, and shall stay there",
                                "that placement is of the meta device, which has no memory",
                                f'gt.parallelize(model, gt.placement("cpu", {list(slot.tensor.placement.ranks)}, ...))')


def _with_parts(device: str, tensor: Tensor) -> Tensor:
    """Memory for the parts of this process's ranks."""
    parts = torch.empty_like(tensor, device=device)
    for first in _first_elements(parts):
        first.fill_(torch.nan)
    return parts


def _first_elements(tensor: Any) -> list[Tensor]:
    """Of each shard, where it has one that can be NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return []
    return [shard.view(-1)[:1] for shard in tensor.shards.values() if shard.numel()]


class _Unwritten:
    """A tensor that shall be initialised."""

    def __init__(self, slot: NamedTensor, version: int) -> None:
        self.slot, self.version = slot, version

    def written(self) -> bool:
        """Has it been? All processes give the same answer; they ask each other where it was written by `.data`."""
        if self.slot.tensor._version > self.version:
            return True
        here = any(not bool(first.isnan()) for first in _first_elements(self.slot.tensor))
        return any(gather_objects(here, f"initialising {self.slot.name}"))


Rule = Callable[[nn.Module], Any]


def _initialize(module: nn.Module, rule: Rule | None, by_owner: dict[nn.Module, list[_Unwritten]],
                visited: dict[nn.Module, bool]) -> bool:
    """Initialise what is unwritten in a module and those inside it, the inner ones first, as constructors do. Is there
    anything to initialise?"""
    if module in visited:
        return visited[module]
    visited[module] = False
    rule, own = _rule_of(module) or rule, by_owner.get(module, [])
    inside = [_initialize(child, rule, by_owner, visited) for child in module.children()]
    visited[module] = bool(own) or any(inside)
    if not visited[module] or own and not inside and _all_written(own):      # what is tied keeps its first values
        return visited[module]
    if rule is not None:                             # for a container, too: it may scale what is inside it
        rule(module)
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name) and not _all_written(own):
            getattr(module, name)()
    return True


def _all_written(own: list[_Unwritten]) -> bool:
    return all(one.written() for one in own)


def _rule_of(module: nn.Module) -> Rule | None:
    """A model's function that initialises one module."""
    rule = getattr(module, "_init_weights", None)
    if rule is None:
        return None
    needed = [p for p in inspect.signature(rule).parameters.values() if p.default is p.empty]
    return rule if len(needed) == 1 else None


def _uninitialized(slot: NamedTensor, module: nn.Module) -> GlobalTensorError:
    what = "parameter" if slot.kind == "_parameters" else "buffer"
    cls = type(slot.owner).__name__
    return GlobalTensorError(
        f"the {what} {slot.name!r} of a {type(module).__name__} has no values",
        f"on the meta device {cls}.__init__ computed none, and no reset_parameters of {cls}, and no _init_weights of a "
        "model around it, writes it",
        f"def reset_parameters(self) in {cls}, that writes self.{slot.key} in place")
