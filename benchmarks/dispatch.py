"""How much does an op cost on top of plain torch, when everything about it is known (a cache hit)?

One rank, 16 x 16 float32, one thread: microseconds per call for plain torch, this library and torch DTensor, measured
in turns in one process; medians. What each op gives is compared with plain torch first.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import globaltensor as gt
from benchmarks.timing import alternating, dtensor_mesh, show

OPS: dict[str, Callable[..., Any]] = {               # of x [16, 16], w [16, 16], b [16]
    "add": lambda x, w, b: x + w,
    "mul": lambda x, w, b: x * w,
    "mm": lambda x, w, b: x @ w,
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (16,), b, b),
    "view": lambda x, w, b: x.view(4, 64),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "scalar": lambda x, w, b: x * 0.5,
    "add_": lambda x, w, b: x.add_(w),
}


def mlp(x: Any, *weights: Any) -> Any:
    """Forward and backward of as many layers as there are weights; the gradients."""
    h = x
    for w in weights:
        h = torch.relu(torch.mm(h, w))
    return torch.autograd.grad(h.sum(), weights)


def main(json: bool = False, quick: bool = False) -> None:
    torch.set_num_threads(1)
    gt.init(ranks=1)
    mesh = dtensor_mesh((1,))
    where = gt.placement("cpu", [0])
    calls, rounds = (20, 2) if quick else (300, 15)

    def cases(op: Callable[..., Any], *sizes: tuple[int, ...], learn: bool = False) -> list[Callable[[], Any]]:
        """The op on the same values three times: plain, ours, DTensor's."""
        from torch.distributed.tensor import Replicate, distribute_tensor

        values = [torch.randn(size) for size in sizes]
        found = []
        for make in (torch.clone, lambda t: gt.from_full(t, where, gt.sbp.broadcast),
                     lambda t: distribute_tensor(t.clone(), mesh, [Replicate()])):
            operands = [make(t).requires_grad_(learn and k > 0) for k, t in enumerate(values)]
            found.append(lambda operands=operands: op(*operands))
        verify(*(case() for case in found))
        return found

    rows = [row(name, alternating(cases(op, (16, 16), (16, 16), (16,)), calls, rounds)) for name, op in OPS.items()]
    both = cases(mlp, *[(16, 16)] * 5, learn=True)
    rows.append(row("MLP, forward and backward", alternating(both, max(calls // 5, 5), rounds)))
    show("dispatch: microseconds per call on a cache hit", rows, json)


def row(name: str, us: list[float]) -> dict[str, Any]:
    plain, ours, theirs = us
    return {"op": name, "plain us": plain, "globaltensor us": ours, "dtensor us": theirs,
            "globaltensor adds": ours - plain, "dtensor adds": theirs - plain,
            "globaltensor / plain": ours / plain, "dtensor / plain": theirs / plain}


def verify(plain: Any, ours: Any, theirs: Any) -> None:
    """Raise where the three differ."""
    if isinstance(plain, tuple):
        for each in zip(plain, ours, theirs):
            verify(*each)
    else:
        torch.testing.assert_close(ours.full_tensor(), plain)
        torch.testing.assert_close(theirs.to_local(), plain)


if __name__ == "__main__":
    main()
