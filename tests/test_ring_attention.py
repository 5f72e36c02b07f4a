"""Attention over a split sequence in turns: beside plain torch, its bytes, what it keeps, and when it is taken."""
from __future__ import annotations

import os
import random
import sys
import weakref
from collections import Counter
from math import inf, prod

import pytest
import torch
import torch.nn.functional as F
from harness import PROGRAMS, PYTHON, ROOT, RUN, good, good_all, results
from shards import gather, layouts, place, scatter, sizes

import globaltensor as gt
from globaltensor.algorithms import ring_attention
from globaltensor.boxings.traffic import elements_received
from globaltensor.dispatch.core import _Run
from globaltensor.dispatch.decide import decide
from globaltensor.errors import BoxingError
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call

sys.path.insert(0, os.fspath(ROOT / "examples"))
import long_context

SEED = int(os.environ.get("RING_SEED") or 20_261_121)
print(f"tests/test_ring_attention.py: RING_SEED={SEED}")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
attend = F.scaled_dot_product_attention


def near(got, want, what):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")


def draw(*shape, dtype=torch.float64, more=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + more), dtype=torch.float64).to(dtype)


# -------------------------------------------------------------------------------------------------------------- tiles


def test_tiles_are_what_a_causal_mask_shows():
    rng = random.Random(SEED)
    whole = torch.ones(9, 9).tril()
    for _ in range(300):
        (a, b), (c, d) = (sorted(rng.choices(range(10), k=2)) for _ in range(2))
        seen = torch.zeros(b - a, d - c)
        for rows, columns, causal in ring_attention.tiles((a, b), (c, d), True):
            tile = torch.ones(rows.stop - rows.start, columns.stop - columns.start)
            seen[rows, columns] += tile.tril() if causal else tile
        assert seen.equal(whole[a:b, c:d]), f"rows {a}:{b}, columns {c}:{d}"


# ------------------------------------------------------------------------------- the op, in steps, in every layout


# queries, keys and values, causal, shape of a mask
CASES = {
    "whole": ((2, 4, 7, 4), (2, 4, 7, 4), False, None),
    "causal": ((2, 4, 7, 4), (2, 4, 7, 4), True, None),
    "causal, more keys": ((1, 2, 5, 4), (1, 2, 11, 4), True, None),
    "causal, more queries": ((1, 2, 11, 4), (1, 2, 5, 4), True, None),
    "shared heads": ((2, 6, 7, 4), (2, 2, 5, 4), False, None),
    "shared heads, causal": ((1, 6, 7, 4), (1, 2, 7, 4), True, None),
    "one head of keys": ((1, 4, 7, 4), (1, 1, 7, 4), True, None),
    "fewer than ranks": ((1, 2, 3, 4), (1, 2, 2, 4), False, None),
    "fewer than ranks, causal": ((1, 2, 2, 4), (1, 2, 3, 4), True, None),
    "mask": ((2, 2, 6, 4), (2, 2, 7, 4), False, (6, 7)),
    "mask of samples": ((2, 2, 6, 4), (2, 2, 7, 4), False, (2, 1, 6, 7)),
    "mask of heads": ((2, 2, 6, 4), (2, 2, 7, 4), False, (1, 2, 6, 7)),
    "mask of keys": ((2, 2, 6, 4), (2, 2, 7, 4), False, (2, 1, 1, 7)),
    "mask of queries": ((2, 2, 6, 4), (2, 2, 7, 4), False, (6, 1)),
}
PLACES = {"2": [0, 1], "3": [2, 0, 1], "4": [0, 1, 2, 3], "2 x 2": [[0, 1], [3, 2]], "2 x 3": [[0, 1, 2], [3, 4, 5]]}


