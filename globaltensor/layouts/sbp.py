"""How a tensor lies on one axis of a placement: split along a dim, broadcast, or a pending partial sum.

    split(0)      prints S(0)    rank i holds the i-th part of dim 0 (parts as equal as they can be, larger first)
    broadcast     prints B       every rank holds the whole
    partial_sum   prints P       the value is the sum of what the ranks hold; partial_max, partial_min likewise

One sbp per placement axis makes an nd-sbp, a tuple, outermost axis first. A gradient lies dual to its tensor: the
gradient of S is S, of B is P, of P is B.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from globaltensor.errors import SbpError


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
        """The sbp of the gradient of a tensor that lies like this."""
        return {"S": self, "B": partial_sum, "P": broadcast}[self.kind]


NdSbp = tuple[Sbp, ...]

broadcast = Sbp("B")
partial_sum = Sbp("P", op="sum")
partial_max = Sbp("P", op="max")
partial_min = Sbp("P", op="min")


def split(dim: int) -> Sbp:
    """Split along tensor dim `dim`; negative dims count from the end. Raises SbpError where `dim` is no int."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"split takes a dim, an int, not {dim!r}", fix="gt.sbp.split(0)")
    return Sbp("S", dim)


def nd_sbp(sbp: Any, axis_names: Sequence[str] | None, axes: int) -> NdSbp:
    """One sbp per axis from what a user may write: one for all axes, one per axis, or a dict by axis name.

    An axis that the dict leaves out is broadcast. Raises SbpError for anything else.
    """
    if isinstance(sbp, Sbp):
        return (sbp,) * axes
    if isinstance(sbp, Mapping):
        known = list(axis_names or ())
        for name in sbp:
            if name not in known:
                raise SbpError(f"sbp names the axis {name!r}, which the placement does not have",
                               f"its axes are {known or 'without names'}",
                               "gt.placement(type, ranks, axis_names=(...))")
        sbp = [sbp.get(name, broadcast) for name in known]
    if not isinstance(sbp, Sequence) or isinstance(sbp, str) or not all(isinstance(s, Sbp) for s in sbp):
        raise SbpError(f"not an sbp: {sbp!r}", "an sbp is one of these, one per axis, or a dict by axis name",
                       "gt.sbp.split(dim), gt.sbp.broadcast or gt.sbp.partial_sum")
    if len(sbp) != axes:
        raise SbpError(f"{len(sbp)} sbps {tuple(sbp)} for a placement of {axes} axes",
                       "every axis of a placement has one sbp", f"sbp=({', '.join(['gt.sbp.broadcast'] * axes)},)")
    return tuple(sbp)


def typed(sbp: NdSbp) -> str:
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
