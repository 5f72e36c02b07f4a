"""Loading: check everything, agree that all processes succeeded, and only then change anything.

Every tensor of the state knows which region of it each rank of this process holds; the manifest says which pieces that
region overlaps. Neither depends on the other's layout, so any layout and number of ranks loads what any other saved.

Rounds, and all processes agree after each: the pieces are hashed, and those that go into new tensors read into them
meanwhile; objects that take their state by load_state_dict get it, on these new tensors, so that the old state can be
restored; tensors are written in place; modules with code of their own for it are called (objects.py).
"""
from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from globaltensor.checkpoint import folders
from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.manifest import CheckpointError, Entry, Manifest, parse_manifest
from globaltensor.checkpoint.objects import give_memory, ids_of_own, load_modules, load_objects, undo_all
from globaltensor.checkpoint.pieces import (
    CheckpointFiles,
    empty_copy,
    empty_global,
    empty_state,
    local_parts,
    need_safetensors,
    overlaps,
)
from globaltensor.checkpoint.remote import Folder, folder_at
from globaltensor.checkpoint.tree import FlatState, decode, flatten, is_object, join_path
from globaltensor.errors import closest, compiled_fix, counted
from globaltensor.runtime.torch_internals import has_internal_overlap
from globaltensor.tensors.global_tensor import GlobalTensor

_log = logging.getLogger(__name__)


class CheckedState(NamedTuple):
    """A state and a checkpoint that were found to fit."""

    digest: str                                      # of the manifest: all processes load the same one
    manifest: Manifest
    files: CheckpointFiles
    flat: FlatState
    new: dict[str, torch.Tensor]                     # for objects that take their state as a whole, and what was tied


def load_folder(state: Any, directory: str | os.PathLike[str]) -> Any:
    """Load the latest version in `directory` into `state`; collective.

    state      as it was passed to `save`, under any layout and number of ranks: its tensors are written in place (they
               stay the same objects; modules on the meta device get memory), its objects get load_state_dict. A fresh
               optimizer needs no state yet: its new tensors are laid out like the parameters they belong to. A dict
               may have some of the keys that were saved, such as {"model": model}: the others are left
    directory  as it was passed to `save`, or one version in it, such as run/checkpoint/step-00000003

    Returns a state of the same structure, with these same tensors and objects, and the plain values that were saved. A
    plain tensor that stands for several values, as do learning rates of a fresh scheduler, is there for the first one.
    A tensor's shape and name must be as saved; values are cast to its dtype, as by torch's load_state_dict. Raises
    CheckpointError, on every process and before anything is changed, where something is missing, damaged, or does not
    fit, such as complex numbers for real ones; it names the piece and the rank that needs it.
    """
    return load_version(state, folder_at(directory), part=True)[0]


def load_version(state: Any, directory: Folder, part: bool) -> tuple[Any, Manifest]:
    """The same, and the manifest of the version that was loaded. Without `part` the state has all keys that were saved.
    """
    need_safetensors()
    checked = collective_try("loading a checkpoint", lambda: _check_loadable(state, directory, part),
                             lambda checked: checked.digest)
    entries, flat = checked.manifest.entries, checked.flat
    undo: list[Callable[[], None]] = []
    collective_try("allocating what is loaded", lambda: give_memory(flat))
    try:
        # Objects first, as their own code may refuse a state: no tensor has been written then.
        collective_try("loading the state of objects", lambda: _load_objects(checked, undo))
        own: dict[int, tuple[Entry, torch.Tensor]] = {}          # by identity: tied tensors are read once
        for name, entry in entries.items():
            if name in flat.tensors and name not in checked.new:
                own.setdefault(id(flat.tensors[name]), (entry, flat.tensors[name]))
        collective_try("reading the tensors of a checkpoint", lambda: checked.files.fill(own.values()))
    except BaseException as error:
        undo_all(undo, error)
        raise
    collective_try("loading the state of modules", lambda: load_modules(flat, _decoded(checked)))
    _log.info("loaded %s from %s", counted(len(entries), "tensor"), directory)
    return _merged_state(state, _decoded(checked)), checked.manifest


# ------------------------------------------------------------------------------------------------ before: checks


def read_manifest(directory: Folder) -> tuple[Folder, Manifest, str]:
    """The folder of the version to load, its manifest, and the manifest's hash."""
    folder, data, expected = folders.find_version(directory)
    actual = hashlib.sha256(data).hexdigest()
    if expected not in ("", actual):
        raise CheckpointError(f"{folder / folders.MANIFEST} is damaged, or {folders.LATEST!r} is",
                              f"its bytes hash to {actual[:12]}..., {folders.LATEST!r} says {expected[:12]}...",
                              f"name a version: load(state, '{directory}/step-...')")
    return folder, parse_manifest(data, str(folder / folders.MANIFEST)), actual


