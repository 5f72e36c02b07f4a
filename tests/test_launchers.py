"""Launchers other than torch's: recorded environments, scripts for clusters, and SLURM, Open MPI and Ray themselves
where they are installed (Debian: slurmctld, slurmd, munge, openmpi-bin; PyPI: ray)."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from harness import PROGRAMS, PYTHON, RUN, environment, free_port, good, results, run

from globaltensor.cli import main, recipe as recipes
from globaltensor.errors import TransportError
from globaltensor.runtime import gloo, launchers
from globaltensor.runtime.launchers import first_host, recognize_launcher, tasks_per_node

PROGRAM = PROGRAMS / "launched.py"

SLURM = dict(SLURM_PROCID="2", SLURM_LOCALID="0", SLURM_NODEID="1", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_ID="0",
             SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_STEP_NODELIST="localhost,n[2-9]", SLURM_JOB_ID="17",
             SLURM_NTASKS="4", SLURM_TASKS_PER_NODE="2(x2)")
BATCH = dict(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NTASKS="4", SLURM_JOB_ID="17",
             SLURM_TASKS_PER_NODE="2(x2)", SLURM_JOB_NODELIST="n[1-2]")
OPEN_MPI = dict(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="1",
                OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE="874053633")
HYDRA = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2", PMI_PORT="n1:4567")


def who(rank, size, local_rank, local_size, address):
    return dict(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size),
                MASTER_ADDR=address)


@pytest.mark.parametrize("value, one_host, what, fix", [
    ("lo", True, "", ""), ("lo,eth0", False, "", ""), ("lo,", True, "", ""), ("x", True, "", ""), (None, False, "", ""),
    ("eth99", False, "no network interface 'eth99'", "GLOO_SOCKET_IFNAME=eth0"),
    ("ib0", False, "no network interface 'ib0'", "GLOO_SOCKET_IFNAME=eth0"),
    ("ib0", True, "no network interface 'ib0'", "GLOO_SOCKET_IFNAME=lo"),
    ("lo, eth0", False, "no network interface ' eth0'", "GLOO_SOCKET_IFNAME=lo,eth0"),
    ("lo,eth1", True, "no network interface 'eth1' with an address", "GLOO_SOCKET_IFNAME=lo,eth0"),
    (",lo", True, "no network interface ''", "GLOO_SOCKET_IFNAME=lo")])
def test_an_interface_that_gloo_cannot_use_is_named(value, one_host, what, fix, monkeypatch):
    """Of a host with eth0, and eth1 without an address."""
    monkeypatch.setattr(gloo.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    monkeypatch.setattr(gloo, "_listens", lambda name: name in ("lo", "eth0"))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if value is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    if not what:
        return gloo.choose_interfaces(one_host)
    with pytest.raises(TransportError) as caught:
        gloo.choose_interfaces(one_host)
    assert caught.value.what == f"GLOO_SOCKET_IFNAME={value}: {socket.gethostname()} has {what}"
    assert caught.value.fix == fix and "with an address there are" in caught.value.why


@pytest.mark.skipif(sys.platform != "linux", reason="whose interfaces are they?")
def test_gloo_s_own_word_on_what_it_listens_on():
    assert gloo._listens("lo") and not gloo._listens("none") and not gloo._listens("")



@pytest.mark.parametrize("env, name, expected", [
    pytest.param(SLURM, "SLURM", who(2, 4, 0, 2, "localhost"), id="srun on two hosts"),
    pytest.param({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"}, "SLURM",
                 who(2, 4, 2, 4, "127.0.0.1"), id="srun on one host"),
    pytest.param({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3"}, "SLURM",
                 who(3, 4, 0, 1, "localhost"), id="srun, uneven"),
    pytest.param({**SLURM, "MASTER_ADDR": "127.0.0.9"}, "SLURM", who(2, 4, 0, 2, "127.0.0.9"), id="the user's address"),
    pytest.param(BATCH, None, {}, id="a batch script is one process"),
    pytest.param({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"},
                 None, {}, id="srun --pty bash is one process"),
    pytest.param({**SLURM, "RANK": "0", "WORLD_SIZE": "8"}, None, {"RANK": "0", "WORLD_SIZE": "8"},
                 id="torchrun in srun"),
    pytest.param(OPEN_MPI, "Open MPI", who(1, 2, 1, 2, "127.0.0.1"), id="mpirun"),
    pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                  "MASTER_ADDR": "localhost"}, "Open MPI", who(1, 2, 0, 1, "localhost"), id="mpirun on two hosts"),
    pytest.param(HYDRA, "Hydra", who(1, 2, 1, 2, "127.0.0.1"), id="mpiexec.hydra"),
    *(pytest.param({**SLURM, **env, "MASTER_ADDR": "localhost"}, name, who(1, 2, 1, 2, "localhost"),
                   id=f"{name} starts on other hosts by srun") for name, env in (("Open MPI", OPEN_MPI),
                                                                                 ("Hydra", HYDRA))),
    *(pytest.param({key: value for key, value in SLURM.items() if key != lacks}, None, {}, id=f"no {lacks}")
      for lacks in SLURM if lacks.endswith(("ID", "_NODELIST")) and lacks not in ("SLURM_STEP_ID", "SLURM_JOB_ID")),
    pytest.param({}, None, {}, id="none")])
def test_environments(env, name, expected):
    env = dict(env)
    assert recognize_launcher(env) == name
    torchs = {k: v for k, v in env.items() if k.endswith(("RANK", "WORLD_SIZE", "MASTER_ADDR")) and "_COMM_" not in k
              and k != "PMI_RANK"}
    assert torchs == expected
    assert name is None or 20000 <= int(env["MASTER_PORT"]) < 30000


@pytest.mark.parametrize("env, per_host, own, one_host", [
    ({}, 2, 1, False), ({"MASTER_ADDR": "127.0.0.1"}, 2, 1, True), ({"LOCAL_WORLD_SIZE": "4"}, 4, 3, True),
    ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 1, 0, False), ({"LOCAL_RANK": "0"}, 2, 0, False)])
def test_who_shares_a_host_is_seen_where_no_launcher_says_it(env, per_host, own, one_host, monkeypatch):
    monkeypatch.setattr(launchers, "_seat", None)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launchers.is_one_host(4, env.get("MASTER_ADDR", "n1")) == one_host
    launchers.take_seat(["a", "a", "b", "b"], 3)
    assert (launchers.ranks_per_host(4), launchers.local_rank(3)) == (per_host, own)


@pytest.mark.parametrize("env, launcher", [(SLURM, "srun"), (OPEN_MPI, "mpirun"), (HYDRA, "mpirun")])
@pytest.mark.parametrize("value", ["two", "", "-1", "1.5"])
def test_what_a_launcher_says_that_is_no_number_is_named(env, launcher, value):
    names = [name for name in env if not name.endswith(("_ID", "NODELIST", "JOB_ID", "PORT", "NAMESPACE", "NTASKS"))
             and name != "SLURM_TASKS_PER_NODE"]
    for name in names:
        with pytest.raises(TransportError) as caught:
            recognize_launcher({**env, name: value})
        assert caught.value.what == f"{name}={value}" and launcher in caught.value.why
        assert caught.value.fix == f"{launcher} -n 2 python program.py, or: unset {name}"
    assert len(names) in (4, 5)


@pytest.mark.parametrize("env, what", [
    ({**HYDRA, "PMI_RANK": "2"}, "PMI_RANK=2"), ({**SLURM, "SLURM_PROCID": "7"}, "SLURM_PROCID=7"),
    ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE=2(x2)")])
def test_numbers_of_a_launcher_that_do_not_fit_each_other(env, what):
    with pytest.raises(TransportError) as caught:
        recognize_launcher(dict(env))
    assert caught.value.what == what


def test_all_ranks_of_a_job_meet_at_one_port():
    ports = {}
    for job in ("17", "18"):
        for rank in "0123":
            env = {**SLURM, "SLURM_PROCID": rank, "SLURM_JOB_ID": job, "SLURM_NODEID": str(int(rank) // 2)}
            recognize_launcher(env)
            ports.setdefault(job, set()).add(env["MASTER_PORT"])
    assert all(len(of) == 1 for of in ports.values()) and ports["17"] != ports["18"]


@pytest.mark.parametrize("env, text", [
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI does not tell the ranks of several hosts where to"),
    ({**SLURM, "SLURM_STEP_NODELIST": "no-such-host.invalid"}, "the ranks cannot meet at no-such-host.invalid")])
def test_ranks_that_cannot_meet_are_told_at_once(env, text):
    with pytest.raises(TransportError, match=text) as error:
        recognize_launcher(dict(env))
    assert "MASTER_ADDR=HOST" in str(error.value)


@pytest.mark.parametrize("text, counts", [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("3,1", [3, 1]),
                                          ("2(x10),1(x2)", [2] * 10 + [1] * 2)])
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text, first", [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[01-04,07],login", "gpu01"),
                                         ("rack1n[07,09-12]", "rack1n07"), ("r[1-2]n[03-04]", "r1n03"), ("a,b", "a"),
                                         ("n[5]-ib", "n5-ib")])
def test_first_host(text, first):
    assert first_host(text) == first


def recipe(*words):
    return good([PYTHON, "-m", "globaltensor.cli", "recipe", *words])


@pytest.mark.parametrize("cluster", ["slurm", "ray"])
def test_an_image_that_nothing_runs_is_refused(cluster, capsys):
    assert main(["recipe", cluster, "--image", "me/it:1", "train.py"]) == 2
    assert f"does nothing for {cluster}" in capsys.readouterr().err


def test_a_script_for_slurm(tmp_path):
    text = recipe("slurm", "--nodes", "4", "--gpus", "8", "some dir/Train_GPT.py", "--steps", "1 0")
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    assert "srun --kill-on-bad-exit=1 python 'some dir/Train_GPT.py' --steps '1 0'" in text
    assert "--gpus" not in recipe("slurm", "train.py")
    (tmp_path / "srun").write_text("#!/bin/bash\n[ ${#GLOBALTENSOR_SECRET} = 64 ] && echo \"$@\"\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "job").write_text(text)
    out = good(["bash", tmp_path / "job"], environment(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert out == "--kill-on-bad-exit=1 python some dir/Train_GPT.py --steps 1 0\n"


def test_a_script_for_kubernetes():
    words = ("k8s", "--nodes", "2", "--gpus", "4", "--image", "me/it:1", "/app/train_gpt.py", "--text",
             "a 'b' \"c\" $$ $(D)")
    service, secret, job = yaml.safe_load_all(recipe(*words))
    assert service["metadata"]["name"] == secret["metadata"]["name"] == job["metadata"]["name"] == "train-gpt"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "train-gpt"}
    assert len(secret["stringData"]["secret"]) == 64
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2 and job["spec"]["completionMode"] == "Indexed"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "me/it:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    shell, flag, line = (word.replace("$$", "$") for word in container["command"])      # as Kubernetes does
    shown = good([shell, flag, line.replace("exec globaltensor", "printf '%s\\n'")],
                 environment(JOB_COMPLETION_INDEX="1")).splitlines()
    assert shown == ["run", "-n", "4", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint",
                     "train-gpt-0.train-gpt:29400", "/app/train_gpt.py", "--text", "a 'b' \"c\" $$ $(D)"]
    assert "resources" not in recipe("k8s", "train.py")


@pytest.mark.parametrize("program, name", [("123.py", "job-123"), ("2026-11-28.py", "job-2026-11-28"),
                                           ("null.py", "null"), ("no.py", "no"), ("_a.py", "a"), ("_.py", "job"),
                                           ("a" * 39 + "_b.py", "a" * 39)])
def test_what_a_program_is_called_is_a_name_of_a_service(program, name):
    chosen = SimpleNamespace(program=program, nodes=2, gpus=None, image="i", args=[])
    service, secret, job = yaml.safe_load_all(recipes._kubernetes_job(chosen))
    assert service["metadata"]["name"] == secret["metadata"]["name"] == job["metadata"]["name"] == name
    assert service["spec"]["selector"] == {"job-name": name} and job["spec"]["template"]["spec"]["subdomain"] == name


def test_a_script_for_ray():
    compile(recipe("ray", "--nodes", "2", "--gpus", "4", "train.py", "a 'b' \"c\""), "on_ray.py", "exec")


def test_a_program_that_is_none():
    code, _, err = run([PYTHON, "-m", "globaltensor.cli", "recipe", "slurm", "train.sh"])
    assert code == 2 and "'train.sh' is not a Python file" in err


def check(folder: Path, size: int, local_size: int) -> None:
    found = results(folder)
    assert sorted(found) == list(range(size))
    for told in found.values():
        assert (told["size"], told["local size"], told["sum"]) == (size, local_size, 8)
        assert told["transport"].startswith("shared memory") and ("gloo" in told["transport"]) == (size > local_size)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("mpirun") is None or "Open MPI" not in subprocess.run(
    ["mpirun", "--version"], capture_output=True, text=True, check=False).stdout, reason="Open MPI is not installed")
def test_open_mpi(tmp_path):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    good(["mpirun", *root, "--oversubscribe", "-n", 2, PYTHON, PROGRAM, tmp_path])
    check(tmp_path, 2, 2)


@contextlib.contextmanager
def slurm(folder: Path):
    """A SLURM of two nodes on this machine, and the environment of its commands."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("SLURM (slurmctld, slurmd, munge) is not installed, or this is not root")
    here = socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={here} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8
