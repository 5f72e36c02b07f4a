"""`globaltensor calibrate --here`: a cluster from what was measured on it.

The oracle of the fit is a machine that is made up: what it takes is computed, and found again.
"""
from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import environment

import globaltensor as gt
from globaltensor.boxings.plan import boxing_cost
from globaltensor.cli import main, measure_here
from globaltensor.cli.small_models import small_models, small_plans
from globaltensor.layouts.layout import layout
from globaltensor.layouts.sbp import read_sbp
from globaltensor.planner.measured_cluster import cluster_of_measurements, fit_rates
from globaltensor.planner.op_kinds import kind_of
from globaltensor.simulator.cluster import (
    KERNEL_KINDS,
    KNOWN,
    Cluster,
    ClusterError,
    KernelRate,
    Link,
    as_json,
    cluster,
    hypothetical_placements,
)

pytest.importorskip("scipy")
SEED = 20_261_124
OF_HOST = {"gather", "full", "selective"}            # what the host does besides ops


def made_up(seed: int) -> Cluster:
    """A machine of two devices with any rates."""
    draw = random.Random(seed)
    kernels = tuple(KernelRate(kind, 10 ** draw.uniform(-6, -5),
                               10 ** draw.uniform(-12, -10) * (kind in KERNEL_KINDS[:5]),
                               10 ** draw.uniform(-11, -10) * (kind != "view")) for kind in KERNEL_KINDS)
    link = Link(10 ** draw.uniform(-6, -5), 10 ** draw.uniform(9, 10))
    own = {one.kind: one for one in kernels}
    kernels = tuple(one if one.kind != "accumulation" else KernelRate(
        one.kind, own["pointwise"].start, 0.0, 3 * own["pointwise"].byte) for one in kernels)
    return Cluster("here", 2, 1 / own["product"].operation, 1.0, 8e9, 1 / own["pointwise"].byte, link, link, 1,
                   own["pointwise"].start, kernels=kernels)


def lasting(longer: float) -> Callable[[KernelRate], KernelRate]:
    return lambda one: KernelRate(one.kind, one.start * longer, one.operation * longer, one.byte * longer)


def ops_and_boxings(of: Cluster) -> dict:
    """What would be measured there of each alone."""
    ops = []
    for one in of.kernels:
        for k in range(1, 5) if one.kind not in {"accumulation", *OF_HOST} else ():
            operations, nbytes = 10.0 ** (k + 4) * (one.operation > 0), 10.0 ** (3 + k) * k * (one.byte > 0)
            seconds = k * one.start + one.operation * operations + one.byte * nbytes
            ops.append((one.kind, k, operations, nbytes, seconds))
    boxings = []
    with hypothetical_placements():
        where = gt.placement("meta", [0, 1])
        for n in (1 << 10, 1 << 16, 1 << 20):
            for src, dst in (("P", "B"), ("S(0)", "B"), ("P", "S(0)")):
                ends = [layout(where, (read_sbp(one),)) for one in (src, dst)]
                boxings.append((src, dst, n, sum(boxing_cost(*ends, (n,), 4 * n, of.machine(2)))))
    return {"ops": ops, "boxings": boxings, "transport": of.transport}


def measurements_of(of: Cluster, longer: float, together: bool = True) -> dict:
    """What would be measured there, where ops take `longer` in a step than alone, and ranks wait for each other; or of
    steps of one rank alone."""
    busy = dataclasses.replace(of, micro_batch_overhead=5e-4, step_overhead=2e-3, kernels=tuple(
        one if one.kind == "optimizer" else dataclasses.replace(one, start=one.start + 3e-6)
        for one in map(lasting(longer), of.kernels)))
    steps = []
    for k, (model, inputs, targets, loss) in enumerate(small_models()):
        for m in (1, 4):
            x, y = (torch.cat([one] * m) for one in (inputs, targets))
            one = gt.strategy(model, x, busy, 1, loss=loss, targets=y, micro_batch=len(inputs), recompute="none")
            steps.append((k, m, one["step_time"]))
    link = Link(of.local.latency + 2e-5, of.local.bandwidth)
    busy = dataclasses.replace(busy, local=link, remote=link, step_overhead=5e-3)
    plans = []
    for k, fixed in small_plans(2) if together else ():
        model, inputs, targets, loss = small_models()[k]
        x, y = (torch.cat([one] * fixed["dp"] * fixed["pp"]) for one in (inputs, targets))
        one = gt.strategy(model, x, busy, 2, loss=loss, targets=y, micro_batch=len(inputs), **fixed)
        plans.append((k, fixed, one["step_time"]))
    return ops_and_boxings(of) | {"steps": steps, "plans": plans}


