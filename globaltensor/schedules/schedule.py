"""What a pipeline schedule is: for every rank, the list of things it does, in order. Data, not code.

A model is cut into stages, a batch into micro-batches. One action is (stage, kind, micro-batch), written `2F5`:

    F   forward of this stage on this micro-batch
    B   the whole backward: gradients of the stage's input and of its weights
    I   only the gradient of the input, which the stage before waits for
    W   only the gradient of the weights, for which no other stage waits, so it can fill a gap later

Each (stage, micro-batch) has one F and then either one B, or one I followed later by one W. `rank_of[s]` says which
rank holds stage s. With more stages than ranks, stages are dealt out in a loop (0 1 2 0 1 2) or in a V (0 1 2 2 1 0).

A schedule may also say when values are transferred: `2SEND_F5` sends the output of stage 2, `3RECV_F5` receives it as
the input of stage 3, `3SEND_B5` and `2RECV_B5` do the same with its gradient on the way back. Where it does not,
`communication.communicate` inserts the transfers. In memory an action takes nine bytes, so thousands of ranks fit.
"""
from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import NamedTuple, overload

import numpy as np

from globaltensor.errors import GlobalTensorError

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)
COMPUTE, SENDS, RECEIVES = (F, B, I, W), (SEND_F, SEND_B), (RECV_F, RECV_B)
_KIND_BITS = 3                                       # of an encoded action, enough for the eight kinds


class ScheduleError(GlobalTensorError, ValueError):
    """An invalid schedule: its text, its name, or an action that is missing, repeated or out of order."""


class Action(NamedTuple):
    """One thing that a rank does."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Actions(Sequence[Action]):
    """A list of actions in two columns: the kind of each, and its key, `micro_batch * stages + stage`.

    So `key % stages` is the stage, and the same micro-batch at the stage before and after has the key - 1 and the
    key + 1. Loops over millions of actions read the columns; everything else reads `Action`s.
    """

    __slots__ = ("kinds", "keys", "stages")

    def __init__(self, kinds: Iterable[int], keys: Iterable[int], stages: int) -> None:
        self.kinds = bytes(kinds)                    # a byte each: an index gives an int that need not be allocated
        self.keys = keys if isinstance(keys, array) else array("q", keys)
        self.stages = stages

    @classmethod
    def of(cls, actions: Iterable[Action], stages: int) -> Actions:
        """From actions in a schedule of so many stages."""
        actions = list(actions)
        return cls((KINDS.index(a.kind) for a in actions),
                   (a.micro_batch * stages + a.stage for a in actions), stages)

    @classmethod
    def decode(cls, codes: Iterable[int], stages: int) -> Actions:
        """From the integers that `encode` gives."""
        packed = np.array(codes if isinstance(codes, array) else array("q", codes), np.int64)
        kinds = (packed & (1 << _KIND_BITS) - 1).astype(np.uint8)
        return cls(kinds.tobytes(), array("q", (packed >> _KIND_BITS).tobytes()), stages)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Actions: ...

    def __getitem__(self, index: int | slice) -> Action | Actions:
        if isinstance(index, slice):
            return Actions(self.kinds[index], self.keys[index], self.stages)
        return action_of(self.kinds[index], self.keys[index], self.stages)

    def __iter__(self) -> Iterator[Action]:
        return (action_of(kind, key, self.stages) for kind, key in zip(self.kinds, self.keys))

    def __len__(self) -> int:
        return len(self.kinds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.kinds, self.keys.tobytes(), self.stages))

    def __repr__(self) -> str:
        return " ".join(map(str, self))


def action_of(kind: int, key: int, stages: int) -> Action:
    """The action of this kind and key in a schedule of so many stages."""
    micro_batch, stage = divmod(key, stages)
    return Action(stage, KINDS[kind], micro_batch)


def encode(kind: int, key: int) -> int:
    """Kind and key as one integer. The codes of one action for successive micro-batches are evenly spaced, so
    generators deal them out as ranges, and `Actions.decode` turns a whole list into columns at once."""
    return key << _KIND_BITS | kind


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages dealt to the ranks round-robin, `chunks` times round: 0 1 2 0 1 2."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """Stages down the ranks and back up, so that rank 0 holds both the first and the last: 0 1 2 2 1 0."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Schedule:
    """`actions[r]` is what rank r does, in order; `rank_of[s]` the rank of stage s.

    A schedule parsed from text also has its `source`, and lines[r][i], the line of actions[r][i]. Both are for error
    messages only.
    """

    name: str
    rank_of: tuple[int, ...]
    micro_batches: int
    actions: tuple[Actions, ...]
    source: str = field(default="", compare=False)
    lines: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.actions)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages it holds."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @property
    def chunks(self) -> int:
        """The most stages on one rank."""
        return max(map(len, self.stages_of))

    def __len__(self) -> int:
        return sum(map(len, self.actions))

    def only(self, kinds: Iterable[int], name: str = "") -> Schedule:
        """The same without the other kinds of action: `only([F])` is an evaluation, without the backward passes."""
        wanted = frozenset(kinds)
        return self._where([[kind in wanted for kind in row.kinds] for row in self.actions], name or self.name)

    def first(self, micro_batches: int) -> Schedule:
        """The same with so many micro-batches, the first ones. What remains keeps its order, so it ends, too."""
        end = micro_batches * self.stages
        return replace(self._where([[key < end for key in row.keys] for row in self.actions], self.name),
                       micro_batches=micro_batches)

    def _where(self, keeps: Sequence[Sequence[bool]], name: str) -> Schedule:
        rows = tuple(Actions(compress(row.kinds, keep), compress(row.keys, keep), self.stages)
                     for row, keep in zip(self.actions, keeps))
        lines = tuple(tuple(compress(own, keep)) for own, keep in zip(self.lines, keeps))
        return Schedule(name, self.rank_of, self.micro_batches, rows, self.source, lines)

    def at(self, rank: int, position: int) -> str:
        """How an error names an action: `rank 1, action 7: 2F3 (line 4 of mine.txt)`."""
        line = f" (line {self.lines[rank][position]} of {self.source})" if self.lines else ""
        return f"rank {rank}, action {position}: {self.actions[rank][position]}{line}"
