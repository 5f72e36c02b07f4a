"""`globaltensor run --start-method fork`: ranks that are forked are in nothing different from those that begin anew,
but for being there sooner.

`TEST_RUN_FLAGS="--start-method fork"` runs the tests of any file with forked ranks.
"""
from __future__ import annotations

import ctypes
import errno
import os
import py_compile
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from harness import PROGRAMS, RUN, Started, environment, results, run
from test_lifecycle import losses, starts
from test_processes import alive

from globaltensor.cli.forks import ForkedRank, ForkServer
from globaltensor.cli.problem import Problem
from globaltensor.runtime.native import torch_ext

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone forks ranks")]

METHODS = ("spawn", "fork")
FAILS = str(PROGRAMS / "fails.py")


@pytest.mark.usefixtures("real_processes")           # those of pytest --forks share the seed of torch
def test_a_forked_rank_begins_as_one_that_begins_anew(tmp_path):
    """But for its random numbers, which no two ranks have alike."""
    said = {}
    for method in METHODS:
        folder = tmp_path / method
        folder.mkdir()
        started = Started([*RUN, "-n", 2, "--start-method", method, PROGRAMS / "beginning.py", folder, "--n", "7"],
                          environment(OF_THE_USER="a=b\nc"))
        out, err = started.process.communicate(timeout=60)
        assert started.process.returncode == 0 and out == "said\n" * 2, out + err
        said[method] = results(folder)
        parents = {rank["own"]["parent"] for rank in said[method].values()}
        assert parents == {started.process.pid}
    drawn = [tuple(rank["own"]["drawn"]) for ranks in said.values() for rank in ranks.values()]
    assert [len({*of_one_kind}) for of_one_kind in zip(*drawn)] == [4, 4, 4], drawn
    for rank in range(2):
        spawned, forked = (said[method][rank]["alike"] for method in METHODS)
        assert forked == spawned


def test_a_forked_rank_leaves_what_it_was_forked_with_and_ends_what_it_has_made(tmp_path):
    """A rank that took down torch's libraries copied their memory to free it: more seconds than it had run."""
    program = tmp_path / "ends.py"
    program.write_text("""
import atexit, os, signal, sys, torch, globaltensor as gt
signal.signal(signal.SIGTERM, signal.SIG_IGN)        # rank 1 fails, and the launcher ends the other, which may be later

def told(name):                                      # of which nothing else is known to it
    own = {"write": os.write, "text": f"{name} of rank {gt.rank()} ends\\n".encode()}
    return type("Told", (), {"__del__": eval("lambda self: write(2, text)", own)})()

torch.an_attribute = told("torch's")
own = told("the program's")
atexit.register(lambda: os.write(2, b"atexit\\n"))
print("printed", end="")
sys.exit(3 if gt.rank() else 0)
""")
    code, out, err = run([*RUN, "-n", 2, "--start-method", "fork", program])
    assert code == 3 and out == "printedprinted", err
    assert {"the program's of rank 0 ends", "the program's of rank 1 ends", "atexit"} <= set(err.splitlines()), err
    assert "torch's of rank" not in err


AS_IN_PYTHON = """
import atexit, pickle, re, sys

class Own:
    pass

def annotated(x: Own) -> int: ...

own = Own()
own.itself, own.file = own, open("left_open.txt", "w")    # closed where the module is taken down, in no other order
own.file.write("text")
atexit.register(lambda: print(pickle.loads(pickle.dumps(Own)) is Own))      # looked up in __main__
said = {name: re.sub(" at 0x[^>]+", "", repr(value)) for name, value in sorted(globals().items()) if name[:2] == "__"}
print(said, getattr(__loader__, "path", ""), sys.argv, sys.path[:2], sys.flags)
print(annotated.__annotations__, annotated.__code__.co_filename)
"""


@pytest.mark.sample(3)
@pytest.mark.usefixtures("real_processes")           # pytest --forks runs files alone
@pytest.mark.parametrize("method, form, safe_path", [
    ("fork", "file", ""), pytest.param("fork", "file", "1", marks=pytest.mark.long), *(
    ("spawn", form, "") for form in ("file", "elsewhere", "module", "package", "folder", "archive", "compiled")), *(
    ("spawn", form, "1") for form in ("file", "module", "folder"))])
def test_a_program_of_any_form_runs_as_in_python(method, form, safe_path, tmp_path):
    (tmp_path / "own").mkdir()
    for name in ("program.py", "own/__main__.py"):
        (tmp_path / name).write_text(AS_IN_PYTHON)
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.write(tmp_path / "program.py", "__main__.py")
    py_compile.compile(tmp_path / "program.py", tmp_path / "compiled.pyc")
    words = {"file": ["program.py"], "elsewhere": ["own/../program.py"], "module": ["-m", "program"],
             "package": ["-m", "own"], "folder": ["./own"], "archive": ["own.zip"], "compiled": ["compiled.pyc"]}[form]
    said, env = [], environment()
    if safe_path:                                    # of PYTHONPATH the first entry counts, too
        env = environment(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(["first", str(tmp_path), env["PYTHONPATH"]]))
    for starter in ([sys.executable], [*RUN, "-n", 1, "--start-method", method]):
        code, out, err = Started([*starter, *words, "--an", "option"], env, cwd=tmp_path).end()
        assert code == 0, err
        said.append((out, (tmp_path / "left_open.txt").read_text()))
        (tmp_path / "left_open.txt").unlink()
    assert said[0] == said[1] and said[0][1] == "text"


