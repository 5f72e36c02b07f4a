"""The layers of a model, as ZeRO 3 gathers them: the items of its lists, and the modules that hold no others."""
from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def is_in_a_layer(name: str, model: nn.Module) -> bool:
    """Is this parameter gathered with a layer? Others are gathered by each op that needs them."""
    return any(name.startswith(f"{path}.") for path, _ in layers_of(model))


def layers_of(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model, with where they are. A list in a list runs none of its own: its items are layers, too."""
    for key, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or not isinstance(module, _LISTS) and [*child.children()]:
            yield from layers_of(child, f"{path}{key}.")
        elif not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            yield path + key, child
