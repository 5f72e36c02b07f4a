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
from harness import PYTHON, RUN, Started, environment, good

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

HANDWRITTEN = model_families.handwritten()
LIBRARIES = {  # how many models are right at least, of those that can be built small
    "transformers": 340,
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


SAVES = """
import os, sys, torch, transformers, globaltensor as gt
transformers.logging.set_verbosity_error()
torch.manual_seed(5)
config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
model = transformers.GPT2LMHeadModel(config)         # whose first and last weight are one
folder = sys.argv[1]
for kind in ("plain", "global"):
    if kind == "global":
        model.to_global(gt.placement("cpu", [0, 1]), lambda name, t: gt.sbp.split(0) if t.dim() else gt.sbp.broadcast)
    if kind == "global" or gt.rank() == 0:
        model.save_pretrained(f"{folder}/{kind}")
        model.save_pretrained(f"{folder}/{kind}, in parts", max_shard_size="1KB")
        model.save_pretrained(f"{folder}/{kind}, of a state", state_dict=model.state_dict())
assert model.lm_head.weight.is_global and model.state_dict()["lm_head.weight"].is_global
try:                                                 # all ranks raise, and can go on
    model.save_pretrained(f"{folder}/plain/model.safetensors/folder")
except (NotADirectoryError, gt.GlobalTensorError) as error:
    assert gt.rank() == 0 or "rank 0 could not save" in str(error)
else:
    raise AssertionError("nothing was raised")
model.save_pretrained(f"{folder}/global")
"""


@pytest.mark.parametrize("start", [pytest.param([PYTHON], id="one process"), pytest.param(
    [*RUN, "-n", "2"], id="two processes", marks=[pytest.mark.long, pytest.mark.processes])])
def test_save_pretrained_of_a_global_model_writes_the_files_of_the_plain_one(tmp_path, start):
    pytest.importorskip("transformers")
    (tmp_path / "program.py").write_text(SAVES)
    good([*start, tmp_path / "program.py", tmp_path], environment(), timeout=120)
    for kind in ("", ", in parts", ", of a state"):
        plain, ours = ({path.name: path.read_bytes() for path in (tmp_path / f"{side}{kind}").iterdir()}
                       for side in ("plain", "global"))
        assert plain == ours and len(plain) == (8 if "parts" in kind else 3), (plain.keys(), ours.keys())


def test_our_safetensors_are_read_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(model_steps.SEED)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    want = {name: t.clone() for name, t in model.state_dict().items()}
    model_steps.weights_split(model)
    gt.save_safetensors(model, tmp_path)
    config.save_pretrained(tmp_path)
    got = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())


def test_a_library_that_saves_by_address_is_told_what_to_type():
    x = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.broadcast)
    with pytest.raises(GlobalTensorError, match=r"gt.save_safetensors\(model, folder\)"):
        x.untyped_storage().data_ptr()


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
