"""Gradients accumulate without communication and are reduced once; how often is counted."""
from __future__ import annotations

import copy
import ctypes
from itertools import product

import pytest
import torch
from shards import place
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.runtime.native import core_lib, torch_ext
from globaltensor.runtime.world import world
from globaltensor.tensors import gradients

SEED = 7


class Block(nn.Module):
    """A pre-norm transformer block without biases on q, k, v, o: 12 parameters."""

    def __init__(self, hidden: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, s, self.heads, h // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.n2(x))))


MEGATRON = {"[qkv].weight": gt.sbp.split(0), "up.*": gt.sbp.split(0), "o.weight": gt.sbp.split(1),
            "down.weight": gt.sbp.split(1)}


def pair(where, sbp):
    """A plain block and a global one of the same weights."""
    torch.manual_seed(SEED)
    plain = Block().double()
    torch.manual_seed(SEED)
    return plain, Block().double().to_global(where, sbp)


def reductions(moves):
    """The boxings that moved bytes to do away with a pending sum."""
    return [m for m in moves if m.bytes and any(s.is_partial for s in m.src.sbp)]


def test_a_data_parallel_step_reduces_every_gradient_once():
    where = gt.placement("cpu", [0, 1])
    plain, block = pair(where, gt.sbp.broadcast)
    assert len(list(block.parameters())) == 12
    data = torch.randn(4, 6, 16, dtype=torch.float64)
    losses = []
    for model, x in ((plain, data), (block, gt.from_full(data, where, gt.sbp.split(0)))):
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            opt.zero_grad()
            loss = (model(x) ** 2).mean()
            with gt.record() as moves:
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
            if model is block:
                assert sum(m.tensors for m in reductions(moves)) == 12, "\n".join(map(str, moves))
                assert len(reductions(moves)) == 1 and reductions(moves)[0].op == "gradient"
                assert sum(m.bytes for m in moves) == sum(p.numel() * 8 for p in block.parameters())
            losses.append((loss.item(), norm.item()))
    torch.testing.assert_close(losses[:2], losses[2:])
    for p, q in zip(plain.parameters(), block.parameters()):
        torch.testing.assert_close(q.full_tensor(), p)


def test_a_tensor_parallel_block_needs_four_reductions():
    where = gt.placement("cpu", [0, 1])
    plain, block = pair(where, MEGATRON)
    data = torch.randn(2, 6, 16, dtype=torch.float64)
    x = gt.from_full(data, where, gt.sbp.broadcast).requires_grad_()
    with gt.record() as moves:
        y = block(x)
        y = y.to_global(sbp=gt.sbp.broadcast)
        (y * y).sum().backward()
        grads = [p.grad for p in [x, *block.parameters()]]
    assert len(reductions(moves)) == 4, "\n".join(map(str, moves))
    assert all(m in reductions(moves) or m.bytes == 0 for m in moves), "\n".join(map(str, moves))
    data.requires_grad_()
    (plain(data) ** 2).sum().backward()
    for g, p in zip(grads, [data, *plain.parameters()]):
        torch.testing.assert_close(g.full_tensor(), p.grad)


FACTORS = {"linear": (F.linear, (4, 6), (6, 6)), "linear of sequences": (F.linear, (2, 4, 6), (6, 6)),
           "matmul": (torch.matmul, (4, 6), (6, 6)), "batched matmul": (torch.matmul, (2, 4, 6), (2, 6, 4)),
           "einsum": (lambda x, w: torch.einsum("bij,jk->bik", x, w), (2, 4, 6), (6, 4))}


def gradients_after_a_write(function, factors, wanted, written):
    """Of a product whose factor of this number was written to; None where autograd raises, as it saved that one."""
    leaves = [t.requires_grad_() for i, t in enumerate(factors) if i in wanted]
    product = function(*factors)
    with torch.no_grad():
        factors[written].add_(1)
    try:
        return torch.autograd.grad(product.sum(), leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_no_gradient_needs_may_be_written_to(name, wanted, written):
    function, *shapes = FACTORS[name]
    plain = [torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) for shape in shapes]
    expected = gradients_after_a_write(function, [t.clone() for t in plain], wanted, written)
    for sbps in ((gt.sbp.split(0), gt.sbp.broadcast), (gt.sbp.split(1), gt.sbp.split(0))):
        factors = [gt.from_full(t.clone(), gt.placement("cpu", [0, 1]), sbp) for t, sbp in zip(plain, sbps)]
        got = gradients_after_a_write(function, factors, wanted, written)
        assert (got is None) == (expected is None), f"written {written}, wanted {wanted}, layouts {sbps}"
        for mine, its in zip(got or (), expected or ()):
            torch.testing.assert_close(mine.full_tensor(), its)


@pytest.mark.parametrize("k", [1, 4])
def test_micro_batches_communicate_once(k):
    where = gt.placement("cpu", [0, 1])
    plain, block = pair(where, gt.sbp.broadcast)
    data = torch.randn(k, 4, 6, 16, dtype=torch.float64)
    with gt.record() as moves:
        for micro in data:
            (block(gt.from_full(micro, where, gt.sbp.split(0))) ** 2).sum().backward()
        assert not any(m.bytes for m in moves), "\n".join(map(str, moves))
        grads = [p.grad for p in block.parameters()]
    assert sum(m.tensors for m in moves if m.bytes) == 12
    for micro in data:
        (plain(micro) ** 2).sum().backward()
    for g, p in zip(grads, plain.parameters()):
        assert g.sbp == (gt.sbp.broadcast,)
        torch.testing.assert_close(g.full_tensor(), p.grad)


@pytest.mark.parametrize("weights", ["contiguous", "channels last"])
@pytest.mark.parametrize("images", ["contiguous", "channels last"])
def test_gradients_of_other_strides_than_their_parameters_wait_too(images, weights):
    order = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
    torch.manual_seed(SEED)
    x = torch.randn(4, 3, 8, 8).double().to(memory_format=order[images])
    plain = nn.Conv2d(3, 8, 3).double().to(memory_format=order[weights])
    conv = copy.deepcopy(plain).to_global(gt.placement("cpu", [0, 1]), gt.sbp.broadcast)
    split = gt.from_full(x, conv.weight.placement, gt.sbp.split(0))
    with gt.record() as moves:
        for _ in range(3):
            conv(split).square().sum().backward()
            plain(x).square().sum().backward()
        assert not reductions(moves)
        torch.testing.assert_close(conv.weight.grad.full_tensor(), plain.weight.grad)
    assert [m.bytes for m in reductions(moves)] == [8 * (plain.weight.numel() + plain.bias.numel())]
    assert conv.weight.grad.stride() == plain.weight.grad.stride()


@pytest.mark.parametrize("of", [gt.sbp.broadcast, gt.sbp.split(0)], ids=str)
@pytest.mark.parametrize("buffer", [gt.sbp.broadcast, gt.sbp.split(0), gt.sbp.partial_sum], ids=str)
def test_a_gradient_that_is_a_view_of_a_buffer_stays_one(buffer, of):
    def trained(weight, flat, x):
        weight.grad = flat[2:26].view(4, 6)
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
        for _ in range(2):
            (x @ weight.t()).square().mean().backward()
            assert weight.grad.norm() > 0            # which settles gradients
            flat.mul_(0.5)
            optimizer.step()
            flat.add_(1)
            weight.grad.sub_(1)
        return weight.detach(), flat, weight.grad

    torch.manual_seed(SEED)
    w, x, where = torch.randn(4, 6), torch.randn(5, 6), gt.placement("cpu", [0, 1])
    want = trained(w.clone().requires_grad_(), torch.zeros(28), x)
    flat = gt.from_full(torch.zeros(28), where, buffer)
    got = trained(gt.from_full(w, where, of).requires_grad_(), flat, gt.from_full(x, where, gt.sbp.split(0)))
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one.full_tensor(), expected)


