"""Saves or loads by torch.distributed.checkpoint; processes write what they see to FOLDER/seen-<what>/<rank>.json."""
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import globaltensor as gt

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
FULL = {"rows": torch.arange(35.0).view(7, 5), "columns": torch.arange(33).view(3, 11), "same": torch.arange(6.0),
        "scalar": torch.tensor(5.0), "one": torch.arange(4.0), "empty": torch.zeros(0, 3), "plain": torch.arange(3.0)}
SAVED = {"rows": S(0), "columns": S(1), "same": B, "scalar": B, "empty": S(1)}
LOADED = {"rows": S(1), "columns": B, "same": S(0), "scalar": B, "empty": B}


def state(sbps, make=lambda t: t.clone()):
    """Those tensors on all ranks, one on the last rank only, one plain."""
    everywhere = gt.placement.all("cpu")
    found = {name: gt.from_full(make(FULL[name]), everywhere, sbp) for name, sbp in sbps.items()}
    found["one"] = gt.from_full(make(FULL["one"]), gt.placement("cpu", [gt.world_size() - 1]), B)
    return {"deep": {**found, "plain": make(FULL["plain"])}, "number": 7}


def values(found):
    return {name: (t.full_tensor() if t.is_global else t).tolist() for name, t in found["deep"].items()}


def save(folder):
    saved = state(SAVED)
    dcp.save(saved, checkpoint_id=folder / "global")
    large = gt.zeros(2**24 + 2, placement=gt.placement.all("cpu"), sbp=B)
    dcp.save({"large": large}, checkpoint_id=folder / "large")
    running = dcp.async_save(saved, checkpoint_id=folder / "async")
    with torch.no_grad():
        for t in saved["deep"].values():
            t.zero_()
    running.result()
    return {"refused": refusal(lambda: dcp.save({"p": gt.ones(3, placement=gt.placement.all("cpu"), sbp=P)},
                                                checkpoint_id=folder / "pending"))}


def refusal(do):
    try:
        do()
    except dcp.CheckpointException as error:
        return str(error)
    return None


def load(folder):
    seen = {}
    for name in ("global", "async", "plain"):
        into = state(LOADED, torch.zeros_like)
        dcp.load(into, checkpoint_id=folder / name)
        seen[name] = values(into)
        assert into["number"] == 7
        plain = {"deep": {key: torch.zeros_like(t) for key, t in FULL.items()}, "number": 0}
        dcp.load(plain, checkpoint_id=folder / name)
        seen[f"{name}, by plain torch"] = values(plain)
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    what, where = sys.argv[1], Path(sys.argv[2])
    found = {"save": save, "load": load}[what](where)
    os.makedirs(where / f"seen-{what}", exist_ok=True)
    (where / f"seen-{what}" / f"{gt.rank()}.json").write_text(json.dumps(found))
