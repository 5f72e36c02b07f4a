"""The examples do what they say, in one process and in many, and give what plain torch gives.

Run as a program (`globaltensor run -n 2 tests/test_examples.py NAME ...`) this file checks examples by name.
"""
from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import RUN, TORCHRUN, good

import globaltensor as gt

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import gpt  # noqa: E402
import train_gpt  # noqa: E402

split, broadcast, partial_sum = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum


def same(got, expected):
    assert got.is_global
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-6, atol=1e-6)


def whole(run, *names):
    """The whole values of a program's global tensors."""
    return [run[name].detach().full_tensor() for name in names]


def check_first(run):
    x, w = whole(run, "x", "w")
    w.requires_grad_()
    loss = ((x @ w) ** 2).mean()
    loss.backward()
    same(run["y"], (x @ w).detach())
    same(run["w"].grad, w.grad)
    same(run["step"], (w - 0.1 * w.grad).detach())
    assert run["value"] == loss.item() == 25.0 and run["y"].sbp == (split(0),)
    assert [m.op for m in run["moves"] if m.bytes] == ["gradient"]


def check_one_matmul(dim):
    def check(run):
        x, w = whole(run, "x", "w")
        same(run["out"], x @ w)
        assert run["out"].shape == (4, 8) and run["out"].sbp == (split(dim),)
    return check


def check_pipeline(run):
    x, w0, w1 = gt.from_local(run["x"], run["P0"], broadcast).full_tensor(), *whole(run, "w0", "w1")  # x of rank 0
    w0.requires_grad_(), w1.requires_grad_()
    out = x @ w0 @ w1
    out.sum().backward()
    same(run["out1"].detach(), out.detach())
    for name, plain in (("w0", w0), ("w1", w1)):
        same(run[name].grad, plain.grad)
        assert run[name].grad.placement == run[name].placement
    assert run["out0"].placement == run["P0"] and run["out1"].placement == run["P1"]


def check_hybrid(run):
    x, up, down = whole(run, "x", "up", "down")
    same(run["hidden"], x @ up)
    same(run["out"], x @ up @ down)
    assert run["hidden"].sbp == (split(0), split(1)) and run["partial"].sbp == (split(0), partial_sum)
    assert [(m.op, m.bytes) for m in run["moves"]] == [("to_global", 2 * 6 * 4)]


CHECKS = {"first": check_first, "matmul_data_parallel": check_one_matmul(0),
          "matmul_model_parallel": check_one_matmul(1),
          "matmul_pipeline_parallel": check_pipeline, "hybrid_matmul": check_hybrid}


def check(name):
    CHECKS[name](runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__"))


@pytest.mark.parametrize("name", CHECKS)
def test_programs(name):
    check(name)


def test_the_first_program_prints_the_same_every_time(capfd):
    check("first")
    assert capfd.readouterr().out == ("torch.Size([4, 8]) (S(0),)\n25.0\ngradient (P,) -> (B,) 160 bytes\n")


# ------------------------------------------------------------------------------------------------------ train_gpt.py

TINY = "--steps 3 --layers 2 --hidden 16 --heads 2 --seq 12 --batch 4 --sample 4".split()
GRIDS = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]


def on(dp, tp, pp, *more):
    return train_gpt.parse([*TINY, "--dp", str(dp), "--tp", str(tp), "--pp", str(pp), *more])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_training_equals_plain_torch(grid):
    losses, difference = train_gpt.train(on(*grid, "--verify"))
    assert difference < 1e-5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("more", [
    "--tied", "--accumulate=2", "--heads=1", "--batch=3", "--sp", "--zero=1", "--zero=2 --accumulate=2", "--zero=3",
    "--recompute", "--tied --zero=1", "--sp --zero=1 --recompute --accumulate=2"])
def test_training_with_options_equals_plain_torch(more):
    assert train_gpt.train(on(2, 2, 1, "--verify", *more.split()))[1] < 1e-5


@pytest.mark.parametrize("more", ["--sp", "--zero=1", "--zero=3 --recompute"])
def test_options_with_a_pipeline(more):
    assert train_gpt.train(on(1, 2, 2, "--verify", *more.split()))[1] < 1e-5


def test_16_bits_train_as_plain_torch_does_in_16_bits():
    assert train_gpt.train(on(2, 2, 1, "--verify", "--amp"))[1] < train_gpt.TOLERANCE_AMP


