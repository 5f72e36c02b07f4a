"""The manifest: what a checkpoint holds and where. It is data, never code, and everything in it is checked.

    {"sha256": "<of the bytes of body>", "manifest": {"format": 1, "state": ..., "random": "...", "tensors": {
        "model/0.weight": {"dtype": "float32", "shape": [7, 5], "global": true, "pieces": [
            {"file": "rank-00000.safetensors", "key": "...", "region": [[0, 4], [0, 5]], "hash": "..."}, ...]}}}}

A *piece* is a region of a tensor, (start, stop) per dim, stored as one tensor of one file. The pieces of a tensor tile
it: every element is in exactly one of them. `state` is everything that is not a tensor (tree.py).
"""
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from math import prod
from typing import Any, NamedTuple

import torch

from globaltensor.checkpoint.hashes import hash_kind
from globaltensor.checkpoint.tensor_files import NAMES
from globaltensor.checkpoint.tree import decode, join_path
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Shape
from globaltensor.layouts.regions import Region

FORMAT = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
_HEAD, _MIDDLE, _TAIL = b'{"sha256": "', b'",\n"manifest": ', b"}\n"
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")     # no path: a manifest must not name other folders
_BYTES = re.compile(r"([0-9a-f]{2})*")


class CheckpointError(GlobalTensorError):
    """A checkpoint that cannot be written, is incomplete or damaged, or does not fit the state it is loaded into."""


class SavedPiece(NamedTuple):
    """A region of a tensor: in which file, under which key, and the hash of its bytes."""

    file: str
    key: str
    region: Region
    hash: str                                        # see hashes.py; "": the format has none


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: Shape
    is_global: bool
    pieces: tuple[SavedPiece, ...]


class Manifest(NamedTuple):
    """The whole manifest: the tensors by name, the rest of the state, encoded, and torch's random state, as hex."""

    entries: dict[str, Entry]
    state: Any
    random: str = ""

    def top_level(self) -> set[str] | None:
        """The names of the keys, where a dict was saved; else None."""
        kind = next(iter(self.state)) if isinstance(self.state, dict) else ""
        return {join_path("", key) for key in dict(self.state[kind])} if kind in ("dict", "items") else None

    def of(self, names: Collection[str]) -> Manifest:
        """That of these keys alone, where a dict was saved."""
        if self.top_level() is None:
            return self
        [(kind, inner)] = self.state.items()
        state = {key: value for key, value in dict(inner).items() if join_path("", key) in names}
        return Manifest({name: entry for name, entry in self.entries.items() if name.partition("/")[0] in names},
                        {kind: state if kind == "dict" else [list(item) for item in state.items()]}, self.random)


