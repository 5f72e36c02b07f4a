"""torch's flex_attention of global tensors: indices are those of the whole, in every layout, beside plain torch.

torch's op is called itself, whose eager kernel has a backward on the CPU too; the public function, which traces first,
is called by some tests.
"""
from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import globaltensor as gt
from globaltensor.tensors import flex_attention as module

SEED = int(os.environ.get("FLEX_SEED") or 20_261_124)
print(f"tests/test_flex_attention.py: FLEX_SEED={SEED}")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
THREE = gt.placement("cpu", [2, 0, 1])
attend = torch.ops.higher_order.flex_attention
BATCH, HEADS, GROUPS, LENGTH, SIZE = 4, 4, 2, 24, 6


def draw(*shape: int, dtype: torch.dtype = torch.float64, more: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + more), dtype=torch.float64).to(dtype)


def alibi(score: Any, batch: Any, head: Any, query: Any, key: Any, slopes: Any) -> Any:
    return score + (query - key) * slopes[head]


def documents(batch: Any, head: Any, query: Any, key: Any, starts: Any) -> Any:
    return (query >= key) & (starts[batch, query] == starts[batch, key])


def everything(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= 0


def mask_of(function: Any, batch: int | None, block: int) -> tuple[Any, ...]:
    return create_block_mask(function, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block).as_tuple()


def run(q: Any, k: Any, v: Any, slopes: Any, starts: Any, block: int) -> list[Any]:
    plain = starts if not starts.is_global else starts.full_tensor()
    mask = mask_of(lambda b, h, i, j: documents(b, h, i, j, plain), BATCH, block)
    out, logsumexp, _ = attend(q, k, v, alibi, (*mask[:-1], documents), 0.4, {}, (slopes,), (starts,))
    (out.pow(2).sum() + logsumexp.sin().sum()).backward()
    return [out.detach(), logsumexp.detach(), q.grad, k.grad, v.grad, slopes.grad]


def operands(batch_of_keys: int = BATCH, heads: int = HEADS) -> list[torch.Tensor]:
    starts = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [0] * LENGTH, [0] * 12 + [1] * 12, [5] * 3 + [1] * 21])
    return [draw(BATCH, heads, LENGTH, SIZE), draw(batch_of_keys, GROUPS, LENGTH, SIZE, more=1),
            draw(batch_of_keys, GROUPS, LENGTH, 4, more=2), draw(heads, more=3), starts]


def on(placement: gt.placement, t: torch.Tensor, sbp: Any) -> Any:
    return gt.from_full(t, placement, sbp).requires_grad_(t.is_floating_point())


LAYOUTS = [(GRID, q, k) for q, k in product([(S(0), S(1)), (S(1), S(0)), (S(2), S(2)), (B, S(3)), (P, B)],
                                            [(S(0), S(1)), (S(2), B)])]
LAYOUTS += [(THREE, S(0), S(0)), (THREE, S(1), S(2)), (THREE, S(2), P), (THREE, B, S(0))]


@pytest.mark.parametrize("placement,sbp,sbp_of_keys", LAYOUTS, ids=str)
def test_values_and_gradients_are_those_of_plain_torch(placement: Any, sbp: Any, sbp_of_keys: Any) -> None:
    plain = operands()
    want = run(*(t.requires_grad_(t.is_floating_point()) for t in plain), block=8)
    q, k, v, slopes, starts = (t.detach() for t in plain)
    q2, k2, v2 = on(placement, q, sbp), on(placement, k, sbp_of_keys), on(placement, v, sbp_of_keys)
    got = run(q2, k2, v2, on(placement, slopes, B), on(placement, starts, B), block=8)
    for name, mine, theirs in zip(("out", "logsumexp", "q", "k", "v", "slopes"), got, want):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        assert mine.stride() == theirs.stride(), name


