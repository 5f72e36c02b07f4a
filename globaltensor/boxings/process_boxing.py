"""Boxings between devices of the processes of one host, by kernels of ours, which reach the memory of all of them.

Each process has a *staging area* on its device, which the others map once (CUDA IPC). A boxing copies this rank's shard
there, and one launch does the rest, without the host:

    rank 0    copy in | barrier | read the staging areas of ranks 0, 1; store into its new shard | barrier
    rank 1    copy in | barrier | the same for its own shard                                     | barrier

The barriers are those of the kernels, on the devices. On the host the ranks of a boxing only tell each other which one
they mean, so that ranks that went apart get an error. Larger tensors than the area, and those of several hosts, go by
collectives of torch.distributed (run_steps.py).

Before ranks do so for the first time they try it: each reads what all others wrote, sums too. Unless every rank finds
all of it right, none of them goes this way, and one says so.
"""
from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from globaltensor.boxings.copy_plan import CopyMove, CopyPlan, move_array
from globaltensor.boxings.device_boxing import kernels_for
from globaltensor.boxings.kernel_program import (
    DIMS,
    KernelProgram,
    compile_program,
    direct_steps,
    pack_corner,
    pack_region,
)
from globaltensor.boxings.run_steps import Move, boxing_tag, move_wait_text
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, contiguous, dense
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.runtime.device_kernels import KERNELS, are_provided, kernel_verdict
from globaltensor.runtime.exchange import exchange
from globaltensor.runtime.kernel_library import IPC_BYTES, KernelLibrary
from globaltensor.runtime.process_end import at_end
from globaltensor.runtime.world import shared_gpu, world

RANKS = 16                                           # GT_CUDA_RANKS
BLOCKS = 256                                         # GT_CUDA_BLOCKS
GROUPS = 32                                          # of ranks that box together; each has barriers of its own
STAGING = 64 << 20                                   # bytes for shards
LARGE_SUM = 512 << 10                                # bytes of a sum, above which ranks would read too much
_PAD = RANKS * BLOCKS * 4                            # GT_CUDA_PAD_BYTES
_BARRIERS = GROUPS * (_PAD + BLOCKS * 4)             # the pads of all groups, then their epochs
_MEETING = 9                                         # tag
_HELLO = struct.Struct(f"={IPC_BYTES}sqqq")          # memory, the group's slot here, kernels that pass, blocks
_log = logging.getLogger("globaltensor")


class BarrierGroup(ctypes.Structure):
    """gt_cuda_group: where the barriers of some ranks are."""

    _fields_ = [("pad", ctypes.c_void_p * RANKS), ("epoch", ctypes.c_void_p), ("abort", ctypes.c_void_p),
                ("gave_up", ctypes.c_void_p), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32)]


class StagingArea:
    """This process's own: barriers first, then the shards of the boxing that goes on."""

    def __init__(self, library: KernelLibrary, device: torch.device) -> None:
        self.library, self.device = library, device
        self.memory = torch.empty(_BARRIERS + STAGING, dtype=torch.uint8, device=device)
        self.memory[:_BARRIERS].zero_()
        self.words = library.host_words(2)
        torch.accelerator.synchronize(device)        # before anybody is told where it is
        self.handle = library.export_memory(self.memory)
        self.opened: dict[bytes, int] = {}
        self.groups = 0

    def address_of(self, handle: bytes) -> int:
        """Where the staging area of another process is here."""
        if handle not in self.opened:
            self.opened[handle] = self.library.open_memory(self.device.index, handle)
        return self.opened[handle]


class Meeting(NamedTuple):
    """Ranks that box together: where their staging areas are, in the order of `ranks`, and what passes on all."""

    area: StagingArea
    ranks: tuple[int, ...]
    bases: tuple[int, ...]
    group: BarrierGroup
    blocks: int
    kernels: frozenset[str]

    def run(self, moves: Sequence[CopyMove]) -> None:
        """Do the moves, once all ranks have come here; what comes next on the stream finds all done."""
        self.area.library.reduce_in_sync(self.area.device.index, self.group, self.blocks, move_array(moves))


_areas: dict[torch.device, StagingArea] = {}
_meetings: dict[tuple[int, ...], Meeting | None] = {}


# ------------------------------------------------------------------ whether
def find_meeting(moves: Sequence[Move]) -> Meeting | None:
    """What does these boxings together; None where it cannot, or on a rank that has no part in them. Collective among
    the ranks that have, when they first box together."""
    ranks = _ranks_that_meet(moves)
    if ranks is None or world().rank not in ranks:
        return None
    if ranks not in _meetings:
        _meetings[ranks] = _meet(ranks, world().device(moves[0].dst.placement.type, world().rank))
    meeting = _meetings[ranks]
    needed = frozenset[str]().union(*(kernels_for(move.spec) or () for move in moves))
    return meeting if meeting is not None and needed <= meeting.kernels else None


