"""Parameters keep their identity, in a child process that a mistake could kill, and stand-ins leave no trace."""
from __future__ import annotations

import re

import pytest
import torch
from harness import PROGRAMS, PYTHON, environment, good
from torch import nn

from globaltensor.parallel.parameter_swap import swap_in, swap_out, swapped_in

PROGRAM = PROGRAMS / "parameter_identity.py"
CHECKS = re.findall(r"(?m)^def (\w+)\(\):\n", PROGRAM.read_text())


@pytest.mark.parametrize("native", ["1", "0"])
def test_parameters_stay_the_same_objects(native):
    passed = good([PYTHON, PROGRAM], environment(GLOBALTENSOR_NATIVE=native), timeout=300).split()
    assert len(passed) == len(CHECKS) - 1 >= 12, f"{set(CHECKS) - set(passed)} did not run"      # all but model()


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
