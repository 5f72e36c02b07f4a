"""Whole networks, trained a few steps: equal to plain torch, and split, not gathered."""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
from shards import place
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import globaltensor as gt

SEED = 11
B, S = gt.sbp.broadcast, gt.sbp.split
TWO = gt.placement("cpu", [0, 1])


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

    rows = {"up.*": S(0), "down.weight": S(1)}


class Residual(nn.Module):
    """Convolution, batch norm, pooling and a residual, as a ResNet has them."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.short = nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm0(self.stem(x))), 2)
        x = x + F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)) + self.short(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """A transformer encoder layer by hand, so that heads can be split."""

    def __init__(self, hidden=16, heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.head = nn.Linear(hidden, 10, bias=False)

    def block(self, x):
        b, s, h = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, s, self.heads, h // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.o(a), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.n2(x))))

    def forward(self, x):
        return self.head(self.block(x)).flatten(0, 1)

    rows = {"[qkv].*": S(0), "up.*": S(0), "o.weight": S(1), "down.weight": S(1), "head.weight": S(0)}


class Checkpointed(Encoder):
    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False)).flatten(0, 1)


NETWORKS = {  # model, input, target
    "mlp": (Mlp, lambda n: torch.randn(n, 6), lambda n: torch.randint(0, 4, (n,))),
    "residual": (Residual, lambda n: torch.randn(n, 3, 8, 8), lambda n: torch.randint(0, 4, (n,))),
    "encoder": (Encoder, lambda n: torch.randn(n, 5, 16), lambda n: torch.randint(0, 10, (n * 5,))),
    "checkpointed": (Checkpointed, lambda n: torch.randn(n, 5, 16), lambda n: torch.randint(0, 10, (n * 5,))),
}


def train(model, x, target, steps=3):
    """Losses, parameters and buffers after some steps of AdamW with clipping."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses, [t.full_tensor() if t.is_global else t for t in model.state_dict().values()]


def compare(name, where, sbp, split, n):
    """Train plain and global, and return what the global one moved."""
    make, data, labels = NETWORKS[name]
    torch.manual_seed(SEED)
    plain, x, target = make().double(), data(n).double(), labels(n)
    model = copy.deepcopy(plain).to_global(where, sbp)
    expected = train(plain, x, target)
    gx, gtarget = gt.from_full(x, where, split), gt.from_full(target, where, split)
    with gt.record() as moves:
        got = train(model, gx, gtarget)
    torch.testing.assert_close(got, expected)
    return moves


@pytest.mark.parametrize("n", [4, 5, 1])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_data_parallel(name, ranks, n):
    moves = compare(name, place(ranks), B, S(0), n)
    if n == 4 and len(ranks) == 2:
        gathered = [m for m in moves if m.bytes > 8 * 16 * 4 and m.op not in ("gradient", "full_tensor")]
        assert not gathered, "\n".join(map(str, gathered))


@pytest.mark.parametrize("name", ["mlp", "encoder", "checkpointed"])
def test_tensor_parallel(name):
    moves = compare(name, TWO, NETWORKS[name][0].rows, B, 4)
    gathered = [m for m in moves
                if m.bytes > 100 and m.op != "full_tensor" and not any(s.is_partial for s in m.src.sbp)]
    assert not gathered, "\n".join(map(str, gathered))


@pytest.mark.parametrize("n", [4, 3])
@pytest.mark.parametrize("name", ["mlp", "encoder", "checkpointed"])
def test_both(name, n):
    rows = {k: (B, s) for k, s in NETWORKS[name][0].rows.items()} | {"*": (B, B)}
    moves = compare(name, place([[0, 1], [2, 3]], ("dp", "tp")), rows, {"dp": S(0)}, n)
    if n == 4:
        gathered = [m for m in moves if m.bytes > 100 and m.op not in ("full_tensor", "gradient")
                    and not any(s.is_partial for s in m.src.sbp)]
        assert not gathered, "\n".join(map(str, gathered))


def test_two_pipeline_stages():
    torch.manual_seed(SEED)
    a, b = Encoder().double(), Encoder().double()
    x, target = torch.randn(4, 5, 16).double(), torch.randint(0, 10, (20,))
    first, second = place([0, 1]), place([2, 3])
    ga, gb = copy.deepcopy(a).to_global(first, B), copy.deepcopy(b).to_global(second, Encoder.rows)
    loss = F.cross_entropy(b(a.block(x)), target)
    loss.backward()
    h = ga.block(gt.from_full(x, first, S(0))).to_global(second, B)
    gloss = F.cross_entropy(gb(h), gt.from_full(target, second, B))
    gloss.backward()
    torch.testing.assert_close(gloss.item(), loss.item())
    for p, q in zip([*a.parameters(), *b.parameters()], [*ga.parameters(), *gb.parameters()]):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_torchs_own_encoder_layer():
    torch.manual_seed(SEED)
    plain = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    x = torch.randn(4, 5, 16).double()
    model = copy.deepcopy(plain).to_global(TWO, B)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(model(gt.from_full(x, TWO, S(0))).full_tensor(), plain(x))


