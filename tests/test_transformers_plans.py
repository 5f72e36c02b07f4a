"""The plans that models of transformers bring (`base_model_tp_plan`), each read for a small model on meta."""
from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from harness import PROGRAMS, PYTHON, environment, good

import globaltensor as gt

SEED = 67
TP = gt.placement("cpu", [0, 1], ("tp",))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="without transformers")


def told_of(*names):
    said = good([PYTHON, PROGRAMS / "transformers_plans.py", *names], environment(), timeout=600)
    return dict(line.split(": ", 1) for line in said.splitlines())


def test_plans_of_a_few_models():
    told = told_of("llama", "mixtral", "deepseek_v3")
    assert told["llama"].endswith("split, whole []") and told["llama"].startswith("9 rows")
    assert told["mixtral"].endswith("split, whole []")
    assert told["deepseek_v3"].endswith("whole []")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_whose_matrices_are_split_by_the_plan_of_mixtral(implementation):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(SEED)
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    config._experts_implementation = implementation
    plain = MixtralForCausalLM(config)
    model = copy.deepcopy(plain)
    gt.parallelize(model, TP, gt.Plan.of_styles(model))
    experts = model.model.layers[0].mlp.experts
    assert [p.sbp[0] for p in experts.parameters()] == [gt.sbp.split(1), gt.sbp.split(2)]
    ids = torch.randint(64, (2, 8))
    losses = [one(i, labels=i).loss for one, i in ((plain, ids), (model, gt.from_full(ids, TP, gt.sbp.broadcast)))]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5), f"seed {SEED}"
    for p, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), want.grad)


@pytest.mark.long
def test_plans_of_all_models():
    told = told_of()
    failed = {name: line for name, line in told.items() if line.startswith("FAILED")}
    assert not failed and len(told) > 100, failed
    assert sum(line == "not made by transformers" for line in told.values()) <= 10, told
    assert all(" rows, " in line or line.startswith("not made") for line in told.values())
