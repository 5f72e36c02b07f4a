"""Saves that fail, each at another operation on files: failing_saves.py FOLDER VICTIM NOTES [EVERY].

On the victim the n-th call of one operation in the folder raises OSError, once or from there on, for every operation
and every n that a save comes to, or the first two and each EVERY-th. Whatever it was: all ranks raise or all have
saved, soon; what was there before is loaded, or the new one; the next save waits for nobody, and leaves nothing of the
one that failed.
"""
import builtins
import errno
import io
import itertools
import json
import os
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

import globaltensor as gt
from globaltensor.checkpoint import saving

SOON = 8.0                                           # seconds; a test's machine may be busy
OPERATIONS = {
    "mkdir": errno.EACCES, "open": errno.EMFILE, "replace": errno.EISDIR, "rename": errno.EACCES, "fsync": errno.EIO,
    "pwrite": errno.ENOSPC, "write": errno.ENOSPC, "read": errno.ESTALE, "unlink": errno.ESTALE, "rmdir": errno.EBUSY,
    "listdir": errno.ESTALE, "scandir": errno.EIO, "stat": errno.ESTALE, "lstat": errno.EACCES}
base, victim, notes = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
every = int(sys.argv[4]) if len(sys.argv) > 4 else 1
where = gt.placement.all("cpu")
saving._AWAY = 0.5                                   # for which it cannot be read: shorter, for more cases in less time


class Fault:
    """The n-th call of an operation in a folder fails, and each after it where the fault `stays`."""

    def __init__(self, operation, nth, stays, folder):
        self.operation, self.nth, self.stays, self.folder = operation, nth, stays, str(folder)
        self.calls = itertools.count()
        self.happened = False

    def __call__(self, path, dir_fd=None):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        if os.fspath(path).startswith(self.folder) and ((n := next(self.calls)) == self.nth or self.stays
                                                        and n > self.nth):
            self.happened = True
            number = OPERATIONS[self.operation]
            raise OSError(number, os.strerror(number), str(path))


class Faulty:
    """A file whose operation fails."""

    def __init__(self, file, path, operation, fault):
        self.file, self.path, self.operation, self.fault = file, path, operation, fault

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        if name == self.operation:
            self.fault(self.path)
        return getattr(self.file, name)


@contextmanager
def failing(fault):
    """Inside, it does."""
    changed = {}

    def change(module, name, new):
        changed[module, name] = getattr(module, name)
        setattr(module, name, new)

    def checked(then, opened=False):
        def call(path, *args, **keywords):
            fault(path, keywords.get("dir_fd", keywords.get("src_dir_fd")))
            return then(path, *args, **keywords)
        return call

    def opens(path, *args, **keywords):
        return Faulty(changed[io, "open"](path, *args, **keywords), path, fault.operation, fault)

    try:
        if fault.operation in ("write", "read"):     # of files that Python buffers
            for module in (io, builtins):
                change(module, "open", opens)
        else:
            change(os, fault.operation, checked(getattr(os, fault.operation))) if hasattr(os, fault.operation) else None
            if fault.operation == "open":
                for module in (io, builtins):
                    change(module, "open", checked(module.open))
        yield
    finally:
        for (module, name), then in changed.items():
            setattr(module, name, then)


def on_all(value):
    """What every process has, as numbers."""
    own = torch.tensor([float(value)])
    return gt.from_local(own, where, gt.sbp.split(0)).full_tensor().tolist() if "WORLD_SIZE" in os.environ else [value]


def state(n):
    return {"x": gt.full((8, 3), float(n), placement=where, sbp=gt.sbp.split(0)), "n": n}


def loaded(folder):
    got = gt.load(state(0), folder)
    assert (got["x"].full_tensor() == got["n"]).all()
    return got["n"]


def fails_at(operation, nth, stays, asynchronous, keep):
    """Did the save come to that call?"""
    case = f"{operation} {nth} {'for good' if stays else 'once'} {'asynchronous' if asynchronous else ''} keep={keep}"
    folder = base / case.replace(" ", "-")
    gt.save(state(1), folder)
    fault = Fault(operation, nth, stays, folder)
    error, began = None, time.monotonic()
    with failing(fault if gt.rank() == victim else Fault(operation, -1, False, folder)):
        try:
            gt.save(state(2), folder, asynchronous=asynchronous, keep=keep).wait()
        except gt.GlobalTensorError as raised:
            error = raised
    took = time.monotonic() - began
    raised = on_all(error is not None)
    assert len(set(raised)) == 1, f"{case}: raised {raised}, here {error}"
    assert took < SOON, f"{case}: {took:.1f} s, {error}"
    assert error is None or error.where.partition(":")[0].endswith("failing_saves.py"), f"{case}: {error}"
    assert loaded(folder) == (2 if error is None else 1), f"{case}: {error}"
    if error is not None or not keep:
        assert loaded(folder / "step-00000001") == 1
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gt.save(state(3), folder, keep=keep).wait()
    assert time.monotonic() - began < SOON and not [one for one in told if "saves into" in str(one.message)], case
    assert loaded(folder) == 3
    on_all(0)
    if gt.rank() == 0:
        left = [path.name for path in folder.iterdir() if not (path / "manifest.json").is_file()]
        assert left == ["latest"], f"{case}: {left}, {error}"
    happened = sum(on_all(fault.happened)) > 0
    outcomes[f"{operation} {'for good' if stays else 'once'}"] = outcomes.get(
        f"{operation} {'for good' if stays else 'once'}", "") + (("-" if error is None else "E") if happened else "")
    return happened


outcomes = {}
warnings.simplefilter("ignore")
for k, operation in enumerate(OPERATIONS):
    for stays in (False, True):
        for nth in (n for n in itertools.count() if n < 2 or n % every == k % every):
            if not fails_at(operation, nth, stays, nth % 2 == 1, None if nth % 3 == 1 else 1):
                break
(notes / f"{gt.rank()}.json").write_text(json.dumps(outcomes))
