"""Ranks that do something else than the others, in the way that the first argument names: none may get a value."""
import sys

import torch

import globaltensor as gt

how = sys.argv[1]
S, B = gt.sbp.split, gt.sbp.broadcast
odd = gt.rank() == 1
where = gt.placement.all("cpu")
x = gt.ones(8, 4, placement=where, sbp=S(0))
y = gt.zeros(8, 4, placement=where, sbp=S(0))


def whole(t):
    return t.to_global(sbp=B)


def result():
    if how == "swapped lines":
        if odd:
            b = y.to_global(sbp=B)                   # the line of rank 1
            a = x.to_global(sbp=B)
        else:
            a = x.to_global(sbp=B)                   # the line of the others
            b = y.to_global(sbp=B)
        return a + b
    if how == "swapped in a line":
        return y.to_global(sbp=B) if odd else x.to_global(sbp=B)
    if how == "target":
        return x.to_global(sbp=S(1) if odd else B)
    if how == "lengths":
        long = gt.zeros(4000, 4, placement=where, sbp=S(0))
        for n in range(3):                           # all lengths are known by then
            for t in (long, x) if odd and n == 2 else (x, long):
                whole(t)
        return x
    if how == "index":
        return x[7 if odd else 0] + 0
    if how == "slice":
        return x[1:3 if odd else 4].contiguous()
    if how == "layouts":
        return gt.from_full(torch.ones(4, 4), where, S(int(odd)))
    if how == "values":
        return gt.from_full(torch.ones(4, 4) + odd, where, S(0))
    if how == "models":                              # made without a seed
        torch.manual_seed(gt.rank())
        return gt.parallelize(torch.nn.Linear(4, 3), where).weight
    if how == "saves" and odd:                       # nothing is written
        gt.save({"x": x}, "/nonexistent/checkpoint")
    if how == "creates" and odd:
        return gt.zeros(4, 4, placement=where, sbp=S(0))
    if how in ("saves", "creates"):
        return gt.from_full(torch.ones(4, 4), where, S(0))
    raise AssertionError(how)


if how == "in step":                                 # whoever records comes by another way, and that is well
    with gt.record() if odd else gt.boxing():
        for _ in range(4):
            x.requires_grad_().to_global(sbp=B).to_global(sbp=S(1)).sum().backward()
            y[3].add(1).to_global(sbp=B), x @ x.t(), x[0] + 0
    y = whole(y) if odd else whole(y)                # at two lines, but asked for at one
    print("the value is", x.grad.sum().item())
else:
    print("the value is", result().full_tensor())