def test_dropout_drops_the_same_in_every_layout():
    one, *others = (train_gpt.train(on(*grid, "--dropout=0.2"))[0] for grid in [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
    for losses in others:
        assert losses == pytest.approx(one, rel=1e-5)


def test_the_last_step_becomes_a_page(tmp_path, capsys):
    train_gpt.train(on(2, 2, 1, "--report", str(tmp_path / "run.html")))
    page, said = (tmp_path / "run.html").read_text(), capsys.readouterr().out
    assert "gpt.py:" in page and "Bytes by line" in page and f"{tmp_path / 'run.html'}: 1 timeline" in said
    with pytest.raises(SystemExit, match="ends in .html"):
        on(2, 2, 1, "--report", "run.txt")


def test_the_report_names_every_parameter_and_what_moved(capsys):
    train_gpt.train(on(2, 2, 1))
    said = capsys.readouterr().out
    for name, _ in gpt.GPT(256, 12, 2, 16, 2).named_parameters():
        assert name.replace("blocks.0.", "blocks.0-1.").replace("blocks.1.", "blocks.0-1.") in said
    for line in ("(B, S(1))", "gradient", "Loss: ", "A sample:"):
        assert line in said


@pytest.mark.parametrize("options, message", [
    (["--heads=3"], "--heads 3 does not divide --hidden 128"),
    (["--accumulate=3"], "--accumulate 3 does not divide --batch 16"),
    (["--pp=5"], "--pp 5 stages of --layers 4"),
    (["--pp=2", "--tied"], "--tied needs"),
    (["--dropout=0.1", "--verify"], "--verify needs --dropout 0"),
    (["--data=/no/such/file"], "--data /no/such/file is not a file"),
    (["--steps=0"], "'0' is not a whole number of at least 1"),
    (["--depth=1"], "--depth"),
], ids=str)
def test_bad_options_end_with_one_line(options, message):
    with pytest.raises(SystemExit) as end:
        train_gpt.parse(options)
    assert message in end.value.code and "\n" not in end.value.code


def test_the_wrong_number_of_ranks_ends_with_one_line():
    size = gt.world_size()
    with pytest.raises(SystemExit) as end:
        train_gpt.main([*TINY, "--dp", str(size + 1), "--tp", "1"])
    assert f"{size + 1} ranks" in end.value.code and "\n" not in end.value.code


def test_the_model_knows_nothing_of_parallelism():
    text = Path(gpt.__file__).read_text()
    assert "globaltensor" not in text and "import gt" not in text


# --------------------------------------------------------------------------------------------------------- processes

@pytest.mark.processes
@pytest.mark.parametrize("n", [2, 4])
def test_programs_in_processes(n):
    names = [name for name in CHECKS if (name == "hybrid_matmul") == (n == 4)]
    said = good([*RUN, "-n", n, __file__, *names])
    assert all(f"{name} is right on rank 0" in said for name in names)


@pytest.mark.processes
@pytest.mark.parametrize("launcher, grid, more", [
    ([*RUN, "-n"], (2, 2, 1), ()),
    pytest.param([*TORCHRUN, "--standalone", "--nproc-per-node"], (2, 1, 2), (), marks=pytest.mark.long),
    pytest.param([*RUN, "-n"], (2, 2, 1), ("--sp", "--zero=2", "--recompute"), marks=pytest.mark.long)])
def test_training_in_processes(launcher, grid, more):
    axes = [word for name, n in zip(("--dp", "--tp", "--pp"), grid) for word in (name, str(n))]
    said = good([*launcher, 4, EXAMPLES / "train_gpt.py", *TINY, *axes, *more, "--verify"], timeout=200)
    assert said.count("The largest relative difference to plain torch") == 1     # one rank prints


# ----------------------------------------------------------------------------------------------- finetune_llama.py


@pytest.fixture
def finetune_llama():
    pytest.importorskip("transformers")
    import finetune_llama
    return finetune_llama


def plain_losses(module, steps, folder):
    """The same training by plain torch, of batches read from the same loader on one rank."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(module.make(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    loader = gt.data.DataLoader(module.Text(), module.BATCH, gt.placement("cpu", [0]), split(0), shuffle=True,
                                tail="drop")
    for ids in itertools.islice(loader, steps):
        ids = ids.full_tensor()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_a_llama_is_fine_tuned_as_by_plain_torch(finetune_llama, grid, tmp_path):
    from transformers import AutoModelForCausalLM

    losses = finetune_llama.main([*"--steps 4 --dp {} --tp {}".format(*grid).split(), "--out", str(tmp_path / "out")])
    assert losses == pytest.approx(plain_losses(finetune_llama, 4, tmp_path / "made"), rel=1e-4)
    tuned, made = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "made"))
    for p, q in zip(tuned.parameters(), made.parameters()):
        assert p.shape == q.shape and not p.equal(q)


@pytest.mark.long
@pytest.mark.processes
def test_a_llama_is_fine_tuned_in_processes(finetune_llama):
    said = good([*RUN, "-n", 2, EXAMPLES / "finetune_llama.py", "--steps", 3, "--dp", 1])
    assert said.count("step   3") == 1


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(name)
        print(f"{name} is right on rank {gt.rank()}")


def test_grids_move_what_is_published():
    said = subprocess.run([sys.executable, EXAMPLES / "grids.py"], env={**os.environ, "GLOBALTENSOR_RANKS": "8"},
                          capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    rows = [line.split() for line in said.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1D", "2D", "2.5D", "3D"]
    for row in rows:
        assert float(row[row.index("moved") + 1]) == float(row[-1]), said.stdout
