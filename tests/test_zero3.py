"""ZeRO 3 layer by layer: plain torch's numbers, few moves, the published bytes, two layers' parameters at a time."""
from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from shards import place
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
from globaltensor.parallel import zero3
from globaltensor.runtime.world import world

S, B = gt.sbp.split, gt.sbp.broadcast
SEED, LAYERS, HIDDEN = 17, 4, 12
PLACES = {"dp": ([0, 1], ("dp",)), "dp of 4": ([3, 1, 0, 2], ("dp",)), "replicas": ([[0, 1], [2, 3]], ("out", "dp")),
          "dp x tp": ([[0, 1], [2, 3]], ("dp", "tp"))}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Mixed(nn.Module):
    """Its modules run in another order than it has them, in lists of lists and dicts; one does not run at all."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, 8, bias=False)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(HIDDEN), Block()]) for _ in range(2))
        self.more = nn.ModuleDict({"first": Block(), "codes": nn.Embedding(8, HIDDEN)})
        self.body = nn.ModuleDict({"last": nn.ModuleList([Block()])})
        self.head.weight = self.more["codes"].weight
        self.unused = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.more["first"](x) + self.more["codes"](x[..., 0].gt(0).long())
        for norm, block in self.blocks:
            x = block(norm(x))
        return self.head(self.body["last"][0](x))


def made(name, net=Net):
    """A plain net and a global one under ZeRO 3, with optimizers and inputs."""
    where = place(*PLACES[name])
    torch.manual_seed(SEED)
    plain, x = net().double(), torch.randn(8, 3, HIDDEN).double()
    rows = {"*.up.*": {"tp": S(0)}, "*.down.weight": {"tp": S(1)}} if "tp" in where.axis_names else {}
    model = gt.parallelize(copy.deepcopy(plain), where, rows)
    ours = gt.zero(torch.optim.AdamW(model.parameters(), lr=0.01), stage=3, model=model)
    lies = {axis: S(0) for axis in where.axis_names if axis != "tp"}
    return (plain, x, torch.optim.AdamW(plain.parameters(), lr=0.01)), (model, gt.from_full(x, where, lies), ours)


def same(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(p.full_tensor(), q[1], rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")


def train(nets, steps, how):
    """Steps of both nets, which stay the same."""
    for _ in range(steps):
        for net, x, optimizer in nets:
            how(net, x)
            optimizer.step()
            optimizer.zero_grad()
        same(nets[1][0], nets[0][0])


def once(net, x):
    net(x).pow(2).mean().backward()


def two_at_once(net, x):
    """Both forward passes before any backward."""
    losses = [net(x * k).pow(2).mean() for k in (1.0, 0.5)]
    for loss in losses:
        loss.backward()


def in_turns(net, x):
    for k in (1.0, 0.5):
        net(x * k).pow(2).mean().backward()


def looked_at_between(net, x):
    with torch.no_grad():
        net(x)
    net(x)                                           # nobody asks for its gradients
    once(net, x)


def recomputed(net, x):
    for block in net.blocks:
        block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False)
    once(net, x)


def whole_layers_recomputed(net, x, reentrant=False):
    """Backward runs each layer forward again, hooks and all."""
    x = x.detach().requires_grad_()
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    x.pow(2).mean().backward()


reentrantly_recomputed = partial(whole_layers_recomputed, reentrant=True)
reentrantly_recomputed.__name__ = "reentrantly_recomputed"


def after_an_error(net, x):
    with pytest.raises(RuntimeError):
        net(x[..., 1:])
    once(net, x)


def loss_of_the_middle(net, x):
    (net.blocks[1](net.blocks[0](x)).pow(2).mean()).backward()


def twice(net, x):
    loss = net(x).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def losses_of_one_graph(net, x):
    middle = net.blocks[1](net.blocks[0](x))
    end = net.blocks[2](middle)
    middle.pow(2).mean().backward(retain_graph=True)
    end.pow(2).mean().backward()


def losses_of_two_graphs(net, x):
    """In one forward pass: the first backward pass goes through two of its layers, the second through the others."""
    first = net.blocks[1](net.blocks[0](x)).pow(2).mean()
    second = net.blocks[3](net.blocks[2](x)).pow(2).mean()
    first.backward()
    second.backward()


def gradient_penalty(net, x):
    x = x.detach().requires_grad_()
    out = net(x)
    grad, = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    (net(x * 0.5).mean() + out.mean() + grad.pow(2).mean()).backward()


def with_other_parameters(net, x):
    """A gradient step within a step, and a call with others in the place of some."""
    own = dict(net.named_parameters())
    loss = functional_call(net, own, (x,)).pow(2).mean()
    grads = torch.autograd.grad(loss, [*own.values()], create_graph=True)
    stepped = {name: p - 0.1 * grad for (name, p), grad in zip(own.items(), grads)}
    functional_call(net, stepped, (x,)).pow(2).mean().backward()
    functional_call(net, {"blocks.1.up.weight": own["blocks.1.up.weight"] * 0.5}, (x,)).pow(2).mean().backward()


def with_a_copy(net, x):
    """As a running mean of a model is."""
    teacher = copy.deepcopy(net)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.9)
        target = teacher(x)
    (net(x) - target).pow(2).mean().backward()


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("how", [once, two_at_once, in_turns, looked_at_between, recomputed, after_an_error,
                                 loss_of_the_middle, whole_layers_recomputed, reentrantly_recomputed, twice,
                                 losses_of_one_graph, losses_of_two_graphs, gradient_penalty, with_other_parameters,
                                 with_a_copy])
def test_training(name, how):
    nets = made(name)
    train(nets, 3, how)
    for block in nets[1][0].blocks:                  # nothing is left standing before a parameter
        assert block.up.weight is block.up._parameters["weight"]


@pytest.mark.parametrize("how", [once, two_at_once, losses_of_one_graph, losses_of_two_graphs, twice, gradient_penalty])
def test_training_of_what_fully_shard_has_split(how):
    """Where a process is a rank, it gives its own rows, plain, and the mean over the ranks is learned from."""
    alone = world().single_process
    if not alone and gt.world_size() != 2:
        pytest.skip("each rank has rows of its own")
    mesh = gt.dtensor.init_device_mesh("cpu", (2,))
    torch.manual_seed(SEED)
    plain, x = Net().double(), torch.randn(8, 3, HIDDEN).double()
    model = copy.deepcopy(plain)
    for part in (*model.blocks, model):
        gt.dtensor.fully_shard(part, mesh=mesh)
    rows = gt.dtensor.distribute_tensor(x, mesh, [gt.dtensor.Shard(0)]) if alone else x.chunk(2)[gt.rank()]
    nets = [(plain, x), (model, rows)]
    nets = [(net, x, torch.optim.AdamW(net.parameters(), lr=0.01)) for net, x in nets]
    for _ in range(3):
        for net, x, optimizer in nets:
            how(net, x)
            optimizer.step()
            optimizer.zero_grad()
        same(model, plain)


def sharded_blocks(model):
    """By exact type: `isinstance` asks a dead weakref.proxy, which any library may have left, for its class."""
    return [layer for layer in gc.get_objects() if type(layer) is zero3.ShardedLayer
            and any(layer.module is block for block in model.blocks)]


def test_what_was_gathered_for_gradients_of_gradients_is_freed_behind_them():
    """While the graphs of two forward passes, one of them with a penalty, are still held by their losses."""
    _, (model, x, _) = made("dp")
    x = x.requires_grad_()
    first, second = model(x), model(x * 0.5)
    grad, = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    loss = second.mean() + first.mean() + grad.pow(2).mean()
    layers = sharded_blocks(model)
    loss.backward()
    held = [t.untyped_storage().nbytes() for layer in layers for storages in layer.saved.values() for shards in storages
            for t in shards.values()]
    assert len(layers) == LAYERS and not any(held) and bool(held) == bool({0, 1} & {*world().local_ranks}), held


def test_what_was_gathered_for_a_backward_pass_that_raised_is_freed_behind_the_next_one():
    """Of whichever forward pass, so also of one from before."""
    def refuse(grad):
        raise ArithmeticError("on purpose")

    _, (model, x, _) = made("dp")
    between = []
    model.blocks[1].register_forward_hook(lambda module, args, out: between.append(out))
    before, loss = model(x).square().sum(), model(x * 0.5).square().sum()
    between[1].register_hook(refuse)
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss.backward()
    del loss
    before.backward()
    held = [layer.module for layer in sharded_blocks(model) if layer.unsharded is not None]
    assert not held, held


@pytest.mark.parametrize("how", [once, whole_layers_recomputed, reentrantly_recomputed])
def test_few_moves_of_the_published_bytes(how):
    _, (net, x, optimizer) = made("dp of 4")
    for _ in range(2):
        with gt.record() as moves:
            how(net, x)
            optimizer.step()
            optimizer.zero_grad()
    size = sum(p.numel() * 8 for p in net.parameters())
    gathers = [m for m in moves if m.op == "zero"]
    # forward: layers 0 and 1, then 2, then 3; backward: 3 and 2, then 1, then 0
    assert [m.tensors for m in gathers] == [8, 4, 4, 8, 4, 4]
    assert sum(m.bytes for m in gathers) == 2 * 3 * size // 4
    # backward passes within one another: each reads the gradients of its layer
    times = LAYERS if how is reentrantly_recomputed else 1
    assert [(m.bytes, m.tensors) for m in moves if m.op == "gradient"] == [
        (3 * size // 4 // times, 4 * LAYERS // times)] * times
    assert not [m for m in moves if m.bytes > 64 and m.op not in ("zero", "gradient")]


@pytest.mark.parametrize("how", [once, whole_layers_recomputed])
def test_frozen_first_layers_are_gathered_for_the_forward_pass_alone(how):
    nets = made("dp of 4")
    for frozen in (True, True, False):
        for net, x, optimizer in nets:
            net.blocks[:2].requires_grad_(not frozen)
            with gt.record() as moves:
                how(net, x)
            optimizer.step()
            optimizer.zero_grad()
        gathers = [m.tensors for m in moves if m.op == "zero"]
        assert how is not once or sum(gathers) == 4 * (2 * LAYERS - 2 * frozen), gathers
        same(nets[1][0], nets[0][0])


def test_writes_that_no_version_counts_to_what_was_gathered_ahead():
    """By `p.data`, after a pass that ended early."""
    (plain, x, _), (model, spread, _) = made("dp")
    with torch.no_grad():
        model.blocks[0](spread)
        for p in [*plain.parameters(), *model.parameters()]:
            p.data.mul_(2)
        torch.testing.assert_close(model(spread).full_tensor(), plain(x), rtol=1e-9, atol=1e-12)


WRITES = {"clamp_": lambda w: w.clamp_(-0.1, 0.1), "data": lambda w: w.data.clamp_(-0.1, 0.1),
          "detach": lambda w: w.detach().mul_(0.5), "row": lambda w: w.__setitem__(0, 0.25),
          "diagonal": lambda w: w.diagonal().zero_(), "view": lambda w: w.view(-1)[3:7].add_(1.0),
          "init": lambda w: nn.init.constant_(w, 0.1), "another": lambda w: setattr(w, "data", w.detach() * 0.5)}


class Writer(Block):
    """Its forward writes to its own weight, as constraints and initializations that depend on data do."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.up.weight)
        return super().forward(x)


