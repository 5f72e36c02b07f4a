"""Equal blocks are captured once: 96 layers take little longer than one.

Members of a ModuleList, a ModuleDict or a Sequential are equal where their classes, sizes and settings are, all the
way down, and they are called with tensors of the same shapes. The first of them runs. In the place of each later one
stands a function of autograd that gives, forward and backward, tensors like those that the first gave. It is one node
in each direction, which refers to the block.

What is not compared is code that a member was given by hand, such as hooks: so members with hooks all run, and so do
those that take something else than tensors and numbers, such as a cache that grows. Where gradients are differentiated
themselves, all members run: what stands for a block has no gradients of gradients.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from globaltensor.planner.graph import Block, CaptureError, Ref
from globaltensor.planner.tracer import Tracer
from globaltensor.runtime.torch_internals import tree_flatten, tree_map_only, tree_unflatten
from globaltensor.tensors.global_tensor import GlobalTensor

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OF_THE_PLACE = {"layer_idx", "layer_index", "layer_id"}     # which member it is, as transformers' layers know


class DifferentiatedAgain(CaptureError):
    """A gradient through a member that did not run has to have a graph."""


@contextmanager
def repeating(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Inside, members of lists that are equal to one that ran are not run. Raises DifferentiatedAgain where they have
    to be."""
    names = {id(module): name for name, module in model.named_modules()}
    changed: list[nn.Module] = []
    blocks: dict[Any, _Known] = {}
    try:
        for several in model.modules():
            members = list(several.children()) if isinstance(several, LISTS) else []
            structures = [structure_of(member) for member in members]
            for member, structure in zip(members, structures):
                if structures.count(structure) > 1 and "forward" not in vars(member):
                    member.forward = _repeated_forward(member, structure, names[id(member)], tracer, blocks)
                    changed.append(member)
        yield
    finally:
        for member in changed:
            del member.forward


class _Known:
    """A block that ran, and what leaves it: tensors in a tree."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.outputs: list[Any] = []
        self.tree: Any = None


def structure_of(module: nn.Module) -> Any:
    """What equal modules have in common; None where something tells that they may differ."""
    parts = []
    for name, one in module.named_modules():
        if one._forward_hooks or one._forward_pre_hooks or one._backward_hooks:
            return object()                          # equal to no other
        settings = tuple((key, repr(value)) for key, value in sorted(vars(one).items())
                         if isinstance(value, (*_CONSTANTS, tuple)) and key not in _OF_THE_PLACE)
        tensors = tuple((key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in
                        (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)))
        parts.append((name, type(one), settings, tensors))
    return tuple(parts)


def _repeated_forward(member: nn.Module, structure: Any, path: str, tracer: Tracer, blocks: dict[Any, _Known]
                      ) -> Callable[..., Any]:
    forward = member.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        if tracer.block is not None or not all(isinstance(leaf, (*_CONSTANTS, torch.Tensor)) for leaf in leaves):
            return forward(*args, **kwargs)
        inputs = [t for t in (*leaves, *member.parameters(), *member.buffers()) if isinstance(t, torch.Tensor)]
        key = (structure, str(tree), tuple(
            (tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
        if key not in blocks:
            return _run_first(forward, path, tracer, blocks, key, inputs, args, kwargs)
        return _like_first(blocks[key], path, tracer, inputs)

    return call


def _run_first(forward: Callable[..., Any], path: str, tracer: Tracer, blocks: dict[Any, _Known], key: Any,
               inputs: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Run a member, between two functions of autograd that tell where its backward begins and ends."""
    number = len(tracer.graph.graph["blocks"])
    block = Block(path, [], [], [tracer.ref(t) for t in inputs], input_grads=[None] * len(inputs))
    tracer.graph.graph["blocks"][number], known = block, _Known(number)
    passed = _tensors_in((args, kwargs))
    entered = iter(_Enter.apply(tracer, number, *passed))
    args, kwargs = tree_map_only(torch.Tensor, lambda t: next(entered), (args, kwargs))
    for place, t in enumerate(inputs):
        if place >= len(passed) and t.requires_grad:           # a parameter, of which nobody else has a hook
            t.register_hook(partial(_note_input_grad, tracer, block, place))
    tracer.block = number
    try:
        result = forward(*args, **kwargs)
    finally:
        tracer.block = None
    known.outputs, known.tree = tree_flatten(result)
    if not all(isinstance(leaf, (*_CONSTANTS, torch.Tensor)) for leaf in known.outputs):
        return result                                # an object that is not known: the others run too
    blocks[key] = known
    left = _tensors_in(result)
    block.outputs = [tracer.ref(t) for t in left]
    gone = iter(_Leave.apply(tracer, number, *left))
    return tree_map_only(torch.Tensor, lambda t: next(gone), result)


