"""Parameters keep their identity, in a child process that a mistake could kill, and stand-ins leave no trace."""
from __future__ import annotations

import re

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good
from torch import nn

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
