"""Ranks that are forked from a process that has imported torch, for torch's elastic agent: the launcher's side.

fork_server.py is the other side, and says how. The launcher starts that process before it imports torch itself, so that
both imports run at the same time, and asks it for a fork wherever torch's agent would start a Python.
"""
from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from globaltensor.cli import fork_server
from globaltensor.cli.problem import Problem

_PR_SET_CHILD_SUBREAPER = 36


class ForkedRank:
    """A rank as torch's agent looks at it: what it uses of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended, negative by a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same, once it has ended; subprocess.TimeoutExpired before that."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code


class ForkServer:
    """The process that forks, and the way to ask it."""

    def __init__(self, line: list[str]) -> None:
        """`line` is the program and its arguments, after -m where it is a module."""
        if sys.platform != "linux":
            raise Problem("--start-method fork is for Linux\n  try: globaltensor run without it")
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1):
            why = os.strerror(ctypes.get_errno())
            raise Problem(f"ranks cannot be forked: the kernel does not let this process adopt them ({why})\n"
                          "  try: globaltensor run without --start-method")
        self.link, other = socket.socketpair()
        self.before = dict(os.environ)
        number = str(other.fileno()).ljust(fork_server.ROOM)
        with other:
            self.process = subprocess.Popen([sys.executable, fork_server.__file__, *line], start_new_session=True,
                                            env={**self.before, fork_server.LINK: number}, pass_fds=[other.fileno()])
        self.answers = self.link.makefile("r")

    def fork(self, environment: dict[str, str]) -> ForkedRank:
        """A rank with this environment, which waits until all may go on."""
        more = {name: value for name, value in environment.items() if self.before.get(name) != value}
        return ForkedRank(int(self._ask(json.dumps(more) + "\n", "pid")))

    def reap_others(self, ranks: Collection[int]) -> None:
        """Wait for children of this process that are not ranks: what ranks have left behind, such as the workers of a
        loader whose rank was killed, is adopted by it, and would remain as zombies until it ends."""
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if int(pid) not in ranks and int(pid) != self.process.pid:
                with suppress(ChildProcessError):    # somebody else has waited for it
                    os.waitpid(int(pid), os.WNOHANG)

    def go_on(self) -> None:
        """The ranks forked since the last time are children of this process, and go on."""
        if code := self._ask(fork_server.GO, "gone"):
            raise RuntimeError(f"the process that forked them has ended, with code {code}")

    def prepare_restart(self) -> None:
        """Let the process that forks import, meanwhile, what ranks would import after a restart."""
        with suppress(OSError):                      # it has ended: the next fork says so
            self.link.sendall(fork_server.PREPARE.encode())

    def _ask(self, line: str, wanted: str) -> int:
        """OSError where the system refuses, RuntimeError where what forks has failed."""
        try:
            self.link.sendall(line.encode())
            answer = self.answers.readline()
        except OSError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process that forks them has ended, with code {self.process.wait()}")
        outcome = json.loads(answer)
        if wanted in outcome:
            return int(outcome[wanted])
        if outcome.get("errno"):
            raise OSError(outcome["errno"], outcome["why"])
        raise RuntimeError(outcome.get("why") or f"the process that forks them has ended, with code {outcome['gone']}")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()                          # it ends by itself, but may be importing
        self.process.wait()
        self.answers.close()
        self.link.close()

    @contextmanager
    def in_place_of_spawn(self) -> Iterator[None]:
        """Inside, torch's agent asks here for each rank."""
        import torch.distributed.elastic.multiprocessing.api as agent_module
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        server = self

        class Forked(SubprocessHandler):
            def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> Any:
                return server.fork(env)

        api: Any = agent_module
        usual, api.get_subprocess_handler = api.get_subprocess_handler, Forked
        try:
            yield
            self.go_on()
        finally:
            api.get_subprocess_handler = usual
