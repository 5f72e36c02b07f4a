"""Cutting a model that is not a sequence: its forward is traced once by torch.fx, and the graph is cut into stages.

    ids -> token -+-> add -> blocks.0 -> blocks.1 -> norm -> head       nodes, in order; a cut falls before a module
           weight-+                   |                                 that has parameters, or where a name says
                 stage 0              |       stage 1

The repeated blocks of a network, elements of a ModuleList, ModuleDict or Sequential, are single nodes, as modules of
torch.nn are: their forward is not traced. Everything else must not depend on the values of tensors.

    tensors       that later stages need are passed from stage to stage: a skip connection, a mask, the inputs
    plain values  are computed again where they are needed: sizes, and what follows from sizes alone (a torch.arange)
    parameters    stay those of the model, which the stages share: replacing one in a stage replaces it in the model
"""
from __future__ import annotations

import inspect
import linecache
import operator
import re
import sys
import threading
import traceback
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from globaltensor.errors import where
from globaltensor.pipelining.stages import StageError, balanced, parameters
from globaltensor.runtime.torch_internals import device_constructors, traced_assert

_PROPERTIES = ("shape", "ndim", "dtype", "device", "size", "dim", "numel")    # of a tensor; not tensors themselves
_ONCE = re.compile("rand|normal|bernoulli|multinomial|poisson|dropout|_assert")       # must not be repeated in a stage
_FIX = "an nn.Sequential, or the stages by hand: [first, second]"


class UntraceableError(StageError):
    """A forward that torch.fx does not follow."""


def cut_traced(model: nn.Module, stages: int | Sequence[str],
               cost: Callable[[nn.Module], float] | None = None, inputs: Sequence[str] = ()) -> list[nn.Module]:
    """The stages of any module: each takes what the one before it returns; the first takes the model's inputs, and the
    last returns what the model returns. Inputs that have a default value keep it, but for those named.

    stages   how many, or the names of the modules with which the second, third, ... stage begins
    cost     of one module, in any unit
    inputs   names of inputs that have a default value and are passed nevertheless
    Raises StageError where the forward lacks such an input, cannot be traced or depends on whether the model is in
    training, where there are fewer layers than stages, and where no module has a given name.
    """
    graph, plain, work = _traced_work(model, inputs)
    starts = _by_cost(model, work, stages, cost) if isinstance(stages, int) else _by_names(work, stages)
    stage_of = {node: 0 for node in graph.nodes if node.op == "placeholder"}
    for k, node in enumerate(work):
        source = node.args[0] if node.target is operator.getitem and isinstance(node.args[1], int) else None
        stage_of[node] = stage_of.get(source, bisect_right(starts, k) - 1)    # tuples are unpacked where they are made
    _refuse_in_place(work, plain, stage_of)
    return _stage_modules(model, graph, stage_of, len(starts))


def traced_nodes(model: nn.Module, inputs: Sequence[str] = ()) -> list[fx.Node]:
    """The nodes of a traced forward that compute something, in order."""
    return _traced_work(model, inputs)[2]


def _traced_work(model: nn.Module, inputs: Sequence[str]) -> tuple[fx.Graph, set[fx.Node], list[fx.Node]]:
    """The graph, its nodes that are not tensors, and those that compute something."""
    known = inspect.signature(model.forward).parameters
    if strange := [name for name in inputs if name not in known]:
        raise StageError(f"a {type(model).__name__} has no input {strange[0]!r}",
                         f"its forward takes {', '.join(known)}", "inputs=[...], some of these")
    graph = _graph(model, frozenset(inputs))
    plain = _plain_nodes(graph)
    return graph, plain, [node for node in graph.nodes if node.op.startswith("call_") and node not in plain]


# --------------------------------------------------------------------------------------------------- tracing a forward


class _Tracer(fx.Tracer):
    """Does not trace into blocks, nor into modules with hooks, which must run each time."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, inputs: Collection[str]) -> None:
        super().__init__()
        self.inputs = inputs
        self.blocks = {block for several in model.modules()
                       if isinstance(several, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
                       for block in several.children()}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Is this one node?"""
        hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        return m in self.blocks or bool(hooks) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Proxies for the inputs that have no default value, or are passed nevertheless."""
        _, *declared = inspect.signature(root_fn).parameters.values()
        needed = [p.name in self.inputs or p.default is p.empty and p.kind in (
            p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in declared]
        names = [p.name for p, is_needed in zip(declared, needed) if is_needed]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]
        leading = (*needed, False).index(False)      # one that is left out has those behind it passed by name

        def by_name(root: nn.Module, *values: Any) -> Any:
            return root_fn(root, *values[:leading], **dict(zip(names[leading:], values[leading:])))

        return by_name, [self.root, *proxies]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assert becomes a node; any other branch on a tensor cannot be traced."""
        frame = sys._getframe(2)
        if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("assert "):
            self.create_proxy("call_function", traced_assert, (obj, f"an assert at {where(frame)}"), {})
            return True
        return super().to_bool(obj)