def _note_input_grad(tracer: Tracer, block: Block, place: int, grad: Any) -> None:
    block.input_grads[place] = tracer.ref(grad)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def _alias(t: Any) -> Any:
    """Another tensor of the same value; a plain one needs no other."""
    return GlobalTensor.wrap(t.spec, t.shards) if isinstance(t, GlobalTensor) else t


class _Enter(torch.autograd.Function):
    """What a block takes, as it is; in backward, its end."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, number: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.tracer, ctx.number = tracer, number
        return tuple(map(_alias, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.tracer.block = None
        block = ctx.tracer.graph.graph["blocks"][ctx.number]
        block.input_grads[:len(grads)] = [None if g is None else ctx.tracer.ref(g) for g in grads]
        return (None, None, *grads)


class _Leave(torch.autograd.Function):
    """What a block gives, as it is; in backward, its beginning."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, number: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.tracer, ctx.number = tracer, number
        return tuple(map(_alias, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        block = ctx.tracer.graph.graph["blocks"][ctx.number]
        block.output_grads = [None if g is None else ctx.tracer.ref(g) for g in grads]
        ctx.tracer.block = ctx.number
        return (None, None, *grads)


def _like_first(known: _Known, path: str, tracer: Tracer, inputs: list[torch.Tensor]) -> Any:
    results = iter(_Repeated.apply(tracer, known, path, *inputs))
    return tree_unflatten([next(results) if isinstance(t, torch.Tensor) else t for t in known.outputs], known.tree)


class _Repeated(torch.autograd.Function):
    """A block that is equal to one that ran."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, known: _Known, path: str, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.tracer, ctx.number, ctx.path, ctx.inputs = tracer, known.number, path, inputs
        outputs = [tracer.like(t) for t in known.outputs if isinstance(t, torch.Tensor)]
        node = _add_repeat(tracer, known.number, path, "forward", [tracer.ref(t) for t in inputs], outputs)
        tracer.graph.graph["blocks"][known.number].repeats.append([node])
        ctx.nth = len(tracer.graph.graph["blocks"][known.number].repeats) - 1
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise DifferentiatedAgain(f"the gradients of {ctx.path} are differentiated", "it was not run",
                                      "capture(..., repeats=False)")
        tracer, needs = ctx.tracer, ctx.needs_input_grad[3:]
        grads_of_inputs = [tracer.like(t) if learns else None for t, learns in zip(ctx.inputs, needs)]
        node = _add_repeat(tracer, ctx.number, ctx.path, "backward",
                           [tracer.ref(g) for g in grads if g is not None], grads_of_inputs)
        tracer.graph.graph["blocks"][ctx.number].repeats[ctx.nth].append(node)
        return (None, None, None, *grads_of_inputs)


def _add_repeat(tracer: Tracer, number: int, path: str, phase: str, sources: list[Ref], outputs: list[Any]) -> int:
    node = tracer.add_node("repeat", outputs, module=path, phase=phase, args={"block": number})
    tracer.add_uses(node, sources)
    for k, t in enumerate(outputs):
        if t is not None:
            tracer.name_value(t, Ref(node, k))
    return node
