"""Activations that recomputation keeps split along tp: the same gradients, and the bytes that ZeRO-R states."""
from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
from globaltensor.parallel.partitioned import KeptPart

S, B = gt.sbp.split, gt.sbp.broadcast
SEED, LAYERS = 20_261_123, 3
print(f"tests/test_partitioned.py: SEED={SEED}")


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Sequential):
    """As many reductions as one of Megatron-LM."""

    def __init__(self, width):
        super().__init__(Pair(width), Pair(width))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks, self.inputs = nn.ModuleList(Block(width) for _ in range(LAYERS)), []

    def forward(self, x):
        for block in self.blocks:
            self.inputs.append(weakref.ref(x))
            x = checkpoint(block, x, use_reentrant=False)
        return x


def kept():
    """The bytes of rank 0's parts."""
    gc.collect()
    parts = [o.part.shards[0] for o in gc.get_objects() if type(o) is KeptPart]
    return [part.untyped_storage().nbytes() for part in parts]


@pytest.mark.parametrize("ranks, sbp, length", [([0, 1, 2], (B,), 7), ([[0, 1], [2, 3]], (S(0), B), 6)])
def test_gradients_are_the_same_and_each_input_is_gathered_once(ranks, sbp, length):
    names = ("dp", "tp")[-len(sbp):]
    place = gt.placement("cpu", ranks, names)
    n, width, rows = place.shape[-1], 6 * place.shape[-1], 4
    whole = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(SEED))
    gradients, moved = [], []
    for inside in (nullcontext(), gt.partition_activations("tp")):
        torch.manual_seed(SEED)
        net = Net(width)
        gt.parallelize(net, place, {"*.up.*": {"tp": S(0)}, "*.down.weight": {"tp": S(1)}, "*.down ->": {"tp": B}})
        x = gt.from_full(whole, place, sbp).requires_grad_()
        with gt.record() as moves:
            # not a leaf, which is the program's own, and stays
            with inside:
                loss = net(x * 2).square().sum()
            bytes_kept = kept()
            inputs = [one() for one in net.inputs]
            loss.backward()
        gradients.append([x.grad.full_tensor(), *[p.grad.full_tensor() for p in net.parameters()]])
        moved.append({name: sum(m.bytes for m in moves if (m.op == "partitioned activations") is name)
                      for name in (True, False)})
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    own = rows // (2 if "dp" in names else 1)        # of a rank, whose input of a block has
    size = own * length * width * 4
    longest = max(length, width)                     # is split, evenly here
    assert longest % n == 0 and len(bytes_kept) == LAYERS + 1        # of the blocks, and of the square
    assert set(bytes_kept) == {size // n} and inputs.count(None) == LAYERS
    assert moved[0][True] == 0 and moved[0][False] == moved[1][False]
    assert moved[1][True] == (LAYERS + 1) * size * (n - 1) // n
    # two all-reduces forward, one or two when recomputed, and two backward, each of 2 (n-1)/n; then those of gradients
    reduced = [m.bytes for m in moves if m.bytes >= 2 * size * (n - 1) // n]
    assert 5 * LAYERS <= len(reduced) <= 6 * LAYERS + 2, [(m.op, m.bytes, m.where) for m in moves]


def test_an_axis_is_a_name():
    with pytest.raises(gt.ArgumentError, match="axis=1"), gt.partition_activations(1):
        pass
    x = gt.ones(2, 2, placement=gt.placement("cpu", [0, 1], ("tp",)), sbp=gt.sbp.broadcast, requires_grad=True)
    with pytest.raises(gt.ArgumentError, match="its placement has tp"), gt.partition_activations("pt"):
        (2 * x).tanh()