def mask_of(shape, dtype=torch.float64):
    """A bias that hides some keys, and from one query all."""
    mask = draw(*shape, dtype=dtype, more=9)
    mask[mask > 0.8] = -inf
    mask[..., 2 % shape[-2], :] = -inf
    return mask


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", PLACES)
def test_every_layout_gives_what_one_device_gives(ranks, name):
    """The op itself and its gradients, of operands laid out at random; queries along the sequence as often as not."""
    where, generator = place(PLACES[ranks]), torch.Generator().manual_seed(SEED)
    rng = random.Random(f"{SEED} {ranks} {name}")
    q_shape, k_shape, causal, mask_shape = CASES[name]
    mask = mask_of(mask_shape) if mask_shape else None
    plain = [draw(*s, more=i) for i, s in enumerate((q_shape, k_shape, k_shape))]
    want = FORWARD(*plain, 0.0, causal, attn_mask=mask, scale=0.3)
    grad = draw(*q_shape, more=5)
    wanted = BACKWARD(grad, *plain, *want, 0.0, causal, attn_mask=mask, scale=0.3)
    along = [nd for nd in layouts(4, where.ndim) if S(2) in nd]
    for _ in range(4):
        nds = [rng.choice(along), *(rng.choice(rng.choice([along, layouts(4, where.ndim)])) for _ in "kvg")]
        own_mask = mask
        if mask is not None and rng.random() < 0.7:
            own_mask = scatter(mask, where, rng.choice(layouts(mask.dim(), where.ndim, pending=False)), generator)
        lying = [scatter(t, where, nd, generator) for t, nd in zip([*plain, grad], nds)]
        rest = {"attn_mask": own_mask, "scale": 0.3}
        out = ring_attention.ring_forward(Call(FORWARD, (*lying[:3], 0.0, causal), rest), _Run(gt.GlobalTensor))
        found = ring_attention.ring_backward(Call(BACKWARD, (lying[3], *lying[:3], *out, 0.0, causal), rest),
                                        _Run(gt.GlobalTensor))
        for what, got, expected in zip(("out", "logsumexp", "dq", "dk", "dv"), (*out, *found), (*want, *wanted)):
            assert got.shape == expected.shape and got.dtype == expected.dtype
            near(gather(got), expected, f"{what} {nds}")
        assert S(2) in out[0].sbp and out[0].sbp == out[1].sbp == found[0].sbp


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_are_added_up_in_32_bits(dtype, causal):
    """As exact as the kernel is on one device, though results are rounded once a step."""
    where, generator = place([0, 1, 2, 3]), torch.Generator().manual_seed(SEED)
    exact = [draw(1, 1, 130, 16, dtype=dtype, more=i).double() for i in range(4)]
    truth = FORWARD(*exact[:3], 0.0, causal)
    truth = [truth[0], *BACKWARD(exact[3], *exact[:3], *truth, 0.0, causal)]
    plain = [t.to(dtype) for t in exact]
    one = FORWARD(*plain[:3], 0.0, causal)
    one = [one[0], *BACKWARD(plain[3], *plain[:3], *one, 0.0, causal)]
    lying = [scatter(t, where, (S(2),), generator) for t in plain]
    ours = ring_attention.ring_forward(Call(FORWARD, (*lying[:3], 0.0, causal), {}), _Run(gt.GlobalTensor))
    assert ours[1].dtype == torch.float32
    back = Call(BACKWARD, (lying[3], *lying[:3], *ours, 0.0, causal), {})
    ours = [ours[0], *ring_attention.ring_backward(back, _Run(gt.GlobalTensor))]
    for what, got, single, value in zip(("out", "dq", "dk", "dv"), ours, one, truth):
        assert got.dtype == dtype
        far, near = ((t.double() - value).norm() / value.norm() for t in (gather(got), single))
        assert far < 1.5 * near + 1e-6, f"{what}: {far:.1e} from the truth, on one device {near:.1e}"


@pytest.mark.parametrize("at", range(7))
def test_what_is_no_number_stays_so(at):
    """Of a row that sees nothing but NaN the kernel says 0; of blocks of which one is such, that would be lost."""
    where, generator = place([0, 1, 2]), torch.Generator().manual_seed(SEED)
    plain = [draw(1, 1, 7, 4, more=i) for i in range(3)]
    plain[1][0, 0, at] = torch.nan
    q, k, v = (scatter(t, where, (S(2),), generator) for t in plain)
    out, _ = ring_attention.ring_forward(Call(FORWARD, (q, k, v, 0.0, True), {}), _Run(gt.GlobalTensor))
    assert gather(out).isnan().all(-1)[0, 0].tolist() == [row >= at for row in range(7)]
    near(gather(out)[:, :, :at], FORWARD(*plain, 0.0, True)[0][:, :, :at], f"NaN at {at}")


# ------------------------------------------------------------------------------------------- as programs come to it


