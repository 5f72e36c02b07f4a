"""Are copies still copies? `gt.audit(model, optimizer)` compares what several ranks are to hold alike.

    parameters, buffers, optimizer state     where ranks hold the same part of a global tensor; plain ones on all ranks
    learning rates, steps, betas, ...        on all ranks

A broadcast tensor is one value of which every rank has a copy, and every rank updates its own. Nothing moves where all
do the same, so nothing shows where one does not: a wrong bit of a device, memory that something else wrote to, a
program that goes another way on one rank.

Ranks compare checksums of their parts. Of what differs the first element is found by halving: checksums of pieces, then
of pieces of the first piece that differs. `GLOBALTENSOR_AUDIT=100` audits every 100 steps of each optimizer, a sample
of every tensor, another one each time.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from globaltensor.errors import ArgumentError, DisagreementError, expect
from globaltensor.layouts.layout import Spec
from globaltensor.layouts.regions import Region
from globaltensor.runtime.agreement import checksum, gather_objects
from globaltensor.runtime.world import world
from globaltensor.tensors.convert import heads_of
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

SAMPLE = 1024                                        # elements of each part that GLOBALTENSOR_AUDIT looks at
_PIECES = 64                                         # into how many a part is cut to find the first difference
_TOLD = 5                                            # tensors whose first difference is told


@api_boundary
def audit(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None = None, *,
          sample: int | None = None) -> int:
    """Check that what several ranks are to hold alike is alike: of a model, an optimizer (its state, learning rates and
    steps), or both. Collective: all ranks call it. How many tensors and numbers were compared.

    sample   how many elements of each part are looked at, spread evenly (default: all)

    Raises DisagreementError on all ranks, which names each tensor that differs, on which ranks, and the first element
    that does with its values; ArgumentError for arguments that are neither modules nor optimizers.
    """
    if model is None and optimizer is None:
        raise ArgumentError("an audit of nothing", "it compares what a model or an optimizer holds",
                            "gt.audit(model, optimizer)")
    if model is not None:
        expect(model, torch.nn.Module, "audit of no module", "gt.audit(model, optimizer)")
    if optimizer is not None:
        expect(optimizer, torch.optim.Optimizer, "audit of no optimizer", "gt.audit(model, optimizer)")
    if sample is not None and (not isinstance(sample, int) or sample < 1):
        raise ArgumentError(f"sample={sample!r}", "it is a number of elements", "gt.audit(model, sample=1024)")
    values = dict(_of_module(model)) if model is not None else {}
    if optimizer is not None:
        values |= _of_optimizer(optimizer, {id(value): name for name, value in values.items()})
    return _compare(values, Sample(sample, 0))


def audit_steps(every: int) -> None:
    """Audit each optimizer that has global parameters, every so many of its steps, sampled."""
    steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    @api_boundary
    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(isinstance(p, GlobalTensor) for group in optimizer.param_groups for p in group["params"]):
            return
        steps[optimizer] = n = steps.get(optimizer, 0) + 1
        if n % every == 0:
            _compare(_of_optimizer(optimizer, {}), Sample(SAMPLE, n // every))

    register_optimizer_step_post_hook(stepped)


def audit_as_asked() -> None:
    """What GLOBALTENSOR_AUDIT asks for. What is not a number is refused when the world begins."""
    text = os.environ["GLOBALTENSOR_AUDIT"]
    if text.isdecimal() and int(text):
        audit_steps(int(text))


class Sample(NamedTuple):
    """Which elements are looked at: so many of each part (None: all), others each time."""

    size: int | None
    nth: int

    def of(self, part: torch.Tensor) -> torch.Tensor:
        n = part.numel()
        if self.size is None or n <= self.size:
            return part
        stride = n // self.size
        return part.reshape(-1)[self.nth * 7919 % stride::stride]


def _of_module(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _of_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """By a name that tells a reader where it is, everything an optimizer holds; parameters only where no model was."""
    values: dict[str, Any] = {}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                values[f"optimizer.param_groups[{g}][{key!r}]"] = value
        for k, p in enumerate(group["params"]):
            name = names.get(id(p))
            if name is None:
                values[name := f"optimizer.param_groups[{g}]['params'][{k}]"] = p
            for key, value in optimizer.state.get(p, {}).items():
                values[f"optimizer.state[{name}][{key!r}]"] = value
    return values


# ------------------------------------------------------------------------------------------------------ comparing


def _held(value: Any) -> dict[int, Any]:
    """rank -> what it holds, for the ranks that this process drives."""
    if isinstance(value, GlobalTensor):
        return dict(value.detach().shards)
    return dict.fromkeys(world().local_ranks, value)


def _heads(value: Any) -> dict[int, int]:
    """rank -> the first of the ranks that are to hold the same."""
    return heads_of(value.spec.layout) if isinstance(value, GlobalTensor) else dict.fromkeys(range(world().size), 0)


def _seen_as(part: Any, sample: Sample) -> Any:
    """What tells a part from another one, small."""
    if isinstance(part, torch.Tensor):
        return [list(part.shape), str(part.dtype), checksum(sample.of(part))]
    return repr(part)


def _compare(values: dict[str, Any], sample: Sample) -> int:
    """Raise DisagreementError where copies differ."""
    mine = {name: {r: _seen_as(part, sample) for r, part in _held(value).items()} for name, value in values.items()}
    replies = gather_objects(mine, f"an audit of {len(values)} values")
    rows: list[str] = []
    for name, value in values.items():
        prints = {r: seen for reply in replies for r, seen in reply.get(name, {}).items()}
        apart = {r: head for r, head in _heads(value).items() if prints.get(r) != prints.get(head)}
        if apart:
            rows.append(_difference_row(name, value, apart, prints, len(rows) < _TOLD))
    if rows:
        raise DisagreementError("an audit: what ranks are to hold alike differs" + "".join(rows),
                                "copies of one value go apart where a rank updates it otherwise, something else writes "
                                "to its memory, or a device computes wrongly",
                                "gt.load of the last good checkpoint; GLOBALTENSOR_AUDIT=1 finds the step")
    return len(values)


def _difference_row(name: str, value: Any, apart: dict[int, int], prints: dict[int, Any], tell: bool) -> str:
    """A line of the error. Collective where it tells the first difference, so all ranks must tell that of the same."""
    rank, head = next(iter(apart.items()))
    ranks = ", ".join(map(str, apart))
    text = f"\n    {name}: rank{'s' if len(apart) > 1 else ''} {ranks} beside rank {head}"
    ours, theirs = prints.get(head), prints.get(rank)
    if not isinstance(ours, list) or not isinstance(theirs, list) or ours[:2] != theirs[:2]:
        return f"{text}: {ours} on rank {head}, {theirs} on rank {rank}"
    if not tell:
        return text
    at, values = _first_element(_held(value), head, rank, ours[0])
    where = _global_index(at, ours[0], value.spec if isinstance(value, GlobalTensor) else None, head)
    return f"{text}: at {where} {values[0]} on rank {head}, {values[1]} on rank {rank}"


def _first_element(parts: dict[int, torch.Tensor], head: int, rank: int, shape: list[int]
                      ) -> tuple[int, tuple[Any, Any]]:
    """The first element in which the parts of two ranks differ, counted in row-major order, and its values."""
    flat = {r: parts[r].detach().reshape(-1) for r in (head, rank) if r in parts}
    start, stop = 0, prod(shape)
    while stop - start > 1:
        step = max(1, -(-(stop - start) // _PIECES))
        bounds = [(i, min(i + step, stop)) for i in range(start, stop, step)]
        sums = {r: [checksum(t[slice(*ends)]) for ends in bounds] for r, t in flat.items()}
        known = {r: s for reply in gather_objects(sums, "the pieces of an audit") for r, s in reply.items()}
        start, stop = next(ends for ends, a, b in zip(bounds, known[head], known[rank]) if a != b)
    replies = gather_objects({r: str(t[start].item()) for r, t in flat.items()}, "the values of an audit")
    seen = {r: v for reply in replies for r, v in reply.items()}
    return start, (seen[head], seen[rank])


def _global_index(at: int, shape: list[int], of: Spec | None, rank: int) -> list[int]:
    """The place in the whole tensor of an element of a rank's part."""
    index = []
    for n in reversed(shape):
        index.append(at % n)
        at //= n
    index.reverse()
    region: Region = of.region(rank) if of is not None else tuple((0, n) for n in shape)
    return [i + start for i, (start, _) in zip(index, region)]
