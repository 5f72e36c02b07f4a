"""Point-to-point messages: bytes that one process sends to another, which receives them when it gets there.

In an exchange both sides take part at the same time. Here they do not: a send returns at once, and the receiver may be
busy with something else for long. Between two processes messages are received in the order in which they were sent.

On one host a message is a note of where the bytes are in the sender's memory; the receiver copies them from there.
Between hosts it goes through torch.distributed, where a receive that is posted early overlaps with other work. Between
devices an engine of torch's own carries it, such as NCCL, once both sides have opened a channel.
"""
from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from globaltensor.runtime import counters
from globaltensor.runtime.accelerators import engine_class
from globaltensor.runtime.collectives import open_channel
from globaltensor.runtime.exchange import post, wait
from globaltensor.runtime.memory import flat_bytes
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world

MAX_PENDING = 256                                    # messages that may be pending for a process before a send blocks


class P2PGroup:
    """Messages between this process and the others of one activity. `what` that is appears in errors."""

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        self.peers, self.what = [r for r in ranks if r != world().rank], what
        host = world().host_peers if torch_ext is not None else frozenset()
        self._local = {r: r - min(host) for r in self.peers if r in host}            # rank -> its number on this host
        self._local_numbers = list(self._local.values())
        # By tag, what torch.distributed is still sending: the tensors must stay alive and unchanged until it is done.
        self._remote: dict[Hashable, list[tuple[int, dist.Work, torch.Tensor]]] = {}

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: Hashable, sized: bool = True) -> None:
        """Send tensors on the CPU to a rank, as one message, without waiting for it. They must not change until it has
        received them. Both sides use the same `tag`; `sized`: the receiver knows how many bytes to expect."""
        if peer in self._local:
            torch_ext.send(self._local[peer], tensors, _tag_number(tag), self.what, self._local_numbers)
            return
        flat = [flat_bytes(t.contiguous()) for t in tensors]
        message = torch.cat(flat) if len(flat) > 1 else flat[0].clone()
        for part in (message,) if sized else (torch.tensor([message.numel()], device="cpu").view(torch.uint8), message):
            self._remote.setdefault(tag, []).append((peer, post(part, peer, self.what), part))

    def recv(self, peer: int, tag: Hashable, nbytes: int | None = None) -> Callable[[], torch.Tensor]:
        """Post a receive of the next message of a rank, of so many bytes if that is known. The function that is
        returned waits for it and gives its bytes, flat.

        Raises TransportError where the sender has ended, DisagreementError where its message has another tag."""
        if peer in self._local:
            return lambda: _receive_counted(lambda: torch_ext.recv(
                self._local[peer], -1 if nbytes is None else nbytes, _tag_number(tag), self.what, self._local_numbers))
        if nbytes is None:
            nbytes = int(self.recv(peer, tag, 8)().view(torch.int64))
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        work = post(buffer, peer, self.what, receive=True)

        def finish() -> torch.Tensor:
            wait({peer: work}, self.what, tuple(self.peers))
            return buffer

        return lambda: _receive_counted(finish)

    def wait_sent(self, tag: Hashable) -> None:
        """Wait until messages of this tag to other hosts are sent; their memory is free again."""
        for peer, work, _ in self._remote.pop(tag, ()):
            wait({peer: work}, self.what, tuple(self.peers))

    def flush(self) -> None:
        """Wait until all messages are received."""
        for tag in list(self._remote):
            self.wait_sent(tag)
        for number in self._local_numbers:
            torch_ext.wait_acked(number, self.what, self._local_numbers)


def may_open_channels(type: str) -> bool:
    """Can an engine carry messages between devices of this type?"""
    return type not in ("cpu", "meta") and not world().staged and engine_class(world().engine) is not None


class DeviceChannels:
    """Messages between devices of this process and of others. That both sides mean the same is for the caller to check:
    an engine takes any message for the next one."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Any] = {}          # by sender and receiver
        # By tag, what is being sent: its memory is used by another stream until a wait for it.
        self._sent: dict[Hashable, list[tuple[dist.Work, torch.Tensor]]] = {}

    def open(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        """Open channels from one rank to another. Both sides come, and have none of these yet, or both have it. All
        ranks open theirs in ascending order, so that no two wait for each other in vain."""
        for pair in sorted(set(pairs) - self._groups.keys()):
            self._groups[pair] = open_channel(*pair, device)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: Hashable) -> None:
        """Send flat bytes of one device, as one message, without waiting for its receiver."""
        message = torch.cat(list(tensors))
        if message.numel():
            work = self._groups[world().rank, peer].send([message], 1, 0)
            self._sent.setdefault(tag, []).append((work, message))

    def recv(self, peer: int, nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
        """Post a receive of the next message of a rank. The function that is returned lets what comes next on the
        current stream wait for it, and gives its bytes, flat."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if not nbytes:
            return lambda: buffer
        work = self._groups[peer, world().rank].recv([buffer], 0, 0)

        def finish() -> torch.Tensor:
            work.wait()
            return buffer

        return lambda: _receive_counted(finish)

    def free_sent(self, tag: Hashable) -> None:
        """The memory of messages of this tag is free again, for what comes next on the current stream."""
        for work, _ in self._sent.pop(tag, ()):
            work.wait()

    def free_all(self) -> None:
        """That of all messages."""
        for tag in list(self._sent):
            self.free_sent(tag)


def _receive_counted(receive: Callable[[], torch.Tensor]) -> torch.Tensor:
    began = time.perf_counter()
    message = receive()
    counters.add(received=message.numel(), seconds=time.perf_counter() - began)
    return message


def _tag_number(tag: Hashable) -> int:
    return zlib.crc32(repr(tag).encode())            # not hash(): that of a string differs from process to process
