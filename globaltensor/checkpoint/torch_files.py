"""`gt.save` and `gt.load`: a folder holds a checkpoint of ours, a file is torch's.

    gt.save({"model": model, "step": 7}, "run")      a new version in the folder `run`
    gt.save(model.state_dict(), "model.pt")          one file, as torch.save writes it, with whole tensors
    gt.load({"model": model, "step": 0}, "run")      into a state, from a folder
    gt.load("model.pt")                              torch.load

A file object, an existing file and a name that ends as torch's files do (`SUFFIXES`) are torch's; all else is a folder.
"""
from __future__ import annotations

import errno
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, overload

import torch

from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.files import removed_on_error, temporary_name
from globaltensor.checkpoint.loading import load_folder
from globaltensor.checkpoint.saving import Saving, save_folder
from globaltensor.checkpoint.tree import is_object, state_of
from globaltensor.errors import ArgumentError, keyword_fix, where
from globaltensor.runtime.torch_internals import storage_id
from globaltensor.runtime.world import rank
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary, note_on_torch_error

_log = logging.getLogger(__name__)

PathLike: TypeAlias = "str | os.PathLike[str]"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


@overload
def save(state: Any, target: PathLike, *, asynchronous: Literal[True], keep: int | None = None) -> Saving: ...


@overload
def save(state: Any, target: PathLike, *, asynchronous: bool = False, keep: int | None = None) -> Saving | None: ...


@overload
def save(state: Any, target: IO[bytes], **torch_options: Any) -> None: ...


@api_boundary
def save(state: Any, target: PathLike | IO[bytes], **options: Any) -> Saving | None:
    """Save a state into a folder (see `globaltensor.checkpoint.saving.save_folder`), or a file by torch.save.

    A file gets whole tensors, which plain torch loads: those in nested dicts, lists and tuples are gathered on every
    process, modules, optimizers and other objects with a state_dict give that, and rank 0 writes. The file appears when
    it is whole: one that was there stays until then. Collective. A folder takes asynchronous= and keep=, a file the
    options of torch.save. Raises ArgumentError for what is neither, CheckpointError on every process where a folder or
    file cannot be written.
    """
    if not isinstance(target, (str, os.PathLike)) and not hasattr(target, "write"):
        raise ArgumentError(f"gt.save to {target!r}", "a state is saved to a folder or a file",
                            'gt.save(state, "folder")')
    if not _is_file(target):
        _check_folder_options("save", options, "asynchronous", "keep")
        return save_folder(state, target, **options)     # type: ignore[arg-type]  # not a file, hence a path
    for name in ("asynchronous", "keep"):
        if options.pop(name, None):
            raise ArgumentError(f"gt.save into a file takes no {name}=", "a file is written by torch.save",
                                'gt.save(state, "folder")')
    # by all processes, as gathering takes all of them; only rank 0 writes
    plain = with_whole_tensors(state)
    collective_try("saving a file", lambda: _write(plain, target, options) if rank() == 0 else None)
    _log.info("saved %s, whole", target)
    return None


def _write(plain: Any, target: PathLike | IO[bytes], options: dict[str, Any]) -> None:
    if not isinstance(target, (str, os.PathLike)):
        torch.save(plain, target, **options)
        return
    path = Path(os.path.realpath(target))            # a link stays one
    temporary = temporary_name(path)
    with removed_on_error(temporary):
        try:
            torch.save(plain, temporary, **options)
        except RuntimeError:                         # in which torch speaks of positions in its archive
            if shutil.disk_usage(path.parent).free < 2 ** 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
            raise
        os.replace(temporary, path)


@overload
def load(state: Any, target: PathLike, /) -> Any: ...


@overload
def load(state: PathLike | IO[bytes], map_location: Any = None, /, **torch_options: Any) -> Any: ...


@api_boundary
def load(state: Any, target: Any = None, /, **options: Any) -> Any:
    """Load a folder into a state (see `globaltensor.checkpoint.loading.load_folder`), or a file as torch.load does.

    A folder: collective; each rank reads its parts; raises CheckpointError on every process. A file: each process
    reads the whole of it, and raises what torch.load raises; ArgumentError for a folder without a state.
    """
    named = isinstance(state, (str, os.PathLike))
    file = _is_file(state, 'with fsspec.open("{}", "rb") as file: gt.load(file)')
    if target is not None and not file and (_is_folder(target) or not named):     # else a place, as in torch.load
        _check_folder_options("load", options)
        return load_folder(state, target, **options)
    if not named and not hasattr(state, "read"):
        raise ArgumentError(f"gt.load of a {type(state).__name__} alone", "a state is loaded from a folder, which is "
                            "named; a file of torch's is loaded by its name", 'gt.load(state, "folder")')
    if not file and _is_folder(state):
        raise ArgumentError(f"gt.load of a folder alone: {os.fspath(state)}", "a folder is loaded into a state, whose "
                            "tensors say which rank reads what", f'gt.load(state, "{os.fspath(state)}")')
    try:
        loaded = torch.load(state, **options) if target is None else torch.load(state, target, **options)
    except FileNotFoundError as error:
        note_on_torch_error(error, f'  where: {where()}\n  try:   the name of a file of torch.save; for a folder of '
                            'gt.save: gt.load(state, "folder")')
        raise
    _log.info("loaded %s", state)
    return loaded


def _check_folder_options(name: str, options: Mapping[str, Any], *valid: str) -> None:
    """Raise ArgumentError for a keyword that a folder has no use for."""
    for key in options:
        if key not in valid:
            raise ArgumentError(f"gt.{name} with a folder takes no {key}=",
                                f"it takes {' and '.join(valid) or 'none'}", keyword_fix(key, valid))


def _is_folder(target: Any) -> bool:
    return isinstance(target, (str, os.PathLike)) and ("://" in os.fspath(target) or os.path.isdir(target))


def _is_file(target: Any, fix: str = 'with fsspec.open("{}", "wb") as file: gt.save(state, file)') -> bool:
    if not isinstance(target, (str, os.PathLike)):
        return hasattr(target, "write") or hasattr(target, "read")
    name = os.fspath(target)
    if "://" in name and name.endswith(SUFFIXES):
        raise ArgumentError(f"{name} as a checkpoint", "a URL names a folder, and this ends as a file of torch's does",
                            fix.format(name))
    # Mostly what is there decides. Of what is still to be written the name does.
    return not os.path.isdir(name) and (os.path.isfile(name) or name.endswith(SUFFIXES))


def _memory_of(t: GlobalTensor) -> Any:
    """What is equal for tensors that are one in memory; where that has no elements, or no part is here, for none."""
    parts = [(rank, storage_id(one), one.storage_offset(), one.stride()) for rank, one in t.shards.items()]
    return (t.spec, *parts) if parts and t.numel() else id(t)


def with_whole_tensors(value: Any, known: dict[Any, tuple[GlobalTensor, torch.Tensor]] | None = None) -> Any:
    """The same state with plain tensors, and objects by their state; tied tensors stay tied, where a rank of this
    process has parts of them. Collective."""
    known = {} if known is None else known
    if is_object(value):
        value = state_of(value)
    if isinstance(value, GlobalTensor):
        if id(value) not in known:                   # a state_dict has new tensors of one memory for what is tied
            whole = value.detach().full_tensor()     # of each, as a process without a part cannot tell
            _, whole = known.setdefault(_memory_of(value), (value, whole))
            known[id(value)] = value, whole          # held, or another one might get its id
        return known[id(value)][1]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, with_whole_tensors(one, known)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(with_whole_tensors(one, known) for one in value)
    return value
