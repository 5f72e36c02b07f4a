"""Loading: check all that is needed, agree that all is well, and only then change anything.

Every tensor of the state says which box of it each rank of this process holds; the manifest says in which pieces that
box lies. Neither knows of the other's layout, so any layout and number of ranks loads what any other has saved.

Three rounds, each ended by an agreement of all processes: the pieces are hashed; objects that take their state by
load_state_dict are given it, on new tensors, so that the old state can be put back; tensors are written in place.
"""
from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from globaltensor.checkpoint import folders
from globaltensor.checkpoint.collective import together
from globaltensor.checkpoint.manifest import CheckpointError, Entry, Manifest, parse
from globaltensor.checkpoint.pieces import Files, beside, like, need_safetensors, overlaps, parts
from globaltensor.checkpoint.tree import Flat, at, decode, flatten, is_object, join, state_of
from globaltensor.tensors.global_tensor import GlobalTensor


class Ready(NamedTuple):
    """What is checked, and can be loaded."""

    digest: str                                      # of the manifest: all processes load the same one
    manifest: Manifest
    files: Files
    flat: Flat
    made: dict[str, torch.Tensor]                    # new tensors, for objects that take their state whole


def load(state: Any, directory: str | os.PathLike[str]) -> Any:
    """Load the latest version in `directory` into `state`; collective.

    state      as it was given to `save`, under any layout and number of ranks: its tensors are written in place (they
               stay the same objects), its objects get load_state_dict. A fresh optimizer needs no state yet: what is
               made lies like the parameter it belongs to
    directory  as it was given to `save`, or one version in it, such as run/checkpoint/step-00000003

    Returns a state of the same structure, with these same tensors and objects, and the plain values that were saved.
    A tensor's dtype, shape and name must be as saved. Raises CheckpointError, on every process and before anything is
    changed, where something is missing, damaged, or does not fit; it names the piece and the rank that needs it.
    """
    need_safetensors()
    ready = together("loading a checkpoint", lambda: _check(state, Path(directory)), lambda ready: ready.digest)
    entries, flat = ready.manifest.entries, ready.flat

    undo: list[Callable[[], None]] = []
    try:
        together("giving objects their state", lambda: _give(ready, undo))
        done: set[int] = set()
        for name, entry in entries.items():
            t = flat.tensors.get(name)
            if name not in ready.made and id(t) not in done:
                done.add(id(t))
                ready.files.fill(entry, t)
    except BaseException as error:
        _take_back(undo, error)
        raise
    return _placed(state, _decoded(ready))


# ------------------------------------------------------------------------------------------------ before: checks


def read(directory: Path) -> tuple[Path, Manifest, str]:
    """The folder of the version to load, its manifest, and the hash of that."""
    folder, data, named = folders.find(directory)
    seen = hashlib.sha256(data).hexdigest()
    if named not in ("", seen):
        raise CheckpointError(f"{folder / folders.MANIFEST} is damaged, or {folders.LATEST!r} is",
                              f"its bytes hash to {seen[:12]}..., {folders.LATEST!r} says {named[:12]}...",
                              f"a version itself: load(state, '{directory}/step-...')")
    return folder, parse(data, str(folder / folders.MANIFEST)), seen


def _check(state: Any, directory: Path) -> Ready:
    """Everything that can go wrong, before anything is changed."""
    folder, manifest, digest = read(directory)
    flat = flatten(state)
    files = Files(folder)
    made = _made(manifest, flat)
    targets = {**{k: t for k, t in flat.tensors.items() if not _dropped(k, flat, manifest)}, **made}
    check_names(targets, manifest.entries, f"the checkpoint in {folder}")
    for name, t in targets.items():
        check_fit(manifest.entries[name], t)
    _check_tied(targets, manifest.entries)
    _check_keys(state, decode(manifest.state, lambda name: None), "", f"the checkpoint in {folder}")
    files.verify(needed(targets, manifest.entries))
    return Ready(digest, manifest, files, flat, made)


