"""What a stranger meets first: help that comes at once and fits the terminal, a project to start from, the doctor."""
from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import ROOT, environment, good

from globaltensor.cli import findings, main, new
from globaltensor.cli.completion import words_by_command
from globaltensor.cli.findings import Finding
from globaltensor.cli.options import OPTIONS, RECOMPUTED, SCHEDULES, byte_count
from globaltensor.runtime import progress as bars
from globaltensor.runtime.progress import progress
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import at_least_text, bytes_text, seconds_text
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.gpt import RECOMPUTE

COMMANDS = tuple(OPTIONS)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


# ------------------------------------------------------------------------------------------------------------ help


@pytest.mark.usefixtures("real_processes")
def test_no_help_and_no_completion_waits_for_torch():
    code = f"""
import contextlib, io, sys
from globaltensor_command import main
for line in [*([name, "--help"] for name in {COMMANDS}), ["completion", "bash"], ["bench", "--list"],
             ["recipe", "slurm", "a.py"], ["--version"]]:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main(line)
    assert text.getvalue().strip(), line
    heavy = {{"torch", "numpy", "scipy", "networkx", "rich", "matplotlib"}} & sys.modules.keys()
    assert not heavy, (line, heavy)
import globaltensor as gt
assert gt.__version__ and list(gt.placement("cpu", [3]).flat) == [3]     # the face comes when it is asked for
print("fine")"""
    assert good([sys.executable, "-c", code]).endswith("fine\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = said(capsys, *filter(None, [name]), "--help")
    wide = [line for line in out.splitlines() if len(line) > columns and " " in line.strip(" \\")]
    assert code == 0 and len(out.splitlines()) > 5 and not wide, wide


def test_words_of_the_help_are_those_of_the_library():
    """They are told a second time, as the library's are not to be had without torch."""
    assert tuple(GENERATORS) == SCHEDULES and RECOMPUTE == RECOMPUTED


def test_every_command_has_a_module_and_a_line_of_help():
    for name in COMMANDS:
        text = (ROOT / "globaltensor" / "cli" / f"{name}.py").read_text()
        assert re.match(r'"""[A-Z][^\n]+\.\n', text) and "\ndef command(" in text, name


def test_nothing_of_the_help_is_an_inside_word(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in COMMANDS:
        for action in re.findall(r"(?m)^  (--?\S+.*)$", said(capsys, name, "--help")[1]):
            assert not re.search(r"\bNone\b|\bTrue\b|\b[a-z]+_[a-z]+\(", action), (name, action)


# ----------------------------------------------------------------------------------------------- units and tables


@pytest.mark.parametrize("size, text", [
    (0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1536, "1.54 KB"), (999_499, "999 KB"), (999_600, "1 MB"),
    (12_900_000, "12.9 MB"), (80e9, "80 GB"), (1.2345e21, "1,234 EB")])
def test_sizes_have_one_style(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize("size, text", [
    (999, "999B"), (1000, "1KB"), (1001, "1.01KB"), (34_057_000_000, "34.1GB"), (34_100_000_000, "34.1GB"),
    (34_100_000_001, "34.2GB"), (99_990_000_000, "100GB"), (999_000_000_001, "1000GB"), (1.1e15, "1.1PB")])
def test_bytes_that_are_needed_are_told_as_the_option_takes_them(size, text):
    assert at_least_text(size) == text
    if "P" not in text:
        assert size <= byte_count(text) <= size * 1.01


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (3e-9, "3 ns"), (9.5e-7, "950 ns"), (1e-6, "1 us"), (0.00731, "7.31 ms"), (0.9999, "1 s"),
    (61.24, "61.2 s"), (3599, "3,599 s"), (3725.4, "1:02:05")])
def test_times_have_one_style(seconds, text):
    assert seconds_text(seconds) == text


def test_no_command_has_units_of_its_own():
    own = re.compile(r"\{[^{}]*/ ?(?:1e[36]9?|1e9|10 \*\* 9|2 \*\* ?30)[^{}]*\} ?(?:[KMG]i?B|ms|us)\b")
    for path in [*(ROOT / "globaltensor" / "cli").glob("*.py"), *(ROOT / "globaltensor" / "planner").glob("*.py")]:
        assert not own.findall(path.read_text()), path.name


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 200])
def test_tables_keep_to_the_terminal_and_lose_no_word(columns):
    rows = [("wrong", "native code", "it was not built: no compiler while it was installed"), ("ok", "torch", "2.13.0")]
    lines = aligned(rows, columns=columns)
    assert max(map(len, lines)) <= columns and "\n".join(lines).split() == " ".join(map(" ".join, rows)).split()
    assert (lines == aligned(rows)) == (columns == 200)


