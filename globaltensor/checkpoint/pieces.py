"""Which rank writes which region of which tensor, and how pieces are written to files and read from them.

A region that several ranks hold is written by one of them, and large regions are cut into pieces of at most 64 MiB, so
that the writing of a broadcast tensor is shared, too. Every process assigns writers alike, without communication:
pieces go, the largest first, to the holder that has the least to write so far. Files are safetensors, one per rank.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from globaltensor.algorithms.aliasing import note_write
from globaltensor.checkpoint.files import check_plain
from globaltensor.checkpoint.hashes import HASH, KINDS, hash_kind, piece_hash
from globaltensor.checkpoint.manifest import DTYPES, CheckpointError, Entry, SavedPiece, region_text
from globaltensor.checkpoint.remote import Folder, RemotePath
from globaltensor.checkpoint.tensor_files import Place, TensorFile, is_plain_memory, threads, workers, write_tensors
from globaltensor.layouts.layout import spec
from globaltensor.layouts.regions import Region, intersect, slices, volume
from globaltensor.runtime.progress import progress
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.global_tensor import GlobalTensor

try:
    from safetensors import SafetensorError
except ImportError:                                  # an optional dependency: using checkpoints says that it is missing
    _installed = False
else:
    _installed = True

MAX_PIECE_BYTES = 64 << 20                           # a reader must hash all of a piece to use any of it


def need_safetensors() -> None:
    if not _installed:
        raise CheckpointError("checkpoints need the package safetensors (0.8 or newer), which is not installed",
                              fix="pip install safetensors")


class PieceToWrite(NamedTuple):
    """A piece of a tensor that `rank` writes."""

    name: str
    region: Region
    rank: int

    @property
    def key(self) -> str:
        return f"{self.name} {region_text(self.region)}"


class LocalPart(NamedTuple):
    """A part of a tensor in this process's memory: which region of the tensor it is, and the plain tensor itself."""

    rank: int
    region: Region
    data: torch.Tensor
    counts: bool = True                              # False: a term of a pending sum that is loaded as zero


def whole_region(t: torch.Tensor) -> Region:
    return tuple((0, n) for n in t.shape)


def local_parts(t: torch.Tensor) -> list[LocalPart]:
    """The parts of a tensor that this process holds: a shard per rank, or all of a plain one."""
    if not isinstance(t, GlobalTensor):
        return [LocalPart(world().rank, whole_region(t), t.detach())]
    first = {r: all(i == 0 or s.op != "sum" for i, s in zip(t.placement.coords[r], t.sbp)) for r in t.shards}
    return [LocalPart(r, t.spec.region(r), shard, first[r]) for r, shard in t.shards.items()]


