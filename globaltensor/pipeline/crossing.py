"""What goes from stage to stage: global tensors whose senders do not wait and whose receivers learn the shapes once.

A boxing between two placements is a few steps on the sender's, one that crosses, and a few on the receiver's (a split,
sends of the parts, a gather: so every link carries a share). The steps on either side are boxings as any other, among
the ranks of one stage. The one that crosses cannot be: the two sides do not meet, the sender is at another micro-batch
when the receiver takes what it sent. It is a *letter* for each pair of ranks, all tensors of a parcel in one, posted
and left to the transport. Between two ranks letters are read in the order in which they were written, as the schedule
was checked for, and while a rank computes the next ones come in already.

    parcel    the tensors of an output, or their gradients, and the state of the random numbers where the stage left off
    form      what the receiver must know to read it: layouts, shapes, dtypes. Told in a letter of its own before the
              first parcel of its kind (`key`), and remembered on both sides
"""
from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from globaltensor import comm
from globaltensor.boxing.plan import plan
from globaltensor.boxing.run import Boxed, Letter, box, boxed
from globaltensor.errors import ShapeError
from globaltensor.layout import Layout, Shape, Spec, layout, spec
from globaltensor.placement import placement
from globaltensor.sbp import broadcast
from globaltensor.tensor.core import GlobalTensor

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
    return src.dual.settled


def carried(given: Parcel, dsts: Sequence[Layout | None]) -> Parcel:
    """The same on another placement, where one process drives all ranks of both, or both are on the same ranks."""
    there = [k for k, t in enumerate(given.tensors) if t is not None]
    moved = boxed([given.tensors[k] for k in there], [dsts[k] for k in there], _BOXING) if there else []
    tensors: list[Any] = [None] * len(given.tensors)
    for k, t in zip(there, moved):
        tensors[k] = t
    return given._replace(tensors=tuple(tensors))


class Way(NamedTuple):
    """A boxing between placements in three parts: up to `leaves` on the one, the crossing to `lands`, then on."""

    leaves: Layout
    lands: Layout


def _way(of: Spec, dst: Layout) -> Way:
    steps = plan(of.layout, dst, of.shape, of.nbytes, comm.world().machine).layouts
    at = next(k for k, step in enumerate(steps) if step.placement == dst.placement)
    return Way(steps[at - 1], steps[at])


class Route(NamedTuple):
    """Between which ranks a parcel travels. To each reader one of the writers, its guide, also sends what is no part of
    a tensor."""

    writers: placement
    readers: placement

    @property
    def guide(self) -> int:
        """This process's."""
        return self.writers.flat[self.readers.flat.index(comm.rank()) % len(self.writers.flat)]

    @property
    def guided(self) -> list[int]:
        """The readers whose guide this process is."""
        n = len(self.writers.flat)
        return [r for i, r in enumerate(self.readers.flat) if self.writers.flat[i % n] == comm.rank()]