class TiedWriter(nn.Module):
    """It has one weight twice, and writes to it by either name, between uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        self.second.weight.data.clamp_(-0.2, 0.2)
        self.first.weight.data.mul_(0.5)
        return self.second(x)


@pytest.mark.parametrize("name", ["dp", "dp x tp"])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_layer_writes_to_its_parameters(write, name):
    class Writing(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Writer(WRITES[write]) for _ in range(2))

    train(made(name, Writing), 2, once)
    if write in ("data", "another"):                 # which autograd does not count
        train(made(name, Writing), 2, two_at_once)


@pytest.mark.parametrize("name", ["dp", "dp of 4"])
def test_a_parameter_that_a_layer_has_twice_is_gathered_once(name):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(TiedWriter() for _ in range(2))

    nets = made(name, Tied)
    train(nets, 2, once)
    with gt.record() as moves, torch.no_grad():
        nets[1][0](nets[1][1])
    tensors = 2 * 3                                  # of each block a weight and two biases
    assert sum(move.tensors for move in moves if move.op == "zero") == tensors


@pytest.mark.parametrize("write", ["step", "mul_", "data", "bias", "none"])
def test_writes_between_a_forward_pass_and_its_backward_pass(write):
    """Refused as in plain torch, where what was written to was saved."""
    outcomes = []
    for net, x, optimizer in made("dp"):
        once(net, x)
        loss = net(x).pow(2).mean()
        last = net.blocks[-1].down
        with torch.no_grad():
            {"step": lambda _: optimizer.step(), "mul_": last.weight.mul_, "data": last.weight.data.mul_,
             "bias": last.bias.mul_, "none": lambda _: None}[write](2)
        optimizer.zero_grad()
        try:
            loss.backward()
            outcomes.append([getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()])
        except RuntimeError as error:
            outcomes.append(str(error).split(":")[0])
    if write in ("step", "mul_"):
        assert outcomes[0] == outcomes[1] and "modified by an inplace operation" in outcomes[0]
    else:
        torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-12)


def assigned(net):
    net.load_state_dict({name: p.detach() * 0.5 for name, p in net.state_dict().items()}, assign=True)


def pruned(net):
    prune.l1_unstructured(net.blocks[0].up, "weight", 0.5)


def normed(net):
    parametrizations.weight_norm(net.blocks[0].up)


def one_more_parameter(net):
    net.blocks[0].up.weight = nn.Parameter(net.blocks[0].up.weight.detach() * 0.5)


@pytest.mark.parametrize("change", [assigned, pruned, normed, one_more_parameter])
def test_parameters_of_others_in_their_place(change):
    """Once gt.zero has found a layer's parameters, others may come there for good."""
    (plain, x, _), (model, spread, _) = made("dp")
    for net in (plain, model):
        change(net)
    for _ in range(2):
        once(plain, x), once(model, spread)
        torch.testing.assert_close(model(spread).full_tensor(), plain(x), rtol=1e-9, atol=1e-12)
        grads = [[p.grad for p in net.parameters()] for net in (model, plain)]
        for ours, grad in zip(*grads):
            torch.testing.assert_close(ours.full_tensor(), grad, rtol=1e-9, atol=1e-12)


