"""What is installed: an sdist that all can be built from, a wheel that can do what a checkout does, one version.

Nothing is compiled or downloaded: setuptools is asked without torch, as in an isolated build, and without a compiler.
"""
from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, environment

import globaltensor

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py']\n"
SDIST = WITHOUT_TORCH + """
from distutils.core import run_setup
setup = run_setup("setup.py", stop_after="init")
setup.parse_config_files()
command = setup.get_command_obj("egg_info")
command.egg_base = EGG_BASE
command.ensure_finalized()
command.run()
print(*command.filelist.files, sep="\\n", file=open(f"{EGG_BASE}/files", "w"))
"""
BUILD = WITHOUT_TORCH + "from setuptools import build_meta; build_meta.build_{kind}({to!r})"
CARRIED = {"csrc": "*.*", "globaltensor": "*.py", "tests": "*.*", "benchmarks": "*.*", "examples": "*.py",
           "docs": "*.md"}
NOT_CARRIED = {".pyc", ".so"}
TOP = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
       "SECURITY.md", "pyproject.toml", "setup.py", "globaltensor/py.typed"]


def python(code: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd,
                          env=environment(CC="false", CXX="false"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> list[str]:
    """The files of an sdist, as setuptools lists them."""
    folder = tmp_path_factory.mktemp("sdist")
    python(f"EGG_BASE = {str(folder)!r}\n" + SDIST, ROOT)
    lines = (folder / "files").read_text().splitlines()
    return [line.removeprefix("./") for line in lines if not line.startswith(str(folder))]


def wanted() -> set[str]:
    files = [path for folder, pattern in CARRIED.items() for path in (ROOT / folder).rglob(pattern)
             if path.is_file() and path.suffix not in NOT_CARRIED]
    return {*TOP, *(str(path.relative_to(ROOT)) for path in files)}


def test_an_sdist_has_all_that_a_build_and_the_tests_need(sdist):
    assert wanted() <= set(sdist), sorted(wanted() - set(sdist))


def test_an_sdist_has_nothing_that_was_built(sdist):
    assert not [file for file in sdist if file.endswith((".so", ".pyc")) or file.startswith(("build/", ".venv/"))]


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """A copy of what an sdist carries."""
    folder = tmp_path_factory.mktemp("unpacked")
    for file in sdist:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    return folder


@pytest.fixture(scope="module")
def installed(unpacked, tmp_path_factory) -> Path:
    """A folder like site-packages, with the package as pip would put it there."""
    folder = tmp_path_factory.mktemp("site")
    python(BUILD.format(kind="wheel", to=str(folder)), unpacked)
    wheel, = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def ran(installed: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=installed,
                          env=environment(PYTHONPATH=str(installed), GLOBALTENSOR_NATIVE="0"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_benchmarks_run_from_an_installed_package(installed):
    listed = ran(installed, "-m", "globaltensor.cli", "bench", "--list").splitlines()
    ours = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if re.search(r"(?m)^def main\(", path.read_text())]
    assert [line.split()[0] for line in listed] == sorted({*ours} - {"device"})     # that one compiles csrc/
    found = json.loads(ran(installed, "-m", "globaltensor.cli", "bench", "startup", "--quick", "--json"))
    assert [row["import"] for row in found["rows"]] == ["torch", "globaltensor, after torch"]


def test_a_package_without_its_native_code_says_so_at_the_users_line(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import globaltensor as gt\nP = gt.placement('cpu', [0, 1])\ngt.placement('cpu', [0])\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env=environment(PYTHONPATH=str(installed)))
    assert done.returncode == 0 and done.stderr.startswith("program.py:2: UserWarning: globaltensor runs without")
    assert done.stderr.count("pip install --no-build-isolation -e ") == 1


def test_every_installed_benchmark_finds_what_it_imports(installed):
    bundled = installed / "globaltensor" / "bundled"
    modules = [f"benchmarks.{path.stem}" for path in sorted((bundled / "benchmarks").glob("*.py"))]
    ran(installed, "-c", f"import sys; sys.path.insert(0, {str(bundled)!r})\nfor m in {modules}: __import__(m)")


def test_an_editable_install_is_a_path_that_type_checkers_can_read(unpacked, tmp_path):
    python(BUILD.format(kind="editable", to=str(tmp_path)), unpacked)
    wheel, = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        pth, = (name for name in file.namelist() if name.endswith(".pth"))
        assert file.read(pth).decode().split() == [str(unpacked)]
        assert not [name for name in file.namelist() if "finder" in name or "bundled" in name]


def test_the_version_is_in_one_place(installed):
    metadata = next(installed.glob("*.dist-info")) / "METADATA"
    assert f"\nVersion: {globaltensor.__version__}\n" in metadata.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
