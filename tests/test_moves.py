"""What ops move: a table of bytes per op and layout, so that a change of communication shows, and torch's DTensor.

A case is an op of the table with that of its samples that has most tensors, on two ranks, its tensors split alike,
pending, or one of them so (moves.py). `data/bytes_moved.txt` has what the rank that receives most received, what comes
out included where that is a view. If a change is meant, `python tests/test_moves.py` writes the table anew.
"""
from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import moves
import pytest
import torch
from harness import PROGRAMS, PYTHON, good
from torch.utils._pytree import tree_leaves

import globaltensor as gt
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import is_global

TABLE = Path(__file__).parent / "data" / "bytes_moved.txt"


def received(func, arguments, tensors, sbps) -> int | str:
    """Bytes that the rank receives that receives most; "refused"."""
    where = gt.placement("cpu", list(range(moves.RANKS)))
    args, kwargs = arguments([gt.from_full(t.clone(), where, sbp) for t, sbp in zip(tensors, sbps)])
    try:
        with gt.record() as boxings, torch.no_grad():
            for result in tree_leaves(func(*args, **kwargs)):
                if is_global(result):
                    result.shards                    # noqa: B018  a boxed view moves what it needs when it is read
    except GlobalTensorError:
        return "refused"
    return sum(boxing.bytes for boxing in boxings)


@lru_cache(None)
def measured() -> dict[tuple[str, str], str]:
    """By op and layouts."""
    return {(name, " ".join(sbps)): str(received(func, arguments, tensors, sbps))
            for name, func, arguments, tensors, layouts in moves.cases() for sbps in layouts}


def read() -> dict[tuple[str, str], str]:
    table = {}
    for line in TABLE.read_text().splitlines():
        name, *columns = line.split("\t")
        table.update({(name, column.split("=")[0]): column.split("=")[1] for column in columns})
    return table


def write() -> None:
    rows: dict[str, list[str]] = {}
    for (name, sbps), moved in measured().items():
        rows.setdefault(name, []).append(f"{sbps}={moved}")
    TABLE.write_text("".join("\t".join([name, *columns]) + "\n" for name, columns in rows.items()))


def test_bytes_are_those_of_the_table():
    was, now = read(), measured()
    changed = [f"{name}: {sbps}: {was.get((name, sbps), 'no row')} -> {now.get((name, sbps), 'no case')}"
               for name, sbps in dict.fromkeys([*was, *now]) if was.get((name, sbps)) != now.get((name, sbps))]
    assert not changed, "\n".join(["bytes moved; python tests/test_moves.py writes the table anew", *changed])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_dtensor_runs_without_communication_moves_nothing():
    """More than 99% of what it runs rightly; or it reduces a pending operand at once, where that is no dearer than
    reducing the result later, which DTensor leaves pending: y @ w of a pending y that is smaller than what comes out.
    """
    dtensor = json.loads(good([PYTHON, PROGRAMS / "dtensor_moves.py"], timeout=900).splitlines()[-1])
    quiet, now = dtensor["quiet"], measured()
    moving = [(name, " ".join(sbps), now[name, " ".join(sbps)], debt) for name, sbps, debt in quiet
              if now[name, " ".join(sbps)] != "0"]
    dearer = [case for case in moving if case[2] == "refused" or int(case[2]) > case[3]]
    print(f"{dtensor['tried']} cases, of which DTensor refuses {dtensor['refused']}, gets {len(dtensor['wrong'])} "
          f"wrong, and runs {len(quiet)} without communication; of these {len(quiet) - len(moving)} move nothing here, "
          f"{len(moving) - len(dearer)} reduce an operand at once, {len(dearer)} move more:", *dearer, sep="\n")
    assert len(quiet) > 500 and len(moving) <= 0.07 * len(quiet) and len(dearer) <= 0.006 * len(quiet)


if __name__ == "__main__":
    write()
