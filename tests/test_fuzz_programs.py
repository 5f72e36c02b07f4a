"""Random programs give what plain torch gives: views, writes, boxings, two placements, gradients (programs/fuzz.py).

They run in a child process, so that a death is a failure of the test, with the program that died. Those of `make test`
are other ones with each SEED, which is printed at the top of the run.
"""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, environment, run

SEED = int(os.environ.get("SEED") or 20_261_122)
BATCH, BATCHES = 500, 20
print(f"tests/test_fuzz_programs.py: SEED={SEED}")


def fuzz(seed: int, count: int, native: bool, folder: Path, timeout: float) -> dict[str, str]:
    """Run the programs of so many seeds; which were refused, and why."""
    began = folder / "program.txt"
    code, out, err = run([PYTHON, PROGRAMS / "fuzz.py", seed, count, began],
                         environment(GLOBALTENSOR_NATIVE="1" if native else "0"), timeout)
    assert code == 0, f"SEED={seed}, exit code {code}, in\n{began.read_text()}\n{out[-2000:]}\n{err[-6000:]}"
    result = json.loads(out.splitlines()[-1])
    print(f"seeds {seed} to {seed + count - 1}, native {native}: {result}")
    assert not result["failed"], "\n\n".join(f"SEED={one}: {why}" for one, why in result["failed"].items())
    return result["refused"]


@pytest.mark.parametrize("native, count", [(True, 160), (False, 40)])
def test_some_programs(native, count, tmp_path):
    refused = fuzz(SEED if native else SEED + 1000, count, native, tmp_path, 240)
    assert len(refused) <= 2, refused


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_programs(tmp_path):
    """Of which at most 0.3% are refused. Every tenth batch runs without native code."""
    refused = {}
    for batch in range(BATCHES):
        refused |= fuzz(SEED + 10_000 + batch * BATCH, BATCH, batch % 10 != 9, tmp_path, 1800)
    assert len(refused) <= 0.003 * BATCH * BATCHES, refused
