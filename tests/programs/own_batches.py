"""What each rank does by itself under fully_shard: with torch's own and with globaltensor.dtensor's the same numbers.

A table of models: what goes in, what they do, and what comes out. None of it need be rows of a batch.
"""
from __future__ import annotations

import collections
import dataclasses
import sys

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
import globaltensor.dtensor as ours

gt.init()
N, RANK = dist.get_world_size(), dist.get_rank()
MESH = {torch_fsdp: torch_mesh.init_device_mesh("cpu", (N,)), ours: ours.init_device_mesh("cpu", (N,))}
HYBRID = {T: module.init_device_mesh("cpu", (1, N), mesh_dim_names=("copies", "parts"))
          for T, module in ((torch_fsdp, torch_mesh), (ours, ours))}
Pair = collections.namedtuple("Pair", "y hidden")


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    loss: torch.Tensor | None = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def inner(self, x):
        return self.down(self.norm(F.relu(self.up(x)))) * self.scale

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """`run` is what a row of the table does with it."""

    def __init__(self, run, **parts):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.temperature, self.run = nn.Parameter(torch.tensor([0.5])), run
        for name, part in parts.items():
            setattr(self, name, part)

    def body(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.temperature

    def forward(self, *args, **named):
        return self.run(self, *args, **named)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + RANK))


def batch():
    return rows(4, 6)


def output_of_two_layers(m, x):
    return m.blocks[0](m.first(x)), m.body(x)


def weight_decay_inside(m, x):
    own = [*m.first.parameters(), *m.last.parameters(), m.temperature]
    return m.body(x).square().mean() + sum(p.square().sum() for p in own)


def recomputing(use_reentrant):
    """Of a part of a layer, of the outermost module's parameters, and of a function of both kinds of layers."""
    def run(m, x):
        def again(f, *args):
            return checkpoint(f, *args, use_reentrant=use_reentrant)

        x = again(lambda x: m.first(x) * m.temperature, x)
        for block in m.blocks:
            x = x + again(lambda x, block=block: F.relu(block.inner(x)) * m.temperature, x)
        return m.last(x)
    return run


