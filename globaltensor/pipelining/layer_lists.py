"""Cutting a model by its list of layers, where torch.fx does not follow its forward: transformers' models, as they are.

    embed -> layers.0 -> layers.1 | layers.2 -> layers.3 -> norm -> head           | a cut, stage 0 and stage 1

Each stage runs the model's own forward on the model's inputs, which travel along, so that masks, positions and whatever
else follows from the inputs is there. In it,

    what has parameters of an earlier stage    is not run: what it would give is NaN of the right shape
    layers of earlier stages                   are not run: what they would give can only be handed to the next layer
    the first layer of its own                 gets what the stage before it gave
    behind the last layer of its own           the forward ends, but in the last stage

So a model whose layers take more from earlier ones than their one result fails, or gives NaN; it is not silently wrong.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from globaltensor.pipelining.stages import StageError, balanced, parameters

_FIX = "the stages by hand: [first, second]"


class SkippedLayer:
    """What a layer of an earlier stage gives: nothing but a thing to hand on. `number`: of that layer."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, index: Any) -> SkippedLayer:
        return self


class _StageEnds(BaseException):
    """Ends a forward behind the last layer of a stage. (No Exception, which a model may catch.)"""


def cut_by_layers(model: nn.Module, stages: int | Sequence[str], cost: Callable[[nn.Module], float] | None = None,
                  inputs: Sequence[str] = ()) -> list[nn.Module]:
    """The stages of a model that has a list of layers. Arguments as those of `cut_traced`; where all inputs have
    default values, the first of them is passed, and those named.

    Raises StageError where the list has fewer layers than stages, for a name that is not a layer's, and where something
    beside the list has both parameters and parts of its own; a stage raises it where the layers do not run one after
    the other, each once.
    """
    path, items = list_of_layers(model)
    names, layers = [f"{path}.{key}" for key in items], [*items.values()]
    if isinstance(stages, int):
        starts = balanced([(cost or parameters)(layer) for layer in layers], stages)
    else:
        if strange := [name for name in stages if name not in names]:
            raise StageError(f"no layer is called {strange[0]!r}", f"the layers are {names[0]} to {names[-1]}",
                             "one of these")
        starts = [0, *(names.index(name) for name in stages)]
        if starts != sorted(set(starts)):
            raise StageError(f"stages that begin with {', '.join(stages)}", "each has a layer, and they are in order",
                             f"some of {names[1]} to {names[-1]}, in this order")
    known = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in known if p.default is p.empty] or [p.name for p in known[:1]]
    taken = [*needed, *(name for name in inputs if name not in needed)]
    before, after = modules_beside(model, path)
    ends = [*starts[1:], len(layers)]
    return [LayerStage(model, layers, begin, end, before, after, taken) for begin, end in zip(starts, ends)]


