"""Ranks that save, badly: saves.py HOW FOLDER [VICTIM NOTES]."""
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import globaltensor as gt
from globaltensor.checkpoint import folders, saving

how, folder = sys.argv[1], Path(sys.argv[2])
where = gt.placement.all("cpu")
x = gt.ones(8, placement=where, sbp=gt.sbp.split(0))

if how == "other folders":
    gt.save({"x": x}, folder / str(gt.rank()))

victim, notes = int(sys.argv[3]), Path(sys.argv[4])
gt.save({"x": x, "n": 1}, folder)


def dies_before(module, name, file="", dies=lambda: os.kill(os.getpid(), signal.SIGKILL)):
    """The victim is killed just before that function runs, for that file."""
    then = getattr(module, name)

    def dying(path, *more, **keywords):
        if gt.rank() == victim and file in path.name:
            (notes / "when").write_text(str(time.time()))
            dies()
        return then(path, *more, **keywords)

    setattr(module, name, dying)


def finds_no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if how.startswith("no room"):
    dies_before(saving, "write_hashed", dies=finds_no_room)
if how == "killed while writing":
    dies_before(saving, "write_hashed")
if how == "killed while publishing":
    dies_before(folders, "replace_file", "latest")
try:
    gt.save({"x": x, "n": 2}, folder, asynchronous="at once" not in how).wait()
except gt.GlobalTensorError as error:
    when = notes / "when"
    (notes / f"{gt.rank()}.json").write_text(json.dumps({
        "told": str(error), "after": time.time() - float(when.read_text())}))
