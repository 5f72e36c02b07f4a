"""A boxing step sent as messages: one side packs and goes on, the other unpacks when it comes to it.

In `redistribute.py` all ranks of a step meet in one exchange. Between the stages of a pipeline they cannot: the sender
is at another micro-batch when the receiver needs what it sent. So here the step is taken apart into packing, the sizes
of what arrives, and unpacking; the bytes between go whichever way the caller sends them (runtime/p2p.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from globaltensor.boxings.torch_program import (
    ByteStream,
    TorchProgram,
    build_shards,
    compile_step,
    incoming_bytes,
    pack,
)
from globaltensor.layouts.layout import Layout, Shards, Spec


class P2PBoxing:
    """One step of a boxing of many tensors of these specs, to these layouts."""

    def __init__(self, specs: Sequence[Spec], dsts: Sequence[Layout]) -> None:
        self.specs, self.dsts = specs, dsts
        self.programs = [compile_step(s.layout, dst, s.shape) for s, dst in zip(specs, dsts)]

    def pack(self, shards: Sequence[Shards]) -> dict[int, list[torch.Tensor]]:
        """Per peer the bytes that it gets, to be laid end to end."""
        return pack(self.programs, shards)

    def incoming_bytes(self) -> dict[int, int]:
        """Per peer how many bytes come from it."""
        return incoming_bytes(self.programs, [s.dtype for s in self.specs])

    def unpack(self, received: Mapping[int, torch.Tensor]) -> list[Shards]:
        """The new shards, of the bytes that came: views of that memory where a shard came in one piece."""
        streams = {peer: ByteStream(data) for peer, data in received.items()}
        return [_unpacked(p, s, dst, streams) for p, s, dst in zip(self.programs, self.specs, self.dsts)]


def _unpacked(program: TorchProgram, of: Spec, dst: Layout, received: Mapping[int, ByteStream]) -> Shards:
    (rank, fills), *others = program.fills.items() or [(-1, ())]
    if not others and len(fills) == 1 and fills[0].at is None and len(fills[0].parts) == 1:
        (_, shape, (part,)), = fills
        assert part.owner is not None                # what was received has a sender
        return {rank: received[part.owner].read(shape, part.size, of.dtype)}
    return build_shards(program, {}, of, dst, received)
