"""What ZeRO 3 has gathered for a layer, in one forward pass: memory that is freed behind the layer, and filled again.

Autograd saves it for backward, which fills it a layer ahead. A program may hold it, too: a layer returns a parameter of
its own, or keeps it in an attribute or a closure, or in what it returns nothing is seen that learns. So whoever reads
what is empty has its layer gathered again. Every rank runs the same program, so all read the same ones.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Shards
from globaltensor.runtime.memory_writes import current_version
from globaltensor.runtime.torch_internals import uncounted_writes, without_modes
from globaltensor.tensors.global_tensor import GlobalTensor


class SavedStorages(list[Shards]):
    """rank -> unsharded shard, per parameter, as autograd saved them in one forward pass: empty but while in use.

    `stay`: a backward pass that is differentiated itself has saved them once more, and nothing says when it is gone
    through. They are emptied when a backward pass is over that goes through their layer and keeps no graph.
    """

    stay = False
    is_empty = False

    def __init__(self, unsharded: Sequence[Shards], gather: Callable[[], None]) -> None:
        super().__init__({rank: t.detach() for rank, t in shards.items()} for shards in unsharded)
        self.gather = gather                         # them all, again
        self._parameters: list[tuple[weakref.ref[Any], Shards, GlobalTensor]] = []
        self._versions: list[int] = []

    def empty_later(self, parameter: GlobalTensor, shards: Shards, of: GlobalTensor) -> None:
        """A parameter has these shards, which are some of these, gathered of another one. It holds them all."""
        parameter.emptied_later = self
        self._parameters.append((weakref.ref(parameter), shards, of))

    def note_versions(self) -> None:
        """The layer has run: from now on a write is one that its backward pass must not miss."""
        self._versions = [current_version(of) for _, _, of in self._parameters]

    def fill(self, unsharded: list[Shards] | None) -> None:
        tensors = tuple(t for shards in self for t in shards.values())
        if unsharded is None:
            none = {(t.dtype, t.device): torch.empty(0, dtype=t.dtype, device=t.device) for t in tensors}
            sources = [none[t.dtype, t.device] for t in tensors]
        else:
            sources = [unsharded[k][rank] for k, shards in enumerate(self) for rank in shards]
        with uncounted_writes(tensors):              # a compiled layer saves them, and would miss their old versions
            for t, source in zip(tensors, sources):
                if t.dtype == source.dtype:          # else the model has another one since that forward pass
                    t.set_(source)                   # type: ignore[call-overload]  # of which torch's types do not know
        self.is_empty = unsharded is None or any(t.dtype != source.dtype for t, source in zip(tensors, sources))
        for alive, shards, _ in self._parameters:
            if (p := alive()) is not None:
                p.arriving = EmptyShards(self, shards) if self.is_empty else None
        if unsharded is not None:
            self.pass_writes_on()

    def pass_writes_on(self) -> None:
        """Autograd refuses what was written to since it was saved: as it does for the parameters, for what was gathered
        of them."""
        for (alive, shards, of), before in zip(self._parameters, self._versions):
            if current_version(of) != before:
                self._note_write(alive(), shards)
        if self._versions:
            self.note_versions()

    def _note_write(self, parameter: GlobalTensor | None, shards: Shards) -> None:
        if parameter is not None:
            increment_version(parameter)


class EmptyShards:
    """The shards of a parameter whose layer is done, without memory. Who reads them has the layer gathered again."""

    def __init__(self, saved: SavedStorages, shards: Shards) -> None:
        self._saved, self._shards = saved, shards

    def read(self) -> Shards:
        with without_modes(), torch.inference_mode(False):
            self._saved.gather()
        if self._saved.is_empty:
            raise GlobalTensorError("a parameter that a layer has given up under ZeRO 3", "the model has another dtype "
                                    "than when the layer ran", "model.to(dtype) before the layer runs")
        return self._shards
