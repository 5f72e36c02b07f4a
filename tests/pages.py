"""Follows pages as a new user does: an empty environment, a wheel, and the programs and commands that the pages show.

    python tests/pages.py dist/globaltensor-*.whl README.md docs/install.md docs/guide.md docs/learn/*.md

The environment has torch already, from the one that runs this. What is printed is timed: the install, the first global
tensor, and every page. The exit code is 1 where a program prints something else than its page says.

Pages of docs/start and docs/how-to are followed block by block, in one folder:

    ```python   a program. If its first line is `# NAME.py`, it is saved under that name; else it runs at once
    ```sh       commands, which run
    ```text     what the block above prints; `...` stands for anything
    ```shell, ```py and all others are only to be read
"""
from __future__ import annotations

import doctest
import itertools
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from builder.notebooks import cells

FROM_A_CHECKOUT = ("pip ", "make", "git ", "sudo ")  # what has been done, or needs more than a wheel
FOLLOWED = ("start", "how-to")                       # folders of pages that are followed block by block
NAMED = re.compile(r"# ([\w-]+\.py)\n")
PLAIN = re.compile(r"(globaltensor|python) [^|&;<>$]*")  # a command that needs no shell
ELSEWHERE = ("host0", "srun", "sbatch", "kubectl", "ray ", "program.py", "s3://", "HOST", "...")


class Followed:
    """An environment with the wheel, and how long each step took."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        venv.create(folder / "venv", with_pip=True)
        site = next((folder / "venv").glob("lib/python*/site-packages"))
        (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
        self.bin = folder / "venv" / "bin"
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        dropped = ("PYTHONPATH", "CC", "CXX", "GLOBALTENSOR_NATIVE", "TEST_FORKS")
        self.env = {name: value for name, value in os.environ.items() if name not in dropped}
        self.env |= {"PATH": path, "OMP_NUM_THREADS": "1"}
        self.timed("install", [self.bin / "python", "-m", "pip", "install", "-q", wheel], folder)

    def timed(self, what: str, command: list[object], cwd: Path) -> subprocess.CompletedProcess[str]:
        begin = time.perf_counter()
        done = subprocess.run([str(word) for word in command], cwd=cwd, env=self.env, capture_output=True, text=True,
                              timeout=600)
        self.seconds[what] = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(f"{what}: exit code {done.returncode}\n{' '.join(map(str, command))}\n{done.stdout}"
                             f"{done.stderr}")
        return done

    def page(self, page: Path) -> list[str]:
        """Run what a page shows, in its order, the cells of a notebook as one program; what was not as it says."""
        wrong, here = [], Path(tempfile.mkdtemp(dir=self.folder))
        if is_followed(page):
            begin = time.perf_counter()
            wrong = follow(page, here, self.bin, self.env)
            self.seconds[page.name] = time.perf_counter() - begin
            return wrong
        if notebook := "\n".join(cell.code for cell in cells(page.read_text())):
            (here / "program.py").write_text(notebook)
            self.timed(page.name, [self.bin / "python", "program.py"], here)
        for number, (kind, text, expected) in enumerate(blocks(page.read_text())):
            name = f"{page.name}, block {number}"
            if kind == "python":
                (here / "program.py").write_text(text)
                done = self.timed(name, [self.bin / "python", "program.py"], here)
                if done.stdout != expected:
                    wrong.append(f"{name} printed\n{done.stdout}and the page says\n{expected}")
            elif kind == "sh" and (script := commands(text)):
                self.timed(name, ["bash", "-euo", "pipefail", "-c", script], here)
        return wrong


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Kind, text, and the output that the page shows below."""
    found = [*re.findall(r"```(\w+)\n(.*?)```", text, re.S), ("", "")]
    return [(kind, text, after if next_kind == "text" else "") for (kind, text), (next_kind, after) in
            itertools.pairwise(found)]


def is_followed(page: Path) -> bool:
    return page.parent.name in FOLLOWED and page.parent.parent.name == "docs"


def follow(page: Path, here: Path, programs: Path, env: dict[str, str]) -> list[str]:
    """Do what a page of FOLLOWED says, in the folder `here`; what was not as it says."""
    wrong, same = [], doctest.OutputChecker().check_output
    for number, (kind, text, expected) in enumerate(blocks(page.read_text())):
        named = NAMED.match(text)
        if kind == "python" and named:
            (here / named[1]).write_text(text)
            continue
        if kind == "python":
            (here / "program.py").write_text(text)
            code, printed = run_lines("python program.py", here, programs, env)
        elif kind == "sh":
            code, printed = run_lines(text, here, programs, env)
        else:
            continue
        if not same(expected, printed, doctest.ELLIPSIS) if expected else code:
            wrong.append(f"{page.name}, block {number} ended with code {code} and printed\n{printed}"
                         f"and the page says\n{expected}")
    return wrong


def run_lines(script: str, here: Path, programs: Path, env: dict[str, str]) -> tuple[int, str]:
    """The last exit code, and what was printed. Commands that need no shell are started without one: what the tests
    start so is forked from a process that has imported torch (forks.py)."""
    env = {**env, "PATH": os.pathsep.join([str(programs), env["PATH"]])}
    lines = re.sub(r"\s*\\\n\s*", " ", re.sub(r"(?m)\s+# .*$", "", script)).splitlines()
    plain = all(PLAIN.fullmatch(line) for line in lines)
    commands = [[str(programs / line.split()[0]), *shlex.split(line)[1:]] for line in lines] if plain else [
        ["bash", "-euo", "pipefail", "-c", script]]
    printed, code = "", 0
    for command in commands:
        done = subprocess.run(command, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=300)
        printed, code = printed + done.stdout, done.returncode
    return code, printed


def commands(text: str) -> str:
    """What can be typed here of a block of shell: all that belongs to a project which it makes. Other blocks name files
    of the reader's own."""
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", *FROM_A_CHECKOUT))
             and not any(word in line for word in ELSEWHERE)]
    made = any(line.startswith("globaltensor new ") for line in lines)
    return "\n".join(lines) if made else ""


def main(wheel: Path, pages: list[Path]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        followed = Followed(Path(folder), wheel)
        wrong = [line for page in pages for line in followed.page(page)]
    for what, seconds in followed.seconds.items():
        print(f"{seconds:7.1f} s  {what}")
    first = next(seconds for what, seconds in followed.seconds.items() if what != "install")
    print(f"{followed.seconds['install'] + first:7.1f} s  from a wheel to the first global tensor")
    print("\n".join(wrong) or "all printed what the pages say")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), [Path(word) for word in sys.argv[2:]]))
