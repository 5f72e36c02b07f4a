"""How long is a training step over hosts with slow links, beside torch's DDP, FSDP2, DTensor and pipelines?

Hosts are network namespaces of this machine, 2 or 4 with 1 or 2 ranks each. Each has a cable to a switch, which `tc`
makes as slow as a link: 1 or 10 Gbit/s each way, 50 us or 1 ms to the other hosts. That takes root, `ip` and `tc`; a
kernel without netem cannot delay, so there only the rate is set, which each row says. The model and its training are
those of train.py, one thread per rank; 8 ranks train one of 8 layers, so that each has a stage of a pipeline. Each arm
lives in processes of its own, must get the losses of the others, and trains in turns with those that it is compared
with while these wait; the link changes under them. A time is that of the median step, of the slowest rank.

    DDP                torch's over gloo, buckets of 1, 2, 4 and 25 MB: the best of these
    FSDP2              torch's `fully_shard` of each block over gloo: parameters stay gathered from forward to backward
    FSDP2, freed       the same, and gathered anew in backward
    DTensor            torch's plan within a host and DDP across: the best of these buckets. Of 2 ranks each only, as tp
    torch's pipeline   a stage on each rank, 1F1B, 8 micro-batches
    alone              plain torch, each rank on its part of a batch, and nothing is sent: no way to send it is faster
    dp                 ours: the batch split, parameters broadcast
    ZeRO 1, 2          ours: `gt.zero(optimizer, stage)` on top
    ZeRO 3             ours: parameters too, gathered a layer ahead
    tp                 ours: the same plan as DTensor's within a host, the batch split across
    pipeline           ours: the same as torch's

And how much of a transfer is hidden behind a backward pass that takes as long, but no core: each layer sleeps. The same
of a boxing that is begun (`wait=False`) before a sleep that takes as long.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import globaltensor as gt
from benchmarks import pipeline, train
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.tensors import gradients

BUCKETS = [1, 2, 4, 25]                              # MB
LINKS = [("1gbit", "50us"), ("1gbit", "1ms"), ("10gbit", "50us"), ("10gbit", "1ms")]
BUCKETED = ("DDP", "DTensor")                        # of which the best bucket counts
PAIRS = {"alone": "best DDP", "dp": "best DDP", "ZeRO 2": "FSDP2", "ZeRO 3": "FSDP2, freed",
         "tp": "best DTensor", "pipeline": "torch's pipeline"}
# Arms that take turns: the function that trains, below or in train.py, and what it is told.
DP = {f"DDP {mb} MB": ("ddp", {"bucket": mb}) for mb in BUCKETS} | {
    "dp": ("ours", {"stage": 0}), "alone": ("alone", {})}
SHARDED = {"FSDP2": ("fsdp2", {"frees": False}), "FSDP2, freed": ("fsdp2", {"frees": True})} | {
    f"ZeRO {stage}": ("ours", {"stage": stage}) for stage in (1, 2, 3)}
TP = {f"DTensor {mb} MB": ("dtensor", {"bucket": mb}) for mb in BUCKETS} | {"tp": ("tp", {})}
PIPELINES = {"torch's pipeline": ("torch_pipeline", {}), "pipeline": ("our_pipeline", {})}
QUICK = {(2, 1): [DP, SHARDED], (2, 2): [{name: TP[name] for name in ("DTensor 25 MB", "tp")}],
         (4, 1): [PIPELINES]}                        # hosts and ranks of each: arms
FULL = {(hosts, ranks): [DP, SHARDED, *([TP] if ranks > 1 else []), PIPELINES] for hosts in (2, 4) for ranks in (1, 2)}
SLEEPER_LAYERS, SLEEPER_WIDTH = 16, 400


class Host(NamedTuple):
    """A network namespace: its end of the cable, which has the same name on the switch, and the address there."""

    name: str
    end: str
    address: str
    switch: str


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    if no_hosts := lacking():
        print(f"hosts: left out: {no_hosts}", file=sys.stderr)
        return
    grids, rounds, steps, links = (QUICK, 1, 2, LINKS[:1]) if quick else (FULL, 6, 5, LINKS)
    rows = [row for (count, per_host), arms in grids.items()
            for row in compare(count, per_host, arms, hidden or (64 if quick else 256), links, rounds, steps)]
    where, times = list(rows[0])[:4], list(rows[0])[4:-len(BUCKETED) - len(PAIRS)]
    hidden_behind = overlap(steps)
    words = ("{transfer:.0f} ms to send {MB:.0f} MB, {backward:.0f} ms of backward, {both:.0f} ms for both at once; "
             "{boxing:.0f} ms for a boxing, {begun:.0f} ms when begun before a sleep as long")
    show("hosts: ms of a step", rows, json, [[*where, *times], [*where, *list(rows[0])[4 + len(times):]]],
         overlap=hidden_behind if json else words.format_map(hidden_behind))


def compare(count: int, per_host: int, families: list[dict[str, Any]], hidden: int, links: list[tuple[str, str]],
            rounds: int, steps: int) -> list[dict[str, Any]]:
    """All arms on each of these links, those of a family in turns of so many steps."""
    grid = {"hidden": hidden, "layers": max(train.LAYERS, count * per_host)}
    first: list[float] = []
    with cable(count) as hosts:
        if not can_delay(hosts[0]):
            links = list(dict.fromkeys((rate, "") for rate, _ in links))
        ms: dict[tuple[str, str], dict[str, float]] = {link: {} for link in links}
        for arms in families:
            tp = per_host if "tp" in arms else 1
            with ExitStack() as stack:
                workers = {name: stack.enter_context(HostWorkers(hosts, per_host, {
                    **grid, "kind": kind, "dp": count * per_host // tp, "tp": tp, "options": options, "steps": steps}))
                    for name, (kind, options) in arms.items()}
                for name, some in workers.items():
                    losses = some.hear()
                    first = first or losses[0]
                    if name != "alone":              # whose gradients are its own
                        train.verify(name, losses, first)
                for link in links:
                    for host in hosts:
                        slow_down(host, *link)
                    speed = train.in_turns(workers, rounds)
                    own = {name: train.BATCH * train.SEQ / tokens * 1e3 for name, tokens in speed.items()}
                    ms[link] |= own
                    line = ", ".join(f"{name} {taken:.0f} ms" for name, taken in own.items())
                    print(f"{count} x {per_host}, {link[0]}: {line}", file=sys.stderr, flush=True)
    return [{"hosts x ranks": f"{count} x {per_host}", "link": f"{rate}, {delay or 'no delay'}", **grid,
             **in_pairs(ms[rate, delay])} for rate, delay in links]


def in_pairs(ms: dict[str, float]) -> dict[str, Any]:
    """The time of each arm, the best buckets, and how long a step of ours takes, of one of torch's; None: no such arm
    there."""
    buckets = {}
    for kind in BUCKETED:
        tried = {mb: ms[f"{kind} {mb} MB"] for mb in BUCKETS if f"{kind} {mb} MB" in ms}
        buckets[kind] = min(tried, key=tried.__getitem__, default=None)
        ms = ms | {f"best {kind}": min(tried.values(), default=None)}
    names = [name for pair in PAIRS.items() for name in reversed(pair)] + ["ZeRO 1"]
    return {**{name: ms.get(name) for name in names}, **{f"{kind}, MB": mb for kind, mb in buckets.items()},
            **{f"{a} of {b}": ms[a] / ms[b] if a in ms else None for a, b in PAIRS.items()}}


def overlap(steps: int, rate: str = "800mbit") -> dict[str, Any]:
    """The least ms, of so many steps, of a transfer, of a backward pass that takes as long, and of both together; of a
    boxing, and of one that is begun before a sleep that takes as long."""
    with cable() as hosts, HostWorkers(hosts, 1, {"steps": steps}, "benchmarks.hosts:sleeper") as workers:
        for host in hosts:
            slow_down(host, rate, "")
        transfer, backward, both, boxing, begun = (min(map(max, zip(*workers.hear()))) * 1e3 for _ in range(5))
    return {"link": rate, "MB": SLEEPER_LAYERS * SLEEPER_WIDTH**2 * 4 / 1e6, "transfer": transfer,
            "backward": backward, "both": both, "of the longer": both / max(transfer, backward),
            "boxing": boxing, "begun": begun}


@contextmanager
def cable(count: int = 2) -> Iterator[list[Host]]:
    """So many hosts, each with a cable to one switch, a namespace of its own; they are gone afterwards."""
    switch = f"gtbench{os.getpid()}switch"
    hosts = [Host(f"gtbench{os.getpid()}{k}", f"gtbench{k}", f"10.213.78.{k + 1}", switch) for k in range(count)]
    try:
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for host in hosts:
            call("ip", "netns", "add", host.name)
            call("ip", "link", "add", host.end, "netns", host.name, "type", "veth", "peer",
                 "name", host.end, "netns", switch)
            call("ip", "-n", switch, "link", "set", host.end, "master", "switch", "up")
            call("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.end)
            for end in (host.end, "lo"):
                call("ip", "-n", host.name, "link", "set", end, "up")
        yield hosts
    finally:
        for name in (*(host.name for host in hosts), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def slow_down(host: Host, rate: str, delay: str) -> None:
    """What this host sends takes so long to arrive (not at all longer, if that is ""); it sends and gets no more than
    so many bits a second."""
    limits = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
    delayed = ["netem", "delay", delay, "rate", rate, "limit", "100000"] if delay else limits
    for name, words in ((host.name, delayed), (host.switch, limits)):
        call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", host.end, "root", *words)


def cut(host: Host) -> None:
    """Until `mend`, nothing passes this host's cable."""
    call("ip", "-n", host.name, "link", "set", host.end, "down")