def test_a_program_that_cannot_be_parsed_is_told_by_what_is_wrong(tmp_path):
    (tmp_path / "program.py").write_text("def f(:\n")
    code, _, err = run([*RUN, "-n", 2, tmp_path / "program.py"])
    assert code == 1 and "failed: SyntaxError: invalid syntax" in err


@pytest.mark.parametrize("how, code, words", [
    ("raises", 1, "rank 1 failed: ValueError: bad luck"),
    pytest.param("exits", 3, "rank 1 failed: exit code 3", marks=pytest.mark.long)])
def test_ranks_that_fail_do_so_in_the_same_words(how, code, words):
    ended = [run([*RUN, "-n", 2, "--start-method", method, FAILS, how]) for method in METHODS]
    # the other rank may still have been on its way, or have ended before it was told
    own = [(code, out, re.sub(r"globaltensor: rank 0 .*\n", "", err)) for code, out, err in ended]
    assert own[0] == own[1] and own[1][0] == code and words in own[1][2], ended


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_what_a_rank_has_forked_is_told_that_it_is_no_rank():
    code, out, err = run([*RUN, "-n", 2, FAILS, "forks"])
    assert code == 0 and out.count("the value is 40.0") == 2, out + err
    for rank in range(2):
        assert re.search(f"(?m) in a process that rank {rank} has forked$", out), out
    assert out.count("why:   the rank alone is connected to the others") == 2 and "first error" not in out, out


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_launcher_whose_parent_ignores_that_children_end_hears_how_ranks_do(method, tmp_path):
    """What ignores SIGCHLD hands that on, and then Linux keeps no exit codes."""
    (tmp_path / "program.py").write_text("import sys\nsys.exit(3)\n")
    ignoring = ["bash", "-c", 'trap "" CHLD; exec "$@"', "bash"]
    code, _, err = run([*ignoring, *RUN, "-n", 2, "--start-method", method, tmp_path / "program.py"])
    assert code == 3 and "failed: exit code 3" in err, err


@pytest.mark.sample(3)
@pytest.mark.parametrize("closed, method", [("<&- >&- 2>&-", "alone"), ("<&- >&- 2>&-", "fork"), (">&-", "spawn"), *(
    pytest.param(*one, marks=pytest.mark.long) for one in (
        (">&-", "alone"), (">&-", "fork"), ("2>&-", "alone"), ("2>&-", "fork"), ("2>&-", "spawn"),
        ("<&- >&- 2>&-", "spawn")))])
def test_a_program_runs_whatever_standard_streams_are_closed(closed, method, tmp_path):
    (tmp_path / "program.py").write_text("""
import sys, torch, globaltensor as gt
x = gt.from_full(torch.arange(4.), gt.placement("cpu", [0, 1]), gt.sbp.split(0))
with gt.record() as seen:
    total = x.sum().item()
print(x, seen, str(seen))
print(total, file=sys.stderr)
open(f"{sys.argv[1]}/{gt.rank()}", "w").write(str(total))
""")
    starter = [sys.executable] if method == "alone" else [*RUN, "-n", 2, "--start-method", method]
    code, out, err = run(["bash", "-c", f'exec "$@" {closed}', "bash", *starter, tmp_path / "program.py", tmp_path])
    assert code == 0, out + err
    written = [path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()]
    assert written == ["6.0"] * (1 if method == "alone" else 2)


def test_a_process_that_has_ended_takes_signals_until_it_is_waited_for():
    """As torch's agent takes for granted; so it must be with the forks of pytest --forks, too."""
    with subprocess.Popen([sys.executable, "-c", ""], env=environment(), start_new_session=True) as process:
        limit = time.monotonic() + 30
        while alive(process.pid):
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == 0
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.1)


