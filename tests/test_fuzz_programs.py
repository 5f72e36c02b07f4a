"""Random programs give what plain torch gives: views, writes, boxings, two placements, gradients (programs/fuzz.py).

hypothesis draws them in a child process, so that a death is a failure of the test, with the program that died. The
draws are those of the seed printed at the top of the run; set SEED for others.
"""
from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, environment, run

SEED = int(os.environ.get("SEED") or 20_261_122)
BATCH, BATCHES = 500, 20
print(f"tests/test_fuzz_programs.py: SEED={SEED}")


def fuzz(seed: int, examples: int, native: bool, folder: Path, timeout: float) -> tuple[int, Counter[str]]:
    """How many programs were run, and which were refused, how often."""
    began = folder / "program.txt"
    code, out, err = run([PYTHON, PROGRAMS / "fuzz.py", seed, examples, began],
                         environment(GLOBALTENSOR_NATIVE="1" if native else "0"), timeout)
    assert code == 0, f"SEED={seed}, exit code {code}, in\n{began.read_text()}\n{out[-2000:]}\n{err[-6000:]}"
    counts = json.loads(out.splitlines()[-1])
    print(f"seed {seed}, native {native}: {counts}")
    return counts["programs"], Counter(counts["refused"])


@pytest.mark.parametrize("native, examples", [(True, 160), (False, 40)])
def test_some_programs(native, examples, tmp_path):
    programs, refused = fuzz(SEED, examples, native, tmp_path, 240)
    assert programs == examples and refused.total() <= 2, refused


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_programs(tmp_path):
    """Of which at most 0.3% are refused. Every tenth batch runs without native code."""
    programs, refused = 0, Counter()
    for batch in range(BATCHES):
        count, more = fuzz(SEED + 1 + batch, BATCH, batch % 10 != 9, tmp_path, 1800)
        programs, refused = programs + count, refused + more
    assert programs == BATCH * BATCHES and refused.total() <= 0.003 * programs, refused
