"""What a checkpoint is to hold, before anything is written: checked, the same on all ranks, reduced, and copied."""
from __future__ import annotations

import json
import zlib
from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.pieces import PieceToWrite, check_dtype, local_parts
from globaltensor.checkpoint.remote import Folder
from globaltensor.checkpoint.tree import FlatState, flatten
from globaltensor.layouts.regions import slices
from globaltensor.runtime.agreement import checksum, gather_objects
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor


def checked_flat(state: Any) -> FlatState:
    flat = flatten(state)
    for name, t in flat.tensors.items():
        check_dtype(name, t)
    return flat


def state_in_a_line(flat: FlatState) -> str:
    """What must be the same on all processes, in one line."""
    rows = [f"{name}: " + (str(t.spec) if isinstance(t, GlobalTensor) else f"{list(t.shape)} {t.dtype}")
            for name, t in flat.tensors.items()]
    return f"{len(rows)} tensors, with checksum {zlib.crc32(chr(10).join(rows).encode()):08x}"


def check_same_values(flat: FlatState) -> None:
    """Plain tensors and values are written once, so ranks with different ones would lose theirs: raise instead."""
    if world().single_process:
        return

    checksums = {name: checksum(t) for name, t in flat.tensors.items() if not isinstance(t, GlobalTensor)}
    checksums |= {f"the plain value {path}": zlib.crc32(json.dumps(value).encode())
                  for path, value in _plain_values(flat.state)}
    totals = gather_objects((zlib.crc32(repr(checksums).encode()),), "comparing the plain values of a checkpoint")
    if len(set(totals)) == 1:
        return
    replies = gather_objects((checksums,), "naming the plain values of a checkpoint that differ")
    alone = [f"{name} (on {rank_names(on)})" for name in sorted({name for (theirs,) in replies for name in theirs})
             if len(on := [r for r, (theirs,) in enumerate(replies) if name in theirs]) < len(replies)]
    if alone:
        raise CheckpointError(f"only some of the ranks have {', '.join(alone[:8])} in the state",
                              "a checkpoint has the same keys on all ranks: what is plain is written once",
                              "the same keys on every rank, not one for each rank; for what is of one rank alone, a "
                              "list of all ranks' values, under one key")
    names = [name for name in checksums if len({theirs[name] for (theirs,) in replies}) > 1]
    raise CheckpointError(f"the ranks differ in {', '.join(names[:8]) or 'the order of keys'} of the state",
                          "plain tensors and values are written once, so they must be the same",
                          "a list of all ranks' values, or a global tensor: x.to_global(placement, gt.sbp.split(0))")


def _plain_values(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of an encoded state."""
    if isinstance(node, dict) and "dict" in node:
        return [leaf for k, v in node["dict"].items() for leaf in _plain_values(v, f"{path}/{k}" if path else k)]
    return [(path, node)]


def with_sums_reduced(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with pending sums reduced, all in one boxing."""
    pending = {id(t): t for t in tensors.values() if isinstance(t, GlobalTensor) and t.spec.layout.partial}
    if not pending:
        return tensors
    dsts = [t.spec.layout.without_partials for t in pending.values()]
    reduced = dict(zip(pending, redistribute(list(pending.values()), dsts, "save")))
    return {name: reduced.get(id(t), t) for name, t in tensors.items()}


def _check_folder_shared(temporary: Folder) -> None:
    if not temporary.is_dir():
        raise CheckpointError(f"{temporary} does not exist", "rank 0 made it: the processes do not share this folder",
                              "a directory on a file system, or a store, that all of them share")


def data_to_write(tensors: dict[str, torch.Tensor], pieces: list[PieceToWrite],
                   copy: bool, temporary: Folder) -> dict[int, dict[PieceToWrite, torch.Tensor]]:
    """What each rank that this process drives has to write into this folder, contiguous and on the CPU; `copy` where
    it may change."""
    _check_folder_shared(temporary)
    data: dict[int, dict[PieceToWrite, torch.Tensor]] = {rank: {} for rank in world().local_ranks}
    parts_of = {name: {part.rank: part for part in local_parts(t)} for name, t in tensors.items()}
    for piece in pieces:
        if piece.rank in data:
            # A plain tensor has one part, whichever rank writes a piece of it.
            part = parts_of[piece.name].get(piece.rank) or next(iter(parts_of[piece.name].values()))
            view = part.data[slices(piece.region, part.region)].resolve_conj().resolve_neg()
            ready = view.cpu().contiguous()
            same_memory = ready.untyped_storage().data_ptr() == part.data.untyped_storage().data_ptr()
            data[piece.rank][piece] = ready.clone() if copy and same_memory else ready
    return data
