"""Parameters keep their identity, in a child process that a mistake could kill, and stand-ins leave no trace."""
from __future__ import annotations

import copy
import re

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good
from torch import nn
from torch.nn.utils import parametrize

import globaltensor as gt
from globaltensor.errors import GlobalTensorError
from globaltensor.tensors.parameter_swap import swap_in, swap_out, swapped_in

PROGRAM = PROGRAMS / "parameter_identity.py"
CHECKS = re.findall(r"(?m)^def (\w+)\(\):\n", PROGRAM.read_text())


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_parameters_stay_the_same_objects(native):
    passed = good([PYTHON, PROGRAM], environment(GLOBALTENSOR_NATIVE=native), timeout=300).split()
    assert len(passed) == len(CHECKS) - 1 >= 12, f"{set(CHECKS) - set(passed)} did not run"      # all but model()


PLAIN_AGAIN = PROGRAMS / "plain_again.py"


def passes(command, native):
    passed = good([*command, PLAIN_AGAIN], environment(GLOBALTENSOR_NATIVE=native, GLOBALTENSOR_RANKS="1"), timeout=120)
    assert len(passed.split()) == 4, passed


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_global_module_goes_on_plain(native):
    passes([PYTHON], native)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_global_module_of_two_processes_goes_on_plain(native):
    passes([*RUN, "-n", "2"], native)


def test_a_process_with_several_ranks_has_no_one_local_module():
    module = nn.Linear(4, 4).to_global(gt.placement("cpu", [0, 1]), gt.sbp.broadcast)
    with pytest.raises(GlobalTensorError, match="drives several ranks"):
        module.to_local()
    assert module.weight.is_global


@pytest.mark.parametrize("graph_lives", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_a_parametrization_without_a_right_inverse_leaves_graphs_as_they_are(graph_lives, hooked):
    """As in plain torch: those from before it, and later ones."""
    def run(module, x):
        calls = []
        before = module(x)
        if hooked:
            module.weight.register_hook(lambda gradient: calls.append("hook"))
            module.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
        parameter = module.weight
        if not graph_lives:
            del before
        parametrize.register_parametrization(module, "weight", nn.Tanh())
        assert module.parametrizations.weight.original is parameter
        for loss in [module(x).pow(2).sum(), *([before.sum()] if graph_lives else []), module(x).sum()]:
            loss.backward()
        return parameter.grad, calls
    torch.manual_seed(20_261_129)
    plain, x, where = nn.Linear(4, 4), torch.randn(3, 4), gt.placement("cpu", [0, 1])
    module = copy.deepcopy(plain).to_global(where, gt.sbp.split(0))
    (wanted, expected), (gradient, calls) = run(plain, x), run(module, gt.from_full(x, where, gt.sbp.broadcast))
    torch.testing.assert_close(gradient.full_tensor(), wanted)
    assert calls == expected


def test_a_stand_in_is_what_the_forward_finds_and_nothing_else():
    layer, other = nn.Linear(3, 3, bias=False), torch.eye(3)
    own, x = layer.weight, torch.randn(2, 3)
    swap_in(layer, "weight", other)
    assert torch.equal(layer(x), x) and list(layer.parameters()) == [own] and layer.state_dict()["weight"] is not other
    swap_out(layer, "weight")
    assert layer.weight is own
    with pytest.raises(ZeroDivisionError), swapped_in([(layer, "weight", other)]):
        assert torch.equal(layer(x), x)
        raise ZeroDivisionError
    assert layer.weight is own and "weight" not in layer.__dict__


def refuse(name, parameter):
    if name == "1.bias":
        raise ValueError(name)
    return gt.sbp.split(0)


@pytest.mark.parametrize("sbp, error", [
    (gt.sbp.split(1), gt.SbpError), ({"*.weight": gt.sbp.split(1), "1.bias": gt.sbp.split(1)}, gt.SbpError),
    (refuse, ValueError), (lambda name, _: "B" if name[0] == "0" else "?", gt.SbpError)])
@pytest.mark.parametrize("already", [False, True], ids=["plain", "global"])
def test_a_module_that_could_not_be_made_global_is_as_it_was(sbp, error, already):
    """split(1) fits weights, not biases: nothing is changed before the layouts of all are known."""
    where = gt.placement("cpu", [0, 1])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if already:
        gt.to_global(model, where)
    before = {name: (type(p), p.is_global and p.sbp) for name, p in model.named_parameters()}
    with pytest.raises(error):
        gt.to_global(model, where, sbp)
    assert {name: (type(p), p.is_global and p.sbp) for name, p in model.named_parameters()} == before
