"""The plan beside the menu: it is 5 % faster than the best that one would try by hand, or its bound shows that none is.

What a model of a kind takes is told on a small number of devices, by its own sizes; nothing runs.
"""
from __future__ import annotations

import pytest
import torch
from torch import nn

import globaltensor as gt
from globaltensor.planner.pricing import Task
from globaltensor.planner.report import strategy_of
from globaltensor.planner.search import search
from globaltensor.planner.space import Fixed
from globaltensor.simulator.cluster import KNOWN
from globaltensor.simulator.gpt import GPT


class WideBlock(nn.Module):
    """Of a Wide-ResNet: norms and activations before the convolutions (arXiv:1605.07146)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(),
                                   nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))
        self.second = nn.Sequential(nn.BatchNorm2d(outputs), nn.ReLU(),
                                    nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False))
        self.beside = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return self.beside(x) + self.second(self.first(x))


def wide_resnet():
    """22 layers, ten times as wide."""
    widths, layers = (16, 160, 320, 640), [nn.Conv2d(3, 16, 3, padding=1)]
    for k, (before, width) in enumerate(zip(widths, widths[1:])):
        layers += [WideBlock(before, width, 2 if k else 1), WideBlock(width, width, 1), WideBlock(width, width, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(640), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(640, 10)), torch.zeros(8, 3, 32, 32)


def t5():
    t = pytest.importorskip("transformers")
    ids = torch.zeros(8, 512, dtype=torch.int64)
    return t.T5ForConditionalGeneration(t.T5Config(
        d_model=1024, d_ff=4096, d_kv=64, num_layers=12, num_heads=16, vocab_size=32128, decoder_start_token_id=0,
        use_cache=False)), {"input_ids": ids, "labels": ids}


def experts():
    t = pytest.importorskip("transformers")
    ids = torch.zeros(8, 512, dtype=torch.int64)
    return t.MixtralForCausalLM(t.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32000, max_position_embeddings=1024, use_cache=False)), {
            "input_ids": ids, "labels": ids}


def check_menu(of: gt.Strategy) -> None:
    best = min(one["step_time"] for one in of["menu"] if one["feasible"])
    assert of["lower_bound"] <= of["step_time"] <= best
    wins, none_can = of["step_time"] * 1.05 <= best, of["lower_bound"] * 1.05 >= best
    assert wins or none_can, (of["step_time"], of["lower_bound"], best)


def layers_on_20(fixed: Fixed, layers: int = 46, hidden: int = 4096) -> gt.Strategy:
    task = Task(GPT(layers, hidden, 32, 1024), KNOWN["dgx-a100"], 20, 240, fixed)
    return strategy_of(task, search(task), 0.0)


def test_46_layers_on_20_devices_by_some_schedules():
    check_menu(layers_on_20(Fixed(schedule="1f1b", micro_batch=2)))


@pytest.mark.long
@pytest.mark.parametrize("hidden", [4096, 1024])
def test_46_layers_on_20_devices(hidden):
    check_menu(layers_on_20(Fixed(), hidden=hidden))


@pytest.mark.long
@pytest.mark.parametrize("build, global_batch", [
    (wide_resnet, 256), (wide_resnet, 1024), (wide_resnet, 2048), (t5, 128), (experts, 128)])
def test_models_of_other_kinds(build, global_batch):
    with torch.device("meta"):
        model, batch = build()
    check_menu(gt.strategy(model, batch, devices=8, global_batch=global_batch, seconds=600))
