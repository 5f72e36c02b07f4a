"""Rows that are melted into one dim and parted again: programs/melted.py against plain torch."""
from __future__ import annotations

import sys

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good

import globaltensor as gt

sys.path.insert(0, str(PROGRAMS))
import melted

print(f"tests/test_melted.py: seed {melted.SEED}")


def test_views_of_views():
    melted.check_views()


@pytest.mark.parametrize("seed", range(melted.SEED, melted.SEED + 60))
def test_random_views(seed):
    melted.check_random(seed)


def test_a_layer_on_views_of_as_many_rows():
    melted.check_linear()


def test_attention_of_a_split_batch():
    melted.check_attention()


def test_an_operand_that_does_not_fit_is_named_as_the_program_has_it():
    x = gt.from_full(torch.rand(3, 8, 4), gt.placement("cpu", [0, 1]), gt.sbp.split(1)).view(24, 4)
    with pytest.raises(RuntimeError, match=r"24, 4"):
        torch.nn.functional.linear(x, gt.ones(3, 5, placement=x.placement, sbp=gt.sbp.broadcast))


def test_without_native_code():
    good([PYTHON, PROGRAMS / "melted.py"], environment(GLOBALTENSOR_NATIVE="0"), timeout=240)


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", "0"])
def test_on_processes(native):
    good([*RUN, "-n", 2, PROGRAMS / "melted.py"], environment(GLOBALTENSOR_NATIVE=native), timeout=240)
