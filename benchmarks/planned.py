"""Plans measured here: four small models, plans of each, and what a step of each takes (part of plan.py).

    gpt       examples/gpt.py                     mlp      layers of 512 with next to nothing between them
    vision    examples/vision.py: convolutions    experts  an attention-free mixture of 8 experts with soft gates
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import globaltensor as gt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT
from vision import network

_VOCAB, _WARM, _TURNS = 512, 3, 4


class Experts(nn.Module):
    """x + what 8 experts say, weighed by a gate that is soft, [n, hidden] -> [n, hidden]."""

    def __init__(self, hidden: int, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * hidden ** -0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * hidden ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.softmax(self.gate(x), -1)                                   # [n, e]
        inside = F.relu(torch.einsum("nh,ehf->enf", x, self.up))
        return x + torch.einsum("enf,efh,ne->nh", inside, self.down, gate)


def _tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trained(NamedTuple):
    """A model, its inputs, targets and loss."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[..., Tensor]


def build(name: str, small: bool) -> Trained:
    """The same in every process."""
    torch.manual_seed(0)
    if name == "gpt":
        ids = torch.randint(_VOCAB, (8, 17 if small else 33))
        hidden, layers = (32, 2) if small else (128, 3)
        return Trained(GPT(_VOCAB, 64, layers, hidden, 4), ids[:, :-1].contiguous(), ids[:, 1:].contiguous(),
                       _tokens_loss)
    n = 64 if small else 512
    if name == "mlp":
        layers = [one for _ in range(4) for one in (nn.Linear(n, n), nn.ReLU())]
        return Trained(nn.Sequential(*layers, nn.Linear(n, 16)), torch.randn(n // 4, n), torch.randn(n // 4, 16),
                       F.mse_loss)
    if name == "vision":
        size = 16 if small else 32
        return Trained(network(4 if small else 16), torch.randn(16, 1, size, size), torch.arange(16) % 4,
                       F.cross_entropy)
    n //= 4
    return Trained(nn.Sequential(*[Experts(n) for _ in range(3)], nn.Linear(n, 8)), torch.randn(2 * n, n),
                   torch.randn(2 * n, 8), F.mse_loss)


_PINS = ["0.*=tp:S(0)", "2.weight=tp:S(1)", "4.*=tp:S(0)", "6.weight=tp:S(1)"]
PLANS: dict[int, list[tuple[str, dict[str, Any]]]] = {                       # ranks -> model and what is fixed
    1: [("gpt", {"micro_batch": 8}), ("gpt", {"micro_batch": 2}), ("gpt", {"micro_batch": 4, "recompute": "full"}),
        ("gpt", {"micro_batch": 4, "recompute": "selective"}),
        ("mlp", {"micro_batch": 128}), ("mlp", {"micro_batch": 32}), ("vision", {"micro_batch": 16}),
        ("vision", {"micro_batch": 4}), ("experts", {"micro_batch": 256}), ("experts", {"micro_batch": 64})],
    2: [("gpt", {"dp": 2, "zero": 0}), ("gpt", {"dp": 2, "zero": 1}), ("gpt", {"dp": 2, "zero": 3}),
        ("gpt", {"tp": 2, "sp": False}), ("gpt", {"pp": 2, "schedule": "1f1b", "micro_batch": 2}),
        ("mlp", {"dp": 2, "zero": 0}), ("mlp", {"tp": 2, "pins": _PINS}),
        ("mlp", {"pp": 2, "schedule": "gpipe", "micro_batch": 32}),
        ("vision", {"dp": 2, "zero": 0}), ("vision", {"pp": 2, "schedule": "1f1b", "micro_batch": 4}),
        ("experts", {"dp": 2, "zero": 0}), ("experts", {"pp": 2, "schedule": "1f1b", "micro_batch": 64})],
    4: [("gpt", {"dp": 4, "zero": 0}), ("gpt", {"dp": 2, "tp": 2, "zero": 0}),
        ("gpt", {"dp": 2, "pp": 2, "schedule": "1f1b", "micro_batch": 2}), ("gpt", {"pp": 4, "schedule": "1f1b",
                                                                                    "micro_batch": 2}),
        ("mlp", {"dp": 4, "zero": 1}), ("mlp", {"dp": 2, "tp": 2, "pins": _PINS}), ("vision", {"dp": 4, "zero": 0}),
        ("experts", {"dp": 4, "zero": 0})]}


def strategy_of(name: str, fixed: dict[str, Any], cluster: Any, ranks: int, small: bool) -> gt.Strategy:
    """The plan of a model on all of the ranks, without values."""
    one = build(name, small)
    rest = {} if fixed == {} else {key: 1 for key in ("dp", "tp", "pp") if key not in fixed}
    if "micro_batch" not in fixed and fixed:
        fixed = fixed | {"micro_batch": len(one.inputs) // fixed.get("dp", 1)}
    if small and "micro_batch" in fixed and len(one.inputs) % (fixed["micro_batch"] * fixed.get("dp", 1)):
        fixed = fixed | {"micro_batch": len(one.inputs) // fixed.get("dp", 1)}
    if fixed and fixed.get("dp", 1) == 1:
        rest["zero"] = 0
    return gt.strategy(one.model, one.inputs, cluster, ranks, loss=one.loss, targets=one.targets,
                       **{"recompute": "none"} | rest | fixed)


# ------------------------------------------------------------------------------------------------------------- a worker


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that live after each op: `peak`."""

    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.add(held)

    def add(self, values: Any) -> None:
        for t in tree_leaves(values):
            if isinstance(t, Tensor):
                for shard in t.shards.values() if t.is_global else (t,):
                    storage = shard.untyped_storage()
                    self.known[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.known = {key: (ref, n) for key, (ref, n) in self.known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self.known.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.add((result, args))
        return result


def take_step(one: Trained, runner: Any, optimizer: torch.optim.Optimizer) -> None:
    runner.step(one.inputs, one.targets)
    optimizer.step()
    optimizer.zero_grad()


def live_peak(one: Trained, runner: Any, optimizer: torch.optim.Optimizer) -> int:
    """The most bytes of tensors that live in a step on this process."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]           # with ZeRO parts, which stay
    live = LiveBytes(list(one.model.parameters()), list(one.model.buffers()), stepped, list(optimizer.state.values()))
    with live:
        take_step(one, runner, optimizer)
    return live.peak


def _most_received(move: Any, ranks: set[int]) -> int:
    """Bytes of the rank of these that receives most: ZeRO gathers the parts of all stages in one move."""
    total = dict.fromkeys(ranks, 0)
    for (sender, receiver), nbytes in move.flows.items():
        if receiver in total and sender != receiver:
            total[receiver] += nbytes
    return max(total.values())


class _Timed(NamedTuple):
    """A model with its plan, and the seconds of its steps."""

    one: Trained
    strategy: gt.Strategy
    runner: Any
    optimizer: torch.optim.Optimizer
    laps: list[float]


def measure(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each strategy: seconds of a step, the most bytes of live tensors, bytes of the record. Plans take their steps
    in turns, a few each, so that a machine that becomes slower meanwhile is slower for all."""
    gt.init()
    plans = []
    for name, text in settings["strategies"]:
        one = build(name, settings["small"])
        strategy = gt.Strategy(text)
        strategy.check()
        plans.append(_Timed(one, strategy, *strategy.apply(one.model, one.loss, torch.optim.AdamW), []))
    for turn in range(-1, _TURNS):
        for plan in plans:
            if gt.world_size() > 1:
                dist.barrier()                       # but not between steps: no program has one there
            laps = [_lap(plan) for _ in range(1 + settings["laps"] // _TURNS if turn >= 0 else _WARM)]
            plan.laps.extend(laps[1:] if turn >= 0 else [])          # the first finds others' operands in the caches
    for plan in plans:
        with gt.record() as moves:
            take_step(plan.one, plan.runner, plan.optimizer)
        here = {rank for stage in plan.strategy["stages"] if gt.rank() in stage["ranks"] for rank in stage["ranks"]}
        received = sum(_most_received(move, here) for move in moves
                       if move.op not in ("the pipeline", "the loss of a pipeline"))
        live = live_peak(plan.one, plan.runner, plan.optimizer)
        yield {"laps": plan.laps, "live": live, "received": received}


def _lap(of: _Timed) -> float:
    """Seconds of a step."""
    began = time.perf_counter()
    take_step(of.one, of.runner, of.optimizer)
    return time.perf_counter() - began
