"""A model that was built on the meta device, made global there, and only then given memory: as built on the CPU."""
from __future__ import annotations

import importlib.util

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good
from torch import nn

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
SPLIT = {"0.weight": {"tp": S(0)}, "0.bias": {"tp": S(0)}, "2.weight": {"tp": S(1)}}


def build():
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3), nn.BatchNorm1d(3), nn.Embedding(5, 3))


def on_meta():
    with torch.device("meta"):
        return build()


def reset(model, seed=7):
    torch.manual_seed(seed)
    for layer in model:
        layer.reset_parameters()


WAYS = {
    "parallelize": lambda model: gt.parallelize(model, GRID, SPLIT),
    "to_global": lambda model: model.to_global(GRID, lambda name, p: (B, S(0) if p.dim() else B)),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_model_that_is_built_on_the_cpu(way):
    late, early = WAYS[way](on_meta()), WAYS[way](build())
    for name, p in late.named_parameters():
        assert isinstance(p, nn.Parameter) and p.is_global and p.is_meta and p.requires_grad, name
        assert p.placement == gt.placement("meta", [[0, 1], [2, 3]], ("dp", "tp")) and "[" in repr(p)
    late.to_empty(device="cpu")
    for (name, a), b in zip(late.state_dict().items(), early.state_dict().values()):
        assert (a.placement, a.sbp, a.shape, a.dtype) == (b.placement, b.sbp, b.shape, b.dtype), name
        assert [s.shape for s in a.shards.values()] == [s.shape for s in b.shards.values()], name
    losses = []
    for model in (late, early):
        reset(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = gt.from_full(torch.arange(48.).reshape(8, 6).sin(), GRID, (S(0), B))
        for _ in range(3):
            loss = model[:4](x).square().mean() + model[4](torch.tensor([1, 3])).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1] and losses[0] == losses[0]


def test_a_checkpoint_is_loaded_into_it(tmp_path):
    saved = gt.parallelize(build(), GRID, SPLIT)
    gt.save(saved.state_dict(), tmp_path / "checkpoint")
    model = gt.parallelize(on_meta(), gt.placement("cpu", [0, 1])).to_empty(device="cpu")
    gt.load(model.state_dict(), tmp_path / "checkpoint")
    for (name, a), b in zip(model.state_dict().items(), saved.state_dict().values()):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name


def test_what_has_no_values_says_so(tmp_path):
    model = gt.parallelize(on_meta(), GRID, SPLIT)
    with pytest.raises(gt.GlobalTensorError, match="to device cpu of a tensor on placement"):
        model.to("cpu")
    for x in (torch.ones(2, 6), gt.ones(2, 6, placement=GRID, sbp=B)):
        with pytest.raises(gt.MixedPlacementError, match="weight has no values, as x has") as raised:
            model[0](x)
        assert "gt.materialize(model)" in raised.value.fix and "test_meta_modules.py" in raised.value.where
    with pytest.raises(gt.CheckpointError, match="is on the meta device"):
        gt.save(build().state_dict(), tmp_path)
        gt.load(model.state_dict(), tmp_path)


# ----------------------------------------------------------------------------------------------------- materialize


class Scaled(nn.Module):
    """Initialised by the model around it, by `.data`, with a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("table", torch.empty(3), persistent=False)

    def reset_parameters(self):
        self.table.copy_(torch.arange(3.0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), Scaled(), nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
        self.layers[3].weight = self.layers[2].weight            # tied
        self.lstm, self.attention = nn.LSTM(3, 5), nn.MultiheadAttention(6, 2)

    def _init_weights(self, module):
        if isinstance(module, Scaled):
            module.weight.data.normal_(0, 3)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif module is self:
            module.layers[0].bias.zero_()            # a container may write what is inside it


def transformers_model(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=23, n_positions=8, bos_token_id=0, eos_token_id=0))


MODELS = {"torch": build, "own": Model, "Llama": lambda: transformers_model("Llama"),
          "GPT2": lambda: transformers_model("GPT2")}


def started(model_of, where, fill=gt.materialize):
    with torch.device("meta"):
        model = model_of()
    gt.parallelize(model, where)
    torch.manual_seed(11)
    parameters = list(model.parameters())
    fill(model)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    return {name: t.detach().full_tensor() for name, t in [*model.named_parameters(), *model.named_buffers()]}, model


@pytest.mark.parametrize("name", MODELS)
def test_materialized_it_is_the_model_of_one_rank_and_distributed_as_plain_ones(name):
    spread, model = started(MODELS[name], GRID)
    one, _ = started(MODELS[name], gt.placement("cpu", [2]))
    assert [n for n in one if not torch.equal(one[n], spread[n])] == []
    torch.manual_seed(3)
    plain = MODELS[name]()
    for n, t in [*plain.named_parameters(), *plain.named_buffers()]:
        own, t = spread[n], t.detach()
        assert own.dtype == t.dtype and own.shape == t.shape and bool(own.isfinite().all()), n
        if name == "own":
            continue                                 # whose constructor leaves it as it was in memory
        if t.numel() > 200:
            assert 0.8 < float(own.std() / t.std()) < 1.25 or own.std() == t.std() == 0, n
        if not n.endswith("weight"):
            assert torch.equal(own, t) or t.std() > 0, n
    assert gt.materialize(model) is model            # which has its values already
    if name == "own":
        assert spread["layers.1.table"].tolist() == [0, 1, 2] and not spread["layers.0.bias"].any()
        assert model.layers[3].weight is model.layers[2].weight and spread["layers.2.weight"].std() < 1 < 2 < spread[
            "layers.1.weight"].std()


@pytest.mark.parametrize("name", ["own", "GPT2", "Llama"])
def test_files_fill_it_and_what_they_lack_is_initialised(name, tmp_path):
    _, saved = started(MODELS[name], gt.placement("cpu", [0, 1]))
    with torch.no_grad():
        for p in saved.parameters():
            p.add_(1)
    gt.save({"model": saved}, tmp_path / "ours")
    gt.save_safetensors(saved, tmp_path / "theirs")
    for fill in (lambda model: gt.load_safetensors(model, tmp_path / "theirs"),
                 lambda model: gt.load({"model": model}, tmp_path / "ours")):
        got, _ = started(MODELS[name], GRID, fill)
        for n, t in [*saved.named_parameters(), *saved.named_buffers()]:
            assert torch.equal(got[n], t.full_tensor()), n


def test_what_nobody_initialises_is_named():
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", 2.0 ** -torch.arange(4), persistent=False)

    with pytest.raises(gt.GlobalTensorError, match=r"the buffer '0.angles' of a Sequential has no values") as raised:
        started(lambda: nn.Sequential(Rope()), GRID)
    assert "def reset_parameters(self) in Rope" in raised.value.fix
    with pytest.raises(gt.GlobalTensorError, match="'0.weight' is on the meta device, and not global"):
        gt.materialize(on_meta())
    with pytest.raises(gt.GlobalTensorError, match="shall stay there"):
        gt.materialize(gt.parallelize(on_meta(), gt.placement("meta", [0, 1])))


def growth(ranks, width, layers):
    parts, most = good([*RUN, "-n", ranks, PROGRAMS / "started.py", width, layers], environment(), 300).split()
    return int(parts), float(most)


def test_it_is_started_with_little_more_memory_than_its_parts():
    parts, most = growth(2, 1_024, 40)
    assert parts > 80e6 and most < 1.2


@pytest.mark.long
def test_a_model_of_3_gb_is_started_with_little_more_memory_than_its_parts():
    parts, most = growth(4, 4_096, 45)
    assert 4 * parts > 3e9 and most < 1.2


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("ranks", [8, 64])
def test_70_billion_parameters_are_planned_in_10_seconds_and_1_gb(ranks):
    seconds, megabytes, own = map(float, good([PYTHON, PROGRAMS / "planned.py", ranks], timeout=300).split())
    assert seconds < 10 and megabytes < 1_000 and 17 < own < 18      # bfloat16, split in 8
