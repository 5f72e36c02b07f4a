"""What one rank of a large world spends, the others simulated: seconds and memory do not grow with the ranks."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import PROGRAMS


def one_of(ranks):
    """Seconds to make a model global, of its first and its second step, and the MB that the first step leaves."""
    ran = subprocess.run([sys.executable, "-W", "ignore", PROGRAMS / "one_of_many.py", str(ranks)], check=True,
                         capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [float(number) for number in ran.stdout.split()]


@pytest.mark.long
def test_the_first_step_of_a_gpt_on_16384_ranks():
    _, first, _, megabytes = one_of(16_384)
    assert first <= 3 and megabytes <= 50
    assert megabytes <= one_of(64)[3] + 20           # layouts of so many ranks; all else is the same
