"""Programs whose boxings are recorded, then seen by torch's profiler, then counted; what differs is printed.

    python seen.py                   one process drives both ranks
    globaltensor run -n 2 seen.py    one process per rank
"""
import json

import torch
import torch.nn.functional as F

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
P, Q = gt.placement("cpu", [0, 1]), gt.placement("cpu", [1, 0])
GRID = gt.placement("cpu", [[0, 1]], axis_names=("dp", "tp"))
torch.manual_seed(0)


def given(*shape, sbp=S(0), where=P):
    return gt.randn(*shape, placement=where, sbp=sbp)


X, Y, W = given(5, 6), given(5, 6, sbp=S(1)), given(6, 7).requires_grad_()
ENDS = torch.tensor([5, 8], dtype=torch.int32)
LEAVES = [given(5, 3, sbp=B).requires_grad_(), given(7, sbp=B).requires_grad_()]
TABLE, WORDS = given(9, 4, sbp=S(0)).requires_grad_(), gt.arange(6, placement=P, sbp=S(0))


def gradients():
    ((X.t() @ LEAVES[0]).sum() + (given(3, 7) * LEAVES[1]).sum()).backward()
    for leaf in LEAVES:
        assert leaf.grad is not None
        leaf.grad = None


def backward():
    torch.autograd.grad((X.to_global(sbp=B) @ W).to_global(sbp=S(1)).square().sum(), W)


CASES = {
    "an op boxes": lambda: X @ W,
    "two operands together": lambda: X + Y,
    "to_global": lambda: X.to_global(sbp=S(1)),
    "to another placement": lambda: X.to_global(Q, S(0)),
    "two axes": lambda: given(5, 6, sbp=(S(0), S(1)), where=GRID).to_global(sbp=(S(1), B)),
    "nothing moves": lambda: given(4, 4, sbp=B).to_global(sbp=S(0)),
    "backward": backward,
    "gradients together": gradients,
    "a decomposition": lambda: X.softmax(0),
    "a view": lambda: X[2] * 2,
    "in place": lambda: X.clone().add_(Y),
    "through a view": lambda: X.clone()[1:4].mul_(Y[1:4]),
    "a lookup": lambda: torch.autograd.grad(F.embedding(WORDS, TABLE).sum(), TABLE),
    "a convolution's halo": lambda: F.conv1d(given(2, 3, 9, sbp=S(2)), torch.ones(4, 3, 3), padding=1),
    "a list of tensors": lambda: torch._foreach_add([X, X], [Y, Y]),
    "an index": lambda: given(6, 4)[torch.tensor([4, 0, 4])],
    "rows that ranks pick": lambda: torch._grouped_mm(given(8, 6), given(2, 6, 3), offs=ENDS),
}


def text(move):
    """How a profiler is to show what was recorded."""
    inside = move.src.placement == move.dst.placement and "regions" not in str(move.dst)
    many = f" x{move.tensors}" if move.tensors > 1 else ""
    dst = str(move.dst).removeprefix(f"{move.dst.placement} ") if inside else move.dst
    return f"boxing for {move.op}: {move.src}{many} -> {dst}, {move.bytes:,} bytes, {move.where}".replace('"', "'")


def ranges(of):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        of()
    return [event.name for event in sorted(profile.events(), key=lambda e: e.time_range.start)
            if event.name.startswith("boxing for")]


def main():
    wrong, boxings = {}, 0
    for name, case in CASES.items():
        for _ in range(3):                           # what comes again is native code's
            case()
        with gt.record() as moves:
            case()
        expected = [text(move) for move in moves]
        boxings += len(moves)
        if (shown := ranges(case)) != expected:
            wrong[name] = [expected, shown]
        gt.metrics()
        case()
        now = gt.metrics(every_rank=True)
        counted = now["boxings"], now["communication_bytes"]
        if counted != (len(moves), sum(move.bytes for move in moves)):
            wrong[f"{name}, counted"] = [expected, counted]
        if moves and not 0 < now["communication_seconds"] < now["seconds"]:
            wrong[f"{name}, seconds"] = now
        with gt.record() as moves:                   # a profiler and a recorder see the same
            shown = ranges(case)
        if shown != [text(move) for move in moves]:
            wrong[f"{name}, recorded and seen"] = [moves, shown]
    print(json.dumps({"boxings": boxings, "cases": len(CASES), "wrong": wrong}, default=str))


if __name__ == "__main__":
    main()