def test_a_file_gets_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal_columns() is None


# ------------------------------------------------------------------------------------------------------------ bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, now: list[float], **env: str) -> Iterator[Terminal]:
    """stderr is one, a clock goes as it is told, and bars appear where they would."""
    screen = Terminal()
    for name in ("RANK", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    yield screen


def test_a_bar_appears_for_long_work_and_leaves_nothing(monkeypatch):
    now = [0.0]
    with terminal(monkeypatch, now) as screen:
        with progress("saving", 100, "ranks") as advance:
            advance(10)
            assert screen.getvalue() == ""           # not yet a second
            now[0] = 1.5
            advance(20)
            assert "saving" in screen.getvalue() and "30/100" in screen.getvalue()
            now[0] = 1.55
            before = screen.getvalue()
            advance(1)
            assert screen.getvalue() == before       # ten pictures a second at most
        assert screen.getvalue().endswith(("\x1b[?25h", "\x1b[2K", "\x1b[1A\x1b[2K")), repr(screen.getvalue()[-40:])


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"TERM": "dumb"}, {"rich": "missing"}, {"stderr": "piped"}])
def test_no_bar_where_it_would_disturb(env, monkeypatch):
    now = [0.0]
    with terminal(monkeypatch, now, **env) as screen:
        if "rich" in env:
            monkeypatch.setattr(bars, "_has_rich", lambda: False)
        if "stderr" in env:
            monkeypatch.setattr(screen, "isatty", lambda: False)
        with progress("saving", 100, "bytes") as advance:
            now[0] = 9.0
            advance(50)
        assert screen.getvalue() == ""


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("piped", [False, True])
def test_a_long_simulation_shows_a_bar_on_a_terminal_only(piped):
    code = ("import globaltensor.runtime.progress as bars; bars._AFTER = 0.0\n"
            "from globaltensor.cli import main\n"
            "main('simulate --schedule 1f1b --stages 8 --micro-batches 64 --times 1,1,1,0 --json'.split())")
    ours, theirs = pty.openpty()
    env = {name: value for name, value in environment(TERM="xterm").items() if name != "RANK"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, timeout=120,
                          stderr=subprocess.PIPE if piped else theirs)
    os.close(theirs)
    assert done.returncode == 0 and json.loads(done.stdout)["ranks"] == 8
    if piped:
        assert done.stderr == b""
    else:
        assert b"simulating" in os.read(ours, 65536)
    os.close(ours)


# ------------------------------------------------------------------------------------------------- globaltensor new


def test_a_new_project_is_small_and_is_what_it_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "new", "my_project")
    assert code == 0 and out.splitlines()[-1].strip() == "python test_train.py"
    assert sorted(path.name for path in Path("my_project").iterdir()) == sorted(new.FILES)
    program = Path("my_project", "train.py").read_text()
    assert program.startswith('"""my_project: ') and len([line for line in program.splitlines() if line]) <= 40
    assert max(map(len, program.splitlines())) <= 120


