"""Gradients of leaves: they accumulate in whatever layout backward leaves them, and are reduced once.

A gradient of a broadcast parameter over a split batch comes as a pending sum. Adding to it costs nothing, so
micro-batches need no `no_sync`. The first read of any `.grad` (by an optimizer, by clipping, by the user) brings all
gradients that wait into the layouts of their parameters, in one fused boxing.

Every rank runs the same program, so all of them settle the same gradients: waiting leaves are held on to until then,
and taken in the order in which they were made. Each thread settles what its own backward passes left, as those of
others may go on; where it reads a leaf that another thread left, what that one left too.

Where a link between hosts or devices is what a reduction waits for, it is begun while backward goes on, a bucket at a
time, and waited for by that first read, which is also when `gt.record()` and `gt.boxing(...)` see it. That is done only
where no gradient came twice between the last two reads, as each would be sent again; one that does is reduced anew.

A leaf's gradient may be brought to another layout than the leaf's own (`set_grad_layout`), and then be handed over to
the *part* of the leaf that an optimizer works on (`share_grad`): that is ZeRO (zero.py).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from threading import RLock
from typing import Any, NamedTuple

import torch

from globaltensor.boxings import native
from globaltensor.boxings.redistribute import BegunBoxing, Move, finish_boxings, link_seconds, redistribute
from globaltensor.boxings.watch import watched
from globaltensor.errors import BoxingError, warnings_at_program
from globaltensor.layouts.layout import Layout
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.this_thread import this_thread
from globaltensor.runtime.torch_internals import TensorBase, compiling, end_graph
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary, torch_boundary

_grad: Any = TensorBase.grad                # a descriptor of C
raw_grad = _grad.__get__                             # the gradient of a leaf as it lies
set_raw = _grad.__set__
_order = count()
pending: dict[int, Any] = {}                         # leaves whose gradients lie elsewhere than they do, by their order
EARLY = 25 << 20                                     # bytes of gradients that wait, at most, for leaves reduced early
TIMES_LATENCY = 4                                    # how long a bucket takes to be sent, at least
BUCKETS = 13
_one_at_a_time = RLock()                             # of the threads that note what waits, or reduce it


@dataclass(slots=True, eq=False)
class LeafGradient:
    """What is noted of the gradient of a leaf, in the attribute `ATTRIBUTE` of the leaf, where anything is.

    order         of the leaf among those that are watched: every rank reduces in this order; None: it is not watched
    thread        the token of the thread whose backward pass left it waiting
    layout        the layout that the gradient is brought to; None: the leaf's own
    early         during backward already, as soon as `EARLY` bytes wait
    part, whole   the part of a leaf that an optimizer works on, and that leaf: noted on both of them
    reduce_dtype  the dtype in which the gradient is sent when it is reduced; None: its own
    """

    order: int | None = None
    thread: object = None
    layout: Layout | None = None
    early: bool = False
    part: Any = None
    whole: Any = None
    reduce_dtype: torch.dtype | None = None

    def layout_of(self, leaf: Any) -> Layout:
        """The layout in which the gradient is handed over."""
        return self.layout or leaf.spec.layout


ATTRIBUTE = "_leaf_gradient"
_NOTHING_NOTED = LeafGradient()


def _noted(leaf: Any) -> LeafGradient:
    """What is noted on a leaf, to be read."""
    noted: LeafGradient = getattr(leaf, ATTRIBUTE, _NOTHING_NOTED)
    return noted


def notes_of(leaf: Any) -> LeafGradient:
    """What is noted on a leaf, to be changed."""
    end_graph("what is noted of a parameter's gradient is no tensor of a graph")
    return leaf.__dict__.setdefault(ATTRIBUTE, LeafGradient())


def read_grad(leaf: Any) -> Any:
    """The gradient of a leaf, settled; or as it lies, for torch.compile, which reads all while it traces."""
    noted = getattr(leaf, ATTRIBUTE, _NOTHING_NOTED)               # optimizers read all gradients some three times
    if pending and not (noted.part is None and compiling()):
        reduce_pending(beside=leaf if noted.whole is None else noted.whole)
    if noted.part is not None:
        return _handed_over(noted.whole, noted.part)
    if noted is not _NOTHING_NOTED or leaf.is_leaf or compiling():
        return raw_grad(leaf)                                      # the first of these is true of most, and quick
    with warnings_at_program(not leaf.retains_grad):               # that it has none
        return raw_grad(leaf)


@torch_boundary
def replace_grad(leaf: Any, value: Any) -> None:
    """Replace the gradient of a leaf."""
    noted = _noted(leaf)
    for one in (leaf,) if noted.part is None else (noted.part, noted.whole):       # `leaf` is one of these two
        if pending and (order := _noted(one).order) is not None:
            with _one_at_a_time:
                if pending.pop(order, None) is not None:
                    _buckets.nbytes -= one.spec.nbytes
        set_raw(one, value if one is leaf else None)


def set_grad_layout(leaf: Any, dst: Layout, early: bool = False) -> None:
    """Gradients of this leaf are brought to `dst`. `early`: during backward already, as soon as `EARLY` bytes wait."""
    notes = notes_of(leaf)
    notes.layout, notes.early = dst, early
    watch_anew(leaf)


def share_grad(whole: Any, part: Any) -> None:
    """The two have one gradient: what comes for `whole`, in the layout and dtype of `part`."""
    for notes in (notes_of(whole), notes_of(part)):
        notes.part, notes.whole = part, whole


def part_of(leaf: Any) -> Any:
    """The part that an optimizer works on in the place of this leaf (or of that which this is a part of), if any."""
    return _noted(leaf).part


def _handed_over(whole: Any, part: Any) -> Any:
    if raw_grad(whole) is not None:
        with _one_at_a_time, torch.inference_mode(False), torch.no_grad():
            grad, before = raw_grad(whole), raw_grad(part)
            if grad is not None:
                grad, = redistribute([grad], [part.spec.layout], "gradient")
                grad = grad.to(part.dtype)
                set_raw(part, grad if before is None else before + grad)
                set_raw(whole, None)
    return raw_grad(part)


def grad_layout(leaf: Any) -> Layout:
    """The layout in which the gradient of a leaf is handed over: its own, or the one that was asked for."""
    return _noted(leaf).layout_of(leaf)


def watch_leaf(leaf: Any) -> None:
    """Watch what backward accumulates in this leaf."""
    if leaf.is_leaf and not leaf.traced and _noted(leaf).order is None:
        notes_of(leaf).order = next(_order)
        if _watched_natively(leaf):
            torch_ext.watch_gradient(leaf)
        else:                                        # first: hooks of the user's may read the gradient
            handle = _hook(leaf, _accumulated_hook)
            leaf._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)


def watch_anew(leaf: Any) -> None:
    """Of a leaf whose layout, or whose gradient's, is another now: native code forgets which gradients need nothing."""
    if _noted(leaf).order is not None and _watched_natively(leaf):
        torch_ext.watch_gradient(leaf)


