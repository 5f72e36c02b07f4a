"""Nonsense, call by call: everything public refuses it, with an error that says what, where, why, and what to type."""
from __future__ import annotations

import math
import re
import shutil
import tempfile
import traceback
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from harness import PYTHON, environment, run
from torch import nn

import globaltensor as gt
from globaltensor.cli import main
from globaltensor.cli.completion import words_by_command
from globaltensor.runtime.launchers import check_own_variables, check_variables

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
ON = gt.placement("cpu", [0, 1])
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
TMP = Path(tempfile.mkdtemp(prefix="nonsense-"))
FILE = TMP / "file"
SAMPLES = torch.utils.data.TensorDataset(torch.ones(8))


def x():
    return gt.ones(4, 3, placement=ON, sbp=S(0))


def net():
    return nn.Linear(3, 2)


def stages():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def pipe(**options):
    return gt.pipeline(stages(), [gt.placement("cpu", [0]), gt.placement("cpu", [1])], **options)


def sgd(module=None):
    return torch.optim.SGD((module or net()).parameters(), lr=0.1)


def global_sgd():
    return sgd(gt.to_global(net(), ON, B))


def loader(*args, **options):
    return gt.data.DataLoader(*(args or (SAMPLES, 4, ON, S(0))), **options)


def planned(**options):
    return gt.strategy(**{"model": nn.Sequential(nn.Linear(4, 4)), "batch": torch.ones(8, 4), **options})


def applied(**options):
    """The model stays plain, whatever is wrong."""
    model = nn.Sequential(nn.Linear(4, 4))
    strategy = gt.strategy(model, torch.ones(8, 4), devices=2, dp=2)
    try:
        strategy.apply(**{"model": model, "loss": None, "optimizer_class": torch.optim.SGD, **options})
    finally:
        assert not any(getattr(p, "is_global", False) for p in model.parameters())


def entered(block):
    with block:
        pass


