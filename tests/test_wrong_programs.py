"""Typical mistakes of a new user: each is told in our words, and what the error says to type works here."""
from __future__ import annotations

import re

import pytest
import torch
from test_errors import B, S, on, ones
from test_tracebacks import frames, raised
from torch import nn

import globaltensor as gt
from globaltensor.errors import OURS, GlobalTensorError

GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
X = ones(4, 3, sbp=S(0))


def net():
    return nn.Linear(3, 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(sbp):
    return next(iter(gt.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8)), 4, on(), sbp)))


def two_stages(*names, batch):
    """A pipeline on placements with these axes."""
    return gt.pipeline([nn.Linear(3, 3), net()], [gt.placement("cpu", [n], names or None) for n in (0, 1)], batch=batch)


# the mistake, a part of the first line, and where what the error suggests is to be put (None: it is not code)
WRONG = {
    "placement among sizes": (lambda: gt.ones(4, on(), S(0)), "a placement among the sizes", None),
    "device beside a placement": (lambda: gt.ones(4, placement=on(), sbp=B, device="cuda"), "device='cuda'", None),
    "device of another type": (lambda: gt.ones(4, placement=on(), sbp=B, device="meta"), "device='meta'",
                               "gt.ones(4, sbp=B, {})"),
    "device with a typo": (lambda: gt.ones(4, placement=on(), sbp=B, device="cuad"), "device='cuad'", None),
    "keyword with a typo": (lambda: gt.ones(4, placment=on(), sbp=B), "no keyword 'placment'", None),
    "no such device": (lambda: gt.placement("cuda:1", [0, 1]), "single device 'cuda:1'", None),
    "a device type with a typo": (lambda: gt.placement("cpuu", [0, 1]), "no device of type 'cpuu'", "{}"),
    "one device": (lambda: gt.placement("cpu:0", [0]), "single device 'cpu:0'", "{}"),
    "a number of ranks": (lambda: gt.placement("cpu", 2), "ranks=2", "{}"),
    "ranks of text": (lambda: gt.placement("cpu", ["0"]), "not '0'", "gt.placement('cpu', {})"),
    "one name of an axis": (lambda: gt.placement("cpu", [0, 1], axis_names="dp"), "axis_names='dp'",
                            "gt.placement('cpu', [0, 1], {})"),
    "two sbps for one axis": (lambda: ones(4, sbp=(S(0), B)), "2 sbps", "gt.ones(4, placement=on(), {})"),
    "split without a dim": (lambda: ones(4, sbp=S), "not an sbp", "ones(4, sbp={})"),
    "split dim": (lambda: ones(4, sbp=S(2)), "split(2)", "ones(4, sbp={})"),
    "sbp with a typo": (lambda: ones(4, sbp="s0"), "not an sbp: 's0'", None),
    "sbp in the place of a placement": (lambda: X.to_global(S(0)), "S(0), which is an sbp", "X.to_global({})"),
    "no size": (lambda: gt.ones(placement=on(), sbp=B), "gt.ones without a size", None),
    "list for a tensor": (lambda: gt.from_full([1.0], on(), B), "from_full of no tensor", None),
    "list of local parts": (lambda: gt.from_local([1.0], on(), B), "from_local of no tensor", None),
    "None for a tensor": (lambda: gt.from_full(None, on(), B), "from_full of no tensor", None),
    "list of shards": (lambda: gt.from_shards([torch.ones(2)] * 2, on(), S(0)), "from_shards of no dict", None),
    "a number of ranks to parallelize": (lambda: gt.parallelize(net(), 2), "not a placement: 2",
                                         "gt.parallelize(net(), {})"),
    "arguments swapped": (lambda: gt.parallelize(on(), net()), "parallelize of no module", None),
    "a class for a module": (lambda: gt.parallelize(nn.Linear, on()), "no module: Linear", None),
    "text for a module": (lambda: gt.to_global("x", on()), "to_global of no module", None),
    "a list for a plan": (lambda: gt.parallelize(net(), GRID, [1]), "a plan of no rows", "{}"),
    "a plan of no module": (lambda: gt.Plan.of(3), "Plan.of no module", None),
    "a plan with a typo": (lambda: gt.parallelize(net(), GRID, {"wieght": {"tp": S(0)}}), "'wieght'", None),
    "a plan's row": (lambda: gt.parallelize(net(), GRID, {"weight": S(0)}), "row 'weight' is S(0)", None),
    "no optimizer": (lambda: gt.zero(None), "gt.zero of no optimizer", None),
    "a model for an optimizer": (lambda: gt.zero(net()), "gt.zero of no optimizer", None),
    "a plain optimizer": (lambda: gt.zero(sgd(net())), "global parameters", None),
    "no such stage": (lambda: gt.zero(sgd(net().to_global(on(), B)), stage=4), "no stage 4", None),
    "one placement for a pipeline": (lambda: gt.pipeline(nn.Sequential(net(), nn.Linear(2, 2)), on(0)),
                                     "one placement for a pipeline", None),
    "a schedule with a typo": (lambda: gt.pipeline(nn.Sequential(net(), nn.Linear(2, 2)), [on(0), on(1)], "1f2b"),
                               "no schedule '1f2b'", None),
    "a dim that no sample has": (lambda: batches(S(3)), "a batch with split(3)", "batches({})"),
    "a loader over nothing": (lambda: gt.data.DataLoader(None, 4, on(), S(0)), "over NoneType", None),
    "a budget of text": (lambda: gt.boxing(budget="x"), "budget='x'", "{}"),
    "a mode with a typo": (lambda: gt.boxing("forbidden"), "'forbidden'", "{}"),
    "a time-out of text": (lambda: gt.init(timeout="x"), "not a number of seconds: 'x'", "{}"),
    "explain of a tensor": (lambda: gt.explain(X), "explain of a GlobalTensor", None),
    "show of a plain tensor": (lambda: gt.show(torch.ones(2)), "plain tensor", None),
    "a picture in no folder": (lambda: gt.show(X, "/nonexistent/x.svg"), "/nonexistent/x.svg", None),
    "a plan into None": (lambda: gt.Plan.of(net()).save(None), "a plan into no file: None", None),
    "a plan in no folder": (lambda: gt.Plan.of(net()).save("/nonexistent/plan"), "/nonexistent/plan", None),
    "a strategy into None": (lambda: gt.Strategy().save(None), "a strategy into no file: None", None),
    "a strategy in no folder": (lambda: gt.Strategy().save("/nonexistent/plan"), "/nonexistent/plan", None),
    "waiting by text": (lambda: X.to_global(sbp=B, wait="no"), "neither yes nor no: 'no'", "X.to_global(sbp=B, {})"),
    "waiting for None": (lambda: X.to_global(sbp=B, wait=None), "neither yes nor no: None", "X.to_global(sbp=B, {})"),
    "a batch along no axis": (lambda: two_stages(batch="pp"), "batch='pp'", "two_stages({})"),
    "a batch along an axis with a typo": (lambda: two_stages("data", batch="Data"), "'Data'", "two_stages('data', {})"),
    "gradients of numbers": (lambda: gt.set_grad_reduce_dtype([3], torch.bfloat16), "gradients of a list", None),
    "gradients of one weight": (lambda: gt.set_grad_reduce_dtype(X, torch.bfloat16), "of a GlobalTensor", None),
    "another placement": (lambda: X + ones(4, 3, where=on(2, 3)), "is on placement",
                          "(lambda other: {})(ones(4, 3, where=on(2, 3)))"),
    "plain data": (lambda: setattr(X.clone(), "data", torch.ones(4, 3)), "a plain tensor t", None),
    "local part": (lambda: X.to_local(), "drives several ranks", "(lambda x, rank: {})(X, 0)"),
    "sbp of a plain tensor": (lambda: torch.ones(2).sbp, "a plain tensor", None),
    "sparse": (lambda: X + torch.ones(4, 3).to_sparse(), "torch.sparse_coo",
               "(lambda t: {})(torch.ones(4, 3).to_sparse())"),
    "no checkpoint": (lambda: gt.load({"x": X}, "/nonexistent/folder"), "no checkpoint", None),
}