def test_layers_are_found_in_any_model():
    nets = made("dp of 4", Mixed)
    assert [name for name, _ in zero3.layers_of(nets[0][0])] == [
        "head", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "more.first", "body.last.0", "unused"]
    for _ in range(3):
        for net, x, optimizer in nets:
            with gt.record() as moves:
                once(net, x)
                optimizer.step()
                optimizer.zero_grad()
        same(nets[1][0], nets[0][0])
    gathers = [m for m in moves if m.op == "zero"]
    # forward: first and norm, block, norm, block, last, head; backward: head and last, and so on, but not `unused`
    assert [m.tensors for m in gathers] == [4 + 2, 4, 2, 4, 4, 1, 1 + 4, 4, 2, 4, 2, 4]
    net = nets[1][0]
    run = sum(p.numel() * 8 for p in net.parameters()) - sum(p.numel() * 8 for p in net.unused.parameters())
    assert sum(m.bytes for m in gathers) == 2 * 3 * run // 4
    assert {m.op for m in moves if m.bytes > 64} == {"zero", "gradient", "aten.embedding.default"}


@dataclass
class Output:
    value: torch.Tensor


class Keeper(nn.Module):
    """A layer that does with its parameter as it is told."""

    def __init__(self):
        super().__init__()
        self.q, self.kept = nn.Parameter(torch.randn(HIDDEN)), []

    def forward(self, work):
        return work(self)


