"""Clusters of several groups of hosts: the file, what is wrong with one, and plans for one, run.

Oracle of a plan: one process in plain torch.
"""
from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from test_strategy import MODELS, SEED, check_gradients

import globaltensor as gt
from globaltensor.cli import main
from globaltensor.simulator.cluster import KNOWN, ClusterError, Link, cluster
from globaltensor.simulator.evaluation import PlanRow, evaluate
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.groups import read_cluster
from globaltensor.simulator.training import TrainingPlan

NEAR = {"latency": 1e-7, "bandwidth": 1e12}
HOST = {"devices_per_host": 2, "hosts": 1, "flops": 1e9, "efficiency": 0.5, "memory": 1e9, "memory_bandwidth": 1e10,
        "local": NEAR, "remote": NEAR}


def described(**changes):
    """Two hosts, one twice as fast as the other."""
    return {"groups": [{"name": "old", **HOST}, {"name": "new", **HOST, "flops": 2e9}],
            "links": [{"between": ["old", "new"], **NEAR}]} | changes


def written(folder, text) -> str:
    path = folder / "lab.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return str(path)


def test_a_file_with_groups(tmp_path):
    one = read_cluster(written(tmp_path, {
        "groups": [{"name": "old", "cluster": "dgx-a100", "hosts": 1},
                   {"name": "new", "cluster": "dgx-h100", "hosts": 2}],
        "links": [{"between": ["new", "old"], "latency": 2e-5, "bandwidth": 1e10}]}))
    assert one.sizes == (8, 16) and one.name == "lab" and one.link(1, 0) == one.link(0, 1) == Link(2e-5, 1e10)
    assert one.groups[1].flops == KNOWN["dgx-h100"].flops
    both = one.slowest_of([0, 1], one.sizes)
    assert both.flops * both.efficiency == min(k.flops * k.efficiency for k in one.groups)
    assert both.remote == Link(2e-5, 1e10) and both.local == KNOWN["dgx-a100"].local and both.devices_per_host == 8
    slow = dataclasses.replace(one, groups=(one.groups[0], dataclasses.replace(one.groups[1], transport="gloo")))
    assert both.transport == "nccl" and slow.slowest_of([0, 1], one.sizes).transport == "gloo"
    assert read_cluster("dgx-a100") is KNOWN["dgx-a100"]


@pytest.mark.parametrize("changes, told, tried", [
    ({"links": []}, "has no link between old and new", '"between": ["old", "new"]'),
    ({"links": [{"between": ["old", "nwe"], **NEAR}]}, "links[0] is between ['old', 'nwe']", "new"),
    ({"links": [{"between": ["old", "new"], "latency": 1}]}, "links[0].bandwidth is None", "1e12"),
    ({"links": [{"between": ["old", "new"], **NEAR}, {"between": ["new", "old"], "latency": 1, "bandwidth": 1}]},
     "links[1] is another one", "one of them"),
    ({"group": []}, "has no 'group'", "groups"), ({"groups": []}, "groups is []", "dgx-a100"),
    ({"groups": [3]}, "groups[0] is 3", "dgx-a100"),
    ({"groups": [{"hosts": 1, **HOST}]}, "groups[0] has no name", "name"),
    ({"groups": [{"name": "old", "cluster": "dgx-a10", "hosts": 1}]}, "no cluster 'dgx-a10'", "dgx-a100"),
    ({"groups": [{"name": "old", "cluster": "dgx-a100"}]}, "does not say how many hosts", '"hosts": 1'),
    ({"groups": [{"name": "old", "cluster": "dgx-a100", "hosts": 1, "flop": 1}]}, "has no 'flop'", "flops"),
    ({"groups": [{"name": "old", **HOST}, {"name": "old", **HOST}]}, "two groups are called 'old'", "name"),
])
def test_what_is_wrong_with_a_file_is_said(tmp_path, changes, told, tried):
    with pytest.raises(ClusterError) as caught:
        read_cluster(written(tmp_path, described(**changes)))
    assert told in caught.value.what and tried in caught.value.fix, str(caught.value)
    assert "lab.json" in caught.value.what


