"""Weights that each rank works with by itself: plain while their module runs, and learning from the mean of the ranks.

torch's fully_shard gathers a module's parameters, and lets each rank run the module on what it has, as if it were
alone: what goes in and what comes out is the rank's own, whatever it is. So the parameters that ZeRO 3 has gathered for
a layer are handed to the module as plain tensors. The gradient of one of them is the rank's; divided by the number of
ranks it is a term of the parameter's, which is a pending sum.

Autograd saves plain tensors, and views of them, as they are: so they have memory of their own, which is emptied behind
the layer and filled again for its backward pass. There the module has them once more, as parts of it may run again.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from globaltensor.dtensor.api import on_mesh
from globaltensor.dtensor.conversion import wrap_part
from globaltensor.dtensor.fsdp_module import Sharding
from globaltensor.layouts.layout import Layout, Shards, layout
from globaltensor.layouts.sbp import partial_sum
from globaltensor.parallel.saved_storages import SavedStorages
from globaltensor.parallel.zero3 import ShardedLayer, ShardedLayers, is_at, outputs_in, unshard
from globaltensor.runtime import lineage
from globaltensor.runtime.torch_internals import uncounted_writes
from globaltensor.runtime.world import world
from globaltensor.tensors.full_value import plain_gradient
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tensors.parameter_swap import Slot
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import api_boundary


class OwnCopy(torch.autograd.Function):
    """A parameter as this rank has gathered it, plain, in its memory. To autograd it must not be a view: a write would
    count as one to the copies of other passes. Its gradient is the mean of those of all ranks' copies: their sum by a
    divisor, which is their number."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, gathered: Layout, shards: Shards, divisor: float) -> Tensor:
        ctx.of, ctx.dtype, ctx.divisor = gathered, x.dtype, divisor
        return shards[world().rank].data

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[GlobalTensor, None, None, None]:
        term = plain_gradient(grad).to(ctx.dtype)
        return lineage.begin_lineage(_MeanOfRanks.apply(term, ctx.of, ctx.divisor)), None, None, None


class _MeanOfRanks(torch.autograd.Function):
    """The mean of what each rank has, as a pending sum. Each rank's loss counts as one loss, so this is to gradients of
    gradients what the copy is to gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, of: Layout, divisor: float) -> GlobalTensor:
        ctx.of, ctx.divisor = of, divisor
        terms = layout(of.placement, (partial_sum,) * len(of.sbp))
        return wrap_part(t.detach() / divisor, terms, tuple(t.shape), False)

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        n = len(ctx.of.placement.flat)
        gathered = to_layout(grad if ctx.divisor == n else grad * (n / ctx.divisor), ctx.of)
        return OwnCopy.apply(gathered, ctx.of, gathered.shards, n), None, None


class OwnStorages(SavedStorages):
    """Memory of plain tensors, copied from what was gathered."""

    def __init__(self, unsharded: Sequence[Shards], gather: Callable[[], None]) -> None:
        super().__init__([{rank: t.clone() for rank, t in shards.items()} for shards in unsharded], gather)
        self._sizes = [{rank: t.untyped_storage().nbytes() for rank, t in shards.items()} for shards in self]

    def empty_later(self, parameter: Any, shards: Shards, of: GlobalTensor) -> None:
        self._parameters.append((weakref.ref(parameter), {world().rank: parameter.detach()}, of))

    def fill(self, unsharded: list[Shards] | None) -> None:
        for k, shards in enumerate(self):
            for rank, t in shards.items():
                source = None if unsharded is None else unsharded[k][rank]
                if source is not None and source.dtype != t.dtype:
                    continue                         # the model has another one since that forward pass
                t.untyped_storage().resize_(0 if source is None else self._sizes[k][rank])
                if source is not None:
                    with torch.no_grad(), uncounted_writes((t,)):
                        t.copy_(source)
        self.is_empty = unsharded is None
        if unsharded is not None:
            self.pass_writes_on()

    def holds(self, t: Tensor) -> bool:
        """Does a tensor lie in this memory?"""
        at = t.untyped_storage()._cdata
        return any(own.untyped_storage()._cdata == at for shards in self for own in shards.values())

    def _note_write(self, parameter: Any, shards: Shards) -> None:
        for t in shards.values():                    # which autograd counts as one with what it has saved
            increment_version(t)


class OwnWeight:
    """A plain tensor in all places of a parameter, until `end`."""

    def __init__(self, slots: Sequence[Slot], parameter: GlobalTensor, own: Any) -> None:
        self._slots, self._parameter, self._own = slots, parameter, own
        for module, key in slots:
            module._parameters[key] = own

    def end(self) -> None:
        for module, key in self._slots:
            if module._parameters.get(key) is self._own:         # the module may have been given another one
                module._parameters[key] = self._parameter        # type: ignore[assignment]  # a Parameter still


class OwnLayer(ShardedLayer):
    """The parameters on a mesh, split or not, of modules in one: plain while it runs, forward or backward."""

    def __init__(self, module: nn.Module, sharding: Sharding, owners: Sequence[nn.Module]) -> None:
        super().__init__(module, sharding.mesh.names[-1], owners=owners)
        self.sharding, self.dtype = sharding, sharding.dtype
        self.again: list[OwnWeight] = []             # those that are in their places in backward
        self._networks = [m for m in owners if isinstance(m, nn.RNNBase)]
        self._storages_again: SavedStorages | None = None

    def unsharded_layout(self, p: GlobalTensor, axis: str) -> Layout | None:
        if not on_mesh(p):
            return None
        return super().unsharded_layout(p, axis) or p.spec.layout

    def swap_in_unsharded(self, forward_pass: int, gather: Callable[[], None]) -> None:
        self.in_use = self._storages(gather)
        self.saved[forward_pass], self.forward_pass = self.in_use, forward_pass
        self.swapped = self._put_in_place(self.in_use)

    def swap_out_unsharded(self) -> SavedStorages | None:
        storages = super().swap_out_unsharded()
        self._list_again()
        return storages

    def swap_in_again(self, forward_pass: int) -> None:
        """In backward: parts of the module may run again, whose inputs alone were saved."""
        if not self.again:
            storages = self.saved.get(forward_pass)
            if storages is None:
                unshard(self)
                storages = self._storages(lambda: None)
            self._storages_again, self.again = storages, self._put_in_place(storages)

    def end_again(self) -> None:
        for weight in self.again:
            weight.end()
        self.again, self._storages_again = [], None
        self._list_again()

    def finish_backward(self) -> None:
        self.end_again()
        super().finish_backward()

    def _storages(self, gather: Callable[[], None]) -> OwnStorages:
        assert self.unsharded is not None            # `unshard` came before
        with torch.inference_mode(False), torch.no_grad():
            return OwnStorages(self.unsharded, gather)

    def _put_in_place(self, storages: SavedStorages) -> list[Any]:
        swapped = []
        for (p, slots), unsharded, shards in zip(self.parameters, self.layouts, storages):
            if places := [slot for slot in slots if is_at(slot, p)]:
                with torch.inference_mode(False), torch.enable_grad():           # it learns, as a parameter does
                    own = OwnCopy.apply(p, unsharded, shards, self.sharding.divisor or len(unsharded.placement.flat))
                storages.empty_later(own, shards, p)
                swapped.append(OwnWeight(places, p, own))
        self._list_again()
        return swapped

    def _list_again(self) -> None:
        """torch's RNNs have a list of their weights."""
        for m in self._networks:
            m._flat_weights = [m._parameters.get(name) for name in m._flat_weights_names]


