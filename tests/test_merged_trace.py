"""One trace of all ranks: it is JSON that Perfetto reads, its boxings are the recorded ones, its clocks agree."""
from __future__ import annotations

import gzip
import json
import re
from collections import Counter

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, by_hand, environment, good

import globaltensor as gt
from globaltensor.debug.merged_trace import RankTrace, merge_traces

PROGRAM = PROGRAMS / "merged.py"
PIPELINE = 1_000_000
CPU = [torch.profiler.ProfilerActivity.CPU]


def named(rows):
    """What the processes of a trace are called."""
    return {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}


def end(row):
    return row["ts"] + row["dur"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_are_in_one_file(ranks, tmp_path):
    file = tmp_path / ("trace.json.gz" if ranks == 2 else "trace.json")
    launcher = RUN + ["-n", 2] if ranks == 2 else [PYTHON]
    out = good([*launcher, PROGRAM, file], environment(GLOBALTENSOR_RANKS="2"))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    recorded = {line["rank"]: line["moves"] for line in lines}
    data = gzip.decompress(file.read_bytes()) if ranks == 2 else file.read_bytes()
    rows = json.loads(data)["traceEvents"]
    names = {0: "rank 0", 1: "rank 1"} if ranks == 2 else {0: "ranks 0 to 1"}
    assert named(rows) == names | {PIPELINE: "pipeline"}
    assert all(row["ts"] >= 0 for row in rows if row["ph"] == "X")

    boxings = {rank: sorted((row for row in rows if row.get("cat") == "boxing" and row["pid"] == rank),
                            key=lambda row: row["ts"]) for rank in names}
    for rank, its in boxings.items():
        found = [re.match(r"boxing for (.*?): .*, ([\d,]+) bytes, \S*merged\.py:\d+$", row["name"]) for row in its]
        assert [[match[1], int(match[2].replace(",", ""))] for match in found] == recorded[rank]
    if ranks == 2:                                   # no rank can leave a boxing before the other has come to it
        pairs = [[row for row in its if "to_global" in row["name"]] for its in boxings.values()]
        assert len(pairs[0]) == len(pairs[1]) == 5
        for one, other in zip(*pairs):
            assert one["name"] == other["name"]
            assert max(one["ts"], other["ts"]) <= min(end(one), end(other)) + 500      # microseconds
    for rank in names:
        curve = [row for row in rows if row["ph"] == "C" and row["pid"] == rank]
        assert curve and {row["name"] for row in curve} == {f"memory of {names[rank]}, CPU"}
        assert max(row["args"]["bytes"] for row in curve) > 65 * 7 * 4
    check_timetable(rows, names)


def check_timetable(rows, names):
    """Each micro-batch goes through the stages in turn, and what a stage runs lies within its action."""
    actions = {row["name"]: row for row in rows if row["pid"] == PIPELINE and row["ph"] == "X"}
    assert Counter(row["cat"] for row in actions.values())["forward"] == 6
    for j in range(3):
        first, second = actions[f"0F{j}"], actions[f"1F{j}"]
        assert (first["tid"], second["tid"]) == (0, 1) and end(first) <= second["ts"] + 500
        for stage, action in enumerate((first, second)):
            within = [row for row in rows if row["name"] == "aten::linear" and row["pid"] == min(stage, len(names) - 1)
                      and action["ts"] - 500 <= row["ts"] and end(row) <= end(action) + 500]
            assert within, (stage, j)


def test_clocks_of_hosts_are_compared():
    """Of two hosts; the clock of the second is ahead."""
    told = {}
    for process in by_hand([PROGRAM, "clocks"], 2, LOCAL_WORLD_SIZE="1"):
        code, out, err = process.end()
        assert code == 0, err
        line = json.loads(out.splitlines()[-1])
        told[line["rank"]] = line["offset"]
    assert told[0] == 0
    assert abs(told[1] + 2_500_000_000) < 50_000_000


def test_times_and_numbers_of_ranks_are_told_apart():
    rows = [{"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "an op", "cat": "cpu_op", "pid": 77, "tid": 5, "ts": 1.0, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 77, "tid": 5, "ts": 1.5},
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "a kernel", "cat": "kernel", "pid": 0, "tid": 7, "ts": 2.0, "dur": 1.0}]
    event = (1, 1, "F", 0, 10.0, 14.0)
    told = [RankTrace(5_000_000, "rank 0", rows, []), RankTrace(3_000_000, "rank 1", rows, [event])]
    merged = merge_traces(told)
    found = merged["traceEvents"]
    assert named(found) == {0: "rank 0", 2: "rank 0: python", 1: "rank 1", 3: "rank 1: python", PIPELINE: "pipeline"}
    assert {(row["name"], row["pid"]): row["ts"] for row in found if row["ph"] == "X"} == {
        ("an op", 0): 2001.0, ("a kernel", 2): 2002.0, ("an op", 1): 1.0, ("a kernel", 3): 2.0, ("1F0", PIPELINE): 10.0}
    assert [row["id"] for row in found if row["ph"] == "s"] == ["0.3", "1.3"]
    assert merged["baseTimeNanoseconds"] == 3_000_000


def over():
    with torch.profiler.profile(activities=CPU) as profile:
        torch.ones(2) + 1
    return profile


def written_once(tmp_path):
    profile = over()
    gt.export_chrome_trace(profile, tmp_path / "one.json")
    return profile


BAD = [
    (lambda path: (3, path / "x.json"), gt.ArgumentError, "a trace of int", "torch.profiler.profile()"),
    (lambda path: (over(), path / "x.json", 4), gt.ArgumentError, "pipeline=int", "gt.pipeline(...)"),
    (lambda path: (torch.profiler.profile(), path / "x.json"), gt.ArgumentError, "a trace of a profiler that has none",
     "after the block"),
    (lambda path: (written_once(path), path / "x.json"), gt.ArgumentError, "a trace of a profiler that has none",
     "once"),
    (lambda path: (over(), path / "no folder" / "x.json"), gt.GlobalTensorError, "was not written", "a folder"),
]


@pytest.mark.parametrize("arguments, kind, what, fix", BAD)
def test_what_has_no_trace_is_refused(arguments, kind, what, fix, tmp_path):
    with pytest.raises(kind) as error:
        gt.export_chrome_trace(*arguments(tmp_path))
    assert what in error.value.what and fix in error.value.fix
    assert not (tmp_path / "x.json").exists()
