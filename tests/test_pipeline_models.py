"""Pipelines of models as people write them: logits beside the loss, inputs by name, None between stages.

Oracle: the plain model on each micro-batch, its gradients added up.
"""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt

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
    """Losses averaged over micro-batches, logits, and gradients."""
    parts = list(zip(*(t.tensor_split(MICRO) for t in rows)))
    outputs = [model(*part) for part in parts]
    loss = sum(loss for _, loss in outputs) / MICRO
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
