"""The launcher of one host: torch's elastic agent, which says why it starts ranks again, and may leave some out.

The agent starts the ranks, watches them, and where one fails ends the others. With restarts left it then meets the
agents of the other hosts anew (rendezvous.py) and starts the ranks again, in a new job with new numbers.
"""
from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from globaltensor.cli.forks import ForkServer
from globaltensor.runtime.host_processes import RUNS, STOPPED, process_id, process_state
from globaltensor.runtime.process_end import REQUEUE


class RestartingAgent(LocalElasticAgent):
    """Runs the ranks of this host, of which those that fail are left out as long as `fewest` are left. `report` is told
    of the failures before each restart, of what was ended because of them, and of who had ended without one, and gives
    the ranks that caused them.
    `forks` forks them, where they are not to be processes that begin anew."""

    def __init__(self, spec: WorkerSpec, folder: str, grace: int, fewest: int,
                 report: Callable[[Mapping[int, Any], Mapping[int, str], list[int]], list[int]],
                 forks: ForkServer | None) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=folder))
        self.grace, self.fewest, self.report, self.forks = grace, fewest, report, forks
        self.failures: Mapping[int, Any] = {}
        self.ended: dict[int, str] = {}              # the processes that this one has ended -> their state then

    def run(self, role: str = "default") -> RunResult:
        """Until all ranks have ended well, or too often badly. SIGUSR1 is passed on to them meanwhile."""
        before = signal.signal(signal.SIGUSR1, self.pass_on)
        try:
            return super().run(role)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [] if self._pcontext is None else list(self._pcontext.pids().values())

    def unnoticed(self) -> list[int]:
        """The ranks that have ended, without a failure, and not by this launcher."""
        ranks = {worker.local_rank: worker.global_rank for worker in self.get_worker_group().workers}
        ended = {} if self._pcontext is None else {ranks[i]: pid for i, pid in self._pcontext.pids().items()}
        return [rank for rank, pid in ended.items() if rank not in self.failures and pid not in self.ended]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self.forks.in_place_of_spawn() if self.forks else nullcontext():
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._end_in_time(self._pcontext)
        if self.forks and self._remaining_restarts:
            self.forks.prepare_restart()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.forks is not None:
            self.forks.reap_others(self.pids())
        result = super()._monitor_workers(worker_group)
        self.failures = result.failures
        if any(failure.exitcode == REQUEUE for failure in result.failures.values()):
            self._remaining_restarts = 0             # it is the scheduler who starts this job again
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)             # first, so that all have said how they ended
        if self.failures:                            # else another host had some, or has come
            causes = self.report(self.failures, self.ended, self.unnoticed())
            spec = worker_group.spec
            spec.local_world_size = max(self.fewest, spec.local_world_size - len(causes))
        super()._restart_workers(worker_group)

    def _end_in_time(self, ranks: Any) -> None:
        """Whoever ends these ranks, they have the time that they were given, and it is noted which were ended. torch
        does so when one of them fails, and knows of no other time than 30 seconds."""
        close, self.ended = ranks.close, {}

        def close_in_time(death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
            for pid in [rank.proc.pid for rank in ranks.subprocess_handlers.values() if rank.proc.poll() is None]:
                process = process_id(pid)
                state = self.ended.setdefault(pid, RUNS if process is None else process_state(process))
                if state == STOPPED:
                    os.kill(pid, signal.SIGKILL)     # it would not hear of SIGTERM, and be waited for
            close(death_sig, self.grace)

        ranks.close = close_in_time

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ends the ranks within the time that they were given: torch 2.11 knows of no other than 30 seconds."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self.grace)
        super()._shutdown(death_sig)
