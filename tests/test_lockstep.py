"""The tests of boxing, gradients and networks once more, on processes that share memory and on processes over gloo.

Every process runs the same tests in the same order, each with one rank; those that need more ranks are skipped.
"""
from __future__ import annotations

import re

import pytest
from harness import ROOT, TORCHRUN, environment, run

FILES = [f"tests/test_{name}.py" for name in ("boxing", "gradients", "grids", "networks", "layer_norm", "optim",
                                              "zero3", "recompute", "traps", "zero")]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks, native", [(2, "0"), (2, "1"), pytest.param(4, "1", marks=pytest.mark.long)])
def test_on_processes(ranks, native):
    command = [*TORCHRUN, "--nproc-per-node", ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m",
               "not long", "--rootdir", ROOT, *[ROOT / file for file in FILES]]
    code, out, err = run(command, environment(GLOBALTENSOR_NATIVE=native), timeout=560)
    assert code == 0, out[-3000:] + err[-3000:]
    passed = re.findall(r"(\d+) passed", out)
    assert len(passed) == ranks and len(set(passed)) == 1 and int(passed[0]) > 100, out