def run(where, nd, q_shape, k_shape, mask=None, keys=None, dtype=torch.float64, **options):
    """torch's function, forward and backward, beside plain torch. The result, the gradients, and the moves of each."""
    plain = [draw(*s, dtype=dtype, more=i).requires_grad_() for i, s in enumerate((q_shape, k_shape, k_shape))]
    lying = [gt.from_full(t.detach(), where, sbp).requires_grad_()
             for t, sbp in zip(plain, (nd, keys or nd, keys or nd))]
    weight = draw(*q_shape, dtype=dtype, more=7)
    upstream = gt.from_full(weight, where, nd)
    with gt.record() as forward:
        out = attend(*lying, attn_mask=mask, **options)
    with gt.record() as backward:
        out.backward(upstream)
    expected = attend(*plain, attn_mask=mask, **options)
    expected.backward(weight)
    for got, want in ((out, expected), *((a.grad, b.grad) for a, b in zip(lying, plain))):
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9 if dtype == torch.float64 else None,
                                   atol=1e-11 if dtype == torch.float64 else None)
    return out, [t.grad for t in lying], forward, backward


def in_turns(moves):
    return [m for m in moves if isinstance(m.src, RankRegions) or isinstance(m.dst, RankRegions)]


def per_rank(moves, shape, itemsize=8):
    """Bytes that each rank received in moves of tensors of one shape."""
    total = Counter()
    for m in moves:
        for rank, n in elements_received(m.src, m.dst, shape).items():
            total[rank] += n * itemsize * m.tensors
    return total