# Python's and torch's own words, with the line of the program
ARGUMENTS = {
    "no ranks": (lambda: gt.placement("cpu"), TypeError, "missing 1 required positional argument: 'ranks'"),
    "axes": (lambda: gt.placement("cpu", [0, 1], axes=("dp",)), TypeError, "unexpected keyword argument 'axes'"),
    "a keyword of to_global": (lambda: X.to_global(spb=B), TypeError, "unexpected keyword argument 'spb'"),
    "a keyword of the loader": (lambda: gt.data.DataLoader([1], 4, on(), S(0), suffle=True), TypeError, "'suffle'"),
    "a loader without sbp": (lambda: gt.data.DataLoader([1], 4, on()), TypeError, "'sbp'"),
    "a dtype of text": (lambda: ones(4).new_ones(3, dtype="float32"), TypeError, "dtype"),
    "a dtype of a factory": (lambda: gt.ones(4, placement=on(), sbp=B, dtype="float32"), TypeError, "torch.dtype"),
    "a size of text": (lambda: ones("4"), TypeError, "not str"),
    "a size of no int": (lambda: ones(4.0), TypeError, "not float"),
    "a negative size": (lambda: ones(-4), RuntimeError, "negative dimension"),
    "no fill value": (lambda: gt.full(3, placement=on(), sbp=B), TypeError, "'fill_value'"),
    "a name with a typo": (lambda: gt.spilt(0), AttributeError, "did you mean 'split'"),
    "a method with a typo": (lambda: X.to_gloabl(), AttributeError, "to_gloabl"),
    "an index": (lambda: X[10], IndexError, "out of bounds"),
    "too many indices": (lambda: X[0, 0, 0], IndexError, "too many indices"),
    "a class of cross entropy": (lambda: nn.functional.cross_entropy(X, gt.full((4,), 7, placement=on(), sbp=B)),
                                 IndexError, "out of bounds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_in_our_words(name):
    mistake, what, place = WRONG[name]
    error = raised(mistake)
    assert isinstance(error, GlobalTensorError), f"{type(error)}: {error}"
    assert what in str(error).partition("  where:")[0] and error.fix, error
    assert re.search(r"test_(errors|wrong_programs)\.py:\d+$", error.where), error
    # A loader is read by a generator, whose frame is ours.
    assert name == "a dim that no sample has" or not [file for file in frames(error) if file.startswith(OURS)]
    if place is not None:
        names = {**globals(), "split": S}
        pieces = re.split(r",? or (?=\w+\.|\[)|, (?=gt\.)", error.fix.removeprefix("did you mean ").rstrip("?"))
        codes = [piece for piece in pieces if is_code(place.format(piece)) and not piece.isidentifier()]
        assert codes, f"nothing to type in {error.fix!r}"
        for code in codes:
            eval(place.format(code), names)


def is_code(text: str) -> bool:
    try:
        compile(text, "", "eval")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_are_told_at_the_line(name):
    mistake, kind, text = ARGUMENTS[name]
    error = raised(mistake)
    assert isinstance(error, kind) and text in str(error), error
    assert name == "a name with a typo" or not [file for file in frames(error) if file.startswith(OURS)], frames(error)
