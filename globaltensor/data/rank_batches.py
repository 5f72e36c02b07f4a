"""The loops of DDP: every rank has a loader of its own, and its batch is that rank's part of a global one.

    sampler = DistributedSampler(dataset, gt.world_size(), gt.rank())
    loader = DataLoader(dataset, 16, sampler=sampler)
    for x, y in gt.data.from_ranks(loader, placement):           # global tensors, of 16 rows a rank

    rank 0's batch   rank 1's batch   the global batch, split(0)
    3 rows           3 rows           6 rows, where they are
    2 rows           1 row            3 rows, where they are
    1 row            3 rows           4 rows: one of rank 1's moves to rank 0
    its loader       3 rows           3 rows: two of them move to rank 0
    has ended

So an epoch has the samples that the loaders have, each once, in the order of the ranks, whatever their number. For each
batch the processes tell each other the places, shapes and dtypes of its tensors, which is a small message.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from globaltensor.data.batch import map_structure
from globaltensor.errors import GlobalTensorError, SbpError, ShapeError, in_brief
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import SbpLike, nd_sbp, split
from globaltensor.runtime.agreement import broadcast_object, gather_objects
from globaltensor.runtime.codec import encode_message, message
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.convert import PartInfo, has_copies, heads_of, join_rows, part_info
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.redistribution import resolve_layout
from globaltensor.tracebacks import api_boundary

T = TypeVar("T")
_ROWS = split(0)


@message
class RankNote(NamedTuple):
    """What the others must know of a rank's next batch: the part of each tensor by its place, None where the rank's
    loader has ended; or why it could not be read."""

    parts: dict[str, PartInfo] | None
    error: str = ""


@api_boundary
def from_ranks(loader: Iterable[T] | Callable[[int], Iterable[T]], placement: Placement,
               sbp: SbpLike = _ROWS) -> RankBatches[T]:
    """Iterate over the batches of every rank's own loader as one global batch, the ranks' rows in their order.

    loader     of this rank: anything that yields tensors [rows, ...], in tuples, lists, dicts and dataclasses, such as
               torch's DataLoader with a DistributedSampler. A process that drives several ranks has one for each: a
               function rank -> loader, which serves everywhere
    sbp        split(0) along axes whose ranks read rows of their own, broadcast along axes whose ranks read the same
               (the first one's count)

    Yields the same structures with a global tensor for each tensor. Ranks may have other numbers of rows: then some
    rows move, to where the library cuts. The loop ends with the last loader; a rank whose loader ends earlier adds no
    rows to what follows. Values that are not tensors are this rank's own. `len()` is that of the longest loader.
    Every process of the program must call and iterate; the loaders of ranks outside the placement are not read.

    Raises SbpError for another sbp, GlobalTensorError for one loader where a process drives several ranks; while
    iterating, on every rank, ShapeError where the batches of ranks differ in structure, dtype or sizes of samples,
    GlobalTensorError where a rank cannot read its batch.
    """
    return RankBatches(loader, placement, sbp)


class RankBatches(Generic[T]):
    """What `from_ranks` returns: each `iter` begins the loaders anew."""

    def __init__(self, loader: Iterable[T] | Callable[[int], Iterable[T]], placement: Placement,
                 sbp: SbpLike) -> None:
        layout = resolve_layout(placement, sbp, 1)
        self.placement, self.sbp = layout.placement, layout.sbp
        for s in nd_sbp(sbp, self.placement.names, self.placement.ndim):     # as it was asked for
            if not (s.is_broadcast or s.is_split):
                raise SbpError(f"from_ranks with the sbp {s}", "each rank has some of the samples of a batch",
                               "gt.sbp.split(0), or gt.sbp.broadcast where ranks read the same")
        self._heads = {*heads_of(layout).values()}
        self._text = f"gt.data.from_ranks on {layout}"
        self._loaders = self._own_loaders(loader)
        sizes = [_length(own) for own in self._loaders.values()]
        self._sizes = [n for process in gather_objects(sizes, self._text) for n in process]

    def _own_loaders(self, loader: Iterable[T] | Callable[[int], Iterable[T]]) -> dict[int, Iterable[T]]:
        """The loader of each rank of the placement that this process drives."""
        mine = local_ranks_of(self.placement)
        if callable(loader):
            return {r: loader(r) for r in mine}
        if len(mine) > 1:
            raise GlobalTensorError(f"one loader in a process that drives ranks {', '.join(map(str, mine))}",
                                    "every rank has batches of its own",
                                    "gt.data.from_ranks(lambda rank: DataLoader(dataset, batch_size, sampler="
                                    "DistributedSampler(dataset, gt.world_size(), rank)), placement), which runs "
                                    "everywhere; or gt.data.DataLoader")
        return dict.fromkeys(mine, loader)

    def __len__(self) -> int:
        """Batches in an epoch: those of the longest loader. Raises TypeError where one has no len()."""
        sizes = [n for n in self._sizes if n is not None]
        if len(sizes) < len(self._sizes):
            raise TypeError("a loader of some rank has no len()")
        return max(sizes, default=0)

    @api_boundary
    def __iter__(self) -> Iterator[T]:
        iterators = {r: iter(own) for r, own in self._loaders.items()}
        before, began = None, set[int]()             # this process's last batch, without rows; ranks that have read one
        while True:
            batches, tensors = self._read(iterators)
            notes = self._exchange_notes(iterators, tensors)
            if all(notes[r].parts is None for r in self._heads):
                return
            source, structure = _common_structure(notes)
            own: Any = next(iter(batches.values()), before)
            began |= {r for r, note in notes.items() if note.parts is not None}
            if len(began) < world().size and not world().single_process:         # others never saw what a batch is
                sent, unknown = broadcast_object(_to_send(batches.get(source)), source, self._text)
                if unknown:
                    ranks = [r for r in range(world().size) if r not in began]
                    raise GlobalTensorError(f"{rank_names(ranks)} had no batch, and cannot know what one is", unknown,
                                            "batches of tensors, numbers and text in tuples, lists and dicts")
                own = sent if own is None else own
            before = _without_rows(own)
            yield map_structure(own, partial(self._join, tensors, notes, structure), _same)

    def _read(self, iterators: Mapping[int, Iterator[T]]) -> tuple[dict[int, T], dict[int, dict[str, torch.Tensor]]]:
        """The next batch of each rank of this process whose loader has not ended, and its tensors by their places."""
        batches: dict[int, T] = {}
        try:
            for r, iterator in iterators.items():
                with suppress(StopIteration):
                    batches[r] = next(iterator)
            return batches, {r: _tensors_of(batch) for r, batch in batches.items()}
        except Exception as error:                   # the other ranks would wait for this one for ever
            gather_objects({r: RankNote(None, in_brief(error)) for r in iterators}, self._text)
            raise

    def _exchange_notes(self, ranks: Iterable[int], tensors: Mapping[int, dict[str, torch.Tensor]]
                        ) -> dict[int, RankNote]:
        """What every rank of the placement says of its next batch."""
        copies = has_copies(self.placement, self.sbp)
        mine = {r: RankNote({path: part_info(t, copies) for path, t in tensors[r].items()} if r in tensors else None)
                for r in ranks}
        notes = {r: note for process in gather_objects(mine, self._text) for r, note in process.items()}
        failed = [f"\n    rank {r}: {note.error}" for r, note in sorted(notes.items()) if note.error]
        if failed:
            error = GlobalTensorError("ranks that cannot read their batch:" + "".join(failed),
                                      "each rank's batch is a part of the global one", "see what these ranks raised")
            error.follows = True                     # they raise their own
            raise error
        return notes

    def _join(self, tensors: Mapping[int, dict[str, torch.Tensor]], notes: Mapping[int, RankNote],
              structure: Mapping[str, PartInfo], _: torch.Tensor, path: str) -> GlobalTensor:
        """The global tensor of the tensors at this place of all ranks' batches; ranks without a batch have no rows."""
        like = structure[path]
        none = like._replace(shape=(0, *like.shape[1:]), checksum=0, missing=None)
        parts = {r: note.parts[path] if note.parts is not None else none for r, note in notes.items()}
        rows = torch.empty(none.shape, dtype=none.dtype, device="cpu")
        mine = {r: tensors[r][path].detach() if r in tensors else rows for r in self._loaders}
        return join_rows(mine, parts, self.placement, self.sbp, f"{self._text}, the tensor at {path or 'its top'}")


def _length(loader: Any) -> int | None:
    """Its batches; None where it cannot tell. torch's DataLoader of a stream has a `__len__` that raises TypeError."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _common_structure(notes: Mapping[int, RankNote]) -> tuple[int, dict[str, PartInfo]]:
    """The first rank that has a batch, and its parts. Raises ShapeError where another's are at other places."""
    known = {r: note.parts for r, note in sorted(notes.items()) if note.parts is not None}
    first, structure = next(iter(known.items()))
    if any(parts.keys() != structure.keys() for parts in known.values()):
        raise ShapeError("batches of different structure:" + "".join(
            f"\n    rank {r}: {', '.join(f'batch{path}' for path in parts) or 'no tensors'}"
            for r, parts in known.items()), "each rank's batch is a part of the global one",
            "the same dataset and collate_fn on every rank")
    return first, structure


def _tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch, by their places. Raises ShapeError for those whose dim 0 is not the samples."""
    tensors: dict[str, torch.Tensor] = {}
    map_structure(batch, lambda t, path: tensors.setdefault(path, t), _same)
    if any(isinstance(t, GlobalTensor) for t in tensors.values()):
        raise GlobalTensorError("a loader that yields global tensors", "each rank reads samples for itself",
                                "plain tensors")
    rows = {t.shape[:1] for t in tensors.values()}
    if len(rows) > 1 or () in rows:
        shapes = ", ".join(f"batch{path} {list(t.shape)}" for path, t in tensors.items())
        raise ShapeError(f"a batch of tensors of different lengths: {shapes}",
                         "dim 0 of every tensor of a batch is the samples",
                         "a collate_fn that returns one row per sample, and lists for the rest")
    return tensors


def _without_rows(batch: Any) -> Any:
    """The same structure without samples, for ranks that have none."""
    return map_structure(batch, lambda t, path: t[:0].clone(), lambda values, path: values[:0])


def _to_send(batch: Any) -> tuple[Any, str]:
    """The structure of a batch for ranks that have seen none, or why it cannot be sent: classes of the program's own
    would have to be made from what stands in a message, which runs their code."""
    empty = _without_rows(batch)
    try:
        encode_message(empty)
    except TypeError as error:
        return None, str(error)
    return empty, ""


def _same(values: Any, path: str) -> Any:
    return values
