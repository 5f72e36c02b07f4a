"""The planner: exact beside an exhaustive search, its bounds beside the simulator, strategies as data, and run."""
from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import random
import re
import sys
from math import inf

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT

import globaltensor as gt
from globaltensor.cli import main
from globaltensor.planner.bounds import VariantCosts, of_shape
from globaltensor.planner.explaining import GptSearch, cut_text, explanation_of
from globaltensor.planner.plotting import candidate_points, pareto_front
from globaltensor.planner.pricing import Task, peaks_of, price_cut
from globaltensor.planner.report import strategy_of
from globaltensor.planner.search import least_memory, search
from globaltensor.planner.space import BatchError, Fixed, cuts, shapes, variants
from globaltensor.schedules.check import peak_activations
from globaltensor.schedules.generators import GENERATORS, generate
from globaltensor.simulator.cluster import KNOWN, Cluster, Link
from globaltensor.simulator.gpt import GPT, RECOMPUTE
from globaltensor.simulator.training import TrainingPlan, simulate_training
from globaltensor.tensors import gradients

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT as ExampleGPT

SEED = 20_261_124
NANO = "--model gpt --layers 12 --hidden 768 --heads 12 --seq 1024 --vocab 50304 --devices 8 --global-batch 512"
FITS = 1 + 1e-9                                      # sums in another order


# ------------------------------------------------------------------------------------------------------ small cases


def small_cluster(draw: random.Random) -> Cluster:
    near = 10 ** draw.uniform(9, 11.5)
    return Cluster("small", draw.choice([1, 2, 3, 4, 8]), 10 ** draw.uniform(12, 14), 0.5, 10 ** draw.uniform(6, 9),
                   10 ** draw.uniform(10.5, 12), Link(10 ** draw.uniform(-6, -4), near),
                   Link(10 ** draw.uniform(-5, -3.5), near / draw.choice([1, 4, 20])), 0,
                   draw.choice([0, 0, 1e-5]), draw.choice([0, 1e-4]), draw.choice([0, 1e-3]))


def small_task(draw: random.Random) -> Task:
    """A chain of up to 6 layers on up to 8 devices; some choices fixed, so that all plans can be simulated."""
    heads = draw.choice([2, 4, 6])
    gpt = GPT(draw.randint(1, 6), heads * draw.choice([16, 64]), heads, draw.choice([32, 128]),
              draw.choice([64, 1000, 20_000]), draw.random() < 0.3)
    devices, batch = draw.randint(1, 8), draw.choice([1, 2, 4, 6, 8])
    fixed = Fixed(schedule=draw.choice([None, *GENERATORS]), zero=draw.choice([None, None, 0, 1, 2, 3]),
                  micro_batch=draw.choice([None, 1, 1, 1]), recompute=draw.choice([None, None, None, *RECOMPUTE]),
                  sequence_parallel=draw.choice([None, True, False]))
    return Task(gpt, small_cluster(draw), devices, batch, fixed)


