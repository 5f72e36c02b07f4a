"""Optimizer state that stays out of memory between steps, in files on disk.

    gt.zero(optimizer, offload="/scratch/state")

A step of the optimizer is done a piece of its parameters at a time, some 32 MB of them. While one piece is stepped, the
state of the next is read ahead, and that of the one before has been let go. So two pieces are resident during a step,
and nothing between steps, when activations need the memory.

Each rank's part of a tensor is a file without a name in the folder, mapped into memory: what is stepped and what
`state_dict()` gives are that memory, and the files are gone with the process, however it ends. Sources: Ren et al.,
ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""
from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from globaltensor.errors import ArgumentError
from globaltensor.tensors.global_tensor import GlobalTensor

PIECE = 32 << 20                                     # bytes of parameters that are stepped at a time
Piece = list[list[Any]]                              # of each group some of its parameters


def offload_state(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Keep the state of an optimizer that has taken no step in files there."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    elsewhere = next((p.device.type for p in stepped if p.device.type != "cpu"), None)
    if os.fspath(folder) == "cpu" or elsewhere is not None:
        raise ArgumentError(f"gt.zero(offload={os.fspath(folder)!r}) of parameters on {elsewhere or 'cpu'}",
                            "state is kept in files, of parameters in the host's memory",
                            'a folder, as offload="/scratch/state"' if elsewhere is None else "no offload")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("gt.zero(offload=...) of LBFGS", "its step works with all parameters at once",
                            "an optimizer that steps each parameter by itself, such as AdamW")
    files = StateFiles(folder)
    kind: Any = type(optimizer)
    own_step = getattr(kind.step, "__wrapped__", kind.step)      # without torch's hooks, which are called once a step

    def step_by_pieces(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, whole = self.param_groups, [group["params"] for group in self.param_groups]
        pieces = [*_pieces(whole), []]
        try:
            for piece, following in zip(pieces, pieces[1:]):
                for group, params in zip(groups, piece):
                    group["params"] = params
                files.read_ahead(self.state, following)
                own_step(self)
                files.put_away(self.state, piece)
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params
        return loss

    step: Any = torch.optim.Optimizer.profile_hook_step(step_by_pieces)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this one


def _pieces(groups: Piece) -> Iterator[Piece]:
    """Neighbours, of `PIECE` bytes in this process, or one that is larger."""
    piece: Piece = [[] for _ in groups]
    size = 0
    for nth, params in enumerate(groups):
        for p in params:
            nbytes = sum(shard.nbytes for shard in p.shards.values())
            if size and size + nbytes > PIECE:
                yield piece
                piece, size = [[] for _ in groups], 0
            piece[nth].append(p)
            size += nbytes
    yield piece


class StateFiles:
    """The files, and the state that is mapped from them. `state` is an optimizer's: parameter -> name -> value."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.mapped: dict[tuple[int, str], tuple[Any, list[mmap.mmap]]] = {}     # by parameter and name

    def read_ahead(self, state: Any, piece: Piece) -> None:
        """Let the system read what will be needed soon."""
        for p, key, t in _state_tensors(state, piece):
            known, maps = self.mapped.get((id(p), key), (None, []))
            for pages in maps if known is t else ():
                pages.madvise(mmap.MADV_WILLNEED)

    def put_away(self, state: Any, piece: Piece) -> None:
        """Map what is new, or was loaded, and let go of the memory."""
        for p, key, t in list(_state_tensors(state, piece)):
            known, maps = self.mapped.get((id(p), key), (None, []))
            if known is not t:
                maps = []
                shards = {rank: self._file_of(shard, maps) for rank, shard in t.shards.items()}
                known = GlobalTensor.wrap(t.spec, shards)
                state[p][key] = known
                self.mapped[id(p), key] = known, maps            # what was there before is unmapped with its tensor
            for pages in maps:
                pages.madvise(mmap.MADV_DONTNEED)    # nothing is lost: the file is shared with the system

    def _file_of(self, shard: Tensor, maps: list[mmap.mmap]) -> Tensor:
        """A tensor in a file, with this one's elements and strides (those of memory without gaps)."""
        if not shard.nbytes:
            return shard
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.truncate(shard.nbytes)
            pages = mmap.mmap(file.fileno(), shard.nbytes)       # the file lives as long
        maps.append(pages)
        flat = torch.frombuffer(pages, dtype=shard.dtype)
        return flat.as_strided(shard.shape, torch.empty_like(shard, device="meta").stride()).copy_(shard)


def _state_tensors(state: Any, piece: Piece) -> Iterator[tuple[Any, str, GlobalTensor]]:
    """Parameter, name, tensor: of the state of these parameters all but counts of steps."""
    for p in (p for params in piece for p in params):
        for key, t in state.get(p, {}).items():
            if isinstance(t, GlobalTensor) and t.dim():
                yield p, key, t