def keep_hooks(leaf: Any) -> None:
    """Of a leaf that has become global by `torch.utils.swap_tensors`: hooks that its object has are made its data's."""
    if leaf._backward_hooks is not None:
        leaf._backward_hooks = leaf._backward_hooks
    if leaf._post_accumulate_grad_hooks is not None:
        leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
    if _noted(leaf).order is not None:
        notes_of(leaf).order = None
        watch_leaf(leaf)


def has_hooks(leaf: Any) -> bool:
    """Have others asked to be called when the gradient of this leaf comes, or when it has been accumulated?"""
    after = leaf._post_accumulate_grad_hooks
    return bool(leaf._backward_hooks) or bool(after) and any(hook is not _accumulated_hook for hook in after.values())


def _watched_natively(leaf: Any) -> bool:
    """Does native code watch this leaf, or will it? A leaf has one native hook, or any number in Python."""
    return torch_ext is not None and not leaf._post_accumulate_grad_hooks


_hook = torch.Tensor.register_post_accumulate_grad_hook


def register_hook(leaf: Any, own: Callable[[Any], None]) -> Any:
    """leaf.register_post_accumulate_grad_hook(own)"""
    if _noted(leaf).order is not None and _watched_natively(leaf):
        _hook(leaf, _accumulated_hook)
    return _hook(leaf, own)


