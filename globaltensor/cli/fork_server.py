"""The process that `globaltensor run --start-method fork` forks its ranks from: it has imported torch, once for all.

    the launcher starts this process, which imports torch and globaltensor and waits
    for each start of the job it forks one process *between*
    the launcher asks that one for each rank; it forks the rank, which tells its number and waits
    the launcher says GO; the process between ends, so that the launcher, a subreaper, becomes the parent of the ranks
    the ranks go on

So a rank is in all respects a child of the launcher, alone in a session, with the launcher's streams, and none begins
before the others are there: forked one by one on a busy host, the last would be missed by the first. It differs from
one that begins with Python's first line in what is imported before its program runs: variables that torch reads when it
is imported, such as OMP_NUM_THREADS, must be set outside of the program.

A fork has the thread that forks and no other, so nothing here starts a thread. Nothing may start CUDA either.

Linux shows in /proc what a process was started with, by which ranks know each other. So the launcher leaves room at the
end of this process's environment, where each rank writes the variables that it has more.
"""
from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

LINK = "GLOBALTENSOR_FORK_LINK"                      # the number of the socket to the launcher, and room
GO, PREPARE = "go\n", "prepare\n"
ROOM = 8192                                          # bytes, for what a rank's environment has more


def serve(link: socket.socket, launcher: int) -> None:
    """Fork ranks as the launcher asks for them. Returns in these alone, once those of their start are all there."""
    with link, link.makefile("r") as requests:
        while request := requests.readline():        # the first of a start
            if request == PREPARE:
                import_what_optimizers_do()
                continue
            between = os.fork()
            if between:
                os.waitpid(between, 0)
                link.sendall(b"gone\n")
                continue
            between = os.getpid()
            held, holds = os.pipe()                  # closed when this process ends
            while request not in ("", GO):
                if not os.fork():
                    os.close(holds)
                    become_rank(json.loads(request))
                    link.sendall(f"{os.getpid()}\n".encode())
                    os.read(held, 1)
                    os.close(held)
                    wait_for_parent(between, launcher)
                    return
                request = requests.readline()
            os._exit(0)
    os._exit(0)                                      # the launcher has ended


def import_what_optimizers_do() -> None:
    """torch imports its compiler when the first optimizer is made, which takes as long as to import torch. Done while
    the ranks of the first start run, so that those of a restart need not."""
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def wait_for_parent(between: int, launcher: int) -> None:
    """Until the launcher is the parent of this rank. Where that has ended, so does the rank."""
    while os.getppid() == between:
        time.sleep(0.0005)
    if os.getppid() != launcher:
        os._exit(1)


def become_rank(variables: dict[str, str]) -> None:
    """A session, variables and random numbers of its own."""
    os.setsid()
    os.environ.pop(LINK)
    show_environment(variables)
    os.environ.update(variables)
    sys.modules["torch"].default_generator.seed()    # Python's own numbers begin anew by themselves
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def show_environment(variables: dict[str, str]) -> None:
    """Write them into the room at the end of what /proc/PID/environ shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])             # env_start and env_end in proc(5)
    room = start + ctypes.string_at(start, end - start).rindex(LINK.encode() + b"=")
    text = b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
    if len(text) > end - room:                       # checked under python -O, too: what follows writes to memory
        raise RuntimeError("no room for the environment of a rank")
    ctypes.memset(room, ord(" "), end - room - 1)    # one item, as zeros would be many
    ctypes.memmove(room, text, len(text))


def leave_memory() -> None:
    """The last that a rank calls before its interpreter ends. What it has of the process that forked it, the modules
    and what torch's libraries would take down, is left as it is: to free it would first copy it, page by page, and
    take longer than to start. What the program has made itself ends as usual."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)     # before the destructors of libraries
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_modules))
    for name in _modules:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python does with those that it takes down


_modules: dict[str, ModuleType] = {}                 # the modules that ranks begin with, by name


def main(argv: list[str]) -> None:
    """Become the ranks that run this program."""
    atexit.register(leave_memory)                 # what is registered first is called last
    if not sys.flags.safe_path:                   # as in a rank: what lies beside the program comes before others
        sys.path[0] = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    gc.disable()                                     # all that is imported stays: to look for garbage takes 0.2 s
    import torch

    from globaltensor.cli import worker
    from globaltensor.runtime.native import torch_ext

    launcher = os.getppid()
    worker.end_with_launcher()
    if torch.cuda.is_initialized() or threading.active_count() > 1:
        sys.exit("globaltensor run --start-method fork: what Python imports at its start has started CUDA or threads\n"
                 "  try: globaltensor run without --start-method")
    if torch_ext is not None:
        torch_ext.claim_ops()
    _modules.update({name: module for name, module in sys.modules.items()
                    if name not in ("__main__", "builtins", "sys")})
    gc.freeze()                                      # a rank that looked for garbage would copy all of torch's objects
    gc.enable()
    serve(socket.socket(fileno=int(os.environ[LINK])), launcher)
    worker.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
