"""The captured graph of a step, beside the step itself.

Oracles: the ops that arrive at the dispatcher when the step runs with values on the CPU; torch's own gradients.
"""
from __future__ import annotations

import importlib.util
from pathlib import Path

import networkx
import pytest
import torch
from harness import ROOT
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.planner.capture import capture
from globaltensor.planner.graph import CaptureError
from globaltensor.runtime.torch_internals import UntracedMode


def example(name):
    of = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(of)
    of.loader.exec_module(module)
    return module


def gpt(layers=2, device="meta", **more):
    with torch.device(device):
        return example("gpt").GPT(64, 16, layers, 32, 4, **more)


def loss_of(logits):
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(64, dtype=torch.int64, device=logits.device))


IDS = torch.zeros(4, 16, dtype=torch.int64)


# the same value, and the gradient with which backward begins
NO_NODES = torch.ops.aten.detach.default, torch.ops.aten.ones_like.default


class Ops(UntracedMode):
    """Notes name and shapes of each op on global tensors."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if any(isinstance(t, gt.Tensor) for t in args) and func not in NO_NODES:
            results = result if isinstance(result, (tuple, list)) else [result]
            self.ops.append((func, [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in results]))
        return result


def ops_of_a_run(model, inputs, loss):
    """What arrives when it runs with values, on one rank."""
    gt.parallelize(model, gt.placement("cpu", [0]), {})
    inputs = gt.from_full(inputs, gt.placement("cpu", [0]), gt.sbp.broadcast)
    with Ops() as seen:
        loss(model(inputs)).backward()
    return seen.ops


def ops_of_graph(graph):
    return [(a["op"], a["shapes"]) for n, a in graph.nodes.items() if a["kind"] == "op" and graph.pred[n]]


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(4, 6)),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8)), torch.zeros(4, 6)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()),
               torch.zeros(2, 3, 8, 8)),
    "gpt": (lambda: gpt(device="cpu"), IDS),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_has_the_ops_that_run(name):
    build, inputs = MODELS[name]
    graph = capture(build(), inputs, lambda y: y.square().mean(), repeats=False)
    assert ops_of_graph(graph) == ops_of_a_run(build(), inputs, lambda y: y.square().mean())


def test_a_graph_can_be_walked():
    graph = capture(gpt(), IDS, loss_of)
    assert networkx.is_directed_acyclic_graph(graph) and list(graph) == list(range(len(graph)))
    assert {a["kind"] for a in graph.nodes.values()} == {"op", "parameter", "input", "seed", "repeat"}
    linear = next(a for a in graph.nodes.values() if a["op"] is torch.ops.globaltensor.linear.default)
    assert linear["module"] == "blocks.0.attention.q" and linear["line"].startswith("examples/gpt.py:")
    assert linear["shapes"] == [(4, 16, 32)] and linear["dtypes"] == [torch.float32] and linear["phase"] == "forward"
    assert {graph.nodes[r.node]["name"] for name in ("weight", "bias") for r in [linear["args"][name]]} == {
        "blocks.0.attention.q.weight", "blocks.0.attention.q.bias"}
    products = [a for a in graph.nodes.values() if a["op"] is torch.ops.globaltensor.contract.default]
    assert {a["phase"] for a in products} == {"backward"}
    assert {a["module"] for a in products} > {"blocks.0.mlp.up", "head"}
    assert all(a["line"].startswith("examples/gpt.py:") for a in products)
    for _, n, uses in graph.edges(data="uses"):
        taken = {operand for source in graph.predecessors(n) for _, operand in graph.edges[source, n]["uses"]}
        assert not uses or taken == set(range(len(taken)))


def test_every_parameter_has_its_gradient():
    for tied in (False, True):
        model = gpt(tied=tied)
        graph = capture(model, IDS, loss_of)
        gradients = graph.graph["gradients"]
        assert set(gradients) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            node, output = gradients[name]
            assert graph.nodes[node]["shapes"][output] == tuple(p.shape)


def test_a_model_stays_as_it_is():
    model = gpt(layers=3)
    before = {name: id(p) for name, p in model.named_parameters()}
    capture(model, IDS, loss_of)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())
    assert all(p.is_meta and p.grad is None for p in model.parameters())


def expanded(graph):
    """How often each op runs, blocks counted as often as they are repeated."""
    times = {}
    for n, a in graph.nodes.items():
        if a["kind"] == "op" and graph.pred[n]:
            many = 1 if a["block"] is None else 1 + len(graph.graph["blocks"][a["block"]].repeats)
            times[a["op"], str(a["shapes"])] = times.get((a["op"], str(a["shapes"])), 0) + many
    return times


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_equal_blocks_are_captured_once(layers):
    once, all_of_them = capture(gpt(layers), IDS, loss_of), capture(gpt(layers), IDS, loss_of, repeats=False)
    assert expanded(once) == expanded(all_of_them)
    blocks = once.graph["blocks"]
    assert len(blocks) == (layers > 1)
    for block in blocks.values():
        assert block.module == "blocks.0" and len(block.repeats) == layers - 1
        for forward, backward in block.repeats:
            assert [once.nodes[forward]["shapes"][k] for k in range(len(block.outputs))] == [
                once.nodes[r.node]["shapes"][r.output] for r in block.outputs]
            assert once.nodes[backward]["shapes"] == [r and once.nodes[r.node]["shapes"][r.output]
                                                      for r in block.input_grads]


def test_ninety_six_layers_have_few_ops():
    few, many = (capture(gpt(layers), IDS, loss_of) for layers in (2, 96))
    assert len(ops_of_graph(few)) == len(ops_of_graph(many))


@pytest.mark.parametrize("named", [False, True])
def test_unequal_members_are_no_repeats(named):
    class Members(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
            self.layers = nn.ModuleDict({str(k): m for k, m in enumerate(layers)}) if named else nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers.children():
                x = layer(x).relu()
            return x.sum()

    graph = capture(Members(), torch.zeros(2, 4, requires_grad=True))
    (block,) = graph.graph["blocks"].values()
    assert block.module == "layers.0" and [graph.nodes[f]["module"] for f, _ in block.repeats] == ["layers.3"]


def test_members_whose_gradients_are_differentiated_all_run():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

        def forward(self, x):
            first, = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return first.square().sum()

    x = torch.zeros(2, 4, requires_grad=True)
    graph, all_run = capture(Penalty(), x), capture(Penalty(), x, repeats=False)
    assert not graph.graph["blocks"] and graph.graph["gradients"].keys() == all_run.graph["gradients"].keys()
    assert len(ops_of_graph(graph)) == len(ops_of_graph(all_run)) and len(graph.graph["gradients"]) == 7


def test_a_stage_without_a_loss_takes_gradients():
    graph = capture(nn.Linear(4, 3), torch.zeros(2, 4, requires_grad=True))
    seed, = (a for a in graph.nodes.values() if a["kind"] == "seed")
    assert seed["shapes"] == [(2, 3)] and set(graph.graph["gradients"]) == {"weight", "bias", "input0"}


def test_positions_may_be_looked_at():
    class Looks(nn.Module):
        def forward(self, x):
            positions = torch.arange(x.shape[1], device=x.device)
            return (x * 2 if (positions.diff() == 1).all() else x).sum()

    assert torch.ops.aten.mul.Tensor in {a["op"] for a in capture(Looks(), torch.zeros(2, 4)).nodes.values()}


class Asks(nn.Module):
    def forward(self, x):
        if x.sum() > 0:                              # the line that is named
            x = x + 1
        return x.sum()


def test_a_forward_that_looks_at_values_is_an_error_at_its_line():
    with pytest.raises(CaptureError, match="cannot be captured") as error:
        capture(Asks(), torch.zeros(2, 4))
    lines = Path(__file__).read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if text.endswith("# the line that is named"))
    assert error.value.where.endswith(f"test_capture.py:{line}")
    with pytest.raises(CaptureError, match="a scalar"):
        capture(nn.Linear(4, 3), torch.zeros(2, 4), lambda y: y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(8,), (8, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.bfloat16])
def test_dtypes_that_a_linear_layer_does_not_take_are_told_in_the_words_of_torch(dtype, lead, bias):
    layer, x = nn.Sequential(nn.Linear(4, 4, bias)), torch.zeros(*lead, 4, dtype=dtype)
    with pytest.raises(RuntimeError) as of_torch:
        layer(x)
    for plan in (lambda: capture(layer, x), lambda: gt.strategy(layer, x, devices=2)):
        with pytest.raises(CaptureError) as error:
            plan()
        assert error.value.why == f"RuntimeError: {of_torch.value}" and "fit the model" in error.value.fix
        assert "test_capture.py" in error.value.where


def families():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    t = transformers
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    text = small | dict(vocab_size=64)
    tokens = dict(input_ids=torch.zeros(2, 8, dtype=torch.int64), labels=torch.zeros(2, 8, dtype=torch.int64))
    causal = tokens | dict(use_cache=False)           # a cache that grows makes layers unequal
    images = dict(labels=torch.zeros(2, dtype=torch.int64))
    return {
        "Llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**text, num_key_value_heads=2)), causal),
        "GPT-2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64,
                                                        n_positions=16)), causal),
        "BERT": (lambda: t.BertForMaskedLM(t.BertConfig(**text)), tokens),
        "T5": (lambda: t.T5ForConditionalGeneration(t.T5Config(
            d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, vocab_size=64, decoder_start_token_id=0)),
               causal),
        "Mixtral": (lambda: t.MixtralForCausalLM(t.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=4)),
                    causal),
        "ViT": (lambda: t.ViTForImageClassification(t.ViTConfig(**small, image_size=16, patch_size=4)),
                images | dict(pixel_values=torch.zeros(2, 3, 16, 16))),
        "ResNet": (lambda: t.ResNetForImageClassification(t.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")),
                   images | dict(pixel_values=torch.zeros(2, 3, 32, 32))),
    }


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "T5", "Mixtral", "ViT", "ResNet"])
def test_transformers(name):
    build, inputs = families()[name]
    with torch.device("meta"):
        model = build()
    graph = capture(model, inputs)
    assert set(graph.graph["gradients"]) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(block.repeats) > 0 for block in graph.graph["blocks"].values()) >= 1
    assert networkx.is_directed_acyclic_graph(graph)