class PartOfALayer(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = Block(), use_reentrant

    def forward(self, x):
        return x + checkpoint(self.block.inner, x, use_reentrant=self.use_reentrant)


def with_parts(use_reentrant):
    return Net(lambda m, x: m.body(x), blocks=nn.ModuleList(PartOfALayer(use_reentrant) for _ in range(2)))


def outermost_recomputed(use_reentrant):
    def run(m, x):
        x = checkpoint(lambda x: m.first(x) * m.temperature, x, use_reentrant=use_reentrant)
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return m.last(x)
    return lambda: Net(run)


def norm_of_batches(m, x):
    return m.batch_norm(m.body(x))


TABLE = {                                            # name -> model, arguments
    "loss": (lambda: Net(lambda m, x, y: F.mse_loss(m.body(x), y)), lambda: (batch(), rows(4, 6, seed=1))),
    "sum": (lambda: Net(lambda m, x, y: F.mse_loss(m.body(x), y, reduction="sum")),
            lambda: (batch(), rows(4, 6, seed=1))),
    "ignored targets": (lambda: Net(lambda m, x, y: F.cross_entropy(m.body(x), y, ignore_index=0)),
                        lambda: (batch(), (torch.arange(4) + RANK) % 6)),
    "dataclass": (lambda: Net(lambda m, x: Output(y := m.body(x), y.square().mean())), lambda: (batch(),)),
    "namedtuple": (lambda: Net(lambda m, x: Pair(y := m.body(x), y * 2)), lambda: (batch(),)),
    "topk": (lambda: Net(lambda m, x: m.body(x).topk(2)), lambda: (batch(),)),
    "nested": (lambda: Net(lambda m, x: {"a": [y := m.body(x), (y * 2, {"z": y * 3})], "n": 3}), lambda: (batch(),)),
    "dict in": (lambda: Net(lambda m, batch: m.body(batch["x"]) + batch["more"][0]),
                lambda: ({"x": batch(), "more": [rows(4, 6, seed=1)]},)),
    "mask": (lambda: Net(lambda m, x, mask: m.body(torch.softmax(x @ x.mT + mask, -1) @ x)),
             lambda: (rows(2, 5, 6), torch.full((5, 5), -9.).triu(1))),
    "bank": (lambda: Net(lambda m, x, bank: (m.body(x) @ bank.t()).softmax(-1)), lambda: (batch(), torch.ones(5, 6))),
    "bank as large as a batch": (lambda: Net(lambda m, x, bank: m.body(x) @ bank.t()), lambda: (batch(), rows(4, 6))),
    "positions": (lambda: Net(lambda m, x, at: m.body(x + at[:, None])), lambda: (rows(2, 4, 6), torch.arange(4.))),
    "sequence first": (lambda: Net(lambda m, x: m.body(x)), lambda: (rows(5, 2 + RANK, 6),)),
    "uneven": (lambda: Net(lambda m, x: m.body(x)), lambda: (rows(3 + RANK, 6),)),
    "one row": (lambda: Net(lambda m, x: m.body(x)), lambda: (rows(6),)),
    "no rows": (lambda: Net(lambda m, x, y: (m.body(x)[y],)), lambda: (batch(), torch.tensor([], dtype=torch.long))),
    **{name: (lambda f=f: Net(lambda m, x: f(m.body(x))), lambda: (batch(),)) for name, f in {
        "first": lambda y: y[:1], "last": lambda y: y[-1], "turned": lambda y: y.t(), "mean": lambda y: y.mean(0),
        "norm": torch.norm, "max": torch.max, "flip": lambda y: y.flip(0), "sort": lambda y: y.sort(0),
        "softmax": lambda y: y.softmax(0), "flat": torch.flatten, "centred": lambda y: y - y.mean(0),
        "rolled": lambda y: y * y.roll(1, 0), "pairs": lambda y: y @ y.t()}.items()},
    "LSTM": (lambda: Net(lambda m, x: m.rnn(m.body(x)), rnn=nn.LSTM(6, 3, batch_first=True)), lambda: (rows(2, 3, 6),)),
    "GRU in a layer": (lambda: Net(lambda m, x: m.body(m.blocks[0](x)[0]), blocks=nn.ModuleList(
        [nn.GRU(6, 6), nn.Sequential()]), body=lambda x: x), lambda: (rows(2, 3, 6),)),
    "batch norm": (lambda: Net(norm_of_batches, batch_norm=nn.BatchNorm1d(6)), lambda: (batch(),)),
    "two layers": (lambda: Net(output_of_two_layers), lambda: (batch(),)),
    "weight decay": (lambda: Net(weight_decay_inside), lambda: (batch(),)),
    "weight out": (lambda: Net(lambda m, x: (m.body(x), m.last.weight * 2)), lambda: (batch(),)),
    "part of a layer, recomputed": (lambda: with_parts(False), lambda: (batch(),)),
    "part of a layer, recomputed reentrantly": (lambda: with_parts(True), lambda: (batch().requires_grad_(),)),
    "layers recomputed": (outermost_recomputed(False), lambda: (batch(),)),
    "layers recomputed reentrantly": (outermost_recomputed(True), lambda: (batch().requires_grad_(),)),
}


def trained(T, make, arguments, shards, mesh_of_layers, policies=(None, None)):
    """Outputs of two steps, the norms of gradients, and then parameters and buffers."""
    torch.manual_seed(7)
    model, seen = make(), []
    for part in shards(model):
        outermost = part is model
        T.fully_shard(part, mesh=(MESH if outermost else mesh_of_layers)[T],
                      **{} if (policy := policies[outermost]) is None else {"mp_policy": policy})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        out = model(*arguments())
        leaves = tree_leaves([out, getattr(out, "__dict__", {})])
        learning = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        sum((1 + i) * t.square().sum() for i, t in enumerate(learning)).backward()
        seen += [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in leaves if not isinstance(t, Output)]
        if mesh_of_layers is MESH:                   # torch has no norm of gradients on two meshes
            seen.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        assert p.placements, "plain weights were left in the module"
    return [*seen, *[whole(p).detach().clone() for p in model.parameters()], *map(whole, model.buffers())]


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def layers(m):
    return *m.blocks, m


ON_TWO_MESHES = {"loss", "uneven", "batch norm", "LSTM"}
HALF, ROUNDED = torch.bfloat16, torch_fsdp.MixedPrecisionPolicy
POLICIES = {                                         # of layers, and of the outermost module
    "weights": (ROUNDED(HALF),) * 2,
    "weights, gradients in float32": (ROUNDED(HALF, torch.float32),) * 2,
    "layers alone": (ROUNDED(HALF, torch.float32, torch.float32), None),
    "gradients alone": (ROUNDED(None, HALF),) * 2,
    "outputs": (ROUNDED(HALF), ROUNDED(HALF, output_dtype=torch.float32)),
    "no inputs": (ROUNDED(torch.float64, torch.float32, cast_forward_inputs=False), ROUNDED(torch.float64)),
}
IN_PRECISIONS = {"loss", "dict in", "dataclass", "uneven", "weight decay", "layers recomputed"}
SHARDS = {"layers": (layers, MESH), "outermost": (lambda m: (m,), MESH), "layers on another mesh": (layers, HYBRID)}


def main():
    names = sys.argv[1:] or TABLE
    for name in names:
        for how, (shards, mesh) in SHARDS.items():
            if mesh is HYBRID and name not in ON_TWO_MESHES:
                continue
            results = [trained(T, *TABLE[name], shards, mesh) for T in (torch_fsdp, ours)]
            torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6,
                                       msg=lambda text: f"{name}, {how}, rank {RANK}: {text}")
        for how, policies in POLICIES.items() if name in IN_PRECISIONS else ():
            results = [trained(T, *TABLE[name], layers, MESH, policies) for T in (torch_fsdp, ours)]
            sums_in_half = (policies[0].reduce_dtype or policies[0].param_dtype) is HALF and N > 2       # torch's
            torch.testing.assert_close(results[1], results[0], **({"rtol": 1e-2, "atol": 2e-3} if sums_in_half else
                                                                  {"rtol": 2e-5, "atol": 2e-6}),
                                       msg=lambda text: f"{name}, {how}, rank {RANK}: {text}")
    print("each of", len(names), "is as torch's")


if __name__ == "__main__":
    main()
