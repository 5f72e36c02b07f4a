"""The ranks of `globaltensor run`, from start to end: torch's elastic agent starts them and waits, and we say how they
ended.

Apart from run.py because this imports torch.
"""
from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from globaltensor.cli.forks import ForkServer
from globaltensor.cli.problem import Problem
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.host_processes import STOPPED
from globaltensor.runtime.process_end import REQUEUE
from globaltensor.runtime.process_limits import why_no_file
from globaltensor.runtime.secret import draw_secret


def launch(chosen: argparse.Namespace, ranks: int, folder: str, line: list[str], forks: ForkServer | None) -> int:
    """Launch, wait, report; the exit code."""
    if too_few := why_no_file():
        raise Problem(f"this process cannot start ranks\n  why: {too_few[0]}\n  try: {too_few[1]}", 1)
    if chosen.nnodes == 1:
        draw_secret()
    if "LOGLEVEL" not in os.environ:                 # what went wrong is told below, in fewer words
        logging.disable(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if chosen.nnodes > 1:
        print(f"globaltensor: waiting for {chosen.nnodes} hosts at {chosen.rdzv_endpoint}", file=sys.stderr)
    agent = _agent(chosen, ranks, folder, line, forks)
    try:
        result = agent.run()
    except SignalException as ended:
        if _saved(folder, len(agent.pids())):
            raise Problem(f"ended by {ended.sigval.name}; the ranks have saved, and can go on", REQUEUE) from None
        raise Problem(f"ended by {ended.sigval.name}, and the ranks with it", 128 + ended.sigval) from None
    except KeyboardInterrupt:
        raise Problem("ended by SIGINT before the ranks began", 128 + signal.SIGINT) from None
    except (RendezvousError, ValueError, OSError, RuntimeError) as error:
        place = f"at {chosen.rdzv_endpoint}" if chosen.rdzv_endpoint else "on this host"
        raise Problem(f"the ranks could not be started {place}\n  why: {str(error).splitlines()[0]}", 1) from None
    if not result.is_failed():
        return 0
    return _report(result.failures, agent.ended, agent.unnoticed(), folder)[0]


def _agent(chosen: argparse.Namespace, ranks: int, folder: str, line: list[str], forks: ForkServer | None) -> Any:
    """The agent of this host, which meets those of the others."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from globaltensor.cli.agent import RestartingAgent
    from globaltensor.cli.rendezvous import Rendezvous

    alone = chosen.nnodes == 1 and not chosen.rdzv_endpoint
    fewest = chosen.min_ranks or ranks * chosen.nnodes
    meeting = Rendezvous("127.0.0.1:0" if alone else chosen.rdzv_endpoint, chosen.rdzv_id, chosen.nnodes,
                         -(-fewest // ranks), chosen.node_rank, "127.0.0.1" if alone else chosen.local_addr or "")
    spec = WorkerSpec(role="default", local_world_size=ranks, entrypoint=sys.executable, args=tuple(line),
                      rdzv_handler=meeting, max_restarts=chosen.max_restarts, monitor_interval=0.1,
                      local_addr=meeting.name if alone else chosen.local_addr)

    def report(failures: Mapping[int, Any], ended: Mapping[int, str], unnoticed: list[int]) -> list[int]:
        causes = _report(failures, ended, unnoticed, folder)[1]
        for path in Path(folder).glob("*.json"):
            path.unlink()
        Path(folder, "first").unlink(missing_ok=True)
        print("globaltensor: the program is started again", file=sys.stderr, flush=True)
        return causes

    # of the hosts of a job each may leave out some ranks of its own
    here = max(1, fewest - ranks * (chosen.nnodes - 1))
    return RestartingAgent(spec, folder, chosen.grace, here, report, forks)


def _endings(folder: str) -> dict[int, dict[str, Any]]:
    """How the ranks ended that have said so."""
    return {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def _saved(folder: str, ranks: int) -> bool:
    """Have all ranks of this host ended by `sys.exit(gt.REQUEUE)`?"""
    notes = _endings(folder)
    return len(notes) == ranks and all(note["code"] == REQUEUE for note in notes.values())


def _report(failures: Mapping[int, Any], ended: Mapping[int, str], unnoticed: list[int],
            folder: str) -> tuple[int, list[int]]:
    """Say which ranks failed of what, first those that began it; `failures` as torch's agent gives them, `ended` and
    `unnoticed` as RestartingAgent notes it. Returns the exit code of the first of them, and all that began it."""
    endings = notes = _endings(folder)
    well = sorted({rank for rank, note in notes.items() if note["code"] == 0} | set(unnoticed))
    notes = {rank: note for rank, note in notes.items() if rank not in well}
    # one that ended well, and was still at its last lines when the others were ended, is not a cause
    failed = {rank: f for rank, f in failures.items() if rank not in well or f.pid not in ended}
    of_rank = {rank: _fate(failure.exitcode, notes.get(rank), ended.get(failure.pid))
               for rank, failure in sorted((failed or failures).items())}
    if min(of_rank.values())[0] == _LOST_TOUCH:      # of whom? Of a rank that did not fail, but ended before the others
        if well:
            threads = [f": {endings[rank]['error']}" for rank in well if rank in endings and endings[rank]["error"]]
            print(f"globaltensor: {rank_names(well)} ended without an error, while others waited{''.join(threads[:1])}",
                  file=sys.stderr)
        else:                                        # of none here: of what each says, such as why they could not start
            of_rank |= {rank: (what, f"failed: {notes[rank]['error']}") for rank, (what, _) in of_rank.items()
                        if what == _LOST_TOUCH}
    fates: dict[tuple[int, str], list[int]] = {}
    for rank, fate_of_rank in of_rank.items():
        fates.setdefault(fate_of_rank, []).append(rank)
    for (_, fate), ranks in sorted(fates.items()):
        if len(ranks) > 1:
            fate = re.sub("^was", "were", fate)
        print(f"globaltensor: {rank_names(ranks)} {fate}", file=sys.stderr)
    first = fates[min(fates)][0]
    code = notes[first]["code"] if first in notes else failures[first].exitcode
    causes = [rank for (what, _), ranks in fates.items() if what < _LOST_TOUCH for rank in ranks]
    return code if code > 0 else 128 - code, causes


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"SIGRTMIN+{number - signal.SIGRTMIN}"    # of those for programs' own use the first has a name, and the last


_LOST_TOUCH = 2


def _fate(code: int, note: dict[str, Any] | None, ended: str | None) -> tuple[int, str]:
    """What happened to a rank, after a number that puts causes before what follows from them. `ended`: its state when
    this launcher ended it; None where it ended before."""
    if note is not None and note["error"].startswith("TransportError"):
        return _LOST_TOUCH, "then lost touch with others (TransportError)"
    if note is not None and re.match(r"CheckpointError: .* was not written: rank \d+", note["error"]):
        return _LOST_TOUCH, "could not save then (CheckpointError)"
    if note is not None and note.get("follows"):
        return _LOST_TOUCH, f"could not go on then ({note['error'].partition(':')[0]})"
    if code == REQUEUE:
        return 0, "was asked to end, to go on later"
    if note is not None:
        return 0, f"failed: {note['error']}"
    if code > 0:
        return 1, f"exited with code {code}"
    if ended == STOPPED:
        return 0, "was stopped (by SIGSTOP, or a debugger) while others waited, and killed"
    if ended and code == -signal.SIGKILL:
        return 3, "ended with it, by SIGKILL, after the time that --grace gives"
    if ended and code == -signal.SIGTERM:
        return 3, "ended with it"
    name = _signal_name(-code)
    why = {"SIGKILL": " (did the host run out of memory?)", "SIGTERM": ", which this launcher did not send"}
    return 0, f"was killed by {name}{why.get(name, '')}"
