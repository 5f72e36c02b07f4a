"""Optimizer state, and parameters, that stay elsewhere between their uses: in the host's memory, or in files on disk.

    gt.zero(optimizer, offload="cpu")                # of parameters on GPUs and other devices
    gt.zero(optimizer, offload="/scratch/state")

A step of the optimizer is done a piece of its parameters at a time, some 32 MB of them. While one piece is stepped, the
state of the next is brought, and that of the one before has been let go. So two pieces are on the device, or resident,
during a step, and nothing between steps, when activations need the memory.

Parameters go with them that are on a device and gathered layer by layer (zero3.py): the optimizer steps them on the
host, whose memory their gradients come to, and a layer is brought to the device one layer ahead.

In a folder each rank's part of a tensor is a file without a name, mapped into memory: `state_dict()` gives that memory,
and the files are gone with the process, however it ends. Sources: Ren et al., ZeRO-Offload, arXiv:2101.06840;
Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""
from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.aliasing import note_write
from globaltensor.errors import ArgumentError, expect_path
from globaltensor.layouts.layout import Spec, layout
from globaltensor.layouts.placement import placement
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

PIECE = 32 << 20                                     # bytes of parameters that are stepped at a time
Piece = list[list[Any]]                              # of each group some of its parameters


def offload_state(optimizer: torch.optim.Optimizer, where: str | os.PathLike[str]) -> None:
    """Keep the state of an optimizer in the host's memory ("cpu"), or in files of a folder. `check_offload` comes
    before. torch's optimizers step each parameter by itself; what others count or add up in a step is not known."""
    folder = folder_of(where)
    if folder is None and all(p.placement.type == "cpu" for group in optimizer.param_groups for p in group["params"]):
        return                                       # it is there as it is
    away = StateElsewhere(folder)
    kind: Any = type(optimizer)
    own_step = getattr(kind.step, "__wrapped__", kind.step)      # without torch's hooks, which are called once a step

    def step_by_pieces(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, whole = self.param_groups, [group["params"] for group in self.param_groups]
        pieces = [*(_pieces(whole) if own_step.__module__.startswith("torch.optim.") else [whole]), []]
        away.bring(self.state, pieces[0])
        try:
            for piece, following in zip(pieces, pieces[1:]):
                for group, params in zip(groups, piece):
                    group["params"] = params
                away.read_ahead(self.state, following)
                own_step(self)                       # on a device it runs while the host goes on
                away.bring(self.state, following)
                away.put_away(self.state, piece)
        except BaseException:                        # what was brought goes back
            away.put_away(self.state, whole)
            raise
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params
        return loss

    step: Any = torch.optim.Optimizer.profile_hook_step(step_by_pieces)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this one
    optimizer.register_load_state_dict_pre_hook(away.hold_back)
    optimizer.register_load_state_dict_post_hook(away.load)


def folder_of(where: str | os.PathLike[str]) -> str | None:
    """The folder that `offload` names; None for the host's memory."""
    return None if os.fspath(where) == "cpu" else os.fspath(where)


def check_offload(where: str | os.PathLike[str], optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for what is neither "cpu" nor a folder, and for LBFGS; OSError for a folder that cannot be
    made."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("gt.zero(offload=...) of LBFGS", "its step works with all parameters at once",
                            "an optimizer that steps each parameter by itself, such as AdamW")
    expect_path(where, "gt.zero with state offloaded to no place", 'offload="cpu", or a folder')
    if os.path.exists(where) and not os.path.isdir(where):
        raise ArgumentError(f"offload={os.fspath(where)!r}", "that is a file, not a folder",
                            'offload="cpu", or a folder')
    if (folder := folder_of(where)) is not None:
        os.makedirs(folder, exist_ok=True)


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


@dataclass
class KeptState:
    """One tensor of the state between steps; the files that it lies in; and, in a step, its copy on the device."""

    home: GlobalTensor
    files: list[mmap.mmap] = field(default_factory=list)
    stepped: GlobalTensor | None = None


class StateElsewhere:
    """The state, in files of a folder, or in the host's memory (None). `state` is an optimizer's: parameter -> name ->
    value."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.kept: dict[tuple[int, str], KeptState] = {}         # by parameter and name
        self.held_back: dict[Any, dict[str, GlobalTensor]] = {}  # by parameter: what is being loaded

    def read_ahead(self, state: Any, piece: Piece) -> None:
        """Let the system read what will be needed soon."""
        for p, key, t in _state_tensors(state, piece):
            kept = self.kept.get((id(p), key))
            for pages in kept.files if kept and kept.home is t else ():
                _advise(pages, "MADV_WILLNEED")

    def bring(self, state: Any, piece: Piece) -> None:
        """Copy to the parameters' device what is not there."""
        for p, key, t in list(_state_tensors(state, piece)):
            if t.placement.type != p.placement.type:
                device = {rank: shard.device for rank, shard in p.shards.items()}
                copies = {rank: shard.to(device[rank], non_blocking=True) for rank, shard in t.shards.items()}
                state[p][key] = stepped = GlobalTensor.wrap(_spec_on(t, p.placement), copies)
                if (kept := self.kept.get((id(p), key))) and kept.home is t:
                    kept.stepped = stepped

    def put_away(self, state: Any, piece: Piece) -> None:
        """Keep what is new, was loaded or was stepped, and let go of the memory."""
        for p, key, t in list(_state_tensors(state, piece)):
            kept = self.kept.get((id(p), key))
            if kept is not None and kept.stepped is t:
                for rank, shard in t.shards.items():
                    kept.home.shards[rank].copy_(shard)
                note_write(kept.home)
            elif kept is None or kept.home is not t:             # what was there before is unmapped with its tensor
                files: list[mmap.mmap] = []
                kept = KeptState(on_host(t, self.folder, files), files)
                self.kept[id(p), key] = kept
            state[p][key], kept.stepped = kept.home, None
            for pages in kept.files:
                _advise(pages, "MADV_DONTNEED")      # nothing is lost: the file is shared with the system

    @api_boundary
    def hold_back(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """What `load_state_dict` is given, without what lies on the host: torch would move it to the parameters."""
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        state = dict(saved["state"])
        self.held_back.clear()                       # of a state that torch refused
        for n, p in zip(numbers, (p for group in optimizer.param_groups for p in group["params"])):
            own = state.get(n, {})
            elsewhere = {key: t for key, t in own.items() if isinstance(t, GlobalTensor)
                         and t.placement.type != p.placement.type}
            if elsewhere:
                self.held_back[p] = elsewhere
                state[n] = {key: t for key, t in own.items() if key not in elsewhere}
        return {**saved, "state": state}

    @api_boundary
    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it be the state: the next step copies it from there."""
        for p, own in self.held_back.items():
            optimizer.state[p].update(own)
        self.held_back.clear()


def on_host(t: Any, folder: str | None, files: list[mmap.mmap]) -> GlobalTensor:
    """A copy of a tensor in the host's memory (None), or in files of a folder, which are added to `files`."""
    shards = {rank: _copy_on_host(shard, folder, files) for rank, shard in t.shards.items()}
    return GlobalTensor.wrap(_spec_on(t, t.placement.of_type("cpu")), shards)


def _copy_on_host(shard: Tensor, folder: str | None, files: list[mmap.mmap]) -> Tensor:
    """Of a shard, with its strides (those of memory without gaps)."""
    if not shard.nbytes:
        return shard.cpu()
    stride = torch.empty_like(shard, device="meta").stride()
    if folder is None:                               # what is pinned is copied while the host goes on
        flat = torch.empty(shard.numel(), dtype=shard.dtype, pin_memory=shard.device.type == "cuda", device="cpu")
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(shard.nbytes)
            pages = mmap.mmap(file.fileno(), shard.nbytes)       # the file lives as long
        files.append(pages)
        flat = torch.frombuffer(pages, dtype=shard.dtype)
    return flat.as_strided(shard.shape, stride).copy_(shard)


def _advise(pages: mmap.mmap, how: str) -> None:
    """Tell the system, where it takes advice: Windows does not."""
    if hasattr(mmap, how):
        pages.madvise(getattr(mmap, how))


def _spec_on(t: GlobalTensor, where: placement) -> Spec:
    return t.spec.moved(layout(where, t.sbp))


def _state_tensors(state: Any, piece: Piece) -> Iterator[tuple[Any, str, GlobalTensor]]:
    """Parameter, name, tensor: of the state of these parameters all but counts of steps."""
    for p in (p for params in piece for p in params):
        for key, t in state.get(p, {}).items():
            if isinstance(t, GlobalTensor) and t.dim():
                yield p, key, t