def every_plan(task: Task):
    """All plans, by loops that know nothing of the planner: every cut, and every choice of what ranks recompute."""
    gpt, fixed, n = task.gpt, task.fixed, task.devices
    for dp, tp, pp in itertools.product(range(1, n + 1), range(1, n + 1), range(1, min(n, gpt.layers) + 1)):
        if dp * tp * pp > n or gpt.heads % tp or task.global_batch % dp:
            continue
        kinds = [(name, v) for name in GENERATORS for v in range(1, 9)
                 if v == GENERATORS[name][1] or GENERATORS[name][1] is None and v * pp <= gpt.layers]
        for (name, v), zero, sp, b in itertools.product(kinds, range(4), (False, True),
                                                        range(1, task.global_batch // dp + 1)):
            if pp == 1 and name != "1f1b" or dp == 1 and zero or tp == 1 and sp or v * pp > gpt.layers:
                continue
            if name in ("interleaved", "bfs") and v == 1 or task.global_batch % (dp * b):
                continue
            if any(wanted is not None and wanted != chosen for wanted, chosen in (
                    (fixed.schedule if pp > 1 else None, name), (fixed.zero if dp > 1 else None, zero),
                    (fixed.micro_batch, b), (fixed.sequence_parallel if tp > 1 else None, sp))):
                continue
            ways = RECOMPUTE if fixed.recompute is None else (fixed.recompute,)
            for at in itertools.combinations(range(1, gpt.layers), pp * v - 1):
                layers = tuple(b - a for a, b in itertools.pairwise((0, *at, gpt.layers)))
                for recompute in itertools.product(ways, repeat=pp):
                    yield TrainingPlan(b, task.global_batch, dp, tp, pp, name, v, zero, recompute, sp, layers)


def exhausted(task: Task) -> tuple[float, float]:
    """Seconds of the fastest plan that fits, and bytes that a device needs at least."""
    fastest, least = inf, inf
    for plan in every_plan(task):
        step = simulate_training(task.gpt, plan, task.cluster)
        memory = max(a + b for a, b in zip(step.states, step.activations))
        least = min(least, memory)
        if memory <= task.cluster.memory * FITS:
            fastest = min(fastest, step.seconds)
    return fastest, least


def compare_with_all(seed: int, most: int) -> bool:
    """Does the search find what going through all plans finds? False where there are more than `most`."""
    draw = random.Random(seed)
    task = small_task(draw)
    if sum(1 for _ in itertools.islice(every_plan(task), most + 1)) > most:
        return False
    fastest, least = exhausted(task)
    try:
        result = search(task)
    except BatchError:
        assert least == inf, seed
        return True
    if fastest == inf:
        assert result.best is None, seed
        assert least_memory(task) >= least / FITS, seed
    else:
        assert result.best is not None, seed
        assert result.best.seconds == pytest.approx(fastest, rel=1e-9), (seed, result.best)
        assert result.lower_bound == result.best.seconds, seed
        assert all(one is None or one.seconds >= result.best.seconds for one in result.menu.values()), seed
    return True


def test_nothing_is_faster_than_what_the_search_finds():
    tried = [compare_with_all(SEED + k, 250) for k in range(110)]
    assert sum(tried) >= 60, "cases that are small enough"


@pytest.mark.long
def test_nothing_is_faster_in_a_thousand_cases():
    tried, seed = 0, 10 * SEED
    while tried < 1_000:
        seed += 1
        tried += compare_with_all(seed, 3_000)


# ----------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("seed", range(12))
def test_bounds_are_below_the_simulator_and_bytes_are_its_own(seed):
    draw = random.Random(SEED + seed)
    task = small_task(draw)
    task = dataclasses.replace(task, fixed=Fixed(), gpt=dataclasses.replace(task.gpt, layers=draw.randint(2, 12)))
    some = shapes(task.gpt, task.devices, task.global_batch, task.fixed)
    for shape in draw.sample(some, min(len(some), 6)):
        several = list(variants(task.gpt, shape, task.fixed))
        for variant in draw.sample(several, min(len(several), 8)):
            costs, every = VariantCosts(task, variant), cuts(task.gpt.layers, shape.pp * variant.chunks)
            some_cuts = draw.sample(every, min(len(every), 4))
            least = costs.of_variant(task.cluster.memory)
            bounds = costs.of_cuts(np.array(some_cuts), task.cluster.memory)
            for k, cut in enumerate(some_cuts):
                recompute = tuple(RECOMPUTE[n] for n in bounds.recompute[k])
                one = price_cut(task, variant, cut, recompute)
                assert one.memory == pytest.approx(tuple(bounds.memory[k]), rel=1e-9), (variant, cut)
                fits = one.fullest <= task.cluster.memory * FITS
                assert fits == (bounds.seconds[k] < inf)
                if fits:
                    assert least <= bounds.seconds[k] * FITS, (variant, cut)
                    assert bounds.seconds[k] <= one.seconds, (variant, cut)
                    assert of_shape(task, shape) <= one.seconds, (variant, cut)


@pytest.mark.parametrize("name", GENERATORS)
def test_what_bounds_take_of_a_schedule(name):
    fixed = GENERATORS[name][1]
    for p, m, v in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 4, 7, 8, 9, 16, 31), [fixed] if fixed else (1, 2, 3)):
        if name in ("interleaved", "bfs") and v == 1:
            continue
        schedule = generate(name, p, m, v)
        assert list(peaks_of(name, p, m, v)) == list(peak_activations(schedule)), (p, m, v)
        assert [row[-1].stage for row in schedule.actions] == list(range(p)), "a rank ends with its first stage"


