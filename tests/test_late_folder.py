"""Checkpoints in a folder where what another host did is seen seconds late, as over NFS.

Two mounts of one folder, each of which believes for three seconds what it was told of a name (programs/late_folder.py);
a rank, or a job, sees the folder by one of them, at the same path.
"""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, Started, environment, free_port

mfusepy = pytest.importorskip("mfusepy", reason="pip install mfusepy, and libfuse3 of the system", exc_type=Exception)
pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("unshare") is None,
    reason="mounting takes root, /dev/fuse and unshare")]
SECONDS = 3


@pytest.fixture
def views(tmp_path):
    """Commands that run what follows them in the one and in the other view of `tmp_path / "shared"`."""
    shared, backing = tmp_path / "shared", tmp_path / "backing"
    mounts = [tmp_path / "view 0", tmp_path / "view 1"]
    for folder in (shared, backing, *mounts):
        folder.mkdir()
    served = [subprocess.Popen([PYTHON, PROGRAMS / "late_folder.py", backing, mount, str(SECONDS)]) for mount in mounts]
    try:
        limit = time.monotonic() + 30
        while not all(map(os.path.ismount, mounts)):
            assert time.monotonic() < limit and all(one.poll() is None for one in served), "not mounted"
            time.sleep(0.05)
        yield [["unshare", "--mount", "sh", "-c", f"mount --bind '{mount}' '{shared}' && exec \"$@\"", "sh", PYTHON]
               for mount in mounts]
    finally:
        for one, mount in zip(served, mounts):
            subprocess.run(["umount", "-l", mount], check=False)
            one.send_signal(signal.SIGTERM)
            one.wait()


def test_ranks_that_see_each_other_s_files_late_save_and_load(views, tmp_path):
    shared = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [Started([*view, PROGRAMS / "late_saves.py", tmp_path / "shared", 4],
                     environment(RANK=str(r), LOCAL_RANK=str(r), **shared)) for r, view in enumerate(views)]
    for one in ranks:
        code, out, err = one.end(150)
        assert code == 0 and out == "all came back\n", f"{out}\n{err}"
    left = sorted(path.name for path in (tmp_path / "backing").iterdir())
    assert left == ["latest", "step-00000003", "step-00000004"], left


SAVES = """
import sys, torch, globaltensor as gt
for n in range(int(sys.argv[2])):
    gt.save({"x": torch.full((1000,), float(sys.argv[3])), "n": n}, sys.argv[1])
"""


def test_two_jobs_that_see_each_other_late_save_into_one_folder(views, tmp_path):
    jobs = [Started([*view, "-W", "ignore", "-c", SAVES, tmp_path / "shared", 5, job], environment())
            for job, view in enumerate(views)]
    for one in jobs:
        code, out, err = one.end(150)
        assert code == 0, f"{out}\n{err}"
    versions = sorted(path.name for path in (tmp_path / "backing").glob("step-*"))
    assert versions == [f"step-{n:08d}" for n in range(1, 11)]
    assert (tmp_path / "backing" / "latest").read_text().split()[0] == versions[-1]
