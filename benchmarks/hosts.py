"""How long is a training step over two hosts with a slow link, beside DDP at its best bucket size?

Hosts are network namespaces of this machine, joined by a cable that `tc` makes as slow as a link: 1 or 10 Gbit/s each
way, 50 us or 1 ms to the other side. That takes root, `ip` and `tc`; a kernel without netem cannot delay, so there only
the rate is set, which each row says. The model and its training are those of train.py, one thread per rank. Each arm
lives in processes of its own and trains in turns while the others wait; the link changes under them. A time is that of
the median step, of the slowest rank.

    DDP            torch's over gloo, buckets of 1, 2, 4 and 25 MB: the best of these
    FSDP2          torch's `fully_shard` of each block over gloo: parameters stay gathered from forward to backward
    FSDP2, freed   the same, and gathered anew in backward
    dp             ours: the batch split, parameters broadcast
    ZeRO 1, 2      ours: `gt.zero(optimizer, stage)` on top
    ZeRO 3         ours: parameters too, gathered a layer ahead

And how much of a transfer is hidden behind a backward pass that takes as long, but no core: each layer sleeps.
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
from benchmarks import train
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.tensors import gradients

BUCKETS = [1, 2, 4, 25]                              # MB
LINKS = [("1gbit", "50us"), ("1gbit", "1ms"), ("10gbit", "50us"), ("10gbit", "1ms")]
HOSTS = 2
SLEEPER_LAYERS, SLEEPER_WIDTH = 16, 400


class Host(NamedTuple):
    """A network namespace: its end of the cable, and the address there."""

    name: str
    end: str
    address: str


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    if no_hosts := lacking():
        print(f"hosts: left out: {no_hosts}", file=sys.stderr)
        return
    per_host, rounds, steps, links = ([1], 1, 2, LINKS[:1]) if quick else ([1, 2], 3, 5, LINKS)
    rows = [row for n in per_host for row in compare(hidden or (64 if quick else 256), n, links, rounds, steps)]
    show("hosts: ms of a step over two hosts", rows, json, overlap=overlap(steps))


def compare(hidden: int, per_host: int, links: list[tuple[str, str]], rounds: int, steps: int) -> list[dict[str, Any]]:
    """All arms on each of these links, in turns of so many steps."""
    ranks = HOSTS * per_host
    arms = {f"DDP {mb} MB": {"kind": "ddp", "bucket": mb} for mb in BUCKETS} | {
        "FSDP2": {"kind": "fsdp2", "frees": False}, "FSDP2, freed": {"kind": "fsdp2", "frees": True}} | {
        name: {"kind": "ours", "stage": stage} for stage, name in enumerate(("dp", "ZeRO 1", "ZeRO 2", "ZeRO 3"))}
    rows = []
    with cable() as hosts, ExitStack() as stack:
        workers = {name: stack.enter_context(HostWorkers(hosts, per_host, {
            **arm, "hidden": hidden, "ranks": ranks, "steps": steps})) for name, arm in arms.items()}
        losses = {name: some.hear() for name, some in workers.items()}
        for name, seen in losses.items():
            train.verify(name, seen, losses["DDP 25 MB"][0])
        if not can_delay(hosts[0]):
            links = list(dict.fromkeys((rate, "") for rate, _ in links))
        for rate, delay in links:
            for host in hosts:
                slow_down(host, rate, delay)
            speed = train.in_turns(workers, rounds)
            ms = {name: train.BATCH * train.SEQ / tokens * 1e3 for name, tokens in speed.items()}
            best = min((name for name in ms if name.startswith("DDP")), key=ms.__getitem__)
            rows.append({"hosts x ranks": f"{HOSTS} x {per_host}", "link": f"{rate}, {delay or 'no delay'}",
                         "hidden": hidden, **{name: ms[name] for name in ms if not name.startswith("DDP")},
                         "best DDP": ms[best], "its bucket": best.removeprefix("DDP "),
                         "dp of DDP": ms["dp"] / ms[best], "ZeRO 2 of FSDP2": ms["ZeRO 2"] / ms["FSDP2"],
                         "ZeRO 3 of FSDP2, freed": ms["ZeRO 3"] / ms["FSDP2, freed"]})
    return rows


def overlap(steps: int, rate: str = "800mbit") -> dict[str, Any]:
    """The least ms, of so many steps, of a transfer, of a backward pass that takes as long, and of both together."""
    with cable() as hosts, HostWorkers(hosts, 1, {"steps": steps}, "benchmarks.hosts:sleeper") as workers:
        for host in hosts:
            slow_down(host, rate, "")
        transfer, backward, both = (min(map(max, zip(*workers.hear()))) * 1e3 for _ in range(3))
    return {"link": rate, "MB": SLEEPER_LAYERS * SLEEPER_WIDTH**2 * 4 / 1e6, "transfer": transfer,
            "backward": backward, "both": both, "of the longer": both / max(transfer, backward)}


@contextmanager
def cable() -> Iterator[list[Host]]:
    """Two hosts, joined; they are gone afterwards."""
    hosts = [Host(f"gtbench{os.getpid()}{k}", f"gtbench{k}", f"10.213.78.{k + 1}") for k in range(HOSTS)]
    try:
        for host in hosts:
            call("ip", "netns", "add", host.name)
        one, other = hosts
        call("ip", "link", "add", one.end, "netns", one.name, "type", "veth", "peer",
             "name", other.end, "netns", other.name)
        for host in hosts:
            call("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.end)
            for end in (host.end, "lo"):
                call("ip", "-n", host.name, "link", "set", end, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def slow_down(host: Host, rate: str, delay: str) -> None:
    """What this host sends takes so long to arrive (not at all longer, if that is ""), and no more than so many bits a
    second."""
    limits = ["netem", "delay", delay, "rate", rate, "limit", "100000"] if delay else [
        "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
    call("ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", host.end, "root", *limits)


def cut(host: Host) -> None:
    """Until `mend`, nothing passes the cable."""
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
    model, batches = train.made(settings["hidden"])
    trainer = {"ddp": ddp, "fsdp2": fsdp2, "ours": ours}[settings["kind"]](model, batches, settings)
    yield train.first_losses(trainer)
    yield from train.turns(trainer, settings["steps"])


def ddp(model: nn.Module, batches: list[tuple[Tensor, Tensor]], settings: dict[str, Any]) -> train.Trainer:
    dist.init_process_group("gloo")
    whole = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=settings["bucket"])
    return of_torch(whole, batches)


def fsdp2(model: nn.Module, batches: list[tuple[Tensor, Tensor]], settings: dict[str, Any]) -> train.Trainer:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (settings["ranks"],))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=settings["frees"])
    return of_torch(model, batches)


def of_torch(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> train.Trainer:
    """Each rank trains on its part of a batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def read(loss: Tensor) -> float:
        """The mean over these parts."""
        dist.all_reduce(loss)
        return loss.item() / ranks

    parts = [(a.chunk(ranks)[rank], b.chunk(ranks)[rank]) for a, b in batches]
    return train.Trainer(model, train.adamw(list(model.parameters())), parts, read)


