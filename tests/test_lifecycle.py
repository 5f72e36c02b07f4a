"""A job whose ranks crash, stop or are preempted goes on by itself: the same bits on as many ranks, 1e-5 on fewer."""
from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, TORCHRUN, Started, environment, good, run
from test_liveness import soon

import globaltensor as gt
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.runtime import preemption
from globaltensor.runtime.preemption import REQUEUE

PROGRAM = PROGRAMS / "lifecycle.py"
STEPS = 10


def said(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "said").read_text().splitlines()]


def losses(folder: Path) -> dict[int, str]:
    """By step; a step that was done again must have had the same loss."""
    by_step: dict[int, str] = {}
    for each in said(folder):
        if "step" in each:
            assert by_step.setdefault(each["step"], each["loss"]) == each["loss"], f"step {each['step']} differs"
    return by_step


def starts(folder: Path) -> list[tuple[int, int]]:
    """(ranks, step from which it went on) of every start."""
    return [(each["ranks"], each["start"]) for each in said(folder) if "ranks" in each]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    """In one process that drives both ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    good([PYTHON, PROGRAM, folder, STEPS], environment(GLOBALTENSOR_RANKS="2"))
    assert starts(folder) == [(2, 0)]
    return losses(folder)


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault, words", [
    ("KILL", "rank 1 was killed by SIGKILL"), *(pytest.param(*row, marks=pytest.mark.long) for row in [
        ("SEGV", "rank 1 was killed by SIGSEGV"), ("raise", "rank 1 failed: ValueError: bad luck"),
        ("STOP", "rank 1 was stopped")])])
def test_a_crash_restarts_the_job_which_goes_on_bit_by_bit(fault, words, undisturbed, tmp_path):
    code, out, err = run([*RUN, "-n", 2, "--max-restarts", 1, PROGRAM, tmp_path, STEPS, fault, 1, 6], timeout=200)
    assert code == 0 and words in err and "the program is started again" in err, err
    assert losses(tmp_path) == undisturbed and starts(tmp_path) == [(2, 0), (2, 3)]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_restarts_come_to_an_end(tmp_path):
    code, out, err = run([*RUN, "-n", 2, "--max-restarts", 2, PROGRAMS / "fails.py", "raises"], timeout=200)
    assert code == 1 and err.count("started again") == 2 and err.count("rank 1 failed: ValueError: bad luck") == 3, err


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_with_fewer_ranks_losses_are_the_same_but_for_rounding(undisturbed, tmp_path):
    code, out, err = run([*RUN, "-n", 3, "--max-restarts", 1, "--min-ranks", 2, PROGRAM, tmp_path, STEPS, "KILL", 1, 6],
                         timeout=200)
    assert code == 0 and starts(tmp_path) == [(3, 0), (2, 3)], err
    last = {each["step"]: each["loss"] for each in said(tmp_path) if "step" in each}
    for step, loss in undisturbed.items():
        assert float.fromhex(last[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), f"step {step}"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_torchrun_restarts_it_too(undisturbed, tmp_path):
    code, out, err = run([*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, PROGRAM, tmp_path,
                          STEPS, "KILL", 1, 6], timeout=200)
    assert code == 0, err
    assert losses(tmp_path) == undisturbed and starts(tmp_path) == [(2, 0), (2, 3)]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_crash_on_one_host_restarts_those_of_all(undisturbed, tmp_path):
    port = 29000 + os.getpid() % 1000
    hosts = [Started([*RUN, "-n", 1, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", host,
                      "--max-restarts", 1, PROGRAM, tmp_path, STEPS, "KILL", 1, 6],
                     environment(GLOBALTENSOR_SECRET="x", GLOO_SOCKET_IFNAME="lo")) for host in range(2)]
    ends = [host.end(150) for host in hosts]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert losses(tmp_path) == undisturbed and starts(tmp_path) == [(2, 0), (2, 3)]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["launcher TERM", "launcher USR1", "TERM", "USR1"])
def test_a_job_that_is_preempted_saves_and_is_to_be_started_again(fault, undisturbed, tmp_path):
    env = environment(SAVES_FOR="8" if fault == "launcher TERM" else "0")
    code, out, err = run([*RUN, "-n", 2, "--max-restarts", 1, PROGRAM, tmp_path, STEPS, fault, 1, 5], env, timeout=200)
    assert code == REQUEUE, err
    (ended,) = [each["ended"] for each in said(tmp_path) if "ended" in each]
    code, out, err = run([*RUN, "-n", 2, PROGRAM, tmp_path, STEPS], timeout=200)
    assert code == 0 and losses(tmp_path) == undisturbed and starts(tmp_path) == [(2, 0), (2, ended)], err


# --------------------------------------------------------------------------------------------------- in one process


def test_resume_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path):
    state = {"x": torch.zeros(3), "n": 0}
    assert gt.resume(state, tmp_path / "run") is state and gt.resume(state, tmp_path) is state
    torch.manual_seed(7)
    gt.save({"x": torch.ones(3), "n": 5}, tmp_path)
    drawn = torch.rand(4)
    assert gt.resume(state, tmp_path)["n"] == 5 and (state["x"] == 1).all()
    assert torch.equal(torch.rand(4), drawn), "random numbers go on as after the save"


def test_resume_takes_the_last_version_that_is_whole(tmp_path):
    for n in range(3):
        gt.save({"x": torch.full((3,), float(n)), "n": n}, tmp_path)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").write_bytes(b"torn")
    (tmp_path / "latest").unlink()                   # ended after the version was whole and before this was written
    with pytest.warns(UserWarning, match="a newer version cannot be loaded"):
        assert gt.resume({"x": torch.zeros(3), "n": 0}, tmp_path)["n"] == 1
    with pytest.raises(CheckpointError, match="the state has"):
        gt.resume({"y": torch.zeros(3), "n": 0}, tmp_path)


@pytest.mark.parametrize("last", [1, 3, 4, 8, 12])
def test_the_job_of_the_page_takes_as_many_steps_wherever_it_is_asked_to_end(last, tmp_path, monkeypatch):
    """Of 3 epochs of 4 batches; also after the last batch of an epoch, and of the last one."""
    page = (Path(__file__).parents[1] / "docs" / "running.md").read_text()
    program = page.split("## Jobs that go on by themselves")[1].split("```python\n")[1].split("```")[0]
    asked = 0

    def preempted():
        nonlocal asked
        asked += 1
        return asked == last

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gt, "preempted", preempted)
    with pytest.raises(SystemExit):
        exec(program, {})
    names: dict = {}
    exec(program, names)
    assert asked == 12
    assert {moments["step"].item() for moments in names["optimizer"].state.values()} == {12.0}


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_signals_are_noted_and_reach_the_program_s_own_handler(number, monkeypatch):
    monkeypatch.setattr(preemption, "_preemption", preemption.Preemption())
    before = {each: signal.getsignal(each) for each in preemption.SIGNALS}
    heard = []
    try:
        signal.signal(number, lambda *_: heard.append(1))
        assert not gt.preempted()
        os.kill(os.getpid(), number)
        assert soon(lambda: heard)
        assert soon(gt.preempted) and gt.preempted()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("seconds", [0.5, 0.01, 3.0])
def test_ranks_ask_each_other_about_once_a_second(seconds, monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(preemption, "gather_objects",
                        lambda value, what: asked.append(clock[0]) or [value, (False, 9.9)])
    own = preemption.Preemption()
    own.listening = True
    monkeypatch.setattr(preemption, "_preemption", own)
    while clock[0] < 10 * max(1, seconds):
        assert not gt.preempted()
        clock[0] += seconds
    assert all(0.5 <= b - a <= 2 * max(1, seconds) for a, b in zip(asked[-4:], asked[-3:]))