@pytest.mark.parametrize("changes, told, tried", [
    ({"efficiency": 5}, "efficiency is 5", '"efficiency": 0.5'), ({"efficiency": 0}, "is 0", '"efficiency": 0.5'),
    ({"devices_per_host": 0}, "devices_per_host is 0", '"devices_per_host": 8'),
    ({"hosts": -1}, "hosts is -1", '"hosts": 1'), ({"memory": "80 GB"}, "memory is '80 GB'", '"memory": 1e12'),
    ({"local": {"latency": -1, "bandwidth": 1}}, "local.latency is -1", '"local.latency": 1e-5')])
def test_numbers_that_no_host_has_are_refused(tmp_path, changes, told, tried):
    with pytest.raises(ClusterError) as caught:
        read_cluster(written(tmp_path, HOST | changes))
    assert told in caught.value.what and caught.value.fix == tried, str(caught.value)


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(ClusterError, match="4: 2 of old, 2 of new"):
        gt.strategy(MODELS["chain"][0](), torch.zeros(8, 8).double(), written(tmp_path, described()), devices=5)


def test_what_is_asked_for_one_kind_of_host_refuses_groups(tmp_path):
    with pytest.raises(ClusterError, match="lists groups of hosts"):
        cluster(written(tmp_path, described()))


SMALL = GPT(layers=4, hidden=64, heads=4, sequence=16, vocabulary=64)
PLANS = [TrainingPlan(2, 16, dp, tp, pp, schedule, 2 if schedule == "interleaved" else None, zero, "none")
         for dp, tp, pp, schedule, zero in ((1, 1, 1, "1f1b", 0), (2, 1, 1, "1f1b", 1), (1, 2, 2, "1f1b", 0),
                                            (2, 1, 2, "gpipe", 3), (1, 1, 4, "zb-h1", 0), (2, 2, 1, "1f1b", 2),
                                            (1, 1, 2, "interleaved", 0))]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.dp}-{plan.tp}-{plan.pp}-{plan.schedule}")
def test_a_plan_on_groups_is_evaluated_by_the_slowest_of_each_stage(tmp_path, plan):
    far = {"latency": 1e-6, "bandwidth": 1e9}

    def groups(old: float, new: float, **more):
        kinds = [{"name": name, **HOST, "flops": flops, "remote": far} for name, flops in (("old", old), ("new", new))]
        kinds[1] |= more
        return read_cluster(written(tmp_path, {"groups": kinds, "links": [{"between": ["old", "new"], **far}]}))

    row = PlanRow(SMALL, plan)
    one_kind = dataclasses.replace(groups(1e9, 1e9).groups[0], hosts=2)
    alike = evaluate(row, groups(1e9, 1e9))
    assert alike == evaluate(row, one_kind), "groups of the same hosts are one cluster"
    fast = evaluate(row, dataclasses.replace(one_kind, flops=2e9)).step_time
    mixed, turned = (evaluate(row, groups(*flops)).step_time for flops in ((1e9, 2e9), (2e9, 1e9)))
    if plan.devices <= 2:
        assert mixed == alike.step_time and turned == fast, "the second group is idle"
    elif plan.dp * plan.tp == 4:
        assert mixed == turned == pytest.approx(alike.step_time), "one stage pays for the slowest"
    else:
        assert fast < mixed <= alike.step_time and fast < turned <= alike.step_time
    little = evaluate(row, groups(1e9, 1e9, memory=1.0))
    assert alike.fits and little.fits == (plan.devices <= 2)


