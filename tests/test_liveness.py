"""A rank that dies, stops or loops is noticed by the others wherever they wait for it, in time, and named; a slow one
is left alone."""
from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, RUN, TORCHRUN, Started, by_hand, environment, results

from globaltensor.runtime import deadlock, host_processes, liveness, stacks, start_watch
from globaltensor.runtime.codec import encode_message
from globaltensor.runtime.host_processes import (
    ENDED,
    RUNS,
    STOPPED,
    ProcessId,
    process_id,
    process_state,
    rank_processes,
)
from globaltensor.runtime.liveness import Liveness, advice_after
from globaltensor.runtime.native import torch_ext

PROGRAM = PROGRAMS / "faults.py"
KERNEL = 2.0                                         # seconds, where the kernel tells of a death
STOP = 10.0
START = 5.0

# place, fault, native code, seconds within which the others are told
DEATHS = [(place, fault, native, START if place == "start" else KERNEL)
          for place in ("start", "boxing", "saving", "loading", "data") for fault in ("KILL", "SEGV", "exit 0")
          for native in ("1", "0")]
STOPS = [(place, "STOP", native, STOP) for place in ("start", "boxing", "saving", "loading", "data")
         for native in ("1", "0")]
FEW = [("saving", "KILL", "1", KERNEL)]


def happens(place: str, fault: str, native: str, folder: Path, *timeout: float, ranks: int = 2, seconds: float = 40,
            **env: str) -> dict[int, dict]:
    """What the other ranks of a job without a launcher were told."""
    started = by_hand([PROGRAM, place, fault, folder, *timeout], ranks, GLOBALTENSOR_NATIVE=native, **env)
    try:
        for rank, one in enumerate(started):
            if rank != 1:
                code, out, err = one.end(seconds)
                assert code == 0 or native == "0", f"{out}\n{err}"       # the watch may have to end the process
    finally:
        for one in started:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.communicate()
    return results(folder)


@pytest.mark.processes
@pytest.mark.parametrize("place, fault, native, limit",
                         FEW + [pytest.param(*row, marks=pytest.mark.long) for row in DEATHS + STOPS if row not in FEW])
def test_a_rank_that_is_lost_is_named_in_time(place, fault, native, limit, tmp_path):
    for rank, each in happens(place, fault, native, tmp_path).items():
        assert "rank 1" in each["told"], f"rank {rank}: {each}"
        assert each["after"] < limit, f"rank {rank}: {each}"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("place, fault, native, victim", [
    ("start", "STOP", "1", 0),                       # that one keeps the store
    ("connecting", "STOP", "1", 2), ("connecting", "STOP", "0", 0), ("connecting", "KILL", "1", 1),
    ("sharing", "STOP", "1", 1), ("sharing", "KILL", "1", 2)])
def test_a_rank_that_is_lost_while_others_start_inside_torch_is_named(place, fault, native, victim, tmp_path):
    """There nobody can raise: where it takes too long, processes show the error and end."""
    if place == "sharing" and torch_ext is None:
        pytest.skip("the native code is not built")
    started = by_hand([PROGRAM, place, fault, tmp_path], 3, GLOBALTENSOR_NATIVE=native, VICTIM=str(victim))
    try:
        errors = {rank: one.end(60)[2] for rank, one in enumerate(started) if rank != victim}
    finally:
        for one in started:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.communicate()
    told = {rank: each["told"] for rank, each in results(tmp_path).items()}
    for rank, text in errors.items():
        text = told.get(rank) or text
        assert f"rank {victim} " in text and "faults.py:" in text, f"rank {rank}: {text}"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("launcher", [RUN, TORCHRUN])
