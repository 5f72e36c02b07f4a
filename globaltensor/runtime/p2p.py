"""Letters: bytes that one process leaves for another, which takes them when it comes to it.

In an exchange the two sides meet. Here they do not: the sender goes on at once, and the receiver may be at something
else for long. Between two processes letters are taken in the order in which they were left.

On one host a letter is a note of where the bytes lie in the sender's memory; the receiver copies them from there.
Elsewhere it goes by torch.distributed, and then what comes next is better expected before its turn.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

from globaltensor.runtime.exchange import post, wait
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world

ROOM = 256                                           # letters that may lie there for a process before its sender waits


class Mail:
    """This process's letters to and from the others that take part in one thing. `what` that is stands in errors."""

    def __init__(self, everyone: Sequence[int], what: str) -> None:
        self.peers, self.what = [r for r in everyone if r != world().rank], what
        near = world().host_peers if torch_ext is not None else frozenset()
        self._near = {r: r - min(near) for r in self.peers if r in near}             # the native number of a rank
        self._party = list(self._near.values())
        self._far: dict[Hashable, list[tuple[int, dist.Work, torch.Tensor]]] = {}    # what must be left alone

    def post(self, pieces: Sequence[torch.Tensor], reader: int, name: Hashable, sized: bool = True) -> None:
        """Leave tensors on the CPU for a rank. They must not change until it has taken them. `name` is what both sides
        call this letter; `sized`: the reader knows how many bytes it has."""
        if reader in self._near:
            torch_ext.send(self._near[reader], pieces, _subject(name), self.what, self._party)
            return
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in pieces]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0].clone()
        for part in (whole,) if sized else (torch.tensor([whole.numel()]).view(torch.uint8), whole):
            self._far.setdefault(name, []).append((reader, post(part, reader), part))

    def expect(self, writer: int, name: Hashable, size: int | None = None) -> Callable[[], torch.Tensor]:
        """The next letter of a rank, of so many bytes if that is known: what this gives takes it, as flat bytes.

        Raises TransportError where the writer ended, DisagreementError where it left another letter."""
        if writer in self._near:
            return lambda: torch_ext.recv(self._near[writer], -1 if size is None else size, _subject(name), self.what,
                                     self._party)
        if size is None:
            size = int(self.expect(writer, name, 8)().view(torch.int64))
        buffer = torch.empty(size, dtype=torch.uint8)
        work = post(buffer, writer, receive=True)

        def take() -> torch.Tensor:
            wait({writer: work}, self.what, tuple(self.peers))
            return buffer

        return take

    def taken(self, name: Hashable) -> None:
        """Letters of this name were read, or shall be now: their memory is free again."""
        for reader, work, _ in self._far.pop(name, ()):
            wait({reader: work}, self.what, tuple(self.peers))

    def finish(self) -> None:
        """Wait until all that was left is taken."""
        for name in list(self._far):
            self.taken(name)
        for index in self._party:
            torch_ext.wait_acked(index, self.what, self._party)


def _subject(name: Hashable) -> int:
    return zlib.crc32(repr(name).encode())
