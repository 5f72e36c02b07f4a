"""Boxings among processes of which some share no memory: every process checks its part of each against the whole value,
and writes the collectives and bytes of those that name themselves to FOLDER/<rank>.json."""
import copy
import itertools
import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

import globaltensor as gt
from globaltensor.boxings.redistribute import UNDER_WAY, _arriving, redistribute
from globaltensor.layouts.layout import layout
from globaltensor.runtime import collectives

S, B, P, PMAX = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.partial_max
SEED = 20_261_123
generator = torch.Generator().manual_seed(SEED)


def scattered(value, where, sbp):
    """A global tensor of small whole numbers, which any order of additions sums alike; pending parts at random."""
    y = gt.from_full(torch.zeros_like(value) if P in sbp else value, where, [B if s.is_partial else s for s in sbp])
    if any(s.is_partial for s in sbp):
        terms = [torch.randint(-4, 5, value.shape, generator=generator).to(value.dtype) for _ in where.flat]
        at = {r: i for i, r in enumerate(where.flat)}
        shards = {}
        for r in y.shards:
            region = tuple(slice(*ends) for ends in layout(where, sbp).region(tuple(value.shape), r))
            shards[r] = terms[at[r]][region].clone()
        return gt.GlobalTensor.wrap(y.spec.on(layout(where, sbp)), shards), terms
    return y, None


def expected(value, terms, where, sbp):
    """The whole value of that: on axes that split, all ranks of a pending group hold their own region of a term."""
    if terms is None:
        return value
    whole, ops = torch.zeros_like(value), {s.op for s in sbp if s.is_partial}
    lay, groups = layout(where, sbp), {}
    for r, term in zip(where.flat, terms):
        at = tuple(i for i, s in zip(where.coords[r], sbp) if not s.is_broadcast)
        groups.setdefault(at, (lay.region(tuple(value.shape), r), term))       # of copies the first one's counts
    by_region = {}
    for region, term in groups.values():
        by_region.setdefault(region, []).append(term)
    for region, parts in by_region.items():
        index = tuple(slice(*ends) for ends in region)
        stacked = torch.stack([part[index] for part in parts])
        whole[index] = stacked.sum(0).to(value.dtype) if ops == {"sum"} else stacked.amax(0)
    return whole


def check(x, whole, dst):
    for r, shard in x.shards.items():
        region = tuple(slice(*ends) for ends in dst.region(tuple(whole.shape), r))
        assert torch.equal(shard, whole[region]), f"rank {r}: {x.spec} is not what it should be"


def boxings(where, dtype, shapes, notes, most):
    """Pairs of layouts, the tensors of all shapes moved together."""
    states = list(itertools.product([B, S(0), S(1), P], repeat=where.ndim)) + [(PMAX,) * where.ndim]
    pairs = list(itertools.product(states, repeat=2))
    for src, dst in random.Random(SEED).sample(pairs, min(most, len(pairs))):
        if any(t.is_partial for t in dst) or any(s.is_broadcast for s in src) and any(s.is_partial for s in src):
            continue
        xs, wholes, to = [], [], layout(where, dst)
        for shape in shapes:
            value = torch.randint(-9, 10, shape, generator=generator).to(dtype)
            x, terms = scattered(value, where, src)
            xs.append(x)
            wholes.append(expected(value, terms, where, src))
        with gt.record() as moves:
            ys = redistribute(xs, [to] * len(xs), "to_global")
        begun = [x.to_global(sbp=dst, wait=False) for x in xs]
        assert all(y.arriving is not None for y, move in zip(begun, moves) if move.calls), f"{src} -> {dst}"
        for y, whole in zip([*ys, *begun], [*wholes, *wholes]):
            check(y, whole, to)
        for move in moves:
            notes[f"{list(where.shape)} {dtype} {src} -> {dst}"] = [move.bytes, list(move.calls)]


