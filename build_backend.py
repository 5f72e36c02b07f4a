"""setuptools, and where torch is: pip builds in an environment of its own, which has none.

Native code must be compiled against the torch that it will run with. So `pip install .` uses the torch of the
environment that it installs into. Where that has none, torch is asked for as a requirement of the build: pip is about
to install it anyway. Under [build-system] it would be downloaded for every build, and might not be the installed one.
"""
from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from os import environ
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the frontend calls them)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from packaging.requirements import Requirement  # isort: skip  (setuptools brings it)

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
TORCH = next(need for need in map(Requirement, PROJECT["dependencies"]) if need.name == "torch")

# pip's own environment is nothing but a PYTHONPATH, so -E shows the one that pip installs into.
LOOK = """
import importlib.metadata, json, sys
found = [dist.version for dist in importlib.metadata.distributions(name="torch")]
print(json.dumps([found[0] if found else None, sys.path]))
"""


def find_torch() -> None:
    """Let setup.py import the torch of the environment that is installed into, after all that the build has itself."""
    if importlib.util.find_spec("torch") is None:
        looked = subprocess.run([sys.executable, "-EP", "-c", LOOK], stdout=subprocess.PIPE, check=True)
        version, path = json.loads(looked.stdout)
        if version and TORCH.specifier.contains(version, prereleases=True):
            sys.path += [folder for folder in path if folder not in sys.path]


def has_compiler() -> bool:
    """Is there what setuptools compiles C++ with?"""
    command = environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(shlex.split(command)[0]) is not None


def with_torch(requires: list[str]) -> list[str]:
    """The requirements of a build that compiles."""
    missing = importlib.util.find_spec("torch") is None and has_compiler()
    return [*requires, *([str(TORCH)] if missing else [])]


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    return with_torch(build_meta.get_requires_for_build_wheel(settings))


def get_requires_for_build_editable(settings: Any = None) -> list[str]:
    return with_torch(build_meta.get_requires_for_build_editable(settings))


find_torch()
