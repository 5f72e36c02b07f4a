"""One program in one process, under `globaltensor run`, under torchrun, and on two hosts; and how it ends badly."""
from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache

import pytest
from harness import (
    PROGRAMS,
    PYTHON,
    RUN,
    TORCHRUN,
    Started,
    by_hand,
    environment,
    free_port,
    good,
    good_all,
    results,
    run,
)

from globaltensor.runtime.native import torch_ext

pytestmark = pytest.mark.processes

VALUES, MISTAKES, FAILS = (str(PROGRAMS / f"{name}.py") for name in ("values", "mistakes", "fails"))


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process sees that drives so many ranks."""
    @cache
    def seen(ranks):
        folder = tmp_path_factory.mktemp(f"alone{ranks}")
        good([PYTHON, VALUES, folder], environment(GLOBALTENSOR_RANKS=str(ranks)))
        return results(folder)[0]

    return seen


def check(folder, ranks, alone, same_plans=True):
    """Every process saw what the lone one saw: the values, and the boxings where plans are the same."""
    seen = results(folder)
    assert sorted(seen) == list(range(ranks))
    for rank, found in seen.items():
        assert found["values"].keys() == alone(ranks)["values"].keys()
        for name, value in found["values"].items():
            if same_plans:
                assert value == alone(ranks)["values"][name], f"rank {rank}: {name}"
                assert found["moves"].get(name) == alone(ranks)["moves"].get(name), f"rank {rank}: {name}"
            else:                                    # sums are taken in another order
                assert near(value, alone(ranks)["values"][name]), f"rank {rank}: {name}"


def near(a, b):
    """Nested lists of the same values, numbers up to rounding."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(near, a, b))
    return math.isclose(a, b, rel_tol=1e-11, abs_tol=1e-13) if isinstance(a, float) else a == b


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_globaltensor_run(ranks, alone, tmp_path):
    out = good([*RUN, "-n", ranks, VALUES, tmp_path])
    assert out.count('[6] int64 on placement("cpu", [0, 1') == 1, "gt.show prints once"
    check(tmp_path, ranks, alone)


@pytest.mark.long
def test_torchrun(alone, tmp_path):
    good([*TORCHRUN, "--nproc-per-node", 4, "--master-port", free_port(), "--log-dir", tmp_path / "logs", VALUES,
          tmp_path])
    check(tmp_path, 4, alone)


def test_two_hosts_on_loopback(alone, tmp_path):
    meet = ["--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-id", "two",
            "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--log-dir", tmp_path / "logs"]
    good_all(*[([*TORCHRUN, *meet, VALUES, tmp_path], {})] * 2)
    check(tmp_path, 4, alone, same_plans=False)