def ours(model: nn.Module, batches: list[tuple[Tensor, Tensor]], settings: dict[str, Any]) -> train.Trainer:
    where = gt.placement("cpu", torch.arange(settings["ranks"]).tolist(), axis_names=("dp",))
    gt.to_global(model, where, gt.sbp.broadcast)
    parts = [(gt.from_full(a, where, gt.sbp.split(0)), gt.from_full(b, where, gt.sbp.split(0))) for a, b in batches]
    optimizer = train.adamw(list(model.parameters()))
    if stage := settings["stage"]:
        optimizer = gt.zero(optimizer, stage=stage, model=model if stage == 3 else None)
    return train.Trainer(model, optimizer, parts)


def sleeper(settings: dict[str, Any]) -> Iterator[list[float]]:
    """The seconds of steps that do nothing but send gradients; then of backward passes that sleep for as long and send
    nothing, in turns with steps that do both, and of these. Other processes of this machine have to wait, where that
    is allowed: a core that sleeps is to be had when it wakes up."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    where = gt.placement("cpu", list(range(HOSTS)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SLEEPER_WIDTH, SLEEPER_WIDTH, bias=False) for _ in range(SLEEPER_LAYERS)))
    gt.to_global(model, where, gt.sbp.broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = gt.from_full(torch.randn(HOSTS, SLEEPER_WIDTH), where, gt.sbp.split(0))
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


if __name__ == "__main__":
    main()
