"""Was a piece of memory written to? Counted for memory that someone watches, whichever alias a write comes by.

torch's versions tell of a tensor, its views and `x.detach()`, but not of `x.data`, by which weights are clipped or
averaged in many a program.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from globaltensor.layouts.layout import Shards
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import storage_id


class MemoryWrites:
    """How often a piece of memory was written to."""

    def __init__(self) -> None:
        self.count = 0
        self._on_next_write: Callable[[], None] | None = None

    def add_one(self) -> None:
        self.count += 1
        call, self._on_next_write = self._on_next_write, None
        if call is not None:
            call()

    def await_next(self, call: Callable[[], None] | None) -> None:
        """Call this at the next write, once; None: nothing."""
        self._on_next_write = call


_UNHELD = MemoryWrites()                            # of a process that holds nothing of a tensor
_watched: WeakValueDictionary[int, MemoryWrites] = WeakValueDictionary()     # by storage


def memory_id(t: Any) -> int:
    """The same number for global tensors of one memory; of one that this process holds a part of."""
    # of the lowest rank, not of the first in the dict, whose order follows the placement's: aliases may have another
    # one
    return storage_id(t.shards[min(t.shards)])


def watched_writes(t: Any) -> MemoryWrites:
    """What counts the writes to the memory of a global tensor, as long as it is held. Of a boxed view, its base's."""
    if torch_ext is not None and not t.traced:
        native: MemoryWrites = torch_ext.watched_writes(t)
        return native
    if t.boxed_view is not None:
        of_base: MemoryWrites = t.boxed_view.call.memory
        return of_base
    if not t.shards:
        return _UNHELD
    key = memory_id(t)
    memory = _watched.get(key)
    if memory is None:
        memory = _watched[key] = MemoryWrites()
    return memory


def count_write(t: Any) -> None:
    """Count a write to the memory of a global tensor, where someone watches it."""
    if torch_ext is not None and not t.traced:
        torch_ext.note_write(t)
    elif t.boxed_view is not None:
        t.boxed_view.call.memory.add_one()
    elif _watched and t.shards:
        memory = _watched.get(memory_id(t))
        if memory is not None:
            memory.add_one()


def current_version(t: Any) -> int:
    """What autograd counts; nothing for a tensor of inference mode."""
    return 0 if t.is_inference() else t._version


def writes_of(t: Any) -> tuple[int, MemoryWrites, int]:
    """What stays equal until someone writes to a global tensor, or to an alias of it, or gives it other memory. Who
    holds it watches the memory."""
    memory = watched_writes(t)
    return current_version(t), memory, memory.count


def shard_versions(shards: Shards) -> list[int]:
    """What stays equal until someone writes to a shard itself."""
    return [shard._version for shard in shards.values()]
