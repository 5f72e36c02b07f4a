"""Small values that all processes must have, or must have alike: agreed on, gathered, or broadcast."""
from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from globaltensor.errors import DisagreementError, where
from globaltensor.runtime.exchange import AGREE, BROADCAST, GATHER, exchange
from globaltensor.runtime.world import rank, world

_uncoordinated = False

T = TypeVar("T")


@contextmanager
def uncoordinated() -> Iterator[None]:
    """Inside, the processes do different things, so nothing is agreed on and nothing is broadcast."""
    global _uncoordinated
    before, _uncoordinated = _uncoordinated, True
    try:
        yield
    finally:
        _uncoordinated = before


def _peers() -> tuple[int, ...]:
    return tuple(r for r in range(world().size) if r != rank())


def agree(what: str) -> None:
    """Check that all processes call this with the same `what`, with one small all-gather; nothing in a lone process.

    Raises DisagreementError on every rank, which shows what each rank does.
    """
    if world().single_process or _uncoordinated:
        return
    mine = torch.tensor([zlib.crc32(what.encode()), len(what)], device="cpu")
    if all(torch.equal(mine, other) for other in _all_gather(mine, [2] * world().size, what, AGREE)):
        return
    texts = gather_unchecked(f"{what}   at {where()}", what)
    rows = "".join(f"\n    rank {r}: {text}" for r, text in enumerate(texts))
    raise DisagreementError("the ranks disagree about what to create" + rows, "every rank runs the same program",
                            "create the same tensors in the same order everywhere, the same seed before random ones")


def gather_unchecked(value: object, what: str) -> list[Any]:
    """Every process's `value`, in the order of ranks."""
    mine = as_bytes(value)
    sizes = _all_gather(torch.tensor([len(mine)], device="cpu"), [1] * world().size, what, GATHER)
    return [from_bytes(t) for t in _all_gather(mine, [int(n) for n in sizes], what, GATHER)]


def _all_gather(mine: torch.Tensor, sizes: Sequence[int], what: str, tag: int) -> list[torch.Tensor]:
    """Every process's buffer, in the order of ranks, each sent straight from one process to another.

    Not by gloo's collectives: their threads may still hold what they moved when the interpreter ends, and a thread
    that needs an interpreter that has ended aborts the process.
    """
    buffers = [mine if r == rank() else mine.new_empty(n) for r, n in enumerate(sizes)]
    exchange(dict.fromkeys(_peers(), mine), {r: buffers[r] for r in _peers()}, what, tag)
    return buffers


def as_bytes(value: object) -> torch.Tensor:
    """An object as a flat tensor of bytes; `from_bytes` makes it again."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def agree_on(t: torch.Tensor, what: str) -> None:
    """Check that all processes hold the same tensor `t`."""
    if not world().single_process:
        agree(f"{what}: {list(t.shape)}, {t.dtype}, of values with checksum {checksum(t):08x}")


def checksum(t: torch.Tensor) -> int:
    """A number that tells tensors of different values apart; reads them at about a gigabyte a second."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    crc = 0
    for part in flat.split(1 << 26):                 # not all of a GPU's tensor on the CPU at once
        crc = zlib.crc32(part.cpu().numpy(), crc)
    return crc


def checking() -> bool:
    """GLOBALTENSOR_CHECK=1: verify that a plain tensor that meets a global one is the same everywhere, at a price."""
    return os.environ.get("GLOBALTENSOR_CHECK", "") not in ("", "0")


def broadcast_object(value: T, source: int, what: str = "broadcasting a result") -> T:
    """The object that rank `source` has, on every process; collective over the whole world."""
    if world().single_process or _uncoordinated:
        return value
    if rank() == source:
        data = as_bytes(value)
        for t in (torch.tensor([len(data)], device="cpu"), data):
            exchange(dict.fromkeys(_peers(), t), {}, what, BROADCAST)
        return value
    exchange({}, {source: (size := torch.empty(1, dtype=torch.int64, device="cpu"))}, what, BROADCAST)
    exchange({}, {source: (data := torch.empty(int(size), dtype=torch.uint8, device="cpu"))}, what, BROADCAST)
    return from_bytes(data)


def gather_objects(value: T, what: str) -> list[T]:
    """Every process's `value`, in the order of ranks.

    Raises DisagreementError on every rank where not all of them do `what`.
    """
    if world().single_process:
        return [value]
    if _uncoordinated:
        raise DisagreementError(f"{what} inside a pipeline stage", "other processes run other stages, so they cannot "
                                "take part", "do it outside the stages, or with what needs no other process: a "
                                "factory, an op")
    agree(what)
    return gather_unchecked(value, what)
