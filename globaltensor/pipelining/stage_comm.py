"""Transfers between stages: asynchronous sends of global tensors, whose receivers learn the shapes only once.

A boxing between two placements takes a few steps on the sender's placement, one that crosses, and a few on the
receiver's (split, send the parts, gather: so every link carries a share). The steps on either side are ordinary boxings
among the ranks of one stage. The step that crosses cannot be one: the two sides do not run it at the same time, as the
sender is at another micro-batch when the receiver gets to it. It is a message for each pair of ranks, with all tensors
of a bundle in one. Between two ranks messages are received in the order in which they are sent, which is what the
schedule was checked for.

    bundle    the tensors of an output, or their gradients, and the random state that the stage left behind
    meta      what the receiver must know to read it: layouts, shapes, dtypes. Sent in a message of its own before the
              first bundle of its kind (`key`), and remembered on both sides

Messages go from CPU to CPU. Where tensors lie on devices with an engine of torch's own, it carries them from the second
step on: by then both sides know which ranks of theirs meet, and connect them before the step. Of such a bundle a
message on the CPU comes nevertheless, with the random state or a single byte: by its tag the receiver knows which one
comes, and that its sender lives.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from globaltensor.boxings.p2p_boxing import P2PBoxing
from globaltensor.boxings.plan import plan
from globaltensor.boxings.redistribute import Move, move_shards, redistribute
from globaltensor.boxings.watch import note_messages
from globaltensor.errors import ShapeError
from globaltensor.layouts.layout import Layout, Shape, Spec, layout, replicated, sbp_text, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import remembered
from globaltensor.runtime.agreement import as_bytes, from_bytes
from globaltensor.runtime.codec import message
from globaltensor.runtime.p2p import DeviceChannels, P2PGroup, may_open_channels
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor

PREFETCHED = 2                                       # receives of a channel that a rank posts before their turn
_BOXING = "the pipeline"
_WORD = torch.zeros(1, dtype=torch.uint8, device="cpu")


@message
class TensorMeta(NamedTuple):
    """One tensor of a bundle, without its data."""

    layout: Layout
    shape: Shape
    dtype: torch.dtype
    needs_grad: bool

    @property
    def spec(self) -> Spec:
        return spec(self.layout, self.shape, None, self.dtype)


BundleMeta = tuple["TensorMeta | None", ...]         # None where there is no tensor: no gradient, or a stage's own None


Layouts = Sequence["Layout | None"]                  # of the tensors of a bundle


class ActivationBundle(NamedTuple):
    """What one stage passes to another for a micro-batch: activations forward, their gradients back."""

    tensors: tuple[Any, ...]                         # GlobalTensor or None
    meta: BundleMeta
    random: torch.Tensor | None                      # forward only: the random state that the stage left behind


def bundle(tensors: Sequence[Any], random: torch.Tensor | None = None) -> ActivationBundle:
    """These tensors, detached."""
    meta = tuple(None if t is None else TensorMeta(t.spec.layout, t.spec.shape, t.spec.dtype, t.requires_grad)
                 for t in tensors)
    return ActivationBundle(tuple(None if t is None else t.detach() for t in tensors), meta, random)


@remembered
def forward_layout(src: Layout, where: placement) -> Layout:
    """The layout of an output on the next stage: its sbp is kept along axes of the same name, or of the same position
    where axes have no names; along others, and where it was partial, it is broadcast."""
    if where.axis_names and src.placement.axis_names:
        dst = replicated(where).along(dict(zip(src.placement.axis_names, src.sbp)))
    else:
        dst = layout(where, src.sbp) if len(src.sbp) == where.ndim else replicated(where)
    return dst.without_partials


def backward_layout(src: Layout) -> Layout:
    """The layout of the gradient of a tensor of layout `src`, on the same placement."""
    return src.dual.without_partials


def move_bundle(bundle: ActivationBundle, dsts: Layouts) -> ActivationBundle:
    """The same on another placement, where one process drives all ranks of both, or both are on the same ranks."""
    present = [k for k, t in enumerate(bundle.tensors) if t is not None]
    moved = redistribute([bundle.tensors[k] for k in present], _layouts_at(dsts, present), _BOXING) if present else []
    return bundle._replace(tensors=_with_gaps(len(bundle.tensors), present, moved))


def _layouts_at(layouts: Layouts, present: Sequence[int]) -> list[Layout]:
    """The layouts of the tensors that are there."""
    return [own for own in (layouts[k] for k in present) if own is not None]


def _with_gaps(length: int, present: Sequence[int], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """These tensors at the indices `present` of a tuple of Nones."""
    row: list[Any] = [None] * length
    for k, t in zip(present, tensors):
        row[k] = t
    return tuple(row)


class StageLink(NamedTuple):
    """The placements between which a bundle travels. What is not part of a tensor (the meta, the random state) is sent
    to each receiver by one of the senders, its lead."""

    senders: placement
    receivers: placement

    @property
    def lead(self) -> int:
        """The lead of this process, a receiver."""
        return self.senders.flat[self.receivers.flat.index(world().rank) % len(self.senders.flat)]

    @property
    def followers(self) -> list[int]:
        """The receivers whose lead is this process, a sender."""
        n = len(self.senders.flat)
        return [r for i, r in enumerate(self.receivers.flat) if self.senders.flat[i % n] == world().rank]


class TransferPlan:
    """How all bundles of one kind go over a link; worked out once.

    The boxing of each tensor has three parts: among the senders to the layout in `sent`, the crossing to the layout in
    `received`, then among the receivers to the layout in `dsts`.
    """

    def __init__(self, meta: BundleMeta, dsts: Layouts, link: StageLink) -> None:
        self.meta, self.link = meta, link
        self.present = [k for k, part in enumerate(meta) if part is not None]
        self.specs, self.dsts = [part.spec for part in meta if part is not None], _layouts_at(dsts, self.present)
        crossings = [_crossing(own, dst) for own, dst in zip(self.specs, self.dsts)]
        self.sent, self.received = [src for src, _ in crossings], [dst for _, dst in crossings]
        self.message = P2PBoxing([own.on(src) for own, src in zip(self.specs, self.sent)], self.received)
        self.sizes = self.message.incoming_bytes()   # sender -> bytes that this process receives from it
        self.followers = link.followers if world().rank in link.senders.coords else ()
        self.lead = link.lead if world().rank in link.receivers.coords else -1
        self.by_engine = False
        self.may_go_by_engine = link.senders.type == link.receivers.type and may_open_channels(link.senders.type)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The ranks between which its tensors go, of which this process is one: sender and receiver."""
        me = world().rank
        return [*((me, receiver) for program in self.message.programs for receiver in program.outgoing),
                *((sender, me) for sender in self.sizes)]

    def pack(self, bundle: ActivationBundle) -> dict[int, list[torch.Tensor]]:
        """What each receiver gets of a bundle's tensors, in flat bytes."""
        tensors = [bundle.tensors[k] for k in self.present]
        ready = redistribute(tensors, self.sent, _BOXING) if tensors else []
        return self.message.pack([t.shards for t in ready])

    def on_cpu(self, pieces: Mapping[int, list[torch.Tensor]], random: torch.Tensor | None
               ) -> dict[int, list[torch.Tensor]]:
        """The messages on the CPU that go with these pieces, or are them."""
        sent = {receiver: [_WORD] if self.by_engine else [t.cpu() for t in tensors]
                for receiver, tensors in pieces.items()}
        if random is not None:
            for receiver in self.followers:
                sent[receiver] = [random] if self.by_engine else [random, *sent.get(receiver, ())]
        return sent

    def sizes_on_cpu(self, random: int) -> dict[int, int]:
        """Of the messages on the CPU that this process receives of a bundle, with a random state of so many bytes."""
        sizes = dict.fromkeys(self.sizes, 1) if self.by_engine else dict(self.sizes)
        if random:                                   # the lead sends it in front of its parts of the tensors
            sizes[self.lead] = random + (0 if self.by_engine else sizes.get(self.lead, 0))
        return sizes

    def unpack(self, received: dict[int, torch.Tensor]) -> tuple[Any, ...]:
        """The tensors, in the layouts wanted, from the bytes received."""
        device = world().device(self.link.receivers.type, world().rank)
        arrived = self.message.unpack({peer: data.to(device) for peer, data in received.items()})
        items = [Move(own.on(src), shards, dst)
                 for own, src, shards, dst in zip(self.specs, self.received, arrived, self.dsts)]
        tensors = [GlobalTensor.wrap(own.on(dst), shards)
                   for own, dst, shards in zip(self.specs, self.dsts, move_shards(items, _BOXING) if items else [])]
        return _with_gaps(len(self.meta), self.present, tensors)


