"""Sharded parameters, gathered (unsharded) a layer at a time, one layer ahead, and freed behind it: ZeRO 3.

The layers are the items of a model's lists of modules (nn.ModuleList, nn.ModuleDict, nn.Sequential), and beside these
the modules that hold no others, such as the last norm and the head; but no embedding, of which backward needs nothing.
They are expected in the order in which they ran before, and at first in that in which the model holds them:

    forward    before layer i    what is missing of layers i and i + 1 is gathered, all of it in one move; but where a
                                 link between processes is waited for, layer i + 1 is gathered while layer i computes,
                                 and layer i + 2 with it if i + 1 is small, such as a norm, and so on
               after layer i     it is resharded: what was gathered is freed
    backward   before layer i    the same with layers i and i - 1, also before it runs again, where activations are
                                 recomputed; layer i + 1 is done, and resharded

Autograd saves the gathered tensors for backward, but not their memory: between the two their storages are empty, and
backward fills them again. So does whoever else reads one behind its layer: a layer may return a parameter of its own,
and a program may keep one. Gradients of what was gathered are pending sums, and stay so until they are read.
Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277.

Offloaded parameters are global tensors on the host. What is missing of a layer is copied to its devices first, and a
gradient is reduced at once, as the host takes each rank's part alone.
"""
from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from globaltensor.boxings.redistribute import (
    BegunBoxing,
    Move,
    finish_boxings,
    in_layout,
    link_seconds,
    move_shards,
)
from globaltensor.layouts.layout import Layout, layout
from globaltensor.layouts.sbp import broadcast
from globaltensor.parallel.model_layers import layers_of
from globaltensor.parallel.offload import on_host
from globaltensor.parallel.saved_storages import SavedStorages
from globaltensor.runtime.memory_writes import writes_of
from globaltensor.runtime.torch_internals import (
    backward_sequence_number,
    call_after_backward,
    end_graph,
    graph_is_kept,
    in_fake_mode,
    tree_flatten,
)
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tensors.parameter_swap import Slot, SwappedIn, convert
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import api_boundary