def _check_loadable(state: Any, directory: Folder, part: bool) -> CheckedState:
    """Everything that can go wrong, before anything is changed."""
    folder, manifest, digest = read_manifest(directory)
    if isinstance(state, dict):
        names = {join_path("", key): key for key in state}
        _check_top_level(names, manifest, directory, folder, part)
        manifest = manifest.of(names)
    flat = flatten(state)
    files = CheckpointFiles(folder)
    new = _new_tensors(manifest, flat)
    targets = {**{k: t for k, t in flat.tensors.items() if not _is_dropped(k, flat, manifest)}, **new}
    check_names(targets, manifest.entries, f"the checkpoint in {folder}")
    for name, t in targets.items():
        check_fit(manifest.entries[name], t)
        if t.is_meta and (name in new or not isinstance(_owner(name, flat)[1], nn.Module)):
            raise CheckpointError(f"{name!r} of the state is on the meta device",
                                  "it has no memory to load into; modules are given theirs, for parameters and buffers",
                                  'gt.load({"model": model}, folder), or gt.materialize(model) before')
    new |= _check_tied_tensors(targets, manifest.entries, flat)
    _check_keys(state, decode(manifest.state, lambda name: None), "", f"the checkpoint in {folder}")
    files.verify(needed(targets | new, manifest.entries), ((manifest.entries[name], t) for name, t in new.items()))
    return CheckedState(digest, manifest, files, flat, new)


def _check_top_level(names: dict[str, Any], manifest: Manifest, directory: Folder, folder: Folder, part: bool) -> None:
    """Check that the checkpoint has the keys of a state, and without `part` that the state has all of its."""
    saved = manifest.top_level()
    if saved is None:
        return                                       # no dict was saved: what is compared later tells of it
    lacking = [key for name, key in names.items() if name not in saved]
    if lacking:
        near = closest(lacking[0], saved - set(names))
        fix = f"the key {near[0]!r} in place of {lacking[0]!r}" if near else (
            f"gt.load({{k: v for k, v in state.items() if k not in {lacking}}}, '{directory}')" * (len(lacking) < 5))
    else:
        fix = f"gt.load(state, '{directory}'), which leaves what the state does not name"
    check_names(names, names if part and not lacking else saved, f"the checkpoint in {folder}", "value", fix)


def needed(targets: dict[str, torch.Tensor], entries: dict[str, Entry]) -> Iterable[tuple[Entry, Any, int]]:
    """The pieces that this process needs, each with a rank that needs it."""
    for name, t in targets.items():
        for part in local_parts(t):
            for piece, _ in overlaps(entries[name], part.region):
                yield entries[name], piece, part.rank


def check_names(own: Iterable[str], saved: Iterable[str], what: str, kind: str = "tensor", fix: str = "") -> None:
    """Check that both have the same names. Raises CheckpointError with the closest ones."""
    own, saved = list(own), list(saved)
    for names, others, has, lacks in ((own, saved, "the state", what), (saved, own, what, "the state")):
        extra = sorted(set(names) - set(others))
        if extra:
            near = closest(extra[0], sorted(set(others) - set(names)) or others, 3, 0.4)
            more = f", and {len(extra) - 1} more that are missing" if len(extra) > 1 else ""
            raise CheckpointError(f"{has} has a {kind} {extra[0]!r}, {lacks} does not",
                                  (f"the closest there: {', '.join(map(repr, near))}" if near else
                                   f"it has {', '.join(map(repr, others[:4])) or 'none'}") + more,
                                  compiled_fix(extra[0], others) or fix
                                  or "the same structure and the same model as when it was saved")


def check_fit(entry: Entry, t: torch.Tensor, kind: bool = True) -> None:
    """Check that a tensor has the shape that was saved, and a dtype of its kind or a wider one, and can be written to.
    """
    if tuple(t.shape) != entry.shape:
        raise CheckpointError(f"{entry.name!r} is {list(t.shape)} in the state, {list(entry.shape)} in the checkpoint",
                              "a checkpoint is loaded into tensors of the same shapes", "the model that was saved")
    if kind and not torch.can_cast(entry.dtype, t.dtype):
        raise CheckpointError(f"{entry.name!r} is {t.dtype} in the state, {entry.dtype} in the checkpoint",
                              "values are cast to more or fewer digits, not to a kind that cannot hold them",
                              f"model.to({entry.dtype}) before it is loaded, and model.to({t.dtype}) behind that"
                              if isinstance(t, nn.Parameter) else f"x.to({entry.dtype}) before loading")
    check_loadable(t, f"{entry.name!r} of the state")


