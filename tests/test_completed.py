"""A pending tensor is completed once: what ops move, and that what was kept is never out of date.

After it was completed it is written to, by every alias that it may have: plain torch on one device is the oracle.
"""
from __future__ import annotations

import itertools

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import globaltensor as gt
from globaltensor.runtime.native import torch_ext

P = gt.placement("cpu", [0, 1, 2], ("tp",))


def pending(whole: torch.Tensor) -> gt.GlobalTensor:
    parts = {1: torch.full_like(whole, 2.0), 2: torch.arange(whole.numel(), dtype=whole.dtype).view_as(whole)}
    return gt.from_shards({0: whole - parts[1] - parts[2], **parts}, P, gt.sbp.partial_sum)


def bytes_of(call):
    with gt.record() as boxings:
        result = call()
    return result, sum(boxing.bytes for boxing in boxings)


WRITES = {
    "in place": lambda x: x.add_(1),
    "an element": lambda x: x.__setitem__((2, 1), 9.0),
    "a view": lambda x: x.view(-1).mul_(3),
    "a view of a view": lambda x: x.t()[1:].t().zero_(),
    "a slice": lambda x: x[1:].fill_(4.0),
    "detach": lambda x: x.detach().sub_(2),
    "data": lambda x: x.data.mul_(2),
    "another's data": lambda x: setattr(x, "data", x.data * 5),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(x, 3.0, out=x),
    "copy": lambda x: x.copy_(torch.ones_like(x)),
    "nothing": lambda x: x,
}

MODES = {mode.__name__: mode for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_ends_it(write, mode):
    with MODES[mode]():
        plain = torch.arange(12, dtype=torch.float64).view(4, 3) / 7
        x = pending(plain.clone())
        for number in range(3):                      # completed, written to, completed anew
            torch.testing.assert_close(x.relu().full_tensor(), plain.relu())
            assert bytes_of(lambda: x.exp())[1] == 0, "it was completed"
            WRITES[write](x)
            WRITES[write](plain)
            torch.testing.assert_close(x.exp().full_tensor(), plain.exp(), msg=f"{write} {number}")
            torch.testing.assert_close(torch.stack([x, x]).full_tensor(), torch.stack([plain, plain]))
            torch.testing.assert_close(x.full_tensor(), plain)
            assert x.sbp == (gt.sbp.partial_sum,) or write == "another's data"


@pytest.mark.sample(3)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_ends_it_in_what_is_compiled(write):
    def program(arg):
        x = arg * 2
        before = x.relu(), arg.relu()
        WRITES[write](x)
        WRITES[write](arg)
        return *before, x.exp(), arg.exp(), arg

    torch.compiler.reset()
    plain = torch.arange(12, dtype=torch.float64).view(4, 3) / 7
    x = pending(plain.clone())
    seen = torch.compile(program, backend="aot_eager")(x)
    for got, right in zip([*seen, x], [*program(plain), plain], strict=True):
        torch.testing.assert_close(got.full_tensor(), right)


@pytest.mark.skipif(torch_ext is None, reason="no native code")
def test_without_native_code():
    chosen = "not compiled and not ranks_decide"
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, __file__]
    assert "passed" in good(command, environment(GLOBALTENSOR_NATIVE="0"), timeout=120)


def test_the_tensor_stays_as_it_is():
    whole = torch.randn(4, 3)
    x = pending(whole)
    before = {rank: shard.clone() for rank, shard in x.shards.items()}
    x.exp()
    assert x.sbp == (gt.sbp.partial_sum,)
    assert all(torch.equal(x.shards[rank], shard) for rank, shard in before.items())
    y = x.view(12)
    assert y.sbp == (gt.sbp.partial_sum,) and y.shards[1].data_ptr() == x.shards[1].data_ptr()


def test_only_what_was_pending_is_kept():
    """Gathering a split tensor for an op would keep all of it where a rank is to hold a part."""
    x = gt.from_full(torch.randn(6, 4), P, gt.sbp.split(0))
    rows = torch.tensor([4, 0, 5, 1, 3, 2])          # at random, all might stay where they are
    assert all(bytes_of(lambda: x[rows])[1] > 0 for _ in range(2))


ACTIVATIONS = ("relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus softsign "
               "softshrink hardshrink tanhshrink logsigmoid sigmoid tanh").split()
IN_TRAINING = {"batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
               "rrelu": lambda x: F.rrelu(x, training=True)}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *IN_TRAINING])
def test_an_activation_reduces_its_operand_once(name):
    """Also those whose gradients torch can make of others: silu_backward, mish_backward; and those that are algorithms
    of ours."""
    call = IN_TRAINING.get(name) or getattr(F, name)
    whole = gt.ones(6, 4, dtype=torch.float64, placement=P, sbp=gt.sbp.broadcast)
    for _ in range(3):                               # by way of Python, taught to the native dispatcher, and by it
        x = pending(torch.randn(6, 4, dtype=torch.float64)).requires_grad_()
        y, forward = bytes_of(lambda x=x: call(x * 1))
        _, backward = bytes_of(lambda y=y: y.backward(whole))
        assert forward > 0 and backward == 0