def test_a_new_project_trains_and_its_test_passes(tmp_path, capsys):
    assert said(capsys, "new", str(tmp_path / "my_project"))[0] == 0
    folder = tmp_path / "my_project"
    checked = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder,
                             capture_output=True, text=True, timeout=240, env=environment())
    assert checked.returncode == 0 and "1 passed" in checked.stdout, checked.stdout + checked.stderr
    program = folder / "train.py"                    # the test is one: a program that learns something else fails it
    program.write_text(program.read_text().replace("gt.parallelize(network()", "gt.parallelize(network().double()"))
    failed = subprocess.run([sys.executable, "test_train.py"], cwd=folder, capture_output=True, text=True, timeout=120,
                            env=environment())
    assert failed.returncode == 1 and "Error" in failed.stderr, failed.stderr


@pytest.mark.long
@pytest.mark.processes
def test_a_new_project_runs_with_a_process_per_rank(tmp_path, capsys):
    assert said(capsys, "new", str(tmp_path / "my_project"))[0] == 0
    out = good([sys.executable, "-m", "globaltensor.cli", "run", "-n", "4", str(tmp_path / "my_project" / "train.py")])
    losses = [float(line.split()[-1]) for line in out.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0] / 10


@pytest.mark.parametrize("name, why", [
    ("3d", "'3d' is not a name for a project"), ("a b", "'a b' is not a name"),
    ("x.y", "try: globaltensor new {tmp}/x_y"),
    ("torch", "would hide\n  try: globaltensor new {tmp}/my_torch"), ("json", "name of a Python module"),
    ("full", "{tmp}/full is not empty\n  try: globaltensor new {tmp}/full_2"), ("file", "could not be written"),
    ("file/below", "could not be written")])
def test_folders_that_cannot_be_a_project_are_refused(name, why, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = said(capsys, "new", str(tmp_path / name))
    assert code in (1, 2) and not out and why.format(tmp=tmp_path) in err and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_becomes_a_project(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert said(capsys, "new", ".")[0] == 0 and Path("train.py").exists()
    assert said(capsys, "new", ".")[0] == 2


# ------------------------------------------------------------------------------------------------------------ JSON

# What each command prints with --json; or why it has none: its output is a program's, or a file for another program.
SIZES = "--model gpt --layers 2 --hidden 64 --heads 2 --seq 64 --vocab 256"
PRINTED = {
    "new": "new {tmp}/project --json", "ps": "ps --json", "stacks": "stacks --json", "info": "info --json",
    "doctor": "doctor --json", "bench": "bench --list --json", "memory": "memory --params 7B --json",
    "simulate": "simulate --schedule 1f1b --stages 2 --micro-batches 2 --times 1,1,1,0 --json",
    "plan": f"plan {SIZES} --devices 2 --global-batch 4 --json", "play": "play --export {tmp}/pages --json",
    "report": "report {tmp}/run.json --json", "calibrate": "calibrate {tmp}/rows.csv --json"}
OF_OTHERS = {"run": "the program's own", "recipe": "a script or manifest", "completion": "a script for a shell"}


def test_every_command_has_json_or_prints_what_another_program_reads():
    assert sorted([*PRINTED, *OF_OTHERS]) == sorted(COMMANDS)
    words = words_by_command()
    for name in COMMANDS:
        assert ("--json" in {word.text for word in words[name][1]}) == (name in PRINTED), name


def typed(line: str, folder: Path) -> list[str]:
    """Its words, once what they name is there."""
    import globaltensor as gt
    if line.startswith("report"):
        with gt.record(file=str(folder / "run.json")):
            gt.ones(2, placement=gt.placement("cpu", [0, 1]), sbp="S(0)").sum().item()
    rows = (ROOT / "tests" / "data" / "measured_plans.csv").read_text().splitlines()
    (folder / "rows.csv").write_text("\n".join(rows[:20]))
    return line.format(tmp=folder).split()


@pytest.mark.parametrize("name", PRINTED)
def test_a_command_prints_json_and_nothing_else(name, tmp_path, capsys):
    code, out, err = said(capsys, *typed(PRINTED[name], tmp_path))
    assert isinstance(json.loads(out), dict | list) and err == "" and code in ((0, 1) if name == "doctor" else (0,))


FULL = [*PRINTED.values(), *(line.removesuffix(" --json") for line in PRINTED.values()),
        *(f"{name} --help" for name in COMMANDS), "", "--help", "--version", "simulate --list", "bench --list",
        "completion bash", "recipe slurm train.py", "recipe k8s train.py"]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("line", FULL)
def test_a_command_says_in_a_line_that_its_output_cannot_be_written(line, buffered, tmp_path, capsys, monkeypatch):
    """Be it seen by print or when all is written; once that is said, Python does not try again when it ends."""
    words = typed(line, tmp_path)
    with open("/dev/full", "w") as full:
        full.reconfigure(write_through=not buffered)
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = said(capsys, *words)
        monkeypatch.undo()
    own = [each for each in err.splitlines() if not each.startswith(("before: ", "now: "))]  # calibrate, of its fit
    assert code == 1 and own == ["globaltensor: the output could not be written: No space left on device"], err


@pytest.mark.usefixtures("real_processes")
def test_a_full_disk_in_a_process_of_its_own():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "globaltensor", "--help"], stdout=full, stderr=subprocess.PIPE,
                              text=True)
    assert (done.returncode, done.stderr) == (
        1, "globaltensor: the output could not be written: No space left on device\n")