def check_loadable(t: torch.Tensor, name: str) -> None:
    """Check that what is written into a tensor stays there, and that its elements do not share memory."""
    if isinstance(t, GlobalTensor) and t.spec.copied:
        raise CheckpointError(f"{name} is a view that had to be boxed",
                              "it is a copy: what is loaded into it would not reach the original",
                              "the tensor of which it is a view")
    if t.is_inference() or any(has_internal_overlap(part.data) for part in local_parts(t)):
        raise CheckpointError(f"{name} cannot be written to",
                              "it was made in inference mode, or is expanded: its elements share memory", "x.clone()")


def _check_tied_tensors(targets: dict[str, torch.Tensor], entries: dict[str, Entry],
                        flat: FlatState) -> dict[str, torch.Tensor]:
    """One tensor under two names gets one value: both must have been saved with the same one. A plain value of a dict
    or list may have become two since: it is loaded under its first name, and a new tensor is returned for the other."""
    first, new = dict[int, str](), dict[str, torch.Tensor]()
    for name, t in targets.items():
        other = first.setdefault(id(t), name)
        a, b = ({(p.region, p.hash) for p in entries[n].pieces} for n in (name, other))
        if a == b:
            continue
        # as learning rates in the state_dict of a scheduler: nobody computes with them where they are
        if isinstance(t, (GlobalTensor, nn.Parameter)) or any(_owner(n, flat)[1] is not None for n in (name, other)):
            raise CheckpointError(f"{other!r} and {name!r} are one tensor in the state, two in the checkpoint",
                                  "they were not tied when it was saved, and their values differ",
                                  "untie them, load, and decide which one to keep")
        new[name] = empty_copy(t)
    return new


def _check_keys(own: Any, saved: Any, path: str, what: str) -> None:
    """Check that dicts and lists with tensors or objects in them have the same keys; plain values are replaced."""
    if not _has_tensors(own):
        return
    if is_object(own):
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path!r} is a {type(own).__name__} in the state, "
                                  f"a {type(saved).__name__} in {what}", fix="the state as it was saved")
    elif isinstance(own, (dict, list, tuple)):
        if isinstance(own, dict) != isinstance(saved, dict) or not isinstance(saved, (dict, list, tuple)):
            raise CheckpointError(f"{path or 'the state'!r} is a {type(own).__name__}, "
                                  f"a {type(saved).__name__} in {what}", fix="the state as it was saved")
        mine, theirs = (v if isinstance(v, dict) else dict(enumerate(v)) for v in (own, saved))
        check_names((join_path(path, k) for k in mine), (join_path(path, k) for k in theirs), what, "value")
        if mine.keys() != theirs.keys():
            raise CheckpointError(f"keys of {path or 'the state'!r} are ints in one and strings in the other",
                                  fix="the same keys as when it was saved")
        for key, value in mine.items():
            _check_keys(value, theirs[key], join_path(path, key), what)


def _has_tensors(own: Any) -> bool:
    """Are there tensors or objects in this part of a state?"""
    if isinstance(own, (dict, list, tuple)):
        return any(map(_has_tensors, own.values() if isinstance(own, dict) else own))
    return isinstance(own, torch.Tensor) or is_object(own)


# ---------------------------------------------------------------------------- objects that take their state as a whole


def _owner(name: str, flat: FlatState) -> tuple[str, Any]:
    """The object to which a tensor belongs, and its path; None for a tensor of the state itself."""
    for path, value in flat.objects.items():
        if not path or name.startswith(path + "/"):
            return path, value
    return "", None


def _new_tensors(manifest: Manifest, flat: FlatState) -> dict[str, torch.Tensor]:
    """A new tensor for each that the state_dict of an object has, but not for what is a module's own. A fresh optimizer
    does not have them yet."""
    ids = {path: ids_of_own(value) for path, value in flat.objects.items() if isinstance(value, nn.Module)}
    new, states = {}, dict[int, _StateOfParameter]()
    for name, entry in manifest.entries.items():
        path, owner = _owner(name, flat)
        own = flat.tensors.get(name)
        if owner is None or own is not None and id(own) in ids.get(path, ()):
            continue                                 # written in place
        if _takes_any(name, path, owner):
            new[name] = _tensor_for(entry, own, owner)
        elif own is not None:
            check_fit(entry, own)
            new[name] = empty_copy(own, entry.dtype)
        elif isinstance(owner, torch.optim.Optimizer):
            param = _param(name[len(path) + 1 if path else 0:], owner)
            if param is not None:
                states.setdefault(id(param), _StateOfParameter(param, owner, [])).entries.append(entry)
                on_param = entry.is_global or isinstance(param, GlobalTensor) and _like_param(entry, param)
                new[name] = empty_state(param, entry.shape, entry.dtype) if on_param else torch.empty(
                    entry.shape, dtype=entry.dtype, device="cpu")
    for state in states.values():
        state.check()
    return new