def conjugates(where):
    """What torch conjugates when it reads it is conjugated on its way."""
    value = torch.complex(*torch.randint(-9, 10, (2, 8, 12), generator=generator).float())
    for src, dst in itertools.product([S(0), S(1), B], repeat=2):
        x = gt.from_full(value, where, src).conj()
        y, = redistribute([x], [layout(where, (dst,) * where.ndim)], "to_global")
        for r, shard in y.shards.items():
            assert torch.equal(shard, value.conj()[tuple(slice(*ends) for ends in y.spec.region(r))]), f"{src} -> {dst}"


def meanwhile(line):
    """Boxings that are begun, and waited for when a value is needed."""
    value = torch.arange(40.0).view(8, 5)

    def begun(t=value, src=S(0), dst=B):
        return gt.from_full(t, line, src).to_global(sbp=dst, wait=False)

    x = gt.from_full(value, line, S(0)).requires_grad_()
    y = x.to_global(sbp=B, wait=False)
    assert y.arriving is not None and y.shape == x.shape and y.sbp == (B,) and y.device == x.device
    (y.sin() * y).sum().backward()
    assert y.arriving is None and torch.equal(y.detach().full_tensor(), value)
    torch.testing.assert_close(x.grad.full_tensor(), value.cos() * value + value.sin())

    first, second = begun(), begun(dst=S(1))         # read in another order than they were begun in
    assert second.sum().item() == first.sum().item() == value.sum()
    assert torch.equal(copy.deepcopy(begun()).full_tensor(), value)
    unread = [begun() for _ in range(2 * UNDER_WAY)]
    assert [y.arriving in _arriving for y in unread] == [False] * UNDER_WAY + [True] * UNDER_WAY
    del unread                                       # nobody reads it
    assert torch.equal(begun().full_tensor(), value)
    late = begun()
    for _ in range(UNDER_WAY):                       # all ranks count calls, whatever they do at one
        gt.ones(4, placement=gt.placement("cpu", [0]), sbp=B).to_global(sbp=B, wait=False)
    assert late.arriving not in _arriving and torch.equal(late.full_tensor(), value)
    with torch.inference_mode():
        inner = begun()
    outer = begun()
    with torch.inference_mode():
        assert outer.sum().item() == inner.sum().item()
    assert inner.is_inference() and not outer.is_inference() and not next(iter(outer.shards.values())).is_inference()
    pending = [gt.ones(4, 4, placement=line, sbp=P), gt.ones(8, 4, placement=line, sbp=PMAX)]
    with gt.record() if gt.rank() == 0 else nullcontext([]) as moves:
        several = [x.to_global(sbp=B, wait=False) for x in pending]
        assert not moves and pending[0].to_global(sbp=S(0)).sum().item() == 16
        assert [y.sum().item() for y in several[::-1]] == [32, 16]
    assert [move.op for move in moves][2:] == ["to_global"] * 2 * (gt.rank() == 0), moves
    for write in (lambda x: x.add_(1), lambda x: x.data.mul_(2)):
        x = gt.from_full(value, line, S(0))
        late, early = x.to_global(sbp=B, wait=False), x.to_global(sbp=B, wait=False)
        assert early.sum().item() == value.sum()
        write(x)
        for _ in range(2):
            try:
                late.sum()
            except gt.GlobalTensorError as error:
                assert "written to while its boxing went on" in str(error)
            else:
                raise AssertionError("nobody noticed")
    begun()                                          # under way when the program ends


def main(folder, most, few):
    collectives._FEW = few                           # ranks, at most, that gather by messages
    n, notes = gt.world_size(), {}
    line, grid = gt.placement("cpu", range(n)), gt.placement("cpu", torch.arange(n).view(2, -1).tolist())
    small, large = [(8, 16), (5, 3), (4, 12), (1, 7)], [(256, 512), (4, 12)]
    boxings(line, torch.float32, large, notes, 100)
    back = gt.placement("cpu", [*range(n)][::-1])
    for where, dtype, shapes in ((grid, torch.float32, small), (back, torch.bfloat16, small),
                                 (grid, torch.bfloat16, large), (line, torch.int64, large)):
        boxings(where, dtype, shapes, notes, most)
    conjugates(line)
    meanwhile(line)
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