def _graph(model: nn.Module, inputs: Collection[str]) -> fx.Graph:
    """The graph of the forward. It is traced in training and in evaluation, as a branch on `self.training` outside the
    nodes would be fixed to one side."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        graphs = []
        for mode in (True, False):
            for m, _ in modes:
                m.training = mode
            graphs.append(_traced_graph(model, inputs))
    finally:
        for m, mode in modes:
            m.training = mode
    for training, evaluation in zip(*(str(graph).splitlines() for graph in graphs)):
        if training != evaluation:
            raise UntraceableError(f"the forward of {type(model).__name__} depends on self.training, in training "
                                   f"{training.strip()}", "a stage would do so in evaluation, too",
                                   "a module for what depends on it, such as nn.Dropout, or the stages by hand: "
                                   "[first, second]")
    return graphs[0]


def _traced_graph(model: nn.Module, inputs: Collection[str]) -> fx.Graph:
    if isinstance(within := dict(model.named_children()).get("_orig_mod"), nn.Module):
        raise UntraceableError(f"a compiled {type(within).__name__} cannot be cut", "torch.compile runs it as a whole",
                               "the model as it was, in stages that are compiled: torch.compile of its layers, or "
                               "[torch.compile(first), torch.compile(second)]")
    tracer, before = _Tracer(model, inputs), set(vars(model))
    try:
        with _factories_traced(tracer):
            graph = tracer.trace(model)
    except Exception as error:                       # anything may be raised by a forward that gets proxies for tensors
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        message = (str(error).splitlines() or [""])[0]
        raise UntraceableError(f"a {type(model).__name__} cannot be cut: its forward cannot be traced",
                               f"at {where(last)} {type(error).__name__}: {message}", _FIX) from error
    finally:
        added = [name for name in vars(model) if name not in before]
        for name in added:
            delattr(model, name)
    if added:                                        # fx stores tensors there whose creation it did not see
        raise UntraceableError(f"a {type(model).__name__} cannot be cut: its forward leaves {', '.join(added)} in it",
                               "a tensor that the forward creates, or keeps, would stay as it was when the model was "
                               "cut", "self.register_buffer(...) in __init__, or the stages by hand: [first, second]")
    return graph


@contextmanager
def _factories_traced(tracer: fx.Tracer) -> Iterator[None]:
    """Inside, torch.zeros and other factories become nodes, so that each run makes new tensors. Other threads are left
    alone."""
    factories, this_thread = {id(made_by) for made_by in (*device_constructors(), torch.normal)}, threading.get_ident()
    originals = [(space, name, value) for space in (torch, torch.fft) for name, value in vars(space).items()
                 if id(value) in factories]

    def node_for(factory: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: (tracer.create_proxy("call_function", factory, args, kwargs)
                                        if threading.get_ident() == this_thread else factory(*args, **kwargs))

    try:
        for space, name, factory in originals:
            setattr(space, name, node_for(factory))
        yield
    finally:
        for space, name, factory in originals:
            setattr(space, name, factory)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def _is_in_place(node: fx.Node) -> bool:
    name = _name(node)
    return node.op != "call_module" and (name.endswith("_") and not name.endswith("__")
                                         or node.kwargs.get("inplace") is True)


def _plain_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are not global tensors: sizes, dtypes, and what follows from these alone."""
    plain: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            name = node.args[1] if node.target is getattr else node.target
            repeatable = not _is_in_place(node) and not _ONCE.search(_name(node))
            if name in _PROPERTIES or repeatable and all(source in plain for source in node.all_input_nodes):
                plain.add(node)
    return plain


# ------------------------------------------------------------------------------------------------------ where to cut


