"""macOS and Windows, simulated: what Python and the system lack there is taken away, and native code is off.

Nothing of this has run on a real macOS or Windows. What is tested is that the package asks for nothing that is not
there, that one process drives eight ranks with the right results, and that what cannot work says so.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, ROOT, environment

ELSEWHERE = PROGRAMS / "elsewhere.py"


def elsewhere(platform: str, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ELSEWHERE), platform, *map(str, command)], capture_output=True,
                          text=True, timeout=240, env=environment(GLOBALTENSOR_NATIVE="0", **env), cwd=ROOT)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """The command line as a program, of which the platform is given first."""
    program = tmp_path / "commands.py"
    program.write_text("import sys\nfrom globaltensor.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    return program


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_one_process_drives_eight_ranks(platform):
    done = elsewhere(platform, PROGRAMS / "eight_ranks.py")
    assert done.returncode == 0 and done.stdout.endswith("all of it works\n"), done.stdout + done.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_first_program_prints_what_the_readme_says(platform, tmp_path):
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1]
    code, output = blocks.partition("```\n```text\n")[::2]
    (tmp_path / "first.py").write_text(code)
    done = elsewhere(platform, tmp_path / "first.py")
    assert done.returncode == 0 and done.stdout == output.partition("```")[0], done.stdout + done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("platform, words, code, text", [
    ("darwin", "ps", 1, "this system has no /proc"), ("win32", "ps", 1, "this system has no /proc"),
    ("win32", "stacks", 1, "this system has no /proc"),
    ("win32", "run -n 2 train.py", 1, "try: python train.py, one process that drives all ranks"),
    ("darwin", "doctor", 0, "none between processes on"), ("win32", "doctor", 0, "none between processes on"),
    ("darwin", "info", 0, "because"), ("win32", "info", 0, "not told by this system"),
    ("win32", "memory --params 1e9", 0, "16 GB"), ("win32", "bench --list", 0, "dispatch"),
])
def test_commands_work_or_say_what_is_missing(platform, words, code, text, commands):
    done = elsewhere(platform, commands, *words.split())
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stdout + done.stderr
    assert text in " ".join((done.stdout + done.stderr).split())


def test_the_simulation_takes_away_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, signal, socket, sys\n"
                       "missing = [not hasattr(os, 'memfd_create'), not hasattr(os, 'fork'),\n"
                       "           not hasattr(os, 'getuid'), not hasattr(signal, 'SIGUSR1'),\n"
                       "           not hasattr(socket, 'AF_UNIX'),\n"
                       "           not os.path.exists('/proc/self/status'), sys.platform == 'win32']\n"
                       "try:\n    import fcntl\n    missing.append(False)\nexcept ImportError:\n    pass\n"
                       "print(all(missing), len(missing))\n")
    assert elsewhere("win32", program).stdout == "True 7\n"
    assert os.path.exists("/proc") or sys.platform != "linux"
