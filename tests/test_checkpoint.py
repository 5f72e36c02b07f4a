"""Checkpoints: any layout loads what any other saved, bit by bit; what is damaged or does not fit changes nothing."""
from __future__ import annotations

import collections
import copy
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import runpy
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, Started, environment, good, results
from safetensors import safe_open
from shards import B, P, fulls, gather, lay, place
from torch import nn

import globaltensor as gt
from globaltensor.checkpoint import folders, hashes, huggingface, manifest, pieces, saving, tensor_files
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.torch_files import load, save
from globaltensor.layouts.sbp import split as S

PROGRAM = str(PROGRAMS / "checkpoints.py")


def bits(t):
    """The bytes of a tensor, whole; put together by hand where it is global."""
    t = gather(t.detach()) if t.is_global else t.detach()
    return t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist()


def model_bits(model):
    return {name: bits(t) for name, t in model.state_dict().items()}


def optimizer_bits(optimizer):
    state = optimizer.state_dict()
    return {(k, name): bits(t) for k, tensors in state["state"].items() for name, t in tensors.items()}, \
        repr(state["param_groups"])


# ------------------------------------------------------------------------------------------- any layout to any other

LAYOUTS = {
    "plain": None,
    "one rank": ([0], (B,)),
    "S(0) of 3": ([0, 1, 2], (S(0),)),
    "S(1) of 4, mixed": ([3, 1, 0, 2], (S(1),)),
    "B of 8": (list(range(8)), (B,)),
    "P of 3": ([1, 2, 0], (P,)),
    "S(0), S(1)": ([[0, 1], [2, 3]], (S(0), S(1))),
    "S(0), S(0)": ([[0, 1, 2], [3, 4, 5]], (S(0), S(0))),
    "B, S(1)": ([[0, 1], [2, 3]], (B, S(1))),
    "P, S(0)": ([[4, 5], [2, 3]], (P, S(0))),
    "elsewhere": ([7, 6], (S(0),)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint per layout, made when it is asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("layout")
            save({k: lay(t, LAYOUTS[name]) for k, t in fulls().items()}, made[name])
        return made[name]

    return get


@pytest.mark.sample(3)
@pytest.mark.parametrize("src", LAYOUTS)
@pytest.mark.parametrize("dst", LAYOUTS)
def test_round_trips(src, dst, saved):
    into = {k: lay(torch.ones_like(t), LAYOUTS[dst]) for k, t in fulls().items()}
    loaded = load(into, saved(src))
    assert loaded.keys() == into.keys()
    for name, t in fulls().items():
        assert loaded[name] is into[name]
        assert bits(into[name]) == bits(t), f"{name}: {src} -> {dst}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_cast_as_torch_casts_them(layout, tmp_path):
    """From every dtype of the format to every one that holds its kind of numbers; other casts are refused."""
    values = torch.tensor([0.0, 1.0, 3.0, 2.5, 100.0, 0.1]).repeat(7).view(6, 7)
    dtypes = {str(dtype): dtype for dtype in manifest.DTYPES.values()}
    made = {name: values.to(dtype) for name, dtype in dtypes.items()}
    save({name: lay(t, LAYOUTS[layout]) for name, t in made.items()}, tmp_path)
    for dtype in dtypes.values():
        fitting = [name for name, t in made.items() if torch.can_cast(t.dtype, dtype)]
        into = {name: lay(torch.zeros(6, 7, dtype=dtype), LAYOUTS["S(1) of 4, mixed"]) for name in fitting}
        load(into, tmp_path)
        for name in fitting:
            assert bits(into[name]) == bits(made[name].to(dtype)), f"{name} to {dtype}"
        for name in made.keys() - set(fitting):
            with pytest.raises(CheckpointError, match=f"'{name}' is {dtype} in the state, {name} in the checkpoint"):
                load({name: torch.zeros(6, 7, dtype=dtype)}, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_and_its_optimizer_of_another_dtype(dtype, tmp_path):
    state, own, theirs = small(), small(1), small(1)
    save(state, tmp_path)
    for one in (own, theirs):
        one["model"].to(dtype)
    load(own, tmp_path)
    for key in ("model", "optimizer"):
        theirs[key].load_state_dict(copy.deepcopy(state[key].state_dict()))
    assert model_bits(own["model"]) == model_bits(theirs["model"])
    assert optimizer_bits(own["optimizer"]) == optimizer_bits(theirs["optimizer"])


def test_every_dtype_of_the_format(tmp_path):
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, dtype in manifest.DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6, dtype.itemsize), dtype=torch.uint8,
                            generator=generator)
        made[name] = raw.view(dtype).reshape(6)
    save(made, tmp_path)
    into = {name: torch.zeros_like(t) for name, t in made.items()}
    load(into, tmp_path)
    for name, t in made.items():
        assert bits(into[name]) == bits(t), name


def test_strided_parts_are_saved_and_loaded(tmp_path):
    where, full = place([0, 1]), torch.arange(42.0).view(6, 7)
    x = gt.from_full(full, where, S(0))
    save({"t": x.t(), "plain": full.t(), "row": full[2], "all": full.expand(2, 6, 7)}, tmp_path)
    into = {"t": gt.zeros(6, 7, placement=where, sbp=S(1)).t(), "plain": torch.zeros(6, 7).t(), "row": torch.zeros(7),
            "all": torch.zeros(2, 6, 7)}
    load(into, tmp_path)
    assert bits(into["t"]) == bits(full.t()) and bits(into["plain"]) == bits(full.t())
    assert bits(into["row"]) == bits(full[2]) and bits(into["all"]) == bits(full.expand(2, 6, 7))


def test_pending_sums_are_reduced_once_and_stay_as_they_are(tmp_path):
    where = place([0, 1, 2])
    x, y = (gt.from_shards({r: torch.full((4,), float(r + k)) for r in range(3)}, where, P) for k in (1, 2))
    with gt.record() as moves:
        save({"x": x, "y": y}, tmp_path)
    assert [(m.op, m.dst.sbp) for m in moves] == [("save", (B,))], moves
    assert x.sbp == (P,) and x.shards[1].tolist() == [2.0] * 4
    into = {"x": torch.zeros(4), "y": gt.ones(4, placement=where, sbp=P)}
    load(into, tmp_path)
    assert into["x"].tolist() == [6.0] * 4 and gather(into["y"]).tolist() == [9.0] * 4


# ------------------------------------------------------------------------------------------------- who writes what


def read_manifest(directory):
    folder = directory / (directory / "latest").read_text().split()[0]
    return folder, json.loads((folder / "manifest.json").read_bytes())["manifest"]


@pytest.mark.parametrize("sbp, largest", [((B, B), 1000), ((B, S(0)), 1000), ((S(0), B), 400),
                                          ((S(1), S(0)), 64 << 20)])
def test_each_element_is_written_once_and_all_ranks_write_alike(sbp, largest, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", largest)
    where = place([[0, 1], [2, 3]])
    tensors = {f"t{i}": gt.randn(20, 30, placement=where, sbp=sbp) for i in range(4)}
    with gt.record() as moves:
        save(tensors, tmp_path)
    assert not moves, "nothing is communicated"
    folder, parsed = read_manifest(tmp_path)
    written = dict.fromkeys(range(4), 0)
    for name, entry in parsed["tensors"].items():
        count = torch.zeros(20, 30, dtype=torch.int64)
        for piece in entry["pieces"]:
            (a, b), (c, d) = piece["region"]
            count[a:b, c:d] += 1
            assert (b - a) * (d - c) * 4 <= max(largest, 4)
            rank = int(piece["file"][5:10])
            (x, y), (z, w) = tensors[name].spec.region(rank)
            assert x <= a and b <= y and z <= c and d <= w, "a rank writes what it holds"
            written[rank] += (b - a) * (d - c) * 4
        assert (count == 1).all(), name
    assert sum(written.values()) == 4 * 20 * 30 * 4
    assert max(written.values()) - min(written.values()) <= 1000, written
    sizes = {f.name: f.stat().st_size for f in folder.glob("*.safetensors")}
    assert sorted(sizes) == [f"rank-{r:05d}.safetensors" for r in range(4)]
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", *sorted(sizes)]


def test_a_reader_opens_and_checks_only_what_it_needs(tmp_path):
    where = place([0, 1, 2, 3])
    save({"x": gt.arange(16.0, placement=where, sbp=S(0))}, tmp_path)
    folder, _ = read_manifest(tmp_path)
    for r in (0, 1, 3):
        (folder / f"rank-{r:05d}.safetensors").unlink()
    folder, data, _ = folders.find_version(tmp_path)
    entries = manifest.parse_manifest(data, "here").entries
    files, part = pieces.CheckpointFiles(folder), torch.zeros(4)
    [(piece, common)] = pieces.overlaps(entries["x"], ((8, 12),))
    files.verify([(entries["x"], piece, 2)])
    files.fill([(entries["x"]._replace(shape=(4,), pieces=(piece._replace(region=((0, 4),)),)), part)])
    assert common == ((8, 12),) and part.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("how", ["past the cache", "no such flag", "refused at open", "refused at the second write",
                                 "no positions", "full"])
def test_files_of_tensors_have_the_same_bytes_however_they_are_written(how, tmp_path, monkeypatch):
    seed = 5
    print("seed", seed)
    rng = torch.Generator().manual_seed(seed)
    data = {f"{name} {n}": torch.randint(0, 2 if dtype is torch.bool else 256, (n * dtype.itemsize,), generator=rng,
                                         dtype=torch.uint8).view(dtype) for dtype, name in tensor_files.NAMES.items()
            for n in (1, 3, 700)}
    data |= {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "matrix": torch.rand(40, 1000, generator=rng)}
    monkeypatch.setattr(tensor_files, "CHUNK", 1 << 14)
    pwrite, open_file, count, past_the_cache = os.pwrite, os.open, itertools.count(1), []
    (tmp_path / "other").touch()
    if possible := tensor_files._open_uncached(tmp_path / "other"):
        possible.close()

    def refusing(handle, part, offset):
        past_the_cache.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os_direct))
        if how == "full" and next(count) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        if how == "refused at the second write" and next(count) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(handle, part, offset)

    def opened(path, flags, *rest, **more):
        if how == "refused at open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *rest, **more)

    os_direct = os.O_DIRECT
    monkeypatch.setattr(os, "pwrite", refusing)
    monkeypatch.setattr(os, "open", opened)
    if how == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    if how == "no positions":
        monkeypatch.delattr(os, "pwrite")
        monkeypatch.delattr(os, "preadv")
    path = tmp_path / "file"
    if how == "full":
        with pytest.raises(OSError, match="No space left"):
            tensor_files.write_tensors(path, data)
        return
    tensor_files.write_tensors(path, data, {"of": "a test"})
    some = {"past the cache": {True}, "refused at the second write": {True, False}, "no positions": set()}
    assert set(past_the_cache) == some.get(how, {False}) or possible is None
    with safe_open(path, "pt") as theirs:            # safetensors' own reader
        assert theirs.metadata() == {"of": "a test"} and sorted(theirs.keys()) == sorted(data)
        for key, t in data.items():
            assert bits(theirs.get_tensor(key)) == bits(t), key
    file = tensor_files.TensorFile(path)
    for key, t in data.items():
        stored = file.tensors[key]
        assert (stored.dtype, stored.shape, stored.nbytes) == (t.dtype, tuple(t.shape), t.nbytes), key
        assert file.hash(stored, hashes.HASH) == hashes.piece_hash(t), key
        assert stored.offset % t.dtype.itemsize == 0
    whole = slice(0, 1000)
    for rows, columns in ((slice(0, 40), whole), (slice(3, 31), whole), (slice(5, 40), slice(7, 800))):
        for into in (torch.zeros(40, 1000), torch.zeros(1000, 40).t(), torch.zeros(40, 1000, dtype=torch.float64)):
            file.copy_part(file.tensors["matrix"], (rows, columns), into[rows, columns])
            assert torch.equal(into[rows, columns].float(), data["matrix"][rows, columns])
            assert into.count_nonzero() <= into[rows, columns].numel()
    os.truncate(path, path.stat().st_size - 1)       # while it is open
    last = max(file.tensors.values(), key=lambda stored: stored.offset + stored.nbytes)
    with pytest.raises(OSError, match="too short"):
        file.hash(last, hashes.HASH)