def test_a_gpt_is_planned_and_simulated_on_groups(tmp_path, capsys):
    sizes = "--model gpt --layers 4 --hidden 64 --heads 4 --seq 16 --vocab 64"
    slow = {"latency": 1.0, "bandwidth": 1e3}        # nothing passes from group to group
    path = written(tmp_path, described(links=[{"between": ["old", "new"], **slow}]))
    assert main(f"plan {sizes} --devices 4 --global-batch 8 --cluster {path} --json".split()) == 0
    one = gt.Strategy(json.loads(capsys.readouterr().out))
    one.check()
    assert {stage["group"] for stage in one["stages"]} == {"new"}
    assert {rank for stage in one["stages"] for rank in stage["ranks"]} == {2, 3}
    assert one["lower_bound"] <= one["step_time"] and one["devices"] == 4 and one["cluster"] == "lab"
    alone = written(tmp_path, {**HOST, "flops": 2e9})
    assert main(f"plan {sizes} --devices 2 --global-batch 8 --cluster {alone} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["step_time"] == pytest.approx(one["step_time"])
    path = written(tmp_path, described())
    assert main(f"simulate {sizes} --dp 2 --pp 2 --global-batch 8 --cluster {path} --json".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["share_of_peak"] < 1 and told["memory"]["fits"] and told["cluster"] == "lab"
    assert main(f"simulate {sizes} --dp 4 --pp 2 --global-batch 8 --cluster {path}".split())
    assert "it has 4" in capsys.readouterr().err


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, fixed", [("chain", {"pp": 2, "schedule": "1f1b"}), ("gpt", {"pp": 2, "tp": 1}),
                                         ("chain", {"dp": 4}), ("chain", {"pp": 3})], ids=str)
def test_a_plan_over_groups_gives_the_gradients_of_one_process(tmp_path, name, fixed):
    build, data, loss = MODELS[name]
    torch.manual_seed(SEED)
    model, (inputs, targets) = build(), data()
    plain = copy.deepcopy(model)
    strategy = gt.strategy(model, inputs, cluster=written(tmp_path, described()), devices=4, **fixed)
    strategy.check()
    of = ["old", "old", "new", "new"]
    for stage in strategy["stages"]:
        assert stage["group"] == " + ".join(sorted({of[rank] for rank in stage["ranks"]}, key=of.index))
        assert stage["group"] in str(strategy)
    assert strategy["lower_bound"] <= strategy["step_time"]
    assert sum(strategy["time"].values()) == pytest.approx(strategy["step_time"], rel=1e-9)
    check_gradients(strategy, model, plain, loss, inputs, targets)


MESHES = [("chain", [(2, 1, 1), (1, 2, 0)], "1f1b"), ("gpt", [(1, 2, 0), (2, 1, 3)], "1f1b"),
          ("gpt", [(2, 2, 2), (1, 2, 0)], "gpipe"), ("gpt", [(1, 1, 0), (2, 1, 1)], "zb-h1"),
          ("chain", [(2, 1, 3), (4, 1, 1), (1, 1, 0)], "1f1b"), ("vision", [(1, 1, 0), (4, 1, 2)], "1f1b")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, meshes, schedule", MESHES, ids=str)
def test_stages_with_meshes_of_their_own_give_the_gradients_of_one_process(name, meshes, schedule):
    """Each with dp, tp and a stage of ZeRO of its own: written by hand."""
    build, data, loss = MODELS[name]
    torch.manual_seed(SEED)
    model, (inputs, targets) = build(), data()
    plain = copy.deepcopy(model)
    strategy = gt.strategy(model, inputs, devices=len(meshes), pp=len(meshes), schedule=schedule, micro_batch=4)
    first = 0
    for stage, (dp, tp, zero) in zip(strategy["stages"], meshes):
        rows = {"plan": "recognised" if tp > 1 and name == "gpt" else {}}
        stage |= {"axes": {"dp": dp, "tp": tp}, "zero": zero, "ranks": list(range(first, first + dp * tp)), **rows}
        first += dp * tp
    strategy |= {"devices": first, "micro_batches": 2, "micro_batch": 4 // meshes[0][0]}
    check_gradients(strategy, model, plain, loss, inputs, targets)
    dp = {p.placement.shape[0]: p for p in model.parameters()}
    assert set(dp) == {one for one, _, _ in meshes}, "each stage lies on its own mesh"
