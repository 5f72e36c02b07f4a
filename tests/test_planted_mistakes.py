"""The tests can fail: each of these mistakes, planted in a copy of the tree, fails the tests beside it.

All of them run in `make test`. So what moved to `make test-all` alone is not what catches mistakes in rules, kernels,
schedules and boxings.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE, LANGUAGE, CHECK = "op_table/table.py", "rules/language.py", "schedules/check.py"
GENERATORS, REDUCE, PHILOX = "schedules/generators.py", "csrc/kernels/reduce.cpp", "csrc/philox/philox.h"
LINE, LEGAL = "tests/test_rules.py::test_line", "tests/test_schedules.py"
REGIONS, NUMBERS = "tests/test_native_boxing.py::test_any_region", "tests/test_native_random.py"

MISTAKES = {                                         # name -> file, text, text instead, tests
    "a product is called a sum": (TABLE, 'fixed("b m k, b k n -> b m n", "a*b")',
                                  'fixed("b m k, b k n -> b m n", "a+b")', f"{LINE}[bmm]"),
    "a product is not called linear": (TABLE, 'fixed("m k, k n -> m n", "a*b")', 'fixed("m k, k n -> m n", "a*B")',
                                       f"{LINE}[mm]"),
    "a sum is called nonlinear": (TABLE, '"sum sum.dim_IntList", reduction("a")', '"sum sum.dim_IntList", reduction()',
                                  f"{LINE}[sum]"),
    "a mean of parts": (TABLE, 'reduction("a", uncut=True), decomposition=decompositions.mean',
                        'reduction("a"), decomposition=decompositions.mean', f"{LINE}[mean.dim]"),
    "a fixed factor is called linear": (TABLE, 'polar", pointwise("a*B")', 'polar", pointwise("a*b")',
                                        f"{LINE}[polar]"),
    "a whole dim is cut": (TABLE, 'fixed("d* -> d* r!", "a")', 'fixed("d* -> d* r", "a")', f"{LINE}[view_as_real]"),
    "groups are counted globally": (TABLE, 'layers.convolved, local_args=scaled("groups"),', 'layers.convolved,',
                                    f"{LINE}[convolution]"),
    "a pending term beside a whole one": (LANGUAGE, "if len(kinds) > 1:", "if len(kinds) > 2:",
                                           "tests/test_numbers.py"),
    "a pending sum enters nonlinearly": ("rules/parse.py", "tuple((q, False) for", "tuple((q, True) for",
                                         f"{LINE}[relu]"),
    "a maximum of parts is a sum": (LANGUAGE, "else LEAVES[of.leaves] if summed", "else partial_sum if summed",
                                    f"{LINE}[amax]"),
    "uneven parts overlap": ("layouts/regions.py", "start = index * size + min(index, more)", "start = index * size",
                             "tests/test_boxing.py"),
    "a forward too few ahead": (GENERATORS, 'codes(B, r), ranks - 1 - r)', 'codes(B, r), ranks - 2 - r)', LEGAL),
    "weights too late": (GENERATORS, "weights, late=r)", "weights, late=r + 1)", LEGAL),
    "an action on another rank passes": (CHECK, "if owner != rank:", "if False:", LEGAL),
    "a repeated action passes": (CHECK, 'if key in done[kind]:\n        return "is repeated", "its part',
                                 'if False:\n        return "is repeated", "its part', LEGAL),
    "an empty region is not zero": (REDUCE, "memset(at[t], 0, count * call.target_item)",
                                    "memset(at[t], 1, count * call.target_item)", REGIONS),
    "a sum of two is a copy": (REDUCE, "} else if (n > 1 || !call.copies) {", "} else if (n > 2 || !call.copies) {",
                               REGIONS),
    "one term of a logarithm less": (PHILOX, "log_powers = 4", "log_powers = 3", NUMBERS),
    "one step of a square root less": (PHILOX, "sqrt_steps = 3", "sqrt_steps = 2", NUMBERS),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name, tmp_path):
    file, text, instead, tests = MISTAKES[name]
    native = file.startswith("csrc/")
    for folder in ("globaltensor", "csrc", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder,
                        ignore=shutil.ignore_patterns("__pycache__", *(["*.so"] if native else [])))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / (file if native else f"globaltensor/{file}")
    source = target.read_text()
    assert source.count(text) == 1, f"{file} has {text!r} {source.count(text)} times: the table is out of date"

    target.write_text(source.replace(text, instead))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long",
               "--rootdir", tmp_path, tmp_path / tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=580,
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, f"{tests} do not fail\n{done.stdout.decode()[-3000:]}"   # 2: an error of collection
