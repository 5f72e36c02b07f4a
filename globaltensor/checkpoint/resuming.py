"""Going on where a job was ended: `state = gt.resume(state, folder)`, on any number of ranks.

    state = gt.resume({"model": model, "optimizer": optimizer, "data": loader, "step": 0}, "run")
    while state["step"] < steps:
        ...
        gt.save(state, "run", keep=2)

The first time there is nothing in the folder, and the state stays as it is. Later it is that of the last whole version,
with torch's random state, which every save keeps: numbers are drawn as if the job had never been ended.
"""
from __future__ import annotations

import logging
import os
from typing import TypeVar

import torch

from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.folders import versions
from globaltensor.checkpoint.loading import load_version
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.remote import Folder, folder_at
from globaltensor.checkpoint.tree import is_object
from globaltensor.errors import ArgumentError, warn
from globaltensor.runtime.agreement import broadcast_object
from globaltensor.runtime.world import rank
from globaltensor.tracebacks import api_boundary

_log = logging.getLogger(__name__)

T = TypeVar("T")


@api_boundary
def resume(state: T, directory: str | os.PathLike[str]) -> T:
    """The state of the last whole version in a folder that `gt.save` wrote; `state` itself where there is none.
    Collective.

    state      as it was passed to `save`, with all of its keys; see `gt.load`, which takes some of them
    directory  as it was passed to `save`; need not exist

    Sets torch's random state, too. A version that cannot be loaded is passed over with a warning, if one before it can.
    Raises CheckpointError, on every process, where none can.
    """
    if not isinstance(state, (dict, list, tuple, torch.Tensor)) and not is_object(state):
        raise ArgumentError(f"gt.resume of {state!r:.60}", "there is nothing in it to load into",
                            'gt.resume({"model": model, "step": 0}, "run")')
    path = folder_at(directory)
    # not by `latest`: a job may have been ended just before it wrote that, with a version that is whole
    newest_first = collective_try("looking for a checkpoint", lambda: _newest_first(path) if rank() == 0 else [])
    first: CheckpointError | None = None
    for name in broadcast_object(newest_first, 0, "looking for a checkpoint"):
        try:
            state, manifest = load_version(state, path / name, part=False)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None and rank() == 0:
            warn(f"resumed from {path / name}, because a newer version cannot be loaded: {first.what}")
        if manifest.random:
            torch.set_rng_state(torch.tensor(list(bytes.fromhex(manifest.random)), dtype=torch.uint8, device="cpu"))
        _log.info("resumed from %s", path / name)
        return state
    if first is not None:
        raise first
    _log.info("nothing to resume from in %s", path)
    return state


def _newest_first(path: Folder) -> list[str]:
    """The names of the versions in a folder, which need not exist."""
    if path.is_dir():
        return versions(path)[::-1]
    if path.exists():
        raise CheckpointError(f"gt.resume from {path}", "that is a file, not a folder of checkpoints",
                              'gt.resume(state, "run"), a folder that gt.save wrote or will write')
    return []
