"""torch.compile of models of transformers as they are: one graph, with the losses and gradients of plain torch."""
from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, split

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="without transformers")

SEED = 71
LONG = pytest.mark.long
COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 64}
GROUPED = COMMON | {"intermediate_size": 64, "num_key_value_heads": 2}
CONFIGS = {
    "llama": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3": GROUPED | {"head_dim": 8},
    "gemma2": GROUPED | {"head_dim": 8},
    "phi3": GROUPED | {"pad_token_id": 0},
    "opt": COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt_neox": COMMON | {"intermediate_size": 64},
}
LAYOUTS = {"dp": ([0, 1], ("dp",), split(0)), "tp": ([0, 1], ("tp",), broadcast),
           "dp x tp": ([[0, 1], [2, 3]], ("dp", "tp"), (split(0), broadcast))}


@pytest.mark.parametrize("layout", ["tp", pytest.param("dp", marks=LONG), pytest.param("dp x tp", marks=LONG)])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=LONG) for name in CONFIGS if name != "llama")])
def test_a_causal_model_is_one_graph(name, layout):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **CONFIGS[name]))
    model = copy.deepcopy(plain)
    ranks, axes, batch = LAYOUTS[layout]
    where = gt.placement("cpu", ranks, axes)
    gt.parallelize(model, where, gt.Plan.of(model) if "tp" in axes else {})
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    for _ in range(2):
        ids = torch.randint(96, (4, 16))
        whole = gt.from_full(ids, where, batch)
        want, got = plain(input_ids=ids, labels=ids).loss, compiled(input_ids=whole, labels=whole).loss
        for loss in (want, got):
            loss.backward()
        assert got.item() == pytest.approx(want.item(), rel=1e-5), f"seed {SEED}"
    assert len(graphs) == 1
    for p, known in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), known.grad, rtol=1e-4, atol=1e-5)