@pytest.mark.long
def test_a_crash_restarts_the_job_with_new_forks(tmp_path):
    code, _, err = run([*RUN, "-n", 2, "--start-method", "fork", "--max-restarts", 1, PROGRAMS / "lifecycle.py",
                        tmp_path, 5, "KILL", 1, 4], timeout=120)
    assert code == 0 and "rank 1 was killed by SIGKILL" in err and "the program is started again" in err, err
    assert starts(tmp_path) == [(2, 0), (2, 3)] and sorted(losses(tmp_path)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_forked_ranks_end_with_their_launcher_and_so_does_what_forks_them(how):
    started = Started([*RUN, "-n", 2, "--start-method", "fork", FAILS, "waits"])
    ranks = [int(started.process.stdout.readline().split()[-1]) for _ in range(2)]
    pids = [*ranks, *map(int, _children(started.process.pid))]
    assert len(pids) == len({*pids}) + 2             # the ranks, again, and one that forks
    listed = subprocess.run([*RUN[:-1], "ps"], env=environment(), capture_output=True, text=True, timeout=60).stdout
    assert all(f"{pid}" in listed for pid in ranks) and listed.count("fails.py waits") >= 2, listed
    os.kill(started.process.pid, how)
    assert started.end(30)[0] == (-how if how == signal.SIGKILL else 128 + how)
    limit = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < limit, "somebody outlives the launcher"
        time.sleep(0.1)


_ADOPTED = """
import os, subprocess, sys, time
import globaltensor as gt
gt.init()
if gt.rank() == 0:
    subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"])           # the launcher adopts it
    time.sleep(2)
    with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
        states = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] for pid in file.read().split()]
    print("children:", *states)
"""


def test_what_the_launcher_adopts_is_no_zombie(tmp_path):
    (tmp_path / "adopted.py").write_text(_ADOPTED)
    code, out, err = run([*RUN, "-n", 2, "--start-method", "fork", tmp_path / "adopted.py"])
    states = re.search("children: (.+)", out)
    assert code == 0 and states is not None and len(states[1].split()) >= 2 and "Z" not in states[1], out + err


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_what_forks_cannot_begin(tmp_path):
    """Said as it is, and the job ends."""
    (tmp_path / "program.py").write_text("print('never')")
    (tmp_path / "torch.py").write_text("raise ImportError('another torch')")
    code, out, err = run([*RUN, "-n", 2, "--start-method", "fork", tmp_path / "program.py"])
    assert code == 1 and out == "" and "ImportError: another torch" in err, err
    assert "the ranks could not be started on this host\n  why: the process that forks them has ended" in err


# what a process does in place of a call of os -> what is said; S forks the process between, which forks the ranks
_DO_NOT_BEGIN = {
    "os.setsid = lambda: 1 / 0": "a rank could not begin: ZeroDivisionError: division by zero",
    "os.setsid = lambda: os._exit(3)": "a rank ended before it began, with code 3",
    "os.setsid = lambda: os.kill(os.getpid(), 9)": "a rank ended before it began, with code -9",
    "os.setsid = lambda: os.kill(os.getppid(), 9)": "the process that forks them has ended, with code -9",
    "S = os.getpid(); os.setsid = lambda f=os.setsid: (f(), os.kill(S, 9))":
        "the process that forks them has ended, with code -9",
    "os.fork = lambda: open('/dev/null/x')": "Not a directory",
    "S = os.getpid(); os.fork = lambda f=os.fork: f() if os.getpid() == S else open('/dev/null/x')": "Not a directory",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("does", _DO_NOT_BEGIN)
@pytest.mark.usefixtures("real_processes")           # those of pytest --forks have begun already
def test_nobody_waits_for_what_could_not_begin(does, tmp_path):
    """Each of these processes waits for another, which may fail, be killed, or not be forked: all end, and say why."""
    (tmp_path / "program.py").write_text("print('never')")
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nif 'fork_server' in str(sys.orig_argv):\n    {does}\n")
    env = environment()
    started = Started([*RUN, "-n", 2, "--start-method", "fork", tmp_path / "program.py"],
                      {**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"})
    code, out, err = started.end()
    assert code == 1 and "Traceback" not in err, out + err
    assert out == "" or "kill(S" in does             # it is not missed before the ranks go on
    assert "the ranks could not be started on this host\n  why: " in err and _DO_NOT_BEGIN[does] in err, err
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path).encode() in _words_of(pid)]


def _words_of(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:                                  # it has ended
        return b""


@pytest.mark.parametrize("begins", [
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    # there is no GPU: what asks for one when Python starts leaves just this behind
    pytest.param("import torch; torch.cuda.is_initialized = lambda: True", marks=pytest.mark.long)])
@pytest.mark.usefixtures("real_processes")           # those of pytest --forks have begun already
def test_what_has_threads_or_cuda_is_not_forked(begins, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif 'fork_server' in str(sys.orig_argv):\n    {begins}\n")
    env = environment()
    code, out, err = run([*RUN, "-n", 2, "--start-method", "fork", FAILS, "raises"],
                         {**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"})
    assert code == 1 and out == "" and "what Python imports at its start has started CUDA or threads" in err, err
    assert "try: globaltensor run without --start-method" in err


def test_a_kernel_that_lets_nobody_adopt_is_named(monkeypatch):
    class Refuses:
        prctl = staticmethod(lambda *_: ctypes.set_errno(errno.EINVAL) or -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refuses)
    with pytest.raises(Problem, match="does not let this process adopt them .Invalid argument"):
        ForkServer([FAILS])


def test_what_torch_s_agent_asks_of_a_rank():
    ends, waits = (subprocess.Popen([sys.executable, "-S", "-c", text]) for text in
                   ("import sys; sys.exit(3)", "import time; time.sleep(60)"))
    rank, other = ForkedRank(ends.pid), ForkedRank(waits.pid)
    assert rank.wait(30) == 3 == rank.poll() == rank.returncode
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    assert other.poll() is None
    os.kill(other.pid, signal.SIGTERM)
    assert other.wait(30) == -signal.SIGTERM
    ends.returncode = waits.returncode = 0           # they are reaped