# -------------------------------------------------------------------------------------------------- more is not slower


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_more_devices_memory_or_bandwidth_are_never_slower(seed):
    draw = random.Random(SEED + 1_000 + seed)
    cluster = dataclasses.replace(KNOWN["dgx-a100"], memory=10 ** draw.uniform(8.2, 9), devices_per_host=4)
    task = Task(GPT(draw.choice([4, 5, 9]), 512, 4, 512, draw.choice([1_000, 30_000])), cluster, draw.randint(2, 9), 12)

    def seconds(**changes) -> float:
        result = search(dataclasses.replace(task, **changes))
        assert result.best is None or result.lower_bound <= result.best.seconds
        return result.best.seconds if result.best else inf

    base = seconds()
    for more in (1, task.devices):
        assert seconds(devices=task.devices + more) <= base
    for times in (1.2, 8):
        richer = dataclasses.replace(task.cluster, memory=task.cluster.memory * times)
        assert seconds(cluster=richer) <= base
        for link in ("local", "remote"):
            own = getattr(task.cluster, link)
            faster = dataclasses.replace(task.cluster, **{link: Link(own.latency, own.bandwidth * times)})
            assert seconds(cluster=faster) <= base * FITS


# ---------------------------------------------------------------------------------------------- strategies as data


def strategy(devices=8, batch=64, layers=4, **fixed) -> gt.Strategy:
    task = Task(GPT(layers, 64, 4, 16, 64), KNOWN["dgx-a100"], devices, batch, Fixed(**fixed))
    return strategy_of(task, search(task), 0.5)


