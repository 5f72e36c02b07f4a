"""torch's own checkpoints, `torch.distributed.checkpoint`, save and load global tensors as they do DTensors.

    import torch.distributed.checkpoint as dcp
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="folder")
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id="folder")       # under any layout

torch asks a tensor three things: which regions of it this process could write, which it wants to read, and the memory
of such a region. One list of *chunks* answers all three: a chunk is a region and a view of a shard.

Every process that holds a region offers it, and torch's planner picks as its writer the one with the least to write so
far. A large region that k ranks hold is cut into up to k chunks, so that the writing of one large broadcast tensor is
shared, too. When reading, each replica is a chunk of its own. Nothing in the files depends on sbp or placement: plain
torch reads what global tensors wrote, and they read what plain torch wrote.
"""
from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from globaltensor.algorithms.aliasing import note_uncounted_write
from globaltensor.checkpoint.loading import check_loadable
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.pieces import MAX_PIECE_BYTES, local_parts, whole_region
from globaltensor.layouts.regions import Region, slices, split_range, volume
from globaltensor.tensors.global_tensor import GlobalTensor


class Chunk(NamedTuple):
    """A region of the tensor, and the memory of this process that holds it."""

    region: Region
    data: torch.Tensor

    @property
    def start(self) -> torch.Size:
        """torch calls them offsets."""
        return torch.Size(first for first, _ in self.region)

    @property
    def size(self) -> torch.Size:
        return torch.Size(stop - first for first, stop in self.region)


def chunks(t: GlobalTensor) -> list[Chunk]:
    """What this process holds of a tensor, each replica a chunk; empty shards are left out.

    Raises CheckpointError for a pending sum: its shards are not parts of its value.
    """
    if t.spec.layout.partial:
        raise CheckpointError(f"torch.distributed.checkpoint and a pending sum, {t.spec}",
                              "its shards are terms of the value, and while torch plans nothing can be reduced",
                              "x.to_global(sbp=gt.sbp.broadcast), or gt.save and gt.load")
    holders = prod(ranks for s, ranks in zip(t.sbp, t.placement.shape) if s.is_broadcast)
    return [Chunk(region, part.data[slices(region, part.region)]) for part in local_parts(t) if volume(part.region)
            for region in cut_for_holders(part.region, holders, t.dtype.itemsize)]


def cut_for_holders(region: Region, holders: int, itemsize: int) -> list[Region]:
    """A region, cut along its longest dim if it is large, so that each of its `holders` can write some of it."""
    count = min(holders, -(-volume(region) * itemsize // MAX_PIECE_BYTES))
    if count < 2:
        return [region]
    dim = max(range(len(region)), key=lambda d: region[d][1] - region[d][0])
    start, stop = region[dim]
    ends = [split_range(stop - start, count, k) for k in range(min(count, stop - start))]
    return [(*region[:dim], (start + a, start + b), *region[dim + 1:]) for a, b in ends]


def create_write_items(t: GlobalTensor, name: str, _: GlobalTensor) -> list[WriteItem]:
    """What this process could write of a tensor, replicas once. An empty tensor is one chunk of no elements."""
    # by region: of its replicas a process need offer one
    by_region = {chunk.region: chunk for chunk in chunks(t)}
    if not t.numel() and t.shards:
        by_region = {whole_region(t): _empty_chunk(t)}
    properties = TensorProperties(dtype=t.dtype, requires_grad=t.requires_grad)
    return [WriteItem(index=MetadataIndex(name, chunk.start), type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=_storage(chunk), properties=properties, size=t.size()))
            for chunk in by_region.values()]


def create_chunk_list(t: GlobalTensor) -> list[ChunkStorageMetadata]:
    """What this process wants to read of a tensor. From here on the tensor counts as changed in place.

    Raises CheckpointError for one that cannot be written to.
    """
    check_loadable(t, f"a tensor {t.spec}")
    wanted = [_storage(chunk) for chunk in chunks(t)]
    # torch reads into the shards' memory, past the tensor: a graph that has saved it must notice
    note_uncounted_write(t)
    return wanted


def get_tensor_shard(t: GlobalTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of a chunk, to be read or written to.

    Its offsets say which. Loading must fill every replica, so of several the one at that position in the list of chunks
    is meant. In a save the position is one in torch's list instead, and any replica will do.
    """
    own = chunks(t) or [_empty_chunk(t)]
    position = index.index
    if position is not None and position < len(own) and own[position].start == index.offset:
        return own[position].data
    return next(chunk.data for chunk in own if chunk.start == index.offset)


def _empty_chunk(t: GlobalTensor) -> Chunk:
    return Chunk(whole_region(t), torch.empty(t.shape, dtype=t.dtype, device=t.device))


def _storage(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=chunk.start, sizes=chunk.size)