def needed(targets: dict[str, torch.Tensor], entries: dict[str, Entry]) -> Iterable[tuple[Entry, Any, int]]:
    """The pieces that this process needs, and a rank that does."""
    for name, t in targets.items():
        for part in parts(t):
            for piece, _ in overlaps(entries[name], part.region):
                yield entries[name], piece, part.rank


def check_names(own: Iterable[str], saved: Iterable[str], what: str, kind: str = "tensor") -> None:
    """Both have the same names. Raises CheckpointError with the nearest ones."""
    own, saved = list(own), list(saved)
    for mine, other, has, lacks in ((own, saved, "the state", what), (saved, own, what, "the state")):
        extra = sorted(set(mine) - set(other))
        if extra:
            near = difflib.get_close_matches(extra[0], sorted(set(other) - set(mine)) or other, 3, 0.4)
            more = f", and {len(extra) - 1} more that the other lacks" if len(extra) > 1 else ""
            raise CheckpointError(f"{has} has a {kind} {extra[0]!r}, {lacks} has not",
                                  (f"nearest there: {', '.join(map(repr, near))}" if near else
                                   f"it has {', '.join(map(repr, other[:4])) or 'none'}") + more,
                                  "the same structure and the same model as when it was saved")


def check_fit(entry: Entry, t: torch.Tensor, dtype: bool = True) -> None:
    """A tensor has the shape, and the dtype, that was saved, and can be written to."""
    if tuple(t.shape) != entry.shape:
        raise CheckpointError(f"{entry.name!r} is {list(t.shape)} in the state, {list(entry.shape)} in the checkpoint",
                              "a checkpoint is loaded into tensors of the same shapes", "the model that was saved")
    if dtype and t.dtype != entry.dtype:
        raise CheckpointError(f"{entry.name!r} is {t.dtype} in the state, {entry.dtype} in the checkpoint",
                              "values are loaded bit by bit, never rounded", f"x.to({entry.dtype}) before loading")
    check_writable(t, f"{entry.name!r} of the state")


def check_writable(t: torch.Tensor, name: str) -> None:
    """What is written into a tensor must be there afterwards, each element once."""
    if isinstance(t, GlobalTensor) and t.spec.copied:
        raise CheckpointError(f"{name} is a view that had to be boxed",
                              "it is a copy: what is loaded into it would not reach what it was made from",
                              "the tensor that it is a view of")
    if t.is_inference() or any(torch._debug_has_internal_overlap(part.data) == 1 for part in parts(t)):
        raise CheckpointError(f"{name} cannot be written to",
                              "it was made in inference mode, or is expanded: elements share their memory", "x.clone()")


def _check_tied(targets: dict[str, torch.Tensor], entries: dict[str, Entry]) -> None:
    """One tensor under two names takes one value: both must have been saved as the same."""
    first: dict[int, str] = {}
    for name, t in targets.items():
        other = first.setdefault(id(t), name)
        a, b = ({(p.region, p.sha256) for p in entries[n].pieces} for n in (name, other))
        if a != b:
            raise CheckpointError(f"{other!r} and {name!r} are one tensor in the state, two in the checkpoint",
                                  "they were not tied when it was saved, and have other values",
                                  "untie them, load, and decide which one counts")


def _check_keys(own: Any, saved: Any, path: str, what: str) -> None:
    """Dicts and lists with tensors or objects in them have the same keys; plain values are taken as saved."""
    if not _holds(own):
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
        check_names((join(path, k) for k in mine), (join(path, k) for k in theirs), what, "value")
        if mine.keys() != theirs.keys():
            raise CheckpointError(f"keys of {path or 'the state'!r} are ints in one and strings in the other",
                                  fix="the same keys as when it was saved")
        for key, value in mine.items():
            _check_keys(value, theirs[key], join(path, key), what)


def _holds(own: Any) -> bool:
    """Does a state have tensors or objects in it?"""
    if isinstance(own, (dict, list, tuple)):
        return any(map(_holds, own.values() if isinstance(own, dict) else own))
    return isinstance(own, torch.Tensor) or is_object(own)


# ------------------------------------------------------------------------------ objects that take their state whole


