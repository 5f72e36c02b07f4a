"""Who writes which box of which tensor, and how boxes are written to files and read from them.

A box that several ranks hold is written by one of them, and large boxes are cut into pieces of at most 64 MiB, so
that the writing of a broadcast tensor is shared out too. Every process decides alike, without a word: pieces go, the
largest first, to the holder that has the least to write so far. Files are safetensors, one per rank, mapped into
memory when they are read, so that only the pages of a part that is needed are read.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from globaltensor.algorithms.aliasing import check_guard
from globaltensor.checkpoint import folders
from globaltensor.checkpoint.manifest import DTYPES, CheckpointError, Entry, Piece, region_text
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.regions import Region, intersect, slices, volume
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.global_tensor import GlobalTensor

try:
    from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
except ImportError:                                  # an optional dependency: checkpoints say so when they are used
    safe_open = None

LARGEST = 64 << 20                                   # bytes of a piece: what a reader hashes to need any of it


def need_safetensors() -> None:
    if safe_open is None:
        raise CheckpointError("checkpoints need the package safetensors (0.8 or newer), which is not installed",
                              fix="pip install safetensors")


class Job(NamedTuple):
    """A piece of a tensor that `rank` writes."""

    name: str
    region: Region
    rank: int

    @property
    def key(self) -> str:
        return f"{self.name} {region_text(self.region)}"


class Part(NamedTuple):
    """A part of a tensor in this process's memory: what it holds of the tensor, and the plain tensor itself."""

    rank: int
    region: Region
    data: torch.Tensor
    counts: bool = True                              # False: a term of a pending sum that is to be zero


def whole(t: torch.Tensor) -> Region:
    return tuple((0, n) for n in t.shape)


def parts(t: torch.Tensor) -> list[Part]:
    """The parts of a tensor that this process has: a shard per rank, or the whole of a plain one."""
    if not isinstance(t, GlobalTensor):
        return [Part(world().rank, whole(t), t.detach())]
    check_guard(t)
    first = {r: all(i == 0 or s.op != "sum" for i, s in zip(t.placement.coords[r], t.sbp)) for r in t.shards}
    return [Part(r, t.spec.region(r), shard, first[r]) for r, shard in t.shards.items()]