def split_region(region: Region, itemsize: int) -> list[Region]:
    """Regions of at most MAX_PIECE_BYTES that tile this one, cut along its first dim that is longer than 1."""
    dim = next((d for d, (start, stop) in enumerate(region) if stop - start > 1), None)
    if volume(region) * itemsize <= MAX_PIECE_BYTES or dim is None:
        return [region] if volume(region) else []
    start, stop = region[dim]
    step = max(1, MAX_PIECE_BYTES * (stop - start) // (volume(region) * itemsize))
    slabs = [(*region[:dim], (a, min(a + step, stop)), *region[dim + 1:]) for a in range(start, stop, step)]
    return [piece for slab in slabs for piece in split_region(slab, itemsize)]


def assign_writers(tensors: Mapping[str, torch.Tensor], ranks: Iterable[int]) -> list[PieceToWrite]:
    """All pieces of all tensors, each with the rank that writes it; the same on every process.

    All `ranks` hold a plain tensor. Tied tensors, one object under two names, are written once.
    """
    ranks, known = list(ranks), set()
    pieces: list[tuple[int, str, Region, list[int]]] = []
    for name, t in tensors.items():
        if id(t) not in known:
            known.add(id(t))
            pieces += [(volume(piece) * t.dtype.itemsize, name, piece, holders)
                       for region, holders in _holders_by_region(t, ranks).items()
                       for piece in split_region(region, t.dtype.itemsize)]
    load = dict.fromkeys(ranks, 0)                   # bytes that each rank has to write so far
    assigned = []
    for nbytes, name, region, holders in sorted(pieces, key=lambda p: (-p[0], p[1], p[2])):
        rank = min(holders, key=load.__getitem__)
        load[rank] += nbytes
        assigned.append(PieceToWrite(name, region, rank))
    return assigned


def _holders_by_region(t: torch.Tensor, ranks: list[int]) -> dict[Region, list[int]]:
    if not isinstance(t, GlobalTensor):
        return {whole_region(t): ranks}
    holders: dict[Region, list[int]] = {}
    for r in t.placement.flat:
        holders.setdefault(t.spec.region(r), []).append(r)
    return holders


def write_hashed(path: Folder, data: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write a file of these tensors (on the CPU, contiguous), on the disk when this returns; hashes by key."""
    with ThreadPoolExecutor(threads()) as pool:      # hashes while it writes: both release the GIL
        hashes = pool.map(piece_hash, data.values())
        if isinstance(path, RemotePath):
            with TemporaryDirectory(prefix="globaltensor-") as folder:
                write_tensors(Path(folder, path.name), data)
                path.upload(Path(folder, path.name))
        else:
            write_tensors(path, data)
        return dict(zip(data, hashes))


class CheckpointFiles:
    """The files of a version, opened when needed and kept open, so that the file checked is the file read. `links`:
    they may be links to files elsewhere. Those of a store are downloaded whole, into files without a name."""

    def __init__(self, folder: Folder, links: bool = False) -> None:
        self.folder, self.links = folder, links
        self._open: dict[str, TensorFile] = {}
        self._verified: set[SavedPiece] = set()
        self._filled: set[tuple[SavedPiece, int]] = set()        # and into which memory they were read meanwhile

    def open(self, name: str) -> TensorFile:
        """A file of the folder. Raises CheckpointError where it is missing or truncated."""
        if name not in self._open:
            try:
                self._open[name] = self._opened(self.folder, name)
            except FileNotFoundError:
                raise CheckpointError(f"{self.folder / name} is missing", "the checkpoint names it",
                                      "another version: load(state, '<directory>/step-...')") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged", str(error),
                                      "another version: load(state, '<directory>/step-...')") from None
        return self._open[name]

    def _opened(self, folder: Folder, name: str) -> TensorFile:
        if isinstance(folder, RemotePath):
            with TemporaryDirectory(prefix="globaltensor-") as local:
                (folder / name).download(Path(local, name))
                return TensorFile(Path(local, name))             # it stays open, and outlives its name
        check_plain(folder / name, None if self.links else folder)
        return TensorFile(folder / name)

    def find(self, entry: Entry, piece: SavedPiece) -> Place:
        """Where the piece is in its file."""
        stored = self.open(piece.file).tensors.get(piece.key)
        if stored is None:
            raise CheckpointError(f"{self._name(entry, piece)} is missing or damaged",
                                  f"the file has no tensor {piece.key!r}")
        if stored.dtype != entry.dtype or stored.shape != tuple(b - a for a, b in piece.region):
            raise CheckpointError(f"{self._name(entry, piece)} is damaged",
                                  f"in the file it is {list(stored.shape)} {stored.dtype}, not {entry.dtype}")
        return stored

    def hash(self, entry: Entry, piece: SavedPiece, kind: str = HASH, into: torch.Tensor | None = None) -> str:
        """The hash of the bytes of a piece, which are all read, into plain memory where there is some."""
        stored = self.find(entry, piece)
        with self._reads_from(entry, piece) as file:
            return file.hash(stored, kind, into)

    @contextmanager
    def _reads_from(self, entry: Entry, piece: SavedPiece) -> Iterator[TensorFile]:
        try:
            yield self.open(piece.file)
        except OSError as error:
            raise CheckpointError(f"{self._name(entry, piece)} cannot be read", str(error),
                                  "another version: load(state, '<directory>/step-...')") from None

    def _name(self, entry: Entry, piece: SavedPiece) -> str:
        return f"the piece {region_text(piece.region)} of {entry.name!r} in {self.folder / piece.file}"

    def verify(self, needed: Iterable[tuple[Entry, SavedPiece, int]],
               new_tensors: Iterable[tuple[Entry, torch.Tensor]] = ()) -> None:
        """Check the hash of every piece, each once, on several threads. Raises CheckpointError, naming the piece and
        the rank that needs it. Reads every byte of these pieces once: those of tensors that are in nobody's hands yet
        into their place, if they lie there as in the file, so that `fill` need not read them again."""
        new = {piece: (entry, rank) for entry, piece, rank in needed if piece not in self._verified}
        places_of = {piece: into for entry, t in new_tensors for piece, into in _whole_pieces(entry, t) if piece in new}
        places = {piece: self.find(entry, piece) for piece, (entry, _) in new.items()}
        for kind in {hash_kind(piece.hash) for piece in new} - KINDS.keys():
            raise CheckpointError(f"the hashes in {self.folder} are of the kind {kind}",
                                  "the package xxhash, which computes them, is not installed", "pip install xxhash")
        order = sorted(new, key=lambda piece: (piece.file, places[piece].offset))      # the kernel reads ahead
        total = sum(place.nbytes for place in places.values())
        with progress("checking", total, "bytes") as advance, workers() as do:
            hashes = do(lambda piece: self.hash(new[piece][0], piece, hash_kind(piece.hash),
                                              places_of.get(piece)), order)
            for piece, actual in zip(order, hashes):
                advance(places[piece].nbytes)
                if piece.hash != actual:
                    entry, rank = new[piece]
                    raise CheckpointError(f"{self._name(entry, piece)} is damaged: rank {rank} needs it",
                                          f"its bytes hash to {actual[:20]}..., the manifest says {piece.hash[:20]}...",
                                          "another version: load(state, '<directory>/step-...')")
        self._verified.update(new)
        self._filled.update((piece, into.data_ptr()) for piece, into in places_of.items())

    def fill(self, targets: Iterable[tuple[Entry, torch.Tensor]]) -> None:
        """Copy the parts of tensors that this process holds into them, in place, on several threads."""
        copies: list[tuple[Entry, SavedPiece, Region, LocalPart]] = []
        targets = list(targets)
        for entry, t in targets:
            for part in local_parts(t):
                if part.counts:
                    copies += [(entry, piece, common, part) for piece, common in overlaps(entry, part.region)]
                else:
                    with torch.no_grad():
                        part.data.zero_()
        with progress("loading", len(copies), "pieces") as advance, workers() as do:
            copied = do(lambda copy: self._copy(*copy), (c for c in copies if c[-1].data.device.type == "cpu"))
            for copy in copies:                      # other threads do not have the stream that this one has chosen
                if copy[-1].data.device.type != "cpu":
                    self._copy(*copy)
                    advance(1)
            for _ in copied:
                advance(1)
        for _, t in targets:
            _note_filled(t)

    @torch.no_grad()
    def _copy(self, entry: Entry, piece: SavedPiece, common: Region, part: LocalPart) -> None:
        stored, into = self.find(entry, piece), part.data[slices(common, part.region)]
        if (piece, into.data_ptr()) in self._filled:
            return
        index = slices(common, piece.region)
        if not index:                                # a number: a row of its own
            stored, into, index = stored._replace(shape=(1,)), into.reshape(1), (slice(0, 1),)
        with self._reads_from(entry, piece) as file:
            file.copy_part(stored, index, into)


def _note_filled(t: torch.Tensor) -> None:
    torch.autograd.graph.increment_version(t)
    if isinstance(t, GlobalTensor):
        note_write(t)


@torch.no_grad()
def fill_from_whole(t: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, which this process has, into the parts of another one that it holds."""
    for part in local_parts(t):
        if part.counts:
            part.data.copy_(whole[slices(part.region, whole_region(t))])
        else:
            part.data.zero_()
    _note_filled(t)


def overlaps(entry: Entry, region: Region) -> list[tuple[SavedPiece, Region]]:
    """The pieces of a tensor that overlap with a region, and the overlap of each."""
    common = [(piece, intersect(piece.region, region)) for piece in entry.pieces]
    return [(piece, overlap) for piece, overlap in common if overlap is not None]


def _whole_pieces(entry: Entry, t: torch.Tensor) -> Iterator[tuple[SavedPiece, torch.Tensor]]:
    """The pieces that this process holds as they are in their file, and where."""
    for part in local_parts(t):
        for piece, common in overlaps(entry, part.region) if part.counts else ():
            into = part.data[slices(common, part.region)]
            if common == piece.region and into.dtype == entry.dtype and is_plain_memory(into):
                yield piece, into


def empty_copy(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor of the same shape and layout, and this dtype or the same, with undefined values."""
    if not isinstance(t, GlobalTensor):
        return torch.empty_like(t, dtype=dtype, requires_grad=False)
    return empty_global(t.shape, dtype or t.dtype, t.spec.layout)


def empty_global(shape: Iterable[int], dtype: torch.dtype, where: Any) -> GlobalTensor:
    """A new global tensor with undefined values; no communication."""
    of = spec(where, tuple(shape), None, dtype)
    ranks = local_ranks_of(of.placement)
    return GlobalTensor.wrap(of, {r: torch.empty(of.local_shape(r), dtype=dtype, device=world().device(
        of.placement.type, r)) for r in ranks})


def empty_state(param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of an optimizer's state: laid out like its parameter if it has the same shape, else broadcast."""
    if not isinstance(param, GlobalTensor):
        return torch.empty(shape, dtype=dtype, device=param.device)
    like_param = param.spec.layout.without_partials
    return empty_global(shape, dtype, like_param if tuple(param.shape) == shape else
                        param.spec.layout.replicated)


def check_dtype(name: str, t: torch.Tensor) -> None:
    if t.dtype not in DTYPES.values():
        raise CheckpointError(f"{name!r} is of {t.dtype}, which safetensors files cannot hold",
                              f"they hold {', '.join(DTYPES)}", "x.to(torch.complex64), or torch.view_as_real(x)")