@pytest.mark.parametrize("channels_last", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_group_norm_between_convolutions_that_lie_differently(n, channels_last):
    """Its kernel takes operand and gradient for alike in memory; a convolution gives what its operand was."""
    torch.manual_seed(SEED)
    print("seed", SEED)
    x0, c0, w0, k = (torch.randn(*shape).double() for shape in ((n, 8, 4, 4), (8, 8, 3, 3), (8,), (n, 8, 4, 4)))

    def step(x, c, w, k):
        first, last = (torch.channels_last if one else torch.contiguous_format for one in channels_last)
        y = F.conv2d(x.contiguous(memory_format=first), c, padding=1)
        z = F.conv2d(F.group_norm(y, 4, w, w), c, padding=1).contiguous(memory_format=last)
        (z * k).sum().backward()
        return y.stride()

    plain = [t.clone().requires_grad_() for t in (x0, c0, w0)]
    stride = step(*plain, k)
    for layouts in itertools.product((S(0), S(1), B), (S(0), B), (S(0), B), (S(1), B)):
        for _ in range(2):                           # the second call is native
            *leaves, at = (gt.from_full(t, TWO, sbp) for t, sbp in zip((x0, c0, w0, k), layouts))
            leaves = [t.requires_grad_() for t in leaves]
            got = step(*leaves, at)                  # the strides of a kernel are known where there is a part
            assert got == stride or n == 1 or layouts[0] != B or layouts[1] != B or not at.shards, layouts
            for t, want in zip(leaves, plain):
                torch.testing.assert_close(t.grad.full_tensor(), want.grad)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loss_that_merges_no_dims_moves_only_the_gradient(ranks):
    """As docs/limits.md says of a batch that the ranks do not divide: 16 samples of 8 over 3 ranks."""
    torch.manual_seed(SEED)
    hidden, weight = torch.randn(16, 8, 4), torch.randn(12, 4, requires_grad=True)
    labels = torch.randint(0, 12, (16, 8))
    where = place([*range(ranks)])
    w = gt.from_full(weight.detach(), where, B).requires_grad_()
    with gt.record() as moves:
        logits = gt.from_full(hidden, where, S(0)) @ w.T
        loss = F.cross_entropy(logits.transpose(1, 2), gt.from_full(labels, where, S(0)))
        loss.backward()
        assert w.grad.sbp == (B,)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(w.grad.full_tensor(), weight.grad)
    gradient = 2 * (ranks - 1) * weight.numel() * 4
    assert sum(m.bytes for m in moves) <= gradient + 8 * 2 * ranks, [(m.op, m.bytes) for m in moves]


RECURRENT = {"LSTM": lambda: nn.LSTM(6, 5, batch_first=True), "GRU": lambda: nn.GRU(6, 5, 2),
             "RNN": lambda: nn.RNN(6, 5), "LSTM both ways": lambda: nn.LSTM(6, 5, bidirectional=True, bias=False),
             "ReLU": lambda: nn.RNN(6, 5, nonlinearity="relu", batch_first=True)}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("batch", [4, 3])
def test_a_recurrent_layer_keeps_a_split_batch(name, batch):
    """Without a state of the program's: it is zeros that torch makes."""
    torch.manual_seed(SEED)
    plain, where = RECURRENT[name](), place([0, 1])
    x = torch.randn(batch, 4, 6) if plain.batch_first else torch.randn(4, batch, 6)
    for _ in range(3):                               # by way of Python, taught to the native dispatcher, and by it
        net, own = gt.to_global(copy.deepcopy(plain), where, B), x.clone().requires_grad_()
        xs = gt.from_full(x, where, S(0 if plain.batch_first else 1)).requires_grad_()
        plain.zero_grad()
        want = plain(own)[0]
        want.square().sum().backward()
        with gt.record() as moves:
            got = net(xs)[0]
            got.square().sum().backward()
        if gt.runtime.native.torch_ext is not None or "LSTM" in name:
            assert not sum(m.bytes for m in moves) and got.sbp == xs.sbp, list(moves)
        torch.testing.assert_close(got.full_tensor(), want)
        for one, other in zip((xs, *net.parameters()), (own, *plain.parameters())):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell_keeps_a_split_batch(kind):
    plain, where = kind(6, 5), place([0, 1])
    net, x, state, own = gt.to_global(copy.deepcopy(plain), where, B), torch.randn(3, 4, 6), None, None
    for step in x:
        with gt.boxing("forbid"):
            own = net(gt.from_full(step, where, S(0)), own)
        state = plain(step, state)
    for one, other in zip(*((t if isinstance(t, tuple) else [t]) for t in (own, state))):
        assert one.sbp == (S(0),)
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("lies", [B, S(0), S(1), S(2)], ids=str)
@pytest.mark.parametrize("gradient_lies", [B, S(0), S(1), gt.sbp.partial_sum], ids=str)
def test_an_lstm_and_its_gradient_lie_anyhow(lies, gradient_lies):
    """Its workspace is that of the part of the batch that a rank has, if it is kept at all."""
    torch.manual_seed(SEED)
    plain, where = nn.LSTM(6, 5), place([0, 1])
    net, x, weight = gt.to_global(copy.deepcopy(plain), where, B), torch.randn(4, 3, 6), torch.randn(4, 3, 5)
    want, (state, _) = plain(x)
    (want * weight).sum().add(state.sum()).backward()
    for _ in range(2):
        net.zero_grad()
        got, (own, _) = net(gt.from_full(x, where, lies))
        torch.autograd.backward([got, own], [gt.from_full(weight, where, B).to_global(sbp=gradient_lies),
                                             gt.ones(1, 3, 5, placement=where, sbp=B)])
        for one, other in zip(net.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