def test_reading_one_gradient_settles_all_and_nothing_moves_again():
    where = gt.placement("cpu", [0, 1])
    _, block = pair(where, gt.sbp.broadcast)
    (block(gt.from_full(torch.randn(4, 6, 16, dtype=torch.float64), where, gt.sbp.split(0))) ** 2).sum().backward()
    with gt.record() as moves:
        assert block.q.weight.grad is not None
        assert len([m for m in moves if m.bytes]) == 1
        for p in block.parameters():
            assert p.grad.sbp == p.sbp
    assert len([m for m in moves if m.bytes]) == 1


def test_gradients_that_are_dropped_are_never_reduced():
    where = gt.placement("cpu", [0, 1])
    _, block = pair(where, gt.sbp.broadcast)
    x = gt.from_full(torch.randn(4, 6, 16, dtype=torch.float64), where, gt.sbp.split(0))
    (block(x) ** 2).sum().backward()
    with gt.record() as moves:
        for p in block.parameters():
            p.grad = None
        assert all(p.grad is None for p in block.parameters())
    assert not moves


def test_bytes_that_wait_are_counted():
    where = gt.placement("cpu", [0, 1])
    _, block = pair(where, gt.sbp.broadcast)
    x = gt.from_full(torch.randn(4, 6, 16, dtype=torch.float64), where, gt.sbp.split(0))
    counted = gradients._buckets.nbytes              # of what earlier tests left
    for _ in range(2):                               # what comes again waits once
        (block(x) ** 2).sum().backward()
        assert gradients._buckets.nbytes - counted == sum(p.nbytes for p in block.parameters())
    block.up.weight.grad = block.n1.weight.grad = None
    dropped = block.up.weight.nbytes + block.n1.weight.nbytes
    assert gradients._buckets.nbytes - counted == sum(p.nbytes for p in block.parameters()) - dropped
    assert block.q.weight.grad is not None
    assert gradients._buckets.nbytes == 0 == len(gradients.pending)


