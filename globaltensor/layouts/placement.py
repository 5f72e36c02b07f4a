"""Where a tensor lives: a device type and ranks, arranged in axes.

    placement("cpu", [0, 1, 2])                                  one axis of three ranks
    placement("cuda", [[0, 1], [2, 3]], axis_names=("dp", "tp"))  two axes

The nesting of `ranks` gives the axes, their order is honoured, and two placements are the same only if all of it is
the same: [0, 1] is neither [1, 0] nor [[0, 1]].
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from globaltensor.errors import PlacementError, counted
from globaltensor.layouts.recent import shared
from globaltensor.tracebacks import api_boundary

MANY = 64                                            # ranks, from which on they are not listed
_hypothetical = False                                # are ranks those of a cluster that is described, and not there?
_on_create: list[Callable[[placement], None]] = []   # the world checks ranks and devices; it is a layer above this


@shared
class placement:
    """Frozen and hashable. `type` is a torch device type, `ranks` a nested sequence of ints of any depth.

    The first one starts the world, on every process; others are not collective.
    Raises PlacementError for ragged or empty lists, a rank that appears twice, ranks outside the world, a device type
    that this host does not have, and axis names that do not fit.
    """

    __slots__ = dict.fromkeys(("__dict__", "_hash", "axis_names", "flat", "hypothetical", "ranks", "shape", "type")) | {
        "names": "The names of its axes, where they have any. An only axis that was not named is called \"dp\".",
        "ndim": "The number of axes."}

    type: str
    ranks: tuple[Any, ...]                           # ints, in tuples nested as deep as there are axes
    shape: tuple[int, ...]                           # how many ranks along each axis
    flat: tuple[int, ...]                            # the ranks in one row, the last axis fastest
    axis_names: tuple[str, ...] | None
    names: tuple[str, ...]
    ndim: int
    hypothetical: bool                               # its first rank stands for all
    _hash: int

    @api_boundary
    def __init__(self, type: str, ranks: Any, axis_names: Sequence[str] | None = None) -> None:
        type = str(type)
        if ":" in type:
            raise PlacementError(f"a placement on the single device {type!r}",
                                 "it takes a device type; each rank has a device of that type",
                                 f'gt.placement("{type.partition(":")[0]}", {ranks!r})')
        if isinstance(ranks, int):
            raise PlacementError(f"ranks={ranks!r} is not a list of ranks", "a placement names its ranks",
                                 f'gt.placement("{type}", range({ranks})), or gt.placement("{type}", [{ranks}])')
        nested, shape = _nest(ranks)
        flat = tuple(_flatten(nested))
        if axis_names is not None and (isinstance(axis_names, str) or not isinstance(axis_names, Iterable)):
            raise PlacementError(f"axis_names={axis_names!r}", "it is a tuple, with a name for each axis",
                                 f"axis_names={('dp', 'tp', 'pp', 'sp', 'ep')[:len(shape)]}")
        names = tuple(axis_names) if axis_names is not None else None
        if names is not None and not all(isinstance(name, str) and name for name in names):
            raise PlacementError(f"axis_names={names}", "an axis is asked for by its name, a text",
                                 f"axis_names={('dp', 'tp', 'pp', 'sp', 'ep')[:len(shape)]}")
        if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
            raise PlacementError(f"axis_names={names} for {counted(len(shape), 'axis', 'axes')}",
                                 "each axis has one name, and no two have the same",
                                 f"axis_names={('dp', 'tp', 'pp', 'sp', 'ep')[:len(shape)]}")
        if len(set(flat)) != len(flat):
            twice = sorted({r for r in flat if flat.count(r) > 1})
            raise PlacementError(f"rank {twice[0]} appears more than once in {_lists(nested)}",
                                 "a rank holds one shard of a tensor", "each rank once")
        for key, value in (("type", type), ("ranks", nested), ("shape", shape), ("flat", flat),
                           ("axis_names", names), ("names", names or (("dp",) if len(shape) == 1 else ())),
                           ("ndim", len(shape)), ("hypothetical", _hypothetical),
                           ("_hash", hash((type, nested, names)))):
            object.__setattr__(self, key, value)
        for check in _on_create:
            check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a placement is frozen")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # no name of this module: weak dictionaries compare as the interpreter ends, when modules are empty
        return self is other or (type(other) is type(self) and self._hash == other._hash
                                 and (self.type, self.ranks, self.axis_names, self.hypothetical)
                                 == (other.type, other.ranks, other.axis_names, other.hypothetical))

    def __repr__(self) -> str:
        return self._text                            # messages between ranks say it

    @cached_property
    def _text(self) -> str:
        names = f", axis_names={self.axis_names}" if self.axis_names else ""
        return f'placement("{self.type}", {self._ranks_in_short()}{names})'

    def _ranks_in_short(self) -> str:
        """As one writes them: many ranks in even steps are a range, not a list of thousands."""
        first, last = self.flat[0], self.flat[-1]
        step = self.flat[1] - first if len(self.flat) > 1 else 1
        if len(self.flat) < MANY or step <= 0 or self.flat != tuple(range(first, last + 1, step)):
            return str(_lists(self.ranks))
        ends = [first] * (first > 0 or step > 1) + [last + 1] + [step] * (step > 1)
        bounds = ", ".join(map(str, ends))
        return f"range({bounds})" if self.ndim == 1 else f"torch.arange({bounds}).reshape({self.shape})"

    def __reduce__(self) -> tuple[object, ...]:
        return placement, (self.type, self.ranks, self.axis_names)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """What the code of a graph says for it."""
        return f"{type(self).__name__}{(self.type, self.ranks, self.axis_names)}", {type(self).__name__: type(self)}

    @cached_property
    def coords(self) -> dict[int, tuple[int, ...]]:
        """rank -> its index on each axis."""
        return dict(zip(self.flat, product(*map(range, self.shape))))

    @cached_property
    def positions(self) -> dict[int, int]:
        """rank -> its index in `flat`."""
        return {rank: nth for nth, rank in enumerate(self.flat)}

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How far apart neighbours along each axis are in `flat`."""
        return tuple(prod(self.shape[axis + 1:]) for axis in range(self.ndim))

    def ranks_along(self, axes: Sequence[int], rank: int) -> list[int]:
        """The ranks that differ from one on these axes only, itself among them, the last of the axes fastest."""
        own, strides = self.coords[rank], self.strides
        first = self.positions[rank] - sum(own[axis] * strides[axis] for axis in axes)
        return [self.flat[first + sum(steps)] for steps in product(*(
            range(0, self.shape[axis] * strides[axis], strides[axis]) for axis in axes))]

    @api_boundary
    def of_type(self, type: str) -> placement:
        """The same ranks, on devices of another type; of a subclass, of that."""
        return self if type == self.type else placement(type, self.ranks, self.axis_names)

    @staticmethod
    @api_boundary
    def all(type: str) -> placement:
        """Every rank of the world, on one axis."""
        return placement(type, range(_world_size()))