def cut_up(region: Region, itemsize: int) -> list[Region]:
    """Boxes of at most LARGEST bytes that tile this one, cut along its first dim that is longer than 1."""
    dim = next((d for d, (start, stop) in enumerate(region) if stop - start > 1), None)
    if volume(region) * itemsize <= LARGEST or dim is None:
        return [region] if volume(region) else []
    start, stop = region[dim]
    step = max(1, LARGEST * (stop - start) // (volume(region) * itemsize))
    cut = [(*region[:dim], (a, min(a + step, stop)), *region[dim + 1:]) for a in range(start, stop, step)]
    return [piece for part in cut for piece in cut_up(part, itemsize)]


def share_out(tensors: Mapping[str, torch.Tensor], ranks: Iterable[int]) -> list[Job]:
    """All pieces of all tensors, each with the rank that writes it; the same on every process.

    A plain tensor is the same on all `ranks`. Tied tensors, the same object under two names, are written once.
    """
    ranks, known = list(ranks), set()
    pieces: list[tuple[int, str, Region, list[int]]] = []
    for name, t in tensors.items():
        if id(t) not in known:
            known.add(id(t))
            pieces += [(volume(piece) * t.dtype.itemsize, name, piece, holders)
                       for region, holders in _holders(t, ranks).items() for piece in cut_up(region, t.dtype.itemsize)]
    load = dict.fromkeys(ranks, 0)
    jobs = []
    for nbytes, name, region, holders in sorted(pieces, key=lambda p: (-p[0], p[1], p[2])):
        rank = min(holders, key=load.__getitem__)
        load[rank] += nbytes
        jobs.append(Job(name, region, rank))
    return jobs


def _holders(t: torch.Tensor, ranks: list[int]) -> dict[Region, list[int]]:
    if not isinstance(t, GlobalTensor):
        return {whole(t): ranks}
    found: dict[Region, list[int]] = {}
    for r in t.placement.flat:
        found.setdefault(t.spec.region(r), []).append(r)
    return found


def write(path: Path, data: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A file of these tensors (on the CPU, contiguous), on the disk when this returns. key -> hash."""
    with ThreadPoolExecutor(_threads()) as pool:     # hashes while it writes: neither needs Python for that
        hashes = pool.map(digest, data.values())
        write_file(path, data)
        return dict(zip(data, hashes))


def _threads() -> int:
    return min(8, torch.get_num_threads())           # launchers share out the cores


def write_file(path: Path, data: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """The same without hashes; lets other threads run meanwhile."""
    serialize_file({key: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape),
                                    data_ptr=t.data_ptr(), data_len=t.nbytes) for key, t in data.items()}, path,
                   metadata)
    folders.sync(path)


def digest(t: torch.Tensor) -> str:
    """The sha256 of the bytes of a contiguous tensor on the CPU."""
    return hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).hexdigest()


class Files:
    """The files of a version, opened when they are needed and kept open, so that what was checked is what is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._good: set[Piece] = set()

    def open(self, name: str) -> Any:
        """A safetensors file of the folder. Raises CheckpointError where it is missing or cut short."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, "pt")
            except FileNotFoundError:
                raise CheckpointError(f"{self.folder / name} is missing", "the checkpoint names it",
                                      "another version: load(state, '<directory>/step-...')") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged", str(error),
                                      "another version: load(state, '<directory>/step-...')") from None
        return self._open[name]

    def view(self, entry: Entry, piece: Piece) -> torch.Tensor:
        """The piece, as it lies in the mapped file."""
        file = self.open(piece.file)
        try:
            found = file.get_tensor(piece.key)
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self._name(entry, piece)} is missing or damaged", str(error)) from None
        if found.dtype != entry.dtype or tuple(found.shape) != tuple(b - a for a, b in piece.region):
            raise CheckpointError(f"{self._name(entry, piece)} is damaged",
                                  f"the file has {list(found.shape)} {found.dtype} there, not {entry.dtype}")
        return found

    def _name(self, entry: Entry, piece: Piece) -> str:
        return f"the piece {region_text(piece.region)} of {entry.name!r} in {self.folder / piece.file}"

    def verify(self, wanted: Iterable[tuple[Entry, Piece, int]]) -> None:
        """Check the hash of every piece, each once, on several threads. Raises CheckpointError, naming the piece and
        the rank that needs it. Reads every byte of these pieces once."""
        new = {piece: (entry, rank) for entry, piece, rank in wanted}
        new = {piece: who for piece, who in new.items() if piece not in self._good}
        views = {piece: self.view(entry, piece) for piece, (entry, _) in new.items()}
        with ThreadPoolExecutor(_threads()) as pool:
            for (piece, (entry, rank)), seen in zip(new.items(), pool.map(digest, views.values())):
                if piece.sha256 not in (None, seen):
                    raise CheckpointError(f"{self._name(entry, piece)} is damaged: rank {rank} needs it",
                                          f"its bytes hash to {seen[:12]}..., the manifest says {piece.sha256[:12]}...",
                                          "another version: load(state, '<directory>/step-...')")
        self._good.update(new)

    def fill(self, entry: Entry, t: torch.Tensor) -> None:
        """Copy what this process holds of a tensor into it, in place. Reads the overlaps and no more."""
        with torch.no_grad():
            for part in parts(t):
                if not part.counts:
                    part.data.zero_()
                    continue
                for piece, common in overlaps(entry, part.region):
                    source = self.open(piece.file).get_slice(piece.key)[slices(common, piece.region) or ...]
                    part.data[slices(common, part.region)].copy_(source)
        torch.autograd.graph.increment_version(t)


def overlaps(entry: Entry, region: Region) -> list[tuple[Piece, Region]]:
    """The pieces of a tensor that share something with a box, and what."""
    found = [(piece, intersect(piece.region, region)) for piece in entry.pieces]
    return [(piece, common) for piece, common in found if common is not None]


def like(t: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same shape, dtype and layout, its values undefined."""
    if not isinstance(t, GlobalTensor):
        return torch.empty_like(t, requires_grad=False)
    return make(t.shape, t.dtype, t.spec.layout)


def make(shape: Iterable[int], dtype: torch.dtype, where: Any) -> GlobalTensor:
    """A new global tensor, its values undefined; no communication."""
    of = spec(where, tuple(shape), None, dtype)
    ranks = local_ranks_of(of.placement)
    return GlobalTensor.wrap(of, {r: torch.empty(of.local_shape(r), dtype=dtype, device=world().device(
        of.placement.type, r)) for r in ranks})


def beside(param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of an optimizer's state: laid out like its parameter where it has the shape, else broadcast."""
    if not isinstance(param, GlobalTensor):
        return torch.empty(shape, dtype=dtype, device=param.device)
    settled = param.spec.layout.without_partials
    return make(shape, dtype, settled if tuple(param.shape) == shape else
                layout(param.placement, (broadcast,) * param.placement.ndim))


def check_dtype(name: str, t: torch.Tensor) -> None:
    if t.dtype not in DTYPES.values():
        raise CheckpointError(f"{name!r} is of {t.dtype}, which safetensors files do not hold",
                              f"they hold {', '.join(DTYPES)}", "x.to(torch.complex64), or torch.view_as_real(x)")
