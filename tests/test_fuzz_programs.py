"""Random programs give what plain torch gives: views, writes, boxings, two placements, gradients (programs/fuzz.py).

They run in a child process, so that a death is a failure of the test, with the program that died. Those of `make test`
are other ones with each SEED, which is printed at the top of the run.
"""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, RUN, environment, run

SEED = int(os.environ.get("SEED") or 20_261_122)
BATCH, BATCHES = 500, 20
RANKS = 7                                            # on which programs/fuzz.py has placements
print(f"tests/test_fuzz_programs.py: SEED={SEED}")


def fuzz(seed: int, count: int, native: bool, folder: Path, timeout: float, processes: int = 1) -> dict[str, str]:
    """Run the programs of so many seeds; which were refused, and why: the same on every process."""
    began = folder / "program.txt"
    launcher = [PYTHON] if processes == 1 else [*RUN, "-n", processes]
    code, out, err = run([*launcher, PROGRAMS / "fuzz.py", seed, count, began],
                         environment(GLOBALTENSOR_NATIVE="1" if native else "0"), timeout)
    assert code == 0, f"SEED={seed}, exit code {code}, in\n{began.read_text()}\n{out[-2000:]}\n{err[-6000:]}"
    results = [json.loads(line) for line in out.splitlines() if line.startswith('{"programs"')]
    print(f"seeds {seed} to {seed + count - 1}, native {native}, processes {processes}: {results[0]}")
    for result in results:
        assert not result["failed"], "\n\n".join(f"SEED={one}: {why}" for one, why in result["failed"].items())
        assert result["refused"].keys() == results[0]["refused"].keys(), results
    assert len(results) == processes
    return results[0]["refused"]


@pytest.mark.parametrize("native, count", [(True, 50), (False, 10)])
def test_some_programs(native, count, tmp_path):
    refused = fuzz(SEED if native else SEED + 1000, count, native, tmp_path, 240)
    assert len(refused) <= 2, refused


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_programs_on_processes(tmp_path):
    """One process a rank: what is the same program for all must not be taken for a disagreement."""
    assert len(fuzz(SEED + 2000, 60, True, tmp_path, 800, RANKS)) <= 2


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_programs(tmp_path):
    """Of which at most 0.3% are refused. Every tenth batch runs without native code."""
    refused = {}
    for batch in range(BATCHES):
        refused |= fuzz(SEED + 10_000 + batch * BATCH, BATCH, batch % 10 != 9, tmp_path, 1800)
    assert len(refused) <= 0.003 * BATCH * BATCHES, refused
