"""What goes from stage to stage: global tensors whose senders do not wait and whose receivers learn the shapes once.

A boxing between two placements is a few steps on the sender's, one that crosses, and a few on the receiver's (a split,
sends of the parts, a gather: so every link carries a share). The steps on either side are boxings as any other, among
the ranks of one stage. The one that crosses cannot be: the two sides do not meet, the sender is at another micro-batch
when the receiver takes what it sent. It is a *letter* for each pair of ranks, all tensors of a parcel in one, which the
sender leaves for the receiver. Between two ranks letters are read in the order in which they were written, as the
schedule was checked for.

    parcel    the tensors of an output, or their gradients, and the state of the random numbers where the stage left off
    form      what the receiver must know to read it: layouts, shapes, dtypes. Told in a letter of its own before the
              first parcel of its kind (`key`), and remembered on both sides
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from globaltensor.boxings.p2p_boxing import P2PBoxing
from globaltensor.boxings.plan import plan
from globaltensor.boxings.redistribute import Move, move_shards, redistribute
from globaltensor.errors import ShapeError
from globaltensor.layouts.layout import Layout, Shape, Spec, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime.agreement import as_bytes, from_bytes
from globaltensor.runtime.p2p import Mail
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor

AHEAD = 2                                            # letters of a channel that a rank is ready to take before its turn
_BOXING = "the pipeline"


class Part(NamedTuple):
    """One tensor of a parcel, without its data."""

    layout: Layout
    shape: Shape
    dtype: torch.dtype
    needs_grad: bool

    @property
    def spec(self) -> Spec:
        return spec(self.layout, self.shape, None, self.dtype)


Form = tuple["Part | None", ...]                     # None where there is no tensor: a gradient that nobody made


class Parcel(NamedTuple):
    """What one stage hands to another for a micro-batch."""

    tensors: tuple[Any, ...]                         # GlobalTensor or None
    form: Form
    random: torch.Tensor | None                      # forward only: the generator's state where the stage left off


def parcel(tensors: Sequence[Any], random: torch.Tensor | None = None) -> Parcel:
    """These tensors, cut from their graph."""
    form = tuple(None if t is None else Part(t.spec.layout, t.spec.shape, t.spec.dtype, t.requires_grad)
                 for t in tensors)
    return Parcel(tuple(None if t is None else t.detach() for t in tensors), form, random)


@lru_cache(10_000)
def forward_layout(src: Layout, where: placement) -> Layout:
    """How a tensor of the stage before lies on the next stage: along axes of the same name, or of the same place where
    axes have no names, as before; else broadcast."""
    if where.axis_names and src.placement.axis_names:
        own = dict(zip(src.placement.axis_names, src.sbp))
        sbp = tuple(own.get(name, broadcast) for name in where.axis_names)
    else:
        sbp = src.sbp if len(src.sbp) == where.ndim else (broadcast,) * where.ndim
    return layout(where, tuple(broadcast if s.is_partial else s for s in sbp))


def backward_layout(src: Layout) -> Layout:
    """How the gradient of a tensor that lay so arrives."""
    return src.dual.without_partials


def carried(given: Parcel, dsts: Sequence[Layout | None]) -> Parcel:
    """The same on another placement, where one process drives all ranks of both, or both are on the same ranks."""
    there = [k for k, t in enumerate(given.tensors) if t is not None]
    moved = redistribute([given.tensors[k] for k in there], [dsts[k] for k in there], _BOXING) if there else []
    tensors: list[Any] = [None] * len(given.tensors)
    for k, t in zip(there, moved):
        tensors[k] = t
    return given._replace(tensors=tuple(tensors))


class Route(NamedTuple):
    """Between which ranks a parcel travels. To each reader one of the writers, its guide, also sends what is no part of
    a tensor."""

    writers: placement
    readers: placement

    @property
    def guide(self) -> int:
        """This process's."""
        return self.writers.flat[self.readers.flat.index(world().rank) % len(self.writers.flat)]

    @property
    def guided(self) -> list[int]:
        """The readers whose guide this process is."""
        n = len(self.writers.flat)
        return [r for i, r in enumerate(self.readers.flat) if self.writers.flat[i % n] == world().rank]


