"""torch.distributed.checkpoint saves and loads global tensors: any layout to any other, and plain tensors both ways."""
from __future__ import annotations

import itertools
import random
import runpy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import PROGRAMS, PYTHON, RUN, good, results
from shards import B, P, fulls, gather, lay, place
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.utils._pytree import tree_flatten

import globaltensor as gt
from globaltensor.checkpoint import dcp as ours
from globaltensor.layouts.regions import volume
from globaltensor.layouts.sbp import split as S

PROGRAM = PROGRAMS / "torch_checkpoints.py"
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
              pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
              pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")]

LAYOUTS = {
    "plain": None,
    "one rank": ([5], (B,)),
    "S(0) of 3": ([0, 1, 2], (S(0),)),
    "S(1) of 4, mixed": ([3, 1, 0, 2], (S(1),)),
    "B of 3": ([4, 0, 7], (B,)),
    "S(0), S(1)": ([[0, 1], [2, 3]], (S(0), S(1))),
    "S(0), S(0)": ([[0, 1, 2], [3, 4, 5]], (S(0), S(0))),
    "B, S(1)": ([[0, 1], [2, 3]], (B, S(1))),
    "S(1), B": ([[6, 7], [2, 3]], (S(1), B)),
}


def bits(t):
    """The bytes of a tensor, whole; put together by hand where it is global, replicas compared."""
    t = gather(t.detach()) if t.is_global else t.detach()
    return t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist()


def opposite(t):
    """The same shape and dtype, with other values everywhere."""
    return ~t if t.dtype == torch.bool else t + 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint per layout, made when it is asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("layout")
            dcp.save({"deep": {k: lay(t, LAYOUTS[name]) for k, t in fulls().items()}, "n": 3}, checkpoint_id=made[name])
        return made[name]

    return get


@pytest.mark.sample(4)
@pytest.mark.parametrize("src", LAYOUTS)
@pytest.mark.parametrize("dst", LAYOUTS)
def test_round_trips(src, dst, saved):
    into = {k: lay(opposite(t), LAYOUTS[dst]) for k, t in fulls().items()}
    state = {"deep": dict(into), "n": 0}
    dcp.load(state, checkpoint_id=saved(src))
    assert state["n"] == 3
    for name, t in fulls().items():
        assert state["deep"][name] is into[name], "written in place"
        assert bits(into[name]) == bits(t), f"{name}: {src} -> {dst}"