def _takes_any(name: str, path: str, owner: Any) -> bool:
    """Does this object, or extra state of a module, decide by itself what it takes: tensors of any size, or more?"""
    if isinstance(owner, nn.Module):
        return name[len(path) + 1 if path else 0:].partition("/")[0].endswith("_extra_state")
    return owner is not None and not isinstance(owner, torch.optim.Optimizer)


def _tensor_for(entry: Entry, own: torch.Tensor | None, owner: Any) -> torch.Tensor:
    """A new tensor as it was saved, laid out like the one that the object has in its place."""
    if isinstance(own, GlobalTensor):
        of = own.spec.layout.without_partials
        return empty_global(entry.shape, entry.dtype, of if own.dim() == len(entry.shape) else of.replicated)
    if own is None and entry.is_global:
        raise CheckpointError(f"{entry.name!r} is a global tensor that the {type(owner).__name__} does not have yet",
                              "how it is to be laid out is not known",
                              "the object as it is when it has its tensors, after a step of it")
    return torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if own is None else own.device)


def _like_param(entry: Entry, param: torch.Tensor) -> bool:
    """Was this saved by an optimizer of plain tensors, for a parameter or several, and is not a step counter?"""
    return (bool(entry.shape) or not param.dim()) and not entry.name.endswith("/step")


def _param(rest: str, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The parameter to which a name within an optimizer's state_dict belongs; of a group's values its first one."""
    match = re.fullmatch(r"state/(\d{1,9})/.+|masters/(\d{1,9})", rest)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if match:
        number = int(match[1] or match[2])
        return params[number] if number < len(params) else None
    match = re.fullmatch(r"param_groups/(\d{1,9})/.+", rest)
    groups = optimizer.param_groups
    return groups[int(match[1])]["params"][0] if match and int(match[1]) < len(groups) else None


class _StateOfParameter(NamedTuple):
    """What a fresh optimizer is to have for a parameter."""

    param: torch.Tensor
    optimizer: torch.optim.Optimizer
    entries: list[Entry]

    def check(self) -> None:
        """Check that it belongs to parameters of these shapes. Beside what has the parameter's, an optimizer may keep
        sums along dims (Adafactor), matrices for them (Shampoo), and vectors for all parameters (LBFGS)."""
        shape = tuple(self.param.shape)
        if any(entry.shape == shape for entry in self.entries):
            return
        total = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        for entry in self.entries:
            sizes = entry.shape
            fits = sorted(sizes) != sorted(shape) and set(sizes) <= {1, *shape} or sizes == (total,)
            if len(sizes) == len(shape) and not fits:
                raise CheckpointError(f"{entry.name!r} is {list(sizes)}, its parameter {list(shape)}",
                                      "the state of an optimizer belongs to parameters of the same shapes",
                                      "the optimizer of the model that was saved")


def _is_dropped(name: str, flat: FlatState, manifest: Manifest) -> bool:
    """Is this state that was not there yet when it was saved? load_state_dict replaces all of it."""
    path, owner = _owner(name, flat)
    return name not in manifest.entries and (isinstance(owner, torch.optim.Optimizer) or _takes_any(name, path, owner))


def _decoded(checked: CheckedState) -> Any:
    """The saved state, with new tensors where there are such and the state's own elsewhere."""
    return decode(checked.manifest.state, lambda name: checked.new[name] if name in checked.new
                  else checked.flat.tensors[name])


def _load_objects(checked: CheckedState, undo: list[Callable[[], None]]) -> None:
    checked.files.fill((checked.manifest.entries[name], t) for name, t in checked.new.items())
    load_objects(checked.flat, _decoded(checked), undo)


def _merged_state(own: Any, saved: Any) -> Any:
    """The saved values in the structure of the state, with the state's own tensors and objects."""
    if is_object(own):
        return own
    if isinstance(own, torch.Tensor) or not _has_tensors(own):
        return saved                                 # the state's own tensor, but where it stood for several
    if isinstance(own, dict):
        return {k: _merged_state(v, saved[k]) for k, v in own.items()}
    return type(own)(_merged_state(v, w) for v, w in zip(own, saved))
