"""What every rank tells all others through the store of a job: as few messages a rank on a thousand ranks as on ten.

The ranks are a tree: the children of rank r are 4 r + 1 to 4 r + 4. A rank waits for what its children have gathered,
adds what it has itself, and hands that to its parent. Rank 0 then has everything and writes it in one piece, which all
read. So a rank writes and reads a handful of messages whatever the size of the world, and the longest way is log4 n of
them. While it waits it looks into the store ever more seldom, so that waiting ranks do not keep it busy.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from globaltensor.runtime.codec import decode_message, encode_message

_CHILDREN = 4
_FIRST_LOOK, LAST_LOOK = 0.002, 0.2                  # seconds from one look to the next


def parent_of(rank: int) -> int:
    """The rank to which this one hands what it has gathered; not of rank 0."""
    assert rank > 0
    return (rank - 1) // _CHILDREN


def children_of(rank: int, size: int) -> range:
    """The ranks that hand this one what they have gathered."""
    return range(_CHILDREN * rank + 1, min(size, _CHILDREN * (rank + 1) + 1))


_looked = 0.0


def last_look() -> float:
    """When one of the waits here looked last, and would have raised; by time.monotonic()."""
    return _looked


def looks(look: Callable[[], None]) -> Iterator[None]:
    """As often as one likes, ever more seldom; `look` is called in between, and raises where the wait is in vain."""
    global _looked
    pause = _FIRST_LOOK
    while True:
        yield
        _looked = time.monotonic()
        look()
        time.sleep(pause)
        pause = min(LAST_LOOK, 1.25 * pause)


def write_message(store: dist.Store, key: str, value: object) -> None:
    """Signed, and for this key only."""
    store.set(key, encode_message(value, key))       # type: ignore[arg-type]  # bytes do as well


def read_message(store: dist.Store, key: str) -> Any:
    """What was written there; None where nothing was. TransportError where it is not signed."""
    return decode_message(store.get(key), key) if store.check([key]) else None


def gather_in_store(store: dist.Store, name: str, value: object, rank: int, size: int,
                    look: Callable[[], None]) -> list[Any]:
    """The `value` of every rank, in their order; None is no value. `name` is new to this store. `look` is called again
    and again, and raises where a rank is lost or time is over."""
    gathered: dict[int, Any] = {rank: value}
    awaited = set(children_of(rank, size))
    for _ in looks(look):
        for child in sorted(awaited):
            if (more := read_message(store, f"{name} {child}")) is not None:
                gathered |= more
                awaited.remove(child)
        if not awaited:
            break
    write_message(store, f"{name} {rank}", gathered)
    for _ in looks(look):
        whole = gathered if rank == 0 else read_message(store, f"{name} 0")
        if whole is not None:
            return [whole[r] for r in range(size)]
    raise AssertionError("looks end by an error only")