API = {
    # placements
    "placement of None": lambda: gt.placement(None, [0]),
    "placement of a number": lambda: gt.placement(3, [0]),
    "placement with the arguments swapped": lambda: gt.placement([0, 1], "cpu"),
    "placement of no device type": lambda: gt.placement("", [0]),
    "ranks None": lambda: gt.placement("cpu", None),
    "a fraction of a rank": lambda: gt.placement("cpu", [0.5]),
    "a bool for a rank": lambda: gt.placement("cpu", [True]),
    "a rank beyond any world": lambda: gt.placement("cpu", [2 ** 70]),
    "a NaN for a rank": lambda: gt.placement("cpu", [math.nan]),
    "a dict of ranks": lambda: gt.placement("cpu", {0: 1}),
    "a set of ranks": lambda: gt.placement("cpu", {0, 1}),
    "a float tensor of ranks": lambda: gt.placement("cpu", torch.tensor([0.0, 1.0])),
    "axis names that are numbers": lambda: gt.placement("cpu", [0, 1], (1,)),
    "axis names twice": lambda: gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "dp")),
    "an empty axis name": lambda: gt.placement("cpu", [[0, 1], [2, 3]], ("", "tp")),
    "placement.all of no type": lambda: gt.placement.all(3),
    # sbp
    "split of text": lambda: S("0"),
    "split of a float": lambda: S(0.0),
    "split of a bool": lambda: S(True),
    "split of None": lambda: S(None),
    "an sbp of None": lambda: gt.ones(4, placement=ON, sbp=None),
    "an sbp of a number": lambda: gt.ones(4, placement=ON, sbp=0),
    "an sbp for an axis that is not there": lambda: gt.ones(4, 4, placement=GRID, sbp={"pp": B}),
    "an sbp for some axes of a list": lambda: gt.ones(4, 4, placement=GRID, sbp=[B]),
    "an empty sbp": lambda: gt.ones(4, placement=ON, sbp=()),
    "a placement for an sbp": lambda: gt.ones(4, placement=ON, sbp=ON),
    "a dim far away": lambda: gt.ones(4, placement=ON, sbp=S(10 ** 9)),
    # factories
    "text for a placement": lambda: gt.ones(4, placement="cpu", sbp=B),
    "a list for a placement": lambda: gt.ones(4, placement=[0, 1], sbp=B),
    "out beside a placement": lambda: gt.zeros(4, placement=ON, sbp=B, out=torch.ones(4)),
    "a generator of text": lambda: gt.randn(4, placement=ON, sbp=B, generator="x"),
    "requires_grad of text": lambda: gt.ones(4, placement=ON, sbp=B, requires_grad="yes"),
    "requires_grad of integers": lambda: gt.arange(4, placement=ON, sbp=B, requires_grad=True),
    "normal of two tensors": lambda: gt.normal(torch.ones(2), torch.ones(2), 2, placement=ON, sbp=B),
    # conversions
    "from_full of a number": lambda: gt.from_full(3, ON, B),
    "from_full without a placement": lambda: gt.from_full(torch.ones(4), None, B),
    "from_full of a global tensor": lambda: gt.from_full(x(), ON, B),
    "from_full of a dim that is not there": lambda: gt.from_full(torch.ones(4), ON, S(1)),
    "from_local of a list": lambda: gt.from_local([1], ON, S(0)),
    "from_local of None": lambda: gt.from_local(None, ON, S(0)),
    "from_local on text": lambda: gt.from_local(torch.ones(2), "cpu", S(0)),
    "from_local of a global tensor": lambda: gt.from_local(x(), ON, S(0)),
    "from_shards of a tensor": lambda: gt.from_shards(torch.ones(2), ON, S(0)),
    "from_shards of lists": lambda: gt.from_shards({0: [1], 1: [2]}, ON, S(0)),
    "from_shards by name": lambda: gt.from_shards({"0": torch.ones(1), "1": torch.ones(1)}, ON, S(0)),
    "from_shards of a rank elsewhere": lambda: gt.from_shards(dict.fromkeys([0, 1, 7], torch.ones(2)), ON, S(0)),
    "from_shards of nothing": lambda: gt.from_shards({}, ON, S(0)),
    "to_global of a global tensor to text": lambda: x().to_global("cpu"),
    "to_global to a number": lambda: x().to_global(sbp=3),
    "to_global with a grad_sbp of text": lambda: x().to_global(sbp=B, grad_sbp="x"),
    "to_global of a plain tensor without sbp": lambda: torch.ones(4).to_global(ON),
    "to_global of a plain tensor without a placement": lambda: torch.ones(4).to_global(sbp=B),
    "numpy of a plain idea": lambda: x().shards[0].to_global(ON, "Q"),
    # modules and plans
    "to_global of a list": lambda: gt.to_global([net()], ON, B),
    "to_global of a module to text": lambda: gt.to_global(net(), "cpu", B),
    "to_global of a module with no such sbp": lambda: gt.to_global(net(), ON, {"weight": "Q"}),
    "to_global of a module with a dim too many": lambda: gt.to_global(net(), ON, S(5)),
    "a method of a module with text": lambda: net().to_global("cpu", B),
    "parallelize of None": lambda: gt.parallelize(None, ON),
    "parallelize on None": lambda: gt.parallelize(net(), None),
    "parallelize by text": lambda: gt.parallelize(net(), GRID, "tp"),
    "parallelize by a row of text": lambda: gt.parallelize(net(), GRID, {"weight": "tp"}),
    "parallelize along no axis": lambda: gt.parallelize(net(), GRID, {"weight": {"pp": S(0)}}),
    "Plan of a number": lambda: gt.Plan.of(3),
    "Plan of None": lambda: gt.Plan.of(None),
    "Plan along no axis": lambda: gt.Plan.of(nn.Linear(2, 2), sequence=True),
    "Plan of experts along an axis": lambda: gt.Plan.of(nn.Linear(2, 2), experts=1),
    "Plan along a number": lambda: gt.Plan.of(nn.Linear(2, 2), 0),
    # optimizers and gradients
    "zero of None": lambda: gt.zero(None),
    "zero of stage text": lambda: gt.zero(global_sgd(), stage="2"),
    "zero of stage 1.5": lambda: gt.zero(global_sgd(), stage=1.5),
    "zero along no axis": lambda: gt.zero(global_sgd(), axis="tp"),
    "gradients in text": lambda: gt.set_grad_reduce_dtype(net().parameters(), "bfloat16"),
    "gradients in integers": lambda: gt.set_grad_reduce_dtype(gt.to_global(net(), ON, B).parameters(), torch.int32),
    "gradients of a module": lambda: gt.set_grad_reduce_dtype(gt.to_global(net(), ON, B), torch.bfloat16),
    "audit of None": lambda: gt.audit(None),
    "audit of an optimizer for a model": lambda: gt.audit(sgd()),
    "audit of a model for an optimizer": lambda: gt.audit(net(), net()),
    "audit of half an element": lambda: gt.audit(net(), sample=0.5),
    # pipelines
    "a pipeline of None": lambda: gt.pipeline(None, [ON]),
    "a pipeline on no placement": lambda: gt.pipeline(stages(), []),
    "a pipeline on numbers": lambda: gt.pipeline(stages(), [0, 1]),
    "a pipeline by a number": lambda: pipe(schedule=3),
    "no micro-batches": lambda: pipe(micro_batches=0),
    "micro-batches of text": lambda: pipe(micro_batches="4"),
    "chunks of text": lambda: pipe(chunks="2"),
    "a loss that is not a function": lambda: pipe(loss=3),
    "a reduction with a typo": lambda: pipe(reduction="avg"),
    "starts that are not there": lambda: pipe(starts=["7", "8"]),
    "a step of a list of numbers": lambda: pipe(micro_batches=2).step([1, 2]),
    "a step of too few rows": lambda: pipe(micro_batches=4).step(torch.ones(2, 3)),
    "a step of None": lambda: pipe(micro_batches=2).step(None),
    # data
    "a loader of dims that samples lack": lambda: next(iter(loader(SAMPLES, 4, ON, S(3)))),
    "a loader on text": lambda: loader(SAMPLES, 4, "cpu", S(0)),
    "a loader of batches of text": lambda: loader(SAMPLES, "4", ON, S(0)),
    "a loader of no rows": lambda: loader(SAMPLES, 0, ON, S(0)),
    "a loader of half a row": lambda: loader(SAMPLES, 1.5, ON, S(0)),
    "a loader with workers of text": lambda: loader(num_workers="2"),
    "a loader with fewer than no workers": lambda: loader(num_workers=-1),
    "a loader of a number": lambda: loader(3, 4, ON, S(0)),
    "a loader of a pending sum": lambda: next(iter(loader(SAMPLES, 4, ON, P))),
    "from_ranks of a number": lambda: gt.data.from_ranks(3, ON),
    "from_ranks on text": lambda: gt.data.from_ranks([torch.ones(2)], "cpu"),
    # watching
    "a budget of text": lambda: entered(gt.boxing(budget="x")),
    "a negative budget": lambda: entered(gt.boxing(budget=-1)),
    "a budget that is not a number": lambda: entered(gt.boxing(budget=math.nan)),
    "a mode of None": lambda: entered(gt.boxing(None)),
    "explain of a value": lambda: gt.explain(3),
    "show of a number": lambda: gt.show(3),
    # starting
    "a time-out of text": lambda: gt.init(timeout="x"),
    "a time-out of a negative": lambda: gt.init(timeout=-1),
    "a time-out that is not a number": lambda: gt.init(timeout=math.nan),
    "ranks of text": lambda: gt.init("x"),
    "ranks of a float": lambda: gt.init(2.5),
    "a machine of text": lambda: gt.init(machine="fast"),
    # rules
    "a rule for a number": lambda: gt.rule(3, "a -> a"),
    "a rule for an op that is not there": lambda: gt.rule("mine::nowhere", "a -> a"),
    "a rule of None": lambda: gt.rule("aten::add.Tensor", None),
    "a rule of torch's own op": lambda: gt.rule(torch.ops.aten.mm.default, "m k, k n -> m n", "a*b"),
    # checkpoints
    "save to None": lambda: gt.save({"x": x()}, None),
    "save to a number": lambda: gt.save({"x": x()}, 3.5),
    "load of nothing that is there": lambda: gt.load({"x": x()}, "/nonexistent/folder"),
    "load into a number": lambda: gt.load(3, "/nonexistent/folder"),
    "safetensors of a list": lambda: gt.save_safetensors([x()], "/nonexistent/folder"),
    "safetensors from nowhere": lambda: gt.load_safetensors(net(), "/nonexistent/folder"),
}

