"""The benchmarks run, verify what they measure, and say it for people and for machines."""
from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import PYTHON, ROOT, environment, good, run

from globaltensor.cli import bench, main
from globaltensor.schedules.generators import generate
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import simulate

sys.path.insert(0, str(ROOT))                        # benchmarks/ is part of a checkout, not of the package
from benchmarks import boxing, hosts, pipeline, plan as benchmark_of_plans, planned, processes, timing, train
from benchmarks.ways import WAYS, Case, Way

BENCH = [PYTHON, "-m", "globaltensor.cli", "bench"]


def found(*args):
    """The one JSON object of a benchmark that was told to be quick."""
    said = json.loads(good([*BENCH, *args, "--quick", "--json"], timeout=280))
    assert said["machine"] == timing.machine() and said["title"] and said["rows"]
    for row in said["rows"]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    return said


# ---------------------------------------------------------------------------------------------- the benchmarks


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, rows, column", [
    ("dispatch", 10, "globaltensor us"), ("random", 9, "torch ns/element"), ("startup", 5, "ms"),
    ("ranks", 5, "ms"),
    pytest.param("decision", 8, "dtensor ms", marks=pytest.mark.long)])
def test_in_one_process(name, rows, column):
    said = found(name)
    assert len(said["rows"]) == rows and all(row[column] > 0 for row in said["rows"] if column != "dtensor ms")


def test_bytes_of_tensors_that_live():
    """Two at a time, of four; one of them was there before."""
    first = torch.ones(100)
    with planned.LiveBytes([first]) as live:
        for _ in range(3):
            again = first + 1
            del again
        assert live.peak == 800
        kept = [first * 2 for _ in range(3)]
    assert live.peak == 1600 and len(kept) == 3


def test_how_well_predictions_agree():
    rows = [{"ranks": 2, "model": "a", "off": off, "off, bytes": 0.1, "predicted ms": p, "measured ms": m,
             "predicted B": 8, "received B": 8} for off, p, m in ((0.1, 1.1, 1.0), (-0.5, 1.0, 2.0), (0.0, 3.0, 3.0))]
    told = benchmark_of_plans.agreement(rows)
    assert "off by 10.0% in the median; rank correlation 0.50" in told["steps"] and "2.000 of the best" in told["steps"]
    assert told["bytes received"] == "3 of 3 exact"


@pytest.mark.long
@pytest.mark.processes
def test_plans():
    said = found("plan", "--ranks", "2")
    assert len(said["rows"]) == 2 and all(row["received B"] == row["predicted B"] for row in said["rows"][:2])


@pytest.mark.long
@pytest.mark.processes
def test_hosts():
    """With root rights and network namespaces; else it says why it is left out."""
    code, out, err = run([*BENCH, "hosts", "--quick", "--json"], timeout=280)
    assert code == 0, err
    if "left out" in err:
        pytest.skip(err)
    arms = {"2 x 1": ("dp", "ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP2", "FSDP2, freed", "best DDP", "dp of best DDP"),
            "2 x 2": ("tp", "best DTensor", "tp of best DTensor"),
            "4 x 1": ("pipeline", "torch's pipeline", "pipeline of torch's pipeline")}
    rows = json.loads(out)["rows"]
    assert [row["hosts x ranks"] for row in rows] == list(arms)
    for row in rows:
        assert min(row[name] for name in arms[row["hosts x ranks"]]) > 0


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("args, title", [
    ((), "boxing: 2 ranks, m"),
    (("--ranks", 4, "--fresh"), "boxing: 4 ranks, fresh")])
def test_boxing(args, title):
    said = found("boxing", *args)
    assert said["title"].startswith(title) and said["MPI"]
    cases = [(row["dtype"], row["boxing"], row["bytes"]) for row in said["rows"]]
    assert cases == [(d, b, n) for d in boxing.DTYPES for b in boxing.BOXINGS for n in boxing.SIZES[:1]]
    for row in said["rows"]:
        assert {"ceiling", "python", "gloo", "DTensor"} <= row["us"].keys() <= WAYS.keys()
        assert all(p10 <= median for median, p10 in row["us"].values())


