"""What a stage takes for a micro-batch: its products, its activations through memory, the starts of its kernels.

A device takes for a pass over a layer the time of its products at the cluster's rate, plus that of the bytes that go
through its memory: activations are written once and read once, weights are read. With it go the reductions on tp. All
that while the host starts kernels; the slower of the two is what a pass takes, so small layers cost as much as larger
ones. Those of attention alone are the difference that selective recomputation makes.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.gpt import GPT

_KERNELS = 20                                         # of a layer's forward: products, norms, dropouts, sums, copies
_KERNELS_OF_WEIGHTS = 8                               # of its backward, those that make gradients of parameters
_KERNELS_OF_REDUCTIONS = 4                            # of two reductions: each copies, and starts a collective


class PassTimes(NamedTuple):
    """Seconds of the forward, the gradient of the inputs, and that of the weights."""

    forward: float
    inputs: float
    weights: float


def layer_times(gpt: GPT, cluster: Cluster, micro_batch: int, tensor: int, sequence_parallel: bool, recompute: str,
                reduction: float) -> PassTimes:
    """Of a layer on one of `tensor` ranks. `reduction`: seconds of one reduction on them, of which a pass has two."""
    rate, starts = cluster.flops * cluster.efficiency, cluster.kernel_launch
    weighted, attention = (float(n) / rate for n in gpt.layer_forward(micro_batch, tensor))
    all_bytes, bytes_outside_attention = (
        float(gpt.activations_per_layer(micro_batch, tensor, sequence_parallel, kept))
        for kept in ("none", "selective"))
    weights = 2 * gpt.parameters_per_layer / tensor / cluster.memory_bandwidth
    attention += 2 * (all_bytes - bytes_outside_attention) / cluster.memory_bandwidth
    outside = 2 * bytes_outside_attention / cluster.memory_bandwidth + weights + 2 * reduction
    kernels = _KERNELS + _KERNELS_OF_REDUCTIONS * (tensor > 1)
    forward = max(weighted + attention + outside, kernels * starts)
    again = {"none": 0.0, "selective": attention, "full": forward}[recompute]
    inputs = max(weighted + 2 * attention + outside, (kernels + _KERNELS - _KERNELS_OF_WEIGHTS) * starts)
    return PassTimes(forward, again + inputs, max(weighted + weights, _KERNELS_OF_WEIGHTS * starts))


def output_times(gpt: GPT, cluster: Cluster, micro_batch: int, tensor: int) -> PassTimes:
    """Of the output layer and its loss: the logits are written once and read once."""
    logits = 2 * micro_batch * gpt.sequence * gpt.vocabulary / tensor
    seconds = (float(gpt.logits_forward(micro_batch, tensor)) / (cluster.flops * cluster.efficiency)
               + 2 * logits / cluster.memory_bandwidth)
    return PassTimes(seconds, seconds, seconds)


def with_gathers(passes: Sequence[float], gathers: Sequence[float]) -> float:
    """Seconds of passes that follow each other, each with parameters that are gathered during the pass before it."""
    return gathers[0] + sum(max(own, ahead) for own, ahead in zip(passes, [*gathers[1:], 0.0]))
