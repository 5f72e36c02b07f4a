"""`model.save_pretrained(folder)` of a global model, for every class that has it: transformers, diffusers and others.

Such a method writes what `self.state_dict()` holds, in every process that it is called in. Once a module of the class
has become global, ours stands around theirs: the tensors are gathered on rank 0, where theirs runs on plain ones. So
the files are those of the plain model. Rank 0 needs memory for all of it; `gt.save_safetensors` for a file at a time.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.errors import GlobalTensorError, in_short
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

METHOD = "save_pretrained"
_OURS = "_globaltensor_saves_whole_tensors"          # set on a method that is ours


def learn_save_pretrained(module: nn.Module) -> None:
    """Let the classes of a module's parts save global tensors, where they have the method."""
    for cls in {cls for part in module.modules() for cls in type(part).__mro__ if METHOD in vars(cls)}:
        theirs = vars(cls)[METHOD]
        if not hasattr(theirs, _OURS):
            setattr(cls, METHOD, _of_whole_tensors(theirs))


def _of_whole_tensors(theirs: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(theirs)
    def save_pretrained(self: nn.Module, *args: Any, **options: Any) -> Any:
        tied = self.state_dict(keep_vars=True)
        state = options.get("state_dict") or tied
        if not any(isinstance(t, GlobalTensor) for t in state.values()):
            return theirs(self, *args, **options)    # also within our own call, from a class to the one above it
        whole = _whole_on_first_rank(state, tied)
        if "state_dict" in options:
            options["state_dict"] = whole
        result, error = None, None
        if 0 in world().local_ranks:
            try:
                with _with_state(self, whole):
                    result = theirs(self, *args, **options)
            except Exception as caught:              # whatever it is: the others wait for this process
                error = caught
        failed = gather_objects(error and in_short(f"{type(error).__name__}: {error}", 2000), METHOD)
        if error is not None:
            raise error
        if failed[0] is not None:
            raise GlobalTensorError(f"rank 0 could not save the model: {failed[0]}",
                                    "it writes the files, for all ranks", "see what that rank raised")
        return result

    setattr(save_pretrained, _OURS, True)
    return api_boundary(save_pretrained)


def _whole_on_first_rank(state: Mapping[str, Any], tied: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole, plain tensors, in the process that drives rank 0; one tensor for names that are tied."""
    known: dict[int, torch.Tensor | None] = {}
    whole = {}
    for name, t in state.items():
        if isinstance(t, GlobalTensor):
            one = id(tied.get(name, t))
            if one not in known:
                with torch.no_grad():
                    known[one] = t.to_global(placement(t.placement.type, [0]), broadcast).shards.get(0)
            t = known[one]
        whole[name] = t.detach() if isinstance(t, torch.Tensor) else t
    return whole


@contextmanager
def _with_state(module: nn.Module, state: dict[str, Any]) -> Iterator[None]:
    """Inside, this is what `module.state_dict()` gives: their methods take no other, or more than they are handed."""
    vars(module)["state_dict"] = lambda *_, **__: dict(state)
    try:
        yield
    finally:
        del vars(module)["state_dict"]