def test_a_rank_that_ends_well_before_the_others_have_met_is_named_under_a_launcher(launcher, tmp_path):
    count = ["-n" if launcher is RUN else "--nproc-per-node", 2]
    Started([*launcher, *count, PROGRAM, "start", "exit 0", tmp_path]).end(60)
    for rank, each in results(tmp_path).items():
        assert rank != 1 and "rank 1 ended before all ranks had met" in each["told"] and each["after"] < START, each


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("place", ["loading", "boxing"])
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_rank_that_loops_is_shown_where(place, native, tmp_path):
    (told,) = happens(place, "loop", native, tmp_path, 6).values()
    assert "waited" in told["told"] and "for rank 1" in told["told"], told
    assert "faults.py" in told["told"] and "in go_wrong" in told["told"], told
    assert 5 < told["after"] < 12


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("hosts", [{}, dict(HOSTS="1", LOCAL_WORLD_SIZE="1", GLOBALTENSOR_SECRET="x",
                                            GLOO_SOCKET_IFNAME="lo")], ids=["one host", "a host each"])
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("fault, timeout", [("raise", []), ("KILL", []), ("loop", [6])])
def test_who_waits_for_a_rank_that_failed_by_another_is_told_of_the_first(fault, timeout, native, hosts, tmp_path):
    told = happens("bystander", fault, native, tmp_path, *timeout, ranks=3, **hosts)
    assert told.keys() == {0, 2}                     # rank 2 waits for rank 0, which waits for rank 1
    for each in told.values():
        assert "rank 1" in each["told"] and each["after"] < 15, each
        if fault == "raise":
            assert "rank 1 raised ValueError: bad luck   at" in each["told"], each


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["boxing", "saving", "loading"])
@pytest.mark.parametrize("native", ["1", "0"])
def test_who_keeps_the_interpreter_s_lock_for_30_seconds_is_waited_for(place, native, tmp_path):
    (told,) = happens(place, "keeps the lock", native, tmp_path, SECONDS="30", seconds=90).values()
    assert told["told"] == "nothing" and told["after"] > 29, told


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_slow_ranks_raise_no_false_alarm(tmp_path):
    """For three minutes; GLOBALTENSOR_SLOW_MINUTES=30 for half an hour."""
    minutes = os.environ.get("GLOBALTENSOR_SLOW_MINUTES", "3")
    code, out, err = Started([*RUN, "-n", "8", PROGRAMS / "slow_ranks.py", minutes, tmp_path / "saved"],
                             environment()).end(60 * float(minutes) + 200)
    assert code == 0 and "WARNING" not in err, f"{out}\n{err}"
    steps, _, saves, _, calls, *_ = out.split()
    assert int(calls) >= float(minutes) and int(saves) >= int(calls) and int(steps) > 10, out


# ------------------------------------------------------------------------------------------------- on several hosts


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("place, fault, seconds, limit", [
    *((place, "KILL", "", KERNEL) for place in ("boxing", "pipeline", "loading")),
    ("saving", "KILL", "", 16), ("loading", "STOP", "", 16), ("loading", "keeps the lock", "30", 0)])
def test_a_rank_of_another_host_is_lost_when_its_heart_stands_still(place, fault, seconds, limit, tmp_path):
    """Where it was killed, its connections close; which they are is asked of each, as torch does not tell."""
    told = happens(place, fault, "1", tmp_path, ranks=4, seconds=90, HOSTS="1", LOCAL_WORLD_SIZE="1", SECONDS=seconds,
                   GLOBALTENSOR_SECRET="x", GLOO_SOCKET_IFNAME="lo")
    assert told.keys() == {0, 2, 3}
    for each in told.values():
        if limit:
            assert "rank 1" in each["told"] and each["after"] < limit, each
        else:
            assert each["told"] == "nothing" and each["after"] > 29, each


class Store(dict):
    """Those calls of torch's store that are used."""

    get = dict.__getitem__
    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)

    def add(self, key, more):
        self[key] = dict.get(self, key, 0) + more
        return self[key]


class Gone(Store):
    def check(self, keys):
        raise RuntimeError("failed to recv, got 0 bytes")


