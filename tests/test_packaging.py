"""What is installed: an sdist that all can be built from, a wheel that can do what a checkout does, one version.

Most tests compile and download nothing: setuptools is asked without torch and without a compiler. The long ones type
what a stranger types, in environments of their own.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, environment

import globaltensor
from globaltensor.runtime.kernel_build import kernel_sources, native_hash
from globaltensor.runtime.native import torch_ext

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
BUILD = WITHOUT_TORCH + "sys.path[0] = '.'; import build_backend; build_backend.build_{kind}({to!r})"
CARRIED = {"csrc": "*.*", "globaltensor": "*.py", "tests": "*.*", "benchmarks": "*.*", "examples": "*.py",
           "docs": "*.md"}
NOT_CARRIED = {".pyc", ".so"}
TOP = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
       "SECURITY.md", "build_backend.py", "globaltensor_command.py", "pyproject.toml", "setup.py",
       "globaltensor/py.typed"]


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


def unpack(sdist: list[str], folder: Path) -> Path:
    for file in sdist:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    return folder


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """A copy of what an sdist carries."""
    return unpack(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture
def checkout(sdist, tmp_path) -> Path:
    """A copy in which nothing was built before."""
    return unpack(sdist, tmp_path / "checkout")


@pytest.fixture(scope="module")
def installed(unpacked, tmp_path_factory) -> Path:
    """A folder like site-packages, with the package as pip would put it there."""
    folder = tmp_path_factory.mktemp("site")
    python(BUILD.format(kind="wheel", to=str(folder)), unpacked)
    wheel, = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_native_code_that_is_built_alone_must_compile(checkout):
    """As after a change of csrc/: else what was built before would be left there, and be tested."""
    for header in (checkout / "csrc").rglob("*.h"):
        header.write_text("#error on purpose\n")
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], capture_output=True, text=True,
                          timeout=120, cwd=checkout, env=environment())
    assert done.returncode and "on purpose" in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_compiler_that_cannot_say_its_version_is_as_none(checkout, tmp_path):
    """The package is installed without native code, as it is without a compiler."""
    python(BUILD.replace(WITHOUT_TORCH, "import sys; sys.argv = ['setup.py']\n").format(kind="wheel", to=str(tmp_path)),
           checkout)
    wheel, = tmp_path.glob("*.whl")
    assert not [file for file in zipfile.ZipFile(wheel).namelist() if file.endswith(".so")]


def ran(installed: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=installed,
                          env=environment(PYTHONPATH=str(installed), GLOBALTENSOR_NATIVE="0"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_benchmarks_run_from_an_installed_package(installed):
    listed = ran(installed, "-m", "globaltensor.cli", "bench", "--list").splitlines()
    ours = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if re.search(r"(?m)^def main\(", path.read_text())]
    assert [line.split()[0] for line in listed] == sorted({*ours} - {"device", "faults"})        # of a checkout only
    found = json.loads(ran(installed, "-m", "globaltensor.cli", "bench", "startup", "--quick", "--json"))
    assert [row["what"] for row in found["rows"]][:2] == ["import torch", "import globaltensor"]


def test_a_package_without_its_native_code_says_so_at_the_users_line(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import globaltensor as gt\nP = gt.placement('cpu', [0, 1])\ngt.placement('cpu', [0])\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env=environment(PYTHONPATH=str(installed)))
    assert done.returncode == 0 and done.stderr.startswith("program.py:2: UserWarning: globaltensor runs without")
    assert done.stderr.count(f"{sys.executable} -m pip install FOLDER, a checkout of globaltensor") == 1


@pytest.mark.skipif(torch_ext is None, reason="no native code")
def test_native_code_for_another_torch_is_left_alone(tmp_path, real_processes):
    code = """
import torch
torch.__version__ = "2.0.1"
import globaltensor as gt
from globaltensor.runtime import native
P = gt.placement("cpu", [0, 1])
print(native.torch_ext, gt.arange(4., placement=P, sbp="S(0)").sum().item())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env=environment())
    assert done.stdout.split() == ["None", "6.0"], done.stdout + done.stderr
    assert re.search(r"why:   it was built for torch 2\.\d+\.\d+, and this is torch 2\.0\.1\n", done.stderr)
    assert f"-m pip install -e {ROOT}" in done.stderr


@pytest.mark.skipif(torch_ext is None, reason="no native code")
@pytest.mark.parametrize("change, warned", [("", False), ("// another line\n", True)], ids=["touched", "changed"])
def test_a_checkout_whose_sources_have_changed_since_it_was_built_says_so(change, warned, tmp_path, real_processes):
    for folder in ("globaltensor", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    noted = tmp_path / "globaltensor" / "_torch.sources"
    noted.write_text(native_hash(tmp_path / "csrc"))
    os.utime(noted, (1, 1))
    with open(tmp_path / "csrc" / "torch_ext" / "module.cpp", "a") as source:
        source.write(change)
    done = subprocess.run([sys.executable, "-c", "import globaltensor as gt; print(gt.__file__)"], capture_output=True,
                          text=True, timeout=120, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)))
    assert done.stdout.strip() == str(tmp_path / "globaltensor" / "__init__.py"), done.stdout + done.stderr
    assert ("UserWarning: the native code of globaltensor was built from other sources" in done.stderr) == warned


