"""Folders of safetensors as Hugging Face's libraries write and read them: the weights of a module, by name.

    model.safetensors                           all of them, or
    model.safetensors.index.json                {"weight_map": {"a.weight": "model-00001-of-00002.safetensors", ...}}
    model-00001-of-00002.safetensors, ...

A tensor is never split between files. Tied parameters, one tensor under several names, are stored under one of them.
Files of transformers may have other names than its models, which are read as transformers reads them (conversions.py).
"""
from __future__ import annotations

import json
import logging
import os
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.conversions import Conversion, fix_of_transformers, is_of_transformers, names_in_module
from globaltensor.checkpoint.files import removed_on_error, sync, temporary_name, write_atomically
from globaltensor.checkpoint.loading import check_fit, check_names, needed
from globaltensor.checkpoint.manifest import CheckpointError, Entry, SavedPiece
from globaltensor.checkpoint.objects import ids_of_own, load_module
from globaltensor.checkpoint.pieces import (
    CheckpointFiles,
    check_dtype,
    empty_copy,
    fill_from_whole,
    need_safetensors,
)
from globaltensor.checkpoint.tensor_files import write_tensors
from globaltensor.errors import counted, expect, expect_amount, expect_path
from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime.world import world, world_size
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.materialize import fill_unloaded
from globaltensor.tracebacks import api_boundary

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_log = logging.getLogger(__name__)
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.tmp-[0-9a-f]{16})?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*\.safetensors")    # no path: an index must not name other folders


M = TypeVar("M", bound=nn.Module)


class _CheckedFolder(NamedTuple):
    """A folder that was seen to fit a module."""

    files: CheckpointFiles
    saved: dict[str, Entry]                          # by their names in the files
    entries: dict[str, Entry]                        # by those in the module: each is one tensor of the files
    converted: dict[str, Entry]                      # and these are made of them
    conversions: list[Conversion]


@api_boundary
def load_safetensors(module: M, folder: str | os.PathLike[str]) -> M:
    """Load the weights in `folder` into the parameters and buffers of a module, in place; collective.

    Each rank reads only its parts. Values are converted to the module's dtypes, as torch's load_state_dict does. Where
    a model of transformers has other names than its files, they are converted as its from_pretrained does: of what is
    fused every process reads the whole, one such tensor at a time. A module on the meta device gets its memory first,
    and what no file has (buffers that are not saved) its initial values. Returns the module. Raises CheckpointError, on
    every process and before anything is changed, where a file is missing or damaged, or names or shapes do not fit.
    """
    expect(module, nn.Module, "weights for no module", "gt.load_safetensors(model, folder)")
    expect_path(folder, "weights from no folder", 'gt.load_safetensors(model, "folder")')
    need_safetensors()
    checked = collective_try("loading safetensors", lambda: _check_folder(module, Path(folder)))
    values = collective_try("reading safetensors", lambda: _read_weights(module, checked))
    collective_try("loading safetensors", lambda: load_module(module, values))
    _log.info("loaded %s from %s", counted(len(checked.entries) + len(checked.converted), "tensor"), folder)
    return module


def _read_weights(module: nn.Module, checked: _CheckedFolder) -> dict[str, Any]:
    """Read them into what is the module's own, and into new tensors for what its state_dict makes. All of that."""
    files, loaded = checked.files, {*checked.entries, *checked.converted}
    fill_unloaded(module, loaded)
    own, state = ids_of_own(module), module.state_dict(keep_vars=True)
    values = {name: empty_copy(t) if name in loaded and id(t) not in own else t for name, t in state.items()}
    files.fill((entry, values[name]) for name, entry in checked.entries.items())
    for conversion in checked.conversions:           # one after the other: they need memory for whole tensors
        wholes = conversion.empty_sources(checked.saved, values, "cpu")
        files.fill((checked.saved[name], t) for name, t in wholes.items())
        for name, whole in conversion.values(wholes).items():
            fill_from_whole(values[name], whole)
    return values


