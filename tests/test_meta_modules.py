"""A model that was built on the meta device, made global there, and only then given memory: as built on the CPU."""
from __future__ import annotations

import pytest
import torch
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


def test_what_has_no_values_says_so():
    model = gt.parallelize(on_meta(), GRID, SPLIT)
    with pytest.raises(gt.GlobalTensorError, match="to device cpu of a tensor on placement"):
        model.to("cpu")