def stored(folder):
    """What torch's metadata says is stored of each tensor: its size and the boxes."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(of.size), [tuple((a, a + n) for a, n in zip(c.offsets, c.sizes)) for c in of.chunks])
            for name, of in found.items() if hasattr(of, "chunks")}


def test_each_element_is_written_once(saved):
    for layout in LAYOUTS:
        found = stored(saved(layout))
        assert len(found) == len(fulls())
        for name, (size, regions) in found.items():
            count = torch.zeros(size, dtype=torch.int64)
            for region in regions:
                count[tuple(slice(a, b) for a, b in region)] += 1
            assert (count == 1).all(), (layout, name, regions)
            whole = [tuple((0, n) for n in size)]
            assert all(volume(region) for region in regions) or regions == whole, "no empty chunks"


def test_large_replicas_are_cut_for_their_holders(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "MAX_PIECE_BYTES", 100)
    full = torch.arange(420.0).view(3, 20, 7)
    for layout, pieces in [(([0, 1, 2], (B,)), 3), (([[0, 1], [2, 3]], (S(0), B)), 4), (([0, 1], (S(1),)), 2)]:
        x, y = lay(full, layout), lay(full + 1, layout)
        dcp.save({"x": x}, checkpoint_id=tmp_path)
        assert len(stored(tmp_path)["x"][1]) == pieces
        dcp.load({"x": y}, checkpoint_id=tmp_path)
        assert bits(y) == bits(full)


def test_cuts_tile_a_box():
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        region = tuple((a, a + rng.randint(1, 9)) for a in (rng.randint(0, 9) for _ in range(rng.randint(0, 3))))
        holders, itemsize = rng.randint(1, 5), rng.choice([1, ours.MAX_PIECE_BYTES // 4, ours.MAX_PIECE_BYTES])
        cuts = ours.cut_for_holders(region, holders, itemsize)
        assert 1 <= len(cuts) <= holders
        points = [p for part in cuts for p in itertools.product(*(range(a, b) for a, b in part))]
        assert sorted(points) == list(itertools.product(*(range(a, b) for a, b in region))), (region, holders)


def test_strided_and_complex_parts(tmp_path):
    where, full = place([0, 1]), torch.arange(42.0).view(6, 7)
    wide = torch.complex(full, -full)
    saved = {"t": gt.from_full(full, where, S(0)).t(), "wide": gt.from_full(wide, where, S(1)).conj()}
    dcp.save(saved, checkpoint_id=tmp_path)
    into = {"t": gt.zeros(6, 7, placement=where, sbp=S(1)).t(), "wide": torch.zeros_like(wide)}
    dcp.load(into, checkpoint_id=tmp_path)
    assert bits(into["t"]) == bits(full.t()) and torch.equal(into["wide"], wide.conj())


def test_a_boxed_view_follows_what_is_loaded(tmp_path):
    where, full = place([0, 1]), torch.arange(42.0).view(6, 7)
    dcp.save({"x": gt.from_full(full, where, S(0))}, checkpoint_id=tmp_path)
    x = gt.zeros(6, 7, placement=where, sbp=S(0))
    row = x[4]
    assert not row.full_tensor().any()
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert torch.equal(row.full_tensor(), full[4])


# ---------------------------------------------------------------------------------------------- what cannot be done


def pending(op=P):
    return gt.ones(4, placement=place([0, 1]), sbp=op)


def boxed_view():
    return gt.ones(3, 10, placement=place([0, 1]), sbp=S(1)).view(5, 6)


def inference():
    with torch.inference_mode():
        return gt.ones(4, placement=place([0, 1]), sbp=B)


@pytest.mark.parametrize("act", [dcp.save, dcp.async_save, dcp.load])
@pytest.mark.parametrize("op", [P, gt.sbp.partial_max])
def test_pending_sums_are_refused(act, op, tmp_path):
    if act is dcp.load:
        dcp.save({"x": torch.zeros(4)}, checkpoint_id=tmp_path)
    x = pending(op)
    with pytest.raises((dcp.CheckpointException, gt.GlobalTensorError)) as error:
        act({"x": x}, checkpoint_id=tmp_path)
    assert "a pending sum, [4] torch.float32" in str(error.value) and "x.to_global(sbp=" in str(error.value)
    assert gather(x).tolist() == gather(pending(op)).tolist()
    assert (tmp_path / ".metadata").exists() == (act is dcp.load)


@pytest.mark.parametrize("make, words", [(boxed_view, "is a view that had to be boxed"),
                                         (inference, "cannot be written to")])
def test_what_cannot_be_written_to_is_refused(make, words, tmp_path):
    x = make()
    dcp.save({"x": torch.zeros(x.shape)}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.CheckpointException, match=words):
        dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert (gather(x) == 1).all()


def test_other_shapes_are_refused(tmp_path):
    dcp.save({"x": gt.ones(4, 3, placement=place([0, 1]), sbp=S(0))}, checkpoint_id=tmp_path)
    x = gt.ones(3, 4, placement=place([0, 1]), sbp=S(0))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"x": x}, checkpoint_id=tmp_path)


def test_backward_knows_that_a_value_was_loaded(tmp_path):
    x = gt.ones(4, placement=place([0, 1]), sbp=S(0), requires_grad=True)
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    y = x.clone()
    loss = (y * y).sum()
    dcp.load({"x": y.detach()}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------------------------------------- models and more


def trained(seed, where, sbp):
    """A small model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to_global(where, sbp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(gt.randn(6, 5, placement=where, sbp=B)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_modules_and_optimizers(tmp_path):
    a = trained(1, place([[0, 1], [2, 3]]), lambda name, p: (S(0), B) if p.dim() else B)
    b = trained(2, place([2, 0, 1]), lambda name, p: S(1) if p.dim() == 2 else B)
    dcp.save(a, checkpoint_id=tmp_path)
    parameters = list(b["model"].parameters())
    dcp.load(b, checkpoint_id=tmp_path)
    assert all(p is q for p, q in zip(parameters, b["model"].parameters()))
    for (name, x), y in zip(a["model"].state_dict().items(), b["model"].state_dict().values()):
        assert bits(x) == bits(y), name
    for p, q in zip(a["model"].parameters(), b["model"].parameters()):
        for key, x in a["optimizer"].state[p].items():
            assert bits(x) == bits(b["optimizer"].state[q][key]), key
        assert b["optimizer"].state[q]["exp_avg"].sbp == q.sbp


def by_name(stage, dtype, ranks, kind=torch.optim.AdamW, seed=1):
    """A model and its optimizer, under ZeRO or not; plain without ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(dtype)
    if ranks:
        gt.parallelize(model, place(list(range(ranks)), ("dp",)))
    optimizer = kind(model.parameters(), lr=0.1)
    return model, gt.zero(optimizer, stage=stage) if stage else optimizer


def stepped(model, optimizer, times=1):
    weight = next(model.parameters())
    x = torch.arange(24.0).view(6, 4).to(weight.dtype) / 24
    for _ in range(times):
        model(gt.from_full(x, weight.placement, S(0)) if weight.is_global else x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value):
    """The same state of plain tensors, of float32, and of memory of its own."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return (value.full_tensor() if value.is_global else value.clone()).float() if torch.is_tensor(value) else value


def assert_same(a, b, **near):
    """The same structure and plain values, and tensors that are as near."""
    (xs, form), (ys, other) = tree_flatten(a), tree_flatten(b)
    assert form == other
    for x, y in zip(xs, ys):
        if torch.is_tensor(x):
            torch.testing.assert_close(x, y, **near)
        else:
            assert x == y


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, momentum])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_by_names_of_parameters(stage, kind, dtype, flat):
    """torch knows a parameter by what the optimizer steps, which under ZeRO may be a part of it. The state is that of
    plain torch, and goes on in any other layout, stage and number of ranks as in its own."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = whole(get_state_dict(*stepped(*by_name(stage, dtype, 2, kind)), options=options)[1])
    plain = whole(get_optimizer_state_dict(*stepped(*by_name(0, torch.float32, 0, kind)), options=options))
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    if flat:
        masters = {name for name in saved if name.endswith(".master")}
        kept = {name: t for name, t in saved.items() if name not in masters}
    else:
        masters = {name for name, one in saved["state"].items() if "master" in one}
        kept = {**saved, "state": {name: rest for name, one in saved["state"].items()
                                   if (rest := {key: t for key, t in one.items() if key != "master"})}}
    assert len(masters) == (0 if dtype == torch.float32 else 4)
    assert_same(kept, plain, **near)
    model, _ = stepped(*by_name(stage, dtype, 2, kind))
    weights = whole(model.state_dict())
    expected = whole(stepped(*by_name(stage, dtype, 2, kind), 3)[0].state_dict())
    for other, ranks in [(0, 0), (0, 3), (1, 3), (2, 2), (3, 3)]:
        model, optimizer = by_name(other, dtype, ranks, kind, seed=2)
        set_state_dict(model, optimizer, model_state_dict=whole(weights), optim_state_dict=whole(saved),
                       options=options)
        again = whole(get_optimizer_state_dict(model, optimizer, options=options))
        if other or dtype == torch.float32:
            assert_same(again, saved, **near)
        stepped(model, optimizer, 2)
        torch.testing.assert_close(whole(model.state_dict()), expected, **near)


def test_a_state_by_names_of_global_tensors(tmp_path):
    """What one layout gives, as it is and by way of a checkpoint, another takes; and a group of one parameter."""
    model, optimizer = stepped(*by_name(1, torch.float32, 2))
    saved = whole(get_optimizer_state_dict(model, optimizer))
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    others = by_name(3, torch.float32, 3)
    set_optimizer_state_dict(*others, get_optimizer_state_dict(model, optimizer))
    assert_same(whole(get_optimizer_state_dict(*others)), saved)
    others = by_name(2, torch.float32, 3)
    into = get_optimizer_state_dict(*others)
    dcp.load(into, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*others, into)
    assert_same(whole(get_optimizer_state_dict(*others)), saved)
    head = gt.zero(torch.optim.AdamW([model[1].weight], lr=0.1))
    assert list(get_optimizer_state_dict(model, head)["state"]) == ["1.weight"]


def test_torch_by_name_may_be_imported_after_zero():
    good([PYTHON, "-c", """
