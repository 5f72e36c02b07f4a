"""What a captured graph is made of, beside nodes and edges."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

from globaltensor.errors import GlobalTensorError


class CaptureError(GlobalTensorError):
    """A step that cannot be captured: it looks at values, which are not there."""


class Ref(NamedTuple):
    """An output of a node."""

    node: int
    output: int


@dataclasses.dataclass(eq=False)
class Block:
    """A member of a list of modules that later members are equal to.

    forward, backward    its nodes
    inputs               what enters: tensors that it is called with, then its parameters and buffers
    outputs              what leaves
    output_grads         gradients that come for the outputs; None where none does
    input_grads          those that leave, of the inputs
    module               its path
    repeats              pairs of the nodes, forward and backward, of the members that are equal to it. They take and
                         give the same, in the same order
    """

    module: str
    forward: list[int] = dataclasses.field(default_factory=list)
    backward: list[int] = dataclasses.field(default_factory=list)
    inputs: list[Ref] = dataclasses.field(default_factory=list)
    outputs: list[Ref] = dataclasses.field(default_factory=list)
    output_grads: list[Ref | None] = dataclasses.field(default_factory=list)
    input_grads: list[Ref | None] = dataclasses.field(default_factory=list)
    repeats: list[list[int]] = dataclasses.field(default_factory=list)