def test_a_split_parameter_gets_a_reduce_scattered_gradient():
    """ZeRO: the parameter is gathered where it is used, its gradient comes back reduced and split."""
    where = gt.placement("cpu", [0, 1])
    w = gt.from_full(torch.randn(6, 6, dtype=torch.float64), where, gt.sbp.split(0)).requires_grad_()
    x = gt.from_full(torch.randn(4, 6, dtype=torch.float64), where, gt.sbp.split(0))
    (x @ w.to_global(sbp=gt.sbp.broadcast)).square().sum().backward()
    a = w.full_tensor().detach().requires_grad_()
    (x.full_tensor() @ a).square().sum().backward()
    assert w.grad.sbp == (gt.sbp.split(0),)
    torch.testing.assert_close(w.grad.full_tensor(), a.grad)


@pytest.mark.parametrize("foreach, fused", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("axes", ["dp", "tp", "both"])
def test_optimizers_run_on_shards(optimizer, foreach, fused, axes):
    """Single-tensor, foreach and fused: equal to plain torch, and no optimizer op moves a byte."""
    where = place([[0, 1], [2, 3]]) if axes == "both" else gt.placement("cpu", [0, 1])
    b = gt.sbp.broadcast
    tp = {name: (b, s) for name, s in MEGATRON.items()} if axes == "both" else MEGATRON
    plain, block = pair(where, b if axes == "dp" else tp)
    split = {"dp": gt.sbp.split(0), "tp": b, "both": (gt.sbp.split(0), b)}[axes]
    options = dict(lr=1e-2, foreach=foreach, fused=fused, weight_decay=0.1)
    if optimizer is torch.optim.SGD:
        options |= dict(momentum=0.9)
    data = torch.randn(5, 6, 16, dtype=torch.float64)
    for model, x in ((plain, data), (block, gt.from_full(data, where, split))):
        opt = optimizer(model.parameters(), **options)
        for _ in range(3):
            opt.zero_grad()
            (model(x) ** 2).mean().backward()
            [p.grad for p in model.parameters()]
            with gt.boxing("forbid"):
                opt.step()
    for p, q in zip(plain.parameters(), block.parameters()):
        torch.testing.assert_close(q.full_tensor(), p)


def test_pending_sums_lie_where_peers_read_them():
    here = world()
    if torch_ext is None or here.size < 2 or len(here.host_peers) < 2:
        pytest.skip("for processes that share memory")
    where = gt.placement("cpu", [0, 1])
    x = gt.ones(8, 64, placement=where, sbp=gt.sbp.split(0))
    w = gt.ones(64, 64, placement=where, sbp=gt.sbp.broadcast).requires_grad_()
    for _ in range(3):                               # the third time without Python
        w.grad = None
        (x @ w).sum().backward()
    assert gradients.raw_grad(w).sbp == (gt.sbp.partial_sum,)
    assert all(torch_ext.in_arena(shard) for shard in gradients.raw_grad(w).shards.values())
    assert not any(torch_ext.in_arena(shard) for shard in (x @ w).detach().shards.values())


class ArenaUse(ctypes.Structure):
    """gt::ArenaUse, in bytes: `top` is what was ever in use, with what lies between."""

    _fields_ = [("used", ctypes.c_uint64), ("free", ctypes.c_uint64), ("top", ctypes.c_uint64)]


def arena_use():
    use = core_lib._ZN2gt9arena_useEv                # gt::arena_use()
    use.restype = ArenaUse
    return use()


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_that_are_reduced_take_no_more_memory(backwards):
    here = world()
    if torch_ext is None or here.size < 2 or len(here.host_peers) < 2:
        pytest.skip("for processes that share memory")
    where = gt.placement("cpu", [0, 1])
    x = gt.ones(4, 256, placement=where, sbp=gt.sbp.split(0))
    leaves = [gt.ones(256, 384 + 64 * backwards, placement=where, sbp=gt.sbp.broadcast).requires_grad_()
              for _ in range(12)]
    size = sum(w.numel() * 4 for w in leaves)

    def step(some):
        for w in some:
            w.grad = None
        for _ in range(backwards):
            for w in some:
                (x @ w).sum().backward()
        return some[0].grad

    for _ in range(3):                               # from then on without Python
        step(leaves[:1])
    used = arena_use().used
    step(leaves)
    step(leaves)
    most = arena_use().top - used                    # gradients once, and little that was free in between
    assert all(gradients.raw_grad(w).sbp == (gt.sbp.broadcast,) for w in leaves)
    assert most < 1.6 * size, f"{most} bytes for gradients of {size}"


def held_by_hooks(part):
    """A hook that keeps what shares the gradient's memory, but not the gradient: else autograd makes a copy."""
    def hold(weights, x):
        held = []
        for w in weights:
            w.register_hook(lambda g: held.append(part(g)))
        (x @ weights[0] + x @ weights[1]).square().sum().backward()
        return held

    return hold


def held_by_autograd(weights, x):
    between = [w.view_as(w) for w in weights]
    for t in between:
        t.retain_grad()
    (x @ between[0] + x @ between[1]).square().sum().backward(create_graph=True)
    first = [w.grad for w in weights]                # read, so reduced
    return [*first, *(t.grad for t in between), *torch.autograd.grad(sum(g.square().sum() for g in first), weights)]


def one_for_two_leaves(weights, x):
    weights[0].register_hook(lambda g: held.append(g))
    held = []
    (weights[0] + weights[1]).mul(x[:1].t()).sum().backward()
    return held


def kept_by_an_operand(weights, x):
    """What autograd saves of a gradient while it is pending, or what is made of it."""
    made = []
    for w in weights:
        w.register_hook(lambda g: made.extend([g * 2, g.t() * g.t(), g.expand(2, *g.shape)]))
    for k in range(2):
        (x @ weights[k]).sum().backward()
        (x @ weights[k]).square().sum().backward()
    return made


def parts_of(g):
    return gt.from_shards(g.shards, g.placement, g.sbp) if g.is_global else g


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("hold", [
    held_by_hooks(lambda g: g), held_by_hooks(lambda g: g.detach()), held_by_hooks(lambda g: g.t()),
    held_by_hooks(lambda g: g.view(-1)[40:]), held_by_hooks(parts_of),
    held_by_autograd, one_for_two_leaves, kept_by_an_operand])
def test_who_holds_a_pending_gradient_keeps_its_value(hold):
    torch.manual_seed(SEED)
    where = gt.placement("cpu", [0, 1])
    full = [torch.randn(96, 96, dtype=torch.float64) for _ in range(2)]
    rows = torch.randn(6, 96, dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in full]
    expected = [*hold(plain, rows), *(w.grad for w in plain)]
    for _ in range(3):                               # the third time without Python
        weights = [gt.from_full(t.clone(), where, gt.sbp.broadcast).requires_grad_() for t in full]
        held = hold(weights, gt.from_full(rows, where, gt.sbp.split(0)))
        for got, wanted in zip([*held, *(w.grad for w in weights)], expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), wanted)
            torch.testing.assert_close(got.full_tensor(), wanted)
        for got, wanted in zip(held, expected):      # after all gradients were reduced
            torch.testing.assert_close(got.full_tensor(), wanted)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (5, 2)])
