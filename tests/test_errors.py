"""Every mistake is told: what, where (the user's own line), why, and what to type."""
from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import globaltensor as gt
from globaltensor.errors import (
    ArgumentError,
    BoxingError,
    DisagreementError,
    GlobalTensorError,
    InPlaceError,
    MixedPlacementError,
    PlacementError,
    SbpError,
    ShapeError,
    TransportError,
)
from globaltensor.rules.parse import parse_rule
from globaltensor.simulator.cluster import hypothetical_placements

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum


def on(*ranks):
    return gt.placement("cpu", list(ranks) or [0, 1])


def ones(*size, sbp=B, where=None):
    return gt.ones(*size, placement=where or on(), sbp=sbp)


def forbidden():
    x = ones(4, 4, sbp=S(1))
    with gt.boxing("forbid"):
        return x @ x


def too_dear():
    x = ones(4, 4, sbp=S(1))
    with gt.boxing(budget=10):
        return x @ x


def backward_forbidden():
    x = ones(4, 4, sbp=S(0)).requires_grad_()
    y = x.to_global(sbp=B).sum()
    with gt.boxing("forbid"):
        y.backward()
        return x.softmax(0)


def mlp(compiled=None):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    if compiled == "layer":
        model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(model, backend="eager") if compiled == "whole" else model


def planned(of, compiled, pattern="1.0.weight"):
    prefix = {"whole": "_orig_mod.", None: ""}.get(of, "")
    gt.parallelize(mlp(compiled), gt.placement("cpu", [0, 1], ("tp",)), {prefix + pattern: {"tp": S(0)}})


def loaded(save, load, of, into):
    with TemporaryDirectory() as folder:
        save(mlp(of).to_global(on(), B), folder)
        load(mlp(into).to_global(on(), B), folder)


def save_model(model, folder):
    gt.save({"model": model}, folder)


def load_model(model, folder):
    gt.load({"model": model}, folder)


COMPILED = "model._orig_mod for a compiled model; or model.compile(), which leaves names as they are"