class OwnLayers(ShardedLayers):
    """Modules that fully_shard was called for, within one that is not resharded behind its forward pass."""

    def __init__(self, layers: Sequence[OwnLayer], outermost: OwnLayer) -> None:
        super().__init__([layer for layer in layers if layer.parameters], first=True)
        self.outermost = outermost
        self.all = [outermost, *layers]

    def enter(self) -> None:
        self._end_again()                            # of a backward pass that raised
        unshard(self.outermost)
        self.outermost.swap_in_unsharded(self.outermost.forward_pass + 1, partial(unshard, self.outermost))

    def leave(self, out: Any) -> None:
        forward_pass, storages = self.outermost.forward_pass, self.outermost.swap_out_unsharded()
        self.outermost.unsharded = None              # freed with what autograd has saved of it
        for t in outputs_in(out):
            if t.grad_fn is not None:                # who waits for backward keeps the storages alive
                t.register_hook(api_boundary(
                    lambda grad, storages=storages: self._outermost_again(forward_pass)))

    def _after_forward(self, layer: ShardedLayer, out: Any) -> None:
        outputs, storages = [*outputs_in(out)], layer.in_use
        assert isinstance(layer, OwnLayer) and isinstance(storages, OwnStorages)
        if not any(t.grad_fn is not None for t in outputs) or any(map(storages.holds, outputs)):
            layer.saved.pop(layer.forward_pass, None)            # nobody waits for backward, or the memory goes out
        super()._after_forward(layer, out)

    def _before_backward(self, layer: ShardedLayer, forward_pass: int) -> None:
        super()._before_backward(layer, forward_pass)
        assert isinstance(layer, OwnLayer)
        layer.swap_in_again(forward_pass)

    def _outermost_again(self, forward_pass: int) -> None:
        for storages in self.outermost.saved.values():
            storages.pass_writes_on()
        if not self.outermost.again:
            self._expect_end(self.outermost, forward_pass)
            self.outermost.swap_in_again(forward_pass)

    def _expect_end(self, layer: ShardedLayer, forward_pass: int) -> None:
        before = self.backward_end()
        super()._expect_end(layer, forward_pass)
        if before is None:                           # also one that raises comes to its end
            weakref.finalize(self.backward_end(), self._end_again).atexit = False

    def _end_backward(self, kept: bool) -> None:
        super()._end_backward(kept)
        self._end_again()

    def _end_again(self) -> None:
        for layer in self.all:
            layer.end_again()
