"""Models as an oracle: loss, every gradient and one step of training of whole models, equal to plain torch.

Two layouts of each, on two ranks and a batch of three: the batch split (`dp`); and the plan of `gt.Plan.of` where it
recognises layers (`tp`), else every weight split along dim 0 and 1 in turns (`split`).
"""
from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import model_families
import model_steps
import pytest
from harness import PYTHON, Started, environment

HANDWRITTEN = model_families.handwritten()
LIBRARIES = {  # how many models are right at least, of those that can be built small
    "transformers": 200,
    "torchvision": 20,
    "timm": 40,
    "diffusers": 9,
}


@pytest.mark.parametrize("name", HANDWRITTEN.names)
def test_a_model_trains_as_on_one_device(name):
    print("seed", model_steps.SEED)
    outcomes = list(model_steps.outcomes(HANDWRITTEN, name))
    assert [o["layout"] for o in outcomes][0] == "dp" and len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["status"] == "right", outcome


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_models_of_a_library_train_as_on_one_device(library):
    try:
        importlib.import_module(library)
    except Exception as error:                       # also one that does not fit this torch
        pytest.skip(f"no {library} that can be imported: {type(error).__name__}: {error}")
    program = Path(model_steps.__file__)
    code, out, err = Started([PYTHON, program, library], environment()).end(timeout=7000)
    assert code == 0, err
    outcomes = [json.loads(line) for line in out.splitlines()]
    counts = Counter((o["layout"], o["status"]) for o in outcomes)
    print("seed", model_steps.SEED, dict(counts))
    wrong = [o for o in outcomes if o["status"] not in ("right", "not built")]
    assert not wrong, "\n".join(f"{o['name']} {o['layout']} {o['status']}: {o['detail']}" for o in wrong)
    assert counts["dp", "right"] >= LIBRARIES[library], counts