def brute(regions, whole):
    count = np.zeros([b for _, b in whole], dtype=int)
    for region in regions:
        count[tuple(slice(a, b) for a, b in region)] += 1
    return bool((count == 1).all())


def test_tiles_against_counting():
    seed = 11
    print("seed", seed)
    rng, yes = random.Random(seed), 0
    for _ in range(2000):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
        whole = tuple((0, n) for n in shape)
        regions = [whole]
        for _ in range(rng.randint(0, 4)):           # cut some box in two
            region = regions.pop(rng.randrange(len(regions)))
            dim = rng.randrange(len(region)) if region else None
            if dim is None or region[dim][1] - region[dim][0] < 2:
                regions.append(region)
                continue
            at = rng.randint(region[dim][0] + 1, region[dim][1] - 1)
            sides = (region[dim][0], at), (at, region[dim][1])
            regions += [(*region[:dim], side, *region[dim + 1:]) for side in sides]
        assert manifest.is_tiling(regions, whole)
        if rng.random() < 0.7 and regions:             # and spoil it
            k = rng.randrange(len(regions))
            how = rng.randrange(3)
            if how == 0:
                regions.pop(k)
            elif how == 1:
                regions.append(regions[k])
            elif regions[k]:
                dim = rng.randrange(len(shape))
                a = rng.randrange(shape[dim])
                regions[k] = (*regions[k][:dim], (a, rng.randint(a + 1, shape[dim])), *regions[k][dim + 1:])
        assert manifest.is_tiling(regions, whole) == brute(regions, whole), (regions, whole)
        yes += brute(regions, whole)
    assert 500 < yes < 1900


# -------------------------------------------------------------------------------------------------- plain values

