"""An optimizer's state by names of parameters, as torch asks for it: under ZeRO it is shown parameters, not parts.

    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    state = get_optimizer_state_dict(model, optimizer)           # {"state": {"0.weight": {"exp_avg": ...}}, ...}

torch looks what the optimizer steps up among the model's parameters, by identity, and under `gt.zero` it steps parts.
So the two functions of torch that do this are handed a stand-in of the optimizer, whose groups have the parameters.
What it keeps for a part lies like the part, and is what would be kept for the parameter. Master weights go with that.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch

from globaltensor.runtime.late_modules import when_imported
from globaltensor.tensors import gradients
from globaltensor.tracebacks import api_boundary

_BY_NAME = "torch.distributed.checkpoint.state_dict"
_MASTER = "master"                                   # in the state of a parameter by name


def know_parameters_by_name() -> None:
    """From now on, or from when torch's module is imported, as many programs never do."""
    when_imported(_BY_NAME, lambda: _take_over(sys.modules[_BY_NAME]))


def _take_over(module: Any) -> None:
    if not hasattr(module, "_knows_parameters"):
        start = module._init_optim_state
        module._get_optim_state_dict = _with_parameters(module._get_optim_state_dict, start)
        module._load_optim_state_dict = _with_parameters(module._load_optim_state_dict, start)
        module._knows_parameters = True


def _with_parameters(function: Callable[..., Any], start: Callable[[Any], None]) -> Callable[..., Any]:
    """Hand this function of torch stand-ins of optimizers under `gt.zero`, which `start` has given their state."""
    @wraps(function)
    @api_boundary
    def shown(model: Any, optimizers: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        shown = [_with_its_parameters(optimizer, start) for optimizer in optimizers]
        return function(model, tuple(shown), *args, **kwargs)
    return shown


def _with_its_parameters(optimizer: Any, start: Callable[[Any], None]) -> Any:
    if isinstance(optimizer, _ByParameter) or all(_parameter_of(t) is t for t in _params_of(optimizer)):
        return optimizer
    start(optimizer)
    return _ByParameter(optimizer)


def _params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [t for group in optimizer.param_groups for t in group["params"]]


def _parameter_of(t: Any) -> Any:
    """The parameter that this is stepped for."""
    return gradients.notes_of(t).whole if gradients.part_of(t) is t else t


class _ByParameter:
    """An optimizer under `gt.zero` as one that steps the parameters themselves, for as long as torch reads it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups = [{**group, "params": [_parameter_of(t) for t in group["params"]]}
                             for group in optimizer.param_groups]
        state = self.state_dict()["state"]
        self.state = {_parameter_of(t): state.get(k, {}) for k, t in enumerate(_params_of(optimizer))}

    def state_dict(self) -> dict[str, Any]:
        saved = self._optimizer.state_dict()
        masters = {k: {_MASTER: master} for k, master in saved.pop("masters", {}).items()}
        return {**saved, "state": {k: {**saved["state"].get(k, {}), **masters.get(k, {})}
                                   for k in [*saved["state"], *(masters.keys() - saved["state"].keys())]}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = {k: {key: value for key, value in one.items() if key != _MASTER}
                 for k, one in state_dict["state"].items()}
        masters = {k: one[_MASTER] for k, one in state_dict["state"].items()
                   if isinstance(one.get(_MASTER), torch.Tensor)}        # {} where a flat dict has none
        self._optimizer.load_state_dict({**state_dict, "state": state, **({"masters": masters} if masters else {})})
