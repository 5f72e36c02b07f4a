"""Python processes that are forks of one that has imported torch, where the import would take most of their time.

`make test` starts hundreds of processes, each of which imports torch for more than a second. With `pytest --forks` one
process per worker imports it, and `subprocess.Popen` asks that one for a fork wherever a new Python would start: in
tests, in launchers and in benchmarks. A fork has torch and this library, or torch alone where it wants another import
of this library (without native code, say), and an environment, a folder, arguments and streams of its own.
`make test-all` starts real processes.

A test that is about the start of a process asks for the fixture `real_processes`.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "TEST_FORKS"                                # names the socket at which forks are asked for
PATHS = "TEST_FORKS_PYTHONPATH"                      # of the process that has this library, and has it from ROOT
ROOT = str(Path(__file__).parent.parent)
_READ_AT_IMPORT = {"GLOBALTENSOR_NATIVE": "1", "GLOBALTENSOR_AUDIT": "", "TORCHELASTIC_RESTART_COUNT": "0"}
_AT_THE_START = ("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONMALLOC", "LD_PRELOAD", "TORCH_LOGS")       # read but once
_NUMBER = struct.Struct("<i")
_Popen = subprocess.Popen


class ForkedPopen(_Popen):
    """subprocess.Popen; what is the start of a Python program becomes a fork."""

    _link: int | None = None                         # to the process that forks; no object that could be finalized

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: bool, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *others: Any) -> None:
        environment = dict(os.environ if env is None else env)
        program = None if shell or preexec_fn or pass_fds or executable else _program(args, environment)
        if program is None:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others)
        *_, start_new_session, _ = others
        request = {**program, "environment": environment, "folder": os.fspath(cwd or os.getcwd()),
                   "session": bool(start_new_session)}
        text = json.dumps(request).encode()
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(_socket(environment))
            socket.send_fds(link, [_NUMBER.pack(len(text))],
                            [n if fd == -1 else fd for n, fd in enumerate((p2cread, c2pwrite, errwrite))])
            link.sendall(text)
            self.pid = _NUMBER.unpack(link.recv(_NUMBER.size))[0]
            self._link = link.detach()
        self._child_created = True
        dev_null = getattr(self, "_devnull", -1)
        for ours, of_child in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
            if ours != -1 and of_child not in (-1, dev_null):
                os.close(of_child)
        if dev_null != -1:
            os.close(dev_null)
        self._closed_child_pipe_fds = True

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        return super()._internal_poll(*args, **options) if self._link is None else self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        if self._link is None:
            return super()._wait(timeout)
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        with self._waitpid_lock, selectors.DefaultSelector() as ready:
            if self.returncode is None:
                ready.register(self._link, selectors.EVENT_READ)
                if ready.select(timeout):
                    code = os.read(self._link, _NUMBER.size)
                    self.returncode = _NUMBER.unpack(code)[0] if code else 255
                    os.close(self._link)
        return self.returncode


def _program(args: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """What this command runs, where a fork can stand for it."""
    if isinstance(args, (str, bytes)) or not environment.get(SOCKET) or environment.get("OMP_NUM_THREADS") != "1":
        return None
    first, *words = [os.fspath(word) for word in args]
    if first != sys.executable or any(environment.get(name) != os.environ.get(name) for name in _AT_THE_START):
        return None
    unbuffered, quiet = words[:1] == ["-u"], words[:2] == ["-W", "ignore"]
    words = words[1 if unbuffered else 2 if quiet else 0:]
    if not words or words[0].startswith("-") and words[0] not in ("-c", "-m"):
        return None
    return {"words": words, "unbuffered": unbuffered, "quiet": quiet}


def _socket(environment: dict[str, str]) -> str:
    """Of the process that has what this environment would import."""
    same = _others(environment.get("PYTHONPATH", "")) == environment.get(PATHS) and all(
        environment.get(name, usual) == usual for name, usual in _READ_AT_IMPORT.items())
    return environment[SOCKET] + (".ours" if same else "")


def _others(paths: str) -> str:
    """Of the folders of this PYTHONPATH those that are not this library's."""
    return os.pathsep.join(path for path in paths.split(os.pathsep) if path != ROOT)


def start_forking(path: Path) -> subprocess.Popen[bytes]:
    """From now on subprocess.Popen forks, in this process and in those that it starts, until what this gives ends."""
    server = _Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "ROOM": " " * 65_536})
    server.stdout.read(2)                            # both listen
    os.environ[SOCKET] = str(path)
    os.environ[PATHS] = _others(os.environ.get("PYTHONPATH", ""))
    subprocess.Popen = ForkedPopen                   # type: ignore[misc]
    return server