def _by_cost(model: nn.Module, work: Sequence[fx.Node], stages: int,
             cost: Callable[[nn.Module], float] | None) -> list[int]:
    """Where each stage begins. A layer is a module with parameters and everything up to the next one."""
    modules = [model.get_submodule(_name(node)) if node.op == "call_module" else None for node in work]
    begins = [k for k, module in enumerate(modules) if module is not None and any(True for _ in module.parameters())]
    begins = [0, *begins[1:]]
    costs = [0.0 if module is None else (cost or parameters)(module) for module in modules]
    layers = [sum(costs[a:b]) for a, b in zip(begins, [*begins[1:], len(work)])]
    return [begins[layer] for layer in balanced(layers, stages)]


def _by_names(work: Sequence[fx.Node], names: Sequence[str]) -> list[int]:
    """Where each stage begins: at the first node of the module of this name."""
    within = [[path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in work]
    known = list(dict.fromkeys(path for paths in within for path in paths))
    starts = [0]
    for name in names:
        nodes = [k for k, paths in enumerate(within) if any(f"{path}.".startswith(f"{name}.") for path in paths)]
        if not nodes:
            raise StageError(f"no layer is called {name!r}", f"the layers are {', '.join(known[:12])}"
                             + (", ..." if len(known) > 12 else ""), "one of these")
        starts.append(nodes[0])
    if any(a >= b for a, b in zip(starts, starts[1:])):
        raise StageError(f"stages that begin with {', '.join(names)}",
                         "in the model they do not come in this order, or the first stage is empty",
                         f"some of {', '.join(known[1:])}, in this order")
    return starts


def _refuse_in_place(work: Sequence[fx.Node], plain: set[fx.Node], stage_of: dict[fx.Node, int]) -> None:
    """A change in place is visible in its own stage only, so other stages must not use the tensor."""
    for node in filter(_is_in_place, work):
        changed = node.all_input_nodes[0]
        if changed in plain or any(stage_of.get(other, stage_of[node]) != stage_of[node]
                                   for other in (changed, *changed.users)):
            raise StageError(f"{_name(node)} changes {changed} in place", "other stages would not see it",
                             f"{_name(node).rstrip('_')}, which makes a new tensor")


# ------------------------------------------------------------------------------------------------- stages out of nodes


class _SharedDict(dict[str, Any]):
    """Some of the parameters or buffers of a module; replacing one here replaces it in the module, too."""

    def __init__(self, some: dict[str, Any], original: dict[str, Any]) -> None:
        super().__init__(some)
        self.original = original

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key in self.original:
            self.original[key] = value


def _stage_modules(model: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], stages: int) -> list[nn.Module]:
    order = {node: k for k, node in enumerate(graph.nodes)}
    output = graph.output_node()
    bodies: list[list[fx.Node]] = [[] for _ in range(stages)]
    inputs: list[list[fx.Node]] = [[] for _ in range(stages)]
    needed: set[fx.Node] = set()                     # nodes of earlier stages that this stage or later ones use
    for stage in reversed(range(stages)):            # backwards: a stage also passes on what only later ones use
        own = {node for node, k in stage_of.items() if k == stage and node.op != "placeholder"}
        unvisited = [*own, *([output] if stage == stages - 1 else [])]
        while unvisited:
            for source in unvisited.pop().all_input_nodes:
                if source not in stage_of and source not in own:     # plain, or a parameter: each stage has its own
                    own.add(source)
                    unvisited.append(source)
                elif source in stage_of:
                    needed.add(source)
        needed = {node for node in needed if stage_of[node] < stage}
        bodies[stage] = sorted(own, key=order.__getitem__)
        inputs[stage] = sorted(needed, key=order.__getitem__)
    inputs[0] = [node for node in graph.nodes if node.op == "placeholder"]
    outputs: list[Any] = [nodes[0] if len(nodes) == 1 else tuple(nodes) for nodes in inputs[1:]]
    return [_stage_module(model, *parts) for parts in zip(inputs, bodies, [*outputs, output.args[0]])]


def _stage_module(model: nn.Module, inputs: Sequence[fx.Node], body: Sequence[fx.Node], outputs: Any) -> nn.Module:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(outputs, copies.__getitem__))
    stage = fx.GraphModule(model, graph, type(model).__name__)
    for path in {_name(node).rpartition(".")[0] for node in body if node.op == "get_attr"}:
        owner, copy = model.get_submodule(path), stage.get_submodule(path)
        for kind in ("_parameters", "_buffers"):
            if copy is not owner:                    # fx copied the holder of a parameter that is used directly
                copy.__dict__[kind] = _SharedDict(getattr(copy, kind), getattr(owner, kind))
    return stage
