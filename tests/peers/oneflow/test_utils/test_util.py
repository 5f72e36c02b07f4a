"""Products of lists of arguments."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch


def GenArgList(choices: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*choices.values())


def GenArgDict(choices: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(choices, values)) for values in GenArgList(choices))


type_name_to_flow_type = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}
