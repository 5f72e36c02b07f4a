"""Looking on while a model runs on global tensors without memory, and noting every op as a node of a graph.

Tensors are told apart by their shards: these stay when autograd saves a value and hands another tensor of it out. A
backward op is assigned to its forward op by the number that autograd gives to each call.
"""
from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from globaltensor.errors import OURS, TORCH, where
from globaltensor.layouts.layout import Layout, replicated, spec
from globaltensor.layouts.placement import placement
from globaltensor.op_table.line import always_decomposed
from globaltensor.op_table.variants import line_of
from globaltensor.planner.graph import CaptureError, Ref
from globaltensor.rules.call import Call
from globaltensor.runtime.custom_ops import LINEAR_MAPS
from globaltensor.runtime.torch_internals import (
    OpOverload,
    UntracedMode,
    backward_sequence_number,
    next_sequence_number,
    storage_id,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from globaltensor.tensors.factories import empty
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.gradients import raw_grad

if TYPE_CHECKING:
    import networkx


class Tracer(UntracedMode):
    """Looks at the ops on global tensors of one imaginary rank and notes them."""

    def __init__(self, where: Layout | None = None) -> None:
        import networkx

        super().__init__()
        self.graph: networkx.DiGraph = networkx.DiGraph(blocks={}, outputs=[], loss=None, gradients={})
        self.where = where or replicated(placement("meta", [0]))
        self.block: int | None = None                # that is being captured
        self._kept: list[Any] = []                   # alive, so that no id is used again
        self._boxed: dict[tuple[int, int], Any] = {}            # by its base and number: what stands for a boxed view
        self._refs: dict[int, Ref] = {}
        self._modules: list[str] = []
        self.calls: Counter[str] = Counter()         # of each module, by its path
        self._forward_of: dict[int, int] = {}        # autograd's number of a call -> its first node
        self._writer: dict[int, int] = {}            # memory -> the last node that wrote to it
        self._inputs: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------ values

    def _identity(self, t: Any) -> Any:
        """What stays when autograd makes another tensor of the same value. Of a boxed view it is not read: it may never
        be, and moves nothing until then."""
        if not isinstance(t, GlobalTensor):
            return t
        if (origin := t.origin) is None:
            return next(iter(t.shards.values()))
        return self._boxed.setdefault((id(origin.base), origin.nth), [origin.base])

    def _memory(self, t: Any) -> int:
        """Where it lies; a boxed view lies where its base does."""
        while isinstance(t, GlobalTensor) and (origin := t.origin) is not None:
            t = origin.base
        return storage_id(self._identity(t))

    def name_value(self, t: Any, ref: Ref) -> None:
        """Remember that this tensor is an output of a node."""
        same = self._identity(t)
        self._kept.append(same)
        self._refs[id(same)] = ref

    def ref(self, t: Any) -> Ref:
        """The output that a tensor is; of one that was there before, a node of its own."""
        same = self._identity(t)
        if id(same) not in self._refs:
            self.name_value(t, Ref(self.add_node("constant", [t]), 0))
        return self._refs[id(same)]

    def add_node(self, kind: str, outputs: list[Any], **more: Any) -> int:
        """A node with these output tensors (or None), after all that are there."""
        node = len(self.graph)
        attributes = {"op": None, "args": {}, "name": "", "module": self._modules[-1] if self._modules else "",
                      "phase": "forward", "line": "", "block": self.block, "origin": None} | more
        self.graph.add_node(node, kind=kind, shapes=[None if t is None else tuple(t.shape) for t in outputs],
                            strides=[None if t is None else tuple(t.stride()) for t in outputs],
                            dtypes=[None if t is None else t.dtype for t in outputs], **attributes)
        if self.block is not None:
            getattr(self.graph.graph["blocks"][self.block], attributes["phase"]).append(node)
        return node

    def add_uses(self, node: int, sources: list[Ref]) -> None:
        """Edges from what a node takes, operand by operand."""
        for operand, source in enumerate(sources):
            self._add_edge(source.node, node)["uses"].append((source.output, operand))

    def _add_edge(self, source: int, target: int) -> Any:
        if not self.graph.has_edge(source, target):
            self.graph.add_edge(source, target, uses=[])
        return self.graph.edges[source, target]

    def like(self, t: torch.Tensor) -> GlobalTensor:
        """A tensor of the same shape, strides and dtype, of a value that nothing is known of."""
        with without_modes():
            return self._wrap(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))

    def _wrap(self, t: torch.Tensor) -> GlobalTensor:
        return GlobalTensor.wrap(spec(self.where, tuple(t.shape), t.stride(), t.dtype),
                                 dict.fromkeys(self.where.placement.flat, t))

    def _leaf(self, kind: str, name: str, t: torch.Tensor, learns: bool) -> GlobalTensor:
        value: Any = empty(t.shape, placement=self.where.placement, sbp=self.where.sbp, dtype=t.dtype)
        self.name_value(value, Ref(self.add_node(kind, [value], name=name), 0))
        return value.requires_grad_() if learns else value

    def leaves(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Stand-ins of a model's parameters and buffers, by name; tied ones once."""
        named: dict[str, torch.Tensor] = {name: self._leaf("parameter", name, p, p.requires_grad)
                                          for name, p in model.named_parameters()}
        return named | {name: self._leaf("buffer", name, b, False) for name, b in model.named_buffers()}

    def inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Stand-ins of the tensors among the arguments. Those of floats are asked for a gradient, as in a pipeline."""
        def stand_in(t: torch.Tensor) -> GlobalTensor:
            name = f"input{len(self._inputs)}"
            self._inputs[name] = value = self._leaf("input", name, t, t.requires_grad)
            return value

        return tree_map_only(torch.Tensor, stand_in, args), tree_map_only(torch.Tensor, stand_in, named)

    # --------------------------------------------------------------------------------------------------- ops

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        elif "device" in kwargs and not _is_boxing() and _is_small(func, args, kwargs):
            kwargs = kwargs | {"device": torch.device("cpu")}
        call = Call(func, args, kwargs)
        self.before_op(call)
        sources = [self.ref(t) for t in call.tensors]
        memory = [self._memory(t) for t in call.tensors]
        result = self.shapes_alone(func, args, kwargs) if values_decide(func) else self.call_op(func, args, kwargs)
        if func is torch.ops.aten.detach.default:    # as for every gradient that a leaf keeps: the same value
            self.name_value(result, sources[0])
            return result
        self._note_op(call, sources, memory, result)
        return result

    def call_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives."""
        return func(*args, **kwargs)

    def shapes_alone(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives whose values decide how it runs, but not what shapes come out: whole on every rank."""
        def whole(t: GlobalTensor) -> torch.Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

        with without_modes():
            plain_args, plain_kwargs = tree_map_only(GlobalTensor, whole, (args, kwargs))
            return tree_map_only(torch.Tensor, self._wrap, _shapes_alone(func, plain_args, plain_kwargs))

    def before_op(self, call: Call) -> None:
        """Called before each op that is not known to be another's part."""

    def _on_meta(self, t: torch.Tensor) -> torch.Tensor:
        """A plain tensor of the model that has memory: its values do not matter."""
        if isinstance(t, GlobalTensor) or t.is_meta or not t.dim():
            return t
        ref = self.ref(t)
        other = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        self.name_value(other, ref)
        return other

    def _note_op(self, call: Call, sources: list[Ref], memory: list[int], result: Any) -> None:
        outputs = [t if isinstance(t, torch.Tensor) else None for t in ([] if result is None else tree_leaves(result))]
        number = backward_sequence_number()
        if number is None:
            origin, phase = None, "forward"
        else:
            origin, phase = self._forward_of.get(number), "backward"
        more: dict[str, Any] = {"line": where(), "phase": phase, "origin": origin}
        if origin is not None:
            more |= {key: self.graph.nodes[origin][key] for key in ("line", "module")}
        refs = iter(sources)
        arguments = tree_map_only(torch.Tensor, lambda _: next(refs), dict(call.values))
        node = self.add_node("op", outputs, op=call.func, args=arguments, **more)
        if number is None:
            self._forward_of.setdefault(next_sequence_number() - 1, node)
        self.add_uses(node, sources)
        for place, t in zip(memory, call.tensors):
            writer = self._writer.get(place)
            if writer is not None and writer != node and writer > self.ref(t).node:
                self._add_edge(writer, node)
        written = {a.name for a in call.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        for place, argument in zip(memory, call.names):
            if argument in written:
                self._writer[place] = node
        for k, t in enumerate(outputs):
            if t is not None:
                self.name_value(t, Ref(node, k))

    # ----------------------------------------------------------------------------------------------- modules

    @contextmanager
    def following_modules(self, model: nn.Module) -> Iterator[None]:
        """Inside, it is known which module runs."""
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(names.get(id(module), self._modules[-1] if self._modules else ""))
            self.calls[names.get(id(module), "")] += 1

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._modules.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def module(self) -> str:
        """The path of the module that runs."""
        return self._modules[-1] if self._modules else ""

    # ---------------------------------------------------------------------------------------------- backward

    def run_backward(self, loss: Any, result: Any) -> None:
        """From the loss; without one, from every output that needs a gradient."""
        if loss is not None and isinstance(loss, GlobalTensor) and loss.dim():
            raise CaptureError(f"a loss of shape {list(loss.shape)}", "backward begins at a scalar",
                               "loss=lambda output: ... .mean()")
        ends = [loss] if loss is not None else tree_leaves(as_tree(result))
        ends = [t for t in ends if isinstance(t, GlobalTensor) and t.requires_grad]
        if loss is not None and ends:
            self.graph.graph["loss"] = self.ref(loss)
        for t in ends if loss is None else ():
            self.take_output(t)
        seeds = []
        for t in ends:
            seed = self.like(t)
            self.name_value(seed, Ref(self.add_node("seed", [seed], phase="backward"), 0))
            seeds.append(seed)
        if ends:
            torch.autograd.backward(ends, seeds)

    def take_output(self, t: GlobalTensor) -> int:
        """What the model returns is taken by a loss that nobody has told: a node which takes it, and gives nothing."""
        node = self.add_node("output", [])
        self.add_uses(node, [self.ref(t)])
        return node

    def note_gradients(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """What backward left for each parameter, and for each input."""
        gradients = {name: raw_grad(leaf) for name, leaf in (*leaves.items(), *self._inputs.items())}
        self.graph.graph["gradients"] = {name: self.ref(grad) for name, grad in gradients.items() if grad is not None}


def values_decide(func: OpOverload) -> bool:
    """Is this an op, such as a product of groups, that the library makes of others, which look at values?"""
    line = line_of(func)
    return (line is not None and line.family is always_decomposed and not func._schema.is_mutable
            and func not in LINEAR_MAPS)


def _shapes_alone(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What such an op returns, by torch's shape function. Of products of groups that one takes nothing but bfloat16."""
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    like: torch.Tensor = args[0]
    in_bfloat16 = [t.to(torch.bfloat16) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
    return func(*in_bfloat16, **kwargs).to(like.dtype)


def _is_boxing() -> bool:
    """Is this call made by a boxing, for shards that are to arrive?"""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((OURS, TORCH)):
        if frame.f_code.co_filename.startswith(_BOXINGS):
            return True
        frame = frame.f_back
    return False


_BOXINGS = os.path.join(OURS, "boxings")
SMALL = 1 << 20                                      # elements


def _is_small(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May a plain tensor that the model makes, such as positions, have its values? Models look at them."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs))):
        return True                                  # as its operands have theirs
    result = func(*args, **kwargs | {"device": torch.device("meta")})
    return all(t.numel() <= SMALL for t in tree_leaves(result) if isinstance(t, torch.Tensor))


def as_tree(result: Any) -> Any:
    """What a model returned, where it is an object with tensors, as a dict."""
    return dict(result) if isinstance(result, Mapping) else result