def test_every_installed_benchmark_finds_what_it_imports(installed):
    bundled = installed / "globaltensor" / "bundled"
    modules = [f"benchmarks.{path.stem}" for path in sorted((bundled / "benchmarks").glob("*.py"))]
    ran(installed, "-c", f"import sys; sys.path.insert(0, {str(bundled)!r})\nfor m in {modules}: __import__(m)")


def test_an_installed_package_can_compile_its_kernels(installed):
    csrc = installed / "globaltensor" / "bundled" / "csrc"
    carried = {path.relative_to(csrc) for path in kernel_sources(csrc)}
    assert carried == {path.relative_to(ROOT / "csrc") for path in kernel_sources(ROOT / "csrc")} and carried


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


# What pip shows to a build: a PYTHONPATH with setuptools alone, in front of the environment that is installed into.
@pytest.mark.parametrize("torch, compiler, found, required", [
    ("2.12.1", "c++", True, []),
    ("2.13.0+cpu", "c++", True, []),
    ("1.13.0", "c++", False, ["torch<2.15,>=2.11"]),                  # pip is about to replace it
    (None, "c++", False, ["torch<2.15,>=2.11"]),
    (None, "/nonexistent/c++ -m64", False, []),
])
def test_a_build_finds_the_torch_that_it_is_for(torch, compiler, found, required, tmp_path):
    target, overlay = tmp_path / "target", tmp_path / "overlay"
    venv.create(target, with_pip=False)
    site = next(target.glob("lib/python*/site-packages"))
    if torch:
        about = site / f"torch-{torch}.dist-info" / "METADATA"
        files = {about: f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n", site / "torch" / "__init__.py": ""}
        for file, text in files.items():
            file.parent.mkdir()
            file.write_text(text)
    overlay.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (overlay / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    code = f"""
import sys
sys.path[0] = {str(ROOT)!r}
sys.path[:] = [p for p in sys.path if not p.startswith({str(site)!r})]
import build_backend, setuptools, importlib.util, json
spec = importlib.util.find_spec("torch")
print(json.dumps([spec and spec.origin, build_backend.with_torch([]), setuptools.__file__]))"""
    done = subprocess.run([target / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(overlay), "CXX": compiler})
    assert done.returncode == 0, done.stderr
    origin, asked, tools = json.loads(done.stdout)
    assert (origin, asked) == (str(site / "torch" / "__init__.py") if found else None, required)
    assert tools.startswith(str(overlay))


CHECK = """
import globaltensor as gt
from globaltensor.runtime import native
x = gt.arange(6., placement=gt.placement("cpu", [0, 1]), sbp="S(0)")
assert (x @ x).item() == 55
print(gt.__file__, native.torch_ext is not None)"""


@pytest.fixture
def stranger(tmp_path) -> tuple[Path, dict[str, str]]:
    """An environment with pip and the packages of this one, and what its commands see: a compiler in a hurry."""
    venv.create(tmp_path / "venv", with_pip=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    for name in ("gcc", "g++"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {name} "$@" -O0\n')
        (tmp_path / name).chmod(0o755)
    env = environment(CC=str(tmp_path / "gcc"), CXX=str(tmp_path / "g++"))
    del env["PYTHONPATH"]
    python = tmp_path / "venv" / "bin" / "python"
    typed([python, "-m", "pip", "uninstall", "-y", "setuptools"], env, tmp_path)      # an old one, in Python 3.11
    return python, env


def typed(command: list, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1500, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", ["", "-e", "--no-build-isolation"])
def test_pip_install_compiles_for_the_torch_that_is_there(options, stranger, checkout, tmp_path):
    python, env = stranger
    typed([python, "-m", "pip", "install", *options.split(), "."], env, checkout)
    where, native = typed([python, "-c", CHECK], env, tmp_path).split()
    assert native == "True"
    assert where == str((checkout if options == "-e" else next(python.parent.parent.glob("lib/python*/site-packages")))
                        / "globaltensor" / "__init__.py")
    (tmp_path / "program.py").write_text("import globaltensor as gt\nreveal_type(gt.placement)\n")
    seen = typed([sys.executable, "-m", "mypy", "--python-executable", python, "program.py"], env, tmp_path)
    assert "globaltensor.layouts.placement.placement" in seen


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_sdist_becomes_a_wheel_that_compiles_and_installs(stranger, checkout, tmp_path):
    python, env = stranger
    typed([sys.executable, "-c", f"import build_backend; build_backend.build_sdist({str(tmp_path)!r})"], env, checkout)
    sdist, = tmp_path.glob("*.tar.gz")
    typed([python, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, sdist], env, tmp_path)
    wheel, = tmp_path.glob("*.whl")
    typed([python, "-m", "pip", "install", wheel], env, tmp_path)
    assert typed([python, "-c", CHECK], env, tmp_path).split()[1] == "True"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pip_install_without_a_compiler_works_and_says_what_to_do(stranger, checkout, tmp_path):
    python, env = stranger
    env = {**env, "PATH": str(python.parent), "CC": "", "CXX": ""}
    typed([python, "-m", "pip", "install", "."], env, checkout)
    said = typed([python, "-c", CHECK], env, tmp_path)
    assert f"try:   install g++, then {python} -m pip install FOLDER, a checkout of globaltensor" in said, said
    assert said.splitlines()[0].endswith(" False")
