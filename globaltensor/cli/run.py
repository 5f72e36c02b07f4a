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
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

from globaltensor.cli import worker
from globaltensor.cli.cores import cores
from globaltensor.cli.forks import ForkServer
from globaltensor.cli.problem import Problem
from globaltensor.cli.torchrun import accelerators, translate

if find_spec("fcntl") is not None:                   # elsewhere no rank is started
    import fcntl

_FOLDERS = "globaltensor-run-"                       # how the names of the folders that launchers make begin
_NEW = 60                                            # seconds in which the launcher surely locks its folder


def command(chosen: argparse.Namespace) -> int:
    """Launch, wait, report; the exit code."""
    translate(chosen)
    _check_command(chosen)
    ranks = chosen.ranks or accelerators() or 2
    _environment(ranks, chosen.nnodes)
    with _temporary_folder() as folder:
        os.environ[worker.FOLDER] = folder
        program = [*(["-m"] if chosen.module else []), chosen.program, *chosen.args]
        with ForkServer(program) if chosen.start_method == "fork" else nullcontext() as forks:
            # only now, as it imports torch: what forks ranks does so at the same time
            gc.disable()                             # all that is imported stays: to look for garbage takes 0.2 s
            launch = importlib.import_module("globaltensor.cli.launch").launch
            gc.enable()
            return int(launch(chosen, ranks, folder, [str(Path(worker.__file__)), *program], forks))


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """What the launcher shares with its ranks. It is locked for as long as the launcher lives, whatever ends it: the
    folder of one that was killed is removed by a later one."""
    try:
        fresh = tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True)
    except OSError as error:
        raise Problem(f"there is no folder for temporary files\n  why: {error.strerror}\n  try: TMPDIR=FOLDER, one "
                      "that may be written, before globaltensor run", 1) from None
    with fresh as folder, ExitStack() as held:
        with suppress(OSError):                      # a file system without locks: nobody removes it
            held.enter_context(_locked(folder))
        for left in Path(folder).parent.glob(f"{_FOLDERS}*"):
            with suppress(OSError):                  # another user's, or of one that runs
                if time.time() - left.stat().st_mtime > _NEW:
                    with _locked(str(left)):
                        shutil.rmtree(left, ignore_errors=True)
        yield folder


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Raises OSError where another process has locked it."""
    held = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def _check_command(chosen: argparse.Namespace) -> None:
    """Raise Problem for what can be seen to fail before anything starts."""
    if not hasattr(signal, "SIGUSR1"):
        raise Problem(f"{sys.platform} has no signals by which ranks could be ended and told to save\n  try: python "
                      f"{chosen.program}, one process that drives all ranks; or Linux, also in WSL 2", 1)
    if chosen.module:
        sys.path[:0] = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]         # as in the ranks
        if find_spec(chosen.program.partition(".")[0]) is None:
            raise Problem(f"there is no module {chosen.program!r}\n  looked in {os.getcwd()} and where Python looks")
    elif not Path(chosen.program).exists():
        raise Problem(f"there is no program {chosen.program!r}\n  looked in {os.getcwd()}")
    elif Path(chosen.program).is_dir() and not Path(chosen.program, "__main__.py").exists():
        raise Problem(f"{chosen.program!r} is a folder\n  try: a file in it, or -m and the name of a module")
    elif not Path(chosen.program).is_dir() and not Path(chosen.program).is_file():
        raise Problem(f"{chosen.program!r} is no file\n  why: each rank reads the program, and what a pipe or a "
                      "terminal gives can be read once\n  try: cat > program.py, then globaltensor run program.py")
    if chosen.rdzv_endpoint and not re.fullmatch(r".+:\d{1,5}", chosen.rdzv_endpoint):
        host, _, port = chosen.rdzv_endpoint.rpartition(":")
        if "]" in port or not (host or chosen.rdzv_endpoint.startswith(":")):        # of [::1], or there is none
            host = chosen.rdzv_endpoint
        raise Problem(f"--rdzv-endpoint {chosen.rdzv_endpoint} has no {'port' if host else 'host'}\n"
                      f"  try: --rdzv-endpoint {host or 'HOST'}:29400")
    if chosen.rdzv_endpoint and not 0 < int(chosen.rdzv_endpoint.rpartition(":")[2]) < 65536:
        raise Problem(f"--rdzv-endpoint {chosen.rdzv_endpoint}: a port is 1 to 65535\n  try: --rdzv-endpoint "
                      f"{chosen.rdzv_endpoint.rpartition(':')[0]}:29400")
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
    if hosts == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")            # no warnings about names of sockets
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:            # nohup: torch's agent would end the job
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