# what to do, class, and what must stand in: the first line, `why`, `try`
MISTAKES = {
    "rank outside the world": (lambda: on(0, 99), PlacementError, "rank 99 is outside the world of 8 ranks",
                               "0 to 7", "GLOBALTENSOR_RANKS=100, or gt.init(100)"),
    "many outside": (lambda: gt.placement("cpu", range(20)), PlacementError, "rank 19 is outside the world of 8 ranks",
                     "0 to 7", "GLOBALTENSOR_RANKS=20, or gt.init(20)"),
    "outside by axes": (lambda: gt.placement("cpu", [[9, 12], [11, 10]]), PlacementError, "rank 12 is outside", "",
                        "GLOBALTENSOR_RANKS=13, or gt.init(13)"),
    "negative rank": (lambda: on(-1), PlacementError, "rank -1 is none", "0 to 7", "other ranks, from 0 on"),
    "negative and outside": (lambda: on(0, 99, -2, -1), PlacementError, "rank -2 is none", "0 to 7", "from 0 on"),
    "duplicate ranks": (lambda: on(0, 1, 0), PlacementError, "rank 0 appears more than once in [0, 1, 0]", "one shard",
                        "each rank once"),
    "ragged ranks": (lambda: gt.placement("cpu", [[0, 1], [2]]), PlacementError, "ragged ranks: [[0, 1], [2]]", "grid",
                     "[[0, 1], [2, 3]]"),
    "no ranks": (lambda: gt.placement("cpu", []), PlacementError, "a placement without ranks", "", "ranks=[0]"),
    "ranks that are none": (lambda: gt.placement("cpu", "01"), PlacementError, "not '01'", "", "ranks=[0, 1]"),
    "no such device": (lambda: gt.placement("xpu", [0]), PlacementError, "no device of type 'xpu'",
                       "torch sees the CPU only", 'gt.placement("cpu", [0])'),
    "a number of ranks": (lambda: gt.placement("cpu", 2), PlacementError, "ranks=2 is not a list of ranks",
                          "names its ranks", 'gt.placement("cpu", range(2)), or gt.placement("cpu", [2])'),
    "one device": (lambda: gt.placement("cpu:0", [0]), PlacementError, "a placement on the single device 'cpu:0'",
                   "device type", 'gt.placement("cpu", [0])'),
    "no device at all": (lambda: gt.placement("gpu", [0]), PlacementError, "no device of type 'gpu'", "torch", "cpu"),
    "plan for a compiled model": (lambda: planned(None, "whole"), SbpError, "fits no parameter", "_orig_mod.1.0.weight",
                                  COMPILED),
    "plan for a compiled layer": (lambda: planned(None, "layer"), SbpError, "fits no parameter", "", COMPILED),
    "plan of a compiled model": (lambda: planned("whole", None), SbpError, "fits no parameter", "", COMPILED),
    "activations of a compiled model": (lambda: planned("whole", None, "1.0 ->"), SbpError, "fits no module", "",
                                        COMPILED),
    "plan for another model": (lambda: planned(None, "whole", "2.weight"), SbpError, "fits no parameter", "", "as in"),
    "styles of a compiled model": (lambda: gt.Plan.of_styles(mlp("whole"), {"1.0": "colwise"}), SbpError,
                                   "fits no module", "_orig_mod.1.0", COMPILED),
    "save of a compiled model": (lambda: loaded(save_model, load_model, "whole", None), GlobalTensorError,
                                 "the state has a tensor 'model/0.bias'", "_orig_mod.0.bias", COMPILED),
    "load into a compiled model": (lambda: loaded(gt.save_safetensors, gt.load_safetensors, None, "layer"),
                                   GlobalTensorError, "'1._orig_mod.0.bias'", "'1.0.bias'", COMPILED),
    "stages of a compiled model": (lambda: gt.pipeline(mlp("whole"), [on(0), on(1)], micro_batches=2),
                                   GlobalTensorError, "a compiled Sequential cannot be cut", "as a whole",
                                   "torch.compile of its layers"),
    "a wrapper of tensors": (lambda: gt.from_full(TwoTensor(torch.ones(2), torch.ones(2)), on(), B), GlobalTensorError,
                             "a TwoTensor, a wrapper", "read from memory", "gt.save, then quantize_(model)"),
    "saved by a library": (lambda: safetensors.torch.save({"x": ones(2)}), GlobalTensorError,
                           "a global tensor's storage", "no memory of its own",
                           "gt.save_safetensors(model, folder) or gt.save("),
    "axis names": (lambda: gt.placement("cpu", [0, 1], axis_names=("a", "b")), PlacementError, "for 1 axis",
                   "one name", ""),
    "too many sbps": (lambda: ones(4, sbp=(S(0), B)), SbpError, "2 sbps (S(0), B) for a placement of 1 axis",
                      "every axis", "sbp=(gt.sbp.broadcast,)"),
    "too many sbps of a gradient": (lambda: ones(4).to_global(on(2, 3), B, grad_sbp=(S(0), B)), SbpError,
                                    "grad_sbp: 2 sbps (S(0), B) for a placement of 1 axis",
                                    "x's own placement, placement(\"cpu\", [0, 1]", "grad_sbp=(gt.sbp.broadcast,)"),
    "split dim of a gradient": (lambda: ones(4).to_global(sbp=B, grad_sbp=S(1)), SbpError,
                                "grad_sbp: split(1) of a tensor of 1 dims", "0 to 0; the gradient", "gt.sbp.broadcast"),
    "split dim": (lambda: ones(4, 4, sbp=S(2)), SbpError, "split(2) of a tensor of 2 dims", "0 to 1", "broadcast"),
    "split of a scalar": (lambda: gt.zeros((), placement=on(), sbp=S(0)), SbpError, "split(0) of a tensor of 0 dims",
                          "no dim", "broadcast"),
    "split dim in to_global": (lambda: ones(4).to_global(sbp=S(-2)), SbpError, "split(-2)", "0 to 0", "broadcast"),
    "split by no int": (lambda: S("rows"), SbpError, "'rows'", "", "split(0)"),
    "no sbp at all": (lambda: ones(4, sbp="split"), SbpError, "not an sbp: 'split'", "one of these",
                      "gt.sbp.split(dim)"),
    "a placement without sbp": (lambda: gt.ones(4, placement=on()), GlobalTensorError, "no sbp", "", "sbp="),
    "an sbp without placement": (lambda: gt.ones(4, sbp=B), GlobalTensorError, "without a placement", "", "placement="),
    "unknown axis": (lambda: ones(4, sbp={"tp": B}), SbpError, "'tp'", "its axes are dp", "axis_names="),
    "axis in capitals": (lambda: ones(4, sbp={"DP": B}), SbpError, "'DP'", "its axes are dp", "did you mean 'dp'?"),
    "axis of ZeRO": (lambda: gt.zero(torch.optim.SGD(mlp().to_global(on(), B).parameters()), axis="DP"), SbpError,
                     "'DP'", "its placement has dp", "axis='dp'"),
    "placement among values": (lambda: gt.tensor([1.0], on(), B), ArgumentError, "gt.tensor with a placement among",
                               "by name", "gt.tensor([1.0], placement=P, sbp=gt.sbp.broadcast)"),
    "placement among sizes": (lambda: gt.rand(6, 8, on(), B), ArgumentError, "gt.rand with a placement among",
                              "by name", "gt.rand(6, 8, placement=P, sbp=gt.sbp.broadcast)"),
    "placement of randint": (lambda: gt.randint(5, (3,), on(), B), ArgumentError, "gt.randint with", "by name",
                             "gt.randint(5, (3,), placement=P, sbp=gt.sbp.broadcast)"),
    "placement of a like": (lambda: gt.full_like(torch.ones(2), 2.0, on(), B), ArgumentError, "gt.full_like with",
                            "by name", "gt.full_like(x, 2.0, placement=P, sbp=gt.sbp.broadcast)"),
    "split without a dim": (lambda: ones(4, sbp=S), SbpError, "not an sbp: <function split", "along a dim",
                            "did you mean gt.sbp.split(0)?"),
    "split without a dim, in a tuple": (lambda: ones(4, sbp=(S,)), SbpError, "not an sbp: <function split", "",
                                        "did you mean gt.sbp.split(0)?"),
    "a class of torch's": (lambda: ones(4, sbp=Replicate), SbpError, "not an sbp: <class", "it is a class",
                           "did you mean Replicate()?"),
    "an average": (lambda: ones(4, sbp=Partial("avg")), SbpError, "not an sbp: Partial(avg)", "", "gt.sbp.partial_sum"),
    "mixed placements": (lambda: ones(4) + ones(4, where=on(2, 3)), MixedPlacementError, "placement(\"cpu\", [2, 3])",
                         "one placement", 'other.to_global(gt.placement("cpu", [0, 1]))'),
    "order of ranks mixed": (lambda: ones(4, 4) @ ones(4, 4, where=on(1, 0)), MixedPlacementError,
                             "placement(\"cpu\", [1, 0])", "one placement", ".to_global("),
    "to_local of several": (lambda: ones(4).to_local(), GlobalTensorError, "drives several ranks", "[0, 1, 2",
                            "x.shards[rank]"),
    "sbp of a plain tensor": (lambda: torch.ones(4).sbp, SbpError, "a plain tensor has no sbp", "not global",
                              "x.to_global(placement, sbp)"),
    "placement of a plain tensor": (lambda: torch.ones(4).placement, SbpError, "no placement", "not global",
                                    "to_global"),
    "to_global of a plain tensor": (lambda: torch.ones(4).to_global(sbp=B), GlobalTensorError, "no placement", "",
                                    "t.to_global(placement, sbp)"),
    "in-place growth": (lambda: ones(1, 4).add_(ones(3, 4)), InPlaceError, "output with shape", "keeps its shape",
                        "x = x.add(...)"),
    "parts that do not fit": (lambda: gt.from_shards({0: torch.ones(2), 1: torch.ones(3)}, on(), S(0)), ShapeError,
                              "rank 1: [3]", "a tensor of [5] would be cut as", "gt.from_full"),
    "parts of other dims": (lambda: gt.from_shards({0: torch.ones(2), 1: torch.ones(3, 1)}, on(), S(0)), ShapeError,
                            "rank 1: [3, 1]", "same number of dims", "shard.unsqueeze(0)"),
    "parts of other dtypes": (lambda: gt.from_shards({0: torch.ones(2), 1: torch.ones(2).long()}, on(), S(0)),
                              ShapeError, "rank 1: [2] torch.int64", "the same dtype", "shard.to(torch.float32)"),
    "a missing part": (lambda: gt.from_shards({0: torch.ones(2)}, on(), S(0)), GlobalTensorError,
                       "without a part for ranks [1]", "drives ranks [0, 1]", "{rank: tensor}"),
    "forbidden boxing": (forbidden, BoxingError, "needs a boxing", 'gt.boxing("forbid")', "to_global(sbp="),
    "budget": (too_dear, BoxingError, "bytes", "budget of 10", "to_global(sbp="),
    "forbidden in what follows a backward": (backward_forbidden, BoxingError, "S(0) -> S(1)", "forbid",
                                             "x.to_global(sbp=gt.sbp.split(1)) before it"),
    "boxing mode": (lambda: gt.boxing("never").__enter__(), BoxingError, "'never'", "", '"forbid"'),
    "world twice": (lambda: gt.init(3), TransportError, "8 ranks already, not 3", "first placement", "gt.init"),
    "pattern": (lambda: gt.to_global(torch.nn.Linear(2, 2), on(), {"wieght": S(0)}), SbpError, "'wieght'",
                "weight, bias", "'*.weight'"),
    "show of a plain tensor": (lambda: gt.show(torch.ones(2)), GlobalTensorError, "plain", "no ranks", "to_global"),
}