import torch, globaltensor as gt, sys
model = gt.parallelize(torch.nn.Linear(4, 4), gt.placement("cpu", [0, 1], axis_names=("dp",)))
optimizer = gt.zero(torch.optim.AdamW(model.parameters()))
assert "torch.distributed.checkpoint.state_dict" not in sys.modules, "it takes seconds"
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
assert list(get_optimizer_state_dict(model, optimizer)["state"]) == ["weight", "bias"]
"""])


def test_a_copy_is_saved_in_the_background(tmp_path):
    full = torch.arange(35.0).view(7, 5)
    made = {name: lay(full, layout) for name, layout in LAYOUTS.items()}
    running = dcp.async_save(made, checkpoint_id=tmp_path)
    with torch.no_grad():
        for x in made.values():
            x.zero_()
    running.result()
    into = {name: torch.zeros(7, 5) for name in made}
    dcp.load(into, checkpoint_id=tmp_path)
    for name, t in into.items():
        assert torch.equal(t, full), name


# --------------------------------------------------------------------------------------------------- real processes


@pytest.mark.processes
def test_processes_save_and_others_load(tmp_path):
    program = runpy.run_path(str(PROGRAM))
    full = program["FULL"]
    dcp.save({"deep": full, "number": 7}, checkpoint_id=tmp_path / "plain")
    good([*RUN, "-n", 2, PROGRAM, "save", tmp_path])
    for rank, found in results(tmp_path / "seen-save").items():
        assert "a pending sum, [3] torch.float32" in found["refused"], rank
        assert found["refused"].count("  where: ") == 2, "each rank says once where"
    for name in ("global", "async"):
        regions = stored(tmp_path / name)
        assert regions["deep.rows"][1] == [((0, 4), (0, 5)), ((4, 7), (0, 5))]
        assert regions["deep.same"][1] == [((0, 6),)] and regions["deep.one"][1] == [((0, 4),)]
    sizes = [path.stat().st_size for path in (tmp_path / "large").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < min(sizes) + 10_000, "both ranks write half of a large replica"
    good([*RUN, "-n", 3, PROGRAM, "load", tmp_path])
    expected = {name: t.tolist() for name, t in full.items()}
    for who, found in {**results(tmp_path / "seen-load"), "lone": program["load"](tmp_path)}.items():
        assert len(found) == 6
        for what, values in found.items():
            assert values == expected, f"{who}: {what}"