@pytest.mark.usefixtures("real_processes")
def test_ctrl_c_while_the_package_is_imported_is_said_in_a_line(tmp_path):
    """By `python -m globaltensor`, which imports torch before the command begins."""
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, "-m", "globaltensor", "info"], env=env, capture_output=True, text=True,
                          cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "globaltensor: ended by SIGINT\n")


# What a shell starts begins without the public names, which whoever calls the command in a test has imported already.
COMPUTES = [PRINTED[name] for name in ("calibrate", "doctor", "memory", "plan", "play", "report", "simulate")]
COMPUTES += ["plan --program {tmp}/train.py:build --devices 2"]
PROGRAM = """
import torch

def build():
    return torch.nn.Linear(8, 8), torch.randn(4, 8), lambda y: y.sum()
"""


@pytest.mark.long
@pytest.mark.usefixtures("real_processes")
def test_a_command_that_computes_works_in_a_process_of_its_own(tmp_path):
    import globaltensor as gt
    with gt.record(file=str(tmp_path / "run.json")):
        gt.ones(2, placement=gt.placement("cpu", [0, 1]), sbp="S(0)").sum().item()
    rows = (ROOT / "tests" / "data" / "measured_plans.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text("\n".join(rows[:20]))
    (tmp_path / "train.py").write_text(PROGRAM)
    code, failed = "import sys, globaltensor_command as c; sys.exit(c.main())", []
    for first in range(0, len(COMPUTES), 2):          # as many at once as there are cores
        pair = COMPUTES[first:first + 2]
        together = [subprocess.Popen([sys.executable, "-c", code, *line.format(tmp=tmp_path).split()],
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
                    for line in pair]
        for line, process in zip(pair, together):
            errors = process.communicate(timeout=120)[1]
            if process.returncode not in ((0, 1) if line.startswith("doctor") else (0,)):
                failed.append(f"{line}: exit {process.returncode}\n{errors}")
    assert not failed, "\n".join(failed)


# ------------------------------------------------------------------------------------------------------ completion


def test_completion_knows_every_command_and_option_that_the_help_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = words_by_command()
    assert [*filter(None, words)] == [*COMMANDS]
    for name in COMMANDS:
        shown = set(re.findall(r"(?m)^  (?:-\w(?: \w+)?, )?(--[\w-]+)", said(capsys, name, "--help")[1]))
        assert shown and shown <= {word.text for word in words[name][1]}, name


def completed(line: str) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    command = f"{sys.executable} -c 'import globaltensor_command as c; c.main([\"completion\", \"bash\"])'"
    script = (f"eval \"$({command})\"\n"
              f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}\n"
              "_globaltensor; printf '%s\\n' \"${COMPREPLY[@]}\"")
    return set(subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True,
                              env=environment()).stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("line, offered", [
    ("globaltensor ", {*COMMANDS, "-h", "--help", "--version"}), ("globaltensor si", {"simulate"}),
    ("globaltensor plan --glo", {"--global-batch"}), ("globaltensor recipe ", None),
    ("globaltensor plan --schedule zb", {"zb-h1", "zb-h2", "zb-v"}), ("globaltensor completion f", {"fish"})])
def test_bash_completes(line, offered):
    found = completed(line)
    assert found == offered if offered is not None else {"k8s", "ray", "slurm", "--nodes"} <= found


LINES = [("globaltensor plan --glo", "--global-batch"), ("globaltensor plan --schedule interl", "interleaved"),
         ("globaltensor simu", "simulate"), ("globaltensor completion f", "fish")]


def completions(tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: str) -> Path:
    script = tmp_path / "script"
    script.write_text(said(capsys, "completion", shell)[1])
    return script


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
@pytest.mark.parametrize("line, word", LINES)
def test_fish_completes(line, word, tmp_path, capsys):
    script = completions(tmp_path, capsys, "fish")
    out = subprocess.run(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"], capture_output=True,
                         text=True, timeout=60, check=True, env={**os.environ, "HOME": str(tmp_path)}).stdout
    assert word in [row.split("\t")[0] for row in out.splitlines()], out


@pytest.mark.long
@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_completes(tmp_path, capsys):
    """In a terminal, as zsh completes nowhere else: a line is typed, with a tab, and the rest of the word appears."""
    script = completions(tmp_path, capsys, "zsh")
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
                             env={**os.environ, "HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"})
    os.close(theirs)

    def typed(text: str, until: str) -> str:
        os.write(ours, text.encode())
        seen, end = "", time.monotonic() + 60
        while until not in seen and time.monotonic() < end and select.select([ours], [], [], 1)[0] is not None:
            if select.select([ours], [], [], 0)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
        return seen

    try:
        typed("PS1='> '; autoload -Uz compinit && compinit -u -D; "
              f"source {script}; echo rea''dy\n", "ready")
        for line, word in LINES:
            rest = word.removeprefix(line.rpartition(" ")[2])[:4]
            assert rest in (seen := typed(f"{line}\t", rest)), (line, seen)
            typed("\x15", "")                        # clears the line
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


