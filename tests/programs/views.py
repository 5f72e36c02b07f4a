"""Programs that write through views, beside plain torch: a table, and random ones that a `choose` function draws.

Run as a program, by any number of processes: the table on every layout, and EXAMPLES random programs from SEED on.

    globaltensor run -n 2 tests/programs/views.py SEED EXAMPLES
"""
from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import globaltensor as gt

B, S, P = gt.sbp.broadcast, gt.sbp.split, gt.sbp.partial_sum
PLACEMENTS = [[0, 1], [0, 1, 2], [1, 0, 2], [[0, 1], [2, 3]], [[0, 1, 2]], [3]]
Choose = Callable[[list], Any]

# What is done to x, of 6 rows and 4 columns.
WRITES = """
    x[2][1] = 7
    x[1:3][:, 2] = 7
    for row in x: row[0] = 1
    a, b = x.split(3); a[:, 0] = 5
    x.unbind()[1][2] = 5
    x[0][1:3] = 3
    x[1:5].view(-1).as_strided((3, 2), (4, 1)).mul_(2)
    x.flatten()[3:5] = 7
    torch._foreach_add_(list(x.unbind()), 1.)
    torch._foreach_mul_([x[0:2], x[1:3]], [2., 3.])
    torch._foreach_add_([x.view(-1)], 1.)
    torch._foreach_addcmul_([x[0], x[1]], [x[2], x[3]], [x[4], x[4]], value=2.)
    x[0].add_(1)
    x[1:].mul_(2)
    x.view(-1).add_(1)
    x.view(-1)[::5].neg_()
    x.fill_diagonal_(3)
    x.diagonal().fill_(2)
    x.diagonal(1).add_(x[4, :3])
    x[np.int64(2)] = 1
    x[torch.tensor(2)] = 1
    x[None, 2] = 1
    x[1, torch.tensor([0, 2])] = 5.
    x[1:4, torch.tensor([0, 2])] *= 5.
    x[x > 5] = 0
    x[2][x[2] > 9] = 1
    x[0].zero_()
    x[1, :2] += 3
    x[1:4] -= x[0]
    x[1:4] = x[2:5] * 2
    x[1:4].copy_(x[2:5].clone())
    x[1:3] = x[0]
    x[1:] = x[:1]
    x[:, 1:3] = x[:, :1]
    x[:, 1:3] = x[:, 3, None]
    x[2:] = x.sum(0)
    x[1:5:2] = x.mean(0)
    x[:2, :2] = x[3, 2:]
    x[1:].copy_(x[0].expand(5, 4))
    x[1:5].copy_(x[5, 1:3, None].expand(2, 2).reshape(4, 1))
    x.diagonal().copy_(x[5, 1].expand(4))
    x.t()[1:3] = x[:, 3]
    x[1:4] = x.view(torch.int32)[5, 4:]
    x[1].add_(x.view(torch.int32)[5, 4:])
    x[1].copy_(x.view(torch.int32)[2, 4:])
    torch._foreach_copy_([x[:2], x[3:5]], [x[5].expand(2, 4), x[2].expand(2, 4)])
    torch.add(x[0], 1, out=x[2])
    torch.cumsum(x[1:3], 1, out=x[3:5])
    x.t()[1][2] = 4
    x[::2][1].fill_(9)
    x[2].exp_()
    x.reshape(3, 8)[1].add_(x[0, 0])
    x.reshape(2, 3, 4).transpose(0, 1)[1].mul_(3)
    x[4].normal_(5, 0)
    x[4].uniform_(5, 5)
    x[1].copy_(x[1].flip(0))
    x[1].cumsum_(0)
    x[:, 1].mul_(x[:, 2])
    x[1:5].unfold(0, 2, 2)[1].fill_(4)
    v = x[2]; v.unsqueeze_(0); v[0, 1] = 8
    v = x[1:3, :3]; v.unsqueeze_(1); v.transpose_(0, 2); v[1, 0, 0] = 8; v.squeeze_(); v.mul_(2)
    x.as_strided((3,), (5,), 1).add_(2)
    x.chunk(2)[1][0] -= 1
    x[5].view(2, 2).t()[0] *= 3
    x[1].index_fill_(0, torch.tensor([1]), 3.)
    x[1:3].index_add_(1, torch.tensor([1, 3]), torch.ones(2, 2, dtype=x.dtype))
    x[1:3].scatter_(1, torch.tensor([[1], [3]]), 9.)
    x[3].masked_fill_(x[3] > 13, 0.)
    x[1:4].clamp_(3, 9).sub_(1)
    x[1:4].tril_()
    x[0].lerp_(x[1], 0.5)
    x[2:5].addcmul_(x[0], x[1], value=2)
    v = x[2]; x.add_(1); v.mul_(2); w = v + x[3]; x[0] = w
    v = x.data[1:3]; x.data.fill_(5); x[5] = v.mean()
    v = x.detach()[1:3]; x.add_(2); x[5] = v.sum()
    v = x[0]; x.data.add_(1); x[4] = v
    v, w = x[1:4], x[2:5]; v += 1; w *= 2; x[0] = v[2]
    v = x[1:4]; w = v[1]; w += 1; v *= 2; x[0] = w
    v = x.view(3, 8); v[1] = 0; x[0] = v[0, :4]
    x[:] = 3
    x[...] = x[:, :1]
    x[4:2] = 1
    x[0, 0] = x[5, 3]
    x.narrow(0, 1, 3).select(1, 2).fill_(0.5)
    x[2:4].squeeze().t().mul_(2)
    x.view(torch.int64)[2][1] = 0
    with torch.no_grad(): x[1][2] = 3
    with torch.inference_mode(): x[1][2] = 3; x[2:4].mul_(2)
    with torch.inference_mode(): y = x * 2; y[1][2] = 3; x[0] = y[1]
"""