@pytest.fixture
def clock(monkeypatch):
    """The time, to set."""
    now = [1000.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


def test_a_heart_counts_as_long_as_it_beats(clock):
    store = Store()
    alive = Liveness({1: ProcessId("elsewhere", 5, 7), 2: ProcessId("", 5, 7)}, store)
    key = liveness.heart_key(1)
    for beat in range(5):
        store[key] = encode_message(beat, key)
        assert alive.lost([1, 2]) is None
        clock[0] += 9
    clock[0] += liveness.SILENCE_PYTHON
    assert alive.lost([2]) is None, "nothing is known of a process without a host"
    assert alive.lost([1]).rank == 1 and "silent" in alive.lost([1]).how
    for forged in (b"99", encode_message(99, liveness.heart_key(2)), encode_message(3, key)):
        store[key] = forged
        assert alive.lost([1]).rank == 1, "it is of another rank, or an old one"
    store[key] = encode_message(99, key)
    assert alive.lost([1]) is None, "it was only slow"


def test_the_first_failure_is_told_by_all_also_when_the_store_is_gone():
    store = Store()
    ranks = [Liveness({}, store) for _ in range(3)]
    first, other = liveness.Loss(1, "rank 1 raised ValueError"), liveness.Loss(0, "rank 0 has ended")
    assert ranks[2].first_loss() is None and ranks[1].first_lost(first) == first
    assert ranks[0].first_lost(other) == first and ranks[2].first_loss() == first
    ranks[2].store = Gone()
    assert ranks[2].first_lost(other) == first, "it was read before"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("cannot print")


@pytest.mark.parametrize("error, how", [
    (Unprintable(), "raised Unprintable: <exception str() failed>"), (ValueError(), "raised ValueError"),
    (ValueError("a\nb"), "raised ValueError: a"), (SystemExit(3), "ended by sys.exit(3)"),
    (SystemExit("why"), "ended by sys.exit(why)"), (SystemExit(), None), (SystemExit(0), None), (SystemExit(99), None)])
def test_how_a_rank_failed_is_told_and_no_good_end(error, how, monkeypatch):
    store = Store()
    monkeypatch.setattr(liveness, "_liveness", Liveness({}, store, 1))
    liveness.tell_failure(1, error)
    loss = Liveness({}, store).first_loss()
    assert loss == (how and liveness.Loss(1, f"rank 1 {how}   at <unknown>:0"))


def test_the_rank_that_keeps_others_waiting_is_found_behind_those_that_wait_too():
    def watch(*waits):
        look = deadlock.Watch(Store({f"globaltensor wait {rank}": encode_message((1, "boxing", peers, 8, "x:1"), rank)
                                     for rank, peers in waits}), 0, 5)
        return look.keeping(deadlock.Wait(1, "boxing", (1, 4), 8))

    assert watch() == [1, 4] and watch((1, (0, 2))) == [4]
    assert watch((1, (0, 2)), (4, (0, 1))) == [2] and watch((1, (0, 2)), (4, (3,)), (3, (1,))) == [2]
    assert watch((1, (0,)), (4, (1,))) == [1, 4], "all wait"


def test_a_store_that_is_gone_tells_nothing_of_ranks(clock):
    alive = Liveness({1: ProcessId("elsewhere", 5, 7)}, Gone())
    for _ in range(3):
        assert alive.lost([1]) is None
        clock[0] += 2 * liveness.SILENCE_PYTHON


# ----------------------------------------------------------------------------------------------- what the kernel tells


@pytest.fixture
def child():
    """A process that sleeps, and is armed."""
    code = "import sys, time; from runpy import run_path; run_path(sys.argv[1])['arm_stacks']()\n"
    code += "def deep():\n    print(1, flush=True)\n    time.sleep(60)\ndeep()"
    one = Started([PYTHON, "-c", code, stacks.__file__],
                  environment(RANK="3", WORLD_SIZE="5", MASTER_PORT="1", MASTER_ADDR="test"))
    assert one.process.stdout.readline() == "1\n"
    yield one.process
    one.process.kill()
    one.process.communicate()


def soon(predicate) -> bool:
    """Does it hold within a second?"""
    return any(predicate() or time.sleep(0.01) for _ in range(100))


def test_a_process_runs_is_stopped_and_ends(child, clock):
    process = process_id(child.pid)
    assert process_state(process) == RUNS and process.here
    assert process_state(process._replace(began=process.began + 1)) == ENDED, "another process has that pid"
    alive = Liveness({1: process}, None)
    child.send_signal(signal.SIGSTOP)
    assert soon(lambda: process_state(process) == STOPPED)
    for _ in range(4):
        assert alive.lost([1]) is None
        clock[0] += 1.5
    assert f"kill -CONT {child.pid}" in (how := alive.lost([1]).how) and "start the job again" in advice_after(how)
    clock[0] += 10
    assert alive.lost([1]) is None, "this process did not look for 10 seconds: it may have been stopped too"
    child.send_signal(signal.SIGCONT)
    assert soon(lambda: process_state(process) == RUNS) and alive.lost([1]) is None
    for _ in range(5):
        child.send_signal(signal.SIGSTOP)
        assert soon(lambda: process_state(process) == STOPPED)
        assert alive.lost([1]) is None, "it was never stopped for long, though it never ran when somebody looked"
        clock[0] += 1.5
        child.send_signal(signal.SIGCONT)
        assert soon(lambda: process_state(process) == RUNS)
    child.kill()
    assert soon(lambda: process_state(process) == ENDED), "though nobody has waited for it: it is a zombie"
    assert alive.lost([1]).rank == 1


def test_a_rank_of_this_host_that_is_stopped_is_named_and_one_that_has_met_all_must_not_end(child, clock, monkeypatch):
    for name, value in dict(RANK="2", WORLD_SIZE="5", MASTER_PORT="1", MASTER_ADDR="test").items():
        monkeypatch.setenv(name, value)
    near = start_watch.HostPeers(2, 5)
    process = process_id(child.pid)
    assert near.ranks == {0, 1, 3, 4} and near.seen_here() == {3: process} == near.seen_here()
    child.send_signal(signal.SIGSTOP)
    assert soon(lambda: process_state(process) == STOPPED)
    for _ in range(4):
        assert near.lost() is None
        clock[0] += 1.5
    assert near.lost().rank == 3 and f"kill -CONT {child.pid}" in near.lost().how
    child.kill()
    assert soon(lambda: process_state(process) == ENDED)
    assert near.seen_here() == {} and near.lost() is None, "it may not have met anybody"
    near.know(dict.fromkeys(range(5), host_processes.own_process()) | {3: process})
    assert near.lost().rank == 3


@pytest.mark.usefixtures("real_processes")           # whose stacks begin with the program
def test_ranks_and_their_stacks_are_found_by_other_processes(child):
    (each,) = [each for each in rank_processes() if each.job.startswith("test 1 ")]
    assert (each.process, each.rank, each.ranks) == (process_id(child.pid), 3, 5)
    for _ in range(2):                               # the second time, only the new one
        stack = stacks.stack_of(child.pid).splitlines()
        assert len(stack) == 2 and "in deep" in stack[0] and "in <module>" in stack[1], stack
    child.send_signal(signal.SIGSTOP)
    assert soon(lambda: process_state(each.process) == STOPPED)
    began = time.monotonic()
    assert stacks.stack_of(child.pid) == "" and time.monotonic() - began < stacks._PATIENCE / 2


@pytest.mark.usefixtures("real_processes")
def test_many_who_ask_at_once_are_all_told_where_the_main_thread_is():
    """Of several signals at once the kernel gives some to other threads, unless they are for the main one."""
    code = ("import sys, threading, time; from runpy import run_path; run_path(sys.argv[1])['arm_stacks']()\n"
            "for _ in range(8):\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
            "def deep():\n    print(1, flush=True)\n    while True:\n        pass\ndeep()")
    one = Started([PYTHON, "-c", code, stacks.__file__])
    assert one.process.stdout.readline() == "1\n"
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(stacks.stack_of, [one.process.pid] * 18))
    finally:
        one.process.kill()
        one.process.communicate()
    for stack in answers:
        assert len(stack.splitlines()) == 2 and "in deep" in stack, stack


def test_a_process_that_is_not_armed_is_left_alone():
    one = Started(["sleep", "60"])
    assert stacks.stack_of(one.process.pid) == "" and stacks.stack_of(2**22 + 1) == ""
    time.sleep(0.1)
    assert one.process.poll() is None
    one.process.kill()
    one.process.communicate()


def test_this_process_is_known_after_a_fork():
    assert host_processes.own_process() == process_id(os.getpid())
    read, write = os.pipe()
    if not os.fork():
        os.write(write, str(host_processes.own_process().pid == os.getpid()).encode())
        os._exit(0)
    assert os.read(read, 10) == b"True"
    os.wait()
