"""Programs in torch's style, each run with torch's own DTensor and with globaltensor.dtensor: the numbers are the same.

Only where `T` comes from differs. Of two processes, or of four.
"""
from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.experimental as torch_experimental
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
import globaltensor.dtensor as ours

gt.init()
torchs = types.SimpleNamespace(**{name: getattr(module, name) for module in (
    torch_tensor, torch_parallel, torch_experimental, torch_mesh, torch_fsdp) for name in ours.__all__
    if hasattr(module, name)})
N = dist.get_world_size()


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(model, optimizer, losses):
    """The loss of each step, and the parameters after the last. `losses` yields a loss before its backward."""
    seen = []
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(whole(loss).detach())
    return seen, [whole(p).detach().clone() for p in model.parameters()]


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def tensor_parallel(T):
    mesh = T.init_device_mesh("cpu", (N,))
    model = T.parallelize_module(ToyModel(), mesh, {"net1": T.ColwiseParallel(), "net2": T.RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)

    def losses():
        for i in range(3):
            torch.manual_seed(i)                     # every rank has the same rows
            yield model(torch.rand(20, 10)).sum()

    return trained(model, optimizer, losses())


def sequence_parallel(T):
    mesh = T.init_device_mesh("cpu", (N,))
    model = T.parallelize_module(ToyModel(), mesh, {
        "net1": T.ColwiseParallel(input_layouts=T.Shard(0)), "net2": T.RowwiseParallel(output_layouts=T.Shard(0))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)

    def losses():
        for i in range(3):
            torch.manual_seed(10 * i + dist.get_rank())          # every rank has rows of its own
            out = model(torch.rand(8, 10))
            yield (out * out).sum()

    return trained(model, optimizer, losses())


@dataclass
class Sizes:
    vocab: int = 24
    hidden: int = 16
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.head = sizes.hidden // sizes.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(sizes.hidden, sizes.hidden, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, 40, bias=False) for _ in range(2))
        self.w2 = nn.Linear(40, sizes.hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.output = nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def llama_plan(T, model, tp):
    """torchtitan's plan: the sequence is split between the layers, and gathered for them."""
    T.parallelize_module(model, tp, {
        "tok_embeddings": T.RowwiseParallel(input_layouts=T.Replicate(), output_layouts=T.Shard(1)),
        "norm": T.SequenceParallel(),
        "output": T.ColwiseParallel(input_layouts=T.Shard(1), output_layouts=T.Shard(-1), use_local_output=False)})
    for block in model.layers:
        T.parallelize_module(block, tp, {
            "attention_norm": T.SequenceParallel(),
            "attention": T.PrepareModuleInput(input_layouts=(T.Shard(1),), desired_input_layouts=(T.Replicate(),)),
            "attention.wq": T.ColwiseParallel(),
            "attention.wk": T.ColwiseParallel(),
            "attention.wv": T.ColwiseParallel(),
            "attention.wo": T.RowwiseParallel(output_layouts=T.Shard(1)),
            "ffn_norm": T.SequenceParallel(),
            "feed_forward": T.PrepareModuleInput(input_layouts=(T.Shard(1),), desired_input_layouts=(T.Replicate(),)),
            "feed_forward.w1": T.ColwiseParallel(), "feed_forward.w3": T.ColwiseParallel(),
            "feed_forward.w2": T.RowwiseParallel(output_layouts=T.Shard(1))})


def llama(T):
    mesh = T.init_device_mesh("cpu", (N,), mesh_dim_names=("tp",))
    model = Transformer(Sizes())
    llama_plan(T, model, mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses():
        for i in range(2):
            torch.manual_seed(i)
            tokens = torch.randint(0, 24, (3, 8))
            with T.loss_parallel():                  # backward runs in it, too
                yield F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    return trained(model, optimizer, losses())


def parts(T):
    """What ranks do with their own parts, and the gradients of these."""
    mesh = T.init_device_mesh("cpu", (N,), mesh_dim_names=("tp",))
    seen = []
    torch.manual_seed(dist.get_rank())               # what rank 0 has is what counts
    x = T.distribute_tensor(torch.randn(2 * N, 3), mesh, [T.Shard(0)]).requires_grad_()
    seen += [whole(x).detach(), x.to_local().detach()]
    for how in ([T.Replicate()], [T.Shard(1)], [T.Shard(0)]):
        y = (x * 2).redistribute(placements=how).to_local()
        (y * y).sum().backward()
        seen.append(whole(x.grad).clone())
        x.grad = None
    part = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)
    for how in ([T.Shard(0)], [T.Partial()]):
        whole(T.DTensor.from_local(part, mesh, how).pow(2)).sum().backward()
        seen.append(part.grad.clone())
        part.grad = None
    for y in (x.redistribute(placements=[T.Replicate()]).to_local(grad_placements=[T.Partial()]),
              x.full_tensor(grad_placements=[T.Partial()])):
        x.grad = None
        (y * (1 + dist.get_rank())).sum().backward()
        seen.append(whole(x.grad).clone())
    weight = T.distribute_tensor(torch.ones(3, 4), mesh, [T.Replicate()])
    product = T.local_map(torch.mm, out_placements=[T.Shard(0)], in_placements=([T.Shard(0)], [T.Replicate()]),
                          device_mesh=mesh)(x, weight)
    seen += [whole(product).detach(), product.placements[0].dim]
    assert isinstance(product, T.DTensor) and product.device_mesh == mesh and not isinstance(part, T.DTensor)
    return [seen]


def sharded(T):
    """FSDP2, each rank with rows of its own."""
    mesh = T.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",))
    model = Transformer(Sizes())
    for block in model.layers:
        T.fully_shard(block, mesh=mesh)
    T.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def losses():
        for i in range(2):
            torch.manual_seed(10 * i + dist.get_rank())
            tokens = torch.randint(0, 24, (3, 8))
            yield F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    return trained(model, optimizer, losses())


class NoLists(nn.Module):
    """Layers that run twice and in another order than they are written, a frozen one, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.frozen = nn.Linear(6, 5), nn.Linear(4, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        x = self.first(x) * self.scale
        for _ in range(2):
            x = x + self.frozen(F.relu(x))
        with torch.no_grad():
            x += F.relu(self.frozen(x))
        return self.last(x), x.transpose(0, 1).clone()


def sharded_modules(T):
    """FSDP2 of modules that are in no list: what comes out are each rank's rows, whatever dim they are."""
    mesh = T.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",))
    model = NoLists()
    for layer in (model.last, model.first, model.frozen, model):
        T.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = []

    def losses():
        for i in range(3):
            torch.manual_seed(10 * i + dist.get_rank())
            out, columns = model(torch.rand(3, 4))
            shapes.append([*out.shape, *columns.shape])
            yield out.pow(2).sum() + columns.sum()

    return *trained(model, optimizer, losses()), shapes


def recomputed(T):
    """FSDP2 of layers that backward runs again, which then stand in no other module's forward."""
    seen = []
    for use_reentrant in (False, True):
        mesh = T.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",))
        torch.manual_seed(7)                         # as the rows of 4 ranks are cut in another way
        model = ToyModel()
        for layer in (model.net1, model):
            T.fully_shard(layer, mesh=mesh)

        def forward(self, x, use_reentrant=use_reentrant):
            return self.net2(F.gelu(checkpoint(self.net1, x, use_reentrant=use_reentrant)))

        model.forward = types.MethodType(forward, model)
        torch.manual_seed(dist.get_rank())
        x = torch.rand(3, 10, requires_grad=True)
        model(x).pow(2).sum().backward()
        seen += [whole(p.grad) for p in model.parameters()]
    return [seen]


def uneven(T):
    """Whole values where parts are cut differently, and a module's own functions."""
    mesh = T.init_device_mesh("cpu", (N,))

    def partition(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(T.distribute_tensor(p, mesh, [T.Shard(0)])))

    model = T.distribute_module(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), mesh, partition,
        lambda module, args, mesh: T.DTensor.from_local(args[0], mesh, [T.Replicate()]),
        lambda module, out, mesh: out.redistribute(placements=[T.Replicate()]).to_local())
    torch.manual_seed(3)
    out = model(torch.randn(5, 3))
    out.pow(2).sum().backward()
    return [[out.detach(), *[whole(p.grad) for p in model.parameters()]]]


def compiled(T):
    """Parts become a tensor and parts again in one graph."""
    mesh = T.init_device_mesh("cpu", (N,))
    model = T.parallelize_module(ToyModel(), mesh, {
        "net1": T.ColwiseParallel(input_layouts=T.Shard(0)), "net2": T.RowwiseParallel(output_layouts=T.Shard(0))})
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(dist.get_rank())
    out = step(torch.rand(8, 10))
    out.pow(2).sum().backward()
    return [[out.detach(), *[whole(p.grad) for p in model.parameters()]]]


def scattered_in_a_graph(T):
    """One rank's tensor, which is made inside of what is compiled. (torch writes into what it distributes.)"""
    mesh = T.init_device_mesh("cpu", (N,))

    def program(t):
        rows = T.distribute_tensor(t.clone(), mesh, [T.Shard(0)])
        copies = T.distribute_tensor(t[0].clone(), mesh, [T.Replicate()], src_data_rank=N - 1)
        number = T.distribute_tensor(t[0, 0].clone(), mesh, [T.Replicate()])
        return rows * 2 + copies, copies * number, rows.redistribute(placements=[T.Shard(1)])

    t = torch.rand(2 * N, 3) + dist.get_rank()
    return [[whole(x) for x in torch.compile(program, backend="aot_eager", fullgraph=T is ours)(t)]]


def groups(T):
    """torch's own collectives among the ranks of a dim, of a mesh and of a part of it."""
    mesh = T.init_device_mesh("cpu", (1, N), mesh_dim_names=("dp", "tp"))
    seen = []
    for group in (mesh.get_group("tp"), mesh["tp"].get_group(), mesh.get_all_groups()[0], mesh["dp"].get_group(0)):
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=group)
        seen.append(x)
    return [seen]


PROGRAMS = [tensor_parallel, sequence_parallel, llama, parts, uneven, sharded, sharded_modules, recomputed, compiled,
            scattered_in_a_graph, groups]
for program in PROGRAMS:
    if len(sys.argv) > 1 and program.__name__ not in sys.argv[1:]:
        continue
    results = []
    for T in (torchs, ours):
        torch.manual_seed(7)
        results.append(program(T))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6,
                               msg=lambda text: f"{program.__name__}, rank {dist.get_rank()}: {text}")
    print(program.__name__, "is the same")
