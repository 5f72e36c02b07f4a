"""A wheel as a stranger gets it: built, installed into an empty environment in seconds, native at once; the pages' own
programs run from it."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pages
import pytest
import torch
from harness import ROOT, environment

WHEELS = ROOT / ".github" / "scripts" / "wheels.py"
WALK = [ROOT / "docs" / name for name in ("start/two-minutes.md", "start/ten-minutes.md", "how-to/choose-a-plan.md")]
PAGES = [ROOT / "docs" / "install.md", *WALK, ROOT / "README.md", ROOT / "docs" / "guide.md",
         *sorted((ROOT / "docs" / "learn").glob("*.md"))]
MINOR = ".".join(torch.__version__.split(".")[:2])


def script() -> object:
    spec = importlib.util.spec_from_file_location("wheels", WHEELS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """For this Python and this torch."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(WHEELS), "--python", sys.executable, "--torch", MINOR, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    found, = out.glob("*.whl")
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_has_the_native_code_and_says_what_it_needs(wheel):
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_2_\d+_x86_64", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    objects = [name for name in names if ".so" in name]
    for part in ("_core", f"_torch_{MINOR.replace('.', '_')}"):
        assert len([name for name in objects if re.fullmatch(rf"globaltensor/{part}\..*\.so", name)]) == 1, objects
    assert not [name for name in objects if "libtorch" in name or "libc10" in name] and len(objects) < 6, objects
    assert "globaltensor/bundled/benchmarks/dispatch.py" in names


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pages_followed_from_a_wheel(wheel, tmp_path):
    followed = pages.Followed(tmp_path, wheel)
    assert followed.seconds["install"] < 10
    code = ("import globaltensor as gt; from globaltensor.runtime import native\n"
            "gt.placement('cpu', [0, 1]); print(gt.__file__, native.torch_ext.__file__)")
    said = followed.timed("native", [followed.bin / "python", "-W", "error", "-c", code], tmp_path)
    assert all(path.startswith(str(tmp_path)) for path in said.stdout.split()), said.stdout
    listed = followed.timed("bench", [followed.bin / "globaltensor", "bench", "--list"], tmp_path).stdout
    assert "dispatch" in listed
    for page in PAGES:
        assert followed.page(page) == []
    first = followed.seconds["install.md, block 2"]
    print(followed.seconds)
    assert followed.seconds["install"] + first < 60        # two minutes, for a person who reads and types


def test_pages_are_read_as_they_are_written():
    text = ("```sh\npip install x\nglobaltensor new p   # a project\ncd p\npython train.py\n```\n"
            "```python\nprint(1)\n```\n```text\n1\n```\n"
            "```sh\nglobaltensor run -n 8 --nnodes 2 --rdzv-endpoint host0:1 t.py\npython program.py\n```\n")
    kinds = pages.blocks(text)
    assert [kind for kind, *_ in kinds] == ["sh", "python", "text", "sh"] and kinds[1][2] == "1\n"
    assert pages.commands(kinds[0][1]) == "globaltensor new p\ncd p\npython train.py"
    assert pages.commands(kinds[3][1]) == ""


def test_wheels_are_for_the_torch_and_the_pythons_of_the_package():
    wheels = script()
    assert MINOR in wheels.minors() and wheels.PYTHONS == ("python3.11", "python3.12", "python3.13")
    kept = [name for name in ("torch/include/ATen/ATen.h", "torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so",
                              "torch/nn/modules/linear.py", "torch/version.py") if wheels.NEEDED.fullmatch(name)]
    assert kept == ["torch/include/ATen/ATen.h", "torch/lib/libtorch_cpu.so", "torch/version.py"]


@pytest.mark.parametrize("files, version, chosen", [
    (["_torch"], "2.13.0", "_torch"), (["_torch"], "2.13.1", None),
    (["_torch_2_12", "_torch_2_13"], "2.13.1+cu130", "_torch_2_13"),
    (["_torch_2_1", "_torch_2_13"], "2.13.0", "_torch_2_13"),
    (["_torch_2_12"], "2.13.0", None), (["_torch", "_torch_2_13"], "2.13.0", "_torch"), ([], "2.13.0", None)])
def test_the_object_for_the_installed_torch_is_chosen(files, version, chosen, tmp_path, monkeypatch):
    from globaltensor.runtime import native
    suffix = native.EXTENSION_SUFFIXES[0]
    (tmp_path / "runtime").mkdir()
    for name in files:
        (tmp_path / f"{name}{suffix}").write_bytes(b"\0built for torch 2.13.0\0")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "runtime" / "native.py"))
    monkeypatch.setattr(native.torch, "__version__", version)
    monkeypatch.setattr(native, "core_lib", object())
    monkeypatch.setattr(native, "_trouble", "")
    monkeypatch.setattr(native, "_extension_in", lambda file: file.name)
    assert native._load_torch_ext() == (chosen and f"{chosen}{suffix}")
    assert bool(native._trouble) == (chosen is None and bool(files))
