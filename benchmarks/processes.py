"""Worker processes of a benchmark, one per rank, with the environment that a launcher sets.

A worker is a generator `function(settings)`: what it yields goes to the process that started it, a line of JSON each.
One that is to wait its turn reads a line of its stdin; nothing runs in it meanwhile.
"""
from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT = 1800                                         # seconds after which a worker ends itself
CODE = "from benchmarks.processes import work; work()"
ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}    # torch's own deprecations
MPI_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",     # of OpenMPI: no pinning, and
                "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",    # more ranks
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",                                 # than cores
                "PRTE_MCA_hwloc_default_binding_policy": "none"}


class Workers:
    """`function` is "module:name"; `threads` of torch each. `mpirun`, if given, starts them; only rank 0 may speak.

    `own` has for each rank what its environment has more, and `prefixes` what stands before its command line.
    """

    def __init__(self, function: str, ranks: int, settings: dict[str, Any], threads: int = 1,
                 mpirun: str | None = None, own: Sequence[dict[str, str]] = (),
                 prefixes: Sequence[Sequence[str]] = ()) -> None:
        env = {**os.environ, **ONE_HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
               "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
        line = [sys.executable, "-c", CODE, function, json.dumps(settings)]
        if mpirun:
            self.processes = [self._start([mpirun, "-n", str(ranks), *line], {**env, **MPI_SETTINGS})]
        else:
            self.processes = [self._start([*prefix, *line], {**env, "RANK": str(r), "LOCAL_RANK": str(r), **more})
                              for r, prefix, more in zip(range(ranks), prefixes or [()] * ranks, own or [{}] * ranks)]

    @staticmethod
    def _start(line: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(line, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self) -> None:
        """Give every worker its turn."""
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def hear(self, most: int | None = None) -> list[Any]:
        """The next that each of the workers says, or of the first `most`."""
        return [json.loads(process.stdout.readline() or self._lost(r))
                for r, process in enumerate(self.processes[:most])]

    def _lost(self, rank: int) -> str:
        raise SystemExit(f"worker {rank} of {len(self.processes)} ended too early")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.stdin.close()                    # those that wait for their turn end
        for process in self.processes:
            try:
                process.wait(20 if kind is None else 1)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def left_behind(folder: Path) -> list[str]:
    """What jobs with this folder in their environment left: processes, and files in its `temporary`."""
    left = [str(path) for path in folder.glob("**/temporary/*")]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):                      # it has ended meanwhile, or is another user's
            if os.fsencode(folder) in (process / "environ").read_bytes():
                left.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r:.80}")
    return left


def find_mpirun() -> tuple[str | None, str]:
    """Its path, or None and why MPI cannot take part."""
    path = shutil.which("mpirun")
    if path is None:
        return None, "not there: no mpirun"
    code = "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI; print(MPI.Get_library_version())"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if tried.returncode:
        return None, f"not there: {tried.stderr.strip().splitlines()[-1]}"
    return path, tried.stdout.splitlines()[0].partition(",")[0]


def work() -> None:
    """The life of a worker. Whatever libraries print goes where errors go."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    logging.disable(logging.WARNING)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "RANK" not in os.environ:                     # mpirun's names for it
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    module, name = sys.argv[1].split(":")
    for found in getattr(importlib.import_module(module), name)(json.loads(sys.argv[2])):
        print(json.dumps(found), file=said, flush=True)
