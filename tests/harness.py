"""Starting a program in each of the ways of running it, for the tests: one process, this launcher, torchrun, hosts."""
from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "programs"
PYTHON = sys.executable
RUN = [PYTHON, "-m", "globaltensor.cli", "run", *os.environ.get("TEST_RUN_FLAGS", "").split()]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                  "GLOBALTENSOR_RANKS", "GLOBALTENSOR_RUN_FOLDER", "GLOBALTENSOR_SECRET")


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher may have left in it, and with the package to test in front."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


class Started:
    """A command in a session of its own, so that it is ended with all that it started."""

    def __init__(self, command: list, env: dict[str, str] | None = None, cwd: Path = PROGRAMS) -> None:
        self.process = subprocess.Popen([str(c) for c in command], env=env or environment(), cwd=cwd, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        _started.add(self)

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, output, errors. A command that takes longer is killed, and the test fails."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(f"hung for {timeout} seconds: {self.process.args}\n{out}\n{err}") from None
        return self.process.returncode, out, err


_started: weakref.WeakSet[Started] = weakref.WeakSet()


def end_all() -> None:
    """Kill all commands that have not ended, with all that they started."""
    for one in list(_started):
        if one.process.returncode is None:           # else its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)


def run(command: list, env: dict[str, str] | None = None, timeout: float = 60) -> tuple[int, str, str]:
    """Run a command to its end."""
    return Started(command, env).end(timeout)


def good(command: list, env: dict[str, str] | None = None, timeout: float = 60) -> str:
    """The output of a command that must succeed."""
    code, out, err = run(command, env, timeout)
    assert code == 0, f"{command} exited with {code}\n{out}\n{err}"
    return out


def compiled(main, *options):
    """What `main` of an example returns of these options; it must compile its model."""
    import torch

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    result = main([str(option) for option in options])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    return result


def good_all(*starts: tuple[list, dict[str, str]], timeout: float = 60) -> list[str]:
    """The outputs of commands that must succeed, each with what its environment has more, all at the same time: one
    process alone, or a launcher that imports torch, leaves cores idle."""
    started = [Started(command, environment(**more)) for command, more in starts]
    ended = [(one.process.args, one.end(timeout)) for one in started]
    for command, (code, out, err) in ended:
        assert code == 0, f"{command} exited with {code}\n{out}\n{err}"
    return [out for _, (_, out, _) in ended]


def free_port() -> int:
    """A port of this host that nobody listens on, below those that Linux gives to connections: one of another test
    could have it before a rank listens there."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port := 20_000 + secrets.randbelow(12_000)))
            return port


def by_hand(program: list, ranks: int, **more: str) -> list[Started]:
    """One process per rank with the environment that a launcher sets, and no launcher that would end them."""
    port = str(free_port())
    shared = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more)
    per_host = int(more.get("LOCAL_WORLD_SIZE", ranks))
    return [Started([PYTHON, *program], environment(RANK=str(r), LOCAL_RANK=str(r % per_host), **shared))
            for r in range(ranks)]


def results(folder: Path) -> dict[int, dict]:
    """What each process of a program wrote, by its first rank: `<rank>.json`."""
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
