"""Files of transformers whose names are not those of its models: parameters are renamed, experts fused.

transformers keeps the hub's names in files, and converts what it loads. Its own transforms are called here, as its
`from_pretrained` calls them. Of what is only renamed each rank reads its parts; what an operation makes, it makes of
whole tensors, in every process.
"""
from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from globaltensor.checkpoint.manifest import CheckpointError, Entry


class Conversion(NamedTuple):
    """What one operation of transformers makes of tensors in files."""

    target: str                                      # of the names that come out the first one
    sources: dict[str, str]                          # names in the files, each with the pattern that it matches
    transform: Any                                   # transformers' own
    model: Any

    def empty_sources(self, saved: Mapping[str, Entry], own: Mapping[str, torch.Tensor],
                      device: str) -> dict[str, torch.Tensor]:
        """Memory for what is in the files, of the dtype that comes out: transformers casts before it converts."""
        dtype = own[self.target].dtype
        return {name: torch.empty(saved[name].shape, dtype=dtype, device=device) for name in self.sources}

    def values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What comes out, by the model's names."""
        transform = copy.deepcopy(self.transform)    # it collects what it is given
        for name, pattern in self.sources.items():
            transform.add_tensor(self.target, name, pattern, tensors[name])
        try:
            values = transform.convert(self.target, model=self.model, config=self.model.config)
        except Exception as error:
            some = ", ".join(map(repr, list(self.sources)[:4]))
            raise CheckpointError(f"{self.target!r} cannot be made of {some}{', ...' * (len(self.sources) > 4)}",
                                  f"transformers raises {type(error).__name__}: {error}",
                                  fix_of_transformers(self.model)) from error
        if isinstance(values, tuple):                # transformers 5.0 has its errors beside them
            values = values[0]
        return {name: t[0] if isinstance(t, list) else t for name, t in values.items()}


def is_of_transformers(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")      # nobody has a model of what is not imported
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def fix_of_transformers(module: nn.Module) -> str:
    """What loads all that transformers can load: it initialises what is missing, and skips what is too much."""
    return f"{type(module).__name__}.from_pretrained(folder), then gt.parallelize(model, placement)"


def names_in_module(module: nn.Module, own: Mapping[str, torch.Tensor],
                    saved: Mapping[str, Entry]) -> tuple[dict[str, str], list[Conversion]]:
    """Of tensors in files: those that are one tensor of the module's, with its name for them, and those that are
    converted. What fits as it is is left so."""
    same: tuple[dict[str, str], list[Conversion]] = {name: name for name in saved}, []
    if all(name in own and own[name].shape == entry.shape for name, entry in saved.items()) or (
            not is_of_transformers(module)):
        return same
    try:
        from transformers import conversion_mapping, core_model_loading as loading
    except ImportError:                              # before version 5 its files had the names of its models
        return same
    mapping = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    names: dict[str, str] = {}
    taken: set[str] = set()
    conversions: dict[str, Conversion] = {}
    for name in sorted(saved, key=loading.dot_natural_key):       # experts in order: 2 before 10
        new, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, own)
        if new not in own and name in own:
            new, pattern = name, None
        if new in own and pattern is not None:
            first = Conversion(new, {}, by_pattern[pattern], module)
            conversions.setdefault(new, first).sources[name] = pattern
        else:                                        # what is in no module, or a second time, keeps its name
            names[name] = new if new in own and new not in taken else name
            taken.add(names[name])
    return names, list(conversions.values())
