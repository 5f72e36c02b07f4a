"""An engine of torch.distributed for the device that stands in (stand_in.py): what NCCL is for GPUs.

    provide("npu")      before gt.init(): processes move tensors of the device that stands in by it
    provide("cuda")     no stand-in: the GPUs of this host, and NCCL

As NCCL does, it returns at once, works while the program goes on, and reads and writes memory of the device only. What
is sent is copied at the beginning, and what has come is written by `wait`; until then the result has wrong numbers. So
who reads too early finds out.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import stand_in
import torch
import torch.distributed as dist

NAME = "standin"
calls: list[str] = []                                # of this process, in order
waited_on: list[int] = []                            # on which streams it was told to wait


class Arriving(dist.Work):
    """What torch calls a work: `results` come from host memory."""

    def __init__(self, work: dist.Work, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._results = work, results
        self._device = results[0][0].device if results else None
        for result, _ in results:
            result.copy_(torch.full(result.shape, 77, dtype=result.dtype))

    def wait(self, *timeout: Any) -> bool:
        if self._device is not None:
            waited_on.append(torch.accelerator.current_stream(self._device).stream_id)
        self._work.wait()
        for result, source in self._results:
            result.copy_(source)
        self._results = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and not self._results


class ProcessGroupSTANDIN:
    """A group of ranks, as torch's classes of groups are."""

    class Options:
        pass

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size)

    def _begin(self, name: str, result: torch.Tensor, source: torch.Tensor,
               run: Callable[[torch.Tensor, torch.Tensor], dist.Work]) -> Arriving:
        assert result.device.type == source.device.type != "cpu"
        calls.append(name)
        into, own = torch.empty(result.shape, dtype=result.dtype), source.cpu()
        return Arriving(run(into, own), [(result, into)])

    def allreduce(self, tensors: list[torch.Tensor]) -> Arriving:
        def run(into: torch.Tensor, own: torch.Tensor) -> dist.Work:
            return self._gloo.allreduce([into.copy_(own)])

        return self._begin("all_reduce", tensors[0], tensors[0], run)

    def _allgather_base(self, result: torch.Tensor, source: torch.Tensor) -> Arriving:
        return self._begin("all_gather", result, source, self._gloo._allgather_base)

    def _reduce_scatter_base(self, result: torch.Tensor, source: torch.Tensor) -> Arriving:
        return self._begin("reduce_scatter", result, source, self._gloo._reduce_scatter_base)

    def alltoall_base(self, result: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int]
                      ) -> Arriving:
        return self._begin("all_to_all", result, source, lambda into, own: self._gloo.alltoall_base(
            into, own, received, sent))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Arriving:
        assert tensors[0].device.type != "cpu"
        calls.append("send")
        return Arriving(self._gloo.send([tensors[0].cpu()], to, tag), [])

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Arriving:
        calls.append("recv")
        into = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
        return Arriving(self._gloo.recv([into], of, tag), [(tensors[0], into)])


def _exchange(ops: Sequence[Any]) -> list[Arriving]:
    """torch.distributed.batch_isend_irecv"""
    from globaltensor.runtime.world import world

    assert all(op.tensor.device.type != "cpu" for op in ops)
    calls.append("messages")
    works = []
    for op in ops:
        own = op.tensor.cpu()
        work = op.op(own, op.peer, world().control, 0x400)       # it knows no tags: messages are matched by order
        works.append(Arriving(work, [(op.tensor, own)] if op.op is dist.irecv else []))
    return works


def provide(type: str) -> None:
    """Load the device under this name, and let processes move its tensors by this engine."""
    if stand_in.load(type) == "cuda":
        return
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: dist.ProcessGroupGloo(
        store, rank, size, timeout), devices=[type])
    distributed: Any = dist.distributed_c10d
    distributed.ProcessGroupSTANDIN = ProcessGroupSTANDIN
    dist.batch_isend_irecv = _exchange
