"""Fused attention of GPUs, as that of a CPU: one op with a rule, a gradient and a ring, whatever kernel a rank runs.

torch has a fused op for every kernel of a GPU (flash, memory-efficient, cuDNN), which differ in what else they return:
lengths, states of random generators, a logsumexp that is padded. On a CPU it has one, whose rule and ring the library
knows (rules/layers.py, algorithms/ring_attention.py). So

    _scaled_dot_product_flash_attention(q, k, v, ...)        what torch calls on global tensors of a GPU
        -> _scaled_dot_product_flash_attention_for_cpu       laid out, split, sent around the ring
            -> on every rank the kernel that torch chooses for the rank's part (attention_kernels.py)

out and logsumexp are all that the gradient needs, with any of the kernels.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.run import Run, traceable
from globaltensor.errors import GlobalTensorError
from globaltensor.rules.call import Call

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@traceable
def as_on_cpu(call: Call, run: Run) -> tuple[Any, ...]:
    """out and logsumexp, the lengths, and nothing for the states of random generators. Raises GlobalTensorError for
    dropout: torch's function for attention goes another way then (tensors/attention.py)."""
    if call["dropout_p"] > 0:
        raise GlobalTensorError("dropout inside a fused attention kernel", "its random numbers depend on the layout",
                                "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...")
    results = run(FORWARD, call["query"], call["key"], call["value"], 0.0, call["is_causal"],
                  attn_mask=call.get("attn_bias"), scale=call["scale"])
    lengths = {"max_q": call["query"].shape[2], "max_k": call["key"].shape[2]}
    return (*results, *[lengths.get(each.name) for each in call.func._schema.returns[2:]])


@traceable
def as_on_cpu_backward(call: Call, run: Run) -> tuple[Tensor | None, ...]:
    """The gradients; of the mask none, as a mask that needs one is not for these kernels (tensors/attention.py)."""
    grad = call[call.func._schema.arguments[0].name]
    grads = run(BACKWARD, grad, *[call[name] for name in ("query", "key", "value", "out", "logsumexp")], 0.0,
                call["is_causal"], attn_mask=call.get("attn_bias"), scale=call["scale"])
    return (*grads, *[None for _ in call.func._schema.returns[3:]])