# what somebody types who has read nothing: wrong kinds, NaN, the arguments in another order, folders for files
API |= {
    "placement type bytes": lambda: gt.placement(b"cpu", [0]),
    "placement ranks nested ragged": lambda: gt.placement("cpu", [[0,1],[2]]),
    "placement ranks text": lambda: gt.placement("cpu", "01"),
    "placement ranks negative": lambda: gt.placement("cpu", [-1]),
    "placement ranks inf": lambda: gt.placement("cpu", [math.inf]),
    "placement ranks complex": lambda: gt.placement("cpu", [1j]),
    "placement axis names text": lambda: gt.placement("cpu", [[0,1],[2,3]], "dp"),
    "placement axis number": lambda: gt.placement("cpu", [[0,1],[2,3]], 3),
    "placement axis too many": lambda: gt.placement("cpu", [0,1], ("dp", "tp")),
    "split nan": lambda: S(math.nan),
    "split list": lambda: S([0]),
    "sbp str bad": lambda: gt.ones(4, placement=ON, sbp="S(x)"),
    "sbp nested": lambda: gt.ones(4, placement=ON, sbp=[[S(0)]]),
    "sbp class": lambda: gt.ones(4, placement=ON, sbp=gt.sbp.split),
    "factory unknown option": lambda: gt.ones(4, placement=ON, sbp=B, color="red"),
    "factory misspelt": lambda: gt.ones(4, placment=ON, sbp=B),
    "ones_like of None": lambda: gt.ones_like(None),
    "zeros_like to text": lambda: gt.zeros_like(x(), placement="cpu"),
    "like of a plain with sbp": lambda: gt.ones_like(torch.ones(2), sbp=B),
    "from_full swapped": lambda: gt.from_full(ON, torch.ones(4), B),
    "from_full numpy": lambda: gt.from_full(numpy.ones(4), ON, B),
    "from_local swapped": lambda: gt.from_local(torch.ones(2), S(0), ON),
    "from_local None sbp": lambda: gt.from_local(torch.ones(2), ON, None),
    "from_shards differing dtypes":
        lambda: gt.from_shards({0: torch.ones(1), 1: torch.ones(1, dtype=torch.int32)}, ON, S(0)),
    "from_shards list": lambda: gt.from_shards([torch.ones(1), torch.ones(1)], ON, S(0)),
    "to_global swapped": lambda: x().to_global(B, ON),
    "module to_global callable returns nonsense": lambda: gt.to_global(net(), ON, lambda n, p: 3),
    "parallelize swapped": lambda: gt.parallelize(ON, net()),
    "parallelize plan number": lambda: gt.parallelize(net(), GRID, 3),
    "parallelize plan unknown name": lambda: gt.parallelize(net(), GRID, {"wieght": {"tp": S(0)}}),
    "parallelize plan dim 9": lambda: gt.parallelize(net(), GRID, {"weight": {"tp": S(9)}}),
    "plan rows number": lambda: gt.Plan(3),
    "plan rows key number": lambda: gt.Plan({3: {"tp": S(0)}}),
    "plan parse nonsense": lambda: gt.Plan.parse("::::"),
    "plan parse number": lambda: gt.Plan.parse(3),
    "plan load folder": lambda: gt.Plan.load(TMP),
    "plan load nothing": lambda: gt.Plan.load(TMP / "no"),
    "plan load nonsense": lambda: gt.Plan.load(FILE),
    "zero swapped": lambda: gt.zero("dp", global_sgd()),
    "zero stage 4": lambda: gt.zero(global_sgd(), stage=4),
    "zero stage True": lambda: gt.zero(global_sgd(), stage=True),
    "zero axis number": lambda: gt.zero(global_sgd(), axis=0),
    "zero of plain": lambda: gt.zero(sgd()),
    "zero model text": lambda: gt.zero(global_sgd(), stage=3, model="x"),
    "zero offload to a file": lambda: gt.zero(sgd(gt.to_global(net(), GRID, B)), offload=FILE),
    "zero offload number": lambda: gt.zero(sgd(gt.to_global(net(), GRID, B)), offload=3),
    "grad dtype swapped": lambda: gt.set_grad_reduce_dtype(torch.bfloat16, gt.to_global(net(), ON, B).parameters()),
    "audit sample text": lambda: gt.audit(gt.to_global(net(), ON, B), sample="3"),
    "audit nan": lambda: gt.audit(gt.to_global(net(), ON, B), sample=math.nan),
    "pipeline schedule typo": lambda: pipe(schedule="1fb1"),
    "pipeline schedule folder": lambda: pipe(schedule=TMP),
    "pipeline mb negative": lambda: pipe(micro_batches=-2),
    "pipeline batch axis number": lambda: pipe(batch=3),
    "pipeline cost number": lambda: pipe(cost=3),
    "pipeline cost nan": lambda: pipe(cost=lambda layer: math.nan),
    "pipeline recompute text": lambda: pipe(recompute="yes"),
    "pipeline inputs number": lambda: pipe(inputs=3),
    "pipeline loss text": lambda: pipe(loss="mse"),
    "pipeline too many stages": lambda: gt.pipeline(net(), [gt.placement("cpu",[i]) for i in range(4)]),
    "loader shuffle text": lambda: loader(shuffle="yes"),
    "loader seed text": lambda: loader(seed="x"),
    "loader seed nan": lambda: loader(seed=math.nan),
    "loader tail": lambda: loader(tail="keep"),
    "loader sampler number": lambda: loader(sampler=3),
    "loader collate text": lambda: loader(collate_fn="x"),
    "loader prefetch": lambda: loader(prefetch_factor=-1),
    "loader timeout": lambda: loader(timeout=-3),
    "loader swapped": lambda: loader(4, SAMPLES, ON, S(0)),
    "loader True": lambda: loader(SAMPLES, True, ON, S(0)),
    "sampler text": lambda: gt.data.Sampler("8", 2),
    "sampler negative": lambda: gt.data.Sampler(-8, 2),
    "from_ranks none": lambda: gt.data.from_ranks(None, ON),
    "boxing misspelt": lambda: entered(gt.boxing("forbidd")),
    "boxing budget inf": lambda: entered(gt.boxing(budget=math.inf)),
    "boxing budget True": lambda: entered(gt.boxing(budget=True)),
    "record to a folder": lambda: entered(gt.record(file=TMP)),
    "record to number": lambda: entered(gt.record(file=3.5)),
    "record into nowhere": lambda: entered(gt.record(file="/nonexistent/a/b.json")),
    "explain none": lambda: gt.explain(None),
    "show file number": lambda: gt.show(x(), file=3),
    "show file folder": lambda: gt.show(x(), file=TMP),
    "metrics text": lambda: gt.metrics("x"),
    "metrics nan": lambda: gt.metrics(math.nan),
    "export_ranks none": lambda: gt.export_ranks(None, (x(),)),
    "export_ranks no tuple": lambda: gt.export_ranks(gt.to_global(net(), ON, B), x()),
    "partition number": lambda: entered(gt.partition_activations(3)),
    "materialize none": lambda: gt.materialize(None),
    "init ranks negative": lambda: gt.init(-1),
    "init ranks nan": lambda: gt.init(math.nan),
    "init ranks True": lambda: gt.init(True),
    "init timeout inf": lambda: gt.init(timeout=math.inf),
    "init timeout True": lambda: gt.init(timeout=True),
    "init timeout list": lambda: gt.init(timeout=[1]),
    "from_dtensor plain": lambda: gt.from_dtensor(torch.ones(2)),
    "from_mesh text": lambda: gt.from_mesh("dp"),
    "to_mesh text": lambda: gt.to_mesh("dp"),
    "rule no arrow": lambda: gt.rule("aten::add.Tensor", "a b"),
    "rule dims number": lambda: gt.rule("aten::add.Tensor", 3),
    "save swapped": lambda: gt.save(TMP, {"x": x()}),
    "save keep text": lambda: gt.save({"x": x()}, TMP / "c1", keep="2"),
    "save keep negative": lambda: gt.save({"x": x()}, TMP / "c2", keep=-2),
    "save keep nan": lambda: gt.save({"x": x()}, TMP / "c3", keep=math.nan),
    "save async text": lambda: gt.save({"x": x()}, TMP / "c4", asynchronous="yes"),
    "save misspelt": lambda: gt.save({"x": x()}, TMP / "c5", asynchronus=True),
    "save into below a file": lambda: gt.save({"x": x()}, FILE / "c"),
    "save a lambda": lambda: gt.save({"x": x(), "f": lambda: 3}, TMP / "c6"),
    "save nul in path": lambda: gt.save({"x": x()}, "a\0b"),
    "save url nonsense": lambda: gt.save({"x": x()}, "nosuch://host/x"),
    "load swapped": lambda: gt.load(TMP, {"x": x()}),
    "load none": lambda: gt.load({"x": x()}, None),
    "load misspelt": lambda: gt.load({"x": x()}, TMP, strct=True),
    "load empty folder": lambda: gt.load({"x": x()}, TMP),
    "resume number": lambda: gt.resume(3, TMP),
    "resume swapped": lambda: gt.resume(TMP, {"x": x()}),
    "resume none": lambda: gt.resume({"x": x()}, None),
    "resume file": lambda: gt.resume({"x": x()}, FILE),
    "safetensors shard nan": lambda: gt.save_safetensors(gt.to_global(net(), ON, B), TMP / "s", shard_gb=math.nan),
    "safetensors shard zero": lambda: gt.save_safetensors(gt.to_global(net(), ON, B), TMP / "s", shard_gb=0),
    "safetensors shard text": lambda: gt.save_safetensors(gt.to_global(net(), ON, B), TMP / "s", shard_gb="5GB"),
    "safetensors to file": lambda: gt.save_safetensors(gt.to_global(net(), ON, B), FILE),
    "load_safetensors swapped": lambda: gt.load_safetensors(TMP, gt.to_global(net(), ON, B)),
    "load_safetensors empty": lambda: gt.load_safetensors(gt.to_global(net(), ON, B), TMP),
    "strategy none": lambda: gt.strategy(None, torch.ones(2)),
    "strategy cluster": lambda: planned(cluster="nowhere"),
    "strategy cluster folder": lambda: planned(cluster=TMP),
    "strategy cluster none": lambda: planned(cluster=None),
    "strategy cluster number": lambda: planned(cluster=5),
    "strategy cluster dict": lambda: planned(cluster={"flops": 1e12}),
    "strategy width": lambda: planned(batch=torch.ones(8, 5)),
    "strategy dtype": lambda: planned(batch=torch.ones(8, 4, dtype=torch.int64)),
    "strategy names": lambda: planned(batch={"x": torch.ones(8, 4)}),
    "strategy arguments": lambda: planned(batch=(torch.ones(8, 4), torch.ones(8, 4))),
    "strategy loss": lambda: planned(loss=5),
    "strategy loss of targets": lambda: planned(loss=nn.functional.mse_loss),
    "strategy loss of nothing": lambda: planned(loss=lambda output: None),
    "strategy loss of several": lambda: planned(loss=lambda output: (output.mean(), output)),
    "strategy targets alone": lambda: planned(targets=torch.ones(8, 4)),
    "apply optimizer": lambda: applied(optimizer_class=sgd()),
    "apply optimizer none": lambda: applied(optimizer_class=None),
    "apply optimizer text": lambda: applied(optimizer_class="adamw"),
    "apply model none": lambda: applied(model=None),
    "apply loss": lambda: applied(loss=5),
    "apply loss text": lambda: applied(loss="mse"),
    "strategy devices text": lambda: planned(devices="8"),
    "strategy devices zero": lambda: planned(devices=0),
    "strategy dp float": lambda: planned(dp=1.5),
    "strategy recompute": lambda: planned(recompute="some"),
    "strategy schedule": lambda: planned(schedule="1fb1"),
    "strategy memory text": lambda: planned(memory="80GB"),
    "strategy memory nan": lambda: planned(memory=math.nan),
    "strategy memory negative": lambda: planned(memory=-1),
    "strategy seconds nan": lambda: planned(seconds=math.nan),
    "strategy seconds text": lambda: planned(seconds="60"),
    "strategy global batch": lambda: planned(global_batch=-8),
    "strategy pins number": lambda: planned(pins=3),
    "strategy pins text": lambda: planned(pins="x"),
    "strategy sp text": lambda: planned(sp="yes"),
    "strategy plot folder": lambda: planned(plot=TMP, devices=2, seconds=5),
    "Strategy load": lambda: gt.Strategy.load(TMP),
    "Strategy load file": lambda: gt.Strategy.load(FILE),
    "Strategy load none": lambda: gt.Strategy.load(None),
    "Strategy empty check": lambda: gt.Strategy({}).check(),
    "dtensor mesh text": lambda: gt.dtensor.init_device_mesh("cpu", "2"),
    "dtensor mesh negative": lambda: gt.dtensor.init_device_mesh("cpu", (-2,)),
    "dtensor distribute": lambda: gt.dtensor.distribute_tensor([1], ON, [gt.dtensor.Shard(0)]),
    "dtensor fully_shard none": lambda: gt.dtensor.fully_shard(None),
}

