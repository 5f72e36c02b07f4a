"""The pages of docs/coming-from/: their programs before and after train alike.

Every page has a table, a program of the other side (`py`), the same here (`python`), and what the other side does
better. The program of the other side and ours print the losses that the page shows. In one process ours is run by
test_readme.py, as every program of the docs is; here it runs with a process per rank.
"""
from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, ROOT, RUN, TORCHRUN, environment, good

FOLDER = ROOT / "docs" / "coming-from"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SECTIONS = ["Side by side", "Before", "After", "What it does better"]


@dataclass(frozen=True)
class OtherSide:
    """What runs the program of the other side.

    package   that it imports
    command   that starts it, before the program's name
    needs     what it needs beyond the package, which this machine may lack; "": nothing
    """
    package: str
    command: list
    needs: str = ""


TWO = [*TORCHRUN, "--nproc-per-node", 2]
SIDES = {
    "ddp": OtherSide("torch", TWO),
    "fsdp2": OtherSide("torch", TWO),
    "dtensor": OtherSide("torch", TWO),
    "megatron": OtherSide("megatron", TWO),
    "deepspeed": OtherSide("deepspeed", TWO),
    "horovod": OtherSide("horovod", ["horovodrun", "-np", 2, PYTHON]),
    "tensorflow": OtherSide("tensorflow", [PYTHON]),
    "colossalai": OtherSide("colossalai", TWO, "cuda"),
    "alpa": OtherSide("alpa", [PYTHON], "cuda"),
    "oneflow": OtherSide("oneflow", [PYTHON, "-m", "oneflow.distributed.launch", "--nproc_per_node", 2]),
    "jax": OtherSide("jax", [PYTHON]),
}
QUICK = {"ddp"}      # ours, with a process per rank, in `make test`


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


def block(name: str, section: str, kind: str) -> str:
    """The first block of that kind in a section."""
    text = page(name).split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.search(rf"```{kind}\n(.*?)```", text, re.S).group(1)


def losses(text: str) -> list[float]:
    """The lines that are a number: some libraries log to the same stream."""
    return [float(line) for line in re.findall(r"(?m)^\d+\.\d{4}$", text)]


def prints_the_losses(name: str, output: str) -> None:
    expected = losses(block(name, "After", "text"))
    assert len(expected) >= 4 and expected[-1] < expected[0]
    assert losses(output) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", SIDES)
def test_a_page_has_its_parts(name):
    assert re.findall(r"(?m)^## (.*)", page(name))[:4] == SECTIONS
    table = page(name).split("\n## Side by side\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 8 and all(len(re.split(r"(?<!\\)\|", row)) == 5 for row in rows), rows
    before, after = block(name, "Before", "py"), block(name, "After", "python")
    assert f"import {SIDES[name].package}" in before or f"from {SIDES[name].package}" in before
    assert "import globaltensor" in after and "import globaltensor" not in before
    ast.parse(before)
    assert page(name).split("\n## What it does better\n")[1].count("\n- ") >= 3


def test_every_page_is_tested():
    assert sorted(SIDES) == PAGES


@pytest.mark.processes
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
                                  for name in SIDES])
def test_ours_with_a_process_per_rank_prints_the_losses(name, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(block(name, "After", "python"))
    ranks, = set(re.findall(r"(?m)^globaltensor run -n (\d+) program.py$", page(name)))
    prints_the_losses(name, good([*RUN, "-n", ranks, program], timeout=120))


@pytest.mark.processes
@pytest.mark.parametrize("name", [name if name == "ddp" else pytest.param(name, marks=pytest.mark.long)
                                  for name in SIDES])
def test_the_other_side_prints_the_same(name, tmp_path):
    side = SIDES[name]
    if not importlib.util.find_spec(side.package):
        pytest.skip(f"{side.package} is not installed")
    if side.needs and not __import__("torch").cuda.is_available():
        pytest.skip(f"{side.package} needs a CUDA device")
    program = Path(tmp_path, "program.py")
    program.write_text(block(name, "Before", "py"))
    prints_the_losses(name, good([*side.command, program], environment(), timeout=300))


@pytest.mark.processes
def test_collectives_and_wrappers_of_torch_refuse_global_tensors():
    assert good([*RUN, "-n", 2, PROGRAMS / "torch_collectives.py"]).count("all is well") == 2