@pytest.mark.long
@pytest.mark.parametrize("seed, longer", [*((seed, 1.0) for seed in range(3)), (2, 1.4)])
def test_the_rates_of_a_machine_are_found_again(seed, longer):
    machine = made_up(SEED + seed)
    fitted = cluster_of_measurements(measurements_of(machine, longer), 2, 8e9, small_models())
    after = {one.kind: one for one in fitted.kernels}
    for a in map(lasting(longer), machine.kernels):
        start, b = a.start + (0.0 if a.kind == "optimizer" else 3e-6), after[a.kind]     # later in a micro-batch
        nbyte = 0.0 if a.kind in OF_HOST else a.byte         # the host's part has no bytes
        assert (b.start, b.operation, b.byte) == pytest.approx((start, a.operation, nbyte), rel=1e-2, abs=1e-18), a.kind
    assert fitted.local.latency == pytest.approx(machine.local.latency + 2e-5, rel=0.05)
    assert fitted.local.bandwidth == pytest.approx(machine.local.bandwidth, rel=0.05)
    assert (fitted.micro_batch_overhead, fitted.step_overhead) == pytest.approx((5e-4, 5e-3), rel=1e-2)


def test_steps_that_take_less_than_their_ops_alone_tell_of_little_beside_them():
    machine = made_up(SEED)
    measured = measurements_of(machine, 1.0, together=False)
    measured["steps"] = [(k, m, taken / 100) for k, m, taken in measured["steps"]]
    fitted = cluster_of_measurements(measured, 2, 8e9, small_models())
    assert (fitted.micro_batch_overhead, fitted.step_overhead) == pytest.approx((5e-6, 2e-5), rel=1e-2)
    assert fitted.local.latency == pytest.approx(machine.local.latency, rel=0.05)
    after = {one.kind: one for one in fitted.kernels}
    assert all(0 < after[one.kind].start < one.start for one in machine.kernels if one.kind not in OF_HOST)


def test_boxings_whose_latency_is_0():
    """Noise: few bytes take less than their share."""
    measured = ops_and_boxings(made_up(SEED))
    measured["boxings"] = [(src, dst, n, 1e-9 * n * (1 + (n > 1 << 10))) for src, dst, n, _ in measured["boxings"]]
    k, fixed = next((k, fixed) for k, fixed in small_plans(2) if fixed["dp"] == 2)
    waited = [cluster_of_measurements(measured | {"steps": [(0, 1, 1e-2)], "plans": [(k, fixed, seconds)]}, 2, 8e9,
                                      small_models()).local.latency for seconds in (1e-9, 1e3)]
    assert waited[0] == 0 < waited[1]


def test_no_rate_is_below_nothing():
    rates = fit_rates([(1, 10), (1, 20), (1, 30)], [3.0, 2.0, 1.0])
    assert (rates >= 0).all() and rates[0] > 0


def test_a_cluster_with_kernels_is_its_file(tmp_path):
    machine = made_up(SEED)
    (tmp_path / "here.json").write_text(as_json(machine))
    assert cluster(str(tmp_path / "here.json")) == machine


@pytest.mark.parametrize("kernels, told", [
    (3, "a kernel is 3"), ([{"kind": "magic"}], "its kind is one of product"),
    ([{"kind": "view", "start": -1, "operation": 0, "byte": 0}], "kernels.view.start is -1"),
    ([{"kind": "view", "start": 0, "operation": 0, "byte": 0, "more": 1}], "a kernel is")])
def test_kernels_that_cannot_be(tmp_path, kernels, told):
    described = json.loads(as_json(made_up(SEED))) | {"kernels": kernels}
    (tmp_path / "here.json").write_text(json.dumps(described))
    with pytest.raises(ClusterError, match=told):
        cluster(str(tmp_path / "here.json"))


@pytest.mark.parametrize("of", [KNOWN["dgx-a100"], dataclasses.replace(KNOWN["dgx-a100"], kernel_launch=1e-5)])
def test_without_kernels_the_longest_of_three_counts(of):
    kinds = np.array([KERNEL_KINDS.index(kind) for kind in ("product", "pointwise", "view")])
    operations, nbytes = np.array([1e12, 0.0, 0.0]), np.array([1e6, 1e3, 0.0])
    told = of.op_seconds(kinds, operations, nbytes)
    assert told.tolist() == [max(1e12 / (of.flops * of.efficiency), 1e6 / of.memory_bandwidth, of.kernel_launch),
                             max(1e3 / of.memory_bandwidth, of.kernel_launch), 0.0]


