"""The loop in torchtitan's shape: losses of the program on one device, also after it was killed."""
from __future__ import annotations

import ast
import sys

import pytest
from harness import ROOT, RUN, environment, good, run

EXAMPLE = ROOT / "examples" / "titan.py"
sys.path.insert(0, str(EXAMPLE.parent))


def plain_losses(steps):
    import titan

    return titan.main(["--plain", f"--steps={steps}"])


def test_losses_equal_those_on_one_device(tmp_path):
    import titan

    want = plain_losses(3)
    ours = titan.main(["--steps=2", "--out", str(tmp_path)])
    assert ours == pytest.approx(want[:2], rel=1e-5)
    ours = titan.main(["--steps=3", "--load", "--dp=3", "--tp=1", "--out", str(tmp_path)])       # on other ranks
    assert ours == pytest.approx(want, rel=1e-5) and len({round(loss, 4) for loss in want}) == 3


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("n, grid", [(4, ()), (2, ("--dp=1", "--tp=2")), (2, ("--dp=2", "--tp=1"))])
def test_goes_on_after_it_was_killed(n, grid, tmp_path):
    """Ended after step 5, of which 4 are saved; then to the end."""
    options = ["--out", tmp_path / "out", *grid]
    code, _, _ = run([*RUN, "-n", n, EXAMPLE, *options, "--kill=5"], environment(), 300)
    assert code != 0
    ours = ast.literal_eval(good([*RUN, "-n", n, EXAMPLE, *options, "--load"], timeout=300).splitlines()[-1])
    assert ours == pytest.approx(plain_losses(6), rel=1e-5)


def test_the_example_changes_five_lines():
    numbered = [line for line in EXAMPLE.read_text().splitlines() if line.rpartition("  # ")[2][1:3] == ": "]
    assert [line.rpartition("  # ")[2][0] for line in numbered] == list("12345")
    assert all("gt." in line for line in numbered)
