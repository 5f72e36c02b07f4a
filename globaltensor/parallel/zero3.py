"""Parameters that lie split, gathered a layer at a time, one layer ahead, and let go of when the layer is done: ZeRO 3.

The layers are the items of a model's lists of modules (nn.ModuleList, nn.Sequential), in the order in which they run:

    forward    before layer i    what is missing of layers i and i + 1 is gathered, all of it in one move
               after layer i     its parameters are split again: what was gathered is let go of
    backward   before layer i    the same with layers i and i - 1; layer i + 1 is done, and let go of

Autograd keeps the gathered tensors for backward, but not their memory: between the two they are empty shells, which
backward fills again. Gradients of what was gathered are pending sums, and stay so until they are read.
Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""
from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.layouts.layout import Layout, spec
from globaltensor.layouts.sbp import broadcast
from globaltensor.parallel.parameter_swap import swap_in, swap_out
from globaltensor.runtime.torch_internals import call_after_backward, tree_flatten
from globaltensor.tensors.global_tensor import GlobalTensor


class ShardedLayers:
    """The layers of a model whose parameters are split along an axis. Made after the parameters; hooks do the rest."""

    def __init__(self, model: nn.Module, axis: str) -> None:
        lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        found = [ShardedLayer(item, axis) for items in lists for item in items]
        inner = {id(m) for layer in found for m in layer.module.modules() if m is not layer.module}
        self.layers = [layer for layer in found if layer.slots and id(layer.module) not in inner]
        self.turn = self.last = 0                    # which forward pass it is, and the layer that ran last
        for i, layer in enumerate(self.layers):
            layer.module.register_forward_pre_hook(lambda module, args, i=i: self._before(i))
            layer.module.register_forward_hook(lambda module, args, out, i=i: self._after(i, out), always_call=True)

    def _before(self, i: int) -> None:
        self.turn, self.last = self.turn + (i <= self.last), i
        unshard(self.layers[i:i + 2])
        self.layers[i].take_up(self.turn)

    def _after(self, i: int, out: Any) -> None:
        turn, shells = self.turn, self.layers[i].lay_down()
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and t.requires_grad:            # who waits for backward holds on to the shells
                t.register_hook(lambda grad, shells=shells: self._backward(i, turn))
        self.layers[i].let_go()

    def _backward(self, i: int, turn: int) -> None:
        if i + 1 < len(self.layers):
            self.layers[i + 1].done(turn)
        unshard(self.layers[max(i - 1, 0):i + 1][::-1])
        if i == 0:
            call_after_backward(lambda: self.layers[0].done(turn))


class SavedStorages(list[dict[int, Tensor]]):
    """rank -> shard, per parameter, of one forward pass: empty but while they are used."""

    def fill(self, shards: list[dict[int, Tensor]] | None) -> None:
        for k, shell in enumerate(self):
            for rank, t in shell.items():
                t.set_(torch.empty(0, dtype=t.dtype, device=t.device) if shards is None else  # type: ignore[call-overload]
                       shards[k][rank])              # torch's types do not know that the source may be a tensor


class ShardedLayer:
    """One layer: where its split parameters stand, and what is gathered of them now."""

    def __init__(self, module: nn.Module, axis: str) -> None:
        self.module = module
        self.slots: list[tuple[nn.Module, str, GlobalTensor]] = []
        self.wholes: list[Layout] = []
        for owner in module.modules():
            parameters: Mapping[str, Tensor | None] = owner._parameters
            for key, p in parameters.items():
                if isinstance(p, GlobalTensor) and (whole := _whole(p, axis)) is not None:
                    self.slots.append((owner, key, p))
                    self.wholes.append(whole)
        self.now: list[dict[int, Tensor]] | None = None                  # rank -> shard, per parameter
        self.versions: list[int] = []                # of the parameters, when that was
        self.shells: weakref.WeakValueDictionary[int, SavedStorages] = weakref.WeakValueDictionary()
        self.own: SavedStorages | None = None              # while it works

    def missing(self) -> bool:
        return self.now is None or self.versions != [p._version for _, _, p in self.slots]

    def arrive(self, shards: list[dict[int, Tensor]]) -> None:
        self.now, self.versions = shards, [p._version for _, _, p in self.slots]
        for shells in self.shells.values():
            shells.fill(shards)

    def take_up(self, turn: int) -> None:
        """While the layer works, what was gathered stands before its parameters."""
        assert self.now is not None                  # it has arrived
        self.own = SavedStorages({rank: t.detach() for rank, t in shard.items()} for shard in self.now)
        self.shells[turn] = self.own
        for (owner, key, p), whole, shell in zip(self.slots, self.wholes, self.own):
            swap_in(owner, key, _Gathered.apply(p, whole, shell))

    def lay_down(self) -> SavedStorages | None:
        for owner, key, _ in self.slots:
            swap_out(owner, key)
        own, self.own = self.own, None
        return own

    def let_go(self) -> None:
        """Free what was gathered; shells stay, empty."""
        self.now = None
        for shells in self.shells.values():
            shells.fill(None)

    def done(self, turn: int) -> None:
        """Backward of a pass is through."""
        self.let_go()
        self.shells.pop(turn, None)


def unshard(layers: list[ShardedLayer]) -> None:
    """What is missing of these layers' parameters, in one move."""
    missing = [layer for layer in layers if layer.missing()]
    items = [Move(p.spec, p.shards, whole) for layer in missing for (_, _, p), whole in zip(layer.slots, layer.wholes)]
    found = iter(move_shards(items, "zero"))
    for layer in missing:
        layer.arrive([next(found) for _ in layer.slots])


def _whole(p: Any, axis: str) -> Layout | None:
    """The parameter's layout, gathered along the axis; None where it is not split along it."""
    names = p.placement.names
    if axis not in names or not p.sbp[names.index(axis)].is_split:
        return None
    return p.spec.layout.along({axis: broadcast})


class _Gathered(torch.autograd.Function):
    """A parameter as it was gathered. Its gradient is that of the parameter, however it lies."""

    @staticmethod
    def forward(ctx: Any, p: Any, whole: Layout, shards: dict[int, Tensor]) -> Any:
        return GlobalTensor.wrap(spec(whole, p.spec.shape, None, p.spec.dtype), shards)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        return grad, None, None