def with_ranks(of: placement, ranks: Any) -> placement:
    """Ranks of a placement in another order, or a part of them; described only where that is, whenever it is asked
    for: those who ask keep the answer."""
    other = placement(of.type, ranks)
    object.__setattr__(other, "hypothetical", of.hypothetical)
    return other


_world_size: Callable[[], int] = lambda: 1           # set by the layer that knows the world


def _nest(ranks: Any) -> tuple[Any, tuple[int, ...]]:
    """Nested tuples of ints and their shape, or PlacementError."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        return ranks, ()
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, Mapping, Set)):
        raise PlacementError(f"ranks are ints in nested lists, not {ranks!r}",
                             "their order, and how they are nested, is which rank is where on the axes", "ranks=[0, 1]")
    parts = [_nest(part) for part in ranks]
    if not parts:
        raise PlacementError("a placement without ranks", "a tensor has to live somewhere", "ranks=[0]")
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        raise PlacementError(f"ragged ranks: {_lists(tuple(p for p, _ in parts))}",
                             "a placement is a grid: every list of one depth has the same length",
                             "lists of the same length, such as [[0, 1], [2, 3]]")
    return tuple(p for p, _ in parts), (len(parts), *shapes.pop())


def _flatten(nested: Any) -> Iterable[int]:
    if isinstance(nested, int):
        yield nested
    else:
        for part in nested:
            yield from _flatten(part)


def _lists(nested: Any) -> Any:
    return nested if isinstance(nested, int) else [_lists(part) for part in nested]
