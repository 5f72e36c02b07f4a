"""How objects take their state: modules in place where that is all they have, everything else by load_state_dict.

    a module of parameters and buffers            its tensors are read in place, nothing is called
    one with code of its own that loads it, or    its own tensors are read in place, what its state_dict makes into new
    with more in its state (an extra state)       ones; then its load_state_dict gets both
    optimizers, schedulers, samplers, ...         load_state_dict gets new tensors, before any tensor is written
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from globaltensor.checkpoint.tree import FlatState, at_path, join_path, state_of
from globaltensor.tensors.materialize import fill_unloaded


def ids_of_own(module: nn.Module) -> set[int]:
    """The identities of a module's parameters and buffers. What else is in its state_dict was made for it: a value
    that is written there is lost."""
    return {id(t) for t in (*module.parameters(), *module.buffers())}


def give_memory(flat: FlatState) -> None:
    """Give modules on the meta device their memory. A buffer becomes another object then: its name stands for that."""
    modules = {path: value for path, value in flat.objects.items() if isinstance(value, nn.Module)}
    if not any(t.is_meta for t in flat.tensors.values()):
        return
    for module in modules.values():
        fill_unloaded(module, module.state_dict(keep_vars=True))
    for path, module in modules.items():             # once all have memory, as one may be within another
        for key, t in module.state_dict(keep_vars=True).items():
            name = join_path(path, key)
            if name in flat.tensors and flat.tensors[name].is_meta:
                flat.tensors[name] = t


def load_objects(flat: FlatState, saved: Any, undo: list[Callable[[], None]]) -> None:
    """Call load_state_dict of what has nothing that is read in place; functions that undo it are added to `undo`."""
    for path, value in flat.objects.items():
        own = at_path(saved, path)
        if not isinstance(value, nn.Module) or own and ids_of_own(value).isdisjoint(map(id, own.values())):
            undo.append(_restore_function(value))
            value.load_state_dict(own)


def load_modules(flat: FlatState, saved: Any) -> None:
    """Call load_state_dict of modules whose tensors have been read in place, where that does any more. Their hooks and
    extra states are to see the new values, as in torch."""
    for path, module in flat.objects.items():
        own = at_path(saved, path)
        if isinstance(module, nn.Module) and not ids_of_own(module).isdisjoint(map(id, own.values())):
            load_module(module, own)


def load_module(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """The same of one module."""
    own = ids_of_own(module)
    if not all(id(v) in own for v in saved.values()) or any(map(_loads_by_own_code, module.modules())):
        state = state_of(module)                     # with the versions of its classes, where torch keeps them
        state.update(saved)
        module.load_state_dict(state)


def _loads_by_own_code(module: nn.Module) -> bool:
    """Is there a hook, or a function that is not torch's own, to be called when this module alone is loaded?"""
    functions = (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    return bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks) or not all(
        (getattr(function, "__module__", None) or "").startswith("torch.nn.") for function in functions)


def undo_all(undo: list[Callable[[], None]], error: BaseException) -> None:
    """Undo all of it. An object that refuses its old state, too, is mentioned in a note to the error."""
    for step in reversed(undo):
        try:
            step()
        except Exception as another:
            error.add_note(f"and the old state could not be restored: {type(another).__name__}: {another}")


def _restore_function(value: Any) -> Callable[[], None]:
    """A function that restores the present state of an object. Copies what load_state_dict might overwrite."""
    before = state_of(value) if isinstance(value, torch.optim.Optimizer) else _copied(state_of(value))
    return lambda: value.load_state_dict(before)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, one in value.items():               # not by update: a Counter would count
            result[key] = _copied(one)
        return result
    return [_copied(v) for v in value] if type(value) is list else value
