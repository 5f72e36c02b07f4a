"""Gradients of leaves: they accumulate in whatever layout backward leaves them, and are reduced once.

A gradient of a broadcast parameter over a split batch comes as a pending sum. Adding to it costs nothing, so
micro-batches need no `no_sync`. The first read of any `.grad` (by an optimizer, by clipping, by the user) brings all
gradients that wait into the layouts of their parameters, in one fused boxing.

Every rank runs the same program, so all of them settle the same gradients: waiting leaves are held on to until then,
and taken in the order in which they were made.
"""
from __future__ import annotations

from itertools import count
from typing import Any

import torch

from globaltensor.boxing import native
from globaltensor.boxing.run import Boxed, box
from globaltensor.boxing.watch import watched
from globaltensor.layout import spec
from globaltensor.native import face

raw = torch._C.TensorBase.grad.__get__               # the gradient of a leaf as it lies
_set = torch._C.TensorBase.grad.__set__
_order = count()
waiting: dict[int, Any] = {}                         # leaves whose gradients lie elsewhere than they do


def put(leaf: Any, value: Any) -> None:
    """Replace the gradient of a leaf."""
    if waiting:
        waiting.pop(leaf.__dict__.get("_order", -1), None)
    _set(leaf, value)


def follow(leaf: Any) -> None:
    """Watch what backward accumulates in this leaf."""
    if "_order" not in leaf.__dict__ and leaf.is_leaf:
        leaf._order = next(_order)
        leaf.register_post_accumulate_grad_hook(_accumulated)


def _accumulated(leaf: Any) -> None:
    grad = raw(leaf)
    if type(grad) is type(leaf) and grad.spec.layout is not leaf.spec.layout:
        waiting[leaf._order] = leaf


def settle() -> None:
    """Bring every waiting gradient into its leaf's layout, all in one go."""
    leaves = [waiting[k] for k in sorted(waiting)]
    waiting.clear()
    grads = [(leaf.spec.layout, raw(leaf)) for leaf in leaves]
    grads = [(dst, g) for dst, g in grads if g is not None and g.spec.layout is not dst]
    found = [native.find(g.spec, dst) for dst, g in grads] if face is not None and not watched() else [None]
    if None not in found:
        face.box_in_place([(boxing, g) for boxing, (_, g) in zip(found, grads)], "gradient")
        return
    moved = box([Boxed(g.spec, g.shards, dst) for dst, g in grads], "gradient")
    for (dst, g), shards in zip(grads, moved):
        g.spec, g.shards = spec(dst, g.spec.shape, None, g.spec.dtype), shards
