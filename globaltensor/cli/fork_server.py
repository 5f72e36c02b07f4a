"""The process that `globaltensor run --start-method fork` forks its ranks from: it has imported torch, once for all.

    the launcher starts this process, which imports torch and globaltensor and waits
    for each start of the job it forks one process *between*
    the launcher asks that one for each rank; it forks the rank, which becomes one, tells its number and waits
    the launcher says GO; the process between ends, so that the launcher, a subreaper, becomes the parent of the ranks
    the ranks go on

So a rank is in all respects a child of the launcher, alone in a session, with the launcher's streams, and none begins
before the others are there: forked one by one on a busy host, the last would be missed by the first. Nobody waits for
what may have ended without a word: each word of a rank comes by a pipe that its end closes. It differs from
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
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TextIO

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
            try:
                between = os.fork()
            except OSError as error:                 # too many processes
                link.sendall(_refusal(error))
                continue
            if not between:
                fork_ranks(request, requests, link, launcher)
                return
            _, status = os.waitpid(between, 0)
            link.sendall(_answer_of(gone=os.waitstatus_to_exitcode(status)))
    os._exit(0)                                      # the launcher has ended


def fork_ranks(request: str, requests: TextIO, link: socket.socket, launcher: int) -> None:
    """In the process between: fork a rank for each request, and say how that went. Returns in the ranks alone."""
    between, ranks = os.getpid(), 0
    held, holds = os.pipe()                          # closed when this process ends
    while request not in ("", GO):
        begun, says = os.pipe()                       # closed when a rank has begun, or has ended
        try:
            pid = os.fork()
        except OSError as error:                     # too many processes
            answer = _refusal(error)
        else:
            if not pid:
                os.close(holds)
                os.close(begun)
                begin_rank(json.loads(request), says)
                if not os.read(held, 1):             # this start has come to nothing
                    os._exit(1)
                os.close(held)
                wait_for_parent(between, launcher)
                return
            os.close(says)
            with open(begun, "rb") as words:
                answer = words.read() or _end_of_rank(pid)
            ranks += 1
        link.sendall(answer)
        request = requests.readline()
    if request == GO:
        os.write(holds, b" " * ranks)
    os._exit(0)


def begin_rank(variables: dict[str, str], says: int) -> None:
    """Become a rank, and say so, or why not."""
    try:
        become_rank(variables)
        os.write(says, _answer_of(pid=os.getpid()))
        os.close(says)
    except Exception as error:
        with suppress(OSError):                      # nobody hears it
            os.write(says, _answer_of(why=f"a rank could not begin: {type(error).__name__}: {error}"))
        os._exit(1)


def _answer_of(**answer: str | int | None) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _refusal(error: OSError) -> bytes:
    return _answer_of(why=str(error.strerror or error), errno=error.errno)


def _end_of_rank(pid: int) -> bytes:
    """Of a rank that has ended before it said anything."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _answer_of(why=f"a rank ended before it began, with code {code}")


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
