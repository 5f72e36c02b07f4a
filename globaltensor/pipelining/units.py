"""The units of a model: the least parts that a pipeline can cut it into, in the order in which they run.

    nn.Sequential         its children
    a traced model        each module with parameters, and what follows up to the next one          (tracing.py)
    a list of layers      each layer; what stands before the list goes with the first one, what stands behind it with
                          the last                                                              (layer_lists.py)
    any other             all of it, with the reason why it is not cut

Parameters that forward does not use are parts of the first.

A stage of `gt.pipeline(model, ..., starts=[...])` begins with the name of a unit.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx, nn

from globaltensor.pipelining.layer_lists import can_be_left_out, layer_lists, list_of_layers, modules_beside
from globaltensor.pipelining.stages import StageError, sequence_layers
from globaltensor.pipelining.tracing import UntraceableError, traced_nodes


class Unit(NamedTuple):
    """`name`: that with which a stage begins; `parts`: modules and parameters of the model, which make it up."""

    name: str
    parts: tuple[str, ...]


class Units(NamedTuple):
    """All of a model; `why`: the reason where a model stays whole; `of_list`: are they layers of a list? A run tells
    whether each takes what the one before gave."""

    units: list[Unit]
    why: str = ""
    of_list: bool = False

    def as_one(self, why: str) -> Units:
        """All of the model as one unit."""
        return Units([Unit(self.units[0].name, tuple(part for unit in self.units for part in unit.parts))], why)


def units_of(model: nn.Module, inputs: Sequence[str] = ()) -> Units:
    """The units of a plain model. `inputs`: names of inputs with a default value that will be passed."""
    units, why, of_list = _units_in_use(model, inputs)
    known = tuple(f"{part}." for unit in units for part in unit.parts if part)
    unused = [name for name, _ in model.named_parameters() if not f"{name}.".startswith(known)] if known else []
    return Units([Unit(units[0].name, (*units[0].parts, *unused)), *units[1:]], why, of_list)


def _units_in_use(model: nn.Module, inputs: Sequence[str]) -> Units:
    if isinstance(model, nn.Sequential):
        return Units([Unit(name, (name,)) for name, _ in sequence_layers(model)])
    try:
        return Units(_of_graph(model, traced_nodes(model, inputs)))
    except UntraceableError as error:
        why = f"{error.what}: {error.why}"
    except StageError as error:
        return Units([_one_unit(model)], f"{error.what}: {error.why}")
    if layer_lists(model):
        try:
            return Units(_of_list(model), of_list=True)
        except StageError as error:
            why = f"{error.what}: {error.why}"
    return Units([_one_unit(model)], why)


def _one_unit(model: nn.Module) -> Unit:
    """One unit of all parts."""
    parts = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    own = [name for name, _ in model.named_parameters(recurse=False)]
    return Unit((parts or own or [""])[0], (*parts, *own))


def _of_graph(model: nn.Module, work: list[fx.Node]) -> list[Unit]:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    begun: dict[str, list[str]] = {}
    early: list[str] = []                            # parameters that are used before the first module
    for node in work:
        target = str(node.target)
        if node.op == "call_module" and any(True for _ in modules[target].parameters()) and target not in begun:
            begun[target] = [target]
        for source in node.all_input_nodes:
            if source.op == "get_attr" and str(source.target) in parameters:
                (next(reversed(begun.values())) if begun else early).append(str(source.target))
    if not begun:
        return [_one_unit(model)]
    first = next(iter(begun))
    begun[first] = [*early, *begun[first]]
    inside = tuple(f"{name}." for name in begun)
    taken: set[str] = set()
    units = []
    for name, parts in begun.items():
        own = [part for part in dict.fromkeys(parts)
               if part not in taken and (part in begun or not part.startswith(inside))]
        taken |= set(own)
        units.append(Unit(name, tuple(own)))
    return units


def _of_list(model: nn.Module) -> list[Unit]:
    path, layers = list_of_layers(model)
    others = [name for name, items in layer_lists(model).items()
              if not f"{name}.".startswith(f"{path}.") and not path.startswith(f"{name}.")
              and any(True for item in items.values() for _ in item.parameters())]
    if others:
        raise StageError(f"a {type(model).__name__} has layers in {path} and in {others[0]}", "layers of one list may "
                         "take what the other gave, and a stage hands on one result")
    before, after = modules_beside(model, path)
    for name, m in before.items():
        if m._parameters and not can_be_left_out(m):
            raise StageError(f"a {type(model).__name__} has a {type(m).__name__} before its layers, {name}",
                             "what it gives is not known in later stages, which leave it out")
    units = [Unit(f"{path}.{key}", (f"{path}.{key}",)) for key in layers]
    units[0] = Unit(units[0].name, (*(name for name, m in before.items() if m._parameters), *units[0].parts))
    units[-1] = Unit(units[-1].name, (*units[-1].parts, *(name for name, m in after.items() if m._parameters)))
    return units
