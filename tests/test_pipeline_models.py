"""Pipelines of models as people write them: logits beside the loss, inputs by name, None between stages.

Oracle: the plain model on each micro-batch, its gradients added up.
"""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import PROGRAMS, RUN, good
from torch import nn

import globaltensor as gt
from globaltensor.pipelining.layer_lists import list_of_layers

SEED, MICRO = 20_261_123, 3
print(f"tests/test_pipeline_models.py: SEED={SEED}")
PLACES = [gt.placement("cpu", [0, 1], ("dp",)), gt.placement("cpu", [2], ("dp",))]


class Language(nn.Module):
    """As nanoGPT is written: targets may be left out, and what comes back is logits and loss."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, ids, scale=None, targets=None):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        if scale is not None:
            x = x * scale.unsqueeze(-1)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, 11), targets.view(-1))
        return logits, loss


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.words, self.blocks = model.words, model.blocks

    def forward(self, ids, mask=None, targets=None):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return x, mask, targets


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.head = model.head

    def forward(self, x, mask, targets):
        logits = self.head(x if mask is None else x * mask.unsqueeze(-1))
        return {"logits": logits, "state": None, "loss": F.cross_entropy(logits.view(-1, 11), targets.view(-1))}


def batch():
    generator = torch.Generator().manual_seed(SEED)
    ids, targets = torch.randint(11, (2, 7, 5), generator=generator)
    return ids, targets, torch.rand(7, 5, generator=generator)


def expected(model, rows):
    """The mean of losses over the rows of micro-batches, logits, and gradients."""
    parts = list(zip(*(t.tensor_split(MICRO) for t in rows)))
    outputs = [model(*part) for part in parts]
    loss = sum(loss * len(part[0]) for (_, loss), part in zip(outputs, parts)) / len(rows[0])
    loss.backward()
    return loss.detach(), torch.cat([logits for logits, _ in outputs]).detach(), {
        name: p.grad for name, p in model.named_parameters()}


def plain():
    torch.manual_seed(SEED)
    return Language()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.long)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", ["traced", "by hand"])
def test_logits_and_loss_of_inputs_by_name(how, scaled, schedule):
    model, (ids, targets, scale) = plain(), batch()
    one = copy.deepcopy(model)
    want, logits, gradients = (expected(one, (ids, scale, targets)) if scaled else
                               expected(lambda_of(one), (ids, targets)))
    named = {"targets": targets}
    if how == "traced":
        names = [*(["scale"] if scaled else []), "targets"]
        runner = gt.pipeline(model, PLACES, schedule, MICRO, inputs=names)
        named["scale"] = scale if scaled else None
    else:
        runner = gt.pipeline([First(model), Last(model)], PLACES, schedule, MICRO)
        named["mask"] = scale if scaled else None
    got = runner.step(ids, **named)
    torch.testing.assert_close(got.full_tensor(), want)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), gradients[name], msg=lambda m, name=name: f"{name}: {m}")
    own_logits, *others, own_loss = runner.eval(ids, **named)
    assert others == ([None] if how == "by hand" else [])
    torch.testing.assert_close(own_logits.full_tensor(), logits)
    torch.testing.assert_close(own_loss.full_tensor(), want)


def lambda_of(model):
    """The model without a scale, called with ids and targets."""
    class Without(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def named_parameters(self):
            return model.named_parameters()

        def forward(self, ids, targets):
            return model(ids, targets=targets)
    return Without()


def test_a_traced_model_generates_without_a_loss():
    model, (ids, _, _) = plain(), batch()
    logits = model(ids)[0].detach()
    got, loss = gt.pipeline(model, PLACES, "1f1b", MICRO).eval(ids)
    assert loss is None
    torch.testing.assert_close(got.full_tensor(), logits)


def test_what_does_not_fit_says_so():
    ids, targets, _ = batch()
    with pytest.raises(gt.StageError, match="a Language has no input 'labels'"):
        gt.pipeline(plain(), PLACES, "1f1b", MICRO, inputs=["labels"])
    runner = gt.pipeline(plain(), PLACES, "1f1b", MICRO)
    with pytest.raises(gt.StageError, match="stage 0 of 2 fails.*"):
        runner.step(ids, targets=targets)
    with pytest.raises(gt.ArgumentError, match="named inputs beside a list"):
        runner.step(list(ids.tensor_split(MICRO)), targets=targets)
    with pytest.raises(gt.ArgumentError, match="a pipeline without inputs"):
        runner.eval()


# ------------------------------------------------------------------------------------------------ by the list of layers


def causal_lm(name, dropout=0.0):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(SEED)
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, max_position_embeddings=16))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=16, n_layer=4, n_head=4, vocab_size=24, n_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout))


@pytest.mark.parametrize("name", [pytest.param("Llama", marks=pytest.mark.long), "GPT-2"])
def test_models_of_transformers_train_and_generate_in_stages(name):
    """GPT-2's head is its embedding, of another stage."""
    model = causal_lm(name)
    one = copy.deepcopy(model)
    ids = torch.randint(3, 24, (6, 5), generator=torch.Generator().manual_seed(SEED))
    want = sum(one(part, labels=part).loss for part in ids.tensor_split(MICRO)) / MICRO
    want.backward()
    runner = gt.pipeline(model, PLACES, "1f1b", MICRO, inputs=["labels"])
    torch.testing.assert_close(runner.step(ids, labels=ids).full_tensor(), want.detach())
    for (key, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, key=key: f"{key}: {m}")
    model.eval()
    words = ids
    for _ in range(3):
        words = torch.cat([words, runner.eval(words).full_tensor()[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(words, one.eval().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False,
                                                  suppress_tokens=None))


def test_dropout_before_the_layers_is_drawn_once():
    model = causal_lm("GPT-2", dropout=0.3)
    one = copy.deepcopy(model)
    ids = torch.randint(3, 24, (6, 5), generator=torch.Generator().manual_seed(SEED))
    single = [gt.placement("cpu", [0]), gt.placement("cpu", [1])]
    runner = gt.pipeline(model, single, "1f1b", MICRO, inputs=["labels"], starts=["transformer.h.1"])
    ours = runner.step(ids, labels=ids)
    one.to_global(gt.placement("cpu", [0]), gt.sbp.broadcast)
    losses = []
    for part, seed in zip(ids.tensor_split(MICRO), runner.seeds):
        torch.manual_seed(seed)
        part = gt.from_full(part, gt.placement("cpu", [0]), gt.sbp.broadcast)
        losses.append(one(part, labels=part).loss.item())
    assert ours.item() == pytest.approx(sum(losses) / MICRO, rel=1e-5)


class Layered(nn.Module):
    """Of a forward that torch.fx does not follow."""

    def __init__(self, order=(0, 1, 2, 3), both=False, named=False):
        super().__init__()
        self.words, layers = nn.Embedding(11, 8), [nn.Linear(8, 8) for _ in range(4)]
        self.layers = nn.ModuleDict({f"layer{k}": m for k, m in enumerate(layers)}) if named else nn.ModuleList(layers)
        self.order, self.both = order, both

    def forward(self, ids):
        first = x = self.words(ids)
        if ids.max() > 10:
            raise IndexError
        for k in self.order:
            x = [*self.layers.children()][k](x)
        return (x + first if self.both else x).sum()


def test_layers_may_have_names():
    """As those of torchtitan's models. Beside a list, a dict is none: multi-task heads are one."""
    torch.manual_seed(0)
    listed = Layered()
    named = Layered(named=True)
    named.load_state_dict({name.replace("layers.", "layers.layer"): t for name, t in listed.state_dict().items()})
    ids = batch()[0]
    ours, theirs = (gt.pipeline(model, PLACES, "1f1b", MICRO) for model in (named, listed))
    assert ours.step(ids).item() == theirs.step(ids).item()
    for a, b in zip(named.parameters(), listed.parameters(), strict=True):
        assert a.placement == b.placement and torch.equal(a.grad.full_tensor(), b.grad.full_tensor())
    both = nn.ModuleDict({"body": Layered(), "heads": nn.ModuleDict({k: nn.Linear(99, 99) for k in "ab"})})
    assert list_of_layers(both)[0] == "body.layers" and list_of_layers(Layered(named=True))[0] == "layers"


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 1, 2, 3, 3), (0, 1)], ids=str)
def test_layers_in_another_order_are_refused(order):
    ids = batch()[0]
    gt.pipeline(Layered(), PLACES, "1f1b", MICRO).step(ids)
    with pytest.raises(gt.StageError, match=r"stage [01] of 2 fails(.|\n)*(does not run|SkippedLayer)"):
        gt.pipeline(Layered(order), PLACES, "1f1b", MICRO).step(ids)


