"""The tests of boxing, gradients and networks once more, on processes that share memory and on processes over gloo.

Every process runs the same tests in the same order, each with one rank; those that need more ranks are skipped.
"""
from __future__ import annotations

import re

import pytest
from harness import ROOT, TORCHRUN, environment, run

SOME = ("boxing", "gradients", "layer_norm", "zero", "zero3", "master_params", "grids", "networks")
ALL = (*SOME, "optim", "recompute", "traps")


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks, native, names", [
    pytest.param(2, "0", ALL[:1], id="2-python-boxing"), pytest.param(2, "1", SOME, id="2-native-some"),
    pytest.param(2, "0", ALL[1:], id="2-python-others", marks=pytest.mark.long),
    pytest.param(2, "1", ALL[len(SOME):], id="2-native-others", marks=pytest.mark.long),
    pytest.param(4, "1", ALL, id="4-native", marks=pytest.mark.long)])
def test_on_processes(ranks, native, names):
    command = [*TORCHRUN, "--nproc-per-node", ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m",
               "not long", "--rootdir", ROOT, *[ROOT / f"tests/test_{name}.py" for name in names]]
    code, out, err = run(command, environment(GLOBALTENSOR_NATIVE=native), timeout=560)
    assert code == 0, out[-3000:] + err[-3000:]
    passed = re.findall(r"(\d+) passed", out)
    assert len(passed) == ranks and len(set(passed)) == 1 and int(passed[0]) >= 15 * len(names), out
