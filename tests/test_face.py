"""`gt`: our names before torch's, every module of ours where its import says, and a wrong name blamed on us."""
from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import pathlib
import subprocess
import sys
import types

import pytest
import torch
from harness import RUN, good

import globaltensor as gt
from globaltensor.errors import ArgumentError

PACKAGE = pathlib.Path(gt.__file__).parent
MODULES = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
                 for path in PACKAGE.rglob("*.py") if "bundled" not in path.parts and path.stem != "__main__")
ROOMS = {name.split(".")[1] for name in MODULES if "." in name}
OF_AN_EXTRA = {"globaltensor.trainers.huggingface": "transformers", "globaltensor.trainers.accelerate": "accelerate",
               "globaltensor.trainers.lightning": "lightning"}
GRID = gt.placement("cpu", [0, 1])


def public(module: types.ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def test_every_module_is_where_its_import_says():
    """`import globaltensor.x.y as m` goes through the attributes of what is above it."""
    code = "".join(f"import {name} as m; assert m.__name__ == {name!r}, {name!r}\n" for name in MODULES
                   if importlib.util.find_spec(OF_AN_EXTRA.get(name, "torch")))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_no_room_hides_a_name_of_torch_or_one_of_ours():
    assert not [room for room in ROOMS if hasattr(torch, room)]
    assert {room for room in ROOMS if room in gt.FACE} == {"data", "dtensor", "rules"}, "but for the public ones"


def test_every_name_of_ours_is_there_and_every_other_is_torchs():
    for name, home in gt.FACE.items():
        value = getattr(gt, name)
        module = value if isinstance(value, types.ModuleType) else importlib.import_module(home)
        assert value is module or value is getattr(module, name)
    for name in public(torch):
        if name not in gt.FACE:
            assert getattr(gt, name) is getattr(torch, name), name
    assert isinstance(gt.onnx, types.ModuleType)     # torch loads it when it is asked for


@pytest.mark.parametrize("name", ["layout", "library", "testing", "export", "nn", "optim", "manual_seed", "float32"])
def test_these_are_torchs(name):
    assert getattr(gt, name) is getattr(torch, name)


def test_what_dir_shows():
    shown = dir(gt)
    assert set(gt.FACE) <= set(shown) and set(public(torch)) <= set(shown)
    assert gt.__all__ == sorted(gt.FACE)
    assert not [name for name in shown if name in ROOMS and name not in gt.FACE], "rooms of ours are not public"
    assert "annotations" not in shown and shown == sorted(set(shown))


@pytest.mark.parametrize("name, near", [("spilt", "split"), ("S", "sbp.split"), ("placment", "placement"),
                                        ("spb", "sbp"), ("from_ful", "from_full"), ("matmull", "matmul"),
                                        ("Lineer", None), ("qqqq", None)])
def test_a_wrong_name_is_blamed_on_us(name, near):
    with pytest.raises(AttributeError) as caught:
        getattr(gt, name)
    text = str(caught.value)
    assert text.startswith(f"module 'globaltensor' has no attribute '{name}'")
    assert near is None or text.endswith(f"; did you mean '{near}'?")
    with pytest.raises(ImportError, match="globaltensor"):
        exec(f"from globaltensor import {name}")


def test_type_checkers_are_shown_the_same_names():
    """The imports under TYPE_CHECKING name what FACE names, from where FACE has it."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    told = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
            if alias.name != "*"}
    assert told == gt.FACE


# ------------------------------------------------------------------------------------------------ a file or a folder


def state():
    return {"w": gt.arange(6.0, placement=GRID, sbp="S(0)"), "nested": [gt.ones(2, placement=GRID, sbp="P"), 3]}


def same(loaded):
    assert type(loaded["w"]) is torch.Tensor and loaded["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["nested"][0].tolist() == [1, 1] and loaded["nested"][1] == 3


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_file_is_torchs(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    assert gt.save(state(), path) is None
    same(torch.load(path))
    same(gt.load(path))
    same(gt.load(str(path), map_location="cpu"))


def test_a_file_object_is_torchs():
    file = io.BytesIO()
    gt.save(state(), file)
    file.seek(0)
    same(gt.load(file))


def test_a_state_dict_goes_into_a_file_and_back(tmp_path):
    model = gt.parallelize(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)), GRID)
    gt.save(model.state_dict(), tmp_path / "model.pt")
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(plain[0].weight, model[0].weight.full_tensor())
    with torch.no_grad():
        plain[0].weight.mul_(2)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(plain[0].weight, model[0].weight.full_tensor())


def test_tied_tensors_stay_one_in_a_file(tmp_path):
    x = gt.ones(4, placement=GRID, sbp="S(0)")
    gt.save({"a": x, "b": x}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_a_folder_is_ours(tmp_path):
    pytest.importorskip("safetensors")
    for folder in (tmp_path / "run", tmp_path / "step.10", tmp_path / "is_there.pt"):
        (tmp_path / "is_there.pt").mkdir(exist_ok=True)
        assert gt.save(state(), folder).path.parent == folder
        fresh = {"w": gt.zeros(6, placement=GRID, sbp="B"), "nested": [gt.zeros(2, placement=GRID, sbp="B"), 0]}
        loaded = gt.load(fresh, folder)
        assert loaded["w"] is fresh["w"] and fresh["w"].tolist() == [0, 1, 2, 3, 4, 5] and loaded["nested"][1] == 3


def test_what_only_a_folder_takes(tmp_path):
    with pytest.raises(ArgumentError, match="takes no asynchronous="):
        gt.save(state(), tmp_path / "x.pt", asynchronous=True)


@pytest.mark.processes
def test_processes_save_one_file(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, globaltensor as gt\n"
        "P = gt.placement.all('cpu')\n"
        "gt.save({'w': gt.arange(5.0, placement=P, sbp='S(0)')}, sys.argv[1])\n"
        "assert gt.load(sys.argv[1])['w'].tolist() == [0, 1, 2, 3, 4]\n")
    good([*RUN, "-n", "2", program, tmp_path / "x.pt"], timeout=120)
