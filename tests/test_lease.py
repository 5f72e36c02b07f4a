"""Two jobs and one folder: nobody deletes what lives. And nothing in the folder of a checkpoint leads elsewhere."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, PYTHON, Started, by_hand, results

import globaltensor as gt
from globaltensor.checkpoint import folders, lease
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.runtime.host_processes import own_process

STATE = {"x": torch.arange(6.0)}


def temporary(folder: Path, number: int = 2, **values) -> Path:
    """A version that a process is writing, says its lease."""
    path = folder / f"step-{number:08d}.tmp-0123456789abcdef"
    path.mkdir(parents=True)
    own = {**own_process()._asdict(), "name": "here", "time": time.time() - values.pop("age", 0)}
    (path / lease.LEASE).write_text(json.dumps(own | values))
    return path


def ended() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize("live, values", [
    (True, {}), (False, {"pid": ended()}), (False, {"began": 1}),
    (True, {"host": "elsewhere"}), (True, {"host": "elsewhere", "age": lease.STALE / 2}),
    (False, {"host": "elsewhere", "age": 2 * lease.STALE}), (False, {"pid": "x"}),
    (False, {"pid": None})])
def test_a_lease_lives_as_long_as_its_process_or_as_it_is_renewed(live, values, tmp_path):
    path = temporary(tmp_path, **values)
    assert bool(lease.writer(path)) is live
    os.utime(path, (0, 0))
    assert bool(folders._other_writer(tmp_path)) is live and path.exists() is live


def test_a_new_folder_without_a_lease_is_kept_and_an_old_one_is_not(tmp_path):
    path = temporary(tmp_path)
    (path / lease.LEASE).unlink()
    gt.save(STATE, tmp_path)
    assert path.exists()
    os.utime(path, (0, 0))
    gt.save(STATE, tmp_path)
    assert not path.exists()


def test_a_lease_is_renewed_and_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.02)
    own = lease.Lease(tmp_path / "step-00000001.tmp-0123456789abcdef")
    before = (own.folder / lease.LEASE).read_bytes()
    assert any((own.folder / lease.LEASE).read_bytes() != before or time.sleep(0.05) for _ in range(100))
    assert lease.writer(own.folder) == f"process {os.getpid()} on {json.loads(before)['name']}"
    own.give_up()
    assert not lease.writer(own.folder) and not lease.is_new(own.folder)


def test_who_saves_waits_for_another_writer_and_names_it(tmp_path, monkeypatch):
    path = temporary(tmp_path, host="elsewhere", pid=7, name="far")
    monkeypatch.setattr(folders, "PATIENCE", 0.3)
    with pytest.warns(UserWarning, match="process 7 on far saves into"), \
            pytest.raises(CheckpointError, match="is being written by process 7 on far"):
        gt.save(STATE, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "it leaves nothing, and deletes nothing"


@pytest.mark.parametrize("spoil, words", [
    (lambda version: (version / "rank-00000.safetensors").rename(version.parent / "x") and (
        version / "rank-00000.safetensors").symlink_to(version.parent / "x"), "a link to a file elsewhere"),
    (lambda version: (version / "rank-00000.safetensors").unlink() or os.mkfifo(
        version / "rank-00000.safetensors"), "not a plain file"),
    (lambda version: (version / "manifest.json").unlink() or os.mkfifo(version / "manifest.json"), "not a plain file"),
    (lambda version: (version / "manifest.json").rename(version / "m") and (version / "manifest.json").symlink_to("m"),
     "manifest.json cannot be read"),
    (lambda version: (version.parent / "latest").unlink() or os.mkfifo(version.parent / "latest"), "not a plain file"),
    (lambda version: version.rename(version.parent / "x") and version.symlink_to("x"), "link to a folder elsewhere"),
])
def test_links_and_fifos_are_refused_at_once(spoil, words, tmp_path):
    gt.save(STATE, tmp_path)
    spoil(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=words):
        gt.load({"x": torch.zeros(6)}, tmp_path)


SAVES = """
import sys, torch, globaltensor as gt
print("ready", flush=True)
for n in range(int(sys.argv[2])):
    state = {"x": torch.full((1000,), float(sys.argv[3])), "n": n}
    gt.save(state, sys.argv[1])