VALUES = [
    None, True, False, 0, -1, 2**200, 0.1, -0.0, 1e-320, 1e308, math.inf, -math.inf, 1.0, "", "a/b%2F", "ü\n\ud800",
    [], {}, (), [1, (2, [3.5, None])], {"a": {"b": (1,)}}, {1: "one", -2: {0: 1}}, {1: 1, "x": 2},
    collections.Counter({30: 1, 80: 2}), {"": {"": 1}}, {"a/b": 1, "a%2Fb": 2}, {"tensor": "x"},
    {"dict": {"float": "1"}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value, tmp_path):
    save({"value": value, "w": torch.ones(1)}, tmp_path)
    back = load({"value": None if value is not None else 5, "w": torch.zeros(1)}, tmp_path)["value"]
    assert repr(back) == repr(value) and type(back) is type(value)
    save(value, tmp_path)
    assert repr(load(None, tmp_path)) == repr(value)


@pytest.mark.parametrize("pattern", [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000123])
def test_the_bits_of_nan(pattern, tmp_path):
    save([struct.unpack(">d", struct.pack(">Q", pattern))[0]], tmp_path)
    assert struct.unpack(">Q", struct.pack(">d", load([0.0], tmp_path)[0]))[0] == pattern


def freed():
    t = torch.ones(2)
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("state, words", [
    ({"a": {1, 2}}, "a is a builtins.set"), ({"a": [np.ones(2)]}, "a/0 is a numpy.ndarray"),
    ({"a": np.int64(3)}, "a is a numpy.int64"), ({(1, 2): 3}, "key (1, 2), a tuple"), ({True: 3}, "key True, a bool"),
    ({"f": len}, "f is a builtins.builtin"),
    ({"z": torch.ones(2, dtype=torch.complex128)}, "'z' is of torch.complex128"),
    ({"m": torch.ones(2, device="meta")}, "m is a tensor on the meta device"),
    ({"s": torch.eye(2).to_sparse()}, "torch.sparse"), ({"f": freed()}, "f is a tensor whose storage was freed"),
    ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, "two tensors of the state are called 'a/1'"),
])
def test_what_no_checkpoint_holds_is_named(state, words, tmp_path):
    with pytest.raises(gt.GlobalTensorError) as error:
        save(state, tmp_path / "none")
    assert words in str(error.value) and "test_checkpoint.py" in str(error.value)
    assert not (tmp_path / "none").exists()


# --------------------------------------------------------------------------------------------------------- training


def net(where, sbp, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.GELU(), nn.Dropout(0.2), nn.Linear(7, 3))
    if where is not None:
        model.to_global(where, sbp)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1},
                                   {"params": [*model[1].parameters(), *model[4].parameters()]}], lr=0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": torch.get_rng_state(), "step": 0}


def train(state, where, steps=3):
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 5) if where is None else gt.randn(6, 5, placement=where, sbp=S(0))
        state["optimizer"].zero_grad()
        loss = state["model"](x).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()
        losses.append(loss.item())
    return {**state, "step": state["step"] + steps, "rng": torch.get_rng_state()}, losses


def cut(name, p):
    return (S(0), B) if p.dim() else B


@pytest.mark.parametrize("ranks, sbp", [(None, None), ([0, 1, 2], B), ([[0, 1], [2, 3]], cut)])
def test_training_goes_on_bit_by_bit(ranks, sbp, tmp_path):
    where = place(ranks) if ranks else None
    state, _ = train(net(where, sbp), where)
    save(state, tmp_path)
    state, losses = train(state, where)
    fresh = net(where, sbp, seed=9)
    params = list(fresh["model"].parameters())
    back = load(fresh, tmp_path)
    assert back["model"] is fresh["model"] and all(a is b for a, b in zip(params, back["model"].parameters()))
    assert back["step"] == 3 and type(back["schedule"].milestones) is collections.Counter
    torch.set_rng_state(back["rng"])
    back, again = train(back, where)
    assert again == losses and back["step"] == 6
    assert model_bits(back["model"]) == model_bits(state["model"])
    assert optimizer_bits(back["optimizer"]) == optimizer_bits(state["optimizer"])
    assert back["schedule"].state_dict() == state["schedule"].state_dict()
    for p, s in back["optimizer"].state.items():
        assert s["exp_avg"].is_global == p.is_global and not s["step"].is_global
        assert not p.is_global or s["exp_avg"].spec is p.spec


@pytest.mark.parametrize("ranks, sbp", [([0, 1, 2, 3], S(0)), ([0, 1], S(0)), ([0, 1], S(1))], ids=[
    "as saved", "in larger parts", "in other parts"])
def test_what_nobody_has_yet_is_read_once_and_the_rest_twice(ranks, sbp, tmp_path, monkeypatch):
    """A byte of a model is checked before it replaces another. The new state of an optimizer is checked as it comes,
    where it comes as it was saved."""
    def matrix(where, sbp):
        model = nn.Linear(8, 8, bias=False).to_global(where, sbp)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state = matrix(place([0, 1, 2, 3]), S(0))
    state["model"](gt.randn(2, 8, placement=place([0, 1, 2, 3]), sbp=B)).sum().backward()
    state["optimizer"].step()
    save(state, tmp_path)
    into, read, plainly = matrix(place(ranks), sbp), [], tensor_files.TensorFile.read

    def counting(file, buffer, offset):
        if offset >= tensor_files.BLOCK:
            read.append(len(buffer))
        plainly(file, buffer, offset)

    monkeypatch.setattr(tensor_files.TensorFile, "read", counting)
    load(into, tmp_path)
    assert model_bits(into["model"]) == model_bits(state["model"])
    assert optimizer_bits(into["optimizer"]) == optimizer_bits(state["optimizer"])
    nbytes, step = 8 * 8 * 4, 4
    # of columns each of 2 ranks reads whole rows
    assert sum(read) - step == (2 * nbytes + 2 * nbytes if sbp == S(0) else 3 * (nbytes + 2 * nbytes))


KINDS = {"plain": (None, None), "whole": ([2, 0, 1], B), "cut": ([[0, 1], [2, 3]], cut)}


@pytest.mark.parametrize("src, dst", list(itertools.permutations(KINDS, 2)))
def test_a_run_goes_on_under_another_layout(src, dst, tmp_path):
    places = {name: place(ranks) if ranks else None for name, (ranks, _) in KINDS.items()}
    state, _ = train(net(places[src], KINDS[src][1]), places[src])
    save(state, tmp_path)
    for used in (False, True):                       # into an optimizer without a state, and one with another
        into = net(places[dst], KINDS[dst][1], seed=9)
        if used:
            train(into, places[dst], 1)
        back = load(into, tmp_path)
        assert model_bits(back["model"]) == model_bits(state["model"])
        assert optimizer_bits(back["optimizer"]) == optimizer_bits(state["optimizer"])
        assert bits(back["rng"]) == bits(state["rng"])
        train(back, places[dst], 1)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(
    p, 0.1, amsgrad=True), lambda p: torch.optim.Adagrad(p, 0.1)])
