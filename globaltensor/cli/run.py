"""Run a program on several ranks, one process each.

    globaltensor run -n 4 train.py --steps 100     4 ranks on this host
    globaltensor run -n 4 -m package.train         a module instead of a file
    globaltensor run -n 8 --nnodes 2 --rdzv-endpoint host0:29400 train.py    on each of 2 hosts: 16 ranks
    globaltensor run -n 4 --max-restarts 3 train.py                          restart after a crash, up to 3 times

Without this command, the same program runs in one process that drives all ranks: python train.py

The first rank that fails prints its error, once. The other ranks are then ended, and the exit code is that of the
rank that failed. Ctrl-C ends all ranks.

torchrun's flags work too, in both spellings: --nproc-per-node and --nproc_per_node. Those that have no use here say
what to type instead. Ranks find the same environment variables as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK and so
on.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from globaltensor.cli import worker
from globaltensor.cli.forks import ForkServer
from globaltensor.cli.info import cores
from globaltensor.cli.problem import Problem
from globaltensor.cli.torchrun import translate
from globaltensor.runtime.accelerators import accelerator_count
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.preemption import REQUEUE
from globaltensor.runtime.secret import draw_secret


def command(chosen: argparse.Namespace) -> int:
    """Launch, wait, report; the exit code."""
    translate(chosen)
    _check_command(chosen)
    ranks = chosen.ranks or accelerator_count() or 2
    _environment(ranks, chosen.nnodes)
    with tempfile.TemporaryDirectory(prefix="globaltensor-") as folder:
        os.environ[worker.FOLDER] = folder
        program = [*(["-m"] if chosen.module else []), chosen.program, *chosen.args]
        with ForkServer(program) if chosen.start_method == "fork" else nullcontext() as forks:
            return _launch(chosen, ranks, folder, [str(Path(worker.__file__)), *program], forks)


def _check_command(chosen: argparse.Namespace) -> None:
    """Raise Problem for what can be seen to fail before anything starts."""
    if not hasattr(signal, "SIGUSR1"):
        raise Problem(f"{sys.platform} has no signals by which ranks could be ended and told to save\n  try: python "
                      f"{chosen.program}, one process that drives all ranks; or Linux, also in WSL 2", 1)
    if chosen.module:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(chosen.program.partition(".")[0]) is None:
            raise Problem(f"there is no module {chosen.program!r}\n  looked in {os.getcwd()} and where Python looks")
    elif not Path(chosen.program).exists():
        raise Problem(f"there is no program {chosen.program!r}\n  looked in {os.getcwd()}")
    elif Path(chosen.program).is_dir() and not Path(chosen.program, "__main__.py").exists():
        raise Problem(f"{chosen.program!r} is a folder\n  try: a file in it, or -m and the name of a module")
    if chosen.rdzv_endpoint and not re.fullmatch(r".+:\d{1,5}", chosen.rdzv_endpoint):
        raise Problem(f"--rdzv-endpoint {chosen.rdzv_endpoint} has no port\n  try: --rdzv-endpoint "
                      f"{chosen.rdzv_endpoint}:29400")
    if chosen.nnodes > 1 and not chosen.rdzv_endpoint:
        raise Problem(f"{chosen.nnodes} hosts need a place to meet\n  try: globaltensor run "
                      f"--nnodes {chosen.nnodes} --rdzv-endpoint HOST:29400 ... on each of them")
    if chosen.min_ranks is not None and chosen.ranks is not None and chosen.min_ranks > chosen.ranks * chosen.nnodes:
        raise Problem(f"--min-ranks {chosen.min_ranks} of {chosen.ranks * chosen.nnodes} ranks: there are no more")
    if chosen.node_rank is not None and not 0 <= chosen.node_rank < chosen.nnodes:
        raise Problem(f"--node-rank {chosen.node_rank} of {chosen.nnodes} hosts: it is 0 to {chosen.nnodes - 1}")


def _environment(ranks: int, hosts: int) -> None:
    """What the ranks inherit: a share of the cores each, and on one host no other network than its own."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if hosts == 1:
        draw_secret()
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")            # no warnings about names of sockets
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:            # nohup: torch's agent would end the job
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")


def _launch(chosen: argparse.Namespace, ranks: int, folder: str, line: list[str], forks: ForkServer | None) -> int:
    """torch's agent, from start to end; it is imported here because the other commands do without."""
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
    return _report(result.failures, folder)[0]


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

    def report(failures: Mapping[int, Any]) -> list[int]:
        causes = _report(failures, folder)[1]
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


def _report(failures: Mapping[int, Any], folder: str) -> tuple[int, list[int]]:
    """Say which ranks failed of what, first those that began it; `failures` as torch's agent gives them. Returns the
    exit code of the first of them, and all that began it."""
    notes = _endings(folder)
    well = sorted(rank for rank, note in notes.items() if note["code"] == 0)
    notes = {rank: note for rank, note in notes.items() if rank not in well}
    # one that ended well, and was still at its last lines when the others were ended, is no cause
    failed = {rank: f for rank, f in failures.items() if rank not in well or f.exitcode != -signal.SIGTERM}
    fates: dict[tuple[int, str], list[int]] = {}
    for rank, failure in sorted((failed or failures).items()):
        fates.setdefault(_fate(failure.exitcode, notes.get(rank)), []).append(rank)
    if min(fates)[0] == _LOST_TOUCH:                 # of whom? Of a rank that did not fail, but ended before the others
        if well:
            print(f"globaltensor: {rank_names(well)} ended without an error, while others waited", file=sys.stderr)
    for (_, fate), ranks in sorted(fates.items()):
        if len(ranks) > 1:
            fate = re.sub("^was", "were", fate)
        print(f"globaltensor: {rank_names(ranks)} {fate}", file=sys.stderr)
    first = fates[min(fates)][0]
    code = notes[first]["code"] if first in notes else failures[first].exitcode
    causes = [rank for (what, _), ranks in fates.items() if what < _LOST_TOUCH for rank in ranks]
    return code if code > 0 else 128 - code, causes


_LOST_TOUCH = 2


def _fate(code: int, note: dict[str, Any] | None) -> tuple[int, str]:
    """What happened to a rank, after a number that puts causes before what follows from them."""
    if note is not None and note["error"].startswith("TransportError"):
        return _LOST_TOUCH, "then lost touch with others (TransportError)"
    if note is not None and re.match(r"CheckpointError: .* was not written: rank \d+", note["error"]):
        return _LOST_TOUCH, "could not save then (CheckpointError)"
    if code == REQUEUE:
        return 0, "was asked to end, to go on later"
    if note is not None:
        return 0, f"failed: {note['error']}"
    if code > 0:
        return 1, f"exited with code {code}"
    name = signal.Signals(-code).name
    if code == -signal.SIGTERM:
        return 3, "ended with it"
    return 0, f"was killed by {name}" + (" (did the host run out of memory?)" if name == "SIGKILL" else "")