def test_reduced_shards_have_the_sizes_of_their_layout(shape):
    """Where a dim is shorter than an axis, some new shards are empty, and the old ones were not."""
    if world().size < 4:
        pytest.skip("for four ranks")
    where = gt.placement("cpu", [[0, 1], [2, 3]])
    torch.manual_seed(SEED)
    full = torch.randn(shape, dtype=torch.float64)
    rows = torch.randn(6, shape[0], dtype=torch.float64)
    splits = [gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast]
    for of_rows, of_leaf in product(product(splits, repeat=2), repeat=2):
        x, w = gt.from_full(rows, where, of_rows), gt.from_full(full, where, of_leaf).requires_grad_()
        for _ in range(2):
            w.grad = None
            (x @ w).sum().backward()
            torch.testing.assert_close(w.grad.full_tensor(), rows.sum(0)[:, None].expand(shape))
            for rank, shard in w.grad.shards.items():
                assert tuple(shard.shape) == w.grad.spec.local_shape(rank), f"{of_rows}, {of_leaf}, rank {rank}"


def test_gradients_under_autocast_are_reduced_together_in_float32():
    """They are made in bfloat16, and cast while they are pending."""
    where = gt.placement("cpu", [0, 1])
    torch.manual_seed(SEED)
    plain = Block()
    torch.manual_seed(SEED)
    block, x = Block().to_global(where, gt.sbp.broadcast), torch.randn(6, 5, 16)
    for model, rows in ((plain, x), (block, gt.from_full(x, where, gt.sbp.split(0)))):
        with gt.record() as moves:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(rows)
            y.float().square().mean().backward()
            [p.grad for p in model.parameters()]
    reduced, = [move for move in reductions(moves) if move.op == "gradient"]
    assert reduced.tensors == 12 and len(reductions(moves)) == 1, reductions(moves)
    for (name, p), q in zip(plain.named_parameters(), block.parameters()):
        assert q.grad.dtype == torch.float32
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0.05, atol=0.02 * p.grad.abs().max().item(),
                                   msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_of_sparse_lookups_are_dense(kind):
    """Of a global weight, and of a plain one by global numbers of rows."""
    numbers, where = torch.tensor([[0, 2], [1, 1]]), place([0, 1])
    torch.manual_seed(SEED)
    plain = kind(4, 3, sparse=True)
    plain(numbers).square().sum().backward()
    for sbp in (gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast):
        weight = gt.from_full(plain.weight.detach(), where, sbp).requires_grad_()
        torch.func.functional_call(plain, {"weight": weight}, (numbers,)).square().sum().backward()
        assert torch.equal(weight.grad.full_tensor(), plain.weight.grad.to_dense())
    weight = plain.weight.detach().clone().requires_grad_()
    rows = torch.func.functional_call(plain, {"weight": weight}, (gt.from_full(numbers, where, gt.sbp.broadcast),))
    rows.square().sum().backward()
    assert torch.equal(weight.grad, plain.weight.grad.to_dense())