def test_other_optimizers(make, tmp_path):
    where, made = place([0, 1, 2]), []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(5, 4).to_global(where, S(0))
        made.append((model, make(model.parameters())))
    for _ in range(2):
        made[0][0](gt.ones(3, 5, placement=where, sbp=B)).square().sum().backward()
        made[0][1].step()
    save(made[0], tmp_path)
    load(made[1], tmp_path)
    assert model_bits(made[1][0]) == model_bits(made[0][0]) and optimizer_bits(made[1][1]) == optimizer_bits(made[0][1])


@pytest.mark.parametrize("key", ["", "a/b", "%", "%2F", "ü", 0, "0", -3])
def test_odd_keys_of_objects_and_tensors(key, tmp_path):
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    save({key: a, "other": {key: torch.ones(2)}}, tmp_path)
    back = load({key: b, "other": {key: torch.zeros(2)}}, tmp_path)
    assert back[key] is b and model_bits(a) == model_bits(b) and back["other"][key].tolist() == [1, 1]


def test_a_state_may_be_a_module_and_scalers_keep_their_scale(tmp_path):
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    save(a, tmp_path)
    assert load(b, tmp_path) is b and model_bits(a) == model_bits(b)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    save([scaler], tmp_path)
    other = torch.amp.GradScaler("cpu")
    load([other], tmp_path)
    assert other.state_dict() == scaler.state_dict()


def tied(where, tie=True):
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    if tie:
        model["b"].weight = model["a"].weight
    return model.to_global(where, S(0))


def test_tied_parameters_are_written_once(tmp_path):
    where = place([0, 1])
    model = tied(where)
    save({"model": model}, tmp_path)
    folder, parsed = read_manifest(tmp_path)
    a, b = (parsed["tensors"][f"model/{k}.weight"]["pieces"] for k in "ab")
    assert a == b and len(a) == 2
    for other in (tied(where), tied(where, tie=False)):
        load({"model": other}, tmp_path)
        assert model_bits(other) == model_bits(model)
    save({"model": tied(where, tie=False)}, tmp_path)
    before = model_bits(model)
    with pytest.raises(CheckpointError, match="are one tensor in the state, two in the checkpoint"):
        load({"model": model}, tmp_path)
    assert model_bits(model) == before


# ----------------------------------------------------------------------------------------------------------- damage


def small(seed=0, layout=([0, 1, 2], S(0))):
    """A state that is quickly saved: a module and its optimizer, after a step."""
    torch.manual_seed(seed)
    where = place(layout[0])
    model = nn.Linear(6, 5).to_global(where, layout[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(gt.ones(2, 6, placement=where, sbp=B)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def refused(state, directory):
    """The words with which a load is refused; the state must not have changed."""
    before = model_bits(state["model"]), optimizer_bits(state["optimizer"]), copy.copy(state)
    with pytest.raises(CheckpointError) as error:
        load(state, directory)
    assert (model_bits(state["model"]), optimizer_bits(state["optimizer"]), state) == before
    assert "test_checkpoint.py" in str(error.value)
    return str(error.value)


def test_a_flipped_bit_is_refused_by_name(tmp_path):
    seed = 5
    print("seed", seed)
    rng, state = random.Random(seed), small()
    for _ in range(3):
        save(state, tmp_path / "good")
    names = sorted(p.relative_to(tmp_path / "good") for p in (tmp_path / "good" / "step-00000003").iterdir())
    assert len(names) == 6, "a file per rank that has something to write, and the manifest"
    names += ["latest"]
    hit = collections.Counter()
    for i in range(140):                             # 20 in each file; in those of pieces 10 of them in the values
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        name = names[i % len(names)]
        data = bytearray((tmp_path / "bad" / name).read_bytes())
        file = str(name).endswith(".safetensors")
        values = 8 + int.from_bytes(data[:8], "little") if file else len(data)
        at, bit = rng.randrange(values if file and i < 70 else 0, len(data)), rng.randrange(8)
        data[at] ^= 1 << bit
        (tmp_path / "bad" / name).write_bytes(data)
        message = refused(small(1), tmp_path / "bad")
        print(name, at, bit, message.splitlines()[0])
        hit["values" if at >= values else "head" if file else str(name)] += 1
        if at >= values:
            assert message.startswith("the piece [") and f"{name} is damaged: rank " in message, "it names the piece"
        elif name == "latest":
            assert "latest" in message or "cannot be read" in message
        else:
            assert str(name) in message
    assert hit["values"] >= 50 and hit["head"] >= 25 and len(hit) == 4, hit
    assert load(small(1), tmp_path / "good")["step"] == 0


def test_a_flipped_bit_of_the_values_names_the_piece_and_the_rank(tmp_path):
    save(small(), tmp_path)
    folder, parsed = read_manifest(tmp_path)
    piece = parsed["tensors"]["model/weight"]["pieces"][1]
    path = folder / piece["file"]
    data = bytearray(path.read_bytes())
    head = int.from_bytes(data[:8], "little")
    start = json.loads(data[8:8 + head])[piece["key"]]["data_offsets"][0]
    data[8 + head + start + 3] ^= 16
    path.write_bytes(data)
    message = refused(small(1), tmp_path)
    assert f"the piece [2:4, 0:6] of 'model/weight' in {path} is damaged: rank 1 needs it" in message, message


def lose_a_file(folder):
    (folder / "rank-00001.safetensors").unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_short(folder):
    os.truncate(folder / "rank-00002.safetensors", (folder / "rank-00002.safetensors").stat().st_size - 1)


def empty(folder):
    os.truncate(folder / "rank-00000.safetensors", 0)


def cut_the_manifest(folder):
    os.truncate(folder / "manifest.json", 100)


def swap(folder):
    a, b = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    a.rename(folder / "x"), b.rename(a), (folder / "x").rename(b)


def lose_the_folder(folder):
    shutil.rmtree(folder)


def lose_latest(folder):
    (folder.parent / "latest").unlink()


@pytest.mark.parametrize("spoil, words", [
    (lose_a_file, "rank-00001.safetensors is missing"), (lose_the_manifest, "manifest.json cannot be read"),
    (cut_short, "rank-00002.safetensors is damaged"), (empty, "rank-00000.safetensors is damaged"),
    (cut_the_manifest, "manifest.json is damaged"), (swap, "rank-0000"), (lose_the_folder, "cannot be read"),
    (lose_latest, "no checkpoint in"),
])
def test_what_is_missing_or_cut_short_is_named(spoil, words, tmp_path):
    save(small(), tmp_path)
    spoil(read_manifest(tmp_path)[0])
    assert words in refused(small(1), tmp_path)


def rewrite(directory, change):
    """Change the manifest and make all hashes right again, as one would who means harm."""
    folder, parsed = read_manifest(directory)
    new = change(parsed)
    parsed = parsed if new is None else new
    body = json.dumps(parsed).encode()
    data = (b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"manifest": ' + body + b"}\n")
    (folder / "manifest.json").write_bytes(data)
    (directory / "latest").write_text(f"{folder.name} {hashlib.sha256(data).hexdigest()}\n")


def weight(parsed):
    return parsed["tensors"]["model/weight"]


def put(path, value):
    def change(parsed):
        for key in path[:-1]:
            parsed = parsed[key]
        parsed[path[-1]] = value
    return change


EVIL = [
    *[(put(["tensors", "model/weight", "pieces", 0, "file"], name), "not the name of a rank's file") for name in (
        "../rank-00000.safetensors", "/etc/passwd", "..", "", "rank-00000.safetensors\n", "a/rank-00000.safetensors",
        "rank-00000.safetensors\0", "latest")],
    (put(["tensors", "model/weight", "pieces", 0, "file"], 3), "not a str"),
    *[(put(["tensors", "model/weight", "pieces", 0, "hash"], text), "is not a hash") for text in (
        "sha256:" + "0" * 63, "xxh3-128:" + "0" * 64, "md5:" + "0" * 32, "0" * 64, "", ":")],
    (put(["tensors", "model/weight", "pieces", 0, "hash"], "sha256:" + "0" * 64), "is damaged: rank 0 needs it"),
    (put(["tensors", "model/weight", "pieces", 0, "key"], "other"), "missing or damaged"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[0, 9], [0, 6]]), "not inside"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[-1, 2], [0, 6]]), "not a size"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[0, 2]]), "has the region"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[0, 1], [0, 6]]), "do not tile"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[0, 3], [0, 6]]), "do not tile"),
    (put(["tensors", "model/weight", "pieces", 0, "region"], [[0, True], [0, 6]]), "not a size"),
    (put(["tensors", "model/weight", "pieces"], []), "do not tile"),
    (lambda parsed: weight(parsed)["pieces"].append(weight(parsed)["pieces"][0]), "do not tile"),
    (put(["tensors", "model/weight", "shape"], [5, 7]), "do not tile"),
    (put(["tensors", "model/weight", "shape"], [5, 6.0]), "not a size"),
    (put(["tensors", "model/weight", "shape"], [2**61, 2**61]), "do not tile"),
    (put(["tensors", "model/weight", "dtype"], "os.system"), "unknown dtype"),
    (put(["tensors", "model/weight", "dtype"], "int32"), "in the file it is [2, 6] torch.float32, not torch.int32"),
    (put(["tensors", "model/weight", "dtype"], "complex64"), "is torch.float32 in the state, torch.complex64"),
    (put(["tensors", "model/weight", "global"], 1), "not a bool"),
    (put(["tensors", "model/weight"], None), "not a str"),
    (put(["tensors", "more"], {"dtype": "bool", "shape": [0], "global": True, "pieces": []}), "not used in its state"),
    (put(["state", "dict", "model", "dict", "weight", "tensor"], "model/bias"), "not an encoded value"),
    (put(["state", "dict", "model", "dict", "weight"], {"tensor": "model/weight", "dict": {}}), "not an encoded value"),
    (put(["state", "dict", "step"], {"float": "zz"}), "not an encoded value"),
    (put(["state", "dict", "step"], {"call": "os.system"}), "not an encoded value"),
    (put(["state", "dict", "step"], {"counter": [[[], 1]]}), "not an encoded value"),
    (put(["state"], 5), "not used in its state"), (put(["format"], 2), "has format 2"),
    (put(["format"], "1"), "not an int"),
    (lambda parsed: [parsed], "not a manifest"), (lambda parsed: {}, "not a manifest"),
    (lambda parsed: json.loads("[" * 500 + "]" * 500), "not a manifest"),
]