class ShardedLayers:
    """Layers whose parameters are split along an axis, in the order in which they usually run; hooks do the rest.

    first   whether their hooks run before those that are there already
    """

    def __init__(self, layers: Sequence[ShardedLayer], first: bool = False) -> None:
        self.layers = layers
        self.forward_pass = 0                        # its number
        self.ran: list[ShardedLayer] = []            # in it, in their order
        self.in_backward: set[tuple[ShardedLayer, int]] = set()     # layers of forward passes, until its end
        self.backward_end: Callable[[], Callable[[], None] | None] = lambda: None
        for before, after in pairwise(self.layers):
            before.after, after.before = [after], [before]
        for layer in self.layers:
            layer.module.register_forward_pre_hook(
                api_boundary(lambda module, args, layer=layer: self._before_forward(layer) if layer.stands_in(module)
                             else None), prepend=first)
            layer.module.register_forward_hook(
                api_boundary(lambda module, args, out, layer=layer: self._after_forward(layer, out) if layer.in_use
                             else None), always_call=True)

    @staticmethod
    def of(model: nn.Module, axis: str, modules: Sequence[nn.Module] = (),
           without: Collection[int] = ()) -> ShardedLayers:
        """Those of a model, but for parameters of these ids. Made after the parameters.

        modules   the layers; default: the model's (`layers_of`)
        """
        layers = [ShardedLayer(m, axis, without) for m in modules or dict.fromkeys(m for _, m in layers_of(model))]
        inner = {id(m) for layer in layers for m in layer.module.modules() if m is not layer.module}
        return ShardedLayers([layer for layer in layers if layer.parameters and id(layer.module) not in inner])

    def offload(self, optimizer: torch.optim.Optimizer, folder: str | None) -> None:
        """Keep on the host those that the optimizer steps themselves: of 16 bits it steps others, in their place."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for layer in self.layers:
            for p, _ in layer.parameters:
                if id(p) in stepped and p.placement.type != "cpu":
                    convert(p, partial(on_host, folder=folder, files=layer.files))
        optimizer.register_step_post_hook(lambda *_: self._drop_pages())

    def _drop_pages(self) -> None:
        for layer in self.layers:
            layer.drop_pages()

    def _before_forward(self, layer: ShardedLayer) -> None:
        end_graph("ZeRO 3 gathers a layer's parameters before it runs and frees them behind it, which is not an op of "
                  "a graph: compile without fullgraph=True, each layer by itself, or take gt.zero(..., stage=2)")
        if _in_backward():                           # it runs again, and the layer before it comes next
            self.forward_pass += 1
            self._expect_end(layer, self.forward_pass)
            unshard(layer, _coming(layer, "before"))
        else:
            self._note_order(layer)
            unshard(layer, _coming(layer, "after"))
        layer.swap_in_unsharded(self.forward_pass, partial(self._gather_again, layer, self.forward_pass))

    def _gather_again(self, layer: ShardedLayer, forward_pass: int) -> None:
        """Someone reads one of its parameters when it is done. Nothing is freed for it: an op may be at work."""
        if not _in_backward():
            unshard(layer)
            return
        unshard(layer, _coming(layer, "before"))
        self._expect_another_pass(layer, forward_pass)

    def _note_order(self, layer: ShardedLayer) -> None:
        if layer in self.ran:                        # a new pass
            self.ran[-1].after = []
            self.forward_pass, self.ran = self.forward_pass + 1, []
        layer.before = self.ran[-1:]
        for last in layer.before:
            last.after = [layer]
        self.ran.append(layer)

    def _after_forward(self, layer: ShardedLayer, out: Any) -> None:
        forward_pass, storages = layer.forward_pass, layer.swap_out_unsharded()
        learning = [t for t in outputs_in(out) if t.grad_fn is not None]
        layer.awaits_backward = bool(learning) or not torch.is_grad_enabled()     # it may run again, with gradients
        for t in learning:                           # who waits for backward keeps the storages alive
            t.register_hook(api_boundary(
                lambda grad, storages=storages: self._before_backward(layer, forward_pass)))
        if not _in_backward():
            layer.reshard()

    def _before_backward(self, layer: ShardedLayer, forward_pass: int) -> None:
        for done in layer.after:                     # or not, where layers ran in another order: then it comes again
            done.finish_backward()
        unshard(layer, _coming(layer, "before"))
        self._expect_another_pass(layer, forward_pass)

    def _expect_another_pass(self, layer: ShardedLayer, forward_pass: int) -> None:
        if torch.is_grad_enabled() and forward_pass in layer.saved:
            layer.saved[forward_pass].stay = True
        self._expect_end(layer, forward_pass)

    def _expect_end(self, layer: ShardedLayer, forward_pass: int) -> None:
        """Layers may run in any order: the end of backward finishes those that no other one does."""
        if self.backward_end() is None:              # one that raised did not come to its end, which is freed with it
            self.in_backward.clear()
            end = partial(self._end_backward, graph_is_kept())
            call_after_backward(end)
            self.backward_end = weakref.ref(end)
        self.in_backward.add((layer, forward_pass))

    def _end_backward(self, kept: bool) -> None:
        """`kept`: it may be gone through once more."""
        for layer, forward_pass in self.in_backward:
            if not kept and forward_pass in layer.saved:
                layer.saved[forward_pass].stay = False
        self.backward_end = lambda: None
        for layer in self.layers:
            layer.finish_backward()


def outputs_in(out: Any) -> Iterator[Tensor]:
    """Those that a layer returns. Of an object, such as a dataclass or a distribution, its attributes."""
    for leaf in tree_flatten(out)[0]:
        inner = [] if isinstance(leaf, Tensor) else tree_flatten(getattr(leaf, "__dict__", {}))[0]
        yield from (t for t in (leaf, *inner) if isinstance(t, Tensor))


def _in_backward() -> bool:
    return backward_sequence_number() is not None


class ShardedLayer:
    """One layer: where its split parameters stand, but for those without, and what is gathered of them now. Of the
    modules in it, those that own parameters of it may be told."""

    def __init__(self, module: nn.Module, axis: str, without: Collection[int] = (),
                 owners: Iterable[nn.Module] | None = None) -> None:
        self.module = module
        self.parameters: list[tuple[GlobalTensor, list[Slot]]] = []      # each once, and where it stands
        self.layouts: list[Layout] = []              # of the parameters, unsharded
        for owner in owners or module.modules():
            parameters: Mapping[str, Tensor | None] = owner._parameters
            for key, p in parameters.items():
                if id(p) in without:
                    continue
                places = next((slots for q, slots in self.parameters if q is p), None)
                if places is not None:               # the module has it several times
                    places.append((owner, key))
                elif isinstance(p, GlobalTensor) and (unsharded := self.unsharded_layout(p, axis)) is not None:
                    self.parameters.append((p, [(owner, key)]))
                    self.layouts.append(unsharded)
        self.dtype: torch.dtype | None = None        # in which the layer works, if that is not its parameters' own
        self.unsharded: list[dict[int, Tensor]] | None = None            # rank -> shard, per parameter
        self.writes: list[Any] = []                  # to the parameters, when that was gathered
        self.begun: BegunLayers | None = None        # what gathers it meanwhile
        self.saved: weakref.WeakValueDictionary[int, SavedStorages] = weakref.WeakValueDictionary()   # by forward pass
        self.in_use: SavedStorages | None = None     # while the layer works
        self.forward_pass = 0                        # in which it does
        self.swapped: list[SwappedIn] = []
        self.awaits_backward = True                  # did what came out of it? Not of frozen first layers
        self.files: list[mmap.mmap] = []             # in which offloaded parameters lie
        self.before: list[ShardedLayer] = []         # the one that ran before it, if any, and the one after
        self.after: list[ShardedLayer] = []

    def unsharded_layout(self, p: GlobalTensor, axis: str) -> Layout | None:
        """The parameter's layout, gathered along the axis; None where it is not split along it."""
        names = p.placement.names
        if axis not in names or not p.sbp[names.index(axis)].is_split:
            return None
        return p.spec.layout.along({axis: broadcast})

    def dtype_of(self, p: GlobalTensor) -> torch.dtype:
        """In which the layer works with it. Only floating-point numbers are cast."""
        return self.dtype if self.dtype is not None and p.is_floating_point() else p.dtype

    def is_sharded(self) -> bool:
        """Is nothing gathered, or what was before someone wrote to a parameter?"""
        return self.unsharded is None or self.writes != self.writes_now()

    def stands_in(self, module: nn.Module) -> bool:
        """Would this module work with any of these parameters? Not where others have taken their places, for a call
        (torch.func.functional_call) or for good, and not if it is a copy of the layer."""
        return module is self.module and any(is_at(slot, p) for p, slots in self.parameters for slot in slots)

    def writes_now(self) -> list[Any]:
        """What stays equal until someone writes to its parameters."""
        return [writes_of(p) for p, _ in self.parameters]

    def gathering(self) -> list[Move]:
        """The moves that gather it."""
        return [_gathering(p, dst, self.dtype_of(p)) for (p, _), dst in zip(self.parameters, self.layouts)]

    def link(self) -> tuple[float, float] | None:
        """Latency and transfer of its gathering, in seconds, where that goes on while a core computes; else None."""
        links = [link_seconds(p.spec.cast(self.dtype_of(p)), dst, world().machine) if p.placement == dst.placement
                 else None for (p, _), dst in zip(self.parameters, self.layouts)]
        known = [link for link in links if link is not None]
        if len(known) < len(links):
            return None
        return max(latency for latency, _ in known), sum(transfer for _, transfer in known)

    def finish(self) -> None:
        """Wait for what was begun."""
        if self.begun is not None:
            self.begun.finish()

    def set_unsharded(self, unsharded: list[dict[int, Tensor]]) -> None:
        self.unsharded, self.writes = unsharded, self.writes_now()
        for storages in self.saved.values():
            storages.fill(unsharded)

    def drop_pages(self) -> None:
        """Of the files nothing stays resident."""
        for pages in self.files:
            pages.madvise(mmap.MADV_DONTNEED)

    def swap_in_unsharded(self, forward_pass: int, gather: Callable[[], None]) -> None:
        """Let the layer work with what was gathered. Autograd saves views of it whose memory can be freed."""
        assert self.unsharded is not None            # `unshard` came before
        self.in_use = SavedStorages(self.unsharded, gather)
        self.saved[forward_pass], self.forward_pass = self.in_use, forward_pass
        for (p, slots), unsharded, shards in zip(self.parameters, self.layouts, self.in_use):
            if places := [slot for slot in slots if is_at(slot, p)]:
                with torch.enable_grad():            # it learns as a parameter does, of which no_grad makes no other
                    gathered = UnshardedParameter.apply(p, unsharded, shards, self.dtype_of(p))
                self.in_use.empty_later(gathered, shards, p)
                self.swapped.append(SwappedIn(places, p, gathered))

    def swap_out_unsharded(self) -> SavedStorages | None:
        for parameter in self.swapped:
            parameter.end()
        self.swapped.clear()
        storages, self.in_use = self.in_use, None
        if storages is not None:
            storages.note_versions()
        return storages

    def reshard(self) -> None:
        """Free what was gathered. What autograd saved of it stays, without memory."""
        self.unsharded = None
        for storages in self.saved.values():
            if not storages.stay:
                storages.fill(None)

    def finish_backward(self) -> None:
        self.finish()                                # of one that did not run after all
        self.reshard()