def test_a_strategy_is_its_file(tmp_path):
    one = strategy(dp=2, tp=2, pp=2, zero=1, sequence_parallel=True)
    one.check()
    one.save(tmp_path / "plan.json")
    again = gt.Strategy.load(tmp_path / "plan.json")
    assert again == one and isinstance(again, gt.Strategy) and str(again) == str(one)
    (tmp_path / "plan.json").write_text(one.as_text(), encoding="utf-8-sig")        # as some editors save it
    assert gt.Strategy.load(tmp_path / "plan.json") == one
    assert "dp 2 x tp 2" in str(one)
    assert sum(one["time"].values()) == pytest.approx(one["step_time"], rel=1e-9)
    assert [stage["memory"]["total"] for stage in one["stages"]] == pytest.approx(one["memory"]["per_rank"])
    assert 0 <= one["gap"] < 1 and one["lower_bound"] <= one["step_time"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", GENERATORS)
def test_what_is_planned_passes_its_own_check(schedule):
    one = strategy(pp=2, layers=8, schedule=schedule, chunks=None if GENERATORS[schedule][1] else 2)
    one.check()
    for stage in one["stages"]:
        assert stage["memory"]["total"] == pytest.approx(sum(stage["memory"][key] for key in (
            "parameters", "gradients", "optimizer", "activations", "temporary")))
    by_rank = dict[tuple[int, ...], float]()
    for stage in one["stages"]:
        by_rank[tuple(stage["ranks"])] = by_rank.get(tuple(stage["ranks"]), 0) + stage["memory"]["total"]
    assert list(by_rank.values()) == pytest.approx(one["memory"]["per_rank"])


def put(*path_and_value):
    """A change of a strategy: the path of keys, and the value there."""
    *path, key, value = path_and_value

    def change(of):
        for step in path:
            of = of[step]
        of[key] = value

    return change


def drop(*path):
    def change(of):
        for step in path[:-1]:
            of = of[step]
        del of[path[-1]]

    return change


@pytest.mark.parametrize("change, told", [
    (put("format", "2"), 'format is "2"'), (drop("format"), "has no format"), (put("feasible", 1), "feasible is 1"),
    (put("devices", 0), "devices is 0"), (put("devices", 2), "stages[0].ranks has 2"),
    (put("micro_batch", "two"), 'micro_batch is "two"'), (drop("micro_batches"), "has no micro_batches"),
    (put("schedule", "1f2b"), 'schedule is "1f2b"'), (put("chunks", 2), "chunks is 2"),
    (put("global_batch", 63), "global_batch is 63"), (put("stages", []), "stages is []"),
    (put("stage", 1), "has no stage"), (put("step_time", "fast"), 'step_time is "fast"'),
    (put("stages", 0, 3), "stages[0] is 3"),
    (put("stages", 0, "zero", 4), "stages[0].zero is 4"), (put("stages", 0, "zero", True), "stages[0].zero is true"),
    (put("stages", 0, "recompute", "some"), 'stages[0].recompute is "some"'),
    (drop("stages", 1, "ranks"), "has no stages[1].ranks"),
    (put("stages", 1, "ranks", [0, 1, 2, 3]), "stages[1].ranks has 0, which stages[0].ranks has too"),
    (put("stages", 1, "ranks", [4, 4, 5, 6]), "stages[1].ranks is [4, 4"),
    (put("stages", 1, "ranks", [4, 5, 6, 8]), "stages[1].ranks has 8"),
    (put("stages", 1, "axes", {"dp": 2, "tp": 3}), "stages[1].axes: dp 2 x tp 3, for 4 ranks"),
    (put("stages", 1, "axes", {"dp": 0, "tp": 4}), "stages[1].axes.dp is 0"),
    (lambda of: of["stages"][1].update(axes={"dp": 3, "tp": 1}, ranks=[4, 5, 6]), "splits 64 samples over 3 ranks"),
    (put("stages", 0, "batch", {"fp": 0}), "stages[0].batch.fp is 0"),
    (put("stages", 0, "batch", {}), "stages[0].batch"),
    (put("stages", 0, "layers", []), "stages[0].layers is []"), (put("stages", 0, "layers", [3]), "stages[0].layers"),
    (put("stages", 1, "layers", ["token"]), "stages[1].layers has 'token', which stages[0].layers has too"),
    (put("stages", 0, "plan", "mine"), "stages[0].plan is 'mine'"),
    (put("stages", 0, "plan", {"*.weight": "S(0)"}), "stages[0].plan['*.weight'] is 'S(0)'"),
    (put("stages", 0, "plan", {"*.weight": {"ep": "S(0)"}}), "names the axis 'ep'"),
    (put("stages", 0, "plan", {"*.weight": {"tp": "Q"}}), "stages[0].plan['*.weight'].tp is 'Q'"),
    (put("stages", 0, "sequence", "sp"), "stages[0].sequence is 'sp'"),
    (put("stages", 0, "colour", 1), "has no stages[0].colour"),
])
def test_nonsense_is_named_before_anything_moves(change, told):
    one = strategy(dp=2, tp=2, pp=2, zero=1, schedule="1f1b")
    change(one)
    with pytest.raises(gt.StrategyError) as caught:
        one.check()
    assert told in caught.value.what
    model = ExampleGPT(64, 16, 4, 64, 4)
    with pytest.raises(gt.StrategyError):
        one.apply(model, None, torch.optim.SGD)
    assert not any(getattr(p, "is_global", False) for p in model.parameters())


@pytest.mark.parametrize("text, told", [("[]", "holds no strategy"), ("{", "could not be read"), (None, "could not")])
def test_files_that_are_no_strategies(tmp_path, text, told):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(gt.StrategyError, match=told):
        gt.Strategy.load(tmp_path / "plan.json")


# -------------------------------------------------------------------------------------------------------------- run


PLANS = [                                            # what the search is told, so that every kind of plan is run
    (1, {}), (2, {"dp": 2, "zero": 0}), (2, {"dp": 2, "zero": 3, "recompute": "full"}), (2, {"tp": 2}),
    (2, {"tp": 2, "sequence_parallel": True}), (2, {"pp": 2, "schedule": "1f1b"}),
    (4, {"dp": 2, "tp": 2, "zero": 1}), (4, {"dp": 2, "tp": 2, "zero": 2}), (4, {"dp": 2, "tp": 2, "zero": 3}),
    (4, {"dp": 2, "pp": 2, "zero": 1, "schedule": "zb-h1", "chunks": 1}),
    (4, {"dp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"}),
    (4, {"dp": 2, "pp": 2, "zero": 3, "schedule": "gpipe"}),
    (4, {"dp": 2, "pp": 2, "zero": 0, "schedule": "zb-h1", "recompute": "full"}),
    (4, {"tp": 2, "pp": 2, "schedule": "zb-v", "sequence_parallel": True}),
    (4, {"tp": 2, "pp": 2, "schedule": "1f1b", "recompute": "full"}), (4, {"pp": 4, "schedule": "zb-h2"}),
    (4, {"tp": 2, "pp": 2, "schedule": "1f1b", "recompute": "selective", "sequence_parallel": True}),
    (2, {"dp": 2, "zero": 3, "recompute": "selective"}),
]


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_step(one, change=lambda model: None):
    """A step of the example GPT by a strategy and in plain torch: gradients and parameters after it are compared."""
    torch.manual_seed(SEED)
    model = ExampleGPT(64, 16, one["model"]["layers"], 64, 4).double()
    plain = copy.deepcopy(model)
    ids, targets = torch.randint(64, (2, one["global_batch"], 16))
    expected = mean_loss(plain(ids), targets)
    expected.backward()
    runner, optimizer = one.apply(model, mean_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.testing.assert_close(runner.step(ids, targets).full_tensor(), expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q)
    return model, runner


@pytest.mark.sample(3)
@pytest.mark.parametrize("devices, fixed", PLANS, ids=lambda value: str(value).replace("'", ""))
def test_a_plan_that_is_run_gives_the_gradients_of_one_process(devices, fixed):
    one = strategy(devices, 8, 4, micro_batch=2 if fixed.get("dp") else 4, **fixed)
    model, runner = one_step(one)
    assert len(runner.stages) == len(one["stages"]) and runner.schedule.micro_batches == one["micro_batches"]
    ranks = {rank for p in model.parameters() for rank in p.placement.flat}
    assert ranks == {rank for stage in one["stages"] for rank in stage["ranks"]}
    if fixed.get("tp"):
        assert any(s.is_split for s in model.blocks[0].mlp.up.weight.sbp)


@pytest.mark.parametrize("pp, early", [(1, 1), (2, 1), (1, 10 ** 9)], ids=["one stage", "a pipeline", "few gradients"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_zero_reduces_is_what_it_is_priced_at(monkeypatch, zero, pp, early):
    """Bytes of gradients and new parameters that one rank receives in a step of 3 micro-batches."""
    if zero == 3 and pp > 1:
        pytest.skip("in a pipeline of several stages, dispatch decides op by op what it gathers")
    monkeypatch.setattr(gradients, "EARLY", early)   # bytes of gradients that wait
    one = strategy(2 * pp, 12, 2, dp=2, tp=1, pp=pp, zero=zero, micro_batch=2, schedule="1f1b" if pp > 1 else None)
    model = ExampleGPT(64, 16, 2, 64, 4)
    runner, optimizer = one.apply(model, mean_loss, torch.optim.AdamW)
    ids, targets = torch.randint(64, (2, 12, 16))
    with gt.record() as moves:
        runner.step(ids, targets)
        optimizer.step()
    updates = {"gradient", "aten.add_.Tensor"} | ({"zero"} if zero < 3 else set())
    received = sum(move.bytes for move in moves if move.op in updates)
    by_rank = [sum(p.numel() for name in stage["layers"] for p in model.get_submodule(name).parameters())
               for stage in one["stages"]]
    times = 3 if zero > 1 and pp == 1 and early == 1 else 1
    reductions = sum(by_rank) // 2 * 4 * times * (1 if zero else 2)          # (n - 1) / n of them, in 32 bits
    gathers = max(by_rank) // 2 * 4 if zero in (1, 2) else 0                 # all stages in one move
    assert received == pytest.approx(reductions + gathers, rel=0.02)
    if zero < 3 and pp == 1:
        assert 2 * one["stages"][0]["bytes"]["dp"] == pytest.approx(received, rel=0.06), "in 16 bits, no output layer"
    own = sum(stage["memory"]["gradients"] for stage in one["stages"])
    assert own == pytest.approx(sum(by_rank) * 2 / (2 if times == 3 else 1), rel=0.06)


def test_what_is_recomputed_runs_again_and_nothing_is_sent_twice():
    """Each attention a second time; products with parameters where all of a block runs again alone."""
    runs, received = {}, {}
    for how in ("none", "selective", "full"):
        one = strategy(2, 2, 2, tp=2, micro_batch=2, recompute=how, sequence_parallel=True)
        model = ExampleGPT(64, 16, 2, 64, 4)
        runner, _ = one.apply(model, mean_loss, torch.optim.SGD)
        ids, targets = torch.randint(64, (2, 2, 16))
        runner.step(ids, targets)
        model.zero_grad()
        with gt.record() as moves, torch.profiler.profile() as profile:
            runner.step(ids, targets)
        counts = {event.key: event.count for event in profile.key_averages()}
        runs[how] = [counts[name] for name in ("aten::scaled_dot_product_attention", "aten::linear")]
        received[how] = sum(move.bytes for move in moves)
    assert runs["selective"][0] == runs["full"][0] == 2 * runs["none"][0]
    assert received["selective"] == received["none"] < received["full"]


def test_a_plan_that_was_edited_is_run_so(tmp_path):
    one = strategy(4, 8, 4, dp=2, pp=2, schedule="1f1b", zero=0)
    for stage in one["stages"]:
        stage["zero"] = 1
    one["stages"][0]["recompute"] = "full"
    names = [name for stage in one["stages"] for name in stage["layers"]]
    one["stages"][0]["layers"], one["stages"][1]["layers"] = names[:3], names[3:]
    one["stages"][0]["axes"], one["stages"][1]["axes"] = {"dp": 2, "tp": 1}, {"dp": 2, "tp": 1}
    one["stages"][0]["plan"] = {"*.up.weight": {"dp": "B"}}
    one.save(tmp_path / "plan.json")
    model, runner = one_step(gt.Strategy.load(tmp_path / "plan.json"))
    assert [sorted(block.mlp.up.weight.placement.flat) for block in model.blocks] == [[0, 1], [2, 3], [2, 3], [2, 3]]


@pytest.mark.parametrize("change, told", [
    (put("stages", 0, "layers", 0, "tokens"), "has no 'tokens'"),
    (lambda of: of["stages"][0]["layers"].remove("position"), "no stage has position.weight"),
    (put("stages", 1, "axes", {"tp": 1, "dp": 2}), "stages[1].axes are tp, dp"),
])
def test_what_the_runtime_cannot_do_is_refused_before_anything_moves(change, told):
    one = strategy(4, 8, 4, dp=2, pp=2, schedule="1f1b", zero=0)
    change(one)
    one.check()
    model = ExampleGPT(64, 16, 4, 64, 4)
    with pytest.raises(gt.StrategyError) as caught:
        one.apply(model, mean_loss, torch.optim.SGD)
    assert told in caught.value.what
    assert not any(getattr(p, "is_global", False) for p in model.parameters())


# --------------------------------------------------------------------------------------------------- the command line


def said(capsys, words):
    try:
        code = main(f"plan {words}".split())
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_the_command_writes_a_strategy(capsys, tmp_path):
    code, out, err = said(capsys, f"{NANO} --json --save {tmp_path / 'plan.json'}")
    one = json.loads(out)
    assert (code, err) == (0, "") and gt.Strategy.load(tmp_path / "plan.json") == one
    assert one["step_time"] <= min(entry["step_time"] for entry in one["menu"] if entry["feasible"])
    assert {"dp", "zero 1", "zero 2", "zero 3", "pp", "dp x tp x pp"} <= {entry["name"] for entry in one["menu"]}
    assert one["devices"] == 8 and one["candidates"] > 100 and one["gap"] <= 0.05 and one["fixed"] == {}
    code, out, err = said(capsys, NANO)
    assert code == 0 and "dp x tp x pp" in out and "plans were weighed" in out


@pytest.mark.parametrize("words, fixed", [
    ("--dp 4 --tp 2", {"dp": 4, "tp": 2}), ("--pp 2 --schedule zb-v", {"pp": 2, "schedule": "zb-v"}),
    ("--zero 1 --recompute full --micro-batch 4", {"zero": 1, "recompute": "full", "micro_batch": 4}),
    ("--pp 2 --schedule interleaved --chunks 3", {"pp": 2, "schedule": "interleaved", "chunks": 3}),
    ("--tp 2 --sp", {"tp": 2, "sequence_parallel": True}),
    ("--tp 2 --no-sp", {"tp": 2, "sequence_parallel": False})])
def test_what_is_fixed_is_kept(capsys, words, fixed):
    code, out, _ = said(capsys, f"{NANO} --json {words}")
    one = json.loads(out)
    assert code == 0 and one["fixed"] == fixed
    for key in ("dp", "tp"):
        assert one["stages"][0]["axes"][key] == fixed.get(key, one["stages"][0]["axes"][key])
    for key in ("schedule", "chunks", "micro_batch"):
        assert one[key] == fixed.get(key, one[key])
    for key in ("zero", "recompute"):
        assert {stage[key] for stage in one["stages"]} <= {fixed.get(key, one["stages"][0][key])} or key not in fixed
    if "sequence_parallel" in fixed:
        assert one["stages"][0]["sequence"] == ("tp" if fixed["sequence_parallel"] else "")


def test_where_nothing_fits_the_least_changes_are_named(capsys):
    words = f"{NANO} --micro-batch 8 --zero 0 --recompute none --tp 1 --pp 1 --json"
    code, out, _ = said(capsys, f"{words} --memory 8e9")
    one = json.loads(out)
    assert code == 1 and not one["feasible"] and one["needs"] > one["device"] == 8e9
    gt.Strategy(one).check()
    changes = one["smallest_change"]
    assert {"recompute", "micro_batch", "memory"} <= changes.keys()
    for name, value in changes.items():
        if name == "memory":
            again = words + f" --memory {value}"
            less = words + f" --memory {value - 100}"                      # 1e-9 of it count as nothing
        else:
            option = f"--{name.replace('_', '-')}"
            again = f"{words} --memory 8e9 {option} {value}"
            less = ""
        assert said(capsys, again)[0] == 0, name
        assert not less or said(capsys, less)[0] == 1
    told = said(capsys, words.replace("--json", "--memory 8e9"))[1]
    typed = dict(re.findall(r"(?m)^  or (--[a-z-]+) (\S+)$", told))
    assert typed["--micro-batch"] == str(changes["micro_batch"])
    assert said(capsys, f"{words} --memory {typed['--memory']}")[0] == 0


# ------------------------------------------------------------------------------------------------- why, and pictures


def test_runners_up_are_the_fastest_that_differ():
    """Beside all plans of a small chain, each simulated."""
    task = Task(GPT(4, 64, 4, 32, 1000), dataclasses.replace(KNOWN["dgx-a100"], kernel_launch=1e-5), 4, 4,
                Fixed(schedule="1f1b", micro_batch=1, sequence_parallel=False))
    best = search(task).best
    told = explanation_of(GptSearch(task), best)
    plans = [(simulate_training(task.gpt, plan, task.cluster).seconds, plan) for plan in every_plan(task)]
    assert best.seconds == pytest.approx(min(s for s, _ in plans))
    for name in ("dp", "tp", "pp"):
        one, = [row for row in told["choices"] if row["choice"] == name]
        least = min(s for s, plan in plans if getattr(plan, name) != getattr(best.plan, name))
        assert one["step_time"] == pytest.approx(least) and one["costs"] == pytest.approx(least - best.seconds)
    assert [row["choice"] for row in told["fixed"]] == ["sp", "micro-batch", "schedule"]
    for row, name in zip(told["fixed"], ("sequence_parallel", "micro_batch", "schedule")):
        free = search(dataclasses.replace(task, fixed=dataclasses.replace(task.fixed, **{name: None}))).best
        assert row["costs"] == pytest.approx(best.seconds - free.seconds) and row["costs"] >= 0
    plain = min(s for s, p in plans if (p.dp, p.tp, p.pp, p.zero) == (4, 1, 1, 0))
    assert told["plain_dp"]["fits"] and told["plain_dp"]["step_time"] == pytest.approx(plain)


def test_the_next_best_cut_is_the_best_of_all_others():
    task = Task(GPT(6, 64, 4, 32, 20_000), KNOWN["dgx-a100"], 2, 4,
                Fixed(dp=1, tp=1, pp=2, zero=0, schedule="1f1b", micro_batch=1))
    best = search(task).best
    row, = [row for row in explanation_of(GptSearch(task), best)["choices"] if row["choice"] == "stage cut"]
    others = {plan.layers: simulate_training(task.gpt, plan, task.cluster).seconds for plan in every_plan(task)
              if set(plan.recompute) == {"none"} and plan.pp == 2 and plan.layers != best.plan.layers}
    least = min(others, key=others.get)
    assert row["runner_up"] == cut_text(least) and row["step_time"] == pytest.approx(others[least])


@pytest.mark.parametrize("layers, text", [((3,), "3"), ((4, 3, 3), "4 3 3"), ((13, *[12] * 6, 10), "13, 12 x 6, 10")])
def test_cuts_in_a_few_characters(layers, text):
    assert cut_text(layers) == text


def test_explained_on_the_command_line(capsys):
    code, out, err = said(capsys, f"{NANO} --tp 2 --explain")
    assert (code, err) == (0, "") and "fastest otherwise" in out and "fastest without" in out and "plain dp:" in out
    _, out, _ = said(capsys, f"{NANO} --micro-batch 1 --explain")        # which is fixed for plain dp, too
    by_hand, = re.findall(r"(?m)^dp +(dp 8, micro-batch 1) +([\d.]+ .?s)", out)
    assert re.search(r"plain dp: {1}, .*%, by {0};".format(*by_hand), out), out
    code, out, _ = said(capsys, f"{NANO} --pp 1 --memory 2GB --json --explain")
    one = gt.Strategy(json.loads(out))
    one.check()
    assert code == 0 and not one["explanation"]["plain_dp"]["fits"]
    assert one["explanation"]["plain_dp"]["needs"] > 2e9
    assert all(row.get("costs", 0) >= -1e-12 for row in one["explanation"]["choices"])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_of_a_plan(capsys, tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending}"
    code, _, err = said(capsys, f"{NANO} --pp 2 --plot {path}")
    text = path.read_bytes()
    assert (code, err) == (0, "") and text.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        assert b"candidates" in text and b"timetable" in text and b"lower bound" in text


def test_points_of_a_picture_and_what_none_undercuts():
    task = Task(GPT(4, 64, 4, 32, 1000), KNOWN["dgx-a100"], 4, 4)
    result = search(task)
    points = candidate_points(task, result.simulated_plans)
    assert sum(point.simulated for point in points) == len(result.simulated_plans) == result.simulated > 0
    assert min(point.seconds for point in points if point.simulated) == result.best.seconds
    front = pareto_front(points)
    for point in points:
        assert any(f.seconds <= point.seconds and f.memory <= point.memory for f in front)
    assert all(a.seconds <= b.seconds and a.memory > b.memory for a, b in itertools.pairwise(front))


def test_a_picture_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = said(capsys, f"{NANO} --plot {tmp_path / 'plan.png'}")
    assert code == 1 and "globaltensor[plot]" in err


@pytest.mark.parametrize("text, value", [("80e9", 80e9), ("80GB", 80e9), ("80GiB", 80 * 1024 ** 3), ("1.5T", 1.5e12),
                                         ("512mib", 512 * 1024 ** 2), ("8000000000", 8e9)])
def test_bytes_of_a_device(capsys, text, value):
    code, out, _ = said(capsys, f"{NANO} --json --dp 8 --zero 3 --memory {text}")
    one = json.loads(out)
    assert (one["memory"]["device"] if code == 0 else one["device"]) == value


@pytest.mark.sample(4)
@pytest.mark.parametrize("words, told", [
    ("", "plan what?"), ("--model gpt --evaluate x.csv", "--model and --evaluate are one too many"),
    ("--program a.py:f --evaluate x.csv", "--program and --evaluate are one too many"),
    ("--evaluate x.csv --dp 2", "--evaluate takes no --dp"), (f"{NANO} --pin a=tp:B", "--model takes no --pin"),
    ("--program a.py:f --layers 2", "--program takes no --layers"), ("--evaluate x.csv --plot y", "takes no --plot"),
    ("--model gpt --layers 2 --hidden 8 --heads 2 --seq 8", "which --devices?"),
    (NANO.replace("--global-batch 512", ""), "which --global-batch?"), (f"{NANO} --dp 7", "a global batch of 512"),
    (f"{NANO} --dp 8 --micro-batch 128", "a global batch of 512 in micro-batches of 128 on dp 8"),
    (f"{NANO} --tp 5", "tp 5 with 12 heads"), (f"{NANO} --pp 13 --devices 16", "pp 13 with 12 layers"),
    (f"{NANO} --dp 4 --tp 4", "16 ranks on 8 devices"),  (f"{NANO} --schedule zigzag", "there is no 'zigzag'"),
    (f"{NANO} --pp 8 --schedule interleaved --chunks 2", "interleaved with 2 stages on each rank"),
    (f"{NANO} --memory none", "is not a number above 0"), (f"{NANO} --memory 8XB", "is not a number above 0"),
    (f"{NANO} --plot /nowhere/plan.png", "could not be written"),
    (f"{NANO} --plot plan.doc", "try: a name that ends in .png"),
    (f"{NANO} --cluster nowhere", "no cluster 'nowhere'"),
    (f"{NANO} --save /nowhere/plan.json", "could not be written")])
def test_mistakes_on_the_command_line(capsys, words, told):
    code, _, err = said(capsys, words)
    assert code in (1, 2) and told in err and "Traceback" not in err


def test_a_search_that_is_stopped_says_what_it_may_have_missed():
    task = Task(GPT(48, 4096, 32, 2048), KNOWN["dgx-a100"], 64, 512)
    stopped, whole = search(task, 0.5), search(task)
    assert stopped.lower_bound <= whole.best.seconds
    assert stopped.best is None or stopped.best.seconds >= whole.best.seconds >= stopped.lower_bound