@pytest.mark.parametrize("k", range(len(EVIL)))
def test_a_manifest_is_not_believed(k, tmp_path):
    change, words = EVIL[k]
    save(small(), tmp_path)
    rewrite(tmp_path, change)
    message = refused(small(1), tmp_path)
    assert words in message, message


def test_each_kind_of_hash_finds_a_flipped_bit_and_a_kind_that_is_not_installed_is_named(tmp_path, monkeypatch):
    known = {"xxh3-128": "xxh3-128:99aa06d3014798d86001c324468d497f", "sha256":     # of no bytes, as published
             "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    for kind in list(hashes.KINDS):
        assert hashes.piece_hash(torch.empty(0), kind) == known[kind]
        monkeypatch.setattr(pieces, "piece_hash", lambda t, kind=kind: hashes.piece_hash(t, kind))
        save(small(), tmp_path / kind)
        monkeypatch.setattr(pieces, "piece_hash", hashes.piece_hash)
        load(small(1), tmp_path / kind)
        path = read_manifest(tmp_path / kind)[0] / "rank-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        message = refused(small(1), tmp_path / kind)
        assert "is damaged: rank 1 needs it" in message and f"{kind}:" in message, message
        with monkeypatch.context() as patch:
            patch.delitem(hashes.KINDS, kind)
            message = refused(small(1), tmp_path / kind)
        assert f"are of the kind {kind}" in message and "pip install xxhash" in message, message


def test_latest_names_no_folder_elsewhere(tmp_path):
    save(small(), tmp_path / "a")
    folder, _ = read_manifest(tmp_path / "a")
    line = (tmp_path / "a" / "latest").read_text()
    for name in ("../a/step-00000001", "/etc", "step-1", "step-00000001/../step-00000001", ""):
        (tmp_path / "a" / "latest").write_text(line.replace("step-00000001", name))
        assert "latest is damaged" in refused(small(1), tmp_path / "a")


# --------------------------------------------------------------------------------------------------- what does not fit


def inference(*shape):
    with torch.inference_mode():
        return torch.ones(*shape)


def changed(**more):
    return {**small(1), **more}


@pytest.mark.parametrize("make, words", [
    (lambda: changed(extra=torch.ones(2)), "the state has a value 'extra', the checkpoint in"),
    (lambda: changed(extra=1), "try:   gt.load({k: v for k, v in state.items() if k not in ['extra']}, '"),
    (lambda: {**changed(modle=nn.Linear(6, 5))}, "the closest there: "),
    (lambda: {"modle": small(1)["model"]}, "try:   the key 'model' in place of 'modle'"),
    (lambda: {"step": 1, "extra": None}, "the state has a value 'extra'"),
    (lambda: changed(model=nn.Linear(6, 4)), "'model/weight' is [4, 6] in the state, [5, 6] in the checkpoint"),
    (lambda: changed(model=nn.ParameterDict({"weight": nn.Parameter(torch.ones(5, 6).long(), False), "bias": torch.ones(
        5)})), "model.to(torch.float32) before it is loaded, and model.to(torch.int64) behind that"),
    (lambda: changed(model={"weight": torch.ones(5, 6).long(), "bias": torch.ones(5)}), "x.to(torch.float32) before"),
    (lambda: changed(model=nn.Linear(6, 5, bias=False)), "has a tensor 'model/bias', the state does not"),
    (lambda: changed(step=torch.ones(1)), "the state has a tensor 'step'"),
    (lambda: changed(optimizer=torch.optim.AdamW(nn.Linear(6, 4).parameters())), "its parameter [4, 6]"),
    (lambda: changed(optimizer=torch.optim.AdamW([torch.ones(5, 6)])), "'optimizer/state/1/"),
    (lambda: changed(optimizer=torch.optim.AdamW([{"params": p} for p in nn.Linear(6, 5).parameters()])),
     "parameter groups"),
    (lambda: changed(model=nn.ParameterDict({"weight": torch.ones(1, 6).expand(5, 6), "bias": torch.ones(5)})),
     "cannot be written to"),
    (lambda: changed(model={"weight": inference(5, 6), "bias": torch.ones(5)}), "cannot be written to"),
    (lambda: changed(model={"weight": gt.ones(3, 10, placement=place([0, 1]), sbp=S(1)).view(5, 6), "bias": torch.ones(
        5)}), "a view that had to be boxed"),
    (lambda: changed(model=[small(1)["model"]]), "'model/0/bias'"),
])
def test_what_does_not_fit_is_named_and_changes_nothing(make, words, tmp_path):
    save(small(), tmp_path)
    state = make()
    before = copy.deepcopy({k: v.state_dict() if hasattr(v, "state_dict") else None for k, v in state.items()})
    with pytest.raises(CheckpointError) as error:
        load(state, tmp_path)
    after = {k: v.state_dict() if hasattr(v, "state_dict") else None for k, v in state.items()}
    assert repr(after) == repr(before)
    assert words in str(error.value), error.value


@pytest.mark.parametrize("keys", [("model",), ("optimizer", "step"), ("step",), ()], ids=str)
def test_a_part_of_what_was_saved_is_loaded_by_its_keys(keys, tmp_path):
    whole, state = small(), small(1)
    save(whole, tmp_path)
    before = model_bits(state["model"]), optimizer_bits(state["optimizer"])
    loaded = load({key: state[key] for key in keys}, tmp_path)
    after = model_bits(state["model"]), optimizer_bits(state["optimizer"])
    saved = model_bits(whole["model"]), optimizer_bits(whole["optimizer"])
    assert after == tuple(new if key in keys else old for key, new, old in zip(("model", "optimizer"), saved, before))
    assert tuple(loaded) == keys and loaded.get("step", whole["step"]) == whole["step"]
    assert all(loaded[key] is state[key] for key in keys if key != "step")
    if keys:
        with pytest.raises(CheckpointError, match=r"try:   gt\.load\(state, '"):
            gt.resume({key: state[key] for key in keys}, tmp_path)


def test_of_a_dict_with_ints_for_keys_too(tmp_path):
    save({0: torch.ones(2), 1: torch.ones(3), 10: [5]}, tmp_path)
    x = torch.zeros(3)
    assert load({1: x}, tmp_path)[1] is x and x.tolist() == [1] * 3
    assert load({10: None}, tmp_path) == {10: [5]}
    with pytest.raises(CheckpointError, match="keys of"):
        load({"1": x}, tmp_path)


class Sampler:
    """Has a tensor, a list and a mood of its own."""

    def __init__(self, refuses=False):
        self.order, self.at, self.refuses = torch.zeros(4, dtype=torch.int64), [0, 0], refuses

    def state_dict(self):
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]
        if self.refuses:
            raise KeyError("a bad mood")