@pytest.mark.parametrize("shell, checks", [("zsh", ["-n"]), ("fish", ["--no-execute"]), ("bash", ["-n"])])
def test_scripts_are_of_their_shell(shell, checks, tmp_path, capsys):
    code, out, _ = said(capsys, "completion", shell)
    assert code == 0 and all(name in out for name in COMMANDS) and "--global-batch" in out.replace("-l ", "--")
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        subprocess.run([shell, *checks, str(tmp_path / "script")], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------------- doctor


def named(name: str, checks: Iterator[Finding] | Finding) -> Finding:
    return checks if isinstance(checks, Finding) else next(one for one in checks if one.name == name)


def refuse(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


SPOILED = [
    ("Python", findings._python, lambda m: m.setattr(findings.sys, "version_info", (3, 19)), "warning", "Python 3.13"),
    ("Python", findings._python, lambda m: m.setattr(findings.sys, "platform", "darwin"), "warning", "Linux"),
    ("torch", findings._torch, lambda m: m.setattr(findings.torch, "__version__", "2.4.1"), "wrong", "<2.15'"),
    ("torch", findings._torch, lambda m: m.setattr(findings.dist, "is_gloo_available", bool), "warning", "build"),
    ("native code", findings._native_code, lambda m: (m.setattr(findings.native, "WANTED", True), m.setattr(
        findings.native, "why_slow", lambda: "it was not built")), "wrong", "pip install"),
    ("native code", findings._native_code, lambda m: (m.setattr(findings.native, "WANTED", False), m.setattr(
        findings.native, "why_slow", lambda: "turned off")), "ok", ""),
    ("compiler", findings._compiler, lambda m: m.setenv("CXX", "/nowhere/c++"), "ok", ""),
    ("shared memory", findings._shared_memory, lambda m: m.delattr(os, "memfd_create"), "warning", "one process"),
    ("shared memory", findings._shared_memory, lambda m: m.delattr(socket, "AF_UNIX"), "warning", "one process"),
    ("shared memory", findings._shared_memory, lambda m: m.setattr(os, "memfd_create", refuse), "wrong", "sandbox"),
    ("/dev/shm", findings._temporary_memory, lambda m: m.setattr(os, "statvfs", lambda _: SimpleNamespace(
        f_frsize=4096, f_blocks=16384, f_bavail=16000)), "warning", "--shm-size"),
    ("open files", findings._limits, lambda m: m.setattr("resource.getrlimit", lambda _: (256, 256)), "warning",
     "ulimit -n"),
    ("locked memory", findings._limits, lambda m: (m.setattr("resource.getrlimit", lambda _: (65536, 65536)), m.setattr(
        findings, "accelerator_count", lambda: 1)), "warning", "ulimit -l"),
    ("host name", findings._host_name, lambda m: m.setattr(socket, "getaddrinfo", refuse), "warning",
     "--local-addr"),
]


@pytest.mark.parametrize("name, check, spoil, status, fix", SPOILED)
def test_the_doctor_sees_what_is_amiss(name, check, spoil, status, fix, monkeypatch):
    assert named(name, check()).status in ("ok", "warning")          # of this host as it is
    spoil(monkeypatch)
    found = named(name, check())
    assert found.status == status and found.state and fix in found.fix and bool(found.fix) == (status != "ok")


def test_the_doctor_sees_that_a_port_is_taken():
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("", findings.MEETING_PORT))
            taken.listen()
        found = findings._ports()
    assert (found.status, found.fix[:15]) == ("warning", "--rdzv-endpoint")


@pytest.mark.parametrize("statuses, code", [(["ok"], 0), (["ok", "warning"], 0), (["warning", "wrong"], 1)])
def test_the_doctor_s_exit_code_and_lines(statuses, code, capsys, monkeypatch):
    several = [Finding(f"thing {n}", "state", status, "" if status == "ok" else "type this")
               for n, status in enumerate(statuses)]
    monkeypatch.setattr(findings, "all_findings", lambda: several)
    assert said(capsys, "doctor", "--json") == (code, json.dumps({one.name: {
        "status": one.status, "state": one.state, "try": one.fix} for one in several}, indent=2) + "\n", "")
    out = said(capsys, "doctor")[1]
    assert out.count("try:   type this") == len([s for s in statuses if s != "ok"])
    assert ("all is well" in out) == (statuses == ["ok"])


@pytest.mark.processes
def test_the_doctor_compares_ranks(tmp_path):
    """Two ranks, of which one has another numpy."""
    (tmp_path / "check.py").write_text("import os, sys\nimport numpy\nif os.environ['RANK'] == '1':\n"
                                       "    numpy.__version__ = '1.0'\n"
                                       "from globaltensor.cli import main\nsys.exit(main(['doctor', '--json']))\n")
    command = [sys.executable, "-m", "globaltensor.cli", "run", "-n", "2"]
    done = subprocess.run([*command, str(tmp_path / "check.py")], capture_output=True, text=True, timeout=120,
                          env=environment())
    found = json.loads(done.stdout)
    different = [name for name in found if name.startswith("numpy of rank 1")]
    assert done.returncode == 1 and found["hosts"]["state"].startswith("2 ranks on 1 host, they differ")
    assert len(different) == 1 and found[different[0]]["status"] == "wrong" and "1.0; rank 0 has" in found[
        different[0]]["state"]


@pytest.mark.usefixtures("real_processes")
@pytest.mark.long
def test_help_answers_in_three_tenths_of_a_second():
    """The best of several tries: a test shares its machine."""
    for words in [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]:
        best = 9.0
        for _ in range(10):
            begin = time.perf_counter()
            good([sys.executable, "-c", "import sys, globaltensor_command as c; sys.exit(c.main())", *words])
            best = min(best, time.perf_counter() - begin)
        assert best < 0.3, (words, best)