def _owner(name: str, flat: Flat) -> tuple[str, Any]:
    """The object, not a module, to which a tensor belongs, and its path; None for those written in place."""
    for path, value in flat.objects.items():
        if not isinstance(value, nn.Module) and (not path or name.startswith(path + "/")):
            return path, value
    return "", None


def _made(manifest: Manifest, flat: Flat) -> dict[str, torch.Tensor]:
    """A new tensor for each that an object will be given. An optimizer need not have its like yet."""
    made = {}
    for name, entry in manifest.entries.items():
        path, owner = _owner(name, flat)
        if owner is None:
            continue
        if name in flat.tensors:
            check_fit(entry, flat.tensors[name])
            made[name] = like(flat.tensors[name])
        elif isinstance(owner, torch.optim.Optimizer):
            param = _param(name[len(path) + 1 if path else 0:], owner)
            if param is not None:
                _check_state(entry, param)
                on_param = entry.is_global or isinstance(param, GlobalTensor) and _like_param(entry, param)
                made[name] = beside(param, entry.shape, entry.dtype) if on_param else torch.empty(
                    entry.shape, dtype=entry.dtype)
    return made


def _like_param(entry: Entry, param: torch.Tensor) -> bool:
    """Is what was saved of a plain optimizer a tensor like its parameter, not a counter?"""
    return entry.shape == tuple(param.shape) and not entry.name.endswith("/step")


def _param(rest: str, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The parameter to which a name within an optimizer's state_dict belongs."""
    found = re.fullmatch(r"state/(\d{1,9})/.+", rest)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return params[int(found[1])] if found and int(found[1]) < len(params) else None


def _check_state(entry: Entry, param: torch.Tensor) -> None:
    if len(entry.shape) == param.dim() and any(n not in (1, m) for n, m in zip(entry.shape, param.shape)):
        raise CheckpointError(f"{entry.name!r} is {list(entry.shape)}, its parameter {list(param.shape)}",
                              "the state of an optimizer belongs to parameters of the same shapes",
                              "the optimizer of the model that was saved")


def _dropped(name: str, flat: Flat, manifest: Manifest) -> bool:
    """State of an optimizer that it had not yet when it was saved: load_state_dict replaces all of it."""
    return name not in manifest.entries and isinstance(_owner(name, flat)[1], torch.optim.Optimizer)


def _decoded(ready: Ready) -> Any:
    """The saved state, with new tensors where they were made and the state's own elsewhere."""
    return decode(ready.manifest.state, lambda name: ready.made[name] if name in ready.made
                  else ready.flat.tensors[name])


def _give(ready: Ready, undo: list[Callable[[], None]]) -> None:
    """load_state_dict of every object; what to call to take it back is added to `undo`."""
    for name, t in ready.made.items():
        ready.files.fill(ready.manifest.entries[name], t)
    saved = _decoded(ready)
    for path, value in ready.flat.objects.items():
        own = at(saved, path)
        if isinstance(value, nn.Module) and all(isinstance(v, torch.Tensor) for v in own.values()):
            continue                                 # its tensors are written in place, and there is nothing else
        undo.append(_undoing(value))
        value.load_state_dict(own)


def _take_back(undo: list[Callable[[], None]], error: BaseException) -> None:
    """Undo all of it; what refuses its old state too is told in a note to the error."""
    for step in reversed(undo):
        try:
            step()
        except Exception as another:
            error.add_note(f"and its old state could not be given back: {type(another).__name__}: {another}")


def _undoing(value: Any) -> Callable[[], None]:
    """What puts the present state of an object back. Copies what load_state_dict might write into."""
    before = state_of(value)
    if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
        before = _copied(before)
    return lambda: value.load_state_dict(before)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if type(value) is list else value


def _placed(own: Any, saved: Any) -> Any:
    """The saved values in the structure of the state, its own tensors and objects in their places."""
    if is_object(own) or isinstance(own, torch.Tensor):
        return own
    if not _holds(own):
        return saved
    if isinstance(own, dict):
        return {k: _placed(v, saved[k]) for k, v in own.items()}
    return type(own)(_placed(v, w) for v, w in zip(own, saved))
