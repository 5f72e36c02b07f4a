"""Ranks that do not do the same, in each of many ways. `apart.py SIZE WAY...` runs each way on processes of its own,
forked from one that has imported everything, and prints JSON: way -> per rank [exit code, seconds, what it said]."""
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import free_port
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
LIMIT = 30                                           # seconds, after which a way counts as hanging


class Case:
    """What a rank has to play with; `odd` on the one that goes its own way."""

    def __init__(self) -> None:
        self.odd = gt.rank() == 1
        self.all = gt.placement.all("cpu")
        self.x = gt.arange(32, placement=self.all, sbp=B, dtype=torch.float32).view(8, 4).to_global(sbp=S(0))
        self.y = gt.zeros(8, 4, placement=self.all, sbp=S(0))
        self.b = gt.ones(8, 4, placement=self.all, sbp=B)

    def one(self, theirs, own):
        return own if self.odd else theirs

    def in_turn(self, do):
        """Both tensors, in another order on the odd rank."""
        made = {}
        for name in self.one("xy", "yx"):
            made[name] = do(getattr(self, name))
        return made["x"] + made["y"]

    def trained(self, optimizer, steps=2, own_step=True):
        net = nn.Linear(4, 3).to_global(self.all, B)
        opt = optimizer(net.parameters())
        for _ in range(steps):
            opt.zero_grad()
            net(self.x).square().mean().backward()
            if own_step or not self.odd:
                opt.step()
        return net.weight


def swapped_lines(c):
    if c.odd:
        second = c.y.to_global(sbp=B)
        first = c.x.to_global(sbp=B)
    else:
        first = c.x.to_global(sbp=B)
        second = c.y.to_global(sbp=B)
    return first + second


def swapped_when_warm(c):
    for n in range(6):
        tensors = (c.y, c.x) if c.odd and n == 4 else (c.x, c.y)
        first, second = [t.to_global(sbp=B) for t in tensors]
    return first + second


def swapped_products(c):
    w = gt.ones(4, 4, placement=c.all, sbp=S(0))
    if c.odd:
        return [c.y @ w, c.x @ w][1]
    return [c.x @ w, c.y @ w][0]


def plain_later(c):
    x = c.b
    for n in range(20):
        x = x + torch.full((8, 4), float(c.one(0, n > 11)))
    return x


def swapped_lengths(c):
    long = gt.zeros(4000, 4, placement=c.all, sbp=S(0))
    for n in range(4):                               # all lengths are known by then
        for t in (long, c.x) if c.odd and n == 3 else (c.x, long):
            whole = t.to_global(sbp=B)
    return whole


def a_layer_less(c):
    """After some steps whose gradients went early, where hosts have links between them."""
    net = nn.Sequential(*(nn.Linear(4, 4).to_global(c.all, B) for _ in range(3)), nn.Linear(4, 500).to_global(c.all, B))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for n in range(5):
        y = c.x
        for k, layer in enumerate(net):
            if not (c.odd and n == 4 and k == 1):
                y = layer(y)
        y.square().mean().backward()
        opt.step()
        opt.zero_grad()
    return net[0].weight


def without_gradients(c):
    w = c.b[:4].clone().requires_grad_()
    with torch.set_grad_enabled(c.one(True, False)):
        return c.x @ w


def view_written(c):
    x = c.b.clone()
    row = x[2]
    if c.odd:
        row.add_(1)
    return x


def clipped(c):
    net = nn.Linear(4, 3).to_global(c.all, B)
    net(c.x).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), c.one(1.0, 2.0))
    return net.weight.grad * 1


def dropped(c):
    torch.manual_seed(c.one(1, 2))
    return F.dropout(c.b, 0.5)


def pipelined(c):
    half = gt.world_size() // 2
    places = [gt.placement("cpu", list(range(half))), gt.placement("cpu", list(range(half, 2 * half)))]
    runner = gt.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), places, "gpipe", 2,
                         loss=lambda y, t: (y - t).square().mean())
    return runner.step(torch.full((4, 4), c.one(1.0, 2.0)), torch.zeros(4, 4))


