"""Mistakes that only several processes can make, one after another; every rank writes what it was told, and when."""
import json
import sys
import time
from pathlib import Path

import torch

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
me = gt.rank()
where = gt.placement.all("cpu")
part = gt.placement("cpu", [1, 2])
odd = me == 1                                        # the rank that goes wrong


def mixed():
    gt.zeros(4, placement=where, sbp=B) + gt.zeros(4, placement=part, sbp=B)


def forbidden():
    with gt.boxing("forbid"):
        gt.ones(8, 8, placement=where, sbp=S(1)) @ gt.ones(8, 8, placement=where, sbp=S(1))


def seeded():
    torch.manual_seed(me)
    gt.randn(4, placement=where, sbp=S(0))


def fed_its_own_batches():
    """As a user of DDP would: the weights are whole everywhere, and nothing would ever be sent."""
    model = torch.nn.Linear(3, 1).to_global(where, B)
    model(torch.full((4, 3), float(me))).sum().backward()


def differing_later():
    """Plain operands are compared at uses 1, 2, 4, 8, ..."""
    x = gt.zeros(7, placement=where, sbp=B)
    for step in range(40):
        x = x + torch.full((7,), float(me if step > 10 else 0))


def targets_of_its_own():
    x = gt.zeros(4, 5, placement=where, sbp=S(1))
    torch.nn.functional.cross_entropy(x, torch.full((4,), me))


MISTAKES = {
    "a longer part": lambda: gt.from_local(torch.ones(4 if odd else 2, 3), where, S(0)),
    "another width": lambda: gt.from_local(torch.ones(2, 4 if odd else 3), where, S(0)),
    "another number of dims": lambda: gt.from_local(torch.ones([2] if odd else [2, 2]), where, S(1)),
    "another dtype": lambda: gt.from_local(torch.ones(2, dtype=torch.int32 if odd else None), where, S(0)),
    "no such dim": lambda: gt.from_local(torch.ones(2), where, S(1)),
    "another sbp": lambda: gt.zeros(4, placement=where, sbp=S(0) if odd else B),
    "another shape": lambda: gt.zeros(5 if odd else 4, placement=where, sbp=B),
    "another placement": lambda: gt.zeros(4, placement=part if odd else where, sbp=B),
    "another factory": lambda: (gt.ones if odd else gt.zeros)(4, placement=where, sbp=B),
    "another layout": lambda: gt.from_full(torch.arange(8.), where, S(0) if odd else B),
    "another value": lambda: gt.from_full(torch.full((4,), float(me)), where, B),
    "another module": lambda: gt.to_global(_unlike(torch.nn.Linear(3, 3)), where, B),
    "another seed": seeded,
    "another plain operand": lambda: gt.zeros(4, placement=where, sbp=S(0)) + torch.full((4,), float(me)),
    "memory that nobody wrote": lambda: torch.full((4,), float(me)).where(gt.ones(4, placement=where, sbp=B) > 0, 1.0),
    "batches of its own": fed_its_own_batches,
    "another plain operand later": differing_later,
    "targets of its own": targets_of_its_own,
    "an index of its own": lambda: gt.zeros(4, 5, placement=where, sbp=B)[torch.tensor([me])],
    "another plain operand of two ranks": lambda: gt.zeros(4, placement=part, sbp=S(0)) * torch.full((4,), float(me)),
    "into a plain tensor too": lambda: torch._fused_sgd_(
        [torch.ones(4), gt.ones(4, placement=part, sbp=B)], [gt.ones(4, placement=part, sbp=B)] * 2, [], lr=0.1,
        weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=False),
    "mixed placements": mixed,
    "forbidden boxing": forbidden,
}


def _unlike(net):
    with torch.no_grad():
        net.weight.fill_(me)
    return net


def products_that_read_no_sum():
    """With beta=0 an op does not look at what it would add to: such as torch.empty, as models write it."""
    gt.manual_seed(0)
    a, b, c, v = torch.rand(3, 4), torch.rand(4, 5), torch.rand(2, 4, 4), torch.rand(4)
    for name, factors, size in (("addmm", (a, b), (3, 5)), ("addmm", (a, b), (5,)), ("baddbmm", (c, c), (2, 4, 4)),
                                ("addbmm", (c, c), (4, 4)), ("addmv", (a, v), (3,)), ("addr", (v, v), (4, 4))):
        for sbp in (S(0), B):
            ours = [gt.from_full(t, where, sbp) for t in factors]
            got = getattr(torch, name)(torch.full(size, float("nan") if odd else float(me)), *ours, beta=0, alpha=0.5)
            wanted = getattr(torch, name)(torch.zeros(size), *factors, alpha=0.5)
            torch.testing.assert_close(got.full_tensor(), wanted)


def main(folder):
    products_that_read_no_sum()
    told = {}
    for name, mistake in MISTAKES.items():
        began = time.perf_counter()
        try:
            mistake()
            told[name] = ["nothing", "", "", 0.0]
        except gt.GlobalTensorError as error:
            told[name] = [type(error).__name__, str(error), error.where, time.perf_counter() - began]
    gt.manual_seed(0)
    told["and goes on"] = gt.ones(6, placement=where, sbp=S(0)).sum().item()
    Path(folder, f"{me}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