def q_of(keeper):
    return keeper.q


def with_its_parameter(keeper, x):
    y, others = keeper(lambda layer: (x * layer.q, {"q": layer.q}))
    return y + others["q"].sum()


def kept_in_an_attribute(keeper, x):
    return keeper(lambda layer: layer.kept.append(layer.q) or x * layer.q) + keeper.kept[-1].sum()


def kept_from_step_to_step(keeper, x):
    keeper(lambda layer: layer.kept.append(layer.q))
    return x + keeper.kept[0].exp().sum()


def kept_by_a_hook(keeper, x):
    hook = keeper.register_forward_hook(lambda layer, args, out: layer.kept.append(layer.q))
    y = keeper(lambda layer: x * layer.q)
    hook.remove()
    return y * keeper.kept[-1].norm()


def without_gradients(keeper, x):
    with torch.no_grad():
        q = keeper(q_of)
    return x * keeper.q + q.sum()


HELD = {"returned": lambda keeper, x: x * keeper(q_of), "summed": lambda keeper, x: x + keeper(q_of).sum(),
        "data": lambda keeper, x: x * keeper.q + keeper(lambda layer: layer.q.data).sum(),
        "detached": lambda keeper, x: x * keeper.q + keeper(lambda layer: layer.q.detach()).sum(),
        "contiguous": lambda keeper, x: x + keeper(lambda layer: layer.q.contiguous()).sum(),
        "view": lambda keeper, x: x + keeper(lambda layer: layer.q.view(3, 4)).norm(),
        "in a closure": lambda keeper, x: keeper(lambda layer: partial(torch.mul, layer.q))(x),
        "recomputed": lambda keeper, x: checkpoint(lambda x: x + keeper(q_of).sum(), x, use_reentrant=False),
        "in a dataclass": lambda keeper, x: keeper(lambda layer: Output(x * layer.q)).value,
        "in a distribution": lambda keeper, x: keeper(lambda layer: torch.distributions.Normal(x * layer.q, 1.0)).mean,
        "in an iterator": lambda keeper, x: next(keeper(lambda layer: iter([x * layer.q.exp()])))}