def _accumulated_hook(leaf: Any) -> None:
    _accumulated(leaf)


def _accumulated(leaf: Any) -> bool:
    """Note what waits; true where the gradient lies where it shall."""
    grad = raw_grad(leaf)
    if type(grad) is torch.Tensor and not grad.requires_grad and grad.layout is torch.strided:
        # by way of a plain tensor that the leaf was written into, or zeros that a formula of torch made of numbers
        with torch.no_grad():
            grad = torch.zeros_like(leaf) + grad
        set_raw(leaf, grad)
    if type(grad) is not type(leaf) or grad._is_view():              # a view of the program's buffer goes on to be one
        return False
    notes = _noted(leaf)
    dst = notes.layout_of(leaf)
    if grad.spec.layout is dst:
        return True
    assert notes.order is not None                   # only what is watched comes here
    with _one_at_a_time:
        twice = notes.order in pending
        pending[notes.order] = leaf
        if not twice:
            notes.thread = this_thread.token
        _buckets.add(Reduction(leaf, grad, dst, notes), twice)
        if notes.early and not _early_reduction_off and _buckets.nbytes >= EARLY:
            reduce_pending()
    return False


_early_reduction_off: list[None] = []                # one for each block that says so, on any thread


@contextmanager
def no_early_reduction() -> Iterator[None]:
    """Inside, gradients that are reduced early wait as others do."""
    _early_reduction_off.append(None)
    try:
        yield
    finally:
        _early_reduction_off.pop()


def reduce_pending(of: Iterable[Any] | None = None, beside: Any = None) -> None:
    """Bring all gradients that this thread has left waiting, or the one that left that of `beside`, to where they shall
    lie; or those of some leaves; and all that are under way. For good, so not as tensors of inference mode."""
    with _one_at_a_time, torch.inference_mode(False):
        if of is None:
            threads = {None, this_thread.token}
            if beside is not None and _noted(beside).order in pending:
                threads.add(_noted(beside).thread)
            _reduce_waiting({order for order, leaf in pending.items() if _noted(leaf).thread in threads}, whole=True)
        else:
            _reduce_waiting(pending.keys() & {_noted(leaf).order for leaf in of}, whole=False)


def _reduce_waiting(waits: Set[int], whole: bool) -> None:
    begun = _buckets.under_way
    arriving = [one if _buckets.is_current(one) else None for bucket in begun for one in bucket.reductions]
    orders = {k for one in arriving if one is not None and (k := one.notes.order) is not None}
    keys = sorted(waits - orders)
    waiting = [one for key in keys if (one := Reduction.of(pending[key])) is not None]
    if begun or waiting and not _reduce_natively(waiting):
        _buckets.under_way = []
        try:
            moved = finish_boxings([bucket.boxing for bucket in begun], [one.move() for one in waiting], "gradient")
        except BoxingError:                          # not allowed here: nothing was waited for
            _buckets.under_way = begun
            raise
        for one, shards in zip([*arriving, *waiting], chain(*moved), strict=True):
            if one is not None:
                one.settle(shards)
    for order in (*orders, *keys):
        del pending[order]
    _buckets.note_read(whole)


class Reduction(NamedTuple):
    """A gradient of a leaf, the layout that it is brought to, and what is noted of it."""

    leaf: Any
    grad: Any
    dst: Layout
    notes: LeafGradient

    @classmethod
    def of(cls, leaf: Any) -> Reduction | None:
        """What the gradient of a leaf needs; None where it lies where it shall."""
        grad, notes = raw_grad(leaf), _noted(leaf)
        one = cls(leaf, grad, notes.layout_of(leaf), notes)
        return one if grad is not None and one.is_needed else None

    @property
    def is_needed(self) -> bool:
        """Is this the gradient of the leaf, and not where it shall lie?"""
        return raw_grad(self.leaf) is self.grad and self.grad.spec.layout is not self.dst

    @property
    def casts(self) -> bool:
        """Is it sent in another dtype than its own?"""
        return self.notes.reduce_dtype not in (None, self.grad.spec.dtype)

    def move(self) -> Move:
        """The boxing that does it."""
        of, shards = self.grad.spec, self.grad.shards
        if self.casts and (dtype := self.notes.reduce_dtype) is not None:
            of, shards = of.cast(dtype), _cast(shards, dtype)
        return Move(of, shards, self.dst, self.grad.lineage)

    def settle(self, shards: dict[int, torch.Tensor]) -> None:
        """These have come out of it."""
        self.grad.spec, self.grad.shards = self.grad.spec.moved(self.dst), _cast(shards, self.grad.spec.dtype)


