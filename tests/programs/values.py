"""Global programs of many kinds; every process writes what it sees of their values to FOLDER/<rank>.json."""
import json
import sys
from pathlib import Path

import torch

import globaltensor as gt
from globaltensor.runtime.agreement import agree, broadcast_object
from globaltensor.runtime.machine import gloo
from globaltensor.runtime.world import world

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
F64 = torch.float64


def placements(size):
    """Those that a world of 2 or of 4 ranks can have: permuted ranks, ranks left out, one and two axes."""
    if size == 2:
        return {"all": [0, 1], "swapped": [1, 0], "first": [0], "last": [1], "column": [[1], [0]]}
    return {"all": [0, 1, 2, 3], "some": [2, 0], "mixed": [3, 1, 0], "grid": [[0, 1], [2, 3]],
            "odd grid": [[3, 0], [1, 2]], "last": [3]}


def nds(axes):
    return [(S(0),), (B,), (P,), (S(1),)] if axes == 1 else [(S(0), S(1)), (S(1), P), (B, S(0)), (S(0), S(0))]


def parts(where, make):
    """{rank: part} for the ranks that this process drives."""
    return {r: make(r) for r in world().local_ranks if r in where.coords}


def linear(where, nd):
    """A linear layer of uneven sizes, forward and backward; the operands lie as `nd` says."""
    x = gt.randn(7, 5, placement=where, sbp=nd, dtype=F64, requires_grad=True)
    w = gt.randn(5, 3, placement=where, sbp=B, dtype=F64, requires_grad=True)
    y = torch.tanh(x @ w)
    y.square().mean().backward()
    return [y, x.grad, w.grad, y.argmax(1).to(F64), torch.softmax(x.detach(), 0)]


def elsewhere(a, b, nd):
    """From one placement to another, and the gradient back."""
    x = gt.randn(5, 4, placement=a, sbp=nd, dtype=F64, requires_grad=True)
    y = x.to_global(b, S(0)) * 3 + gt.ones(5, 4, placement=b, sbp=B, dtype=F64)
    (y * y).sum().backward()
    return [y, x.grad]


def decisions(where):
    """What a program branches on, on every process, those outside the placement too."""
    x = gt.arange(6, placement=where, sbp=S(0))
    seen = [x.sum().item(), bool(x.sum() > 3), x.tolist(), float(x.max()), len(x.nonzero()), str(gt.show(x))]
    if x.sum().item() > 3:
        seen.append((x * 2).full_tensor().tolist())
    return seen


def locally(where):
    """From parts of unequal size, and a broadcast of parts that differ: the first rank's counts."""
    n = len(where.flat)
    cut = {r: torch.full((2 + (k < 1), 2), float(r), dtype=F64) for k, r in enumerate(where.flat)}
    same = {r: torch.full((2,), float(r + 1), dtype=F64) for r in where.flat}
    x = gt.from_shards(parts(where, cut.__getitem__), where, S(0))
    y = gt.from_shards(parts(where, same.__getitem__), where, B)
    z = gt.from_shards(parts(where, same.__getitem__), where, P)
    assert x.shape[0] == 2 * n + 1
    return [x, y, z, x * y + z]


def trained(where):
    """Three steps of AdamW on a module, with dropout."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
    gt.to_global(net.double(), where, {"0.weight": S(0), "0.bias": S(0), "3.weight": S(1)})
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        x = gt.randn(5, 6, placement=where, sbp=B, dtype=F64)
        t = gt.randint(3, (5,), placement=where, sbp=B)
        loss = torch.nn.functional.cross_entropy(net(x), t)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *net.parameters()]


def values(of):
    return [v.detach().full_tensor().tolist() if isinstance(v, torch.Tensor) and v.is_global else
            v.tolist() if isinstance(v, torch.Tensor) else v for v in of]


def main(folder):
    gt.init(machine=gloo)                            # the same rates in one process as in many, so the same plans
    places = {name: gt.placement("cpu", ranks) for name, ranks in placements(gt.world_size()).items()}
    found, moved = {}, {}

    def case(name, fn, *args):
        gt.manual_seed(1234)
        with gt.record() as moves:
            made = fn(*args)
        moved[name] = [[m.op, m.bytes, str(m.src), str(m.dst), m.where] for m in moves]
        found[name] = values(made)

    for name, where in places.items():
        for nd in nds(where.ndim):
            case(f"linear {name} {nd}", linear, where, nd)
        case(f"decisions {name}", decisions, where) if where.ndim == 1 else None
        case(f"locally {name}", locally, where) if where.ndim == 1 else None
    for a in places.values():
        for b in list(places.values())[:3]:
            case(f"elsewhere {a} {b}", elsewhere, a, b, nds(a.ndim)[2])
    case("trained", trained, places["all"])
    gt.manual_seed(5)                                # what torch makes on every process alike may become global
    found["unseeded"] = [float(torch.rand(()))]
    with torch.device("meta"):                       # a model in the making: not what processes tell each other
        agree("telling")
        found["told"] = broadcast_object([gt.world_size()], gt.world_size() - 1)
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps({"values": found, "moves": moved}))


if __name__ == "__main__":
    main(sys.argv[1])