class RMSNorm(nn.Module):
    """In small ops, as models of `transformers` have it."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.heads, self.norm, self.norm_2 = heads, RMSNorm(features), RMSNorm(features)
        self.q, self.k, self.v, self.o = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(features, 2 * features, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * features, features, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (w(h).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.blocks = nn.Sequential(*(Block(16, 4) for _ in range(layers)))
        self.norm = RMSNorm(16)

    def forward(self, ids):
        return self.norm(self.blocks(self.words(ids)))


SPLIT = {"words.weight": 0, "q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1}


@pytest.mark.parametrize("ranks, layers", [(2, 1), (2, 3), (4, 2)])
def test_a_llama_moves_what_megatron_moves(ranks, layers):
    """Two all-reduces a layer forward and two backward, and one for the lookup (Shoeybi et al. 2019, section 3), of
    activations that are whole; and small ones, a number per token."""
    torch.manual_seed(0)
    plain, ids = Llama(layers), torch.randint(24, (3, 5))
    target = torch.randn(3, 5, 16)
    F.mse_loss(plain(ids), target).backward()
    torch.manual_seed(0)
    model, where = Llama(layers), gt.placement("cpu", list(range(ranks)), ("tp",))
    plan = {"words.weight": {"tp": gt.sbp.split(0)}}
    plan |= {f"*.{name}.weight": {"tp": gt.sbp.split(dim)} for name, dim in SPLIT.items() if "." not in name}
    gt.parallelize(model, where, plan)
    whole = gt.sbp.broadcast
    loss, forward = bytes_of(lambda: F.mse_loss(model(gt.from_full(ids, where, whole)),
                                                gt.from_full(target, where, whole)))
    _, backward = bytes_of(loss.backward)
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name, rtol=1e-4, atol=1e-5)
    reduced, small = (bytes_of(lambda: gt.zeros(size, placement=where, sbp="P").to_global(sbp=whole))[1]
                      for size in (target.shape, target.shape[:2]))
    assert (2 * layers + 1) * reduced <= forward <= (2 * layers + 1) * reduced + (2 * layers + 2) * small
    assert 2 * layers * reduced <= backward <= 2 * layers * reduced + (6 * layers + 4) * small


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_ranks_decide_alike(native):
    """Of processes, one watches what is boxed, one runs under a mode of torch's, and one holds parts and views."""
    good([*RUN, "-n", 3, PROGRAMS / "completed.py"], environment(GLOBALTENSOR_NATIVE=native))


# What gives the operand itself, or a view of it, without a word of that in its schema.
ALIASES = {
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(3, dtype=x.dtype))[0],
    "type_as": lambda x: x.type_as(x),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "dropout in evaluation": lambda x: F.dropout(x, training=False),
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(12),
    "to": lambda x: x.to(x.dtype),
    "unsafe_split": lambda x: x.unsafe_split(2)[1],
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3])[1],
    "unsafe_chunk": lambda x: x.unsafe_chunk(2)[1],
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [2, 6]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alias", ALIASES)
def test_what_shares_memory_shares_that_of_the_pending_tensor(alias, mode):
    def program(x):
        with MODES[mode]():
            before = x.relu()
            y = ALIASES[alias](x)
            y[0] = 7.0
            return before, x.exp(), y.exp()

    plain = torch.arange(12, dtype=torch.float64).view(4, 3) / 7
    for got, right in zip(program(pending(plain.clone())), program(plain.clone()), strict=True):
        torch.testing.assert_close(got.full_tensor(), right)


@pytest.mark.long
@pytest.mark.skipif(torch_ext is None, reason="asks native code what was completed")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_no_op_of_torchs_database_gives_memory_of_what_was_completed(mode):
    """Else a write to what it gave would be one to the operand, without a word."""
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds

    counts = {"calls": 0, "completed": 0}
    sharing = set()
    for op in op_db:
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 3) if torch.float32 in op.dtypes else ():
            with MODES[mode]():
                memories = {}                        # by address: what is there, so that it stays

                def global_operand(value, memories=memories):
                    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.is_sparse:
                        return value
                    x = pending(value.detach())
                    x.exp()
                    if (whole := torch_ext.completed(x)) is not x:
                        memories.update({t.untyped_storage().data_ptr(): t for t in whole.shards.values() if t.numel()})
                    return x

                try:
                    call = tree_map(global_operand, (sample.input, sample.args, sample.kwargs))
                    results = op.op(call[0], *call[1], **call[2])
                except Exception:
                    continue                         # test_op_database.py judges these
                counts["calls"] += 1
                counts["completed"] += bool(memories)
                if any(t.numel() and t.untyped_storage().data_ptr() in memories for result in tree_leaves(results)
                       if isinstance(result, gt.GlobalTensor) for t in result.shards.values()):
                    sharing.add(op.name)
    print(counts)
    assert not sharing and counts["completed"] > 1500
