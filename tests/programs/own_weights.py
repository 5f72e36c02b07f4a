"""Where torch's fully_shard fails or has no such case, a model under ours does as plain torch, or says what to type.

The oracle is a copy of the model that has the batches of all ranks, one after the other.
"""
from __future__ import annotations

import copy
import gc
import tempfile
import warnings

import torch
import torch.distributed as dist
from own_batches import Block, Net, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
import globaltensor.dtensor as D
from globaltensor.dtensor.own_weights import OwnLayer

N, RANK = gt.world_size(), gt.rank()
MESHES = [D.init_device_mesh("cpu", (N,))]
if N == 4:                                           # torch's hybrid sharding
    MESHES.append(D.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "dp")))


def batches():
    return [torch.randn(3, 6, generator=torch.Generator().manual_seed(r)) for r in range(N)]


def check(make, shards, run, mesh):
    """Gradients, and what each rank is given, as of the plain model."""
    torch.manual_seed(3)
    plain = make()
    model = copy.deepcopy(plain)
    for part in shards(model):
        D.fully_shard(part, mesh=mesh)
    for _ in range(2):
        wanted = [run(plain, x) for x in batches()]
        (sum(wanted) / N).backward()
        found = run(model, batches()[RANK])
        torch.testing.assert_close(found, wanted[RANK])
        found.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert D.DTensor.__instancecheck__(p) and (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    return model


class Hidden:
    """An object that nobody looks into."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Nested(nn.Module):
    """Layers in a layer, which the model calls by themselves as well."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x):
        y = self.block[0](x) + self.block[1].up(x)[:, :6]
        return self.head(self.block[1](y)) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(6, 6), Block(), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.block(self.embedding(x.argmax(-1))))


class GivesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.first(x)), self.layer.weight, self.layer.bias * 1


class HidesItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return Hidden(self.layer(self.layer(x)).tanh())


class WithHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([HidesItsOutput(), Block()])

    def forward(self, x):
        return self.layers[1](self.layers[0](self.layers[1](x)).value)


class Calls(nn.Module):
    """Itself, and a layer twice."""

    def __init__(self):
        super().__init__()
        self.block, self.last = Block(), nn.Linear(6, 6)

    def forward(self, x, again=True):
        x = self.block(self.block(x))
        return self.last(self(x, False) if again else x)


class LayerThatGivesAWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([GivesItsWeight(), GivesItsWeight()])

    def forward(self, x):
        (x, w, b), (y, v, c) = self.layers[0](x), self.layers[1](x)
        return (y @ w) * b + (x @ v.t()).tanh() * c


def squares(m, x):
    return m(x).square().mean()


def penalty(m, x):
    x = x.clone().requires_grad_()
    grad, = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return grad.square().mean() + m(x).mean()


def recomputed(m, x):
    return checkpoint(m, x, use_reentrant=False).square().mean()


def compiled(m, x):
    torch._dynamo.reset()
    return torch.compile(m, backend="aot_eager")(x).square().mean()


def layers_of(m):
    return *m.blocks, m


def net():
    return Net(lambda m, x: m.body(x))


def nested(m):
    return (m.block[1].up, m.block[1], m.block[0], m)


CASES = [(net, layers_of, squares), (net, layers_of, penalty), (net, layers_of, recomputed), (net, layers_of, compiled),
         (net, lambda m: (m,), penalty), (net, lambda m: (m,), compiled),
         (Nested, nested, squares), (Nested, nested, penalty), (Nested, nested, recomputed),
         (Tied, lambda m: (m.head, m.block, m), squares), (Tied, lambda m: (m,), squares),
         (LayerThatGivesAWeight, lambda m: (*m.layers, m), squares), (WithHidden, lambda m: (*m.layers, m), squares),
         (Calls, lambda m: (m,), squares)]
warnings.simplefilter("ignore")
for mesh in MESHES:
    for i, case in enumerate(CASES):
        try:
            check(*case, mesh)
        except Exception as e:
            raise AssertionError(f"case {i}, {case}") from e

# A teacher is no part of the student that calls it.
teacher = D.fully_shard(nn.Linear(6, 6), mesh=MESHES[0])


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return (self.layer(x) - teacher(x)).square().mean()


student = D.fully_shard(Student(), mesh=MESHES[0])
student(rows(2, 6)).backward()
assert student.layer.weight.grad is not None and teacher.weight.grad is not None

# What was gathered is freed between forward and backward, and nothing stays in its place behind an error.
model = check(net, layers_of, squares, MESHES[0])
out = model(rows(2, 6))


def held():
    layers = [x for x in gc.get_objects() if type(x) is OwnLayer and x.module in {*model.blocks}]
    assert len(layers) == 2
    return [t.untyped_storage().nbytes() for x in layers for s in x.saved.values() for ts in s for t in ts.values()]


assert held() and not any(held())
out.sum().backward(retain_graph=True)
assert held() and not any(held())
out.sum().backward()


def refuse(grad):
    raise ArithmeticError("on purpose")


x = rows(2, 6).requires_grad_()
x.register_hook(refuse)
try:
    model(x).sum().backward()
except ArithmeticError:
    pass
gc.collect()
assert all(isinstance(p, gt.GlobalTensor) for p in model.parameters())

loss = model(rows(2, 6)).square().sum()
torch.optim.SGD(model.parameters(), lr=0.1).step()
try:
    loss.backward()
    raise AssertionError("parameters were written to before backward")
except RuntimeError as e:
    assert "modified by an inplace operation" in str(e), e

for wrong, said in [(lambda: model(gt.from_full(torch.ones(4, 6), MESHES[0], gt.sbp.split(0))), "to_local"),
                    (lambda: copy.deepcopy(model)(rows(2, 6)), "a copy of a Net")]:
    try:
        wrong()
        raise AssertionError(f"not refused: {said}")
    except gt.GlobalTensorError as e:
        assert said in str(e), e

# Buffers are each rank's own, and are saved and loaded.
model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
D.fully_shard(model, mesh=MESHES[0])
model(rows(4, 6))
folder = [tempfile.mkdtemp() if RANK == 0 else None]
dist.broadcast_object_list(folder)
try:
    gt.save({"model": model}, folder[0])
    raise AssertionError("each rank has buffers of its own")
except gt.GlobalTensorError as e:
    assert "the ranks differ in model/1.running_mean" in str(e), e
for b in model.buffers():
    dist.broadcast(b, 0)
gt.save({"model": model}, folder[0])
gt.load({"model": model}, folder[0])
for parts in (lambda m: [m], lambda m: [*m, m]):      # torchtitan's start: layers first
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    for part in parts(model):
        D.fully_shard(part, mesh=MESHES[0])
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    model(rows(4, 6)).square().mean().backward()
    assert model[0].weight.grad.full_tensor().isfinite().all()
    assert not isinstance(model[1].running_mean, gt.GlobalTensor)
print("as plain torch")
