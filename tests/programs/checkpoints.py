"""Saves or loads checkpoints; every process writes what it sees to FOLDER/seen-<what>/<rank>.json."""
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import globaltensor as gt
from globaltensor.checkpoint import huggingface, loading, pieces, saving

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum


def build(sbp, seed=0):
    """A model on all ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    gt.to_global(model, gt.placement.all("cpu"), sbp)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model, optimizer, number):
    torch.manual_seed(100 + number)
    x = gt.randn(6, 5, placement=gt.placement.all("cpu"), sbp=B)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def state(model, optimizer, number):
    return {"model": model, "optimizer": optimizer, "step": number, "pending": gt.full(
        (3,), float(number), placement=gt.placement.all("cpu"), sbp=P), "rng": torch.get_rng_state()}


def bits(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [p.detach().full_tensor().tolist() for p in model.parameters()] + [
        state[k]["exp_avg"].full_tensor().tolist() for k in sorted(state)]


def refusal(do):
    try:
        do()
    except gt.GlobalTensorError as error:
        return [type(error).__name__, str(error)]
    return None


def save(folder):
    model, optimizer = build(S(0))
    for number in range(2):
        step(model, optimizer, number)
    gt.save(state(model, optimizer, 1), folder / "good")
    saving = gt.save(state(model, optimizer, 2), folder / "good", asynchronous=True)
    expected = bits(model, optimizer)
    step(model, optimizer, 2)                        # changes the values, and uses the transport, meanwhile
    path = saving.wait()
    differ = refusal(lambda: gt.save({"a": {"mine": gt.rank()}, "b": 1}, folder / "differ"))
    keys = refusal(lambda: gt.save({"a": {f"k{gt.rank()}": 1}, "b": 1}, folder / "differ"))
    gt.save_safetensors(model, folder / "weights", shard_gb=1e-7)
    return {"bits": expected, "path": path.name, "differ": differ, "keys": keys, "weights": bits(model, optimizer)[:4]}


def load(folder):
    model, optimizer = build(lambda name, p: S(0) if p.dim() == 1 else S(1), 1)
    before = bits(model, optimizer)
    refused = refusal(lambda: gt.load(state(model, optimizer, 0), folder / "damaged"))
    same = bits(model, optimizer) == before
    loaded = gt.load(state(model, optimizer, 0), folder / "good")
    found = {"refused": refused, "same": same, "bits": bits(model, optimizer), "step": loaded["step"],
             "pending": loaded["pending"].full_tensor().tolist()}
    gt.load_safetensors(model, folder / "weights")
    return {**found, "weights": bits(model, optimizer)[:4]}


def unlucky(folder):
    """What fails on rank 1 alone is told on all; afterwards all is well."""
    model, optimizer = build(S(0))
    step(model, optimizer, 0)

    def do(what):
        if what == "save":
            gt.save(state(model, optimizer, 0), folder / "unlucky")
        elif what == "load":
            gt.load(state(model, optimizer, 0), folder / "unlucky")
        elif what == "save_safetensors":
            gt.save_safetensors(model, folder / "weights")
        else:
            gt.load_safetensors(model, folder / "weights")

    seen = {}
    for what, module, name in (("save", saving, "data_to_write"), ("load", loading, "give_memory"),
                               ("load", pieces.CheckpointFiles, "fill"),
                               ("save_safetensors", huggingface, "_write_temporary"),
                               ("load_safetensors", huggingface, "fill_unloaded"),
                               ("load_safetensors", pieces.CheckpointFiles, "fill")):
        well = getattr(module, name)
        if what.startswith("load"):
            do(what.replace("load", "save"))
        if gt.rank() == 1:
            setattr(module, name, full)
        seen[f"{what}, {name}"] = refusal(lambda: do(what))
        setattr(module, name, well)
        do(what)
    return {"seen": seen}


def full(*args):
    raise MemoryError("no room on this rank")


def loop(folder):
    """Save for ever: version n holds n everywhere."""
    P2 = gt.placement("cpu", [0, 1])
    for number in itertools.count(1):
        x = gt.full((1000, 50), float(number), placement=P2, sbp=S(0))
        gt.save({"x": x, "number": number}, folder / "loop", keep=3, asynchronous=number % 2 == 0).wait()
        print(number, flush=True)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    began = time.perf_counter()
    found = {"save": save, "load": load, "loop": loop, "unlucky": unlucky}[what](where)
    seen = where / f"seen-{what}{gt.world_size()}"
    os.makedirs(seen, exist_ok=True)
    (seen / f"{gt.rank()}.json").write_text(json.dumps({**found, "seconds": time.perf_counter() - began}))