@contextmanager
def network():
    """Two network namespaces joined by a cable, their addresses, or a skip where this is not allowed."""
    names = [f"gt{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.213.77.1", "10.213.77.2"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip`")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "gtveth0", "netns", names[0], "type", "veth", "peer", "gtveth1", "netns", names[1])
            for k, name in enumerate(names):
                ip("-n", name, "addr", "add", f"{addresses[k]}/24", "dev", f"gtveth{k}")
                ip("-n", name, "link", "set", f"gtveth{k}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield names, addresses
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.mark.long
def test_two_hosts_with_a_network_each(alone, tmp_path):
    with network() as (names, addresses):
        port = free_port()
        hosts = [Started(["ip", "netns", "exec", name, *RUN, "-n", 2, "--nnodes", 2, "--rdzv-endpoint",
                          f"{addresses[0]}:{port}", "--local-addr", address, VALUES, tmp_path],
                         environment(GLOO_SOCKET_IFNAME=f"gtveth{k}"))
                 for k, (name, address) in enumerate(zip(names, addresses))]
        for code, out, err in [host.end() for host in hosts]:
            assert code == 0, out + err
    check(tmp_path, 4, alone, same_plans=False)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("unshare") is None, reason="a pid namespace takes unshare")
@pytest.mark.parametrize("said", ["", "2"])
def test_two_pods_of_which_no_launcher_says_that_they_are_two(said, alone, tmp_path):
    """Kubeflow's PyTorchJob sets four variables. Where LOCAL_WORLD_SIZE says that both pods are one host, both end."""
    with network() as (names, addresses):
        env = dict(MASTER_ADDR=addresses[0], MASTER_PORT=str(free_port()), WORLD_SIZE="2", GLOBALTENSOR_SECRET="secret")
        pods = [Started(["ip", "netns", "exec", name, "unshare", "-p", "-f", "--mount-proc", PYTHON, VALUES, tmp_path],
                        environment(GLOO_SOCKET_IFNAME=f"gtveth{k}", RANK=str(k), **env,
                                    **({"LOCAL_WORLD_SIZE": said, "LOCAL_RANK": str(k)} if said else {})))
                for k, name in enumerate(names)]
        for code, out, err in [pod.end() for pod in pods]:
            assert code == (1 if said else 0), out + err
            assert not said or torch_ext is None or "is it on another host?" in err, err
    if not said:
        check(tmp_path, 2, alone, same_plans=False)


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
@pytest.mark.parametrize("spare, said", [(20 << 30, ""), (700 << 20, "ulimit -v unlimited")])
def test_a_limit_on_the_address_space(spare, said):
    """What all ranks of the host share has to fit in what it leaves each; else the error names it."""
    code, out, err = run([*RUN, "-n", 2, PROGRAMS / "limited.py", "bytes", spare])
    assert (code, out.count("over shared memory")) == ((1, 0) if said else (0, 2)), out + err
    assert said in err, err


@pytest.mark.long
@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_a_limit_on_the_size_of_files():
    """It counts for memory as well; what is to be typed works."""
    line = ["bash", "-c", f"ulimit -f 100; {' '.join(map(str, RUN))} -n 2 {PROGRAMS / 'limited.py'} files 64"]
    code, out, err = run(line)
    assert code == 1 and "100 KiB here (ulimit -f)" in err and "ulimit -f unlimited" in err, out + err
    assert good(line, environment(GLOBALTENSOR_NATIVE="0")).count("over ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="whose interfaces are they?")
def test_an_interface_that_is_none_is_named_on_every_rank():
    """Before any rank waits for another."""
    for code, out, err in [one.end() for one in by_hand([PROGRAMS / "limited.py", "files", 64], 2,
                                                        LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="eth99")]:
        assert code == 1 and "GLOO_SOCKET_IFNAME=eth99: " in err and "lost touch" not in err, out + err


@pytest.mark.parametrize("kind, files", [("files", 20), ("all files", 12), ("all files", 16), ("all files", 20),
                                         ("all files", 30), ("all files", 64)])
def test_a_limit_on_open_files(kind, files):
    """A rank raises it, as far as it may; where that is too little, each says so, and none that another has ended."""
    env = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [Started([PYTHON, PROGRAMS / "limited.py", kind, files], env | {"RANK": str(r)}) for r in range(2)]
    for code, out, err in [rank.end() for rank in ranks]:
        assert (code, "over " in out) == ((1, False) if kind == "all files" and files < 64 else (0, True)), out + err
        assert code == 0 or "too few files" in err and "ulimit -n" in err and "lost touch" not in err, err


@pytest.mark.parametrize("files", [16, 20, 24])
def test_a_limit_on_the_launcher_s_open_files(files):
    code, out, err = run(["bash", "-c", f"ulimit -n {files}; {' '.join(map(str, RUN))} -n 2 {PROGRAMS / 'limited.py'}"])
    assert code == 1 and "Traceback" not in err, err
    assert f"too few files: {files} (ulimit -n)" in err and "try: ulimit -n 65536" in err, err


# --------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_told_on_every_rank_and_at_once(tmp_path):
    good([*RUN, "-n", 4, MISTAKES, tmp_path])
    told = results(tmp_path)
    assert sorted(told) == [0, 1, 2, 3]
    shapes = ("a longer part", "another width", "another number of dims", "another dtype")
    kinds = {"no such dim": "SbpError", "mixed placements": "MixedPlacementError", "forbidden boxing": "BoxingError",
             "into a plain tensor too": "InPlaceError",
             **dict.fromkeys(shapes, "ShapeError")}
    for rank, said in told.items():
        assert said.pop("and goes on") == 6.0
        two = said.pop("another plain operand of two ranks")
        assert two[0] == ("DisagreementError" if rank in (1, 2) else "nothing") and "rank 0" not in two[1], two
        for name, (kind, text, where, seconds) in said.items():
            assert kind == kinds.get(name, "DisagreementError"), f"rank {rank}, {name}: {kind} {text}"
            assert re.fullmatch(r"\S*mistakes\.py:\d+", where), f"{name}: {where}"
            assert seconds < 5, f"{name} took {seconds} seconds"
            assert ("torch.zeros instead of torch.empty" in text) == (name == "memory that nobody wrote"), text
            assert ("the ranks use a plain tensor differently" in text) == (name == "another layout"), text
            if kind in ("DisagreementError", "ShapeError"):
                assert "rank 0:" in text and "rank 1:" in text, text


def test_one_rank_may_watch_what_is_boxed():
    good([*RUN, "-n", 2, PROGRAMS / "watched.py"])


# ------------------------------------------------------------------------------------------------ ending badly


def failing(how, ranks=2, **env):
    """Exit code and errors of `globaltensor run`, and the seconds it took."""
    began = time.monotonic()
    code, out, err = run([*RUN, "-n", ranks, FAILS, how], environment(**env))
    assert "torch/distributed/elastic" not in err, err       # none of torch's own report
    return code, out, err, time.monotonic() - began


def test_a_rank_that_raises_shows_its_traceback_once():
    code, _, err, _ = failing("raises")
    assert code == 1
    assert err.count("Traceback") == 1 and err.count("ValueError: bad luck") == 2, err       # and in the last lines
    assert "rank 1:\nTraceback" in err and "fails.py\", line" in err
    assert "globaltensor: rank 1 failed: ValueError: bad luck\n" in err
    assert "runpy" not in err and "worker.py" not in err, err


def test_ranks_that_all_raise_show_one_traceback():
    code, _, err, _ = failing("all raise")
    assert code == 1
    assert err.count("Traceback") == 1 and err.count("try:   other ranks") == 1, err
    assert "globaltensor: ranks 0, 1 failed: PlacementError: rank 9 is outside the world of 2 ranks" in err


def test_a_rank_that_ends_early_is_named():
    code, _, err, _ = failing("is early")
    assert code == 1 and "globaltensor: rank 1 ended without an error, while others waited\n" in err, err


def test_a_segmentation_fault_shows_the_line_of_the_program():
    code, _, err, _ = failing("faults")
    assert code == 128 + signal.SIGSEGV and "Segmentation fault" in err and "fails.py\", line" in err, err


def test_ranks_that_are_ended_may_save(tmp_path):
    job = Started([*RUN, "-n", 2, FAILS, "saves", tmp_path])
    for _ in range(2):
        assert "is process" in job.process.stdout.readline()
    job.process.send_signal(signal.SIGTERM)
    assert job.end(60)[0] == 128 + signal.SIGTERM
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved 0", "saved 1"]


RETURNS_LATE = """
import datetime, sys, threading, time
import torch.distributed as dist
import globaltensor as gt
gt.init()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
class Slow:
    def __del__(self): time.sleep(1.5)               # the interpreter ends meanwhile
sys.slow = Slow()
threading.Thread(target=store.wait, args=(["never"], datetime.timedelta(seconds=0.7)), daemon=True).start()
time.sleep(0.2)
print("all is well", flush=True)
"""


def test_a_thread_that_returns_to_an_interpreter_that_ends_does_not_abort_it(tmp_path):
    (tmp_path / "late.py").write_text(RETURNS_LATE)
    assert good([*RUN, "-n", 2, tmp_path / "late.py"]).count("all is well") == 2


@pytest.mark.check
def test_exit_codes_are_kept():
    started = [Started([*RUN, "-n", 2, FAILS, how]) for how in ("exits", "exits with a word")]
    (code, _, first), (other, _, second) = [one.end() for one in started]
    assert code == 3 and "globaltensor: rank 1 failed: exit code 3" in first
    assert other == 1 and second.count("not today") == 2, second


def test_a_rank_that_is_killed_ends_the_others():
    code, _, err, seconds = failing("is killed")
    assert code == 128 + signal.SIGKILL
    assert "globaltensor: rank 1 was killed by SIGKILL" in err
    assert seconds < 30


def test_who_waits_for_a_killed_rank_is_told_where():
    ranks = by_hand([FAILS, "waits for a dead one"], 3)
    ended = [rank.end(40) for rank in ranks]
    text = (PROGRAMS / "fails.py").read_text().splitlines()
    line = next(k for k, words in enumerate(text, 1) if "the line that must be named" in words)
    assert ended[1][0] == -signal.SIGKILL
    for code, _, err in (ended[0], ended[2]):
        assert code == 1
        assert "TransportError: rank" in err and "lost touch with rank" in err, err
        assert f"where: fails.py:{line}" in err, err
        assert re.search("a rank ended|rank 1 was killed", err) and "try:" in err, err


@pytest.mark.parametrize("how, native", [("parts ways", "1"), ("parts ways", "0"), ("swaps", "0")])
def test_ranks_that_wait_for_each_other_in_vain_are_told_on_every_rank(how, native):
    began = time.monotonic()
    ended = [rank.end(45) for rank in by_hand([FAILS, how], 3, GLOBALTENSOR_NATIVE=native)]
    assert time.monotonic() - began < 40
    for rank, (code, out, err) in enumerate(ended):
        assert code == 1, out + err
        told, does = "deadlock: every rank waits for another", r" waits for ranks? [\d, ]+ in"
        if native == "1" and told not in err:        # native code saw first that two wait for each other
            told, does = "the ranks disagree about what to do", ":"
        assert f"DisagreementError: {told}" in err, f"rank {rank}: {err}"
        for other in range(3):
            assert re.search(rf"rank {other}{does} .*   at fails\.py:\d+", err), err
        assert "the value is" not in out


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_ranks_that_box_different_things_are_told_on_every_rank_at_once():
    for rank, (code, out, err) in enumerate([rank.end(45) for rank in by_hand([FAILS, "swaps"], 3)]):
        assert code == 1 and "the value is" not in out, out + err
        assert "DisagreementError: the ranks disagree about what to do" in err, f"rank {rank}: {err}"
        for other in range(3):
            assert re.search(rf"rank {other}: full_tensor of \[.*   at fails\.py:\d+", err), err


DISAGREEMENTS = {                                    # what every rank is told that the ranks do
    "swapped lines": r"to_global of \[8, 4\] .* S\(0\) -> placement\(.*\) B   at disagreements\.py:(\d+)",
    "swapped in a line": r"to_global of \[8, 4\] .* B   at disagreements\.py:(\d+)",
    "target": r"to_global of \[8, 4\] .* S\(0\) -> placement\(.*\) (B|S\(1\))   at disagreements",
    "index": r"aten\.select\.int\(dim=0, index=([07])\) of",
    "slice": r"aten\.slice\.Tensor\(.*end=([34])\) of",
}


@pytest.mark.parametrize("how, native", [
    ("swapped lines", "1"), ("target", "1"), ("index", "1"),
    *[pytest.param(*case, marks=pytest.mark.long) for case in (
        ("swapped in a line", "1"), ("slice", "1"), ("swapped lines", "0"), ("swapped in a line", "0"), ("target", "0"),
        ("slice", "0"))]])
def test_ranks_that_mean_something_else_get_no_value(how, native):
    program = PROGRAMS / "disagreements.py"
    ranks = by_hand([program, how], 2, GLOBALTENSOR_NATIVE=native)
    for rank, (code, out, err) in enumerate([one.end(45) for one in ranks]):
        assert code == 1 and "the value is" not in out, f"{how}, rank {rank}: {out}{err}"
        assert "DisagreementError" in err, err
        rows = [re.search(rf"    rank {other}[: ].*{DISAGREEMENTS[how]}", err) for other in range(2)]
        assert all(rows), f"{how}, rank {rank}: {err}"
        assert how == "swapped in a line" or rows[0][1] != rows[1][1], err


@pytest.mark.parametrize("how, reason, fix", [
    ("layouts", "the ranks use a plain tensor differently", "the same arguments"),
    ("values", "different plain tensors", "gt.data.from_ranks"),
    ("models", "the ranks have different models\n.*rank 0: weight of a model on", r"torch\.manual_seed\(0\)"),
    ("saves", "only some of the ranks save a checkpoint\n", r"gt\.save\(\.\.\.\) on every rank"),
    ("creates", "the ranks disagree about what to do\n", "no global op under a condition")])
def test_the_reason_follows_from_what_all_ranks_are_at(how, reason, fix):
    for code, out, err in [one.end(45) for one in by_hand([PROGRAMS / "disagreements.py", how], 2)]:
        assert code == 1 and "the value is" not in out and re.search(f"DisagreementError: .*{reason}", err), err
        assert re.search(f"try: +{fix}", err), err


@pytest.mark.parametrize("how, line", [("values", 11), ("targets", 13)])
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_errors_after_one_that_all_ranks_have_caught_name_it(how, line, native):
    first = "the ranks disagree about what to do" if native == "1" else "deadlock: every rank waits for another"
    ranks = by_hand([PROGRAMS / "caught.py", how], 2, GLOBALTENSOR_NATIVE=native)
    for code, out, err in [one.end(45) for one in ranks]:
        assert code == 0 and "the value is" not in out, out + err
        caught, *later = re.split("^(?=TransportError)", out, flags=re.M)
        assert f"caught {first} at caught.py:{line}\n" == caught and len(later) == 2, out
        for text in later:
            assert "in the boxing for" not in text and "has ended communication between these ranks\n" in text, text
            assert f"was DisagreementError: {first}; it came at caught.py:{line}\n" in text, text
            assert "where: caught.py:18\n" in text and "try:   let it end the program" in text, text


def test_a_signal_handler_that_saves_while_its_rank_waits():
    one, other = [r.end(45) for r in by_hand([PROGRAMS / "signalled.py"], 2)]
    assert other[0] == 1 and "saving a checkpoint in a signal handler, while this rank waits in ones([5]" in other[2]
    assert one[0] == 1 and "rank 1" in one[2], one


@pytest.mark.parametrize("native", ["0", "1"])
def test_lengths_that_differ_end_no_process_of_gloo(native):
    """gloo throws in a thread of its own where more comes than was asked for."""
    ranks = by_hand([PROGRAMS / "disagreements.py", "lengths"], 2, GLOBALTENSOR_NATIVE=native, LOCAL_WORLD_SIZE="1",
                    GLOO_SOCKET_IFNAME="lo", GLOBALTENSOR_SECRET="of tests")
    for rank, (code, out, err) in enumerate([one.end(45) for one in ranks]):
        assert code == 1 and "the value is" not in out and "terminate called" not in err, f"{rank}: {code} {out}{err}"
        assert "DisagreementError: deadlock" in err and "[4000, 4]" in err and "[8, 4]" in err, err


@pytest.mark.parametrize("native", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_rank_that_records_is_in_step(native):
    ended = [r.end(45) for r in by_hand([PROGRAMS / "disagreements.py", "in step"], 2, GLOBALTENSOR_NATIVE=native)]
    assert [(code, out) for code, out, _ in ended] == [(0, "the value is 128.0\n")] * 2, ended


def test_who_is_slow_is_waited_for():
    """Ranks that are stopped for longer than a deadlock takes to be found, in turns, while the other waits."""
    ranks = by_hand([FAILS, "is patient"], 2)
    for rank in ranks:
        assert "is process" in rank.process.stdout.readline(), rank.end()
    for rank in ranks[::-1]:
        rank.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        rank.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    for code, out, err in [rank.end(40) for rank in ranks]:
        assert code == 0 and "the value is 40.0" in out, out + err


def test_a_rank_that_was_stopped_for_too_long_and_goes_on_says_that_the_others_have_given_up():
    """And none says to look at errors of others, or that it could still go on."""
    ranks = by_hand([FAILS, "is patient"], 2)
    for rank in ranks:
        assert "is process" in rank.process.stdout.readline(), rank.end()
    ranks[1].process.send_signal(signal.SIGSTOP)
    waited = ranks[0].end(40)
    ranks[1].process.send_signal(signal.SIGCONT)
    for code, _, err in (waited, ranks[1].end(40)):
        assert code == 1 and "rank 1 was stopped for 6 s or more" in err and "start the job again" in err, err
        assert "lets it go on" not in err and "look at" not in err and "rank 1 lost touch with rank 1" not in err, err


def test_a_rank_ends_well_while_its_deadlock_watch_asks():
    code, _, err, _ = failing("is asked until its end", 2)
    assert code == 0, err


@pytest.mark.skipif(sys.platform != "linux", reason="counts how often threads woke")
def test_no_thread_of_torch_may_hold_what_was_moved_when_the_interpreter_ends():
    code, _, err, _ = failing("asks no thread", 2)
    assert code == 0, err


@pytest.mark.parametrize("program", ["torch_style.py", "outside_mesh.py"])
def test_a_rank_without_native_code_works_with_others(program, tmp_path):
    good([*RUN, "-n", "2", PROGRAMS / "mixed_native.py", PROGRAMS / program, tmp_path])


@pytest.mark.long
def test_a_program_is_its_own_main_with_its_own_arguments():
    env = environment()
    del env["OMP_NUM_THREADS"]
    started = [Started([*RUN, "-n", 2, FAILS, "arguments"]),
               Started([*RUN, "-n", 2, FAILS, "arguments", "-n", "7", "--help"], env)]
    (code, first, err), (other, out, more) = [one.end() for one in started]
    assert code == other == 0, err + more
    assert first.count(f"arguments 1 __main__ {FAILS}") == 2, first
    cores = len(os.sched_getaffinity(0))
    assert out.count(f"arguments -n 7 --help {max(1, cores // 2)} __main__ {FAILS}") == 2, out
    assert out.count("the value is 40.0") == 2


def test_a_module(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text("import sys, package\nprint('module', sys.argv[1:], __name__)\n")
    code, out, err = Started([*RUN, "-n", 2, "-m", "package.program", "x"], cwd=tmp_path).end()
    assert code == 0 and out.count("module ['x'] __main__") == 2, out + err


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_ranks_end_with_their_launcher(how, tmp_path):
    before = ["nohup"] if how == signal.SIGTERM else []
    started = Started([*before, *RUN, "-n", 2, FAILS, "waits"], environment(TMPDIR=str(tmp_path)))
    lines = [started.process.stdout.readline() for _ in range(2)]
    assert all("is process" in line for line in lines), started.end()
    ranks = [int(line.split()[-1]) for line in lines]
    if before:                                       # the terminal is gone, but the job was to go on
        os.kill(started.process.pid, signal.SIGHUP)
        time.sleep(1)
        assert started.process.poll() is None and all(map(alive, ranks))
    os.kill(started.process.pid, how)
    began = time.monotonic()
    code, _, err = started.end(30)
    assert code == (-how if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in err, err
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() - began < 20, "ranks outlive their launcher"
        time.sleep(0.1)


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
    except OSError:
        return False
