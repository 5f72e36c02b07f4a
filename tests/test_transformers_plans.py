"""The plans that models of transformers bring (`base_model_tp_plan`), each read for a small model on meta."""
from __future__ import annotations

import importlib.util

import pytest
from harness import PROGRAMS, PYTHON, environment, good

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="without transformers")


def told_of(*names):
    said = good([PYTHON, PROGRAMS / "transformers_plans.py", *names], environment(), timeout=600)
    return dict(line.split(": ", 1) for line in said.splitlines())


def test_plans_of_a_few_models():
    told = told_of("llama", "mixtral", "deepseek_v3")
    assert told["llama"].endswith("split, whole []") and told["llama"].startswith("9 rows")
    assert "packed_colwise, for which there is no row" in told["mixtral"]
    assert "moe_tp_experts, for which there is no row" in told["deepseek_v3"]


@pytest.mark.long
def test_plans_of_all_models():
    told = told_of()
    failed = {name: line for name, line in told.items() if line.startswith("FAILED")}
    assert not failed and len(told) > 100, failed
    assert sum(line == "not made by transformers" for line in told.values()) <= 10, told
    assert all(" rows, " in line or line.startswith("not made") for line in told.values())