"""


@pytest.mark.parametrize("kept, values", [
    (True, None), (True, {"host": "elsewhere", "age": 2 * lease.STALE}), (False, {"pid": ended()}),
    (False, {"began": 1})])
def test_the_next_save_removes_what_a_process_that_was_killed_has_left(kept, values, tmp_path):
    """At once, however new it is; of another host, and without a lease, when it is old."""
    path = temporary(tmp_path, **(values or {}))
    if values is None:
        (path / lease.LEASE).unlink()
    hidden = path.rename(tmp_path / f".{path.name}") if values == {"began": 1} else path       # before its first name
    gt.save(STATE, tmp_path)
    assert hidden.exists() is kept


def test_a_kill_in_the_midst_of_a_save_leaves_nothing_for_the_one_after_the_next_start(tmp_path):
    code = SAVES.replace("import sys,", "import os, signal, sys,").replace(
        "for n in", "from globaltensor.checkpoint import folders\n"
        "folders.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nfor n in")
    assert Started([PYTHON, "-c", code, tmp_path, 1, 1]).end()[0] == -signal.SIGKILL
    assert [path.name[:17] for path in tmp_path.iterdir()] == ["step-00000001.tmp"]
    gt.save(STATE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:process")
def test_two_jobs_save_into_one_folder(count, tmp_path):
    other = Started([PYTHON, "-W", "ignore", "-c", SAVES, tmp_path, count, 1])
    assert other.process.stdout.readline() == "ready\n"
    for n in range(count):
        gt.save({"x": torch.full((1000,), 2.0), "n": n}, tmp_path)
    code, out, err = other.end(120)
    assert code == 0, err
    versions = folders.versions(tmp_path)
    assert len(versions) == 2 * count and folders.latest(tmp_path)[0].name == versions[-1]
    seen = []
    for name in versions:
        state = gt.load({"x": torch.zeros(1000), "n": 0}, tmp_path / name)
        assert (state["x"] == state["x"][0]).all()
        seen.append((state["x"][0].item(), state["n"]))
    assert [n for job, n in seen if job == 1] == [n for job, n in seen if job == 2] == list(range(count))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", *versions], "nothing is left behind"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["other folders"])
def test_a_folder_per_rank_is_an_error_on_all(kind, tmp_path):
    for rank, one in enumerate(by_hand([PROGRAMS / "saves.py", kind, tmp_path], 2)):
        code, out, err = one.end(60)
        assert "the ranks disagree in saving a checkpoint" in err and f"into {tmp_path}/{1 - rank}" in err, err


@pytest.mark.processes
@pytest.mark.parametrize("how, victim", [("no room", "0"), ("no room", "1"), ("no room at once", "0"),
                                         ("no room at once", "1")])
def test_a_save_that_fails_on_a_rank_is_told_to_all_and_cleared_at_once(how, victim, tmp_path):
    for one in by_hand([PROGRAMS / "saves.py", how, tmp_path / "run", victim, tmp_path], 2):
        assert one.end(60)[0] == 0
    for rank, note in results(tmp_path).items():
        assert f"rank {victim}: OSError: " in note["told"] or str(rank) == victim, note
        assert "No space left on device" in note["told"] and note["after"] < 5, note
    assert len(results(tmp_path)) == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000001"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("when, victim", [("writing", "0"), ("writing", "1"), ("publishing", "0")])
def test_an_asynchronous_save_whose_rank_is_killed_leaves_the_version_before(when, victim, tmp_path):
    started = by_hand([PROGRAMS / "saves.py", f"killed while {when}", tmp_path / "run", victim, tmp_path], 2)
    codes = [one.end(60)[0] for one in started]
    assert codes[int(victim)] == -signal.SIGKILL
    (told,) = results(tmp_path).values()
    assert f"rank {victim}" in told["told"] and told["after"] < 2
    assert gt.load({"x": torch.zeros(8), "n": 0}, tmp_path / "run")["n"] == 1


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small file system")
def test_a_full_disk_during_an_asynchronous_save_is_told_and_leaves_the_version_before(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        gt.save({"x": torch.ones(100_000)}, tmp_path)
        saving = gt.save({"x": torch.zeros(200_000)}, tmp_path, asynchronous=True)
        with pytest.raises(CheckpointError, match="could not be written"):
            saving.wait()
        assert gt.load({"x": torch.zeros(100_000)}, tmp_path)["x"].sum() == 100_000
        gt.save({"x": torch.ones(50_000)}, tmp_path)         # what the failed one left is out of its path
        assert folders.versions(tmp_path) == ["step-00000001", "step-00000002"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