@pytest.mark.parametrize("axes, nd, q_shape, k_shape, options", [
    ((2,), (S(2),), (1, 1, 9, 8), (1, 1, 9, 8), {}),
    ((3,), (S(2),), (1, 1, 10, 8), (1, 1, 10, 8), {}),
    ((4,), (S(2),), (1, 1, 3, 8), (1, 1, 3, 8), {}),
    ((3,), (S(2),), (1, 1, 5, 8), (1, 1, 14, 8), {}),
    ((3,), (S(2),), (2, 4, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    ((2, 3), (S(0), S(2)), (4, 1, 7, 8), (4, 1, 7, 8), {}),
    ((2, 3), (S(1), S(2)), (1, 4, 7, 8), (1, 2, 7, 8), {"enable_gqa": True}),
    ((2, 2), (S(2), S(2)), (1, 1, 9, 8), (1, 1, 9, 8), {}),
    ((2, 2), (B, S(2)), (1, 1, 9, 8), (1, 1, 9, 8), {}),
    ((3,), (S(2),), (1, 1, 10, 8), (1, 1, 10, 8), {"scale": 0.2}),
], ids=str)
def test_causal_attention_stays_split(axes, nd, q_shape, k_shape, options):
    """Where neither heads nor samples can be dealt, (4, 1) on 2 x 3 and (2, 4) on 3 among them: dp x sp, tp x sp."""
    where = place(torch.arange(prod(axes)).view(axes).tolist())
    out, grads, forward, backward = run(where, nd, q_shape, k_shape, is_causal=True, **options)
    assert out.sbp == nd and all(g.sbp == nd for g in grads)
    for moves in (forward, backward):
        assert in_turns(moves) == [m for m in moves if m.bytes]


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_long_attention_to_all_keys_stays_split(parts):
    where = place(list(range(parts)))
    out, grads, forward, backward = run(where, (S(2),), (1, 1, 1001, 16), (1, 1, 1203, 16), dtype=torch.float32)
    assert out.sbp == (S(2),) and all(g.sbp == (S(2),) for g in grads)
    assert len(in_turns(forward)) == parts - 1 and len(in_turns(backward)) == 2 * (parts - 1)


@pytest.mark.parametrize("kind", ["bool", "global bool", "bias", "global bias"])
def test_masks_come_through_torch(kind):
    where = place([0, 1, 2])
    mask = mask_of((900, 700), torch.float32)
    mask = mask > 0 if "bool" in kind else mask
    own = gt.from_full(mask, where, S(0)) if "global" in kind else mask
    q, k, v = (draw(1, 1, n, 16, dtype=torch.float32, more=i) for i, n in enumerate((900, 700, 700)))
    with gt.record() as moves:
        out = attend(*(gt.from_full(t, where, S(2)) for t in (q, k, v)), attn_mask=own)
    assert out.sbp == (S(2),) and len(in_turns(moves)) == len([m for m in moves if m.bytes]) == 2
    torch.testing.assert_close(out.full_tensor(), attend(q, k, v, attn_mask=mask))


def test_keys_that_are_whole_do_not_move():
    shape = (1, 1, 10, 8)
    out, _, forward, backward = run(place([0, 1, 2]), (S(2),), shape, shape, keys=(B,), is_causal=True)
    assert out.sbp == (S(2),) and not [m for m in (*forward, *backward) if m.bytes and "attention" in m.op]


def test_nothing_moves_unseen_or_forbidden():
    where = place([0, 1])
    q, k, v = (gt.from_full(draw(1, 1, 6, 4, more=i), where, S(2)) for i in range(3))
    with gt.boxing("forbid"), pytest.raises(BoxingError, match="attention_for_cpu.default needs a boxing"):
        attend(q, k, v, is_causal=True)
    half = k.numel() * 8                             # of k and v, half each
    with gt.boxing(budget=half):
        attend(q, k, v, is_causal=True)
    with gt.boxing(budget=half - 1), pytest.raises(BoxingError, match="budget"):
        attend(q, k, v, is_causal=True)


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_bytes_of_causal_attention(parts, length):
    """Rank i receives the blocks before its own; backward also what later ranks computed for its own."""
    where, shape = place(list(range(parts))), (1, 1, length, 8)
    _, _, forward, backward = run(where, (S(2),), shape, shape, is_causal=True)
    block = [2 * n * 8 * 8 for n in sizes(length, parts)]       # of k and v, or of their gradients
    before = {i: sum(block[:i]) for i in range(parts)}
    assert per_rank(in_turns(forward), shape) == before
    assert per_rank(in_turns(backward), shape) == {i: n + block[i] * (parts - 1 - i) for i, n in before.items()}
    assert all(m.tensors == 2 for m in in_turns(forward))
    assert [m.bytes for m in forward if m.bytes] == [block[0]] * (parts - 1)     # of the rank that receives most


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_bytes_to_all_keys(parts):
    """(n-1)/n of k and v forward; backward as much again, and as much of dk and dv."""
    where, shape = place(list(range(parts))), (1, 1, 1200, 16)
    _, _, forward, backward = run(where, (S(2),), shape, shape, dtype=torch.float32)
    share = 2 * prod(shape) * 4 * (parts - 1) // parts
    assert sum(m.bytes for m in forward) == share
    assert per_rank(in_turns(forward), shape, 4) == dict.fromkeys(range(parts), share)
    assert sum(m.bytes for m in in_turns(backward)) == 2 * share
    assert per_rank(in_turns(backward), shape, 4) == dict.fromkeys(range(parts), 2 * share)


def test_bytes_of_shared_heads_on_two_axes():
    """tp 2 x sp 3: each rank receives 2/3 of its heads' k and v, which are half of all."""
    where, k_shape = place([[0, 1, 2], [3, 4, 5]]), (1, 2, 900, 16)
    _, _, forward, _ = run(where, (S(1), S(2)), (1, 8, 900, 16), k_shape, enable_gqa=True, dtype=torch.float32)
    assert per_rank(in_turns(forward), k_shape, 4) == dict.fromkeys(range(6), 2 * prod(k_shape) * 4 // 2 * 2 // 3)


def test_16_bits_move_as_16_bits():
    where, shape = place([0, 1]), (1, 1, 12, 8)
    moves = []
    for dtype in (torch.bfloat16, torch.float32):
        q = [gt.from_full(draw(*shape, dtype=dtype, more=i), where, S(2)).requires_grad_() for i in range(3)]
        with gt.record() as found:
            attend(*q, is_causal=True).backward(q[0].detach())
        moves.append([m.bytes for m in in_turns(found)])
    assert moves[0] == [12 * 8 * 2] * 3 and moves[1] == [12 * 8 * 4] * 3    # k and v; again; dk and dv: half of each


# -------------------------------------------------------------------------------------------------------------- memory


class Watched(_Run):
    """Notes the elements that every rank has of blocks that are not its own, whenever more are asked for."""

    def __init__(self):
        super().__init__(gt.GlobalTensor)
        self.blocks, self.most, self.asked = [], Counter(), 0

    def redistribute(self, tensors, dsts, op, keep=False):
        moved = super().redistribute(tensors, dsts, op)
        new = [t for t, dst in zip(moved, dsts) if isinstance(dst, RankRegions)]
        self.blocks += [(rank, weakref.ref(shard), shard.numel()) for t in new for rank, shard in t.shards.items()]
        held = Counter()
        for rank, shard, n in self.blocks:
            held[rank] += n if shard() is not None else 0
        self.most |= held
        self.asked += len(new)
        return moved


@pytest.mark.parametrize("causal", [False, True])
def test_a_rank_holds_one_block_at_a_time(causal):
    where, generator, parts = place([0, 1, 2, 3]), torch.Generator().manual_seed(SEED), 4
    q, k, v, grad = (scatter(draw(1, 1, 22, 4, more=i), where, (S(2),), generator) for i in range(4))
    forward, backward = Watched(), Watched()
    out = ring_attention.ring_forward(Call(FORWARD, (q, k, v, 0.0, causal), {}), forward)
    ring_attention.ring_backward(Call(BACKWARD, (grad, q, k, v, *out, 0.0, causal), {}), backward)
    blocks = sizes(22, parts)
    for watched in (forward, backward):
        assert watched.asked == 2 * (parts - 1)
        for rank in range(parts):
            others = blocks[:rank] if causal else blocks[:rank] + blocks[rank + 1:]
            assert watched.most[rank] == 2 * 4 * max(others, default=0)


# ---------------------------------------------------------------------------------------------------- when it is taken


def takes_turns(func, *args):
    return decide(gt.GlobalTensor, func, args, {}) is TABLE[func].decomposition


@pytest.mark.parametrize("taken, parts, nd, q_shape, k_shape, options", [
    (False, 2, S(2), (1, 4, 64, 8), (1, 4, 64, 8), {"is_causal": True}),      # heads are dealt
    (False, 2, S(2), (2, 1, 64, 8), (2, 1, 64, 8), {"is_causal": True}),      # samples are
    (False, 4, S(2), (1, 8, 4096, 64), (1, 4, 4096, 64), {}),                 # heads, of all operands 1/4 each
    (True, 2, S(2), (1, 16, 4096, 64), (1, 2, 4096, 64), {}),                 # k and v are smaller than half of all
    (False, 2, S(2), (1, 16, 4096, 64), (1, 2, 4096, 64), {"is_causal": True}),    # but causal work would be uneven
    (True, 2, S(2), (1, 3, 64, 8), (1, 3, 64, 8), {"is_causal": True}),       # heads that cannot be dealt
    (True, 4, S(2), (3, 1, 64, 8), (3, 1, 64, 8), {"is_causal": True}),       # nor samples
    (False, 4, S(2), (1, 1, 64, 8), (1, 1, 64, 8), {}),                       # short: one gather is soonest
    (True, 4, S(2), (1, 1, 4096, 64), (1, 1, 4096, 64), {}),                  # long: a gather is no sooner
    (True, 2, S(2), (1, 1, 64, 8), (1, 1, 64, 8), {}),                        # a step is a move: the gather's
    (False, 2, B, (1, 1, 64, 8), (1, 1, 64, 8), {"is_causal": True}),
    (False, 2, S(1), (1, 2, 64, 8), (1, 2, 64, 8), {"is_causal": True}),
    (False, 1, S(2), (1, 1, 64, 8), (1, 1, 64, 8), {"is_causal": True}),
], ids=str)
def test_when_turns_are_taken(taken, parts, nd, q_shape, k_shape, options):
    where, causal = place(list(range(parts))), options.get("is_causal", False)
    q, k, v = (gt.zeros(s, placement=where, sbp=nd) for s in (q_shape, k_shape, k_shape))
    assert takes_turns(FORWARD, q, k, v, 0.0, causal) is taken
    assert takes_turns(BACKWARD, q, q, k, v, q, q[..., 0], 0.0, causal) is taken


def test_keys_that_are_whole_leave_it_to_the_rule_or_to_one_turn():
    where = place([0, 1])
    q = gt.zeros(1, 1, 64, 8, placement=where, sbp=S(2))
    k = gt.zeros(1, 1, 64, 8, placement=where, sbp=B)
    for keys in ((k, k), (torch.zeros(1, 1, 64, 8),) * 2):
        for causal in (False, True):
            assert takes_turns(FORWARD, q, *keys, 0.0, causal) == causal


@pytest.mark.parametrize("shapes", [
    [(1, 1, 6, 8), (1, 1, 4, 8), (1, 1, 6, 8)], [(1, 1, 6, 8), (1, 1, 6, 4), (1, 1, 6, 4)],
    [(1, 1, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)]], ids=str)
def test_sizes_that_do_not_fit_are_left_to_torch(shapes):
    q, k, v = (gt.zeros(s, placement=place([0, 1]), sbp=S(2)) for s in shapes)
    assert ring_attention.offer_forward(Call(FORWARD, (q, k, v, 0.0, True), {}), [q.spec, k.spec, v.spec]) is None
    assert takes_turns(FORWARD, q, q, q, 0.0, True)


def test_the_runner_up_is_told():
    """Where heads can be dealt, the ring is dearer; where they cannot, a gathering, or, causal, all on every rank."""
    where = place([0, 1])
    for heads, causal, algorithm, second in (
            (4, True, "", "S(2), S(2), S(2) -> S(2), S(2) by ring attention"),
            (1, False, "ring attention", "S(2), B, B -> S(2), S(2)"), (1, True, "ring attention", "B, B, B -> B, B")):
        x = gt.zeros(1, heads, 64, 8, placement=where, sbp=S(2))
        row, = (row for row in gt.explain(attend, x, x, x, is_causal=causal).rows if "attention" in row.op)
        assert (row.algorithm, row.second) == (algorithm, second)


def test_dropout_draws_as_without_turns():
    """The fused kernel has none; torch takes another way, on which a seed gives the same in every layout."""
    found = []
    for parts in (1, 2, 3):
        gt.manual_seed(SEED)
        x = gt.from_full(draw(1, 1, 9, 4), place(list(range(parts))), S(2))
        found.append(attend(x, x, x, dropout_p=0.5, is_causal=True).full_tensor())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert not found[0].equal(attend(*[draw(1, 1, 9, 4)] * 3, is_causal=True))


# ----------------------------------------------------------------------------------------------------------- processes


@pytest.mark.long
@pytest.mark.processes
def test_processes_see_what_one_process_sees(tmp_path):
    """Over shared memory, and over gloo without native code."""
    program = PROGRAMS / "ring.py"
    for folder in ("alone", "native", "python"):
        (tmp_path / folder).mkdir()
    good_all(([PYTHON, program, tmp_path / "alone"], {"GLOBALTENSOR_RANKS": "2"}),
             ([*RUN, "-n", 2, program, tmp_path / "native"], {}),
             ([*RUN, "-n", 2, program, tmp_path / "python"], {"GLOBALTENSOR_NATIVE": "0"}))
    alone = results(tmp_path / "alone")[0]
    assert results(tmp_path / "native") == results(tmp_path / "python") == {0: alone, 1: alone}
    assert alone["lies"] == {name: [str((S(1 if name == "heads dealt" else 2),)), *[str((S(2),))] * 3]
                             for name in alone["lies"]}
    for name, keys in (("causal", 4), ("more keys", 5)):         # of rank 0, [1, 1, keys, 4] of float64
        assert [m[1] for m in alone["moved"][name]] == [2 * keys * 4 * 8] * 3, name


# ------------------------------------------------------------------------------------------------ long_context.py


def test_an_example_trains_as_plain_torch_and_keeps_less(capsys):
    rows = long_context.main(["--verify", "--seq", "256", "--hidden", "8", "--sp", str(gt.world_size())])
    assert capsys.readouterr().out.count("difference") == len(rows) >= 2
    k_and_v, layers = 2 * 256 * 8 * 4, 2
    (_, whole), *_ = rows
    for i, (moved, kept) in enumerate(rows):
        n = 2 ** i
        assert moved == 3 * layers * k_and_v * (n - 1) // n     # k and v; again, with their gradients, in backward
        assert kept == pytest.approx(whole / n, rel=1e-3)       # but for a scalar or two of the loss


@pytest.mark.processes
def test_an_example_in_processes():
    options = ["--sp", "2", "--seq", "256", "--hidden", "8", "--verify"]
    said = good([*RUN, "-n", 2, ROOT / "examples" / "long_context.py", *options])
    assert said.count("\n") == 2 and "attention moved     49,152 bytes" in said