def is_at(slot: Slot, p: Any) -> bool:
    """Does the module work with this parameter? Not if another is there now, or is swapped in: in a later stage of a
    pipeline that shares it a replica is, on the ranks of that stage."""
    owner, key = slot
    return vars(owner).get(key, owner._parameters.get(key)) is p


class BegunLayers:
    """Layers that are gathered in one move while a core computes."""

    def __init__(self, layers: Sequence[ShardedLayer]) -> None:
        self.begun_with = [(layer, layer.writes_now()) for layer in layers]
        self.boxing = BegunBoxing([move for layer in layers for move in layer.gathering()], "zero", check=True)
        for layer in layers:
            layer.begun = self

    def finish(self) -> None:
        """Wait for them. Those are dropped to whose parameters someone wrote meanwhile."""
        moved, _ = finish_boxings([self.boxing], [], "zero")
        shards = iter(moved)
        for layer, writes in self.begun_with:
            layer.begun, unsharded = None, [next(shards) for _ in layer.parameters]
            if writes == layer.writes_now():
                layer.set_unsharded(unsharded)


def unshard(now: ShardedLayer, ahead: Sequence[ShardedLayer] = ()) -> None:
    """Gather what is not gathered of a layer's parameters, and of those that come next: in one move; or, where a link
    is waited for, while this one computes."""
    with torch.inference_mode(False):                # what is gathered in it may stay for a pass with gradients
        now.finish()
        later = [layer for layer in ahead if layer.link() is not None and not in_fake_mode()]
        sharded = [layer for layer in (now, *ahead) if layer.is_sharded() and layer not in later]
        unsharded = iter(move_shards([move for layer in sharded for move in layer.gathering()], "zero"))
        for layer in sharded:
            layer.set_unsharded([next(unsharded) for _ in layer.parameters])
            layer.drop_pages()
        if begun := [layer for layer in later if layer.is_sharded() and layer.begun is None]:
            BegunLayers(begun)