@pytest.fixture(autouse=True, scope="module")
def world_of_eight():
    if gt.world_size() != 8:
        pytest.skip("written for the default world of 8 ranks")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
    mistake, kind, what, why, fix = MISTAKES[name]
    with pytest.raises(kind) as caught:
        mistake()
    error = caught.value
    assert what in str(error).partition("  where:")[0], error
    assert why in error.why and fix in error.fix, error
    assert (bool(error.why) or not why) and (bool(error.fix) or not fix)
    assert re.fullmatch(r"(.*/)?test_errors\.py:\d+", error.where), error.where
    assert f"  where: {error.where}" in str(error)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy} | {
    f"pickle {protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)}
OF_RULES = {"a rule": lambda: parse_rule("a b -> a ("), "a plan": lambda: gt.Plan.parse("")}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", [*MISTAKES, *OF_RULES])
def test_a_copy_says_what_its_error_says(name, way):
    with pytest.raises(GlobalTensorError) as caught:
        {**OF_RULES, **{each: mistake for each, (mistake, *_) in MISTAKES.items()}}[name]()
    error = caught.value
    error.add_note("a note")
    again = COPIES[way](COPIES[way](error))
    assert type(again) is type(error) and again is not error
    assert (str(again), repr(again), again.args, vars(again)) == (str(error), repr(error), error.args, vars(error))


def fails():
    ones(4, 4, sbp=S(9))


def test_an_error_of_another_process_names_its_own_line():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(SbpError) as caught:
        pool.submit(fails).result()
    assert str(caught.value).count("where:") == 1 and "test_errors.py" in caught.value.where


# calls whose arguments do not fit, as Python says, and what the function takes
MISCALLED = {
    "a loader in another order": (lambda: gt.data.DataLoader([1], on(), S(0), batch_size=1),
                                  "DataLoader(dataset, batch_size, placement, sbp, ...)"),
    "a keyword of a loader that is misspelt": (lambda: gt.data.DataLoader([1], 2, on(), S(0), shufle=True),
                                               "DataLoader(dataset, batch_size, placement, sbp, shuffle=..., ...)"),
    "a loader without a placement": (lambda: gt.data.DataLoader([1], batch_size=1),
                                     "DataLoader(dataset, batch_size, placement, sbp, ...)"),
    "a keyword that is misspelt": (lambda: gt.placement("cpu", [0], axis_name=("dp",)),
                                   "placement(type, ranks, axis_names=...)"),
    "a dim by another name": (lambda: gt.sbp.split(axis=0), "split(dim)"),
    "a placement by its place": (lambda: gt.full((2,), 1.0, on(), B), "full(size, fill_value, placement=..., sbp=..."),
    "what is optional": (lambda: gt.normal(0.0, 1.0, (3,), on(), B), "normal(mean, std=..., size=..., placement=..."),
    "a method": (lambda: gt.Plan.of(), "Plan.of(module, axis=..."),
}


@pytest.mark.parametrize("name", MISCALLED)
def test_arguments_that_do_not_fit_are_told_what_does(name):
    call, fix = MISCALLED[name]
    with pytest.raises(TypeError) as caught:
        call()
    note, = caught.value.__notes__
    assert re.match(r"  where: (.*/)?test_errors\.py:\d+\n  try:   ", note) and f"try:   {fix}" in note, note


def test_where_is_the_very_line():
    with pytest.raises(MixedPlacementError) as caught:
        ones(2) * ones(2, where=on(2, 3))            # this one
    text = Path(__file__).read_text().splitlines()
    line = next(k for k, words in enumerate(text, 1) if words.endswith("# this one"))
    assert caught.value.where.endswith(f"test_errors.py:{line}")


def of_module(k):
    return torch.nn.Linear(4, 4).to_global(on(k, k + 1))


# a program of operands on two placements, by the names that the error has for them; a list may hold what is no tensor
MIXED = {
    "two operands": (lambda n: n["self"] + n["other"], lambda: {"self": ones(4), "other": ones(4, where=on(2, 3))}),
    "in place": (lambda n: n["self"].add_(n["other"]), lambda: {"self": ones(4), "other": ones(4, where=on(2, 3))}),
    "a list": (lambda n: torch.cat(n["tensors"]), lambda: {"tensors": [ones(4), ones(4), ones(4, where=on(2, 3))]}),
    "a list with plain tensors": (lambda n: torch.stack(n["tensors"]), lambda: {
        "tensors": [torch.ones(4), ones(4), ones(4, where=on(2, 3))]}),
    "a mask": (lambda n: n["self"][tuple(n["indices"])], lambda: {
        "self": ones(4), "indices": [ones(4, where=on(2, 3)) > 0]}),
    "the second index": (lambda n: n["self"][tuple(n["indices"])], lambda: {
        "self": ones(4, 4), "indices": [slice(None), ones(4, where=on(2, 3)) > 0]}),
    "lists": (lambda n: torch._foreach_add(n["self"], n["other"]), lambda: {
        "self": [ones(4), ones(2)], "other": [ones(4), ones(2, where=on(2, 3))]}),
    "a list of parameters": (lambda n: torch._foreach_add(n["self"], [n["module"].weight]), lambda: {
        "self": [ones(4, 4)], "module": of_module(2)}),
    "a layer": (lambda n: n["module"](n["x"]), lambda: {"x": ones(4, 4), "module": of_module(2)}),
    "parameters": (lambda n: n["other"].weight @ n["module"].weight, lambda: {
        "other": of_module(0), "module": of_module(2)}),
    "a parameter and a tensor": (lambda n: n["self"] * n["module"].weight, lambda: {
        "self": ones(4, 4), "module": of_module(2)}),
    "a scalar that requires grad": (lambda n: n["self"] * n["other"], lambda: {
        "self": ones(4), "other": ones(1, where=on(2, 3))[0].requires_grad_()}),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_to_type_for_mixed_placements_works(name):
    program, operands = MIXED[name]
    with pytest.raises(MixedPlacementError) as caught:
        program(operands())
    for typed in caught.value.fix.split(", or "):
        typed, names = typed.partition(" for the module")[0], operands()
        exec(f"{typed.partition('.to_global(')[0]} = {typed}", {"gt": gt}, names)
        program(names)


def test_plain_elements_beside_a_shared_global_number():
    for tensors in ([torch.ones(2)], [torch.ones(2), ones(3)]):
        got = torch._foreach_mul(tensors, ones(3, sbp=S(0)).sum())
        assert [t.tolist() for t in got] == [[3.0] * len(t) for t in tensors]


def test_errors_are_of_torch_s_and_python_s_kinds_too():
    for kind in (PlacementError, SbpError, ShapeError, MixedPlacementError):
        assert issubclass(kind, ValueError) and issubclass(kind, RuntimeError)
    for kind in (InPlaceError, BoxingError, DisagreementError, TransportError):
        assert issubclass(kind, GlobalTensorError) and issubclass(kind, RuntimeError)


def test_a_forbidden_boxing_moves_nothing_and_leaves_the_operands_alone():
    x = ones(4, 4, sbp=S(1))
    with gt.record() as moves, pytest.raises(BoxingError), gt.boxing("forbid"):
        x @ x
    assert not moves and x.sbp == (S(1),) and x.sum().item() == 16


# what is read of x in each layout of a few, on ranks that are not all
READS = {"the whole": lambda x: x.full_tensor(), "numpy": lambda x: x.numpy(), "a list": lambda x: x.tolist(),
         "softmax": lambda x: x.softmax(0), "a product": lambda x: x @ x, "sorted": lambda x: x.sort(0)}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("ranks, sbp", [([0, 1], S(0)), ([0, 1], B), ([0, 1], P), ([2, 3], S(1)), (range(8), S(0)),
                                        ([[0, 1], [2, 3]], (S(0), B)), ([[0, 1], [2, 3]], (B, P))])
def test_what_to_type_for_a_forbidden_boxing_works(ranks, sbp, read):
    x = gt.from_full(torch.randn(8, 8), gt.placement("cpu", ranks), B).to_global(sbp=sbp)
    try:
        with gt.boxing("forbid"):
            READS[read](x)
    except BoxingError as error:
        x = eval(error.fix.partition(" before it")[0], {"gt": gt, "x": x})
        with gt.boxing("forbid"):
            READS[read](x)


@pytest.mark.parametrize("text, right", [
    ("it is a int, where a Tensor is wanted", "it is an int, where a Tensor is wanted"),
    ("a AdamW of plain parameters", "an AdamW of plain parameters"), ("a UNet cannot be cut", "a UNet cannot be cut"),
    ("a union, a user, a one", "a union, a user, a one"), ("the rule a e -> a", "the rule a e -> a"),
    ("'a int' is not an expression", "'a int' is not an expression"), ("data int", "data int"),
    ("a URL names a folder", "a URL names a folder")])
def test_articles_fit_what_a_message_puts_in(text, right):
    error = gt.GlobalTensorError(text, text, text)
    assert (error.what, error.why, error.fix) == (right, right, text) and right in str(error)


@pytest.mark.parametrize("name", ["subclass_wrapper", "backward_subclass_wrapper", "dedup_wrapper", "eval_with_key"])
def test_the_line_of_the_program_is_never_one_of_code_that_torch_writes(name):
    found = eval(compile("ask()", f"<{name}>", "eval"), {"ask": gt.errors.where})
    assert f"{Path(__file__).name}:" in found


@pytest.mark.parametrize("name", ["transformers.trainer", "transformers.trainer_seq2seq", "accelerate.accelerator",
                                  "lightning.pytorch.loops.fit_loop", "pytorch_lightning.trainer.trainer"])
def test_the_line_of_the_program_is_not_one_of_a_trainer_that_runs_it(name):
    code = compile("ask()", "/lib/site-packages/trainer.py", "eval")
    assert f"{Path(__file__).name}:" in eval(code, {"ask": gt.errors.where, "__name__": name})
    assert "trainer.py:1" in eval(code, {"ask": gt.errors.where, "__name__": "transformers.models.llama"})


@pytest.mark.parametrize("ranks, names", [
    (range(64), None), (range(64, 576, 8), None), (torch.arange(1_024).reshape(2, 32, 16), ("pp", "dp", "tp")),
    (torch.arange(512, 640).reshape(16, 8), ("dp", "tp"))])
def test_many_ranks_are_told_in_a_line_that_gives_them_again(ranks, names):
    with hypothetical_placements():
        where = gt.placement("cpu", ranks, names)
        assert len(repr(where)) < 100 and eval(repr(where), {"placement": gt.placement, "torch": torch}) == where


def test_many_ranks_in_uneven_steps_are_listed():
    with hypothetical_placements():
        assert "[0, 1, 3, 6, 10, " in repr(gt.placement("cpu", [n * (n + 1) // 2 for n in range(64)]))


SPOILT = {"inv": (torch.linalg.inv, 0.), "inv_ex": (lambda a: torch.linalg.inv_ex(a, check_errors=True), 0.),
          "solve_ex": (lambda a: torch.linalg.solve_ex(a, a, check_errors=True), 0.),
          "lu_factor_ex": (lambda a: torch.linalg.lu_factor_ex(a, check_errors=True), 0.),
          "cholesky_ex": (lambda a: torch.linalg.cholesky_ex(a, check_errors=True), -1.),
          "cholesky": (torch.cholesky, -1.), "cholesky_inverse": (torch.cholesky_inverse, 0.),
          "svd": (torch.linalg.svd, torch.nan), "svdvals": (torch.linalg.svdvals, torch.nan),
          "pinv": (torch.linalg.pinv, torch.nan), "matrix_rank": (torch.linalg.matrix_rank, torch.nan)}


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of")
@pytest.mark.parametrize("name", SPOILT)
def test_an_error_of_linear_algebra_names_the_matrix_of_the_whole_batch(name):
    """A rank's kernel counts those that it has."""
    function, spoilt = SPOILT[name]
    for batch, nth in (((7,), (5,)), ((7,), (0,)), ((3, 5), (2, 4)), ((5, 3), (3, 1)), ((), ())):
        a = 2 * torch.eye(3).expand(*batch, 3, 3).clone()
        a[*nth, 1, 1] = spoilt
        with pytest.raises(RuntimeError) as expected:
            function(a)
        for where, sbp in ((on(0, 1, 2), S(0)), (on(0, 1, 2), S(1)), (on(0, 1, 2), B),
                           (gt.placement("cpu", [[0, 1], [2, 3]]), (S(0), S(1)))):
            with pytest.raises(RuntimeError) as caught:
                function(gt.from_full(a, where, sbp))
            assert str(caught.value) == str(expected.value), (batch, sbp)