class Children:
    """The process that is forked, whenever somebody asks."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.listener, selectors.EVENT_READ, self.fork)
        self.ready.register(sys.stdin.fileno(), selectors.EVENT_READ, lambda: os._exit(0))
        self.request: dict[str, Any] | None = None
        self.zombies: set[int] = set()               # who asked has not heard yet that they have ended

    def serve(self) -> dict[str, Any]:
        """Returns in the forks only, with what to run."""
        os.write(sys.stdout.fileno(), b"!")
        while self.request is None:
            for key, _ in self.ready.select():
                key.data()
                if self.request is not None:
                    break
        return self.request

    def fork(self) -> None:
        link = self.listener.accept()[0]
        try:
            text, streams = _request(link)
        except ConnectionError:
            text = b""
        if not text:
            link.close()
            return
        pid = os.fork()
        if not pid:
            for standard, fd in enumerate(streams):
                os.dup2(fd, standard)
            self.request = json.loads(text)
            if self.request["session"]:
                os.setsid()
            _tell(link, os.getpid())                 # not before: who asked may kill all of that session
            self.close(link, *streams)
            return
        for fd in streams:
            os.close(fd)
        child = os.pidfd_open(pid)
        self.ready.register(child, selectors.EVENT_READ, lambda: self.ended(pid, child, link))
        self.ready.register(link, selectors.EVENT_READ, lambda: self.let_go(pid, link))

    def close(self, link: socket.socket, *streams: int) -> None:
        """All that the process that forks has open. Its objects, too: a finalizer would close what has its number."""
        own = [key.fileobj for key in self.ready.get_map().values() if key.fd != sys.stdin.fileno()]
        self.ready.close()
        for one in (link, *own):
            os.close(one) if isinstance(one, int) else one.close()
        for fd in {*streams} - {0, 1, 2}:
            os.close(fd)

    def ended(self, pid: int, child: int, link: socket.socket) -> None:
        """Tell who asked, and keep the zombie until that has heard of it: a signal to what has just ended finds it, as
        it does with children of one's own."""
        self.ready.unregister(child)
        os.close(child)
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if link.fileno() == -1:
            os.waitpid(pid, 0)
        else:
            self.zombies.add(pid)
            _tell(link, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)

    def let_go(self, pid: int, link: socket.socket) -> None:
        """Who asked knows how it ended; or has died, then Linux ends the ranks of a launcher. Here it is not their
        parent."""
        self.ready.unregister(link)
        link.close()
        if pid in self.zombies:
            self.zombies.remove(pid)
            os.waitpid(pid, 0)
        else:
            os.kill(pid, signal.SIGTERM)


def _request(link: socket.socket) -> tuple[bytes, list[int]]:
    """What is asked for, and three streams; nothing where who asked was killed meanwhile."""
    head, streams, _, _ = socket.recv_fds(link, _NUMBER.size, 3)
    text, length = b"", _NUMBER.unpack(head)[0] if len(head) == _NUMBER.size else 0
    while len(text) < length and (more := link.recv(length - len(text))):
        text += more
    if not length or len(text) < length:
        for fd in streams:
            os.close(fd)
        return b"", []
    return text, streams


def _tell(link: socket.socket, number: int) -> None:
    try:
        link.sendall(_NUMBER.pack(number))
    except OSError:
        pass                                         # who asked was killed meanwhile


def become(request: dict[str, Any], paths: list[str]) -> None:
    """What a new Python does before it runs the program."""
    os.environ.clear()
    show_environment(request["environment"])
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    sys.modules["torch"].seed()                      # else all forks would draw alike, which new processes do not
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)   # type: ignore[union-attr]
    if request["quiet"]:
        warnings.simplefilter("ignore")


def show_environment(environment: dict[str, str]) -> None:
    """Write it where Linux shows it, as /proc/PID/environ: ranks know each other by it. It shows the memory that held
    the environment at the start of the process, in which ROOM made room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    assert start and len(text) <= end - start, "no room for the environment of a fork"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def show(kind: type[BaseException], error: BaseException, at: types.TracebackType | None) -> None:
    """Without the frames of this file."""
    while at and at.tb_next and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    sys.__excepthook__(kind, error.with_traceback(at), at)


def run(words: list[str]) -> None:
    kind, main = words[0], types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])          # type: ignore[attr-defined]
        return
    sys.argv = ["-c", *words[2:]] if kind == "-c" else words
    sys.path.insert(0, "" if kind == "-c" else os.path.dirname(os.path.realpath(kind)))
    main.__builtins__ = __builtins__                 # type: ignore[attr-defined]
    if kind != "-c":
        main.__file__ = kind
    text = words[1] if kind == "-c" else Path(kind).read_text()
    exec(compile(text, "<string>" if kind == "-c" else kind, "exec"), main.__dict__)


def end(program: Callable[[list[str]], None], words: list[str]) -> NoReturn:
    """Run the program, then end as Python does, but that no object is destroyed: all that torch has registered would
    be, one by one, and in a fork each is a page to copy. That took four fifths of the time of a short program."""
    code: object = None
    try:
        program(words)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())              # type: ignore[arg-type]
        code = 1
        if isinstance(sys.exception(), KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()                            # type: ignore[attr-defined]  # waits for those of the program
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    its_paths = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    import torch
    import torch.distributed.run

    subprocess.Popen = ForkedPopen                   # type: ignore[misc]
    torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen = ForkedPopen
    signal.signal(signal.SIGINT, signal.default_int_handler)         # background jobs of a shell ignore it
    its_socket = sys.argv[1]
    if not os.fork():
        sys.path.insert(0, ROOT)
        import globaltensor  # noqa: F401
        its_socket += ".ours"
    gc.collect()
    gc.freeze()                                      # a fork that looked for garbage would copy all that torch has made
    its_request = Children(its_socket).serve()
    become(its_request, its_paths)
    sys.excepthook = show
    end(run, its_request["words"])