def test_objects_are_put_back_where_one_refuses(tmp_path):
    first = Sampler()
    first.order, first.at = torch.arange(4), [7, 8]
    save({**small(), "a": first, "b": first}, tmp_path)
    state = {**small(1), "a": Sampler(), "b": Sampler(refuses=True)}
    expected = model_bits(state["model"]), optimizer_bits(state["optimizer"])
    with pytest.raises(CheckpointError, match="a bad mood"):
        load(state, tmp_path)
    assert (model_bits(state["model"]), optimizer_bits(state["optimizer"])) == expected
    assert state["a"].at == [0, 0] and state["a"].order.tolist() == [0] * 4
    state["b"] = Sampler()
    assert load(state, tmp_path)["b"] is state["b"]
    assert state["b"].order.tolist() == [0, 1, 2, 3] and state["a"].at == [7, 8]


# ------------------------------------------------------------------------------------------------- versions and threads


def test_versions_count_up_and_old_ones_may_be_dropped(tmp_path):
    x = torch.zeros(2)
    for k in range(1, 5):
        path = save({"x": x.fill_(k)}, tmp_path, keep=None if k < 4 else 2).wait()
        assert path.name == f"step-{k:08d}" and (tmp_path / "latest").read_text().startswith(path.name + " ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    assert load({"x": x}, tmp_path / "step-00000003")["x"].tolist() == [3, 3]
    assert load({"x": x}, str(tmp_path))["x"].tolist() == [4, 4]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(CheckpointError, match="keep="):
            save({"x": x}, tmp_path, keep=wrong)


def test_left_overs_are_cleared_and_nothing_else(tmp_path):
    save({"x": torch.ones(1)}, tmp_path)
    left = [tmp_path / "step-00000002.tmp-0123456789abcdef", tmp_path / "latest.tmp-0123456789abcdef"]
    left[0].mkdir()
    (left[0] / "rank-00000.safetensors").write_bytes(b"half")
    left[1].write_text("half")
    (tmp_path / "notes.tmp-x").write_text("mine")
    for path in left:                                # new ones may be another job's
        os.utime(path, (0, 0))
    save({"x": torch.ones(1)}, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "notes.tmp-x", "step-00000001", "step-00000002"]


def test_saving_in_a_thread_while_values_change(tmp_path, monkeypatch):
    write, where = pieces.write_hashed, place([0, 1, 2])
    monkeypatch.setattr(saving, "write_hashed", lambda *args: time.sleep(0.05) or write(*args))
    state = {"x": gt.ones(6, 4, placement=where, sbp=S(0)), "b": gt.ones(5, placement=where, sbp=B),
             "plain": torch.ones(3), "p": gt.full((2,), 1.0, placement=where, sbp=P), "m": nn.Linear(2, 2)}
    with torch.no_grad():
        state["m"].weight.fill_(1)
    running = save(state, tmp_path, asynchronous=True)
    assert not running.done and "in progress" in repr(running)
    with torch.no_grad():
        for t in (*[v for k, v in state.items() if k != "m"], state["m"].weight):
            t.mul_(5)
    assert running.wait() == tmp_path / "step-00000001" and running.done and running.wait() == running.path
    changed = bits(state["x"])
    load(state, tmp_path)
    assert bits(state["x"]) != changed
    for key in ("x", "b", "plain", "p"):
        whole = gather(state[key]) if state[key].is_global else state[key]
        assert (whole == 1).all(), key
    assert (state["m"].weight == 1).all()
    first = save(state, tmp_path, asynchronous=True)  # the next one waits for it
    save(state, tmp_path)
    assert first.done and sorted(p.name for p in tmp_path.glob("step*"))[-1] == "step-00000003"


def test_a_save_that_fails_is_told_and_leaves_the_one_before(tmp_path, monkeypatch):
    save(small(), tmp_path)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_hashed", full)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        save(small(1), tmp_path)
    assert "test_checkpoint.py" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]     # the room is free at once
    running = save(small(1), tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match="No space left on device"):
        running.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    save(small(1), tmp_path, asynchronous=True)
    monkeypatch.undo()
    assert load(small(2), tmp_path)["step"] == 0
    with pytest.warns(RuntimeWarning, match="an earlier save failed: .*No space left"):
        save(small(3), tmp_path)
    assert load(small(2), tmp_path)["step"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("threads", [1, 3])
def test_errors_of_our_threads_have_the_line_of_the_program(threads, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "threads", lambda: threads)
    save({"x": torch.arange(100.0), "y": torch.arange(50.0)}, tmp_path)
    (tmp_path / "latest").write_text("damaged")

    def unreadable(*_):
        raise OSError(errno.EIO, "a bad disk")

    monkeypatch.setattr(tensor_files.TensorFile, "hash", unreadable)
    monkeypatch.setattr(folders, "publish", lambda *_: folders.latest(tmp_path))
    calls = [lambda: load({"x": torch.zeros(100), "y": torch.zeros(50)}, tmp_path / "step-00000001")]
    calls.append(lambda: save({"x": torch.zeros(2)}, tmp_path))
    calls.append(lambda: save({"x": torch.zeros(2)}, tmp_path, asynchronous=True).wait())
    for call in calls:
        with pytest.raises(CheckpointError) as error:
            call()
        assert error.value.where.endswith(f"test_checkpoint.py:{call.__code__.co_firstlineno}"), error.value


def test_a_rank_that_never_writes_ends_the_wait_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "TIMEOUT", 0.2)
    monkeypatch.setattr(saving.Saving, "_write", lambda self: None)
    with pytest.raises(CheckpointError, match="for rank 0 to write"):
        save(small(), tmp_path)