def mend(host: Host) -> None:
    call("ip", "-n", host.name, "link", "set", host.end, "up")


def lacking() -> str:
    """Why there can be no such hosts; "" where there can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    return f"not installed: {', '.join(missing)}" if missing else ""


def can_delay(host: Host) -> bool:
    """Has this kernel netem?"""
    return subprocess.run(["ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", host.end, "root", "netem",
                           "delay", "1ms"], capture_output=True).returncode == 0


def call(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {ended.stderr.strip()}")


class HostWorkers(Workers):
    """Workers in the namespaces of hosts, so many on each, with one thread."""

    def __init__(self, hosts: list[Host], per_host: int, settings: dict[str, Any],
                 function: str = "benchmarks.hosts:worker") -> None:
        lines = [["ip", "netns", "exec", host.name] for host in hosts for _ in range(per_host)]
        own = [{"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": host.end, "LOCAL_RANK": str(k),
                "LOCAL_WORLD_SIZE": str(per_host)} for host in hosts for k in range(per_host)]
        super().__init__(function, len(lines), settings, prefixes=lines, own=own)


# -------------------------------------------------------------------------------------------------------- a worker


def worker(settings: dict[str, Any]) -> Iterator[list[float]]:
    """The losses of the first steps; then, at every turn, the seconds of some more."""
    model, batches = train.made(settings["hidden"], settings["layers"])
    trainer = KINDS[settings["kind"]](model, batches, settings["dp"], settings["tp"], **settings["options"])
    yield train.first_losses(trainer)
    yield from train.turns(trainer, settings["steps"])


def alone(model: train.GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> train.Trainer:
    dist.init_process_group("gloo")
    return train.of_torch(model, batches, dp, tp)


def fsdp2(model: train.GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int, frees: bool) -> train.Trainer:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dp,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=frees)
    return train.of_torch(model, batches, dp, tp)


def ours(model: train.GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int, stage: int) -> train.Trainer:
    where = gt.placement("cpu", list(range(dp)), axis_names=("dp",))
    gt.to_global(model, where, gt.sbp.broadcast)
    parts = [(gt.from_full(a, where, gt.sbp.split(0)), gt.from_full(b, where, gt.sbp.split(0))) for a, b in batches]
    optimizer = train.adamw(list(model.parameters()))
    if stage:
        optimizer = gt.zero(optimizer, stage=stage, model=model if stage == 3 else None)
    return train.Trainer(model, optimizer, parts)


class PipelineTrainer(train.Trainer):
    """Its model is a step of a pipeline: (inputs, targets) -> loss, with gradients left behind."""

    def step(self, k: int) -> Tensor:
        loss = self.model(*self.batches[k % len(self.batches)])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def our_pipeline(model: train.GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> train.Trainer:
    stages = pipeline.cut(model, dp)
    runner = pipeline.by_ours("1f1b", stages)
    return PipelineTrainer(runner.step, train.adamw([p for stage in stages for p in stage.parameters()]), batches)


def torch_pipeline(model: train.GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> train.Trainer:
    dist.init_process_group("gloo")
    (stage,), step = pipeline.by_torch("1f1b", pipeline.cut(model, dp))

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss where the last stage is; 0 elsewhere."""
        return torch.stack(step(inputs, targets) or [torch.zeros(())]).mean()

    def read(loss: Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item()

    return PipelineTrainer(run, train.adamw(list(stage.parameters())), batches, read)


KINDS = {"alone": alone, "ddp": train.ddp, "fsdp2": fsdp2, "ours": ours, "dtensor": train.dtensor, "tp": train.ours,
         "our_pipeline": our_pipeline, "torch_pipeline": torch_pipeline}


def sleeper(settings: dict[str, Any]) -> Iterator[list[float]]:
    """The seconds of steps that do nothing but send gradients; then of backward passes that sleep for as long and send
    nothing, in turns with steps that do both, and of these. Other processes of this machine have to wait, where that
    is allowed: a core that sleeps is to be had when it wakes up."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    where = gt.placement("cpu", [0, 1])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SLEEPER_WIDTH, SLEEPER_WIDTH, bias=False) for _ in range(SLEEPER_LAYERS)))
    gt.to_global(model, where, gt.sbp.broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = gt.from_full(torch.randn(2, SLEEPER_WIDTH), where, gt.sbp.split(0))
    nap = 0.0
    for layer in model:
        layer.register_forward_hook(lambda *call: call[-1].register_hook(lambda _: time.sleep(nap)) and None)

    def lap(sends: bool) -> float:
        """The seconds of a step; one that is not to send anything drops its gradients."""
        model(x).sum().item()                        # here the hosts meet
        loss = model(x).sum()
        began = time.perf_counter()
        with nullcontext() if sends else gradients.no_early_reduction():
            loss.backward()
        if sends:
            optimizer.step()
        for p in model.parameters():
            p.grad = None                            # zero_grad() would read it first
        return time.perf_counter() - began

    def longest(laps: list[float]) -> float:
        """The least of these, of the rank where that is largest."""
        return gt.from_local(torch.tensor([min(laps)]), where, gt.sbp.partial_max).item()

    steps = settings["steps"]
    yield (sent := [lap(True) for _ in range(steps + 2)][2:])
    transfer = nap = longest(sent)
    nap /= SLEEPER_LAYERS
    nap *= 1 - (longest([lap(False) for _ in range(steps)]) - transfer) / transfer       # what else a layer takes
    alone, both = zip(*((lap(False), lap(True)) for _ in range(steps)))
    yield list(alone)
    yield list(both)

    def begin(then_sleep: float) -> float:
        """The seconds of a boxing of as many bytes that is begun before a sleep."""
        pending = gt.from_local(torch.ones(SLEEPER_LAYERS, SLEEPER_WIDTH, SLEEPER_WIDTH), where, gt.sbp.partial_sum)
        model(x).sum().item()
        began = time.perf_counter()
        whole = pending.to_global(sbp=gt.sbp.broadcast, wait=False)
        time.sleep(then_sleep)
        assert all(shard[0, 0, 0] == 2 for shard in whole.shards.values())
        return time.perf_counter() - began

    yield (waited := [begin(0.0) for _ in range(steps)])
    as_long = longest(waited)
    yield [begin(as_long) for _ in range(steps)]


if __name__ == "__main__":
    main()
