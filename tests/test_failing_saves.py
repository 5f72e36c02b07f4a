"""A save that fails at any step raises on every rank, soon, holds nothing, and is in no later save's way."""
from __future__ import annotations

import os
import shutil
import subprocess
import threading

import pytest
import torch
from harness import PROGRAMS, by_hand, results

import globaltensor as gt
from globaltensor.checkpoint.manifest import CheckpointError

# which of what a rank does with files must have been seen to fail a save
OF_RANK_0 = {"mkdir", "open", "replace", "rename", "fsync", "pwrite", "write", "read", "unlink", "listdir", "stat"}
OF_RANK_1 = {"open", "replace", "fsync", "pwrite", "write"}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("processes, victim, fail", [
    (1, 0, OF_RANK_0), pytest.param(2, 0, OF_RANK_0, marks=pytest.mark.processes),
    pytest.param(2, 1, OF_RANK_1, marks=pytest.mark.processes)])
@pytest.mark.timeout(600)
def test_each_operation_on_files_fails_once_and_for_good(processes, victim, fail, every, tmp_path):
    program = [PROGRAMS / "failing_saves.py", tmp_path / "saves", victim, tmp_path, every]
    ranks = {"GLOBALTENSOR_RANKS": "3"} if processes == 1 else {}
    for one in by_hand(program, processes, **ranks):
        code, _, err = one.end(500)
        assert code == 0, err
    seen = results(tmp_path)
    assert len(seen) == processes
    if every == 1:
        assert {kind.partition(" ")[0] for kind, outcomes in seen[0].items() if "E" in outcomes} >= fail, seen[0]


@pytest.mark.parametrize("name", ["saving", "lease"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_more_threads(name, asynchronous, tmp_path, monkeypatch):
    gt.save({"x": torch.ones(2)}, tmp_path)
    start = threading.Thread.start

    def refused(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(CheckpointError, match="can't start new thread"):
            gt.save({"x": torch.zeros(2)}, tmp_path, asynchronous=asynchronous).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    gt.save({"x": torch.zeros(2)}, tmp_path)
    assert not gt.load({"x": torch.ones(2)}, tmp_path)["x"].any()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small file system")
def test_a_full_disk_while_a_file_is_saved_leaves_the_one_before(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        file = tmp_path / "x.pt"
        gt.save({"x": torch.ones(50_000)}, file)
        for size in (220_000, 2**20, 10**7):
            with pytest.raises(CheckpointError, match="No space left on device"):
                gt.save({"x": torch.zeros(size)}, file)
            assert os.listdir(tmp_path) == ["x.pt"]
        assert gt.load(file)["x"].sum() == 50_000
        gt.save({"x": torch.zeros(50_000)}, file)
        assert gt.load(file)["x"].sum() == 0
    finally:
        subprocess.run(["umount", tmp_path], check=True)
