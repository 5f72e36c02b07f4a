"""Each process has batches of its own; it writes the global ones, and what mistakes raise, to FOLDER/<rank>.json."""
import json
import sys
from collections import namedtuple
from pathlib import Path

import torch

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
Pair = namedtuple("Pair", "x label")


def rows(start, stop):
    return torch.arange(start, stop)


CASES = {  # name -> ranks, sbp, the batches of each rank, and the global ones
    "alike": ([0, 1], S(0), [[rows(0, 2), rows(2, 4)], [rows(10, 12), rows(12, 14)]], [[0, 1, 10, 11], [2, 3, 12, 13]]),
    "uneven": ([0, 1], S(0), [[rows(0, 1)], [rows(10, 14)]], [[0, 10, 11, 12, 13]]),
    "swapped": ([1, 0], S(0), [[rows(0, 3)], [rows(10, 11)]], [[10, 0, 1, 2]]),
    "one ends early": ([0, 1], S(0), [[rows(0, 2)], [rows(10, 12), rows(12, 15)]], [[0, 1, 10, 11], [12, 13, 14]]),
    "one has none": ([0, 1], S(0), [[], [rows(10, 12)]], [[10, 11]]),
    "an empty batch": ([0, 1], S(0), [[rows(0, 0)], [rows(10, 11)]], [[10]]),
    "none at all": ([0, 1], S(0), [[], []], []),
    "the first one's": ([0, 1], B, [[rows(0, 2)], [rows(10, 13)]], [[0, 1]]),
    "one outside": ([1], S(0), [[], [rows(10, 12)]], [[10, 11]]),
}


def luck():
    yield rows(0, 2)
    if gt.rank() == 1:
        raise ValueError("bad luck")
    yield rows(2, 4)


MISTAKES = {  # name -> the loader of a rank
    "structure": lambda r: [{"x": rows(0, 2)} if r else {"y": rows(0, 2)}],
    "dtype": lambda r: [rows(0, 2).to(torch.float32 if r else torch.int64)],
    "size": lambda r: [torch.zeros(2, 3 + r)],
    "rows": lambda r: [(torch.zeros(2), torch.zeros(2 + r))],
    "luck": lambda r: luck(),
    "class": lambda r: [] if r else [Pair(rows(0, 2), 1)],           # which rank 1 cannot be told of
    "global": lambda r: [gt.ones(2, placement=gt.placement("cpu", [0, 1]), sbp=B)],
}


def mistake(loader):
    try:
        list(gt.data.from_ranks(loader, gt.placement("cpu", [0, 1])))
    except (RuntimeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def main(folder):
    r, seen = gt.rank(), {}
    for name, (ranks, sbp, batches, _) in CASES.items():
        where = gt.placement("cpu", ranks)
        loader = gt.data.from_ranks([{"a": (t, ["word"])} for t in batches[r]], where, sbp)
        got = list(loader)
        assert all(b["a"][0].placement == where and b["a"][0].sbp == (sbp,) for b in got)
        assert all(b["a"][1] == ["word"] * (k < len(batches[r])) for k, b in enumerate(got)), got
        assert len(loader) == max(len(batches[k]) for k in ranks)
        seen[name] = [b["a"][0].full_tensor().tolist() for b in got]
    errors = {name: mistake(loader(r)) for name, loader in MISTAKES.items()}
    Path(folder, f"{r}.json").write_text(json.dumps({
        "seen": seen, "errors": errors, "expected": {name: case[3] for name, case in CASES.items()}}))


if __name__ == "__main__":
    main(sys.argv[1])