def _coming(layer: ShardedLayer, side: Literal["before", "after"]) -> list[ShardedLayer]:
    """The layer that is expected next. Over a link several, until they take longer to be sent than a message to arrive:
    those that are small, such as a norm, hide nothing of the one behind them."""
    coming: list[ShardedLayer] = []
    transfer = 0.0
    following = getattr(layer, side)
    while following and following[0] not in (layer, *coming) and (side == "after" or following[0].awaits_backward):
        coming += following
        link = following[0].link()
        if link is None or (transfer := transfer + link[1]) >= link[0]:
            break
        following = getattr(following[0], side)
    return coming


def _gathering(p: GlobalTensor, dst: Layout, dtype: torch.dtype) -> Move:
    """The move of a parameter to this layout, in this dtype, from its devices, where it was copied to if it is on the
    host."""
    of, shards = p.spec, p.shards
    if p.placement != dst.placement:
        of = of.moved(layout(dst.placement, p.sbp))
        shards = {rank: t.detach().to(world().device(dst.placement.type, rank), non_blocking=True)
                  for rank, t in shards.items()}
    if dtype != p.dtype:
        of, shards = of.cast(dtype), {rank: t.detach().to(dtype) for rank, t in shards.items()}
    return Move(of, shards, dst, p.lineage)


class UnshardedParameter(torch.autograd.Function):
    """A parameter as it was gathered, in this dtype. Its gradient is the parameter's, in whatever layout: it is reduced
    when read, but now where that is on the host."""

    @staticmethod
    def forward(ctx: Any, p: Any, unsharded: Layout, shards: dict[int, Tensor], dtype: torch.dtype) -> Any:
        ctx.home, ctx.dtype = p.spec.layout, p.dtype
        return in_layout(p, unsharded, shards, dtype)

    @staticmethod
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
        home: Layout = ctx.home
        if grad.dtype != ctx.dtype:
            grad = grad.to(ctx.dtype)
        if grad.placement != home.placement:
            part = to_layout(grad, layout(grad.placement, home.sbp))
            grad = in_layout(part, home, {rank: shard.cpu() for rank, shard in part.shards.items()})
        return grad, None, None, None
