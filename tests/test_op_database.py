"""torch's operator database, whole, beside plain torch: programs/op_database.py judges, this counts.

`make test` runs a fixed twentieth of the ops, with native code; `make test-all` all of them, with more samples.
SEED turns which twentieth it is, and which samples and layouts.
"""
from __future__ import annotations

import json
import os

import pytest
from harness import PROGRAMS, PYTHON, ROOT, environment, good

SEED = int(os.environ.get("SEED") or 20_261_122)
print(f"tests/test_op_database.py: SEED={SEED}")
MOST_REFUSED = 0.005                                 # of all cases

# What is refused: the entry, how the error begins, and the row of docs/limits.md that says why.
BESIDE = ("an operand of aten.", "a sparse tensor beside a global one")
REFUSED = {"to_sparse": ("a tensor made of a global one would be of layout", "`x.to_sparse()`"),
           "sparse.sampled_addmm": BESIDE, "sparse.mm.reduce": BESIDE}


def judged(share: str, samples: int, native: str, timeout: float) -> dict:
    """What the program counted; ops that failed are printed."""
    command = [PYTHON, "-W", "ignore", PROGRAMS / "op_database.py", "--seed", SEED, "--share", share,
               "--samples", samples]
    result = json.loads(good(command, environment(GLOBALTENSOR_NATIVE=native), timeout))
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}))
    return result


def check(result: dict) -> None:
    """All cases are right but a few that are refused, each for a reason that the limits name."""
    wrong = [row for row in result["failures"] if row["is"] == "wrong"]
    assert not wrong, f"{len(wrong)} cases, SEED={SEED}\n" + "\n".join(map(str, wrong[:40]))
    unnamed = [row for row in result["failures"] if row["op"] not in REFUSED or REFUSED[row["op"]][0] not in row["why"]]
    assert not unnamed, f"refused for no reason that is named, SEED={SEED}\n" + "\n".join(map(str, unnamed[:40]))


def total(result: dict, *kinds: str) -> int:
    return sum(counts.get(kind, 0) for counts in result["counts"].values() for kind in kinds)


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_twentieth(native):
    result = judged(f"{SEED % 20}/20", 1, native, 280)
    check(result)
    assert result["entries"] >= 35 and total(result, "right") > 350


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("native, samples", [("1", 8), ("0", 2)])
def test_all(native, samples):
    result = judged("0/1", samples, native, 7100)
    check(result)
    right, refused = total(result, "right"), total(result, "refused")
    assert result["entries"] > 690 and right > 4500 * samples
    assert refused <= MOST_REFUSED * (right + refused), f"{refused} of {right + refused} are refused"


def test_what_is_refused_is_in_the_limits():
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert all(row in limits and f"`{op}`" in limits for op, (_, row) in REFUSED.items())