# torch says these well, and we add the line
OF_TORCH = {
    "a placement for a dtype": lambda: gt.zeros(4, placement=ON, sbp=B, dtype=ON),
    "randint of nothing": lambda: gt.randint(5, 5, (4,), placement=ON, sbp=B),
    "randperm of a negative": lambda: gt.randperm(-1, placement=ON, sbp=B),
    "eye of text": lambda: gt.eye("x", placement=ON, sbp=B),
    "factory size text": lambda: gt.ones("4", placement=ON, sbp=B),
    "factory size nan": lambda: gt.ones(math.nan, placement=ON, sbp=B),
    "factory size negative": lambda: gt.ones(-4, placement=ON, sbp=B),
    "factory dtype text": lambda: gt.ones(4, placement=ON, sbp=B, dtype="float32"),
    "full value text": lambda: gt.full((4,), "x", placement=ON, sbp=B),
    "full swapped": lambda: gt.full(1.0, (4,), placement=ON, sbp=B),
    "tensor of ragged": lambda: gt.tensor([[1],[2,3]], placement=ON, sbp=B),
    "tensor of None": lambda: gt.tensor(None, placement=ON, sbp=B),
    "full_like no value": lambda: gt.full_like(x()),
    "randint_like text": lambda: gt.randint_like(x(), "a"),
    "size huge": lambda: gt.empty(2**62, 2**62, placement=ON, sbp=B),
    "matmul shapes": lambda: x() @ x(),
    "to_global misspelt": lambda: x().to_global(sbpp=B),
    "to_local extra": lambda: x().to_local(3),
    "module to_global no args": lambda: net().to_global(),
    "split twice args": lambda: S(0, 1),
}