@pytest.mark.parametrize("sbp,keys,forward", [
    ((S(0), S(1)), (S(0), S(1)), 0),
    ((S(1), S(0)), (S(1), S(0)), 0),
    ((B, S(1)), (B, S(1)), 0),
    ((S(2), S(0)), (B, S(0)), 0),
    ((S(0), S(2)), (S(0), S(2)), 1),                 # keys and values, half of each, together
], ids=str)
def test_only_keys_and_values_move_and_only_where_queries_are_split(sbp: Any, keys: Any, forward: int) -> None:
    q, k, v, slopes, starts = operands()
    q, k, v = on(GRID, q, sbp).detach(), on(GRID, k, keys).detach(), on(GRID, v, keys).detach()
    mask = mask_of(lambda b, h, i, j: documents(b, h, i, j, starts), BATCH, 8)
    with gt.record() as moves:
        attend(q, k, v, alibi, (*mask[:-1], documents), 0.4, {}, (slopes,), (starts,))
    received = [move for move in moves if move.bytes]
    assert len(received) == forward
    assert sum(m.bytes for m in received) == (forward and (k.nbytes + v.nbytes) // 4)


def test_keys_of_one_batch_serve_all() -> None:
    plain = operands(batch_of_keys=1)
    want = run(*(t.requires_grad_(t.is_floating_point()) for t in plain), block=8)
    q, k, v, slopes, starts = (t.detach() for t in plain)
    got = run(on(GRID, q, (S(0), S(1))), on(GRID, k, B), on(GRID, v, B), on(GRID, slopes, B), on(GRID, starts, B), 8)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", [5, 8, 128])
def test_a_block_mask_is_cut_where_queries_are(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op gets blocks that tell of its own queries, wherever the cut falls."""
    seen = []
    q, k, v, _, starts = (t.detach() for t in operands())
    mask = mask_of(lambda b, h, i, j: documents(b, h, i, j, starts), BATCH, block)
    theirs = module.flex_attention

    def watching(*args: Any) -> Any:
        seen.append((args[0].shape[2], args[4]))
        return theirs(*args)

    monkeypatch.setattr(module, "flex_attention", watching)
    attend(on(THREE, q, S(2)).detach(), on(THREE, k, B).detach(), on(THREE, v, B).detach(), lambda s, *_: s,
           (*mask[:-1], documents), 0.4, {}, (), (starts,))
    for queries, part in seen:
        assert part[0] == queries and part[1] == LENGTH
        assert part[2].shape[2] == -(-queries // part[-3]), "rows of blocks"
    assert len(seen) == 3


def test_the_public_function_and_graphs() -> None:
    q, k, v, slopes, _ = (t.detach().float() for t in operands())
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    s2 = on(GRID, slopes, B).detach()

    def program(q: Any, k: Any, v: Any, s: Any) -> Any:
        return flex_attention(q * 2, k, v, lambda x, b, h, i, j: x + (i - j) * s[h], mask, enable_gqa=True)

    want = program(q, k, v, slopes)
    for sbp in ((S(0), S(1)), (S(2), S(0))):
        mine = [on(GRID, t, sbp).detach() for t in (q, k, v)]
        got = program(*mine, s2)
        assert got.sbp == sbp
        torch.testing.assert_close(got.full_tensor(), want)
        got = torch.compile(program, backend="aot_eager", fullgraph=True)(*mine, s2)
        torch.testing.assert_close(got.full_tensor(), want)


def test_autocast_casts_as_plain_torch_does() -> None:
    q, k, v, *_ = (t.detach().float() for t in operands())
    mask = mask_of(everything, None, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = attend(q, k, v, lambda s, *_: s, mask, 0.4, {})
        x = on(GRID, q, (S(0), S(1)))
        got = attend(x, on(GRID, k, (S(0), S(1))), on(GRID, v, (S(0), S(1))), lambda s, *_: s, mask, 0.4, {})
    assert got[0].dtype == want[0].dtype == torch.bfloat16
    got[0].float().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(got[0].detach().full_tensor(), want[0])
