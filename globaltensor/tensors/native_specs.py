"""Specs as native code keeps them (csrc/torch_ext/spec.h): what it asks of one, and those that it makes itself."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.layouts.layout import Layout, Shape, Spec, spec
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import local_ranks_of


def _describe(of: Spec) -> tuple[Any, ...]:
    """What the native code keeps of a spec."""
    ranks = local_ranks_of(of.placement)
    parts = [of.layout.num_parts(dim) for dim in range(len(of.shape))]
    pending = any(s.is_partial for s in of.sbp)
    conj, neg = "conj" in of.lazy_bits, "neg" in of.lazy_bits
    cuts = [[(s.dim, parts, index) for s, parts, index in zip(of.sbp, of.placement.shape, of.placement.coords[rank])
             if s.is_split] for rank in ranks]
    return (list(of.shape), list(of.stride), of.dtype, of.placement.type, ranks, of.copied, parts, pending, conj,
            neg, of.layout, cuts)


def _spec_from(of: Layout, shape: Shape, stride: Shape, dtype: torch.dtype, copied: bool, conj: bool, neg: bool
               ) -> Spec:
    """The spec that native code made, when Python first asks for it."""
    bits = frozenset(name for name, is_set in (("conj", conj), ("neg", neg)) if is_set)
    return spec(of, shape, stride, dtype, copied, bits)


def bind_specs() -> None:
    """Tell native code how to read and make them."""
    torch_ext.bind_specs(_describe, _spec_from)