@pytest.fixture(autouse=True, scope="module")
def world_of_eight():
    if gt.world_size() != 8:
        pytest.skip("written for the default world of 8 ranks")


@pytest.fixture(autouse=True, scope="module")
def files():
    TMP.mkdir(exist_ok=True)
    FILE.write_text("nonsense")
    yield
    shutil.rmtree(TMP)


@pytest.mark.parametrize("name", API)
def test_nonsense_is_refused(name):
    with pytest.raises(Exception) as caught:
        API[name]()
    error = caught.value
    assert isinstance(error, gt.GlobalTensorError), f"{type(error).__name__}: {error}"
    assert error.what and error.why and error.fix, error
    assert re.search(r"test_nonsense\.py:\d+$", error.where), error


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_says_has_the_line(name):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        OF_TORCH[name]()
    notes = "".join(getattr(caught.value, "__notes__", ()))
    last = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert last == __file__ or "test_nonsense.py:" in f"{caught.value}{notes}", f"{caught.value} at {last}"


CLI = {
    "no such command": (["rnu", "x.py"], "there is no 'rnu'; did you mean 'run'"),
    "no program": (["run"], "required: program"),
    "no ranks": (["run", "-n", "0", "x.py"], "not a whole number of at least 1"),
    "negative ranks": (["run", "-n", "-1", "x.py"], "expected one argument|not a whole number of at least 1"),
    "half a rank": (["run", "-n", "1.5", "x.py"], "not a whole number of at least 1"),
    "too many ranks to count": (["run", "-n", "1e400", "x.py"], "not a whole number of at least 1"),
    "hosts of text": (["run", "--nnodes", "two", "x.py"], "'two'"),
    "hosts without a place to meet": (["run", "--nnodes", "2", __file__], "try: globaltensor run --nnodes 2"),
    "grace of text": (["run", "--grace", "x", __file__], "'x'"),
    "an endpoint without a port": (["run", "--nnodes", "2", "--rdzv-endpoint", "host", __file__], "host"),
    "a folder for a program": (["run", "/tmp"], "/tmp"),
    "memory of nothing": (["memory"], "try: --params"),
    "memory of infinity": (["memory", "--params", "1e400"], "1e400"),
    "memory of no number": (["memory", "--params", "nan"], "not a number of parameters"),
    "memory of a negative": (["memory", "--params=-7"], "not a number of parameters"),
    "memory of a huge exponent": (["memory", "--params", "1e999999999"], "not a number of parameters"),
    "memory of half a rank": (["memory", "--params", "7e9", "--dp", "0.5"], "not a whole number of at least 1"),
    "memory of no stage": (["memory", "--params", "7e9", "--zero", "4"], "there is no '4'; choose from 0, 1, 2, 3"),
    "bytes of text": (["memory", "--params", "7e9", "--bytes", "a,b,c"], "three numbers of bytes"),
    "a model of half its sizes": (["memory", "--model", "gpt", "--layers", "2"], "needs --hidden"),
    "a simulation of nothing": (["simulate"], "what do the actions take"),
    "a schedule with a typo": (["simulate", "--schedule", "1f1bb", "--times", "1,1,1,0"], "1f1b"),
    "times of text": (["simulate", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--times", "a,b"],
                      "a"),
    "negative times": (["simulate", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--times=-1,1,1,0"],
                       "-1"),
    "times without end": (["simulate", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2",
                           "--times", "inf,1,1,0"], "inf"),
    "a share of text": (["simulate", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--times",
                         "1,1,1,0", "--weight-share", "x"], "not a number"),
    "no cluster": (["simulate", "--model", "gpt", "--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "8",
                    "--pp", "2", "--global-batch", "8", "--cluster", "nowhere"], "nowhere"),
    "no benchmark": (["bench", "nowhere"], "there is no benchmark"),
    "an option that a benchmark does not have": (["bench", "startup", "--hidden", "8"], "does not know --hidden"),
    "ranks of a benchmark in text": (["bench", "boxing", "--ranks", "two"], "invalid int value|not a whole number"),
    "no ranks for a benchmark": (["bench", "boxing", "--ranks", "0"], "not a whole number of at least 1"),
    "info of a name": (["info", "x"], "there is no argument x"),
}

_TIMES = ["simulate", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--times"]
_GPT = ["--model", "gpt", "--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "8"]
_PLAN = ["plan", *_GPT, "--devices", "2", "--global-batch", "8"]
_TWO_HOSTS = ["run", "--nnodes", "2", "--rdzv-endpoint"]
CLI |= {
    "an option of no command": (["--nonsense"], "command"),
    "ranks that are not a number": (["run", "-n", "nan", __file__], "'nan' is not a whole number of at least 1"),
    "ranks of nothing": (["run", "-n", "", __file__], "-n/--nproc-per-node: it is empty"),
    "a misspelt option of run": (["run", "--max-restart", "3", __file__], "did you mean --max-restarts|argument"),
    "fewer than no seconds of grace": (["run", "--grace", "-1", __file__], "'-1' is not a whole number of at least 1"),
    "restarts without end": (["run", "--max-restarts", "inf", __file__], "'inf' is not a whole number of at least 0"),
    "fewer than no restarts": (["run", "--max-restarts", "-1", __file__], "'-1' is not a whole number of at least 0"),
    "more ranks to keep than there are": (["run", "-n", "2", "--min-ranks", "3", __file__], "there are no more"),
    "no ranks to keep": (["run", "--min-ranks", "0", __file__], "'0' is not a whole number of at least 1"),
    "a start method with a typo": (["run", "--start-method", "frok", __file__], "did you mean 'fork'"),
    "a range of hosts": (["run", "--nnodes", "1:4", __file__], "is a range"),
    "a host beyond the last": (["run", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "5", __file__],
                               "it is 0 to 1"),
    "a host of text": (["run", "--node-rank", "first", __file__], "'first' is not a whole number of at least 0"),
    "a port beyond the last": ([*_TWO_HOSTS, "host:99999", __file__], "a port is 1 to 65535"),
    "a port of nothing": ([*_TWO_HOSTS, "host:0", __file__], "a port is 1 to 65535"),
    "a module that is not there": (["run", "-m", "no.such.module"], "there is no module"),
    "a program of no name": (["run", ""], "program: it is empty"),
    "a program in a file": (["run", "/dev/null/x.py"], "there is no program"),
    "a backend of torchrun's": (["run", "--rdzv-backend", "etcd", __file__], "choose from c10d, static"),
    "a flag that does nothing here": (["run", "--log-dir", "x", __file__], "does nothing here"),
    "bytes of two kinds": (["memory", "--params", "7e9", "--bytes", "1,2"], "three numbers of bytes"),
    "a misspelt option of memory": (["memory", "--parms", "7e9"], "did you mean --params"),
    "parameters and a model": (["memory", *_GPT, "--params", "7e9"], "both --params and --model"),
    "a model that nobody knows": (["memory", "--model", "bert"], "there is no 'bert'"),
    "one word too many": (["memory", "--params", "7e9", "extra"], "there is no argument extra"),
    "five times": ([*_TIMES, "1,1,1,1,1"], "TF,TB,TW,Tcomm"),
    "times that are not numbers": ([*_TIMES, "nan,1,1,0"], "nan"),
    "a time by zero": ([*_TIMES, "1/0,1,1,0"], "1/0"),
    "more than the whole": ([*_TIMES, "1,1,1,0", "--weight-share", "2"], "from 0 to 1"),
    "less than nothing": ([*_TIMES, "1,1,1,0", "--weight-share=-1"], "from 0 to 1"),
    "a picture into a folder": ([*_TIMES, "1,1,1,0", "--plot", str(TMP)], "names no file"),
    "a folder for a schedule": (["simulate", "--schedule", str(TMP), "--times", "1,1,1,0"], str(TMP)),
    "a soak that is not a number": (["bench", "--minutes", "nan", "soak"], "'nan' is not a number above 0"),
    "a soak of less than no time": (["bench", "--minutes", "-1", "soak"], "'-1' is not a number above 0"),
    "a seed of text": (["bench", "--seed", "x", "soak"], "'x' is not a whole number of at least 0"),
    "a pattern that does not end": (["bench", "--rows", "(", "faults"], "is not a regular expression"),
    "a benchmark with a typo": (["bench", "boxng"], "there is no benchmark 'boxng'"),
    "ps of a name": (["ps", "x"], "there is no argument x"),
    "a project of no name": (["new", ""], "new"),
    "a project in a file": (["new", __file__], __file__),
    "a shell that nobody knows": (["completion", "tcsh"], "choose from bash, zsh, fish"),
    "a report of nothing": (["report", "/nonexistent.json"], "/nonexistent.json"),
    "a report of a folder": (["report", str(TMP)], str(TMP)),
    "a port of text": (["play", "--port", "x"], "'x' is not a port"),
    "memory in an unknown unit": ([*_PLAN, "--memory", "80XB"], "'80XB' is not a number above 0"),
    "a search of no time": ([*_PLAN, "--seconds", "0"], "'0' is not a number above 0"),
    "more ranks than devices": ([*_PLAN, "--tp", "4"], "4"),
    "a program without a function": (["plan", "--program", "x", "--devices", "2"], "x"),
    "a table that is not there": (["plan", "--evaluate", "/nonexistent.csv"], "/nonexistent.csv"),
    "a cluster that nobody knows": ([*_PLAN, "--cluster", "nowhere"], "nowhere"),
    "calibrated by nothing": (["calibrate"], "calibrate"),
    "calibrated by a folder": (["calibrate", str(TMP)], str(TMP)),
    "a scheduler with a typo": (["recipe", "slrum", "x.py"], "did you mean 'slurm'"),
    "negative times, as they are typed": ([*_TIMES, "-1,1,1,0"], "'-1' is not a time"),
    "negative bytes": (["memory", "--params", "7e9", "--bytes", "-1,2,3"], "'-1,2,3' is not three numbers"),
    "a fraction below zero": ([*_TIMES, "1,1,1,0", "--weight-share", "-.5"], "from 0 to 1"),
    "more ranks than have a number": (["run", "-n", "9" * 20, __file__], "is too large: it has 20 digits"),
    "more restarts than have a number": (["run", "--max-restarts", "9" * 99, __file__], "too large: it has 99 digits"),
    "stages without a layer": (["memory", *_GPT, "--pp", "3"], "at least one layer\n  try: --pp 2"),
    "more heads than there are, by far": (["memory", *_GPT, "--tp", "9" * 15], "try: --tp 2"),
    "a million stages": (["simulate", "--schedule", "1f1b", "--stages", "1000000", "--micro-batches", "8", "--times",
                          "1,1,1,0"], "8,000,000 forward passes are too many"),
    "a million chunks": (["simulate", "--schedule", "interleaved", "--stages", "2", "--micro-batches", "8", "--chunks",
                          "1000000", "--times", "1,1,1,0"], "forward passes are too many"),
    "a million micro-batches of a model": (["simulate", *_GPT, "--global-batch", "9" * 9], "passes are too many"),
    "a million layers": (["plan", "--model", "gpt", "--layers", "1000000"], "is too large: at most 100,000"),
    "more ranks than measure": (["calibrate", "--here", "--ranks", "100000"], "would measure for longer"),
    "a project that a shell would take for two": (["new", "a b/\u00fc"], "try: globaltensor new 'a b/my_project'\n"),
    "no hosts": (["recipe", "slurm", "--nodes", "0", "x.py"], "'0' is not a whole number of at least 1"),
}


@pytest.mark.parametrize("name", CLI)
def test_a_command_line_of_nonsense_is_refused_in_few_lines(capsys, name):
    words, text = CLI[name]
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and not out and re.search(text, err), f"{code}: {out}{err}"
    assert "Traceback" not in err and len(err.splitlines()) < 30, err
    assert re.search("try: |did you mean|choose from", err), err


_NEEDED = {"new": ["x"], "run": ["x"], "report": ["x"], "recipe": ["slurm", "x"], "completion": ["bash"]}


@pytest.mark.parametrize("command, words", [
    *((name, [flag, "", *_NEEDED.get(name, [])]) for name, (_, words) in words_by_command().items() if name
      for flag in [word.text for word in words if word.takes_value]),
    *((name, [*needed[:-1], ""]) for name, needed in _NEEDED.items()), ("calibrate", [""])])
def test_an_empty_word_is_none(capsys, command, words):
    """As of a shell variable that is not set."""
    with pytest.raises(SystemExit) as ended:
        main([command, *words])
    assert ended.value.code == 2
    assert "it is empty" in capsys.readouterr().err


_COLUMNS = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp,zero,recompute,measured_ms"
_ROW = "1,8,1,64,4,2,64,256,1,1,1,0,none,20"


@pytest.mark.parametrize("lines, text", [
    ([_COLUMNS], "has no plans"), ([_COLUMNS, ""], "has no plans"), ([], "has no column 'gpus'"),
    ([_COLUMNS, _ROW + ",7"], "line 2: 15 values in 14 columns\n  why: nothing names '7'"),
    ([_COLUMNS, _ROW, _ROW + ",,"], "line 3: 16 values in 14 columns"),
    ([_COLUMNS + ",tp", _ROW + ",2"], "two columns 'tp'")])
@pytest.mark.parametrize("words", [["plan", "--evaluate"], ["calibrate"]])
def test_a_table_of_plans_has_a_value_for_each_column(capsys, tmp_path, words, lines, text):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines))
    assert main([*words, str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and text in err and "try: " in err, err


@pytest.mark.parametrize("variable, value", [("GLOBALTENSOR_RANKS", "many"), ("GLOBALTENSOR_RANKS", "0"),
                                             ("GLOBALTENSOR_AUDIT", "often"), ("GLOBALTENSOR_AUDIT", "-1"),
                                             ("GLOBALTENSOR_AUDIT", "nan"), ("GLOBALTENSOR_NATIVE", "maybe"),
                                             ("GLOBALTENSOR_CHECK", "false"), ("GLOBALTENSOR_TRACEBACK", "all")])
def test_a_variable_of_nonsense_is_refused(variable, value):
    code, out, err = run([PYTHON, "-c", "import globaltensor as gt; gt.world_size()"], environment(**{variable: value}))
    assert code == 1 and value in err and "where:" in err and "try:" in err, out + err
    shown = re.findall(r'File "(.*?)"', err)         # the program's lines alone
    assert shown == ["<string>"] or variable == "GLOBALTENSOR_TRACEBACK", err


_OF_A_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
              "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize("name, value", [
    ("WORLD_SIZE", "two"), ("WORLD_SIZE", "0"), ("RANK", "x"), ("RANK", "-1"), ("RANK", "2"), ("LOCAL_RANK", "1.5"),
    ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", ""), ("MASTER_PORT", "x"), ("MASTER_PORT", "99999"),
    ("MASTER_PORT", "0"), ("TORCHELASTIC_RESTART_COUNT", "often")])
def test_a_launchers_variable_of_nonsense_is_refused(name, value):
    check_variables(_OF_A_RANK)
    with pytest.raises(gt.TransportError, match=f"{name}={value}") as caught:
        check_variables({**_OF_A_RANK, name: value})
    assert caught.value.why and caught.value.fix and "test_nonsense.py:" in caught.value.where


@pytest.mark.parametrize("env, text", [
    ({"GLOBALTENSOR_RANK": "2"}, "GLOBALTENSOR_RANK is read by nothing\n  try:   GLOBALTENSOR_RANKS=2"),
    ({"GLOBALTENSOR_CHECKS": "1"}, "GLOBALTENSOR_CHECKS is read by nothing\n  try:   GLOBALTENSOR_CHECK=1"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "drives all ranks, though WORLD_SIZE=2 is set\n  why:   RANK is not"),
    ({"RANK": "1", "MASTER_ADDR": "h"}, "drives all ranks, though RANK=1 is set\n  why:   WORLD_SIZE is not"),
    ({**_OF_A_RANK, "GLOBALTENSOR_CHECK": "0", "GLOBALTENSOR_RANKS": "2", "GLOBALTENSOR_SECRET": "x"}, ""),
    ({"GLOBALTENSOR_RUN_FOLDER": "x", "GLOBALTENSOR_OF_MY_OWN": "x", "MASTER_ADDR": "h"}, "")])
def test_a_variable_without_effect_is_warned_of(env, text):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        check_own_variables(env)
    assert [str(one.message).partition(text)[1] for one in heard] == [text] * bool(text), heard


def test_a_rank_beyond_the_last_is_refused_at_once():
    code, out, err = run([PYTHON, "-c", "import globaltensor as gt; gt.world_size()"],
                         environment(**{**_OF_A_RANK, "RANK": "5", "MASTER_ADDR": "127.0.0.1"}))
    assert code == 1 and "RANK=5" in err and "where:" in err and "try:" in err, out + err


def test_what_is_to_be_typed_where_a_launcher_s_variables_are_left_over_is_read_then():
    """GLOBALTENSOR_RANKS is not."""
    ask = [PYTHON, "-c", "import globaltensor as gt; print(gt.placement('cpu', [0, 1]))"]
    left = environment(**{**_OF_A_RANK, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": "0", "GLOBALTENSOR_RANKS": "2"})
    code, out, err = run(ask, left)
    assert code == 1 and "rank 1 is outside the world of 1 rank\n" in err and "WORLD_SIZE=1 is set" in err, out + err
    assert "try:   other ranks, or start more: globaltensor run -n 2 ..., or: unset RANK WORLD_SIZE\n" in err, err
    for name in ("RANK", "WORLD_SIZE"):
        del left[name]
    assert run(ask, left)[0] == 0