class Line:
    """All parcels of one kind, on one route: what their boxings are is found out once.

    A boxing between placements has three parts: up to `leaves` on the one, the crossing to `lands`, then on to `dsts`.
    """

    def __init__(self, form: Form, dsts: Sequence[Layout | None], route: Route) -> None:
        self.form, self.dsts, self.route = form, dsts, route
        self.there = [k for k, part in enumerate(form) if part is not None]
        ways = [_way(form[k].spec, dsts[k]) for k in self.there]
        self.leaves, self.lands = [way[0] for way in ways], [way[1] for way in ways]
        self.letter = P2PBoxing([form[k].spec.on(leaves) for k, leaves in zip(self.there, self.leaves)], self.lands)
        self.sizes = self.letter.incoming_bytes()
        self.guided = route.guided if world().rank in route.writers.coords else ()
        self.guide = route.guide if world().rank in route.readers.coords else -1

    def written(self, given: Parcel) -> dict[int, list[torch.Tensor]]:
        """What each reader gets of a parcel, on the CPU."""
        tensors = [given.tensors[k] for k in self.there]
        ready = redistribute(tensors, self.leaves, _BOXING) if tensors else []
        outgoing = self.letter.pack([t.shards for t in ready])
        for reader in self.guided if given.random is not None else ():
            outgoing[reader] = [given.random, *outgoing.get(reader, ())]
        return {reader: [p.cpu() for p in pieces] for reader, pieces in outgoing.items()}

    def read(self, received: dict[int, torch.Tensor]) -> tuple[Any, ...]:
        """The tensors, where they are wanted, of the bytes that came."""
        device = world().device(self.route.readers.type, world().rank)
        arrived = self.letter.unpack({peer: data.to(device) for peer, data in received.items()})
        landed = [Move(self.form[k].spec.on(lands), held, self.dsts[k])
                  for k, lands, held in zip(self.there, self.lands, arrived)]
        tensors: list[Any] = [None] * len(self.form)
        for k, held in zip(self.there, move_shards(landed, _BOXING) if landed else []):
            tensors[k] = GlobalTensor.wrap(self.form[k].spec.on(self.dsts[k]), held)
        return tuple(tensors)


def _way(of: Spec, dst: Layout) -> tuple[Layout, Layout]:
    steps = plan(of.layout, dst, of.shape, of.nbytes, world().machine).layouts
    at = next(k for k, step in enumerate(steps) if step.placement == dst.placement)
    return steps[at - 1], steps[at]


class Post:
    """What this process sends and gets. One for all stages and steps: what was told once is remembered here."""

    def __init__(self, everyone: Sequence[int]) -> None:
        self.mail = Mail(everyone, "")
        self.lines: dict[Hashable, Line] = {}
        self.turn = 0                                # how many steps were begun

    def begin(self) -> None:
        """A step: its number stands in errors."""
        self.turn += 1
        self.mail.what = f"step {self.turn} of a pipeline"

    def send(self, key: Hashable, given: Parcel, dsts: Sequence[Layout | None], route: Route, name: Hashable) -> None:
        """Post a parcel, and wait for nobody.

        Raises ShapeError where its form is not that of others of its kind.
        """
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Line(given.form, dsts, route)
            for reader in line.guided:
                self.mail.post([as_bytes(given.form)], reader, "form", sized=False)
        elif line.form != given.form:
            raise ShapeError("a stage gave another form than before for inputs of the same shapes",
                             f"{text(given.form)} instead of {text(line.form)}",
                             "stages whose outputs follow from the shapes and dtypes of their inputs")
        for reader, pieces in line.written(given).items():
            self.mail.post(pieces, reader, name)

    def line(self, key: Hashable, route: Route, dsts: Callable[[Form], Sequence[Layout | None]]) -> Line:
        """Of a kind of parcel that this process gets; its form is heard from the guide where it is not known yet."""
        if key not in self.lines:
            form = from_bytes(self.mail.expect(route.guide, "form")())
            self.lines[key] = Line(form, dsts(form), route)
        return self.lines[key]


class Arrival:
    """A parcel on its way to this process: expected from when this is made, taken by `open`.

    random   bytes of the state of random numbers that come with it
    """

    def __init__(self, mail: Mail, line: Line, random: int, name: Hashable) -> None:
        self.line, self.random = line, random
        sizes = dict(line.sizes)
        if random:
            sizes[line.guide] = sizes.get(line.guide, 0) + random
        self.takes = {peer: mail.expect(peer, name, size) for peer, size in sizes.items()}

    def open(self) -> Parcel:
        """Wait for it, and bring its tensors to where they are wanted."""
        received = {peer: take() for peer, take in self.takes.items()}
        state = None
        if self.random:
            whole = received[self.line.guide]
            state, received[self.line.guide] = whole[:self.random], whole[self.random:]
        return Parcel(self.line.read(received), self.line.form, state)


def text(form: Form) -> str:
    """`[4, 8] float32, no tensor`."""
    return ", ".join("no tensor" if part is None else f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}"
                     for part in form)