# What moves nothing: x is S(0), three ranks have two rows each.
MOVES_NOTHING = """
    x[2][1] = 7
    x[1:3][:, 2] = 7
    for row in x: row[0] = 1
    x.unbind()[1][2] = 5
    torch._foreach_add_(list(x.unbind()), 1.)
    x[0].add_(1)
    x[1:].mul_(2)
    x.view(-1).add_(1)
    x.flatten()[3:5] = 7
    x.diagonal().fill_(2)
    x.fill_diagonal_(3)
    x[1, :2] += 3
    x[0].zero_()
    x[:, 1].add_(1)
    x[1:4] = torch.ones(4)
"""


def statements(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


def execute(program: str, x: torch.Tensor) -> None:
    exec(program, {"x": x, "torch": torch, "np": np})


def layouts(ranks: int) -> Iterator[tuple[Any, Any]]:
    """Some placements with sbps for tensors of two dims and more, as far as there are ranks."""
    for where, sbps in (([0, 1, 2], [S(0), S(1), B, P]), ([0, 1], [S(0), S(1)]), ([1, 0, 2], [S(0)]),
                        ([[0, 1], [2, 3]], [(S(0), S(1)), (S(0), S(0)), (P, S(0)), (S(1), B)])):
        if max(np.ravel(where)) < ranks:
            yield from ((gt.placement("cpu", where), sbp) for sbp in sbps)


def plain_x() -> torch.Tensor:
    return torch.arange(24.0, dtype=torch.float64).reshape(6, 4)


def check_write(program: str, where: Any, sbp: Any) -> None:
    want, x = plain_x(), gt.from_full(plain_x(), where, sbp)
    shards = dict(x.shards)
    execute(program, want)
    execute(program, x)
    got = x.full_tensor()
    torch.testing.assert_close(got, want, msg=lambda m: f"{program}, {where} {sbp}\n{m}")
    assert x.sbp == gt.from_full(plain_x(), where, sbp).sbp
    assert all(x.shards[r].data_ptr() == shard.data_ptr() for r, shard in shards.items()), program


# ------------------------------------------------------------------------------------------------------ random programs


def view_of(t: torch.Tensor, choose: Choose) -> tuple[str, Callable]:
    """A view op that plain torch can do, as a function."""
    d = choose(range(t.dim())) if t.dim() else 0
    n = t.shape[d] if t.dim() else 0
    kinds = ["unsqueeze", "alias", "detach"]
    if t.dim():
        kinds += ["slice", "slice", "view", "squeeze"]
        kinds += ["select", "select", "split", "unbind"] if n else []
    if t.dim() > 1:
        kinds += ["transpose", "permute", "diagonal"]
    kind = choose(kinds)
    if kind == "select":
        i = choose(range(-n, n))
        return f"select({d}, {i})", lambda t: t.select(d, i)
    if kind == "slice":
        start, step = choose(range(n + 1)), choose([1, 1, 2])
        stop = choose(range(start, n + 1))
        index = (*[slice(None)] * d, slice(start, stop, step))
        return f"[{index}]", lambda t: t[index]
    if kind == "split":
        size = choose(range(1, n + 1))
        nth = choose(range(-(-n // size)))
        return f"split({size}, {d})[{nth}]", lambda t: t.split(size, d)[nth]
    if kind == "unbind":
        i = choose(range(n))
        return f"unbind({d})[{i}]", lambda t: t.unbind(d)[i]
    if kind == "view":
        sizes = [(-1,), (t.shape[0], -1), (*t.shape[:-1], 1, t.shape[-1])]
        sizes += [(*t.shape[:-1], 2, t.shape[-1] // 2)] if t.shape[-1] % 2 == 0 else []
        size = choose(sizes) if t.numel() else tuple(t.shape)
        return f"view({size})", lambda t: t.view(size)
    if kind == "transpose":
        e = choose(range(t.dim()))
        return f"transpose({d}, {e})", lambda t: t.transpose(d, e)
    if kind == "permute":
        dims = list(range(d, t.dim())) + list(range(d))
        return f"permute({dims})", lambda t: t.permute(dims)
    if kind == "diagonal":
        offset = choose([-1, 0, 1])
        return f"diagonal({offset})", lambda t: t.diagonal(offset)
    calls = {"unsqueeze": ("unsqueeze(0)", lambda t: t.unsqueeze(0)), "squeeze": ("squeeze()", lambda t: t.squeeze()),
             "alias": ("view_as", lambda t: t.view_as(t)), "detach": ("detach()", lambda t: t.detach())}
    return calls[kind]


WRITERS: dict[str, Callable] = {                      # of a tensor, another one that fits, and a number
    "add_": lambda t, other, n: t.add_(n), "mul_": lambda t, other, n: t.mul_(n),
    "fill_": lambda t, other, n: t.fill_(n), "zero_": lambda t, other, n: t.zero_(),
    "copy_": lambda t, other, n: t.copy_(other), "sub_": lambda t, other, n: t.sub_(other, alpha=2),
    "clamp_": lambda t, other, n: t.clamp_(-9, 9), "masked_fill_": lambda t, other, n: t.masked_fill_(t > 5, n),
    "flipped": lambda t, other, n: t.copy_(t.flip(0) if t.dim() else t * 2),
    "cumsum_": lambda t, other, n: t.cumsum_(0) if t.dim() else t.neg_(),
    "foreach": lambda t, other, n: torch._foreach_add_([t, t], [n, 1.0]),
    "index_fill_": lambda t, other, n: t.index_fill_(0, torch.tensor([0]), n) if t.dim() and len(t) else t.add_(1),
    "[...]": lambda t, other, n: t.__setitem__(..., n), "[0]": lambda t, other, n: t.__setitem__(0, n),
    "[1:]": lambda t, other, n: t.__setitem__(slice(1, None), other[1:]),
    "[1:] = [0]": lambda t, other, n: t.__setitem__(slice(1, None), t[0]),
    "[1:] = sum": lambda t, other, n: t.__setitem__(slice(1, None), other.sum(0)),
    "expanded": lambda t, other, n: t.copy_(other[..., :1].expand_as(other)),
    "[..., 0]": lambda t, other, n: t.__setitem__((..., 0), n),
    "[1:] +=": lambda t, other, n: t.__setitem__(slice(1, None), t[1:].add_(n)),
    ".data": lambda t, other, n: t.data.add_(n),
}


class Pair:
    """A tensor of plain torch and the global one that must be the same."""

    def __init__(self, plain: torch.Tensor, ours: torch.Tensor) -> None:
        self.plain, self.ours = plain, ours

    def map(self, function: Callable, *others: Pair) -> Pair | None:
        """The function of both; None where plain torch refuses it."""
        try:
            plain = function(self.plain, *[other.plain for other in others])
        except (RuntimeError, IndexError):
            return None
        return Pair(plain, function(self.ours, *[other.ours for other in others]))

    def check(self) -> None:
        assert self.plain.shape == self.ours.shape and self.plain.stride() == self.ours.stride()
        torch.testing.assert_close(self.ours.detach().full_tensor(), self.plain.detach())


def check_random(choose: Choose, ranks: int, steps: int = 10) -> list[str]:
    """A random program; its statements. `choose` draws one of a list."""
    ranks_of = choose([where for where in PLACEMENTS if max(np.ravel(where)) < ranks])
    where = gt.placement("cpu", ranks_of)
    shape = tuple(choose([[6, 4], [5, 3], [2, 3, 4], [7], [3, 1, 4], [1, 5], [0, 3], [4, 4]]))

    def place(t: torch.Tensor) -> Pair:
        sbps = [B, P, *[S(d) for d in range(t.dim())]]
        return Pair(t, gt.from_full(t, where, [choose(sbps) for _ in where.shape]))

    leaf = place(torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape))
    with_grad = choose([False, True])
    log = [f"x = {shape} on {where} {leaf.ours.sbp}{', with gradients' if with_grad else ''}"]
    if with_grad:
        leaf = Pair(leaf.plain.requires_grad_(), leaf.ours.requires_grad_())
    base = Pair(leaf.plain * 1, leaf.ours * 1) if with_grad else Pair(leaf.plain.clone(), leaf.ours)
    tensors, reads = [base], []
    try:
        for _ in range(steps):
            nth = choose(range(len(tensors)))
            t, kind = tensors[nth], choose(["view", "view", "write", "write", "read"])
            if kind == "view":
                name, function = view_of(t.plain, choose)
                log.append(f"t{len(tensors)} = t{nth}.{name}")
                if (view := t.map(function)) is not None:
                    tensors.append(view)
            elif kind == "write":
                name = choose([w for w in WRITERS if not (with_grad and w == ".data")])
                n = choose([2.0, -1.0])
                part = [n if choose([True, True, False]) else 1 for n in t.plain.shape]
                other = place(torch.arange(1.0, 1 + torch.Size(part).numel(), dtype=torch.float64).reshape(part))
                log.append(f"t{nth}: {name} {n}, {part} {other.ours.sbp}")
                if t.map(lambda t, other: [WRITERS[name](t, other, n)], other) is None:
                    return log                       # what an op has done that failed, nobody knows
            else:
                log.append(f"read t{nth}")
                t.check()
                if (read := t.map(lambda t: (t * 2).sum())) is not None:
                    reads.append(read)
        for t in tensors:
            t.check()
        if with_grad:
            log.append("backward")
            total = base.map(lambda y, *reads: (y * y).sum() + sum(r * r for r in reads), *reads)
            if total is not None and total.map(lambda t: [t.backward()]) is not None and leaf.plain.grad is not None:
                Pair(leaf.plain.grad, leaf.ours.grad).check()
    except Exception as error:
        error.add_note("\n".join(log))
        raise
    return log


def check_gradient_that_is_a_view() -> None:
    """Backward of an expansion ends with a view, here a boxed one. It is brought to the layout of its leaf."""
    where, plain = gt.placement("cpu", [[0, 1], [2, 3]]), torch.arange(1.0, 6.0).view(1, 5)
    for sbp in ((S(0), P), (P, S(0)), (S(1), P)):
        x = gt.from_full(plain, where, sbp).requires_grad_()
        (x.expand(2, 1, 5).double() ** 2).sum().backward()
        assert x.grad.sbp == sbp and torch.equal(x.grad.full_tensor(), 4 * plain), (sbp, x.grad)


def main(seed: int, examples: int) -> None:
    world = gt.world_size()
    if world == 1 or world >= 4:                     # one process drives as many ranks as a program names
        check_gradient_that_is_a_view()
    for where, sbp in layouts(world):
        for program in statements(WRITES):
            check_write(program, where, sbp)
    for example in range(examples):
        try:
            check_random(random.Random(seed + example).choice, world)
        except Exception as error:
            error.add_note(f"SEED={seed + example}")
            raise
    if gt.rank() == 0:
        print(f"{len(statements(WRITES))} programs on {len(list(layouts(world)))} layouts, {examples} random ones")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
