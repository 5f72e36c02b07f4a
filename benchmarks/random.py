"""What do random numbers cost that depend on a seed and an element's place, beside torch's own?

One rank, one thread, in turns; medians: nanoseconds per element of large tensors, microseconds per call of small ones.
The numbers are looked at first: their mean and spread, and that the same seed gives the same ones again.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import globaltensor as gt
from benchmarks.timing import alternating, show

LARGE, SMALL = 1_000_000, 16
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LAWS: dict[str, tuple[float, float]] = {"randn": (0.0, 1.0), "rand": (0.5, 12 ** -0.5), "bernoulli": (0.3, 0.21 ** 0.5)}


def calls(law: str, n: int, dtype: torch.dtype, where: gt.placement) -> list[Callable[[], Any]]:
    """Ours and torch's; bernoulli takes the probability of every element."""
    if law == "bernoulli":
        plain = torch.full((n,), LAWS[law][0], dtype=dtype)
        ours = gt.from_full(plain, where, gt.sbp.broadcast)
        return [lambda: torch.bernoulli(ours), lambda: torch.bernoulli(plain)]
    mine, theirs = getattr(gt, law), getattr(torch, law)
    return [lambda: mine(n, placement=where, sbp=gt.sbp.broadcast, dtype=dtype), lambda: theirs(n, dtype=dtype)]


def verify(law: str, draw: Callable[[], Any]) -> None:
    """Raise where the numbers are not of that law, or not the same again."""
    gt.manual_seed(1)
    first = draw().full_tensor()
    gt.manual_seed(1)
    assert torch.equal(first, draw().full_tensor()), f"{law}: the same seed gives other numbers"
    mean, spread = LAWS[law]
    wide = first.double()
    off = max(abs(wide.mean().item() - mean), abs(wide.std().item() - spread))
    assert off < 5 * len(wide) ** -0.5 + torch.finfo(first.dtype).eps, f"{law} in {first.dtype} is {off:.3g} off"


def main(json: bool = False, quick: bool = False) -> None:
    torch.set_num_threads(1)
    gt.init(ranks=1)
    where = gt.placement("cpu", [0])
    large, rounds = (10_000, 2) if quick else (LARGE, 15)
    rows = []
    for law in LAWS:
        for dtype in DTYPES:
            both = calls(law, large, dtype, where)
            verify(law, both[0])
            ours, theirs = (us * 1e3 / large for us in alternating(both, 2, rounds))
            few, few_theirs = alternating(calls(law, SMALL, dtype, where), 300 if not quick else 5, rounds)
            rows.append({"law": law, "dtype": str(dtype).removeprefix("torch."), "globaltensor ns/element": ours,
                         "torch ns/element": theirs, "ratio": ours / theirs, f"globaltensor us for {SMALL}": few,
                         f"torch us for {SMALL}": few_theirs, "adds us": few - few_theirs})
    show(f"random: {large:,} elements, and {SMALL}", rows, json)


if __name__ == "__main__":
    main()