# ------------------------------------------------------------------------------------------------- ended by kill -9


def killed(tmp_path, times, seed):
    """Kill a program that saves all the time, at random moments: what is there must load, and be no older."""
    print("seed", seed)
    rng, last, began = random.Random(seed), 0, 0
    where = place([0, 1, 2])
    for _ in range(times):
        program = Started([PYTHON, PROGRAM, "loop", tmp_path], environment(GLOBALTENSOR_RANKS="2"))
        line = program.process.stdout.readline()
        assert line, program.end()
        time.sleep(rng.uniform(0, 0.15))
        os.kill(program.process.pid, 9)
        code, out, err = program.end()
        assert code == -9, err
        told = [int(n) for n in (line + out).split()]
        state = load({"x": gt.zeros(1000, 50, placement=where, sbp=S(1)), "number": 0}, tmp_path / "loop")
        name = (tmp_path / "loop" / "latest").read_text().split()[0]
        assert (gather(state["x"]) == state["number"]).all()
        assert told == list(range(1, len(told) + 1))
        assert state["number"] in (told[-1], told[-1] + 1), "the last that was told, or the one under way"
        version = int(name.removeprefix("step-"))
        assert version >= last + state["number"]
        last, began = version, began + len(told)
    print(began, "saves")


@pytest.mark.processes
def test_whoever_is_killed_leaves_a_whole_checkpoint(tmp_path):
    killed(tmp_path, 8, 21)


@pytest.mark.long
@pytest.mark.processes
def test_whoever_is_killed_leaves_a_whole_checkpoint_50_times(tmp_path):
    killed(tmp_path, 50, 22)


# ---------------------------------------------------------------------------------------------------- real processes


@pytest.mark.processes
def test_processes_save_and_others_load(tmp_path):
    good([*RUN, "-n", 2, PROGRAM, "save", tmp_path])
    seen = results(tmp_path / "seen-save2")
    assert sorted(seen) == [0, 1] and seen[0]["bits"] == seen[1]["bits"]
    for result in seen.values():
        assert result["path"] == "step-00000002"
        kind, text = result["differ"]
        assert kind == "CheckpointError" and "the ranks differ in the plain value a/mine of the state" in text
        kind, text = result["keys"]
        assert kind == "CheckpointError" and "a/k0 (on rank 0), the plain value a/k1 (on rank 1)" in text, text
    assert not (tmp_path / "differ").exists()
    shutil.copytree(tmp_path / "good", tmp_path / "damaged")
    folder, manifest = read_manifest(tmp_path / "damaged")
    assert sorted(p.name for p in folder.glob("rank*")) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    path = folder / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    good([*RUN, "-n", 4, PROGRAM, "load", tmp_path])
    loaded = {**results(tmp_path / "seen-load4"), "lone": runpy.run_path(PROGRAM)["load"](tmp_path)}
    assert list(loaded) == [0, 1, 2, 3, "lone"]
    for who, result in loaded.items():
        assert result["bits"] == seen[0]["bits"] and result["weights"] == seen[0]["weights"], who
        assert result["step"] == 2 and result["pending"] == [2.0] * 3
        kind, text = result["refused"]
        assert kind == "CheckpointError" and "rank-00001.safetensors" in text and "damaged" in text, f"{who}: {text}"
        assert result["same"]


@pytest.mark.processes
def test_what_fails_on_one_rank_raises_on_all(tmp_path):
    good([*RUN, "-n", 3, PROGRAM, "unlucky", tmp_path])
    for rank, result in results(tmp_path / "seen-unlucky3").items():
        for what, (kind, text) in result["seen"].items():
            assert kind == "CheckpointError" and "no room on this rank" in text, f"rank {rank}, {what}: {text}"
            assert rank == 1 or "failed on rank 1" in text, f"rank {rank}, {what}: {text}"


# ----------------------------------------------------------------------------------------------- Hugging Face's folders


def weights(where, sbp, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 9)).to(dtype)
    return model if where is None else model.to_global(where, sbp)