def _cast(shards: dict[int, torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    return {rank: t.to(dtype) for rank, t in shards.items()}


def _reduce_natively(waiting: list[Reduction]) -> bool:
    """Where memory does it, and nobody watches, these gradients are reduced where they lie."""
    if torch_ext is None or watched() or any(one.casts for one in waiting):
        return False
    boxings = [native.find_boxing(one.grad.spec, one.dst) for one in waiting]
    if None in boxings:
        return False
    torch_ext.redistribute_in_place([(boxing, one.grad) for boxing, one in zip(boxings, waiting)], "gradient")
    return True


class Bucket(NamedTuple):
    """Reductions that are under way together."""

    boxing: BegunBoxing
    reductions: list[Reduction]


class BackwardBuckets:
    """Reductions that go on during backward. All ranks run the same program, so they begin the same buckets.

    What is sent when backward is over is not hidden, nor is the wait for what is sent first. So both buckets are small;
    there are some `BUCKETS`, by what came before the last read, as each costs a core some time.
    """

    def __init__(self) -> None:
        self.waiting: list[Reduction] = []           # of the next bucket
        self.transfer = self.before = 0.0            # seconds that these take to be sent, and the last bucket took
        self.sum = self.expected = 0.0               # the same of all gradients since the last read, and before it
        self.under_way: list[Bucket] = []
        self.stale: set[int | None] = set()          # the order of leaves whose gradients came again
        self.each_once = self.twice = False          # each_once: was it so before the last read?
        self.nbytes = 0                              # of all leaves that wait

    def add(self, one: Reduction, twice: bool) -> None:
        """A gradient came; `twice`: one waits already."""
        if twice:
            self.twice = True
            self.stale.add(one.notes.order)
            self.waiting = [other for other in self.waiting if other.leaf is not one.leaf]
            return
        self.nbytes += one.leaf.spec.nbytes
        if (link := link_seconds(one.grad.spec, one.dst, world().machine)) and not _early_reduction_off:
            latency, transfer = link
            self.sum += transfer
            if self.each_once:
                self.waiting.append(one)
                self.transfer += transfer
                enough = min(2 * self.before, self.expected / BUCKETS, self.expected - self.sum)
                if self.transfer >= max(TIMES_LATENCY * latency, enough):
                    self._begin()

    def _begin(self) -> None:
        reductions = [one for one in self.waiting if one.is_needed]
        self.under_way.append(Bucket(BegunBoxing([one.move() for one in reductions], "gradient"), reductions))
        self.waiting, self.transfer, self.before = [], 0.0, self.transfer

    def is_current(self, one: Reduction) -> bool:
        """Is this still to be read? What came again, or was replaced or dropped, is not what was sent."""
        order = one.notes.order
        return order not in self.stale and raw_grad(one.leaf) is one.grad and order in pending

    def note_read(self, whole: bool) -> None:
        """Gradients are read; `whole`: all of them."""
        self.waiting, self.transfer, self.before = [], 0.0, 0.0
        self.nbytes = sum(leaf.spec.nbytes for leaf in pending.values())
        if whole:
            self.expected, self.sum, self.each_once, self.twice = self.sum, 0.0, not self.twice, False
        self.stale.clear()


_buckets = BackwardBuckets()
TAKEN: dict[Callable[..., Any], Callable[..., Any]] = {_hook: register_hook}

if torch_ext is not None:
    torch_ext.on_accumulated(api_boundary(_accumulated))
