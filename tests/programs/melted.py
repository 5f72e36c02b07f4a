"""Rows that a program melts into one dim and parts again stay where they are: of views alone, and in torch's attention.

    python melted.py          one process
    globaltensor run -n 4 melted.py
"""
from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import globaltensor as gt

SEED = 23
B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
# the shape, the dim that is split, the sizes of the views one after the other; do all parts stay where they are?
VIEWS = [
    ((3, 8, 4), 1, [(24, 4), (3, 8, 4)], True), ((3, 8, 4), 1, [(96,), (-1, 8, 2, 2)], True),
    ((3, 8, 4), 1, [(24, 4), (6, 4, 4), (3, 8, 4)], True), ((3, 8, 4), 1, [(24, 4), (3, 4, 8)], True),
    ((3, 8, 4), 1, [(24, 4), (1, 3, 1, 4, 2, 4)], True), ((3, 4, 2), 1, [(12, 2), (3, 8)], True),
    ((3, 5, 4), 1, [(15, 4), (3, 5, 2, 2)], True), ((3, 5, 4), 1, [(15, 4), (3, 20)], False),
    ((3, 8, 4), 1, [(24, 4), (8, 3, 4)], False), ((3, 8, 4), 1, [(24, 4), (2, 12, 4)], False),
    ((3, 6, 4), 1, [(18, 4), (3, 2, 3, 4)], True), ((3, 8, 4), 2, [(24, 4), (3, 8, 4)], True),
    ((0, 8, 4), 1, [(0, 4), (0, 8, 4)], True), ((3, 8, 1), 1, [(24, 1), (3, 8)], True),
]


def placements() -> Iterator[Any]:
    for count in (1, 2):
        if gt.world_size() == 1 or gt.world_size() == count:
            yield gt.placement("cpu", list(range(count)))


def check_views() -> None:
    """What a view of a view holds, what it moves, and that it shares the memory of the base."""
    for where in placements():
        for shape, dim, views, stays in VIEWS:
            plain = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            x = gt.from_full(plain, where, S(dim))
            y, want = x, plain
            for sizes in views:
                y, want = y.view(sizes), want.view(sizes)
            with gt.record() as moves:
                doubled = y * 2
            moved = sum(move.bytes for move in moves)
            assert bool(moved) == (not stays and len(where.flat) > 1), (shape, views, moves)
            assert y.stride() == want.stride() and torch.equal(doubled.full_tensor(), want * 2), (shape, views)
            y.add_(1)
            want.add_(1)
            assert torch.equal(x.full_tensor(), plain), (shape, views)
            x.mul_(3)
            plain.mul_(3)
            assert torch.equal(y.full_tensor(), want), (shape, views)


def random_sizes(draw: random.Random, count: int) -> list[int]:
    sizes = []
    while count > 1:
        n = draw.choice([d for d in range(2, count + 1) if count % d == 0])
        sizes.append(n)
        count //= n
    return sizes + [1] * draw.randrange(2)


def check_random(seed: int) -> None:
    """A chain of views, with gradients, whatever moves."""
    draw = random.Random(seed)
    for where in placements():
        shape = random_sizes(draw, draw.choice([12, 16, 24, 30, 36]))
        plain = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        x = gt.from_full(plain.detach(), where, draw.choice([B, P, *map(S, range(len(shape)))])).requires_grad_()
        y, want = x, plain
        for _ in range(draw.randrange(2, 5)):
            sizes = random_sizes(draw, plain.numel())
            y, want = y.view(sizes), want.view(sizes)
            if draw.random() < 0.3:
                y, want = y * 2, want * 2
        torch.testing.assert_close(y.full_tensor(), want, msg=lambda m: f"seed {seed}\n{m}")
        (y ** 2).sum().backward()
        (want ** 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, msg=lambda m: f"seed {seed}\n{m}")


def check_linear() -> None:
    """A layer on rows that were melted, and viewed once more with as many: as a router of experts does."""
    for where in placements():
        for shape, dim, views in [((5, 8, 4), 0, [(40, 4), (40, 4)]), ((5, 8, 4), 0, [(40, 4), (160,), (40, 4)]),
                                  ((5, 8, 4), 0, [(40, 4), (40, 4), (40, 4)]), ((3, 8, 4), 1, [(24, 4), (24, 4)]),
                                  ((5, 8, 4), 0, [(40, 4), (40, 1, 4), (40, 4)]), ((1, 3, 4), 1, [(3, 4), (3, 4)]),
                                  ((4, 1, 4), 2, [(4, 4), (4, 4)]), ((5, 8, 4), 0, [(1, 160), (1, 160)])]:
            torch.manual_seed(SEED)
            plain = torch.randn(shape, dtype=torch.float64)
            weight = torch.randn(2, views[-1][1], dtype=torch.float64)
            x = gt.from_full(plain, where, S(dim)).requires_grad_()
            w = gt.from_full(weight, where, B).requires_grad_()
            y, want = x, plain.requires_grad_()
            for sizes in views:
                y, want = y.view(sizes), want.view(sizes)
            y, want = nn.functional.linear(y, w), nn.functional.linear(want, weight.requires_grad_())
            y.square().sum().backward()
            want.square().sum().backward()
            for got, expected in [(y, want), (x.grad, plain.grad), (w.grad, weight.grad)]:
                torch.testing.assert_close(got.full_tensor(), expected, msg=lambda m, v=views: f"{v}\n{m}")


def attention_steps() -> Iterator[tuple[str, nn.Module, dict[str, Any], bool]]:
    for batch_first in (True, False):
        for weights in (True, False):
            yield (f"attention, batch first {batch_first}, weights {weights}",
                   nn.MultiheadAttention(8, 2, batch_first=batch_first), {"need_weights": weights}, batch_first)
        yield (f"encoder layer, batch first {batch_first}",
               nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first), {}, batch_first)


def check_attention() -> None:
    """Data parallel attention: nothing moves but the gradients of the parameters."""
    for where in placements():
        for name, module, options, batch_first in attention_steps():
            torch.manual_seed(SEED)
            plain = module.double()
            model = copy.deepcopy(plain).to_global(where, B)
            source = torch.randn(4, 6, 8).double() if batch_first else torch.randn(6, 4, 8).double()
            x = gt.from_full(source, where, S(0 if batch_first else 1)).requires_grad_()
            source.requires_grad_()

            def run(of: nn.Module, x: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
                return of(x, x, x, **options)[0] if options else of(x)

            with gt.record() as moves:
                y = run(model, x)
                (y ** 2).sum().backward()
            activations = [m for m in moves if m.bytes and not any(s.is_partial for s in m.src.sbp)]
            assert not activations, (name, moves)
            want = run(plain, source)
            (want ** 2).sum().backward()
            assert y.sbp == x.sbp == x.grad.sbp, name
            torch.testing.assert_close(y.full_tensor(), want)
            torch.testing.assert_close(x.grad.full_tensor(), source.grad)
            for p, of_plain in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(p.grad.full_tensor(), of_plain.grad)


def main() -> None:
    print(f"seed {SEED}")
    check_views()
    for seed in range(SEED, SEED + 60):
        check_random(seed)
    check_linear()
    check_attention()


if __name__ == "__main__":
    main()
    if gt.rank() == 0:
        print("views of views, and attention")
