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
import torch
from harness import PYTHON, Started, environment

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

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


def test_what_the_error_of_save_pretrained_says_works(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(model_steps.SEED)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)     # whose first and last weight are one
    want = {name: t.clone() for name, t in model.state_dict().items()}
    model_steps.weights_split(model)
    with pytest.raises(GlobalTensorError, match="state_dict=") as raised:
        model.save_pretrained(tmp_path)
    assert "gt.save_safetensors(model, folder)" in str(raised.value)
    model.save_pretrained(tmp_path / "state", is_main_process=gt.rank() == 0,
                          state_dict={k: t.full_tensor() for k, t in model.state_dict().items()})
    gt.save_safetensors(model, tmp_path / "ours")
    config.save_pretrained(tmp_path / "ours")
    for folder in ("state", "ours"):
        got = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder).state_dict()
        assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())


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