@pytest.mark.parametrize("sbp", [gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast], ids=str)
def test_the_gradient_of_a_sparse_gather_is_dense(sbp):
    index = torch.tensor([[0, 2], [1, 1]])
    x = torch.arange(8.).view(4, 2)
    plain, own = x.clone().requires_grad_(), gt.from_full(x, place([0, 1]), sbp).requires_grad_()
    for t in (plain, own):
        torch.gather(t, 0, index, sparse_grad=True).square().sum().backward()
    assert torch.equal(own.grad.full_tensor(), plain.grad.to_dense())


CHOOSES = {
    "max": lambda x: x.max(), "min": lambda x: x.min(), "median": lambda x: x.median(),
    "nanmedian": torch.nanmedian, "torch.max": torch.max, "max along a dim": lambda x: x.max(0).values.sum(),
}
VALUES = {"one": [3., 1., 2.], "two": [3., 1., 3., 1., 2.], "nan": [3., torch.nan, 1., torch.nan],
          "inf": [torch.inf, 1., 2.]}


@pytest.mark.parametrize("grad", [2.0, torch.inf, torch.nan])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", CHOOSES)
def test_elements_that_are_not_chosen_get_no_gradient(name, values, grad):
    """Not 0 times the gradient either, which is nan where that overflows."""
    plain, on = torch.tensor(VALUES[values], requires_grad=True), gt.placement("cpu", [0, 1])
    CHOOSES[name](plain).backward(torch.tensor(grad))
    for sbp in (gt.sbp.broadcast, gt.sbp.split(0), gt.sbp.partial_sum):
        x = gt.from_full(plain.detach(), on, gt.sbp.broadcast).to_global(sbp=sbp).detach().requires_grad_()
        CHOOSES[name](x).backward(torch.tensor(grad))
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, equal_nan=True)


@pytest.mark.parametrize("name", CHOOSES)
def test_what_is_chosen_is_differentiated_twice_and_forward(name):
    def derivatives(x):
        y = CHOOSES[name](x * x).sin()
        first, = torch.autograd.grad(y, x, create_graph=True)
        second, = torch.autograd.grad(first.sum(), x)
        return first, second, *torch.func.jvp(lambda x: CHOOSES[name](x * x).sin(), (x.detach(),), (x.detach(),))

    plain = torch.tensor(VALUES["two"], requires_grad=True)
    x = gt.from_full(plain.detach(), gt.placement("cpu", [0, 1]), gt.sbp.split(0)).requires_grad_()
    for got, want in zip(derivatives(x), derivatives(plain), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