HELD |= {way.__name__.replace("_", " "): way for way in (
    with_its_parameter, kept_in_an_attribute, kept_from_step_to_step, kept_by_a_hook, without_gradients)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["dp", "dp x tp"])
@pytest.mark.parametrize("way", HELD)
def test_a_parameter_is_read_behind_its_layer(way, name):
    """What a layer returns or a program keeps, and what learns in an output that torch sees nothing in."""
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.keeper, self.down = Block(), Keeper(), Block()

        def forward(self, x):
            return self.down(HELD[way](self.keeper, self.up(x)))

    nets = made(name, Keeping)
    for _ in range(3):
        for net, x, optimizer in nets:
            once(net, x)
            if net is nets[1][0]:
                held = [t for layer in gc.get_objects() if type(layer) is zero3.ShardedLayer and layer.module is
                        net.keeper for storages in layer.saved.values() for shards in storages for t in shards.values()]
                assert not any(t.untyped_storage().nbytes() for t in held)
            optimizer.step()
            optimizer.zero_grad()
        same(nets[1][0], nets[0][0])


def test_layers_that_return_objects_are_gathered_a_layer_ahead():
    class Wraps(Block):
        def forward(self, x):
            return Output(super().forward(x.value if isinstance(x, Output) else x))

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Wraps() for _ in range(LAYERS))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.value

    _, (net, x, _) = made("dp of 4", Wrapped)
    for _ in range(2):
        with gt.record() as moves:
            once(net, x)
    assert [m.tensors for m in moves if m.op == "zero"] == [8, 4, 4, 8, 4, 4]


def test_a_parameter_is_not_read_behind_its_layer_in_another_dtype():
    _, (net, x, _) = made("dp")
    kept = []
    net.blocks[0].up.register_forward_hook(lambda layer, args, out: kept.append(layer.weight))
    with torch.no_grad():
        net(x)
    net.float()
    with pytest.raises(gt.GlobalTensorError, match="another dtype than when") if x.shards else nullcontext():
        kept[0].sum()


def test_two_layers_are_gathered_at_a_time(monkeypatch):
    """Whatever autograd keeps: of all parameters that were ever gathered, whose memory is there?"""
    _, (net, x, _) = made("dp")
    saved, seen = [], []

    def pack(t):
        if t.is_global and t.dim() == 2:             # the weights
            saved.append([*t.shards.values()])       # not to be read later: who reads them has them gathered
        return t

    def there():
        return sum(any(s.untyped_storage().nbytes() for s in shards) for shards in saved)

    def unshard(now, ahead=()):
        seen.append(there())
        real(now, ahead)
        on_the_way = [layer for layer in ahead if layer.begun is not None]       # over a link, while `now` computes
        seen.append(there() + 2 * len(on_the_way))

    real, link_of = zero3.unshard, zero3.ShardedLayer.link
    monkeypatch.setattr(zero3, "unshard", unshard)
    # layers that are large for a link: behind small ones the next is gathered, too
    monkeypatch.setattr(zero3.ShardedLayer, "link", lambda layer: (link := link_of(layer)) and (0.0, link[1]))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = net(x).pow(2).mean()
        assert len(saved) == 2 * LAYERS - 1 and there() == 0         # the input needs no gradient, so not the first
        loss.backward()
    assert max(seen) == (4 if x.shards else 0) and there() == 0          # two weights a layer
