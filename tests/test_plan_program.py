"""`globaltensor plan --program FILE.py:FUNCTION`: any model planned from the command line, and what is wrong said."""
from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import nn

import globaltensor as gt
from globaltensor.cli import main
from globaltensor.planner.graph import CaptureError

PROGRAM = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    print("what a program prints is not part of the plan")

    class Residual(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Looks(nn.Linear):
        def forward(self, x):
            return x if x.sum().item() > 0 else super().forward(x)

    def build():
        model = nn.Sequential(nn.Linear(8, 16), *[Residual(16) for _ in range(2)], nn.Linear(16, 4))
        return model, torch.zeros(8, 8), lambda y: y.square().mean()

    def with_targets():
        return nn.Linear(8, 4), torch.zeros(8, 8), F.mse_loss, torch.zeros(8, 4)

    def raises():
        raise ValueError("no data")

    def needs(path):
        return path

    def looks():
        return Looks(4, 4), torch.zeros(4, 4), None

    def forgets():
        return nn.Linear(8, 4), torch.zeros(8, 8), F.mse_loss

    def one():
        return nn.Linear(8, 4)

    def two():
        return nn.Linear(8, 4), torch.zeros(8, 8)

    def no_module():
        return 1, torch.zeros(8, 8), None

    def no_loss():
        return nn.Linear(8, 4), torch.zeros(8, 8), 3
"""


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit(3)\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "bytes.py").write_bytes(b"x = 0\0")
    (tmp_path / "latin.py").write_bytes(b"x = '\xfc'\n")

    def said(words: str):
        try:
            code = main(["plan", *words.split()])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return said


def test_a_program_is_planned_explained_and_drawn(said, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = said("--program train.py:build --devices 4 --global-batch 16 --dp 2 --tp 2 --schedule 1f1b "
                          "--zero 0 --pin *.up.*=tp:S(0) --pin *.down.weight=tp:S(1) --recompute none --seconds 30 "
                          "--json --explain --plot plan.svg --save plan.json --memory 1GB")
    one = gt.Strategy(json.loads(out))
    one.check()
    assert code == 0 and "what a program prints" in err and gt.Strategy.load("plan.json") == one
    stage, = one["stages"]
    assert stage["axes"] == {"dp": 2, "tp": 2} and one["global_batch"] == 16 and one["memory"]["device"] == 1e9
    assert stage["plan"]["*.up.*"] == {"tp": "S(0)"} and stage["recompute"] == "none" and stage["zero"] == 0
    told = one["explanation"]
    assert {row["choice"] for row in told["fixed"]} == {"dp", "tp", "ZeRO", "recompute", "schedule", "pin"}
    pins = [row for row in told["fixed"] if row["choice"] == "pin"]
    assert [row["fixed"] for row in pins] == ["*.up.*=tp:S(0)", "*.down.weight=tp:S(1)"]
    assert all(row["costs"] >= 0 for row in told["fixed"] if row["without"]) and told["plain_dp"]["fits"]
    picture = (tmp_path / "plan.svg").read_text()
    assert "candidates" in picture and "timetable" in picture and "lower bound" in picture


def test_the_explanation_names_the_fastest_that_differs():
    """Beside searches in which the choice is fixed to each other value."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    on = {"devices": 2, "tp": 1, "recompute": "none"}
    one = gt.strategy(model, torch.zeros(8, 16), explain=True, **on)
    rows = {row["choice"]: row for row in one["explanation"]["choices"]}
    step = one["step_time"]
    shape = one["stages"][0]["axes"]["dp"], len({tuple(stage["ranks"]) for stage in one["stages"]})
    for k, name in enumerate(("dp", "pp")):
        others = [gt.strategy(model, torch.zeros(8, 16), **on, **{name: n})["step_time"] for n in (1, 2)
                  if n != shape[k]]
        assert rows[name]["step_time"] == pytest.approx(min(others)) and rows[name]["costs"] >= 0
    free = gt.strategy(model, torch.zeros(8, 16), devices=2, recompute="none")["step_time"]
    cost, = [row["costs"] for row in one["explanation"]["fixed"] if row["choice"] == "tp"]
    assert cost == pytest.approx(max(step - free, 0.0))
    plain = gt.strategy(model, torch.zeros(8, 16), devices=2, dp=2, tp=1, pp=1, zero=0)["step_time"]
    assert one["explanation"]["plain_dp"]["step_time"] == pytest.approx(plain)


def test_a_loss_takes_targets_where_there_are_some(said):
    code, out, _ = said("--program train.py:with_targets --devices 1")
    assert code == 0 and "one device" in out


@pytest.mark.parametrize("words, told", [
    ("train.py", "names no function\n  why: it is FILE.py:FUNCTION\n  try: --program train.py:build"),
    ("tain.py:build", "there is no file tain.py\n  try: --program train.py:build"),
    ("train.py:biuld", "has no function 'biuld'"), ("train.py:biuld", "--program train.py:build"),
    ("exits.py:build", "where: exits.py:3\n  why: SystemExit: 3"), ("broken.py:build", "broken.py:1"),
    ("train.py:raises", "where: train.py:28\n  why: ValueError: no data"),
    ("train.py:needs", "missing 1 required positional argument"),
    ("train.py:needs", "where: train.py:30\n"), ("train.py:Residual", "where: train.py\n  why: TypeError: "),
    ("bytes.py:build", "where: bytes.py\n  why: SyntaxError: "),
    ("latin.py:build", "latin.py:1\n  why: SyntaxError: (unicode error)"),
    ("train.py:looks", "where: train.py:18"), ("train.py:forgets", "try: inputs, targets and a loss that fit"),
    ("train.py:one", "returns a Linear"), ("train.py:two", "returns 2 values"),
    ("train.py:no_module", "returns an int first"), ("train.py:no_loss", "returns an int third"),
    ("train.py:build --dp 3", "try: --global-batch 6"), ("train.py:build --tp 8", "try: --devices 8"),
    ("train.py:build --pp 4 --chunks 2", "try: --pp 2"), ("train.py:build --pin up", "cannot be read"),
    ("train.py:build --pin *.up.bias=tp:S(1)", "no rule allows it"), ("train.py:one --heads 2", "takes no --heads"),
    ("train.py:build --plot plan.doc", "plan.doc could not be written"),
    ("train.py:build --save /nowhere/plan.json", "could not be written"),
    ("train.py:build --cluster dgx", "no cluster"),
])
def test_what_is_wrong_with_a_program_is_said(said, tmp_path, words, told):
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    devices = "1" if "--save" in words or "--plot" in words else "4"
    code, out, err = said(f"--devices {devices} --program {words}")
    assert code in (1, 2) and out == "" and "Traceback" not in err
    assert told in err


def test_a_program_needs_devices(said):
    assert "which --devices?" in said("--program train.py:build")[2]


def test_a_model_of_layers_alone_has_no_line_of_its_own(said):
    _, _, err = said("--program train.py:forgets --devices 1")
    assert "where:" not in err and "fit the model" in err


def test_targets_that_are_missing_are_no_values_that_are_looked_at():
    with pytest.raises(CaptureError, match="fit the model"):
        gt.strategy(nn.Linear(4, 4), torch.zeros(4, 4), devices=1, loss=nn.functional.mse_loss)


def test_a_batch_that_replicas_do_not_divide_is_said_to_be_the_reason():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    one = gt.strategy(model, torch.zeros(7, 8), devices=3, explain=True)
    assert one["explanation"]["plain_dp"] == {
        "fits": False, "why": "3 replicas of equal micro-batches do not divide the batch"}
