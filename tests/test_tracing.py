"""Models that are not sequences, cut into stages: the same outputs and gradients, bit for bit, and clear refusals."""
from __future__ import annotations

import copy
import itertools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from harness import ROOT
from torch import nn

import globaltensor as gt
from globaltensor.pipelining.stages import StageError, parameters
from globaltensor.pipelining.tracing import cut_traced

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

SEED = 23


@pytest.fixture(autouse=True)
def seeded():
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


class Net(nn.Module):
    """Four blocks in a list; `way` is what the forward does with them."""

    def __init__(self, way, width=6):
        super().__init__()
        self.way, self.scale = way, nn.Parameter(torch.randn(width))
        self.first, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.register_buffer("table", torch.randn(16, width))

    def forward(self, x, mask=None):
        return self.way(self, x)


class Masked(Net):
    def forward(self, x, mask):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * mask
        return self.head(x) + mask


class Block(nn.Module):
    """Has Python control flow of its own."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) if self.training or float(x.sum()) > 1e9 else x + self.linear(x).tanh()


def chain(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def skips(net, x):
    """As a U-net: what the first blocks gave is added after the last ones, in the other order."""
    a, b, c, d = net.blocks
    x1 = a(net.first(x))
    x2 = b(x1)
    return net.head(d(c(x2) + x2) + x1) + x


def sizes(net, x):
    b, t = x.shape[:2]
    x = chain(net, net.first(x) + net.table[torch.arange(t) % 16])
    return net.head(x).reshape(b * t, -1)[:, :x.size(-1) // 2] / max(1, 2)


def own_parameters(net, x):
    """The same parameter in several stages, next to a buffer."""
    assert x.shape[-1] == 6, "six wide"
    return net.head(chain(net, net.first(x) * net.scale)) * net.scale + net.table[0]


def tuples(net, x):
    pair = torch.chunk(net.first(x), 2, -1)
    return net.head(chain(net, x)) + torch.cat([pair[1], pair[0]], -1), x * 2


def made(net, x):
    zeros = torch.zeros(x.shape[0], 1, 6, dtype=x.dtype)
    return net.head(chain(net, x + zeros)) + zeros + torch.ones(6)


def reused(net, x):
    return net.head(net.first(net.blocks[0](net.first(x))) + net.first.weight[0])


MODELS = {
    "gpt": (lambda: GPT(11, 8, 3, 8, 2), lambda: (torch.randint(11, (8, 5)),)),
    "gpt, tied": (lambda: GPT(11, 8, 3, 8, 2, tied=True), lambda: (torch.randint(11, (8, 5)),)),
    "mask": (lambda: Masked(None), lambda: (torch.randn(8, 3, 6).double(), torch.randint(2, (8, 3, 1)))),
    **{way.__name__: (lambda way=way: Net(way), lambda: (torch.randn(8, 3, 6).double(),))
       for way in (skips, sizes, own_parameters, tuples, made, reused)},
}
SEVERAL = ("gpt, tied", "own_parameters", "reused")      # a parameter in several stages: added up in another order


def loss_of(output, target):
    output = sum(y.sum(-1) for y in output) if isinstance(output, tuple) else output
    return (output.flatten(1) * target.flatten()[:output.shape[0]].unsqueeze(1)).square().mean()


def gradients(model, outputs):
    model.zero_grad()
    sum((y * y.detach().cos()).sum() for y in outputs).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_are_the_model(name, stages):
    build, inputs = MODELS[name]
    model, given = build().double(), inputs()
    if name == "reused" and stages == 4:
        stages = 3
    want = model(*given)
    made = cut_traced(model, stages)
    assert len(made) == stages
    assert {id(p) for stage in made for p in stage.parameters()} <= {id(p) for p in model.parameters()}
    found = given
    for stage in made:
        found = stage(*(found if isinstance(found, tuple) else (found,)))
    found, want = (y if isinstance(y, tuple) else (y,) for y in (found, want))
    assert len(found) == len(want) and all(map(torch.equal, found, want))
    ours, theirs = gradients(model, found), gradients(model, model(*given) if len(want) > 1 else [model(*given)])
    for key, grad in theirs.items():
        if grad is None:
            assert ours[key] is None
        else:                                        # tied and repeated ones may be added up in another order
            torch.testing.assert_close(ours[key], grad, rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("schedule, ranks, recompute", [("1f1b", 2, False), ("1f1b", 3, True), ("zb-h1", 3, False)])
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_of_them_gives_gradient_accumulation(name, schedule, ranks, recompute):
    build, inputs = MODELS[name]
    model, given = build().double(), inputs()
    y = torch.randn(8, 32).double()
    plain, total = copy.deepcopy(model), 0.0
    for *part, target in zip(*(t.chunk(4) for t in (*given, y))):
        value = loss_of(plain(*part), target) / 4
        value.backward()
        total += value.item()
    runner = gt.pipeline(model, [gt.placement("cpu", [r]) for r in range(ranks)], schedule, 4, loss_of,
                         recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = runner.step(given if len(given) > 1 else given[0], y)
    assert loss.item() == total
    for (key, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), key
        if q.grad is not None:
            rtol, atol = (1e-9, 1e-12) if name in SEVERAL else (0, 0)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=rtol, atol=atol, msg=key)
    optimizer.step()
    after = runner.eval(given if len(given) > 1 else given[0], y)
    assert after.item() != loss.item(), "the stages work with the new parameters"


def calls(stage):
    return [node.target for node in stage.graph.nodes if node.op == "call_module"]


def test_a_cut_by_names_and_by_a_cost_of_ones_own():
    model = GPT(11, 8, 4, 8, 2)
    assert [calls(stage) for stage in cut_traced(model, ["blocks.1", "norm"])] == [
        ["token", "dropout", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3"], ["norm", "head"]]
    assert calls(cut_traced(model, ["blocks"])[0]) == ["token", "dropout"]
    assert calls(cut_traced(model, 2, lambda m: 9.0 if m is model.head else 1.0)[1]) == ["head"]
    with pytest.raises(StageError, match="no layer is called 'blocks.9'\n.*\n.*token, dropout, blocks.0, blocks.1"):
        cut_traced(model, ["blocks.9"])
    for names in (["blocks.2", "blocks.1"], ["token"]):
        with pytest.raises(StageError, match="do not come in this order, or the first stage is empty"):
            cut_traced(model, names)
    with pytest.raises(StageError, match="8 stages of 7 layers"):
        cut_traced(model, 8)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_dearest_stage_is_as_cheap_as_can_be(stages):
    model = Net(lambda net, x: net.head(chain(net, net.first(x)) + x))
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, wide), nn.Linear(wide, 6)) for wide in (9, 2, 30, 4, 11, 5))
    layers = [model.first, *model.blocks, model.head]

    def dearest(parts):
        return max(sum(map(parameters, part)) for part in parts)

    cuts = ([0, *rest, len(layers)] for rest in itertools.combinations(range(1, len(layers)), stages - 1))
    best = min(dearest([layers[a:b] for a, b in zip(cut, cut[1:])]) for cut in cuts)
    assert dearest([list(map(model.get_submodule, calls(stage))) for stage in cut_traced(model, stages)]) == best


def test_only_what_is_needed_crosses_and_sizes_are_made_again():
    _, second, third = cut_traced(Masked(None), ["blocks.1", "head"])
    assert [[node.name for node in stage.graph.nodes if node.op == "placeholder"] for stage in (second, third)] == [
        ["mask", "mul"], ["mask", "mul_3"]]
    second = cut_traced(Net(sizes), ["blocks.3"])[1]
    assert [node.name for node in second.graph.nodes if node.op == "placeholder"] == ["x", "blocks_2"]


def test_modes_and_inputs_with_a_default_are_left_alone():
    model = GPT(11, 8, 2, 8, 2, dropout=0.5)
    model.blocks[0].eval()
    modes, held = [m.training for m in model.modules()], set(vars(model))
    stages = cut_traced(model, 2)
    assert [m.training for m in model.modules()] == modes and set(vars(model)) == held
    ids = torch.randint(11, (2, 5))
    for mode in (True, False):                       # leaves of the stages are modules of the model
        model.train(mode)
        torch.manual_seed(SEED)
        want = model(ids)
        torch.manual_seed(SEED)
        assert torch.equal(stages[1](stages[0](ids)), want)


def branches(net, x):
    return chain(net, x) if x.sum() > 0 else x


def drops(net, x):
    return net.head(F.dropout(net.first(x), 0.5, net.training))


def normalizes(net, x):
    return net.head(F.batch_norm(net.first(x), net.norm.running_mean, net.norm.running_var, training=net.training))


def skips_in_evaluation(net, x):
    return net.head(chain(net, x) if net.training else x)


FACTORIES = {
    "tril_indices": lambda x: x[:, torch.tril_indices(4, 4, -1)[0]],
    "triu_indices": lambda x: x[:, torch.triu_indices(4, 4, 1)[1]],
    "logspace": lambda x: x * torch.logspace(0, 1, 6), "hann_window": lambda x: x * torch.hann_window(x.shape[1]),
    "kaiser_window": lambda x: x + torch.kaiser_window(6), "scalar_tensor": lambda x: x * torch.scalar_tensor(2.0),
    "as_tensor": lambda x: x * torch.as_tensor([1.0, 2, 3, 4, 5, 6]), "asarray": lambda x: x * torch.asarray([2.0]),
    "fftfreq": lambda x: x + torch.fft.fftfreq(6), "normal": lambda x: x + torch.normal(0.0, 1.0, (6,)),
    "signal.windows": lambda x: x * torch.signal.windows.hann(6),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_model_may_make_tensors_by_any_factory(name):
    model = Net(lambda net, x: net.head(chain(net, FACTORIES[name](net.first(x))) + FACTORIES[name](x))).eval()
    x = torch.randn(5, 6)
    torch.manual_seed(SEED)
    want = model(x)
    torch.manual_seed(SEED)
    out = (x,)
    for stage in cut_traced(model, 3):
        out = stage(*out)
        out = out if isinstance(out, tuple) else (out,)
    assert torch.equal(out[0], want)


def adds_in_place(net, x):
    x = net.first(x)
    y = chain(net, x)
    x.add_(1)
    return net.head(y) + x


def constant(net, x):
    return net.head(net.first(x) + torch.Tensor([1.0]))


def keeps(net, x):
    net.last = net.first(x)
    return net.head(net.last)


@pytest.mark.parametrize("way, text", [
    (branches, "at test_tracing.py:{line} TraceError: symbolically traced variables cannot be used as inputs to"),
    (drops, "depends on self.training, in training %dropout"),
    (normalizes, "depends on self.training, in training %batch_norm"),
    (skips_in_evaluation, "depends on self.training, in training %blocks_0"),
    (adds_in_place, "add_ changes first in place"),
    (constant, "its forward leaves _tensor_constant0 in it"),
    (keeps, "its forward leaves last in it"),
])
def test_what_would_not_be_the_model_is_refused(way, text):
    model = Net(way)
    held = set(vars(model))
    with pytest.raises(StageError) as error:
        gt.pipeline(model, [gt.placement("cpu", [r]) for r in range(2)])
    assert text.format(line=way.__code__.co_firstlineno + 1) in str(error.value).replace("tests/", ""), error.value
    assert "[first, second]" in str(error.value) or way is adds_in_place
    assert set(vars(model)) == held and model.training
