"""Each plan of tensor parallelism that a model of transformers brings, read for a small one without memory.

With names, those architectures; with "i/n", every n-th from the i-th; else all. A line each: rows, and what is whole.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, os.fspath(Path(__file__).parent.parent))
import small_configs
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import globaltensor as gt

TP = gt.placement("cpu", [0, 1], ("tp",))


def names_with_plans() -> list[str]:
    """Architectures whose config has a plan; those of parts of models have no model of their own."""
    names = [name for name in CONFIG_MAPPING_NAMES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_MAPPING_NAMES]
    return [name for name in names if getattr(transformers.CONFIG_MAPPING[name], "base_model_tp_plan", None)]


def small_model(name: str) -> torch.nn.Module | None:
    """None where transformers itself makes no model of its own default config."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) or MODEL_MAPPING_NAMES[name]
    for how in ("lists", "numbers", "layers", ""):
        config = transformers.CONFIG_MAPPING[name]()
        try:
            if how:
                small_configs.shrink(config, how)
            if getattr(config, "head_dim", 0) is None:               # which some configs do not work out
                config.head_dim = config.hidden_size // config.num_attention_heads
            with torch.device("meta"):
                return getattr(transformers, cls if isinstance(cls, str) else cls[0])(config)
        except Exception as error:                   # sizes that this one does not take; at last its own
            sys.stderr.write(f"{name}, {how or 'as it is'}: {error}\n")
    return None


def read(name: str) -> str:
    model = small_model(name)
    if model is None:
        return "not made by transformers"
    if not getattr(model, "tp_plan", None):
        return "no plan: the model does not use it"
    plan = gt.Plan.of_styles(model)
    again = gt.Plan.parse(str(plan))
    assert dict(again) == dict(plan) and again.whole == plan.whole
    if not len(plan):
        return f"all whole: {sorted(set(plan.whole.values()))}"
    gt.parallelize(model, TP, plan)
    split = [p for p in model.parameters() if p.sbp[0].is_split]
    assert split, "nothing is split"
    return f"{len(plan)} rows, {len(split)} split, whole {sorted(set(plan.whole.values()))}"


def chosen() -> list[str]:
    if len(sys.argv) == 2 and "/" in sys.argv[1]:
        first, step = map(int, sys.argv[1].split("/"))
        return names_with_plans()[first::step]
    return sys.argv[1:] or names_with_plans()


for one in chosen():
    try:
        sys.stdout.write(f"{one}: {read(one)}\n")
    except Exception as error:                       # each is told
        sys.stdout.write(f"{one}: FAILED {type(error).__name__} {error}\n".replace("\n  ", " | "))
    sys.stdout.flush()