def _crossing(of: Spec, dst: Layout) -> tuple[Layout, Layout]:
    """The layouts before and after the one step of a boxing that changes the placement."""
    steps = plan(of.layout, dst, of.shape, of.nbytes, world().machine).layouts
    at = next(k for k, step in enumerate(steps) if step.placement == dst.placement)
    return steps[at - 1], steps[at]


class StageComm:
    """Sends and receives of this process, for all stages and steps: transfer plans are kept from step to step."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.messages, self.channels = P2PGroup(ranks, ""), DeviceChannels()
        self.plans: dict[Hashable, TransferPlan] = {}
        self.steps = 0

    def begin_step(self) -> None:
        """Number the step; the number appears in errors. Channels are opened for what has come up in the step before,
        on both sides of a link."""
        self.steps += 1
        self.messages.what = f"step {self.steps} of a pipeline"
        new = [own for own in self.plans.values() if own.may_go_by_engine and not own.by_engine]
        for own in new:
            own.by_engine = True
        if pairs := {pair for own in new for pair in own.pairs}:
            self.channels.open(pairs, world().device(new[0].link.senders.type, world().rank))

    def free_sent(self, tag: Hashable) -> None:
        """What was sent with this tag has been received: its memory is free again."""
        self.messages.wait_sent(tag)
        self.channels.free_sent(tag)

    def flush(self) -> None:
        """Wait until all messages are received."""
        self.messages.flush()
        self.channels.free_all()

    def send(self, key: Hashable, bundle: ActivationBundle, dsts: Layouts, link: StageLink,
             tag: tuple[int, str, int]) -> None:
        """Send a bundle without waiting for its receivers. `tag` is the stage that takes it, "F" or "B" for a gradient,
        and the micro-batch.

        Raises ShapeError where its meta differs from that of earlier bundles of its kind.
        """
        transfer = self.plans.get(key)
        if transfer is None:
            transfer = self.plans[key] = TransferPlan(bundle.meta, dsts, link)
            for receiver in transfer.followers:
                self.messages.send([as_bytes(bundle.meta)], receiver, "meta", sized=False)
        elif transfer.meta != bundle.meta:
            raise _change_refused(bundle.meta, transfer.meta, *tag[:2])
        pieces = transfer.pack(bundle)
        for receiver, tensors in transfer.on_cpu(pieces, bundle.random).items():
            self.messages.send(tensors, receiver, tag)
        if transfer.by_engine:
            for receiver, tensors in pieces.items():
                self.channels.send(tensors, receiver, tag)

    def plan(self, key: Hashable, link: StageLink,
             dsts: Callable[[BundleMeta], Layouts]) -> TransferPlan:
        """For a kind of bundle that this process receives; its meta is received from the lead where it is not known."""
        if key not in self.plans:
            meta = from_bytes(self.messages.recv(link.lead, "meta")(), link.lead)
            self.plans[key] = TransferPlan(meta, dsts(meta), link)
        return self.plans[key]


class PendingReceive:
    """A bundle on its way to this process: its receives are posted when this is made, and completed by `wait`.

    random   bytes of the random state that come with it
    """

    def __init__(self, comm: StageComm, transfer: TransferPlan, random: int, tag: Hashable) -> None:
        self.transfer, self.random = transfer, random
        self.receives = {peer: comm.messages.recv(peer, tag, nbytes)
                         for peer, nbytes in transfer.sizes_on_cpu(random).items()}
        device = world().device(transfer.link.receivers.type, world().rank)
        self.on_devices = {peer: comm.channels.recv(peer, nbytes, device)
                           for peer, nbytes in transfer.sizes.items()} if transfer.by_engine else {}

    def wait(self) -> ActivationBundle:
        """The bundle, its tensors in the layouts wanted."""
        received = {peer: finish() for peer, finish in self.receives.items()}
        note_messages(self.transfer.sizes, world().rank)
        random = None
        if self.random:
            data = received[self.transfer.lead]
            random, received[self.transfer.lead] = data[:self.random], data[self.random:]
        if self.transfer.by_engine:
            received = {peer: finish() for peer, finish in self.on_devices.items()}
        return ActivationBundle(self.transfer.unpack(received), self.transfer.meta, random)


def _change_refused(meta: BundleMeta, before: BundleMeta, to: int, kind: str) -> ShapeError:
    why = f"{_in_full(meta)} instead of {_in_full(before)}"
    if kind == "F":
        return ShapeError(f"the outputs of stage {to - 1} differ from earlier ones for inputs of the same shapes", why,
                          "stages whose outputs follow from the shapes and dtypes of their inputs, from which of their "
                          "parameters learn, and from train() or eval()")
    return ShapeError(f"the gradients of what stage {to + 1} takes from stage {to} differ from earlier ones for inputs "
                      "of the same shapes", f"{why}; there is none of what a step does not use, and ranks know by the "
                      "shapes what comes", "a stage that uses the same inputs in each step: x + 0 * y where y is not "
                      "needed")


def describe(meta: BundleMeta) -> str:
    """`[4, 8] float32, no tensor`."""
    return ", ".join("no tensor" if part is None else f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}"
                     for part in meta)


def _in_full(meta: BundleMeta) -> str:
    """The same with all that a receiver must know: `[4, 8] float32 B with a gradient, [4] int64 B`."""
    return ", ".join(describe((part,)) + ("" if part is None else f" {sbp_text(part.layout.sbp)}" +
                                          " with a gradient" * part.needs_grad) for part in meta)