def region_text(region: Region) -> str:
    """[0:4, 0:5], as an index is written."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    tensors = {e.name: {"dtype": str(e.dtype).removeprefix("torch."), "shape": list(e.shape), "global": e.is_global,
                        "pieces": [{"file": p.file, "key": p.key, "region": p.region, "hash": p.hash}
                                   for p in e.pieces]}
               for e in manifest.entries.values()}
    body = json.dumps({"format": FORMAT, "state": manifest.state, "random": manifest.random, "tensors": tensors},
                      allow_nan=False).encode()
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _TAIL


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes, with everything in it checked. Raises CheckpointError, naming the file `where`."""
    head = len(_HEAD) + 64
    body = data[head + len(_MIDDLE):-len(_TAIL)]
    stated = data[len(_HEAD):head].decode("latin-1")
    framed = data == _HEAD + stated.encode("latin-1") + _MIDDLE + body + _TAIL
    if not framed or hashlib.sha256(body).hexdigest() != stated:
        raise CheckpointError(f"{where} is damaged", "its bytes do not have the hash that it states",
                              "another version: load(state, '<directory>/step-...')")
    try:
        raw = json.loads(body, object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
        if _field(raw, "format", int) != FORMAT:
            raise CheckpointError(f"{where} has format {raw['format']}, this library reads {FORMAT}",
                                  "it was written by another version of the library")
        entries = {name: _entry(name, value) for name, value in _field(raw, "tensors", dict).items()}
        seen: set[str] = set()
        decode(raw.get("state"), lambda name: seen.add(_listed(name, entries)))
        if seen != entries.keys():
            raise ValueError(f"the tensor {min(entries.keys() - seen)!r} is not used in its state")
        if not _BYTES.fullmatch(random := _field(raw, "random", str)):
            raise ValueError("its random state is not in hexadecimal")
        return Manifest(entries, raw.get("state"), random)
    except (ValueError, RecursionError) as error:
        if isinstance(error, GlobalTensorError):
            raise
        raise CheckpointError(f"{where} is not a manifest of a checkpoint", str(error)) from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")          # Python's parser would accept NaN and Infinity


def _field(raw: Any, key: str, kind: type) -> Any:
    value = raw.get(key) if isinstance(raw, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{key!r} is {value!r:.80}, not a {kind.__name__}")
    return value


def _listed(name: str, entries: dict[str, Entry]) -> str:
    if name not in entries:
        raise ValueError(f"its state names a tensor {name!r} that it does not list")
    return name


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} is not a size")
    return value


def _entry(name: str, raw: Any) -> Entry:
    dtype = DTYPES.get(_field(raw, "dtype", str))
    if dtype is None:
        raise ValueError(f"{name!r} has an unknown dtype {raw['dtype']!r:.80}")
    shape = tuple(_size(n) for n in _field(raw, "shape", list))
    pieces = tuple(_piece(name, shape, p) for p in _field(raw, "pieces", list))
    whole = tuple((0, n) for n in shape)
    if len(shape) > 64 or prod(shape) >= 1 << 62 or not is_tiling([p.region for p in pieces], whole):
        raise ValueError(f"the pieces of {name!r} do not tile its shape {list(shape)}: "
                         f"{', '.join(region_text(p.region) for p in pieces[:8])}")
    return Entry(name, dtype, shape, _field(raw, "global", bool), pieces)


def _piece(name: str, shape: Shape, raw: Any) -> SavedPiece:
    file, key, hash_text = (_field(raw, k, str) for k in ("file", "key", "hash"))
    if not _FILE.fullmatch(file):
        raise ValueError(f"a piece of {name!r} is in a file {file!r:.80}, which is not the name of a rank's file")
    hash_kind(hash_text)
    raw_region = _field(raw, "region", list)
    if len(raw_region) != len(shape) or not all(isinstance(b, list) and len(b) == 2 for b in raw_region):
        raise ValueError(f"a piece of {name!r} has the region {raw_region!r:.80} in a shape {list(shape)}")
    region = tuple((_size(a), _size(b)) for a, b in raw_region)
    if not all(a < b <= n for (a, b), n in zip(region, shape)):
        raise ValueError(f"a piece of {name!r} is {region_text(region)}, which is not inside {list(shape)}")
    return SavedPiece(file, key, region, hash_text)


def is_tiling(regions: Iterable[Region], whole: Region) -> bool:
    """Do these regions cover `whole` exactly once?

    Cut where no region is in the way, then check each part. Every nd-sbp consists of such cuts, so no valid manifest is
    refused. O(n log n) for each level of cuts.
    """
    regions = list(regions)
    if any(start == stop for start, stop in whole):
        return not regions
    if len(regions) == 1:
        return regions[0] == whole
    for dim, (start, stop) in enumerate(whole):
        groups: list[tuple[int, int, list[Region]]] = []
        for region in sorted(regions, key=lambda b: b[dim]):
            a, b = region[dim]
            if groups and a < groups[-1][1]:
                first, last, members = groups[-1]
                members.append(region)
                groups[-1] = first, max(last, b), members
            else:
                groups.append((a, b, [region]))
        if len(groups) > 1:
            ends = [start, *(last for _, last, _ in groups)]
            return ends[-1] == stop and all(
                first == before and is_tiling(members, (*whole[:dim], (first, last), *whole[dim + 1:]))
                for before, (first, last, members) in zip(ends, groups))
    return False

