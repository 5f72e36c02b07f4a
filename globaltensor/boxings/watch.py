"""Boxings recorded, and implicit ones forbidden: `gt.record()` and `gt.boxing(...)`.

    with gt.record() as moves: step()          a list of BoxingRecord, one per boxing, in the order they happened
    print(moves)                               as a table; a notebook shows it, and each record as a picture
    with gt.boxing("forbid"): step()           an implicit boxing that moves bytes raises BoxingError; printing may

A fused boxing of many tensors is one record. Both apply to backward too, which torch may run on other threads, so their
state is global to the process.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from globaltensor.boxings.flows import Flows, flows_of
from globaltensor.boxings.plan import BoxingPlan
from globaltensor.errors import BoxingError, counted, warn
from globaltensor.layouts.layout import Layout, Spec, sbp_text
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.sbp import code_of
from globaltensor.pictures.boxing_picture import boxing_picture
from globaltensor.pictures.markup import breakable, html_table
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.text_table import aligned
from globaltensor.tracebacks import api_boundary

EXPLICIT = "to_global"                               # the name of a boxing that the user asked for
PRINTED = "repr"                                     # of one to print, in a single process; of several, none moves any


class MovedTensor(NamedTuple):
    """A tensor of a boxing: what it was, the layout that it was brought to, and by which steps."""

    spec: Spec
    dst: Layout
    plan: BoxingPlan


@dataclass(frozen=True)
class BoxingRecord:
    """One boxing. `src` and `dst` are layouts (of the first tensor, where `tensors` of them moved together).

    op        what caused it: an op's name, "to_global", or "gradient" for gradients reduced before they are read
    where     the user's file:line
    bytes     received by the rank that receives most, by the plan; 0 for a local move. (Over shared memory one pass
              takes the place of the plan's steps; all ranks together never load and store more.)
    seconds   wall time in this process
    calls     the collectives of torch.distributed that did it, in order: ("all_reduce",); none within a host
    began     when it began, in seconds since 1970 by the clock of this host
    moved     the tensors themselves
    """

    op: str
    where: str
    src: Layout
    dst: Layout
    bytes: int
    seconds: float
    tensors: int = 1
    calls: tuple[str, ...] = ()
    began: float = field(default=0.0, compare=False)
    moved: tuple[MovedTensor, ...] = field(default=(), compare=False, repr=False)

    @property
    def flows(self) -> Flows:
        """Bytes from rank to rank, (from, to) -> bytes, by the plan."""
        total: Flows = {}
        for spec, _, plan in self.moved:
            for pair, n in flows_of(plan, spec.shape, spec.dtype.itemsize).items():
                total[pair] = total.get(pair, 0) + n
        return total

    def _repr_html_(self) -> str:
        if not self.moved:
            return escape(str(self))
        first = self.moved[0]
        what = f"{self.op}, {self.where}" + (f", {self.tensors} tensors" if self.tensors > 1 else "")
        return boxing_picture(first.spec, first.spec.on(first.dst), self.flows, what)._repr_html_()

    def __str__(self) -> str:
        many = f" x{self.tensors}" if self.tensors > 1 else ""
        return f"{self.where}  {self.op}: {self.src}{many} -> {self.dst}, {self.bytes:,} bytes"


class Record(list[BoxingRecord]):
    """What `gt.record()` gives: a list that prints as a table, and that a notebook shows as one.

    messages     bytes of tensors that stages of a pipeline on other processes sent this one: (from, to) -> bytes
    when_added   is called after each boxing that is added
    """

    def __init__(self, moves: Iterable[BoxingRecord] = ()) -> None:
        super().__init__(moves)
        self.messages: Flows = {}
        self.when_added: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """Received by the rank that receives most, in all boxings together."""
        return sum(move.bytes for move in self)

    def __str__(self) -> str:
        return "\n".join([*(aligned([_HEAD, *self._rows()], right={3, 4}) if self else []), self._total()])

    def _repr_html_(self) -> str:
        rows = [[breakable(cell) for cell in row] for row in self._rows()]
        return html_table(_HEAD, rows, self._total(), numbers=[3, 4])

    def _rows(self) -> list[list[str]]:
        """Boxings that are alike and follow each other share a row."""
        folded: list[list[BoxingRecord]] = []
        for move in self:
            if folded and _alike(folded[-1][0]) == _alike(move):
                folded[-1].append(move)
            else:
                folded.append([move])
        common = f"{self._common_placement()} "
        return [[its[0].where, its[0].op + (f" x{len(its)}" if len(its) > 1 else ""),
                 layouts_text(its[0]).replace(common, ""),
                 f"{sum(move.bytes for move in its):,}", f"{sum(move.seconds for move in its) * 1e3:,.3f}"]
                for its in folded]

    def _common_placement(self) -> placement | None:
        """The one that all of them are on: it is told once, not in every row."""
        all_of_them = {layout.placement for move in self for layout in (move.src, move.dst)}
        return all_of_them.pop() if len(all_of_them) == 1 else None

    def _total(self) -> str:
        moving = [move for move in self if move.bytes]
        common = self._common_placement()
        return (f"{counted(len(self), 'boxing')}, {len(moving)} of which moved {self.bytes:,} bytes, in "
                f"{sum(move.seconds for move in self) * 1e3:,.3f} ms" + (f"; all on {common}" if common else ""))


_HEAD = ("where", "op", "boxing", "bytes", "ms")


def _alike(move: BoxingRecord) -> tuple[object, ...]:
    return move.where, move.op, move.src, move.dst, move.tensors


def layouts_text(move: BoxingRecord) -> str:
    """Both layouts of a boxing, in one line."""
    to = sbp_text(move.dst.sbp) if move.src.placement == move.dst.placement and not isinstance(
        move.dst, RankRegions) else move.dst
    return f"{move.src}{f' x{move.tensors}' if move.tensors > 1 else ''} -> {to}"


@dataclass(eq=False)                                 # nested blocks often have equal ones
class _Policy:
    mode: str
    budget: int | None
    used: int = 0


_recorders: list[Record] = []
_policies: list[_Policy] = []


@contextmanager
def recorded() -> Iterator[Record]:
    """A list to which every boxing done inside the block, by this process, is added: `gt.record()` without a file."""
    moves = Record()
    _recorders.append(moves)
    _notify_native()
    try:
        yield moves
    finally:
        # by identity: `remove` takes the first equal list, and those of nested blocks are often equal
        _recorders[:] = [r for r in _recorders if r is not moves]
        _notify_native()


@api_boundary
def boxing(mode: str = "auto", budget: int | None = None) -> AbstractContextManager[None]:
    """How implicit boxing that moves bytes is treated inside the block, backward included.

    mode     "auto" does it, "warn" does it and warns, "forbid" raises BoxingError before anything moves
    budget   how many bytes (received by the rank that receives most) implicit boxings of the block may move in all
    It holds for the whole process, as backward may run on other threads: also for other threads and asyncio tasks of
    the program while the block runs.
    Not collective, but what one process refuses the others wait for: enter it in every process. Raises BoxingError for
    another mode, or what is not a number of bytes.
    """
    if mode not in ("auto", "warn", "forbid"):
        raise BoxingError(f"no boxing mode {mode!r}", "there are three",
                          'gt.boxing("auto"), gt.boxing("warn") or gt.boxing("forbid")')
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise BoxingError(f"budget={budget!r}", "a budget is a number of bytes, an int", "gt.boxing(budget=1_000_000)")
    return _in_force(_Policy(mode, budget))


@contextmanager
def _in_force(policy: _Policy) -> Iterator[None]:
    _policies.append(policy)
    _notify_native()
    try:
        yield
    finally:
        _policies.remove(policy)
        _notify_native()


@contextmanager
def not_counted() -> Iterator[None]:
    """Inside, boxings are not recorded, no block warns of them, and none counts them. What a block forbids, and what it
    has no budget left for, is refused nevertheless."""
    recorders, policies = _recorders[:], _policies[:]
    _recorders.clear()
    _policies[:] = [_Policy("auto" if own.mode == "warn" else own.mode, own.budget, own.used) for own in policies]
    _notify_native()
    try:
        yield
    finally:
        _recorders[:], _policies[:] = recorders, policies
        _notify_native()


def _notify_native() -> None:
    """Native code leaves boxings to Python while there is a recorder or a policy."""
    if torch_ext is not None:
        torch_ext.set_boxings_watched(watched())


def watched() -> bool:
    """Is there a recorder, or a policy for implicit boxing?"""
    return bool(_recorders or _policies)


def permit(op: str, src: Layout, dst: Layout, nbytes: int) -> None:
    """Raise or warn where a `gt.boxing` block in force does not allow this boxing."""
    if op in (EXPLICIT, PRINTED) or not nbytes:
        return
    to = sbp_text(dst.sbp) if src.placement == dst.placement and not isinstance(dst, RankRegions) else dst
    what = f"{op} needs a boxing {src} -> {to}, {nbytes:,} bytes"
    for policy in _policies:
        policy.used += nbytes
        if policy.mode == "forbid":
            raise BoxingError(what, 'it runs inside gt.boxing("forbid")', _fix(src, dst))
        if policy.budget is not None and policy.used > policy.budget:
            raise BoxingError(what, f"the block moved {policy.used:,} bytes of its budget of {policy.budget:,}",
                              _fix(src, dst))
        if policy.mode == "warn":
            warn(what)


def _fix(src: Layout, dst: Layout) -> str:
    if isinstance(dst, RankRegions):
        return "another sbp for the operands"
    elsewhere = "" if src.placement == dst.placement else f"gt.{dst.placement}, "
    return f"x.to_global({elsewhere}sbp={code_of(dst.sbp)}) before it, or another sbp for the operands"


def note(move: BoxingRecord) -> None:
    """Give a boxing that was done to every recorder."""
    for recorder in _recorders:
        recorder.append(move)
        if recorder.when_added is not None:
            recorder.when_added()


def note_messages(sizes: Mapping[int, int], receiver: int) -> None:
    """Give what a stage received from ranks of other processes to every recorder."""
    for recorder in _recorders:
        for sender, n in sizes.items():
            recorder.messages[sender, receiver] = recorder.messages.get((sender, receiver), 0) + n


def recording() -> bool:
    return bool(_recorders)