def ordered(c):
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to_global(c.all, B)
    opt = gt.zero(torch.optim.SGD(list(net.parameters())[::c.one(1, -1)], 0.1))
    net(c.x).sum().backward()
    opt.step()
    return net[0].weight


def many_steps_ago(c):
    x = c.b * c.one(0.5, 0.25)
    for _ in range(100):
        x = x + 1
    return x


WAYS = {
    "order of lines": swapped_lines,
    "order in a loop": lambda c: c.in_turn(lambda t: t.to_global(sbp=B)),
    "order when warm": swapped_when_warm,
    "order of lengths": swapped_lengths,
    "a layer left out": a_layer_less,
    "order of products": swapped_products,
    "order of reductions": lambda c: c.in_turn(lambda t: t.sum().to_global(sbp=B)),
    "order of full_tensor": lambda c: gt.from_full(c.in_turn(lambda t: t.full_tensor()), c.all, B),
    "order of item": lambda c: c.in_turn(lambda t: t.sum().item()),
    "order of softmaxes": lambda c: c.in_turn(lambda t: t.softmax(0)),
    "index": lambda c: c.x[c.one(0, 7)] + 0,
    "index of a whole tensor": lambda c: c.b[c.one(0, 7)] + 0,
    "owner of an index": lambda c: c.x[c.one(0, 7)].full_tensor(),
    "slice": lambda c: c.x[1:c.one(4, 3)].contiguous(),
    "slice of one length": lambda c: c.b[c.one(0, 1):c.one(3, 4)],
    "index tensor": lambda c: c.b[torch.tensor([c.one(0, 7)])],
    "dim of an index": lambda c: c.b.narrow(c.one(0, 1), 0, 4),
    "plain operand": lambda c: c.x + torch.full((8, 4), c.one(1.0, 2.0)),
    "plain operand of a whole tensor": lambda c: c.b + torch.full((8, 4), c.one(1.0, 2.0)),
    "plain operand, later": plain_later,
    "plain number": lambda c: c.b * torch.tensor(c.one(1.0, 2.0)),
    "mask": lambda c: torch.where(torch.eye(8, 4) > c.one(0, 2), c.b, c.b * 2),
    "value of from_full": lambda c: gt.from_full(torch.full((8,), c.one(1.0, 2.0)), c.all, B),
    "shape of from_local": lambda c: gt.from_local(torch.ones(2, c.one(3, 4)), c.all, S(0)),
    "dtype of from_local": lambda c: gt.from_local(torch.ones(2, dtype=c.one(None, torch.int32)), c.all, S(0)),
    "scalar": lambda c: c.x * c.one(0.5, 0.25),
    "scalar of a whole tensor": lambda c: c.b * c.one(0.5, 0.25),
    "scalar, an integer": lambda c: c.x * c.one(2, 3),
    "scalar, long ago": many_steps_ago,
    "alpha": lambda c: torch.add(c.b, c.b, alpha=c.one(1, 2)),
    "fill": lambda c: c.b.clone().fill_(c.one(1.0, 2.0)),
    "bounds": lambda c: c.b.clamp(0, c.one(1.0, 2.0)),
    "exponent": lambda c: c.b ** c.one(2, 3),
    "epsilon": lambda c: F.layer_norm(c.b, (4,), eps=c.one(1e-5, 1e-2)),
    "learning rate of SGD": lambda c: c.trained(lambda p: torch.optim.SGD(p, c.one(0.1, 0.2))),
    "learning rate of AdamW": lambda c: c.trained(lambda p: torch.optim.AdamW(p, c.one(0.1, 0.2))),
    "weight decay": lambda c: c.trained(lambda p: torch.optim.AdamW(p, 0.1, weight_decay=c.one(0.1, 0.2))),
    "momentum": lambda c: c.trained(lambda p: torch.optim.SGD(p, 0.1, momentum=c.one(0.8, 0.9))),
    "order of parameters": ordered,
    "a step left out": lambda c: c.trained(lambda p: torch.optim.SGD(p, 0.1), own_step=False),
    "norm to clip to": clipped,
    "grad mode": without_gradients,
    "training mode": lambda c: F.dropout(c.b, 0.5, training=c.one(True, False)),
    "default dtype": lambda c: (torch.set_default_dtype(c.one(torch.float32, torch.float64)),
                                c.b.to(torch.int64) / 2)[1],
    "seed of randn": lambda c: (torch.manual_seed(c.one(1, 2)), gt.randn(8, placement=c.all, sbp=S(0)))[1],
    "seed of dropout": dropped,
    "target of to_global": lambda c: c.x.to_global(sbp=c.one(B, S(1))),
    "sbp of a factory": lambda c: gt.zeros(4, placement=c.all, sbp=c.one(S(0), B)),
    "shape of a factory": lambda c: gt.zeros(c.one(4, 5), placement=c.all, sbp=B),
    "dim of a reduction": lambda c: c.x.reshape(4, 8)[:, :4].sum(c.one(0, 1)),
    "an op more": lambda c: c.b.add(1) if c.odd else c.b,
    "a write to a view more": view_written,
    "other ops": lambda c: c.x.sum().item() if c.odd else gt.zeros(3, placement=c.all, sbp=B),
    "index of a copy": lambda c: (c.b[c.one(0, 7)].copy_(c.b[3] * 2), c.b)[1],
    "inputs of a pipeline": pipelined,
}
HARMLESS = {                                         # nothing moves, or nothing differs
    "a rank prints": lambda c: print(c.b) if c.odd else None,
    "a rank computes for itself": lambda c: print((c.b * 2).norm().item()) if c.odd else None,
    "a rank records": lambda c: (gt.record() if c.odd else gt.boxing()).__enter__(),
    "a rank copies": lambda c: torch.empty_like(c.b).copy_(c.b) if c.odd else c.b,
    "a rank keeps more": lambda c: [c.b.clone(), c.x.detach()] if c.odd else None,
}


