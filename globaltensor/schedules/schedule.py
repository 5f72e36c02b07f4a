"""What a pipeline schedule is: for every rank, the list of things it does, in order. Data, not code.

A model is cut into stages, a batch into micro-batches. One action is (stage, kind, micro-batch), written `2F5`:

    F   forward of this stage on this micro-batch
    B   the whole backward: gradients of the stage's input and of its weights
    I   only the gradient of the input, which the stage before waits for
    W   only the gradient of the weights, for which nobody waits: it can fill a gap later

Each (stage, micro-batch) has one F and then either one B, or one I and after it one W. `rank_of[s]` says which rank
holds stage s. With more stages than ranks the stages lie in a loop (0 1 2 0 1 2) or in a V (0 1 2 2 1 0).

A schedule may also say when values are moved: `2SEND_F5` sends the output of stage 2, `3RECV_F5` receives it as the
input of stage 3, `3SEND_B5` and `2RECV_B5` do the same with its gradient on the way back. Where it does not,
`communication.communicate` puts them in. In memory an action is one integer, so that thousands of ranks fit.
"""
from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

from globaltensor.errors import GlobalTensorError

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)


class ScheduleError(GlobalTensorError, ValueError):
    """A schedule that cannot be, or cannot be run: its text, its name, a missing, doubled or misordered action."""


class Action(NamedTuple):
    """One thing that a rank does."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Actions(Sequence[Action]):
    """A list of actions, each kept as the integer `(micro_batch * stages + stage) * 8 + kind`.

    So `code & 7` is the kind, `code >> 3` is the key of (stage, micro-batch), and the same micro-batch at the stage
    before and after has the key - 1 and the key + 1.
    """

    __slots__ = ("codes", "stages")

    def __init__(self, codes: Iterable[int], stages: int) -> None:
        self.codes, self.stages = codes if isinstance(codes, array) else array("q", codes), stages

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Actions: ...

    def __getitem__(self, index: int | slice) -> Action | Actions:
        if isinstance(index, slice):
            return Actions(self.codes[index], self.stages)
        return decode(self.codes[index], self.stages)

    def __iter__(self) -> Iterator[Action]:
        return (decode(code, self.stages) for code in self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.codes.tobytes(), self.stages))

    def __repr__(self) -> str:
        return " ".join(map(str, self))


def encode(stage: int, kind: str, micro_batch: int, stages: int) -> int:
    """The integer of an action in a schedule of so many stages."""
    return (micro_batch * stages + stage) << 3 | KINDS.index(kind)


def decode(code: int, stages: int) -> Action:
    """The action that `encode` made this integer of."""
    micro_batch, stage = divmod(code >> 3, stages)
    return Action(stage, KINDS[code & 7], micro_batch)


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages dealt to the ranks in turn, `chunks` times round: 0 1 2 0 1 2."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """Stages down the ranks and up again, so that the first rank holds the first and the last one: 0 1 2 2 1 0."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Schedule:
    """`actions[r]` is what rank r does, in order; `rank_of[s]` the rank of stage s.

    `source` and `lines` say where a schedule that was read from a text has its actions: lines[r][i] is the line of
    actions[r][i]. They are for error messages only.
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
        rows = tuple(Actions((c for c in row.codes if c & 7 in wanted), self.stages) for row in self.actions)
        lines = tuple(tuple(line for c, line in zip(row.codes, own) if c & 7 in wanted)
                      for row, own in zip(self.actions, self.lines))
        return Schedule(name or self.name, self.rank_of, self.micro_batches, rows, self.source, lines)

    def at(self, rank: int, position: int) -> str:
        """How an error names an action: `rank 1, action 7: 2F3 (line 4 of mine.txt)`."""
        line = f" (line {self.lines[rank][position]} of {self.source})" if self.lines else ""
        return f"rank {rank}, action {position}: {self.actions[rank][position]}{line}"