def _ranks_that_meet(moves: Sequence[Move]) -> tuple[int, ...] | None:
    """The ranks of these boxings, where kernels of ours may do them between processes; the same on all ranks."""
    here, type = world(), moves[0].dst.placement.type
    if here.single_process or not are_provided(type) or shared_gpu():
        return None
    ranks = {*moves[0].spec.placement.flat, *moves[0].dst.placement.flat}
    if not 2 <= len(ranks) <= RANKS or not here.host_peers.issuperset(ranks):
        return None
    for move in moves:
        of, dst = move.spec, move.dst
        if {*of.placement.flat, *dst.placement.flat} != ranks or {of.placement.type, dst.placement.type} != {type}:
            return None
        if isinstance(of.layout, RankRegions) or isinstance(dst, RankRegions) or kernels_for(of) is None:
            return None
        if of.ndim > DIMS or of.nbytes > (LARGE_SUM if of.layout.partial else STAGING - 16):
            return None
    return tuple(sorted(ranks))


def _meet(ranks: tuple[int, ...], device: torch.device) -> Meeting | None:
    hello = _HELLO.pack(bytes(IPC_BYTES), 0, 0, 0)
    area, why = None, "its kernels may not be used"
    try:
        if (verdict := kernel_verdict(device)) is not None and (_area_on(device, verdict.library).groups < GROUPS):
            area = _areas[device]
            mask = sum(1 << i for i, name in enumerate(KERNELS) if name in verdict.passed)
            hello = _HELLO.pack(area.handle, area.groups, mask, min(area.library.blocks(device.index), BLOCKS // 8))
            area.groups += 1
    except GlobalTensorError as error:               # memory that cannot be shared
        why = error.what
    hellos = [_HELLO.unpack(text) for text in _tell_all(ranks, hello)]
    masks, blocks = [mask for _, _, mask, _ in hellos], min(blocks for *_, blocks in hellos)
    meeting = None
    if area is not None and all(masks):
        try:
            bases = tuple(area.memory.data_ptr() if rank == world().rank else area.address_of(handle)
                          for rank, (handle, *_) in zip(ranks, hellos))
            kernels = frozenset(name for i, name in enumerate(KERNELS) if all(mask >> i & 1 for mask in masks))
            meeting = Meeting(area, ranks, bases, _barriers(area, ranks, bases, [slot for _, slot, *_ in hellos]),
                              blocks, kernels)
        except GlobalTensorError as error:
            why = error.what
    # nobody may wait in a kernel for a rank that will not come
    if b"\0" in _tell_all(ranks, bytes([meeting is not None])) or meeting is None:
        return _without_kernels(ranks, why)
    right = _tried(meeting)
    if b"\0" in _tell_all(ranks, bytes([right])):
        return _without_kernels(ranks, "another rank read wrong numbers" if right else "it read wrong numbers")
    return meeting


def _without_kernels(ranks: tuple[int, ...], why: str) -> Meeting | None:
    if world().rank == ranks[0]:
        _log.warning("globaltensor: ranks %s box by torch.distributed, not by kernels of ours; rank %s: %s", ranks,
                     ranks[0], why)
    return None


def _area_on(device: torch.device, library: KernelLibrary) -> StagingArea:
    if device not in _areas:
        _areas[device] = area = StagingArea(library, device)
        at_end(area.words[:1].fill_, 1)              # or a kernel that waits for an ended rank would keep this process
    return _areas[device]


def _barriers(area: StagingArea, ranks: tuple[int, ...], bases: Sequence[int], slots: Sequence[int]) -> BarrierGroup:
    pads = (ctypes.c_void_p * RANKS)(*(base + slot * _PAD for base, slot in zip(bases, slots)))
    me = ranks.index(world().rank)
    return BarrierGroup(pads, bases[me] + GROUPS * _PAD + slots[me] * BLOCKS * 4, area.words.data_ptr(),
                        area.words[1:].data_ptr(), me, len(ranks))


def _tell_all(ranks: tuple[int, ...], text: bytes) -> list[bytes]:
    """What each of the ranks says, in their order; texts of one length."""
    peers = [rank for rank in ranks if rank != world().rank]
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    heard = {peer: torch.empty(len(text), dtype=torch.uint8, device="cpu") for peer in peers}
    exchange(dict.fromkeys(peers, own), heard, "the first boxing between their devices", _MEETING)
    return [bytes(heard[rank].tolist()) if rank in heard else text for rank in ranks]


def _tried(meeting: Meeting) -> bool:
    """Is what this rank reads what all ranks wrote, one by one and added up, again and again?"""
    count, size = len(meeting.ranks), 5000
    rows = [KernelProgram(pack_region(1, 1, 0, 1, 0, (size,)), 2 * pack_corner(i, (0,)), 1, 0, (), ())
            for i in range(count)]
    corners = b"".join(pack_corner(i, (0,)) for i in (*range(count), count))
    rows.append(KernelProgram(pack_region(count, 1, 0, 1, 0, (size,)), corners, 1, 0, (), ()))
    device, right = meeting.area.device, True
    for turn in range(4):
        dtype = (torch.float32, torch.int32)[turn % 2]
        wrote = [torch.arange(size, dtype=dtype, device="cpu") * (rank + 2) + turn for rank in meeting.ranks]
        _staging_tensor(meeting, 0, (size,), dtype).copy_(wrote[meeting.group.rank])
        result = torch.zeros(count + 1, size, dtype=dtype, device=device)
        sources = {i: (base + _BARRIERS, (1,)) for i, base in enumerate(meeting.bases)}
        targets = {i: (row.data_ptr(), (1,)) for i, row in enumerate(result)}
        plans = [CopyPlan(row, dtype, count + 1) for row in rows]
        meeting.run([plan.at_addresses(sources, targets) for plan in plans])
        total = wrote[0].clone()
        for row in wrote[1:]:
            total += row
        right = right and torch.equal(result.cpu(), torch.stack([*wrote, total]))
    return right


# ------------------------------------------------------------------ doing them
class StagedStep(NamedTuple):
    """One direct step as this rank does it. `sizes`: the shards that the ranks of the meeting hold before it; None of a
    rank that holds none."""

    dst: Layout
    stride: Shape
    plan: CopyPlan
    sizes: tuple[Shape | None, ...]


@remembered
def _staged_steps(of: Spec, dst: Layout, ranks: tuple[int, ...]) -> tuple[StagedStep, ...]:
    index = {rank: i for i, rank in enumerate(ranks)}
    steps = []
    for a, b in pairwise(direct_steps(of.layout, dst)):
        program = compile_program(a, b, of.shape, of.dtype.itemsize, (world().rank,), index)
        sizes = tuple(a.local_shape(of.shape, rank) if rank in a.placement.coords else None for rank in ranks)
        steps.append(StagedStep(b, of.moved(b).stride, CopyPlan(program, of.dtype, len(ranks)), sizes))
    return tuple(steps)


def run_process_boxings(meeting: Meeting, moves: Sequence[Move], purpose: str) -> list[Shards]:
    """The new shards of each tensor on this rank, which is one of the meeting. Raises TransportError where a rank of it
    ended, or means another boxing."""
    peers = [rank for rank in meeting.ranks if rank != world().rank]
    tag = boxing_tag(moves, purpose) & 0x3FFFFFFF | 8
    word = torch.zeros(1, dtype=torch.uint8, device="cpu")
    exchange(dict.fromkeys(peers, word), {peer: torch.empty_like(word) for peer in peers},
             move_wait_text(purpose, moves[0].spec, moves[0].dst), tag)
    done: list[Shards] = []
    batch: list[Move] = []
    for move in moves:
        if sum(one.spec.nbytes + 16 for one in (*batch, move)) > STAGING:
            done += _run_batch(meeting, batch)
            batch = []
        batch.append(move)
    return [*done, *_run_batch(meeting, batch)]


def _run_batch(meeting: Meeting, moves: Sequence[Move]) -> list[Shards]:
    steps = [_staged_steps(move.spec, move.dst, meeting.ranks) for move in moves]
    held = [{rank: shard.resolve_conj().resolve_neg() for rank, shard in move.shards.items()} for move in moves]
    me = world().rank
    for number in range(max(map(len, steps))):
        room = [0] * len(meeting.ranks)              # of each staging area that is taken
        copies = []
        for k, move in enumerate(moves):
            if number >= len(steps[k]):
                continue
            step, dtype = steps[k][number], move.spec.dtype
            sources = {}
            for i, size in enumerate(step.sizes):
                if size is not None:
                    if i == meeting.group.rank:
                        _staging_tensor(meeting, room[i], size, dtype).copy_(held[k][me])
                    sources[i] = (meeting.bases[i] + _BARRIERS + room[i], contiguous(size))
                    room[i] += (prod(size) * dtype.itemsize + 15) // 16 * 16
            shape = step.dst.local_shape(move.spec.shape, me) if me in step.dst.placement.coords else None
            held[k] = {} if shape is None else {me: torch.empty_strided(
                shape, dense(shape, step.stride), dtype=dtype, device=meeting.area.device)}
            targets = {meeting.ranks.index(rank): (t.data_ptr(), t.stride()) for rank, t in held[k].items()}
            copies.append(step.plan.at_addresses(sources, targets))
        meeting.run(copies)
    return held


def _staging_tensor(meeting: Meeting, offset: int, size: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in this rank's own staging area."""
    start = _BARRIERS + offset
    return meeting.area.memory[start:start + prod(size) * dtype.itemsize].view(dtype).view(size)
