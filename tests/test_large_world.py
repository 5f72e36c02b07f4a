"""What one rank of a large world spends, the others simulated: seconds and memory do not grow with the ranks."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import PROGRAMS

ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


def one_of(ranks, *axes):
    """Seconds to make a model global, of its first and its second step, the MB that the first step leaves, and the
    milliseconds of its decisions: the median and the slowest tenth."""
    ran = subprocess.run([sys.executable, "-W", "ignore", PROGRAMS / "one_of_many.py", str(ranks), *axes], check=True,
                         capture_output=True, text=True, timeout=120, env=ALONE)
    return [float(number) for number in ran.stdout.split()]


@pytest.mark.long
@pytest.mark.parametrize("how, few, most", [((), 64, 50), (("even",), 2048, 50), (("uneven",), 2048, 70)])
def test_the_first_step_of_a_gpt_on_16384_ranks(how, few, most):
    """Of the memory some 25 MB are code that was never run before, 45 with ring attention."""
    _, first, _, megabytes, _, _ = one_of(16_384, *how)
    assert first <= 3 and megabytes <= most
    assert megabytes <= one_of(few, *how)[3] + 20    # layouts of so many ranks; all else is the same


@pytest.mark.parametrize("sizes", [pytest.param("even", marks=pytest.mark.long), "uneven"])
def test_decisions_on_four_axes_of_16384_ranks(sizes):
    """2 ms is what an op that was never seen may take; sizes that no axis divides take ring attention."""
    *_, median, slowest = one_of(16_384, sizes)
    assert median <= 2 and slowest <= 2.5
