"""The command line, without starting ranks: what is asked for, what is said, and with which exit code."""
from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness import good
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import globaltensor
from globaltensor.cli import bench, info, launch, main, ps, run
from globaltensor.cli.agent import RestartingAgent
from globaltensor.cli.options import run_options
from globaltensor.cli.rendezvous import Rendezvous
from globaltensor.cli.torchrun import translate
from globaltensor.runtime.host_processes import RUNS, STOPPED


def said(capsys, *args):
    """Exit code, output, errors of `globaltensor args`."""
    try:
        code = main(list(args))
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


@pytest.fixture
def environ(monkeypatch):
    """A copy of the environment to change."""
    copy = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    monkeypatch.setattr(os, "environ", copy)
    return copy


def test_help_names_every_command(capsys):
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for name, module in {"run": run, "info": info, "bench": bench}.items():
        assert name in out and module.__doc__.split()[0] in out
        code, own, _ = said(capsys, name, "--help")
        assert code == 0 and module.__doc__.splitlines()[0] in " ".join(own.split())


def test_the_command_of_a_chosen_interpreter():
    """As of `python -m pip`."""
    done = subprocess.run([sys.executable, "-m", "globaltensor", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"globaltensor {globaltensor.__version__}\n"), done.stderr


def test_version(capsys):
    assert said(capsys, "--version") == (0, f"globaltensor {globaltensor.__version__}\n", "")


def test_without_a_command_it_shows_the_commands(capsys):
    assert said(capsys) == said(capsys, "--help")


@pytest.mark.parametrize("args, text", [
    (("walk",), "there is no 'walk'; choose from new, run, ps"),
    (("simulat",), "there is no 'simulat'; did you mean 'simulate'?"),
    (("--verison",), "--verison: did you mean --version?"),
    (("run", "--nnode", "2"), "--nnode: did you mean --nnodes?"),
    (("bench", "--qick"), "--qick: did you mean --quick?"),
    (("plan", "--gobal-batch=8"), "--gobal-batch=8: did you mean --global-batch?"),
    (("run", "--nnode", "2", __file__), "--nnode: did you mean --nnodes?"),
    (("info", "--zzz"), "there is no argument --zzz\n  try: globaltensor info --help"),
    (("info", "more"), "there is no argument more\n  try: globaltensor info --help"),
    (("recipe", "slrm", "x.py"), "there is no 'slrm'; did you mean 'slurm'?"),
    (("run",), "required: program\n"), (("run", "-n", "2"), "required: program\n"),
    (("run", "-n", "0", "x.py"), "'0' is not a whole number of at least 1"),
    (("run", "-n", "two", "x.py"), "'two' is not a whole number of at least 1"),
    (("run", "nowhere.py"), "there is no program 'nowhere.py'"),
    (("run", "/dev/null"), "'/dev/null' is no file\n  why: each rank reads the program, and what a pipe"),
    (("run", "-m", "no_such_module"), "there is no module 'no_such_module'"),
    (("run", "--nnodes", "2", __file__), "2 hosts need a place to meet\n  try: globaltensor run --nnodes 2 --rdzv-end"),
    (("run", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2", __file__), "--node-rank 2 of 2 hosts"),
    (("run", "--rdzv-endpoint", ":29400", __file__), "29400 has no host\n  try: --rdzv-endpoint HOST:29400\n"),
    (("run", "--rdzv-endpoint", "h:x", __file__), "--rdzv-endpoint h:x has no port\n  try: --rdzv-endpoint h:29400\n"),
    (("run", "--rdzv-endpoint", "[::1]", __file__), "has no port\n  try: --rdzv-endpoint [::1]:29400\n"),
    (("run", "-n", "2", "--min-ranks", "3", __file__), "--min-ranks 3 of 2 ranks"),
    (("run", "--max-restarts", "-1", __file__), "'-1' is not a whole number of at least 0"),
    (("run", "--standalone", "--nnodes", "2", __file__), "--standalone is for one host"),
    (("run", "--nnodes=1:4", __file__), "'1:4' is a range; try: --nnodes 4 --min-ranks R"),
    (("run", "--nnodes", "1:2", __file__), "try: --nnodes 2 --min-ranks R, where 1 host has R ranks"),
    (("run", "--np", "2", __file__), "--np: did you mean --nproc-per-node?"),
    (("run", "-np", "2", __file__), "-np is two flags here; did you mean -n?"),
    (("run", "--max", "2", __file__), "--max: did you mean --max-restarts?"),
    (("run", "--nproc_per_node=gpus", __file__), "'gpus' is not a whole number of at least 1"),
    (("run", "--rdzv_backend", "etcd", __file__), "there is no 'etcd'; choose from c10d, static"),
    *((("run", flag, "3", __file__), f"{flag} is torchrun's, and does nothing here\n  try: ") for flag in
      ("--rdzv_conf", "--rdzv-conf", "--log-dir", "--log_dir", "-r", "-t", "--tee", "--role",
       "--monitor_interval", "--no-python", "--run_path", "--local-ranks-filter", "--numa_binding")),
    (("bench", "nothing"), "there is no benchmark 'nothing'\n  there are: "),
])
def test_what_cannot_be_done_is_said_in_a_line_or_two(capsys, args, text):
    code, out, err = said(capsys, *args)
    assert code == 2 and out == "" and text in err and "Traceback" not in err


def test_ctrl_c_before_the_ranks_begin_shows_no_traceback(capsys, monkeypatch):
    def interrupted(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr("globaltensor.cli.run.translate", interrupted)
    assert said(capsys, "run", __file__) == (130, "", "globaltensor: ended by SIGINT\n")


@pytest.mark.parametrize("flags, wanted", [
    ("--nproc-per-node 3", {"ranks": 3}), ("--nproc_per_node=3", {"ranks": 3}), ("-n 3", {"ranks": 3}),
    ("--nproc_per_node cpu", {"ranks": len(os.sched_getaffinity(0))}),
    ("--standalone --nproc_per_node 2", {"ranks": 2, "nnodes": 1, "rdzv_endpoint": None}),
    ("--nnodes 2 --rdzv_backend c10d --rdzv_endpoint h:1 --rdzv_id j --local_addr a",
     {"nnodes": 2, "rdzv_endpoint": "h:1", "rdzv_id": "j", "local_addr": "a"}),
    ("--nnodes 2 --node_rank 1 --master_addr h --master_port 7", {"node_rank": 1, "rdzv_endpoint": "h:7"}),
    ("--nnodes 2 --master-addr h", {"rdzv_endpoint": "h:29500"}),
    ("--max_restarts 2 --shutdown_timeout 5 --start_method fork",
     {"max_restarts": 2, "grace": 5, "start_method": "fork"}),
    ("", {"ranks": None, "grace": 30, "max_restarts": 0, "nnodes": 1, "node_rank": None}),
])
def test_flags_of_torchrun_mean_here_what_they_mean_there(flags, wanted):
    parser = argparse.ArgumentParser()
    run_options(parser)
    chosen = parser.parse_args([*flags.split(), "program.py", "--nproc_per_node", "its own"])
    translate(chosen)
    assert {name: getattr(chosen, name) for name in wanted} == wanted
    assert chosen.program == "program.py" and chosen.args == ["--nproc_per_node", "its own"]


def test_every_flag_of_torchrun_is_known(capsys):
    """Taken, or refused with what to type: none is a surprise."""
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser()
    run_options(parser)
    ours = {name for action in parser._actions for name in action.option_strings}
    assert {name for action in get_args_parser()._actions for name in action.option_strings} <= ours


def test_what_follows_the_program_is_its_own():
    of = argparse.ArgumentParser()
    run_options(of)
    for own in (["--log", "file"], ["--m", "1"], ["--steps", "3", "--rdzv", "x"], ["--log-dir", "x"],
                ["-n", "3", "--", "-m"], ["--grace"], ["--max-restarts=x"]):
        chosen = of.parse_args(["-n", "2", "train.py", *own])
        assert (chosen.ranks, chosen.program, chosen.args) == (2, "train.py", own), own


def test_info_has_the_same_facts_as_text_and_as_json(capsys):
    code, out, _ = said(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0 and facts == info.facts()
    assert list(facts) == ["versions", "host", "transports", "world"]
    assert facts["versions"]["globaltensor"] == globaltensor.__version__
    assert facts["versions"]["native extension"] and facts["host"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["world"]["ranks"] == globaltensor.world_size()
    _, text, _ = said(capsys, "info")
    for section, rows in facts.items():
        assert f"{section}\n" in text
        for name, value in rows.items():
            assert any(line.split() == [*name.split(), *str(value).split()] for line in text.splitlines()), name


def test_info_tells_why_the_world_is_as_it_is(environ):
    environ.update(RANK="1", WORLD_SIZE="4")
    assert info.facts()["world"] == {"ranks": 4, "driven by this process": "1",
                                     "because": "a launcher set RANK and WORLD_SIZE"}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with three files in benchmarks/, one of them no benchmark."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "fast.py").write_text('"""How fast?\n\nVery."""\n'
                                    'def main(json=False):\n    print("json" if json else "text")\n')
    (folder / "broken.py").write_text('"""Why?"""\ndef main(json=False):\n    raise SystemExit(4)\n')
    (folder / "helper.py").write_text('"""No benchmark."""\n')
    monkeypatch.setattr(bench, "FOLDER", folder)


def test_bench_lists_and_runs(checkout, capfd):
    assert said(capfd, "bench", "--list") == (0, "broken  Why?\nfast    How fast?\n", "")
    assert said(capfd, "bench", "fast") == (0, "text\n", "")
    assert said(capfd, "bench", "fast", "--json") == (0, "json\n", "")
    assert said(capfd, "bench") == (1, "text\n", "globaltensor: failed: broken\n")


def test_bench_without_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    code, _, err = said(capsys, "bench")
    assert code == 1 and "they come with a checkout" in err


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_cores_are_shared_out_unless_the_user_did(environ, ranks):
    run._environment(ranks, hosts=1)
    assert environ["OMP_NUM_THREADS"] == str(max(1, info.cores() // ranks))
    environ["OMP_NUM_THREADS"] = "7"
    run._environment(ranks, hosts=1)
    assert environ["OMP_NUM_THREADS"] == "7"


def test_arguments_that_are_not_utf_8_are_shown_as_well():
    run_by_shell = ["sh", "-c", "echo; read line", "a\udcff"]
    with subprocess.Popen(run_by_shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()               # the arguments are there once the program runs
        assert ps.program(process.pid).endswith("read line a\N{REPLACEMENT CHARACTER}")
        process.kill()


def test_where_nothing_may_be_written_it_is_said_what_to_type(environ, monkeypatch, capsys):
    monkeypatch.setattr(run.tempfile, "TemporaryDirectory", lambda **_: (_ for _ in ()).throw(
        FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")))
    code, _, err = said(capsys, "run", __file__)
    assert code == 1 and "No usable temporary directory" in err and "TMPDIR=FOLDER" in err


def test_a_host_whose_name_has_no_address_is_said_at_once(monkeypatch, capsys):
    """And waited for: a pod's name is known once the pod is."""
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(TimeoutError):
        Rendezvous("host0:29400", "job", 2, 2, rank=1, timeout=0.3).next_rendezvous()
    assert capsys.readouterr().err == ("globaltensor: no address of 'host0' is known yet (Name or service not known); "
                                       "if the name is wrong, Ctrl-C ends this\n")


def test_hosts_do_not_talk_over_loopback(environ):
    run._environment(2, hosts=2)
    assert "GLOO_SOCKET_IFNAME" not in environ


def failures(**codes):
    return {int(rank[1:]): SimpleNamespace(exitcode=code, pid=1000 + int(rank[1:])) for rank, code in codes.items()}


def ended(*ranks, state=RUNS):
    return {1000 + rank: state for rank in ranks}


@pytest.mark.parametrize("codes, notes, ended, code, causes, lines", [       # rank 3 has ended by os._exit(0)
    (dict(r0=1), {0: "TransportError: b"}, {}, 1, [],
     ["rank 3 ended without an error, while others waited", "rank 0 then lost touch with others (TransportError)"]),
    (dict(r0=1, r1=-40), {0: "TransportError: b"}, {}, 168, [1],
     ["rank 1 was killed by SIGRTMIN+6", "rank 0 then lost touch with others (TransportError)"]),
    (dict(r0=1, r1=1), {0: "ValueError: a", 1: "ValueError: a"}, {}, 1, [0, 1], ["ranks 0, 1 failed: ValueError: a"]),
    (dict(r0=1, r1=3, r2=-15), {0: "TransportError: b", 1: "exit code 3"}, ended(2), 3, [1],
     ["rank 1 failed: exit code 3", "rank 0 then lost touch with others (TransportError)", "rank 2 ended with it"]),
    (dict(r0=1, r1=-9), {0: "TransportError: b"}, {}, 137, [1],
     ["rank 1 was killed by SIGKILL (did the host run out of memory?)",
      "rank 0 then lost touch with others (TransportError)"]),
    (dict(r0=1, r1=-9, r2=1), {0: "CheckpointError: a/step-1 was not written: rank 1 was killed (process 7)",
                               2: "CheckpointError: a/step-1 was not written: rank 1 was killed (process 7)"},
     {}, 137, [1], ["rank 1 was killed by SIGKILL (did the host run out of memory?)",
                    "ranks 0, 2 could not save then (CheckpointError)"]),
    (dict(r0=1, r1=1), {0: "DisagreementError: rank 1 failed", 1: "OSError: d"}, {}, 1, [1],
     ["rank 1 failed: OSError: d", "rank 0 could not go on then (DisagreementError)"]),
    (dict(r0=-15, r1=-15), {1: "KeyError: 'x'"}, ended(0, 1), 1, [1],
     ["rank 1 failed: KeyError: 'x'", "rank 0 ended with it"]),
    (dict(r0=1, r1=-15), {0: "TransportError: b"}, {}, 143, [1],
     ["rank 1 was killed by SIGTERM, which this launcher did not send",
      "rank 0 then lost touch with others (TransportError)"]),
    (dict(r0=-15, r1=-15, r2=-15), {}, ended(2), 143, [0, 1],
     ["ranks 0, 1 were killed by SIGTERM, which this launcher did not send", "rank 2 ended with it"]),
    (dict(r0=-9, r1=1), {1: "KeyError: 'x'"}, ended(0), 1, [1],
     ["rank 1 failed: KeyError: 'x'", "rank 0 ended with it, by SIGKILL, after the time that --grace gives"]),
    (dict(r0=1, r1=-9), {0: "TransportError: b"}, ended(1, state=STOPPED), 137, [1],
     ["rank 1 was stopped (by SIGSTOP, or a debugger) while others waited, and killed",
      "rank 0 then lost touch with others (TransportError)"]),
    (dict(r0=-9, r1=1), {0: "exit code 0", 1: "KeyError: 'x'"}, ended(0), 1, [1], ["rank 1 failed: KeyError: 'x'"]),
    (dict(r0=255), {0: "exit code 255"}, {}, 255, [0], ["rank 0 failed: exit code 255"]),
    (dict(r0=-11), {}, {}, 128 + signal.SIGSEGV, [0], ["rank 0 was killed by SIGSEGV"]),
    (dict(r0=5), {}, {}, 5, [0], ["rank 0 exited with code 5"]),
    (dict(r0=99, r1=99), {0: "exit code 99"}, {}, 99, [0, 1], ["ranks 0, 1 were asked to end, to go on later"]),
])
def test_the_report_names_the_cause_first(tmp_path, capsys, codes, notes, ended, code, causes, lines):
    for rank, line in notes.items():
        exit_code = int(line.split()[-1]) if line.startswith("exit code") else 1
        note = {"error": line, "code": exit_code, "follows": "Disagreement" in line}
        (tmp_path / f"{rank}.json").write_text(json.dumps(note))
    assert launch._report(failures(**codes), ended, [3], str(tmp_path)) == (code, causes)
    assert capsys.readouterr().err.splitlines() == [f"globaltensor: {line}" for line in lines]


def test_where_no_rank_of_this_host_is_the_cause_each_says_why_it_failed(tmp_path, capsys):
    for rank in (0, 1):
        note = {"error": "TransportError: GLOO_SOCKET_IFNAME=eth99: no such interface", "code": 1}
        (tmp_path / f"{rank}.json").write_text(json.dumps(note))
    assert launch._report(failures(r0=1, r1=1), {}, [], str(tmp_path)) == (1, [])
    assert capsys.readouterr().err == ("globaltensor: ranks 0, 1 failed: TransportError: GLOO_SOCKET_IFNAME=eth99: "
                                       "no such interface\n")


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("arguments, expected", [
    ([], "usage: globaltensor"), (["--help"], "    run +Run a program"),        # Python 3.13 indents it further
    (["--version"], f"globaltensor {globaltensor.__version__}")])
def test_the_version_and_the_help_do_not_wait_for_torch(arguments, expected):
    code = f"""
import atexit, sys
from globaltensor_command import main
atexit.register(lambda: print("torch" in sys.modules))
sys.exit(main({arguments}))"""
    out = good([sys.executable, "-c", code])
    assert re.search(expected, out) and out.endswith("\nFalse\n"), out


@pytest.mark.parametrize("newest", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_ranks_have_the_time_that_they_were_given_with_any_torch(newest, monkeypatch, tmp_path):
    """Of torch 2.11, the agent takes no `shutdown_timeout`, and its `_shutdown` no time."""
    asked = []

    def made_in_2_11(self, spec, logs_specs, start_method="spawn", exit_barrier_timeout=300):
        self._worker_watchdog = self._health_check_server = None

    def ended_in_2_11(self, death_sig=signal.SIGTERM):
        self._pcontext.close(death_sig)

    if not newest:
        monkeypatch.setattr(LocalElasticAgent, "_shutdown", ended_in_2_11)
    monkeypatch.setattr(LocalElasticAgent, "__init__", made_in_2_11)
    agent = RestartingAgent(None, str(tmp_path), 77, 1, lambda failures, ended: [], None)
    agent._pcontext = SimpleNamespace(close=lambda death_sig, timeout=30: asked.append((death_sig, timeout)))
    agent._shutdown(signal.SIGINT, timeout=5)
    agent._shutdown()
    assert [asked[0], asked[2]] == [(signal.SIGINT, 77), (signal.SIGTERM, 77)]     # then torch, of none
    agent._pcontext.subprocess_handlers = {}
    agent._end_in_time(agent._pcontext)
    agent._pcontext.close()                          # as torch does where a rank has failed
    assert asked[4] == (signal.SIGTERM, 77)


@pytest.mark.usefixtures("real_processes")
def test_run_starts_what_forks_ranks_before_it_imports_torch():
    code = ("import sys, globaltensor_command; globaltensor_command.import_without_face();"
            "import globaltensor.cli.run; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.usefixtures("real_processes")
def test_the_commands_leave_torch_s_launcher_alone_until_it_is_needed():
    code = ("import sys, globaltensor.cli;"
            "heavy = ('torch.distributed.launcher', 'torch.distributed.run', 'rich');"
            "heavy = [m for m in sys.modules if m.startswith(heavy)];"
            "assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_a_later_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    left, fresh = (tmp_path / f"globaltensor-run-{name}" for name in ("left", "fresh"))
    for folder in (left, fresh, tmp_path / "another's"):
        folder.mkdir()
        (folder / "file").touch()
        os.utime(folder, (0, 0) if folder != fresh else None)
    with run._temporary_folder() as of_one_that_runs:
        os.utime(of_one_that_runs, (0, 0))
        with run._temporary_folder() as other:
            there = {str(folder) for folder in tmp_path.iterdir()}
            assert there == {str(tmp_path / "another's"), str(fresh), of_one_that_runs, other}
    assert {folder.name for folder in tmp_path.iterdir()} == {"another's", fresh.name}