def layer_lists(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """The lists of two modules or more, with their items by name. Where there is none, what is a list in a ModuleDict:
    its items are of one class."""
    lists, dicts = ({name: dict(m.named_children()) for name, m in model.named_modules() if isinstance(m, kind)}
                    for kind in (nn.ModuleList, nn.ModuleDict))
    dicts = {name: items for name, items in dicts.items() if len({type(item) for item in items.values()}) == 1}
    lists, dicts = ({name: items for name, items in of.items() if len(items) > 1} for of in (lists, dicts))
    return lists or dicts


def list_of_layers(model: nn.Module) -> tuple[str, dict[str, nn.Module]]:
    """The list of modules with the most parameters, and its items."""
    return max(layer_lists(model).items(),
               key=lambda one: sum(p.numel() for layer in one[1].values() for p in layer.parameters()))


def modules_beside(model: nn.Module, path: str) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """What has parameters or buffers and stands before the list in the model, and what stands after it."""
    before: dict[str, nn.Module] = {}
    after: dict[str, nn.Module] = {}
    side = before
    for name, module in model.named_modules():
        if f"{name}.".startswith(f"{path}."):
            side = after
        elif module._parameters or module._buffers:
            if any(True for _ in module.children()):
                raise StageError(f"a {type(model).__name__} cannot be cut: {name or 'it'} has tensors beside its parts",
                                 "a stage has whole modules", _FIX)
            side[name] = module
    return before, after


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The argument with which a model of transformers keeps nothing for words to come."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def tensors_alone(result: Any) -> Any:
    """Of a result with names, the tensors."""
    if isinstance(result, Mapping):
        return {key: value for key, value in result.items() if value is None or isinstance(value, Tensor)}
    return result


class WholeModel(nn.Module):
    """A model as the only stage of a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **named: Any) -> Any:
        """As the model's own, but for what no stage may return."""
        return tensors_alone(self.model(*args, **without_cache(self.model) | named))


class LayerStage(nn.Module):
    """One stage. Its parameters are those of its layers, and of what stands before the first or after the last."""

    model: nn.Module

    def __init__(self, model: nn.Module, layers: list[nn.Module], begin: int, end: int, before: Mapping[str, nn.Module],
                 after: Mapping[str, nn.Module], taken: list[str]) -> None:
        super().__init__()
        first, last = begin == 0, end == len(layers)
        shared = [m for m in (*before.values(), *after.values()) if not m._parameters]     # buffers: each has them
        own = [*(before.values() if first else ()), *(after.values() if last else ()), *shared]
        self.parts = nn.ModuleList([*dict.fromkeys(own), *layers[begin:end]])
        self.taken, self.first, self.last = taken, first, last
        self.layers, self.begin, self.end = layers, begin, end
        self.skipped = [] if first else [m for m in before.values() if m._parameters]
        object.__setattr__(self, "model", model)     # not registered: a stage has its own parts only

    def forward(self, *args: Any, **named: Any) -> Any:
        """Of the first stage, the model's inputs; of others, what the one before gave, and the inputs."""
        received, args = (None, args) if self.first else (args[0], args[1:])
        by_name = {**dict(zip(self.taken, args)), **named}
        if len(args) > len(self.taken) or not by_name.keys() <= set(self.taken):
            raise StageError(f"{len(args)} inputs, and by name {', '.join(named) or 'none'}",
                             f"the stages take {', '.join(self.taken)}", "gt.pipeline(..., inputs=[their names])")
        more = without_cache(self.model)
        passed = {name: value for name, value in by_name.items() if value is not None}
        out: list[Any] = []
        try:
            with self._forwards_replaced(received, out):
                result = self.model(**passed, **more)
        except _StageEnds:
            return out[0], *(by_name.get(name) for name in self.taken)
        return tensors_alone(result)

    @contextmanager
    def _forwards_replaced(self, received: Any, out: list[Any]) -> Iterator[None]:
        """Inside, what is not this stage's does not run."""
        random, order = torch.get_rng_state(), iter(range(len(self.layers)))

        def enter(k: int) -> None:
            if next(order, None) != k:
                raise StageError(f"layer {k} of a {type(self.model).__name__} does not run right behind layer {k - 1}",
                                 "stages are parts of the list, in its order", _FIX)

        def skip(k: int) -> SkippedLayer:
            enter(k)
            return SkippedLayer(k)

        def begin(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            torch.set_rng_state(random)              # what was drawn before, an earlier stage has drawn too
            return _with_first(layer, self.begin - 1, received, args, named)

        own = range(self.begin, self.end)
        hooks = [self.layers[k].register_forward_pre_hook(lambda *_, k=k: enter(k)) for k in own]
        if not self.first:
            hooks.append(self.layers[self.begin].register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        if not self.last:
            tail = self.layers[self.end - 1]
            hooks.append(tail.register_forward_hook(lambda layer, args, result: _end(result, out)))
        other = [(m, _nan_of(m, received)) for m in self.skipped]
        other += [(self.layers[k], lambda *_, k=k, **__: skip(k)) for k in range(self.begin)]
        for module, forward in other:
            vars(module)["forward"] = forward
        try:
            yield
            if not self.last or next(order, None) is not None:
                raise StageError(f"a {type(self.model).__name__} does not run all of its layers",
                                 "stages are parts of the list, in its order", _FIX)
        finally:
            for module, _ in other:
                del vars(module)["forward"]
            for hook in hooks:
                hook.remove()


def _end(result: Any, out: list[Any]) -> None:
    out.append(result[0] if isinstance(result, (tuple, list)) else result)
    raise _StageEnds


def _with_first(layer: nn.Module, before: int, received: Any, args: tuple[Any, ...], named: dict[str, Any]
                ) -> tuple[Any, Any]:
    """The arguments of a stage's first layer: in the place of the first, which is of the layer before, what the stage
    before gave."""
    first = next(iter(inspect.signature(layer.forward).parameters))
    taken = args[0] if args else named.get(first)
    if getattr(taken, "number", None) != before:
        raise StageError(f"layer {before + 1}, a {type(layer).__name__}, does not take what layer {before} gave",
                         "layers of a list are stages where each takes the result of the one before", _FIX)
    if args:
        args = (received, *args[1:])
    else:
        named = {**named, first: received}
    if any(isinstance(value, SkippedLayer) for value in (*args, *named.values())):
        raise StageError(f"a {type(layer).__name__} takes more than one thing of the layers before it",
                         "they are in another stage, which hands on the first alone", _FIX)
    return args, named


def can_be_left_out(module: nn.Module) -> bool:
    """Is it known what shape a module before the layers gives?"""
    return isinstance(module, (nn.Embedding, nn.Linear)) or type(module).__name__.endswith("Norm")


def _nan_of(module: nn.Module, received: Any) -> Callable[..., Any]:
    """The forward of a module with parameters of the first stage, in a later one."""

    def forward(x: Any, *_: Any, **__: Any) -> Any:
        if isinstance(module, nn.Embedding):
            shape = (*x.shape, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            shape = (*x.shape[:-1], module.out_features)
        elif type(module).__name__.endswith("Norm"):
            return x
        else:
            raise StageError(f"a {type(module).__name__} before the layers cannot be left out of later stages",
                             "what it gives there is known of embeddings, linear layers and norms", _FIX)
        if shape == tuple(received.shape):
            return torch.full_like(received, float("nan")).detach()
        return torch.full(shape, float("nan"), dtype=received.dtype, device=received.device)

    return forward
