"""A call of an op as the rules see it: arguments by name, defaults filled in, tensors in the order of the schema."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from globaltensor.layouts.symbols import known_sizes
from globaltensor.rules.language import NUMBER
from globaltensor.runtime.torch_internals import OpOverload


class Argument(NamedTuple):
    """One argument of an op's schema."""

    name: str
    default: Any
    keyword: bool
    tensor: bool                                     # a Tensor or Tensor?
    tensors: bool                                    # a list of (optional) tensors
    written: bool                                    # the op writes to it
    aliased: bool                                    # or gives a view of it


def values_of(arguments: Iterable[Any]) -> Iterator[Any]:
    """The values of arguments or results of an op, those of lists one by one: no schema has lists of lists. (Torch's
    `tree_leaves` takes many times as long.)"""
    for value in arguments:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


@lru_cache(None)
def arguments(func: OpOverload) -> tuple[Argument, ...]:
    """The arguments of an op's schema, in order."""
    schema = []
    for a in func._schema.arguments:
        kind = str(a.type)                           # as Tensor, Optional[Tensor], List[Optional[Tensor]]
        is_tensor = kind in ("Tensor", "Optional[Tensor]")
        is_list = kind.startswith(("List[", "Optional[List[")) and "Tensor" in kind
        alias = None if (func._schema.name, a.name) in _ONLY_READ else a.alias_info
        schema.append(Argument(a.name, a.default_value if a.has_default_value() else None, a.kwarg_only, is_tensor,
                               is_list, alias is not None and alias.is_write, alias is not None))
    return tuple(schema)


# What schemas mark as written, and kernels only read: the optimizer has counted the step before.
_ONLY_READ = {("aten::_fused_adagrad_", "state_steps")}


def written(call: Call) -> list[Any]:
    """The operands that the op writes to."""
    names = {a.name for a in arguments(call.func) if a.written}
    return [t for t, name in zip(call.tensors, call.names) if name in names]


class Slot(NamedTuple):
    """Where an operand stands: at a position or keyword, and there the how manieth of a list."""

    at: int | str
    item: int | None


def put(args: list[Any], kwargs: dict[str, Any], slots: Sequence[Slot], tensors: Sequence[Any]
        ) -> tuple[list[Any], dict[str, Any]]:
    """Set each slot to its tensor; lists are copied before they change."""
    copied: set[int | str] = set()
    for (at, index), tensor in zip(slots, tensors):
        holder: Any = args if isinstance(at, int) else kwargs
        if index is None:
            holder[at] = tensor
        else:
            if at not in copied:
                holder[at] = list(holder[at])
                copied.add(at)
            holder[at][index] = tensor
    return args, kwargs


def set_arguments(args: list[Any], kwargs: dict[str, Any], values: Iterable[tuple[int | str, Any]]) -> None:
    """Give arguments other values, by position or name."""
    for at, value in values:
        if isinstance(at, int):
            args[at] = value
        else:
            kwargs[at] = value


class Call:
    """`call["dim"]` is an argument by its schema name; `call.tensors` the operands, `call.slots` where they stand.

    `call.ndims` has an entry per tensor argument of the schema: None where it is absent, NUMBER where a Python number
    takes its place. Lists count tensor by tensor.
    """

    __slots__ = ("func", "values", "tensors", "slots", "names", "ndims")

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.values: dict[str, Any] = {}
        self.tensors: list[Any] = []                 # torch's, or global ones, which have a spec and shards
        self.slots: list[Slot] = []
        self.names: list[str] = []
        ndims: list[int | None] = []
        for i, a in enumerate(arguments(func)):
            at: int | str = i if i < len(args) else a.name
            value = args[i] if i < len(args) else kwargs.get(a.name, a.default)
            self.values[a.name] = value
            if a.tensor or isinstance(value, torch.Tensor):
                if isinstance(value, torch.Tensor):
                    ndims.append(value.dim())
                    self._add(value, Slot(at, None), a.name)
                else:
                    ndims.append(None if value is None else NUMBER)
            elif a.tensors and value is not None:
                for k, item in enumerate(value):
                    ndims.append(None if item is None else item.dim())
                    if item is not None:
                        self._add(item, Slot(at, k), a.name)
        self.ndims = tuple(ndims)

    def _add(self, tensor: torch.Tensor, slot: Slot, name: str) -> None:
        self.tensors.append(tensor)
        self.slots.append(slot)
        self.names.append(name)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def operand(self, q: int) -> str:
        """What to call operand q; a tensor of a list by its place there: tensors[1]."""
        return self.names[q] if self.slots[q].item is None else f"{self.names[q]}[{self.slots[q].item}]"

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not every op has; `default` stands for a missing one, not for None."""
        return self.values.get(name, default)

    def position(self, name: str) -> int | str:
        """Where argument `name` is passed by position in the schema."""
        for i, a in enumerate(arguments(self.func)):
            if a.name == name:
                return name if a.keyword else i
        raise KeyError(name)

    def full_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, defaults spelled out."""
        schema = arguments(self.func)
        return ([self.values[a.name] for a in schema if not a.keyword],
                {a.name: self.values[a.name] for a in schema if a.keyword})

    def arguments_with(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The full arguments with other tensors in the places of the operands."""
        slots = [Slot(self.position(name), slot.item) for name, slot in zip(self.names, self.slots)]
        return put(*self.full_arguments(), slots, tensors)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the operands."""
        return [known_sizes(t.shape) for t in self.tensors]
