"""Boxings between devices of one process, by kernels of our own: one launch on each device does its ranks' part.

The regions are those of kernel_program.py, which the CPU's kernel reads too. A device makes the new shards of its own
ranks, and reads those of others where they are. A large sum that several devices need is divided: each makes a part and
stores it into the results of all.

    rank 0 on cuda:0   reads shards 0, 1, stores the first half of the sum into results 0, 1
    rank 1 on cuda:1   reads shards 0, 1, stores the second half into results 0, 1

Kernels on the streams of several devices have no order among themselves. So each launch waits for what the streams of
all devices were doing, and what comes after on any of them waits for all launches. The host waits for nothing.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from globaltensor.boxings.copy_plan import CopyMove, CopyPlan, move_array
from globaltensor.boxings.kernel_program import DIMS, compile_program, direct_steps
from globaltensor.boxings.self_test import kernel_faults
from globaltensor.errors import MixedPlacementError
from globaltensor.layouts.layout import Layout, Shards, Spec, dense
from globaltensor.layouts.recent import remembered
from globaltensor.runtime.cuda_kernels import find_cuda_kernels
from globaltensor.runtime.device_kernels import devices_reach, kernel_verdict, provide_kernels, set_self_test
from globaltensor.runtime.kernel_library import REDUCED
from globaltensor.runtime.world import local_ranks_of, world


class DeviceStep(NamedTuple):
    """One direct step. `plans`: per device its part; `places`: rank -> its place in the tables of shards."""

    dst: Layout
    stride: tuple[int, ...]
    plans: dict[torch.device, CopyPlan]
    places: dict[int, int]


class DeviceBoxing(NamedTuple):
    """The boxing of a tensor, compiled for the devices of this process."""

    of: Spec
    devices: tuple[torch.device, ...]
    steps: tuple[DeviceStep, ...]


@remembered
def find_device_boxing(of: Spec, dst: Layout) -> DeviceBoxing | None:
    """The boxing of a tensor of this spec to `dst` by kernels of ours; None where they cannot do it, or may not."""
    type = of.placement.type
    if type in ("cpu", "meta") or dst.placement.type != type or of.ndim > DIMS or not world().single_process:
        return None
    ranks = sorted({*of.placement.flat, *dst.placement.flat})
    devices = tuple(sorted({world().device(type, r) for r in ranks}, key=str))
    verdicts = [kernel_verdict(device) for device in devices]
    needed = kernels_for(of)
    if needed is None or not all(v is not None and needed <= v.passed for v in verdicts) or not devices_reach(devices):
        return None
    index = {r: i for i, r in enumerate(ranks)}
    own = {device: [r for r in ranks if world().device(type, r) == device] for device in devices}
    divided = all(len(each) == 1 for each in own.values())
    steps = []
    for a, b in pairwise(direct_steps(of.layout, dst)):
        plans = {}
        for device, mine in own.items():
            program = compile_program(a, b, of.shape, of.dtype.itemsize, mine, index, divided and len(devices) > 1)
            if program.region_count:
                plans[device] = CopyPlan(program, of.dtype, len(ranks))
        steps.append(DeviceStep(b, of.moved(b).stride, plans, index))
    return DeviceBoxing(of, devices, tuple(steps))


def kernels_for(of: Spec) -> frozenset[str] | None:
    """The kernels that boxings of such a tensor run; None where none of ours can add its numbers."""
    needed = {"copies", "tables"}
    pending = {s.op for s in of.sbp if s.is_partial}
    if pending:
        if of.dtype not in REDUCED or (of.dtype.is_complex and pending != {"sum"}):
            return None
        needed.add("float sums" if of.dtype.is_floating_point or of.dtype.is_complex else "integer sums")
    return frozenset(needed)


def run_device_boxings(todo: Sequence[tuple[DeviceBoxing, Shards]]) -> list[Shards]:
    """The new shards of each tensor; those of all go together, a launch per device and step."""
    held = [{rank: _as_it_lies(shard, boxing) for rank, shard in shards.items()} for boxing, shards in todo]
    for number in range(max(len(boxing.steps) for boxing, _ in todo)):
        moves: dict[torch.device, list[CopyMove]] = {}
        before = list(held)
        devices: set[torch.device] = set()
        for k, (boxing, _) in enumerate(todo):
            if number < len(boxing.steps):
                step = boxing.steps[number]
                held[k] = _empty_shards(boxing.of, step)
                devices.update(boxing.devices)
                sources, targets = ({step.places[r]: t for r, t in shards.items()} for shards in (before[k], held[k]))
                for device, plan in step.plans.items():
                    moves.setdefault(device, []).append(plan.at(sources, targets))
        _launch_in_order(moves, sorted(devices, key=str))
    return held


def _as_it_lies(shard: torch.Tensor, boxing: DeviceBoxing) -> torch.Tensor:
    """The shard as its numbers lie in memory. A kernel that reads memory of another kind ends all use of its device."""
    if shard.device not in boxing.devices:
        raise MixedPlacementError(f"a tensor on {shard.device} beside global ones on {boxing.of.placement}",
                                  "a kernel reads the memory of its own devices only",
                                  f't.to("{boxing.of.placement.type}"), or gt.from_full(t, placement, sbp)')
    return shard.resolve_conj().resolve_neg()


def _empty_shards(of: Spec, step: DeviceStep) -> Shards:
    type = step.dst.placement.type
    shapes = {rank: step.dst.local_shape(of.shape, rank) for rank in local_ranks_of(step.dst.placement)}
    return {rank: torch.empty_strided(shape, dense(shape, step.stride), dtype=of.dtype,
                                      device=world().device(type, rank)) for rank, shape in shapes.items()}


def _launch_in_order(moves: dict[torch.device, list[CopyMove]], devices: Sequence[torch.device]) -> None:
    """Launch what each device does, after all that the streams of all of them were given, and before what comes."""
    streams = {device: torch.accelerator.current_stream(device) for device in devices} if len(devices) > 1 else {}
    _wait_for_each_other(streams, streams)
    for device, some in moves.items():
        verdict = kernel_verdict(device)
        assert verdict is not None                   # else there would be no plan
        verdict.library.reduce(verdict.device.index, move_array(some))
    _wait_for_each_other({device: streams[device] for device in moves if device in streams}, streams)


def _wait_for_each_other(done: dict[torch.device, torch.Stream], waiting: dict[torch.device, torch.Stream]) -> None:
    """What comes next on the streams `waiting` runs after all that has been enqueued on the streams `done`."""
    events = {device: stream.record_event() for device, stream in done.items()}
    for device, stream in waiting.items():
        for other, event in events.items():
            if other != device:
                stream.wait_event(event)


set_self_test(kernel_faults)
if torch.version.cuda:
    provide_kernels("cuda", find_cuda_kernels)
