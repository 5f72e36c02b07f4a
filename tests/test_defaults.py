"""torch's default device and dtype are for what a program makes: what the library makes for itself follows neither."""
from __future__ import annotations

import copy

import pytest
import torch
from shards import place
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

SEED = 5
B, S = gt.sbp.broadcast, gt.sbp.split
TWO, FIRST, SECOND = place([0, 1]), place([0]), place([1])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 8, 8, device="cpu"))

    def forward(self, tokens, top_k_index, top_k_weights):
        weights = F.one_hot(top_k_index, 4).to(tokens.dtype).mul(top_k_weights[..., None]).sum(1)
        return torch.einsum("th,ehi,te->ti", tokens, self.matrices, weights)


def _experts(x):
    model = nn.ModuleDict({"experts": Experts()})
    gt.parallelize(model, TWO, gt.Plan.of(model, axis="", experts="dp"))
    index = torch.tensor([[0, 1], [3, 2], [1, 0], [2, 2]], device="cpu")
    return model["experts"](gt.from_full(x[:4], TWO, S(0)), index, x[:4, :2])


def _pipeline(x):
    stages = [nn.Linear(8, 8, device="cpu"), nn.Linear(8, 8, device="cpu")]
    runner = gt.pipeline(stages, [FIRST, SECOND], "1f1b", micro_batches=2, loss=F.mse_loss)
    return runner.step(x, x)


def _scaler(x):
    model = gt.parallelize(nn.Linear(8, 8, device="cpu"), TWO)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model(gt.from_full(x, TWO, S(0))).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model.weight


def _view(x):
    y = gt.from_full(x, TWO, S(0))
    y[2].cumsum_(0)
    y[:, 1:3].add_(1)
    y.as_strided((3,), (1,)).mul_(2)
    return y


PROGRAMS = {
    "gt.tensor": lambda x: gt.tensor([1, 2, 3], placement=TWO, sbp=S(0)),
    "gt.tensor of a tensor": lambda x: gt.tensor(x[0], placement=TWO, sbp=S(0)),
    "gt.arange": lambda x: gt.arange(5, placement=TWO, sbp=S(0)),
    "gt.full": lambda x: gt.full((3,), 2, placement=TWO, sbp=S(0)),
    "experts": _experts,
    "a pipeline": _pipeline,
    "GradScaler": _scaler,
    "views": _view,
    "packed sequences": lambda x: nn.utils.rnn.pack_padded_sequence(
        gt.from_full(x, TWO, S(0)), torch.tensor([8, 7, 7, 3, 2, 1], device="cpu"), batch_first=True).data,
    "pooling": lambda x: F.max_pool2d(gt.from_full(x[None, None], TWO, S(2)), 3, 1, return_indices=True)[1],
    "rows by number": lambda x: gt.from_full(x, TWO, S(0))[torch.tensor([4, 0, 5], device="cpu")],
    "clipping": lambda x: nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0),
}


def _with_gradient(x):
    w = gt.from_full(x, TWO, S(0)).requires_grad_()
    w.square().sum().backward()
    return w


@pytest.mark.parametrize("name", PROGRAMS)
def test_defaults_of_a_program(name):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(SEED))

    def value(dtype):
        torch.manual_seed(SEED)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return copy.deepcopy(PROGRAMS[name](x.to(dtype)).detach().full_tensor())
        finally:
            torch.set_default_dtype(before)

    for dtype in (torch.float32, torch.float64):
        expected = value(dtype)
        with torch.device("meta"):
            assert torch.equal(value(dtype), expected)