def _check_folder(module: nn.Module, folder: Path) -> _CheckedFolder:
    """All that can go wrong, before anything is changed: names, shapes, files."""
    files = CheckpointFiles(folder, links=True)
    saved = {name: _entry_of(files, name, file) for name, file in _weight_map(folder).items()}
    own = {k: t for k, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    names, conversions = names_in_module(module, own, saved)
    entries = {new: saved[name]._replace(name=new) for name, new in names.items()}
    converted = {name: Entry(name, t.dtype, tuple(t.shape), False, ()) for conversion in conversions
                 for name, t in conversion.values(conversion.empty_sources(saved, own, "meta")).items()}
    both = entries | converted
    named = {id(own[name]) for name in both if name in own}
    # a tied parameter need not be there under all of its names
    check_names([name for name, t in own.items() if name in both or id(t) not in named], both, f"the folder {folder}",
                fix=fix_of_transformers(module) if is_of_transformers(module) else "")
    for name, entry in both.items():
        check_fit(entry, own[name], kind=False)
    for entry, piece, _ in needed({name: own[name] for name in entries}, entries):
        files.find(entry, piece)                     # raises where the piece is not there
    _check_tied_weights(files, entries, own)
    return _CheckedFolder(files, saved, entries, converted, conversions)


def _check_tied_weights(files: CheckpointFiles, entries: dict[str, Entry], own: dict[str, torch.Tensor]) -> None:
    """One tensor under two names of the folder takes one value."""
    first: dict[int, str] = {}
    for name, entry in entries.items():
        other = entries[first.setdefault(id(own[name]), name)]
        if other is not entry and [files.hash(other, p) for p in other.pieces] != [
                files.hash(entry, p) for p in entry.pieces]:
            raise CheckpointError(f"{other.name!r} and {name!r} are one tensor in the module, two in the folder",
                                  "their values differ there", "untie them, load, and decide which one to keep")


def _entry_of(files: CheckpointFiles, name: str, file: str) -> Entry:
    place = files.open(file).tensors.get(name)
    if place is None:
        raise CheckpointError(f"{files.folder / file} has no tensor {name!r}", "the index says that it has one")
    whole = tuple((0, n) for n in place.shape)
    pieces = (SavedPiece(file, name, whole, ""),) if place.nbytes else ()
    return Entry(name, place.dtype, place.shape, False, pieces)


def _weight_map(folder: Path) -> dict[str, str]:
    """name -> file, of a folder of either kind."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(CheckpointFiles(folder, links=True).open(SINGLE).tensors, SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}",
                              "weights are read from files of these names", "a folder that save_safetensors wrote")
    try:
        file_of = json.loads((folder / INDEX).read_bytes())["weight_map"]
        invalid = [file for file in file_of.values() if not (isinstance(file, str) and _NAME.fullmatch(file))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged", f"{type(error).__name__}: {error}") from None
    if invalid:
        raise CheckpointError(f"{folder / INDEX} names a file {invalid[0]!r:.80}", "that is not a file of this folder")
    return file_of


@api_boundary
def save_safetensors(module: nn.Module, folder: str | os.PathLike[str], *, shard_gb: float = 5.0) -> None:
    """Write the parameters and buffers of a module into `folder`; collective.

    One file, model.safetensors, or where that would be larger than `shard_gb` (1e9 bytes) several and an index. Each
    file is written by one rank, the ranks taking turns, which needs memory for all of it. The files of an earlier save
    are replaced when all are written. Raises CheckpointError on every process where a file cannot be written.
    """
    expect(module, nn.Module, "weights of no module", "gt.save_safetensors(model, folder)")
    expect_path(folder, "weights into no folder", 'gt.save_safetensors(model, "folder")')
    expect_amount(shard_gb, "shard_gb is not the size of a file in GB", "shard_gb=5.0")
    need_safetensors()
    folder = Path(folder)
    tensors = collective_try("saving safetensors", lambda: _tensors_to_save(module), _fingerprint)
    groups = _names_by_file(tensors, shard_gb * 1e9)
    names = [SINGLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
                                               for i in range(len(groups))]
    collective_try("making the folder", lambda: folder.mkdir(parents=True, exist_ok=True))
    written: list[tuple[Path, Path]] = []
    try:
        for i, (name, group) in enumerate(zip(names, groups)):
            rank = i % world_size()                  # no rank needs memory for more than a file at a time
            held = _gather_to({n: tensors[n] for n in group}, rank)
            written += collective_try("writing safetensors", partial(_write_temporary, folder / name, held, rank))
        # Only once all are written: a full disk leaves the files of the earlier save as they were.
        collective_try("renaming safetensors", lambda: _rename(written))
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
    collective_try("finishing safetensors", lambda: _write_index(folder, dict(zip(names, groups)), tensors))
    _log.info("saved %s into %s", counted(len(tensors), "tensor"), folder)


def _fingerprint(tensors: dict[str, torch.Tensor]) -> int:
    """What must be the same on all processes, as one number."""
    return zlib.crc32(repr([(name, t.shape, t.dtype) for name, t in tensors.items()]).encode())


def _tensors_to_save(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors by name, tied ones under the first of their names."""
    known: set[int] = set()
    tensors = {}
    for name, t in module.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor) and id(t) not in known:
            check_dtype(name, t)
            known.add(id(t))
            tensors[name] = t.detach()
    return tensors


def _names_by_file(tensors: dict[str, torch.Tensor], limit: float) -> list[list[str]]:
    """For each file the names of its tensors, in order; each file is as full as the limit allows."""
    groups: list[list[str]] = [[]]
    size = 0.0
    for name, t in tensors.items():
        nbytes = t.numel() * t.dtype.itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0.0
        groups[-1].append(name)
        size += nbytes
    return groups


def _gather_to(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """These tensors whole, in the process that drives `rank`, in one boxing."""
    globals_ = {name: t for name, t in tensors.items() if isinstance(t, GlobalTensor)}
    items = [Move(t.spec, t.shards, layout(placement(t.placement.type, [rank]), (broadcast,)))
             for t in globals_.values()]
    shards = dict(zip(globals_, move_shards(items, "save_safetensors"))) if items else {}
    if rank not in world().local_ranks:
        return {}
    return {name: (shards[name][rank] if name in shards else t).cpu().contiguous() for name, t in tensors.items()}


def _write_temporary(path: Path, held: dict[str, torch.Tensor], rank: int) -> list[tuple[Path, Path]]:
    """Where this process drives `rank`: write the file under another name; that, and the name that it is to get."""
    if rank not in world().local_ranks:
        return []
    temporary = temporary_name(path)
    with removed_on_error(temporary):
        write_tensors(temporary, held, {"format": "pt"})
    return [(temporary, path)]


def _rename(written: list[tuple[Path, Path]]) -> None:
    for temporary, path in written:
        os.replace(temporary, path)


def _write_index(folder: Path, groups: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> None:
    """Write the index, and delete files of an earlier save that this one did not replace."""
    if world().rank != 0:
        return
    if len(groups) > 1:
        total = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        index: dict[str, Any] = {"metadata": {"total_size": total},
                                 "weight_map": {name: file for file, names in groups.items() for name in names}}
        write_atomically(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
    for path in list(folder.iterdir()):
        stale = path.name == INDEX or _SHARD.fullmatch(path.name)
        if stale and path.name not in groups and not (path.name == INDEX and len(groups) > 1):
            path.unlink()
    sync(folder)
