"""Partitioned activations: what recomputation keeps of a model is split over the ranks that all hold it.

    with gt.partition_activations("tp"):
        loss = model(ids)                            # whose blocks torch.utils.checkpoint recomputes
    loss.backward()

Tensor parallelism cuts the layers, but what lies between them is broadcast along its axis. Recomputation keeps that:
the input of every block, whole on every rank. Here each of n ranks keeps 1/n of it, which costs nothing as a rank takes
its part of what it has; when backward comes to the block, an all-gather brings it back: (n-1)/n of the input's bytes. A
block of Megatron-LM makes two all-reduces forward, two when it is recomputed and two backward, 12 (n-1)/n in all, so
that this adds a twelfth.

Source: ZeRO-R (Rajbhandari et al., arXiv:1910.02054, sections 6.1 and 8), as Pa. A plan with `sequence=` along the same
axis (Korthikanti et al., arXiv:2205.05198) has these activations split anyway, and needs none of this.
"""
from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import ArgumentError
from globaltensor.layouts.layout import Layout, layout
from globaltensor.layouts.sbp import split
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

_BOXING = "partitioned activations"                  # as gt.record names it


class KeptPart(NamedTuple):
    """What is kept of a tensor, and how it lay."""

    part: GlobalTensor
    layout: Layout


@api_boundary
def partition_activations(axis: str = "tp") -> AbstractContextManager[None]:
    """Inside, what autograd keeps broadcast along an axis for backward, it keeps split along it, and gathers it then.

    axis   of the placement. Parameters, integers and what is split already are kept as they are, and so is what has no
           dim as long as the axis, and a pending sum: a row "*.down ->" B of the plan, of the second layer of each
           pair, reduces that at once, which takes no more bytes than reducing it later. Values do not change
    Enter it on every rank. For models whose blocks are recomputed, so that little is kept: each tensor that is kept is
    gathered. Raises ArgumentError for an axis that is not a name, and where the placement of a tensor that is kept has
    names, but not this one.
    """
    if not isinstance(axis, str) or not axis:
        raise ArgumentError(f"axis={axis!r}", "it is the name of an axis of a placement",
                            'with gt.partition_activations("tp"): ...')
    return torch.autograd.graph.saved_tensors_hooks(partial(_keep_part, axis), _gather)


def _keep_part(axis: str, t: Tensor) -> Any:
    """Called for each tensor that autograd keeps."""
    if not isinstance(t, GlobalTensor) or not t.is_floating_point() or t.is_leaf and t.requires_grad:
        return t
    names = t.placement.names
    if names and axis not in names:
        raise ArgumentError(f"gt.partition_activations({axis!r}) of a tensor of shape {list(t.shape)}",
                            f"its placement has {', '.join(names)}", f"gt.partition_activations({names[-1]!r})")
    if axis not in names:
        return t
    at, own = t.placement.names.index(axis), t.spec.layout
    taken = {sbp.dim for sbp in own.sbp if sbp.is_split}
    # the longest dim that no other axis splits; the first of those
    dim = max((d for d in range(t.dim()) if d not in taken), key=lambda d: t.shape[d], default=None)
    if not own.sbp[at].is_broadcast or dim is None or t.shape[dim] < t.placement.shape[at]:
        return t
    cut = layout(own.placement, (*own.sbp[:at], split(dim), *own.sbp[at + 1:]))
    with torch.no_grad():
        whole: Any = t.detach()
        part = redistribute([whole], [cut], _BOXING)[0]
    # a part that is a view would keep all of it
    return KeptPart(GlobalTensor.wrap(part.spec, {rank: _alone(shard) for rank, shard in part.shards.items()}), own)


def _alone(shard: Tensor) -> Tensor:
    return shard if shard.untyped_storage().nbytes() <= shard.nbytes else shard.clone()


def _gather(kept: Any) -> Any:
    if not isinstance(kept, KeptPart):
        return kept
    with torch.no_grad():
        return redistribute([kept.part], [kept.layout], _BOXING)[0]
