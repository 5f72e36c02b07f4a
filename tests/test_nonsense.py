"""Nonsense, call by call: everything public refuses it, with an error that says what, where, why, and what to type."""
from __future__ import annotations

import math
import re
import traceback

import pytest
import torch
from harness import PYTHON, environment, run
from torch import nn

import globaltensor as gt
from globaltensor.cli import main

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
ON = gt.placement("cpu", [0, 1])
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
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
    "a loss that is no function": lambda: pipe(loss=3),
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
    "a budget that is no number": lambda: entered(gt.boxing(budget=math.nan)),
    "a mode of None": lambda: entered(gt.boxing(None)),
    "explain of a value": lambda: gt.explain(3),
    "show of a number": lambda: gt.show(3),
    # starting
    "a time-out of text": lambda: gt.init(timeout="x"),
    "a time-out of a negative": lambda: gt.init(timeout=-1),
    "a time-out that is no number": lambda: gt.init(timeout=math.nan),
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

# torch says these well, and we add the line
OF_TORCH = {
    "a placement for a dtype": lambda: gt.zeros(4, placement=ON, sbp=B, dtype=ON),
    "randint of nothing": lambda: gt.randint(5, 5, (4,), placement=ON, sbp=B),
    "randperm of a negative": lambda: gt.randperm(-1, placement=ON, sbp=B),
    "eye of text": lambda: gt.eye("x", placement=ON, sbp=B),
}


@pytest.fixture(autouse=True, scope="module")
def world_of_eight():
    if gt.world_size() != 8:
        pytest.skip("written for the default world of 8 ranks")


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
    with pytest.raises((TypeError, RuntimeError)) as caught:
        OF_TORCH[name]()
    notes = "".join(getattr(caught.value, "__notes__", ()))
    last = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert last == __file__ or "test_nonsense.py:" in f"{caught.value}{notes}", f"{caught.value} at {last}"


CLI = {
    "no such command": (["rnu", "x.py"], "there is no 'rnu'; did you mean 'run'"),
    "no program": (["run"], "required: program"),
    "no ranks": (["run", "-n", "0", "x.py"], "not a number from 1 on"),
    "negative ranks": (["run", "-n", "-1", "x.py"], "expected one argument|not a number from 1 on"),
    "half a rank": (["run", "-n", "1.5", "x.py"], "not a number from 1 on"),
    "too many ranks to count": (["run", "-n", "1e400", "x.py"], "not a number from 1 on"),
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
    "memory of half a rank": (["memory", "--params", "7e9", "--dp", "0.5"], "not a number from 1 on"),
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
    "ranks of a benchmark in text": (["bench", "boxing", "--ranks", "two"], "invalid int value|not a number"),
    "no ranks for a benchmark": (["bench", "boxing", "--ranks", "0"], "not a number from 1 on"),
    "info of a name": (["info", "x"], "there is no argument x"),
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


@pytest.mark.parametrize("variable, value", [("GLOBALTENSOR_RANKS", "many"), ("GLOBALTENSOR_RANKS", "0"),
                                             ("GLOBALTENSOR_AUDIT", "often"), ("GLOBALTENSOR_AUDIT", "-1")])
def test_a_variable_of_nonsense_is_refused(variable, value):
    code, out, err = run([PYTHON, "-c", "import globaltensor as gt; gt.world_size()"], environment(**{variable: value}))
    assert code == 1 and value in err and "where:" in err and "try:" in err, out + err
