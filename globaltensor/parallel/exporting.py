"""A model on global tensors as an ordinary torch.export program of the shards that one process drives.

    program = gt.export_ranks(model, (ids,))         # every process calls it, and gets the program of its own rank
    torch.export.save(program, f"rank-{gt.rank()}.pt2")
    logits = program.module()(ids.to_local())        # takes this rank's parts, and gives its parts

The model runs once on fake shards, as torch.compile traces it (tensors/flatten.py): dispatch is done then, and what it
does with shards is the program: ops of torch, and boxings as `globaltensor::box`, in order. There is no global tensor
in it, and nothing to decide; but where it is loaded, `import globaltensor` must give the ops, and all ranks must run
theirs together.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from globaltensor.errors import ArgumentError, expect
from globaltensor.layouts.layout import Spec
from globaltensor.runtime.torch_internals import tree_flatten
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.materialize import named_tensors
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import api_boundary


class Parts(NamedTuple):
    """How many plain tensors stand for a tensor; of a global one its spec, and its ranks here."""

    number: int
    spec: Spec | None
    ranks: tuple[int, ...]


@api_boundary
def export_ranks(model: nn.Module, example: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """The model's forward in evaluation, as a program of torch.export for the ranks that this process drives.

    example   its inputs, of the layouts and sizes that the program is for; no values are read
    The program takes the shards of each global input in the place of the input (in a process of several ranks by
    rising rank), and returns the flat list of outputs likewise; pending sums are reduced first. Its parameters are the
    model's shards, by the model's names, behind which stands the rank where there are several. Collective, when it
    runs. Raises ArgumentError where nothing is global, or this process has no part of it.
    """
    expect(model, nn.Module, "gt.export_ranks of no module", "gt.export_ranks(model, (x,))")
    if not isinstance(example, tuple):
        raise ArgumentError(f"gt.export_ranks with a {type(example).__name__}", "a model may take several inputs",
                            "gt.export_ranks(model, (x,))")
    holder, names, held = _plain_parts(model)
    leaves, structure = tree_flatten(example)
    taken = [_standing_for(x) for x in leaves]
    if all(parts.spec is None for parts in (*held.values(), *taken)):
        raise ArgumentError("gt.export_ranks of a model and inputs that are plain", "what is exported are shards",
                            "gt.parallelize(model, placement) first, or torch.export.export(model, example)")
    if any(parts.spec is not None and not parts.ranks for parts in (*held.values(), *taken)):
        raise ArgumentError("gt.export_ranks in a process that has no part of the model", "it drives other ranks",
                            "a call by the processes of the placement")

    def forward(own: list[Tensor], *shards: Any) -> list[Tensor]:
        tensors = _put_together(held.values(), own)
        inputs = structure.unflatten(_put_together(taken, shards))
        known = dict(zip(held, tensors))
        out = torch.func.functional_call(model, {name: known[first] for name, first in names.items()}, inputs)
        return [part for y in tree_flatten(out)[0] if isinstance(y, Tensor) for part in _taken_apart(y)]

    modes = [(m, m.training) for m in model.modules()]
    inputs = [part for x in leaves for part in (_taken_apart(x) if isinstance(x, Tensor) else [x])]
    try:
        model.eval()
        with torch.no_grad():
            graph = make_fx(forward, tracing_mode="fake")(holder.all_shards(), *inputs)
    finally:
        for module, mode in modes:
            module.training = mode
    holder.traced_forward = graph
    return torch.export.export(holder, tuple(inputs), strict=False)


class ShardHolder(nn.Module):
    """The shards of a model as parameters and buffers of their own, and the graph that works with them."""

    traced_forward: Any

    def __init__(self) -> None:
        super().__init__()
        self.shard_places: list[tuple[nn.Module, str]] = []

    def put_shard(self, path: str, t: Tensor, is_parameter: bool) -> None:
        """Put a tensor where its name says."""
        owner: nn.Module = self
        *parents, key = path.split(".")
        for name in parents:
            if name not in dict(owner.named_children()):
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        if is_parameter:
            owner.register_parameter(key, nn.Parameter(t.detach(), t.is_floating_point() or t.is_complex()))
        else:
            owner.register_buffer(key, t.detach())
        self.shard_places.append((owner, key))

    def all_shards(self) -> list[Tensor]:
        return [getattr(owner, key) for owner, key in self.shard_places]

    def forward(self, *shards: Any) -> Any:
        return self.traced_forward(self.all_shards(), *shards)


def _plain_parts(model: nn.Module) -> tuple[ShardHolder, dict[str, str], dict[str, Parts]]:
    """The holder; the first name of each name's tensor; and by first names what stands for the tensors, in order."""
    holder, names, held = ShardHolder(), {}, {}
    first: dict[int, str] = {}
    for name, _, _, t, kind in named_tensors(model):
        names[name] = first.setdefault(id(t), name)
        if names[name] != name:
            continue                                 # a tied one
        parts = held[name] = _standing_for(t)
        for rank, part in zip(parts.ranks or (0,), _taken_apart(t)):
            holder.put_shard(f"{name}_{rank}" if parts.number > 1 else name, part, kind == "_parameters")
    return holder, names, held


def _standing_for(t: Any) -> Parts:
    if not isinstance(t, GlobalTensor):
        return Parts(1, None, ())
    own = t.spec if not t.spec.layout.partial else t.spec.on(t.spec.layout.without_partials)
    return Parts(len(t.shards), own, tuple(sorted(t.shards)))


def _taken_apart(t: Any) -> list[Tensor]:
    """The plain tensors that stand for a tensor, without pending sums."""
    if not isinstance(t, GlobalTensor):
        return [t]
    t = to_layout(t, t.spec.layout.without_partials)
    return [t.shards[rank] for rank in sorted(t.shards)]


def _put_together(parts: Any, plain: Any) -> list[Any]:
    """Tensors of these parts, from the plain ones that stand for them."""
    left, together = iter(plain), []
    for one in parts:
        some = [next(left) for _ in range(one.number)]
        together.append(some[0] if one.spec is None else GlobalTensor.wrap(one.spec, dict(zip(one.ranks, some))))
    return together