class Post:
    """This process's letters. One for all stages and steps: what was told once is remembered here."""

    def __init__(self, everyone: Sequence[int]) -> None:
        self.peers = tuple(r for r in everyone if r != comm.rank())
        self.known: dict[Hashable, Form] = {}
        self.turn = 0                                # how many steps were begun: it names them in errors
        self._sent: dict[Hashable, list[tuple[int, Any, torch.Tensor]]] = {}     # reader, work, what must be left alone

    def send(self, key: Hashable, given: Parcel, dsts: Sequence[Layout | None], route: Route, name: Hashable) -> None:
        """Post a parcel, and wait for nobody: its memory is kept until `taken(name)`.

        Raises ShapeError where its form is not that of others of its kind.
        """
        before = self.known.get(key)
        if before is None:
            self.known[key] = given.form
            said = torch.frombuffer(bytearray(pickle.dumps(given.form)), dtype=torch.uint8)
            for reader in route.guided:
                self._post(torch.tensor([said.numel()]).view(torch.uint8), reader, name)
                self._post(said, reader, name)
        elif before != given.form:
            raise ShapeError("a stage gave another form than before for inputs of the same shapes",
                             f"{text(given.form)} instead of {text(before)}",
                             "stages whose outputs follow from the shapes and dtypes of their inputs")
        there = [k for k, t in enumerate(given.tensors) if t is not None]
        ways = [_way(given.tensors[k].spec, dsts[k]) for k in there]
        ready = boxed([given.tensors[k] for k in there], [w.leaves for w in ways], _BOXING) if there else []
        outgoing = Letter([Boxed(t.spec, t.shards, w.lands) for t, w in zip(ready, ways)]).write()
        for reader in route.guided if given.random is not None else ():
            outgoing[reader] = [given.random, *outgoing.get(reader, ())]
        for reader, parts in outgoing.items():
            whole = torch.cat([p.cpu() for p in parts]) if len(parts) > 1 else parts[0].cpu().clone()
            self._post(whole, reader, name)

    def _post(self, buffer: torch.Tensor, reader: int, name: Hashable) -> None:
        self._sent.setdefault(name, []).append((reader, comm.post(buffer, reader), buffer))

    def form(self, key: Hashable, route: Route) -> Form:
        """The form of a kind of parcel, heard from the guide where this process does not know it yet."""
        if key not in self.known:
            size = torch.empty(8, dtype=torch.uint8)
            self.wait({route.guide: comm.post(size, route.guide, receive=True)})
            said = torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
            self.wait({route.guide: comm.post(said, route.guide, receive=True)})
            self.known[key] = pickle.loads(said.numpy().tobytes())
        return self.known[key]

    def wait(self, works: Any) -> None:
        comm.wait(works, f"step {self.turn} of a pipeline", self.peers)

    def taken(self, name: Hashable) -> None:
        """The letters of this name were read, or shall be now: their memory is free again."""
        for reader, work, _ in self._sent.pop(name, ()):
            self.wait({reader: work})

    def finish(self) -> None:
        """Wait until all that was sent is taken."""
        for name in list(self._sent):
            self.taken(name)


class Arrival:
    """A parcel on its way to this process: taken in from when this is made, read by `open`.

    random   bytes of the state of random numbers that come with it
    """

    def __init__(self, post: Post, form: Form, dsts: Sequence[Layout | None], route: Route, random: int) -> None:
        self.post, self.form, self.dsts, self.route, self.random = post, form, dsts, route, random
        self.there = [k for k, part in enumerate(form) if part is not None]
        ways = [_way(form[k].spec, dsts[k]) for k in self.there]
        self.letter = Letter([Boxed(form[k].spec.on(w.leaves), {}, w.lands) for k, w in zip(self.there, ways)])
        sizes = self.letter.sizes()
        if random:
            sizes[route.guide] = sizes.get(route.guide, 0) + random
        self.buffers = {peer: torch.empty(n, dtype=torch.uint8) for peer, n in sizes.items()}
        self.works = {peer: comm.post(data, peer, receive=True) for peer, data in self.buffers.items()}

    def open(self) -> Parcel:
        """Wait for it, and bring its tensors to where they are wanted."""
        self.post.wait(self.works)
        state = None
        if self.random:
            whole = self.buffers[self.route.guide]
            state, self.buffers[self.route.guide] = whole[:self.random], whole[self.random:]
        device = comm.world().device(self.route.readers.type, comm.rank())
        arrived = self.letter.read({peer: data.to(device) for peer, data in self.buffers.items()})
        landed = [Boxed(self.form[k].spec.on(item.dst), held, self.dsts[k])
                  for k, item, held in zip(self.there, self.letter.items, arrived)]
        tensors: list[Any] = [None] * len(self.form)
        for k, held in zip(self.there, box(landed, _BOXING) if landed else []):
            tensors[k] = GlobalTensor.wrap(self.form[k].spec.on(self.dsts[k]), held)
        return Parcel(tuple(tensors), self.form, state)


def text(form: Form) -> str:
    """`[4, 8] float32, no tensor`."""
    return ", ".join("no tensor" if part is None else f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}"
                     for part in form)
