"""What a checkpoint holds, without loading it: `gt.show("run/checkpoint")`.

    step-00000003 of run/checkpoint: 4 tensors, 1,364 bytes in 2 files
    name              dtype    shape    saved as     bytes
    model/0.weight    float32  [7, 5]   [4, 5] [3, 5]  140

Only the manifest is read. It is checked as for loading; the files with the values are not opened.
"""
from __future__ import annotations

import os
from collections import Counter
from html import escape
from math import prod
from typing import NamedTuple

from globaltensor.checkpoint.loading import read_manifest
from globaltensor.checkpoint.manifest import Entry, Manifest, region_text
from globaltensor.checkpoint.remote import folder_at
from globaltensor.errors import counted
from globaltensor.pictures.cells import projected_region
from globaltensor.pictures.markup import chip, colour_of, element, html_table, rectangle
from globaltensor.runtime.text_table import aligned

_HEAD = ("name", "dtype", "shape", "saved as", "bytes")
_SMALL = (44.0, 22.0)                                # pixels of the small pictures


class Contents(NamedTuple):
    """What is in one version of a checkpoint; prints as a table, and a notebook shows it with pictures."""

    folder: str
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(map(_bytes_of_entry, self.manifest.entries.values()))

    def __str__(self) -> str:
        rows = [(e.name, str(e.dtype).removeprefix("torch."), str(list(e.shape)), _pieces_text(e),
                 f"{_bytes_of_entry(e):,}") for e in self.manifest.entries.values()]
        return "\n".join([self._summary(), *(aligned([_HEAD, *rows], right={4}) if rows else [])])

    def _repr_html_(self) -> str:
        rows = [(escape(e.name), str(e.dtype).removeprefix("torch."), escape(str(list(e.shape))),
                 _small_picture(e) + " " + escape(_pieces_text(e)), f"{_bytes_of_entry(e):,}")
                for e in self.manifest.entries.values()]
        files = sorted({p.file for e in self.manifest.entries.values() for p in e.pieces})
        shown = " ".join(chip(name, colour_of(nth)) for nth, name in enumerate(files[:16]))
        return html_table(_HEAD, rows, self._summary(), numbers=[4]) + element("div", shown, class_="gt-picture")

    def _summary(self) -> str:
        files = {p.file for e in self.manifest.entries.values() for p in e.pieces}
        return (f"{self.folder}: {counted(len(self.manifest.entries), 'tensor')}, {self.nbytes:,} bytes in "
                f"{counted(len(files), 'file')}")


def contents_of(directory: str | os.PathLike[str]) -> Contents:
    """What the latest version in a folder holds, or that version if the folder is one. Raises CheckpointError."""
    folder, manifest, _ = read_manifest(folder_at(directory))
    return Contents(str(folder), manifest)


def _bytes_of_entry(e: Entry) -> int:
    return prod(e.shape) * e.dtype.itemsize


def _pieces_text(e: Entry) -> str:
    """The shapes of its pieces, equal ones counted."""
    shapes = Counter(tuple(stop - start for start, stop in p.region) for p in e.pieces)
    if len(e.pieces) == 1:
        return "whole"
    texts = [f"{n} x {list(shape)}" for shape, n in shapes.items()]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "") or "nothing"


def _small_picture(e: Entry) -> str:
    """Its pieces, each in the colour of the rank whose file has it."""
    if not prod(e.shape) or len(e.pieces) > 256:
        return ""
    rows, columns = projected_region(tuple((0, n) for n in e.shape), _cut_dims(e))
    scale = _SMALL[0] / columns[1], _SMALL[1] / rows[1]
    drawn: list[str] = []
    for p in e.pieces:
        (top, bottom), (left, right) = projected_region(p.region, _cut_dims(e))
        rank = int(p.file.removeprefix("rank-").partition(".")[0])
        drawn.append(rectangle(left * scale[0], top * scale[1], (right - left) * scale[0], (bottom - top) * scale[1],
                         colour_of(rank), note=f"{p.file} {region_text(p.region)}", line=0.6))
    return element("svg", "".join(drawn), width=_SMALL[0], height=_SMALL[1], style="vertical-align:middle")


def _cut_dims(e: Entry) -> list[int]:
    """The two dims at most along which it is drawn: those that are cut first."""
    cut = [d for d, n in enumerate(e.shape) if any(p.region[d] != (0, n) for p in e.pieces)]
    return sorted((cut + [d for d in range(len(e.shape)) if d not in cut])[:2])