def meet(c, made):
    """Box what was made of it: all that is still the same moves the same."""
    if isinstance(made, gt.GlobalTensor) and made.dim():
        made.detach().to_global(sbp=S(0)).to_global(sbp=B)
    (c.x @ c.b.t()).sum(1).to_global(sbp=B)


def rank_of_way(way: str) -> None:
    c = Case()
    meet(c, None)
    print("begins", flush=True)
    meet(c, {**WAYS, **HARMLESS}[way](c))
    for _ in range(3):
        meet(c, c.x.softmax(0))
    print("the value is there", flush=True)


def start(way: str, rank: int, said: Path, **env: str) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), **env)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        rank_of_way(way)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def outcome(way: str, size: int, folder: Path) -> list:
    port, began = str(free_port()), time.monotonic()
    files = [folder / str(rank) for rank in range(size)]
    for file in files:                               # what the way before said would count as said now
        file.unlink(missing_ok=True)
    per_host = int(os.environ.get("PER_HOST", size))
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(per_host),
               GLOBALTENSOR_SECRET="of tests", GLOO_SOCKET_IFNAME="lo")
    children = {start(way, r, file, LOCAL_RANK=str(r % per_host), **env): r for r, file in enumerate(files)}
    ended: list = [[None, LIMIT, ""]] * size
    began_at = [0.0] * size
    while children and time.monotonic() - began < LIMIT:
        for r, file in enumerate(files):
            if not began_at[r] and "begins" in file.read_text() if file.exists() else False:
                began_at[r] = time.monotonic()
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            r = children.pop(child)
            seconds = time.monotonic() - (began_at[r] or began)
            ended[r] = [os.waitstatus_to_exitcode(status), seconds, files[r].read_text()]
        else:
            time.sleep(0.01)
    for child, r in children.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended[r] = [None, LIMIT, files[r].read_text()]
    return ended


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in (gt.GlobalTensor, gt.zeros, gt.pipeline):           # loaded once, before the forks
        torch.optim.AdamW(nn.Linear(2, 2).parameters()).zero_grad()          # which loads much of torch
    with tempfile.TemporaryDirectory() as folder:
        ways = sys.argv[2:] or (*WAYS, *HARMLESS)
        print(json.dumps({way: outcome(way, int(sys.argv[1]), Path(folder)) for way in ways}))
