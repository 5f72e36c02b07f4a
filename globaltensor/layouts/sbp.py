"""How a tensor is laid out along one axis of a placement: split along a dim, broadcast, or a pending partial sum.

    split(0)      prints S(0)    rank i holds the i-th part of dim 0 (parts as equal as they can be, larger first)
    broadcast     prints B       every rank holds the whole
    partial_sum   prints P       the value is the sum of what the ranks hold; partial_max, partial_min likewise

One sbp per placement axis makes an nd-sbp, a tuple, outermost axis first. A gradient is laid out dual to its tensor:
the gradient of S is S, of B is P, of P is B.

Wherever an sbp is asked for, its text ("S(0)", "B", "P(max)") and torch's own words for it will do: `Shard(0)`,
`Replicate()`, `Partial()` of torch.distributed.tensor. `nd_sbp` is the one place that reads them.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from globaltensor.errors import SbpError, closest, counted
from globaltensor.tracebacks import api_boundary

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Sbp:
    """One of S(dim), B, P on one axis. `dim` is for S only, `op` ("sum", "max", "min") for P only."""

    kind: str
    dim: int = -1
    op: str = ""

    def __repr__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim})"
        return self.kind if self.op in ("", "sum") else f"P({self.op})"

    def __call__(self) -> Sbp:
        """`broadcast()` and `partial_sum()` are `broadcast` and `partial_sum`, as OneFlow programs write them."""
        return self

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @property
    def is_broadcast(self) -> bool:
        return self.kind == "B"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    @property
    def dual(self) -> Sbp:
        """The sbp of the gradient of a tensor with this sbp."""
        return {"S": self, "B": partial_sum, "P": broadcast}[self.kind]


NdSbp: TypeAlias = tuple[Sbp, ...]
OneSbp: TypeAlias = "Sbp | str | Placement"          # what a user may write for one axis
SbpLike: TypeAlias = "OneSbp | Sequence[OneSbp] | Mapping[str, OneSbp]"      # and for all of them

broadcast = Sbp("B")
partial_sum = Sbp("P", op="sum")
partial_max = Sbp("P", op="max")
partial_min = Sbp("P", op="min")


@api_boundary
def split(dim: int) -> Sbp:
    """Split along tensor dim `dim`; negative dims count from the end. Raises SbpError where `dim` is not an int."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"split takes a dim, an int, not {dim!r}", "each rank gets a part of that dim",
                       "gt.sbp.split(0)")
    return Sbp("S", dim)


_TEXT = re.compile(r"S\((-?\d+)\)|(B)|P(?:\((sum|max|min)\))?")


def read_sbp(value: Any) -> Sbp | None:
    """The sbp of one axis that a user's value means: an Sbp, its text, or torch's Placement; None where it is none."""
    if isinstance(value, Sbp):
        return value
    if isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is None:
            return None
        dim, whole, op = match.groups()
        return split(int(dim)) if dim else broadcast if whole else Sbp("P", op=op or "sum")
    return _from_torch(value)


def _from_torch(value: Any) -> Sbp | None:
    """Told by its class's name: importing torch.distributed.tensor only to ask takes longer than `import torch`."""
    if isinstance(value, (Sequence, Mapping)):       # of which torch.compile could not tell the module
        return None
    kind = type(value)
    if not kind.__module__.startswith("torch.distributed.tensor"):
        return None
    if kind.__name__ == "Shard":
        return split(value.dim)
    if kind.__name__ == "Replicate":
        return broadcast
    return read_sbp(f"P({value.reduce_op})") if kind.__name__ == "Partial" else None


def _per_axis(sbp: Any) -> list[Any] | None:
    """What stands for each axis in a sequence, or in the text of one: "(S(0), B)"."""
    if isinstance(sbp, str):
        text = sbp.strip()
        if not (text.startswith("(") and text.endswith(")")):
            return None
        return [part for part in text[1:-1].split(",") if part.strip()]
    return list(sbp) if isinstance(sbp, Sequence) else None


def nd_sbp(sbp: Any, names: Sequence[str], axes: int) -> NdSbp:
    """One sbp per axis from what a user may write: one for all axes, one per axis, or a dict by axis name.

    An axis that the dict leaves out is broadcast. Raises SbpError for anything else.
    """
    if (alone := read_sbp(sbp)) is not None:
        return (alone,) * axes
    if isinstance(sbp, Mapping):
        known = list(names)
        for name in sbp:
            if name not in known:
                raise SbpError(f"sbp names the axis {name!r}, which the placement does not have",
                               f"its axes are {', '.join(known) or 'without names'}", f"did you mean {near[0]!r}?"
                               if (near := closest(name, known)) else "gt.placement(type, ranks, axis_names=(...))")
        sbp = [sbp.get(name, broadcast) for name in known]
    parts = _per_axis(sbp)
    if parts is None:
        raise not_an_sbp(sbp)
    nd = []
    for part in parts:
        one = read_sbp(part)
        if one is None:
            raise not_an_sbp(part)
        nd.append(one)
    if len(nd) != axes:
        raise SbpError(f"{counted(len(nd), 'sbp')} {tuple(nd)} for a placement of {counted(axes, 'axis', 'axes')}",
                       "every axis of a placement has one sbp", f"sbp=({', '.join(['gt.sbp.broadcast'] * axes)},)")
    return tuple(nd)


def not_an_sbp(value: Any, at: str = "") -> SbpError:
    """The error of a value that is not an sbp: what may be written, and what was probably meant."""
    what = f"{at}not an sbp: {value!r}"
    if value is split:
        return SbpError(what, "a split is along a dim", "did you mean gt.sbp.split(0)?")
    if isinstance(value, type):
        return SbpError(what, "it is a class", f"did you mean {value.__name__}({'0' * (value.__name__ == 'Shard')})?")
    return SbpError(what, 'an sbp is one of these or its text, "S(dim)", "B" or "P"; one per axis, or a dict by axis '
                    "name", "gt.sbp.split(dim), gt.sbp.broadcast or gt.sbp.partial_sum")


def with_axes(sbp: NdSbp, names: Sequence[str], changes: Mapping[str, Sbp]) -> NdSbp:
    """The same nd-sbp but along the axes named in `changes`; names of no axis are left out."""
    return tuple(changes.get(name, s) for name, s in zip(names, sbp)) if names else sbp


def code_of(sbp: NdSbp) -> str:
    """What to type for an nd-sbp: `gt.sbp.split(0)`, or `(gt.sbp.split(0), gt.sbp.broadcast)`."""
    names = [f"gt.sbp.split({s.dim})" if s.is_split else
             "gt.sbp.broadcast" if s.is_broadcast else f"gt.sbp.partial_{s.op}" for s in sbp]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def in_range(sbp: NdSbp, ndim: int) -> NdSbp:
    """The same nd-sbp with split dims counted from the start; raises SbpError for a dim that the tensor lacks."""
    for s in sbp:
        if s.is_split and not -ndim <= s.dim < ndim:
            raise SbpError(f"split({s.dim}) of a tensor of {ndim} dims", f"its dims are 0 to {ndim - 1}" if ndim
                           else "a 0-dim tensor has no dim to split", "another dim, or gt.sbp.broadcast")
    return tuple(Sbp("S", s.dim % ndim) if s.is_split else s for s in sbp)