@pytest.mark.parametrize("op, kind", [
    (torch.ops.aten.mm.default, "product"), (torch.ops.globaltensor.contract.default, "contraction"),
    (torch.ops.aten.add_.Tensor, "pointwise"),
    (torch.ops.aten.view.default, "view"), (torch.ops.aten.gelu.default, "curve"),
    (torch.ops.aten._softmax.default, "normalization"), (torch.ops.aten.sum.dim_IntList, "reduction"),
    (torch.ops.aten.embedding.default, "index"), (torch.ops.aten.convolution.default, "convolution"),
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, "attention")], ids=str)
def test_kinds_of_ops(op, kind):
    assert KERNEL_KINDS[kind_of(op)] == kind


def test_ops_boxings_and_steps_are_measured(tmp_path, monkeypatch):
    """All ranks in one process, each op once."""
    for name in ("_BATCHES", "_TURNS", "_OF_TURN"):
        monkeypatch.setattr(measure_here, name, 1)
    monkeypatch.setattr(measure_here, "_SECONDS", 0.0)
    for name in ("_PRODUCTS", "_CONTRACTED", "_BATCHED", "_CONVOLUTIONS", "_ATTENTIONS", "_NORMALIZED", "_ELEMENTS"):
        monkeypatch.setattr(measure_here, name, getattr(measure_here, name)[:2])
    monkeypatch.setattr(measure_here, "small_plans", lambda ranks: small_plans(ranks)[::3])
    measure_here.main(str(tmp_path / "measured.json"))
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert {row[0] for row in measured["ops"]} == {*KERNEL_KINDS} - {"accumulation", *OF_HOST}
    assert [row[:2] for row in measured["plans"]] == [[k, fixed] for k, fixed in small_plans(8)[::3]]
    assert all(row[-1] > 0 for row in (*measured["ops"], *measured["steps"], *measured["plans"]))
    assert all(row[4] > 0 for row in measured["ops"]) and all(row[3] > 0 for row in measured["boxings"])
    fitted = cluster_of_measurements(measured, 8, 1e9, small_models())
    assert fitted.transport == measured["transport"] == "one process"
    assert {one.kind for one in fitted.kernels} == {*KERNEL_KINDS} and fitted.local.bandwidth > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("devices", [2, 8, 16])
@pytest.mark.parametrize("number", range(len(small_models())))
def test_small_models_are_planned_on_a_machine_of_any_rates(number, devices, seed):
    """What is cheap there decides which plans are priced at all, and so what the search must cope with."""
    print("seed", seed)
    one, of = small_models()[number], dataclasses.replace(made_up(seed), devices_per_host=devices)
    strategy = gt.strategy(one.module, one.inputs, of, devices, loss=one.loss, targets=one.targets,
                           micro_batch=len(one.inputs), seconds=20)
    strategy.check()
    assert strategy["lower_bound"] <= strategy["step_time"]


@pytest.mark.long
def test_this_machine_is_measured_by_a_command(tmp_path):
    line = [sys.executable, "-c", "import sys, globaltensor_command as c; sys.exit(c.main())"]
    done = subprocess.run([*line, "calibrate", "--here", "--ranks", "2", "--name", "mine"], capture_output=True,
                          text=True, timeout=300, env=environment(), check=True)
    assert "a boxing starts in" in done.stderr
    (tmp_path / "here.json").write_text(done.stdout)
    assert cluster(str(tmp_path / "here.json")).name == "mine"
    words = "plan --model gpt --layers 4 --hidden 64 --heads 4 --seq 32 --devices 2 --global-batch 8 --cluster"
    assert main([*words.split(), str(tmp_path / "here.json")]) == 0


@pytest.mark.parametrize("words, told", [
    ("", "calibrate by what?"), ("rows.csv --here", "calibrate by both a FILE and --here?"),
    ("rows.csv --ranks 2", "without --here"), ("--here --cluster dgx-a100", "with --here")])
def test_mistakes(capsys, words, told):
    try:
        code = main(["calibrate", *words.split()])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and told in capsys.readouterr().err