@pytest.mark.long
@pytest.mark.processes
def test_strategies():
    said = found("strategies")
    rows = {row["strategy"]: row for row in said["rows"]}
    assert list(rows) == ["dp", "ZeRO 1", "ZeRO 2", "ZeRO 3", "tp", "tp, sequence", "sp"]
    for name, row in rows.items():
        assert {"sp": 0.5, "ZeRO 3": 0.95}.get(name, 1) <= row["of formula"] < 1.02, row
        assert row["of formula, kept"] == 1 or "tp" in name and 1 < row["of formula, kept"] < 1.1, row


@pytest.mark.long
@pytest.mark.processes
def test_train():
    said = found("train")
    assert [row["arm"] for row in said["rows"]] == ["plain, 2 threads", "DDP 2", "globaltensor dp 2", "DTensor 2",
                                                    "globaltensor tp 2"]
    assert all(row["tokens/s"] > 0 for row in said["rows"])


@pytest.mark.long
@pytest.mark.processes
def test_agreement():
    rows = found("agreement")["rows"]
    assert [row["arm"] for row in rows] == ["dp 2", "tp 2"]
    assert all(row["ms"] > 0 < row["ms without"] and row["audit ms"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.processes
def test_compile():
    rows = found("compile")["rows"]
    assert [row["arm"] for row in rows] == [
        "plain", "plain compiled", "globaltensor dp 2", "globaltensor dp 2 compiled"]
    assert all(row["tokens/s"] > 0 and row["cold s"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.processes
def test_generate():
    pytest.importorskip("transformers", reason="transformers is not installed")
    said = found("generate")
    assert [(row["model"], row["arm"]) for row in said["rows"]] == [
        ("Llama", "plain, 2 threads"), ("Llama", "DTensor 2"), ("Llama", "globaltensor tp 2"),
        ("GPT-2", "plain, 2 threads"), ("GPT-2", "globaltensor tp 2")]
    for row in said["rows"]:
        assert row["tokens/s"] > 0
        if "globaltensor" in row["arm"]:
            assert row["bytes a token"] > 0 and row["more at the end"] == 0, row


@pytest.mark.long
@pytest.mark.processes
def test_pipeline(tmp_path):
    said = found("pipeline", "--ranks", "2", "--plot", str(tmp_path / "steps.png"))
    assert [row["schedule"] for row in said["rows"]] == list(pipeline.SCHEDULES)
    for row in said["rows"]:
        assert row["ranks"] == 2 and row["tokens/s"] > 0 and row["makespan"] > 0
        assert 0 <= row["bubble"] < 1 and 0 <= row["simulated"] < 1
        assert (row["torch's"] is not None) == (row["schedule"] in pipeline.TORCHS)
        assert 0.8 < row["peak MB"] / row["predicted"] < 1.1, row
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize("name, chunks", pipeline.SCHEDULES.items())
def test_what_the_simulator_is_told_is_what_was_measured(name, chunks):
    """Where the measured events are simulated ones, the times found in them are those they were made of."""
    stages = 3 * chunks
    known = Costs((2.0,) * stages, (3.0,) * stages, (1.0,) * stages, (Hop(),) * (stages - 1))
    run = simulate(generate(name, 3, 8), known, record=True)
    told, own = pipeline.calibrated(stages, [run.events()])
    assert told.forward == known.forward and told.backward == known.backward
    if name.startswith("zb"):
        assert told == known
    assert own == {(e.kind, e.stage): {"F": 2, "B": 4, "I": 3, "W": 1}[e.kind] for e in run.events()}
    span, idle, held, between = pipeline.gaps(run.events())
    assert between == 0 and (idle + held) / span == pytest.approx(run.bubble_rate)


@pytest.mark.processes
@pytest.mark.long
def test_checkpoint():
    rows = found("checkpoint")["rows"]
    loads = [f"load{ranks}, from the {where}" for ranks in ("", ", 4 -> 2") for where in ("cache", "disk")]
    saving = ["disk", "one file", "globaltensor", "torch DCP"]
    assert [(row["what"], row["way"]) for row in rows] == [
        *((what, way) for what in ("first save", "save") for way in saving),
        *((what, way) for what in loads for way in (*saving[:3], "globaltensor, training", saving[3]))]
    assert all(row["GB/s"] > 0 for row in rows)
    for way in ("disk", "one file", "torch DCP"):
        assert all(row[f"of {way}"] > 0 and (row["way"] != way or row[f"of {way}"] == 1) for row in rows)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--min-ranks", "2")])
def test_soak(more):
    rows = found("soak", *more)["rows"]
    assert rows[0]["on"] == "one host" and rows[0]["faults"] >= 1
    assert all(row["different"] == 0 == row["left behind"] for row in rows), rows


@pytest.mark.processes
@pytest.mark.long
def test_faults():
    rows = found("faults", "--runs", "1")["rows"]
    assert len(rows) == 3 and all(row["noticed"] == row["named"] == 1 and not row["left"] for row in rows), rows


def test_a_fault_that_there_is_not():
    code, _, err = run([*BENCH, "faults", "--rows", "earthquake"])
    assert code == 1 and "no fault has 'earthquake' in its name; there are: KILL, boxing, shared memory, " in err


# --------------------------------------------------------------------------------------- what they are made of


def test_a_way_that_gets_it_wrong_is_not_measured():
    limit = SimpleNamespace(meet=lambda: None, slowest=float)        # of one rank, for which a boxing is nothing
    case = Case("P -> B", 1024, torch.float32, 0, 1)
    x = torch.empty(256)
    boxing.verify(case, "right", Way(x, lambda: x, lambda y: y), limit)
    assert not x.any()
    for wrong in (lambda y: y + 1, torch.Tensor.double):
        with pytest.raises(SystemExit, match="a way gets Case.* wrong"):
            boxing.verify(case, "a way", Way(x, lambda: x, wrong), limit)


def test_an_arm_that_trains_differently_is_not_measured():
    train.verify("right", [[5.0, 4.00001]], [5.0, 4.0])
    for wrong in ([5.0, 4.1], [5.0, math.nan]):
        with pytest.raises(SystemExit, match="does not train as plain torch does"):
            train.verify("wrong", [[5.0, 4.0], wrong], [5.0, 4.0])


@pytest.mark.processes
def test_workers_end_with_the_first_that_fails():
    with pytest.raises(SystemExit, match="worker 0 of 2 ended too early"), \
            processes.Workers("os:nothing", 2, {}) as workers:
        workers.hear()
    assert all(process.poll() is not None for process in workers.processes)


@pytest.mark.check
def test_tables_are_for_people_and_objects_for_machines(capsys):
    rows = [{"op": "add", "us": 1.2345, "times": 3, "more": None},
            {"op": "multiply", "us": 12345.6, "times": 4, "more": 1}]
    timing.show("a title", rows, False, [["op", "us", "more"]], note="a word")
    title, machine, note, _, *table = capsys.readouterr().out.splitlines()
    assert title == "a title" and "cores of" in machine and note == "  note: a word"
    assert table == ["  op            us  more", "  add         1.23     -", "  multiply  12,346     1"]
    timing.show("a title", rows, True, note="a word")
    assert json.loads(capsys.readouterr().out) == {"title": "a title", "machine": timing.machine(), "note": "a word",
                                                   "rows": rows}


# --------------------------------------------------------------------------------------------- the command line


def test_options_go_to_those_that_know_them(tmp_path, monkeypatch, capfd):
    (tmp_path / "one.py").write_text('"""One?"""\ndef main(json=False, ranks=2):\n    print("one", json, ranks)\n')
    (tmp_path / "two.py").write_text('"""Two?"""\ndef main(json=False, quick=False):\n    print("two", json, quick)\n')
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for file in tmp_path.glob("*.py"):
        file.rename(folder / file.name)
    monkeypatch.setattr(bench, "FOLDER", folder)
    assert main(["bench", "--ranks", "4", "--quick"]) == 0
    assert capfd.readouterr().out == "one False 4\ntwo False True\n"
    assert main(["bench", "two", "--ranks", "4", "--json"]) == 2
    assert capfd.readouterr() == ("", "globaltensor: two does not know --ranks\n  try: globaltensor bench --help\n")


@pytest.mark.parametrize("ranks", [1, 3])
def test_boxing_wants_ranks_that_cut_evenly(ranks):
    code, out, err = run([*BENCH, "boxing", "--ranks", ranks])
    assert code == 1 and out == "" and f"--ranks is 2, 4, 8 or 16, not {ranks}" in err


ENDLESS = '''"""Does it end?"""
import os, time
from pathlib import Path

def main(json=False):
    try:
        Path(os.environ["MADE"]).write_text(str(os.getpid()))
        time.sleep(100)
    finally:
        time.sleep(0.5)                              # a second signal comes meanwhile
        Path(os.environ["MADE"]).unlink()
'''


@pytest.mark.usefixtures("real_processes")           # the benchmark is a child that gets signals
@pytest.mark.skipif(sys.platform == "win32", reason="Windows asks no process to end")
@pytest.mark.processes
@pytest.mark.parametrize("name, code", [
    ("SIGINT", 130), ("SIGKILL", -9), pytest.param("SIGTERM", 143, marks=pytest.mark.long),
    pytest.param("SIGHUP", 129, marks=pytest.mark.long)])
def test_a_benchmark_that_is_asked_to_end_clears_up(name, code, tmp_path):
    if name == "SIGKILL" and sys.platform != "linux":
        pytest.skip("only Linux tells a process of its parent's death")
    folder, made = tmp_path / "benchmarks", tmp_path / "made"
    folder.mkdir()
    for benchmark in ("endless", "never_begun"):
        (folder / f"{benchmark}.py").write_text(ENDLESS)
    # who runs the tests may ignore signals, as nohup does
    heard = ("import signal; "
             "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]; ")
    program = (f"{heard}from pathlib import Path; from globaltensor.cli import bench, main; "
               f"bench.FOLDER = Path({str(folder)!r}); raise SystemExit(main(['bench']))")
    with subprocess.Popen([PYTHON, "-c", program], env=environment(MADE=str(made)), stderr=subprocess.PIPE) as command:
        wait_for(made.exists)
        command.send_signal(getattr(signal, name))
        time.sleep(0.2)
        if name != "SIGKILL":
            command.send_signal(getattr(signal, name))
        assert command.wait(60) == code
        wait_for(lambda: not made.exists())
        assert b"Traceback" not in command.stderr.read()


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("name, begins", [("hosts", ""), ("soak", "soak-*/one/disturbed/log"),
                                          ("soak", "soak-*/two/disturbed/log"), ("faults", "faults-*/tmp*/temporary")])
def test_a_benchmark_that_is_asked_to_end_leaves_nothing(name, begins, tmp_path):
    if name != "faults" and hosts.lacking():
        pytest.skip(hosts.lacking())
    folder = tmp_path / "tmp"
    folder.mkdir()
    env = environment(TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))     # torch keeps that
    with subprocess.Popen([*BENCH, name, "--quick"], env=env, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as command:
        child = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        wait_for(child.read_text)
        pid = child.read_text().strip()
        wait_for(lambda: any(folder.glob(begins)) if begins else namespaces_of(pid), 240)
        time.sleep(2)
        command.terminate()
        assert command.wait(120) == 143
    assert not list(folder.iterdir()) and not processes.left_behind(tmp_path)
    assert name == "faults" or not namespaces_of(pid)


def namespaces_of(pid: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f"gtbench{pid}" in line]


def wait_for(happens, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)
