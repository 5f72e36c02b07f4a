"""What a rank of `globaltensor run` leaves when it ends, whatever its program has done to the process."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from harness import RUN, Started, environment

from globaltensor.cli import worker

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("real_processes")]

CHANGES = {                                          # of the program -> is a note left?
    "pass": True,
    "os.environ.clear()": True,
    "os.chdir('/')": True,
    "shutil.rmtree(os.environ['GLOBALTENSOR_RUN_FOLDER'])": False,
    "os.chmod(os.environ['GLOBALTENSOR_RUN_FOLDER'], 0o500)": os.geteuid() == 0,     # root may write anywhere
    "sys.stdout.close()": True,
    "sys.stdout = None": True,
    "os.close(1)": True,
    "sys.stderr = None": True,
    "sys.stderr = type('Own', (), {'flush': lambda self: None})()": True,
    "sys.excepthook = None": True,
}
ENDINGS = {                                          # of the program -> exit code, note, what stderr ends with
    "pass": (0, {"error": "", "code": 0}, ""),
    "sys.exit(3)": (3, {"error": "exit code 3", "code": 3}, ""),
    "sys.exit(-1)": (255, {"error": "exit code -1", "code": 255}, ""),
    "sys.exit(256)": (0, {"error": "exit code 256", "code": 0}, ""),
    "sys.exit('why')": (1, {"error": "why", "code": 1}, "rank 1:\nwhy\n"),
    "raise ValueError('mine')": (1, {"error": "ValueError: mine", "code": 1}, "ValueError: mine\n"),
    "os.fork() or sys.exit(3)\nos.wait()": (0, {"error": "", "code": 0}, ""),      # what it forks is no rank
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)": (130, {"error": "KeyboardInterrupt", "code": 130}, ""),
}


def rank(folder, text):
    """Exit code and errors of a rank that runs this program, and its note, if there is one."""
    (folder / "shared").mkdir()
    (folder / "program.py").write_text(f"import os, shutil, signal, sys, time\n{text}\n")
    done = subprocess.run([sys.executable, worker.__file__, "program.py"], cwd=folder, capture_output=True, text=True,
                          env=environment(RANK="1", **{worker.FOLDER: str(folder / "shared")}), timeout=60)
    note = folder / "shared" / "1.json"
    return done.returncode, done.stderr, json.loads(note.read_text()) if note.exists() else None


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_ends_as_its_program_does_and_says_how(ending, tmp_path):
    code, err, note = rank(tmp_path, ending)
    expected, words, shown = ENDINGS[ending]
    assert (code, note) == (expected, words), err
    assert err.endswith(shown) and (shown or not err), err


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ending", ["pass", "raise ValueError('mine')"])
def test_a_program_that_changes_its_process_ends_as_well_as_without(ending, change, tmp_path):
    code, err, note = rank(tmp_path, f"{change}\n{ending}")
    expected, words, _ = ENDINGS[ending]
    assert code == expected and note == (words if CHANGES[change] else None), err
    assert ('program.py", line 3' in err and err.endswith("ValueError: mine\n")) == bool(code), err
    assert "worker.py" not in err, err


AT_LAST = """Traceback (most recent call last):
  File "{folder}/program.py", line 12, in <module>
    raise ValueError("mine")
ValueError: mine
"""
HOOKS = {                                            # what a hook does -> exit code, what stderr ends with
    "pass": (1, "hook 1\n"),
    "sys.exit(7)": (7, "hook 1\n"),
    "before(kind, error, at)": (1, f"hook 1\nrank 1:\n{AT_LAST}"),
    "1 / 0": (1, f"ZeroDivisionError: division by zero\n\nOriginal exception was:\n{AT_LAST}"),
}
WITH_HOOK = """
import io, traceback
def hook(kind, error, at):
    print("hook", len([*traceback.walk_tb(at)]), file=sys.__stderr__)
    {does}
def as_torch_does(*error):
    before, sys.stderr = sys.stderr, io.StringIO()
    try: wrapped(*error)
    finally: sys.stderr = before
before, sys.excepthook = sys.excepthook, hook
{wraps}
raise ValueError("mine")
"""


@pytest.mark.parametrize("does", HOOKS)
@pytest.mark.parametrize("wraps", ["", "wrapped, sys.excepthook = sys.excepthook, as_torch_does"])
def test_a_hook_of_the_program_shows_its_errors(does, wraps, tmp_path):
    """It gets the program's lines alone, and may leave the rest to ours."""
    code, err, note = rank(tmp_path, WITH_HOOK.format(does=does, wraps=wraps).strip())
    expected, shown = HOOKS[does]
    assert code == expected and err.endswith(shown.format(folder=tmp_path)) and err.startswith("hook 1\n"), err
    assert note == {"error": "ValueError: mine", "code": code}


@pytest.mark.parametrize("change", ["sys.stderr.close()", "os.close(2)"])
def test_where_nothing_can_be_shown_the_launcher_is_still_told(change, tmp_path):
    assert rank(tmp_path, f"{change}\nraise ValueError('mine')") == (1, "", ENDINGS["raise ValueError('mine')"][1])


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL if os.environ["RANK"] == "1" else signal.SIG_IGN)
print(os.environ["RANK"], os.getpid(), flush=True)
time.sleep(100)
"""


def test_a_signal_of_another_is_the_cause_and_those_that_do_not_end_are_killed_in_the_time_given(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    started = Started([*RUN, "-n", 2, "--grace", 2, tmp_path / "waits.py"])
    pids = dict(started.process.stdout.readline().split() for _ in range(2))
    os.kill(int(pids["1"]), signal.SIGTERM)
    began = time.monotonic()
    code, _, err = started.end()
    assert code == 128 + signal.SIGTERM and 1.5 < time.monotonic() - began < 20, err
    assert re.fullmatch("globaltensor: rank 1 was killed by SIGTERM, which this launcher did not send\n"
                        "globaltensor: rank 0 ended with it, by SIGKILL, after the time that --grace gives\n", err), err