@pytest.mark.parametrize("shard_gb, files", [(5, 1), (2e-7, 5), (1e-9, 10)])
def test_safetensors_folders(shard_gb, files, tmp_path):
    model = weights(place([[0, 1], [2, 3]]), cut)
    gt.save_safetensors(model, tmp_path, shard_gb=shard_gb)
    result = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    expected = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05d}-of-{files:05d}.safetensors"
                                                         for i in range(files)]
    assert result == expected
    from_files = {}
    for name in result:
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            from_files |= {key: file.get_tensor(key) for key in file.keys()}
    assert {k: bits(t) for k, t in from_files.items()} == model_bits(model)
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(from_files) and set(index["weight_map"].values()) == set(result)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in from_files.values())
    for where, sbp in ((None, None), (place([2, 0, 1]), B), (place([0, 1, 2]), cut_rows), (place([1, 0]), cut_columns)):
        other = weights(where, sbp, seed=1)
        assert gt.load_safetensors(other, tmp_path) is other
        assert model_bits(other) == model_bits(model)
    gt.save_safetensors(weights(None, None, 2), tmp_path, shard_gb=3e-7)     # over it: the old files go
    gt.load_safetensors(other, tmp_path)
    assert model_bits(other) == model_bits(weights(None, None, 2))
    gt.save_safetensors(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_safetensors_written_elsewhere_are_converted(tmp_path):
    from safetensors.torch import save_file
    source = weights(None, None, 4, torch.bfloat16)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = weights(place([0, 1, 2]), cut_rows)
    gt.load_safetensors(model, tmp_path)
    for name, t in source.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(t.to(model.state_dict()[name].dtype)), name


def cut_rows(name, p):
    return S(0) if p.dim() else B


def cut_columns(name, p):
    return S(p.dim() - 1) if p.dim() else B


def test_safetensors_of_tied_parameters(tmp_path):
    from safetensors.torch import save_file
    where = place([0, 1])
    model, other = tied(where), tied(where)
    gt.save_safetensors(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["a.weight"]
    gt.load_safetensors(other, tmp_path)
    assert model_bits(other) == model_bits(model) and other["a"].weight is other["b"].weight
    with pytest.raises(CheckpointError, match="the state has a tensor 'b.weight'"):
        gt.load_safetensors(tied(where, tie=False), tmp_path)
    save_file({"a.weight": torch.ones(4, 4), "b.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are one tensor in the module, two in the folder"):
        gt.load_safetensors(model, tmp_path)
    save_file({"b.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    gt.load_safetensors(model, tmp_path)
    assert (gather(model["a"].weight) == 1).all()


@pytest.mark.parametrize("spoil, words", [
    (lambda p: (p / "model-00002-of-00005.safetensors").unlink(), "is missing"),
    (lambda p: os.truncate(p / "model-00003-of-00005.safetensors", 90), "is damaged"),
    (lambda p: (p / "model.safetensors.index.json").unlink(), "has neither"),
    (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "is damaged"),
    (lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"1.weight": "../x.safetensors"}}'),
     "not a file of this folder"),
    (lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"1.weight": {"a": 1}}}'),
     "not a file of this folder"),
    (lambda p: shutil.copy(p / "model-00001-of-00005.safetensors", p / "model.safetensors"), "the state has a tensor"),
    (lambda p: gt.save_safetensors(nn.Linear(2, 2), p), "the state has a tensor"),
    (lambda p: gt.save_safetensors(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 7), nn.BatchNorm1d(7),
                                                         nn.Linear(7, 9)), p), "[9, 4] in the state, [9, 5] in"),
])
def test_safetensors_that_do_not_fit_change_nothing(spoil, words, tmp_path):
    model = weights(place([0, 1]), cut_rows)
    gt.save_safetensors(weights(None, None, 1), tmp_path, shard_gb=2e-7)
    spoil(tmp_path)
    before = model_bits(model)
    with pytest.raises(CheckpointError) as error:
        gt.load_safetensors(model, tmp_path)
    assert words in str(error.value), error.value
    assert model_bits(model) == before


def test_a_file_takes_what_a_folder_takes(tmp_path):
    """Modules and optimizers by their state; and the file that is there stays until the new one is whole."""
    def trained(spread):
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        x = torch.ones(2, 4)
        if spread:
            model = gt.parallelize(model, gt.placement("cpu", [0, 1], ("dp",)))
            x = gt.from_full(x, model.weight.placement, gt.sbp.split(0))
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        return {"model": model, "inner": [optimizer], "step": 3}

    file, link = tmp_path / "state.pt", tmp_path / "link.pt"
    file.write_bytes(b"")
    link.symlink_to(file)
    gt.save(trained(True), link)
    saved, right = torch.load(file), trained(False)
    assert link.is_symlink() and saved["step"] == 3
    torch.testing.assert_close(dict(saved["model"]), dict(right["model"].state_dict()))
    torch.testing.assert_close(saved["inner"][0], right["inner"][0].state_dict())
    with pytest.raises(CheckpointError, match="Can't pickle"):
        gt.save({"step": lambda: 4}, file)
    assert torch.load(file)["step"] == 3 and sorted(tmp_path.iterdir()) == [link, file]


# what is called with a folder "run", a file "model.pt" and no "missing" there, its error, and what this says to type
MISREAD = {
    "a folder alone": (lambda: gt.load("run"), gt.ArgumentError, 'gt.load(state, "run")'),
    "a folder, by keyword": (lambda: gt.load("run", map_location="cpu"), gt.ArgumentError, 'gt.load(state, "run")'),
    "a folder, to a device": (lambda: gt.load(Path("run"), "cpu"), gt.ArgumentError, 'gt.load(state, "run")'),
    "a file into a state": (lambda: gt.load({"x": 0}, "model.pt"), CheckpointError, 'gt.load("{}/model.pt")'),
    "nothing": (lambda: gt.load("missing"), FileNotFoundError, 'gt.load(state, "folder")'),
    "nothing, to a device": (lambda: gt.load("missing", "cpu"), FileNotFoundError, 'gt.load(state, "folder")'),
    "no file": (lambda: gt.load("missing.pt", weights_only=True), FileNotFoundError, 'gt.load(state, "folder")'),
    "a store alone": (lambda: gt.load("memory://x/run"), gt.ArgumentError, 'gt.load(state, "memory://x/run")'),
    "a file in a store": (lambda: gt.load("memory://x/model.pt", "cpu"), gt.ArgumentError,
                          'with fsspec.open("memory://x/model.pt", "rb") as file: gt.load(file)'),
}


@pytest.mark.parametrize("case", MISREAD)
def test_a_file_and_a_folder_that_are_taken_for_each_other(case, tmp_path, monkeypatch):
    call, kind, fix = MISREAD[case]
    monkeypatch.chdir(tmp_path)
    for target in ("run", "model.pt", "memory://x/run"):
        gt.save({"x": 1}, target)
    with fsspec.open("memory://x/model.pt", "wb") as file:
        gt.save({"x": 1}, file)
    with pytest.raises(kind) as caught:
        call()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    fix = fix.format(tmp_path)
    assert f"  where: {Path(__file__).name}:" in text.replace(os.path.relpath(Path(__file__).parent) + os.sep, ""), text
    assert fix in text.partition("  try:   ")[2], text
    names = {"gt": gt, "fsspec": fsspec, "state": {"x": 0}, "folder": "run"}
    exec(fix.replace('"folder"', "folder").replace("gt.load", "loaded = gt.load"), names)
    assert names["loaded"] == {"x": 1}


@pytest.mark.parametrize("save", [lambda model, to: gt.save_safetensors(model, to, shard_gb=1e-6),
                                  lambda model, to: gt.save(model.state_dict(), to / "model.pt")],
                         ids=["safetensors", "torch's file"])
def test_a_full_disk_keeps_nothing_of_a_file_that_did_not_fit(save, tmp_path, monkeypatch):
    model = gt.to_global(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), gt.placement("cpu", [0, 1]), B)
    write, count = huggingface.write_tensors, itertools.count()

    def half(path, *rest):
        if next(count):
            Path(path).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *rest)

    def unexpected(state, path):
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(huggingface, "write_tensors", half)
    monkeypatch.setattr(torch, "save", unexpected)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())


class _Averages:
    """Makes its state anew whenever it is asked."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return {str(n): t * 1 for n, t in enumerate(self.tensors)}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_file_has_what_is_tied_once_and_each_of_what_is_made_for_it(tmp_path):
    where = gt.placement("cpu", [0, 1])
    model = tied(where)
    save(model.state_dict(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt")
    storages = {name: t.untyped_storage().data_ptr() for name, t in read.items()}
    plain = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    assert len(set(storages.values())) == len(set(plain.values())) < len(plain)
    objects = {n: _Averages([gt.full((3,), 10. * n + k, placement=where, sbp=B) for k in range(3)]) for n in range(20)}
    save(objects, tmp_path / "objects.pt")
    for n, state in torch.load(tmp_path / "objects.pt").items():
        assert [float(t[0]) for t in state.values()] == [10. * n + k for k in range(3)]