def test_what_a_later_stage_cannot_know_is_nan():
    assert gt.pipeline(Layered(both=True), PLACES, "1f1b", MICRO).step(batch()[0]).isnan().item()


@pytest.mark.long
@pytest.mark.processes
def test_gpt2_in_stages_that_are_processes():
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert good([*RUN, "-n", "3", PROGRAMS / "pipeline_gpt2.py"], timeout=300).count("equal") == 3


class Shares(nn.Module):
    """A stage whose forward may write to what it shares with another one."""

    def __init__(self, weight, mean, writes=""):
        super().__init__()
        self.weight, self.writes = weight, writes
        self.register_buffer("mean", mean)

    def forward(self, x):
        with torch.no_grad():
            {"": lambda _: None, "weight": self.weight.clamp_, "mean": self.mean.add_}[self.writes](0.2)
        return torch.tanh(x @ self.weight) * self.mean


@pytest.mark.parametrize("writes", ["", "weight", "mean"])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_stage_writes_to_what_it_shares_with_another(writes, writer):
    torch.manual_seed(3)
    weight, mean = nn.Parameter(torch.randn(6, 6)), torch.ones(6)
    stages = [Shares(weight, mean, writes if k == writer else "") for k in range(2)]
    plain, x = copy.deepcopy(nn.Sequential(*stages)), torch.randn(4, 6)
    runner = gt.pipeline(stages, [gt.placement("cpu", [0]), gt.placement("cpu", [1])], "1f1b", micro_batches=1,
                         loss=lambda y: y.pow(2).mean())
    if writes:
        with pytest.raises(ValueError, match=f"writes to {writes}, which it shares"):
            runner.step(x)
        return
    torch.testing.assert_close(runner.step(x).full_tensor(), plain(x).pow(2).mean())