NodeName=n2 NodeHostname={here} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8
PartitionName=main Nodes=ALL Default=YES State=UP
""")
    env = environment(SLURM_CONF=str(folder / "slurm.conf"))
    daemons = [["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge",
                f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"],
               ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(0.5)
        by = time.monotonic() + 60
        while (states := run(["sinfo", "--noheader", "--Node", "--format=%t"], env)[1].split()) != ["idle"] * 2:
            assert time.monotonic() < by, (states, *((folder / f"{name}.log").read_text() for name in
                                                     ("slurmctld", "slurmd-n1") if (folder / f"{name}.log").exists()))
            time.sleep(0.5)
        yield env
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(20)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 2)])
def test_slurm(nodes, ranks, tmp_path):
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as env:
        job = good([PYTHON, "-m", "globaltensor.cli", "recipe", "slurm", "--nodes", nodes, PROGRAM, tmp_path])
        job = job.replace("--ntasks-per-node=1", f"--ntasks-per-node={ranks}")       # which --gpus would ask for
        (tmp_path / "job").write_text(job)
        path = f"{Path(sys.executable).parent}:{env['PATH']}"
        address = {"MASTER_ADDR": "127.0.0.1"} if nodes > 1 else {}                  # n1 is not the name of a host
        code, out, err = run(["sbatch", "--wait", f"--output={tmp_path}/log", tmp_path / "job"],
                             {**env, "PATH": path, **address}, timeout=120)
        assert code == 0, out + err + (tmp_path / "log").read_text()
        check(tmp_path, nodes * ranks, ranks)
        assert "not signed" not in (tmp_path / "log").read_text()


@pytest.mark.long
@pytest.mark.processes
def test_slurm_starts_our_launcher(tmp_path):
    """One launcher on each node, as for restarts: the ranks are those of `globaltensor run`, not of srun."""
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as env:
        meet = f"127.0.0.1:{free_port()}"
        good(["srun", "-N", 2, "-n", 2, *RUN, "-n", 2, "--nnodes", 2, "--rdzv-endpoint", meet, "--local-addr",
              "127.0.0.1", PROGRAM, tmp_path], {**env, "GLOBALTENSOR_SECRET": "of this test"}, timeout=120)
        check(tmp_path, 4, 2)


@pytest.mark.processes
def test_a_host_that_does_not_reach_itself_says_so(tmp_path):
    """192.0.2.1 is nobody's, by RFC 5737. Without a loopback it is the same with 127.0.0.1, where torch tries for ten
    minutes."""
    code, _, said = run([*RUN, "-n", 1, "--rdzv-endpoint", "192.0.2.1:29400", PROGRAM, tmp_path])
    assert code == 1 and "the ranks cannot meet at 192.0.2.1\n  why: this host does not reach itself there" in said
    assert "try: an --rdzv-endpoint of this host, or none" in said


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray(tmp_path):
    text = recipe("ray", PROGRAM, tmp_path)
    assert "NODES, RANKS_PER_NODE, GPUS = 1, 1, 0\n" in text
    (tmp_path / "on_ray.py").write_text(text.replace("GPUS = 1, 1, 0\n", "GPUS = 1, 2, 0\n"))     # as --gpus 2 has it
    good([PYTHON, tmp_path / "on_ray.py"], timeout=180)
    check(tmp_path, 2, 2)
