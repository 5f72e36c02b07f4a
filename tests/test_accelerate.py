"""accelerate's loops on global models, as it is installed: losses equal those of the program on one device."""
from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from harness import PYTHON, ROOT, RUN, compiled, environment, good, good_all, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import globaltensor as gt

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'globaltensor[hf]'")
EXAMPLE = ROOT / "examples" / "accelerated.py"
sys.path.insert(0, str(EXAMPLE.parent))
WHERE = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))


@pytest.fixture(autouse=True)
def nothing_of_another_accelerator():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def said(text: str):
    """What the example prints at its end: losses, and words that the model says."""
    return ast.literal_eval(text.splitlines()[-1])


def same(ours, plain, rel=1e-6):
    assert ours[0] == pytest.approx(plain[0], rel=rel)
    assert rel > 1e-6 or ours[1] == plain[1]


def accelerator(**options):
    from globaltensor.trainers.accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def model(n=8):
    """An MLP on `WHERE`; its first and last weight are one."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n), nn.Linear(n, n))
    made[3].weight = made[0].weight
    return made


@pytest.mark.long
def test_a_compiled_model_has_the_losses_of_one_device(tmp_path, monkeypatch):
    import accelerated

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    plain, ours = (compiled(accelerated.main, "--out", tmp_path / f"out{len(options)}", *options)
                   for options in (["--plain"], []))
    same(ours, plain)


def test_losses_equal_those_on_one_device_and_the_saved_model_is_its(tmp_path):
    import accelerated

    plain = accelerated.main(["--plain", "--out", str(tmp_path / "plain")])
    ours = accelerated.main(["--out", str(tmp_path / "ours")])
    same(ours, plain)
    from safetensors.torch import load_file

    loaded = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "ours")]
    for one in loaded:                               # of k's biases the gradients are only rounding
        assert [one.pop(f"blocks.{i}.attention.k.bias").shape for i in range(2)]
    torch.testing.assert_close(loaded[1], loaded[0], rtol=1e-3, atol=1e-4)
    # one device goes on from what ranks have saved in the first epoch, and ranks from what it has
    for first, then in (["--plain"], []), ([], ["--plain"]):
        folder = str(tmp_path / "".join(["to", *then]))
        accelerated.EPOCHS, before = 1, accelerated.EPOCHS
        try:
            accelerated.main([*first, "--out", folder])
        finally:
            accelerated.EPOCHS = before
        same(accelerated.main([*then, "--out", folder, "--resume"]), plain)


@pytest.mark.long
@pytest.mark.parametrize("options", [["--bf16"], ["--accumulate=1", "--dp=4", "--tp=1"], ["--accumulate=4"]], ids=str)
def test_options(options, tmp_path):
    plain, ours = (said(out) for out in good_all(
        ([PYTHON, EXAMPLE, "--plain", "--out", tmp_path / "plain", *options], {}),
        ([PYTHON, EXAMPLE, "--out", tmp_path / "ours", *options], {}), timeout=400))
    same(ours, plain, 2e-2 if "--bf16" in options else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("n, grid", [(2, ("--dp=1", "--tp=2")), (4, ())])
def test_goes_on_after_it_was_killed(n, grid, tmp_path):
    """Ended after batch 7, where batch 4 was the last one saved; then on another number of ranks."""
    code, _, _ = run([*RUN, "-n", n, EXAMPLE, "--out", tmp_path / "out", *grid, "--kill=7"], environment(), 400)
    assert code != 0 and (tmp_path / "out" / "optimizer.bin").is_file()
    (tmp_path / "out" / "random_states_1.pkl").unlink()                # all have those of the first
    ours = said(good([*RUN, "-n", 4, EXAMPLE, "--out", tmp_path / "out", "--resume"], timeout=400))
    same(ours, said(good([PYTHON, EXAMPLE, "--plain", "--out", tmp_path / "plain"], timeout=400)))
    state = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    assert not any(getattr(t, "is_global", False) for one in state["state"].values() for t in one.values())


def test_dropout_goes_on_as_it_would_have(tmp_path):
    net = gt.parallelize(model(), WHERE)
    ours = accelerator()
    net = ours.prepare(net)

    def drops():
        return nn.functional.dropout(net(torch.ones(3, 8)), 0.5).full_tensor()

    drops()
    ours.save_state(tmp_path)
    expected = drops()
    assert not torch.equal(drops(), expected)
    ours.load_state(tmp_path)
    assert torch.equal(drops(), expected)


@pytest.mark.parametrize("safe", [True, False])
def test_two_models_with_tied_weights_and_zero_are_saved_and_loaded(safe, tmp_path):
    def start():
        both = [gt.parallelize(model(n), WHERE) for n in (8, 6)]
        optimizers = [gt.zero(torch.optim.AdamW(one.parameters(), lr=0.1)) for one in both]
        ours = accelerator()
        prepared = ours.prepare(*both, *optimizers)
        return ours, prepared[:2], prepared[2:]

    def step(ours, models, optimizers):
        for one, optimizer in zip(models, optimizers):
            ours.backward(one(torch.ones(3, one[0].in_features)).square().mean())
            assert not ours.clip_grad_norm_(one.parameters(), 1.0).is_global
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().full_tensor() for one in models for p in one.parameters()]

    first, second = start(), start()
    step(*first)
    first[0].save_state(tmp_path, safe_serialization=safe)
    expected = step(*first)
    second[0].load_state(tmp_path)
    torch.testing.assert_close(step(*second), expected)


def test_what_one_device_sees_of_batches_and_values():
    data = TensorDataset(torch.arange(28.).view(7, 4), torch.arange(7))
    ours = accelerator()
    net, loader = ours.prepare(gt.parallelize(nn.Linear(4, 2), WHERE), DataLoader(data, batch_size=3))
    assert (len(loader), ours.num_processes, ours.is_main_process) == (3, 1, True)
    assert ours.prepare(loader) is loader
    rows = []
    for x, i in loader:
        assert x.is_global and x.sbp == (gt.sbp.split(0), gt.sbp.broadcast)
        got = ours.gather_for_metrics({"y": net(x), "i": i, "names": ["a"]})
        assert not got["y"].is_global and got["names"] == ["a"]
        rows += got["i"].tolist()
    assert rows == list(range(7))
    assert [i.full_tensor().tolist() for _, i in ours.skip_first_batches(loader, 1)] == [[3, 4, 5], [6]]
    assert ours.reduce(net(x).sum()).shape == ours.gather(net(x).sum()).shape == ()


@pytest.mark.parametrize("options, message", [
    (dict(device_placement=True), r"device_placement=True(.|\n)*without it"),
    (dict(parallelism_config=object()), r"parallelism_config(.|\n)*axes of the placement"),
    (dict(deepspeed_plugin=object()), r"deepspeed_plugin(.|\n)*gt.zero\(optimizer, stage=1\)"),
    (dict(fsdp_plugin=object()), r"fsdp_plugin(.|\n)*gt.zero\(optimizer, stage=3\)"),
    (dict(megatron_lm_plugin=object()), "megatron_lm_plugin"),
    (dict(dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True)), "dispatch_batches"),
])
def test_what_an_accelerator_cannot_do_says_what_to_type(options, message):
    with pytest.raises(gt.ArgumentError, match=message):
        accelerator(**options)


def test_wrong_programs(tmp_path, monkeypatch):
    plain = nn.Linear(2, 2)
    made = gt.parallelize(nn.Linear(2, 2), WHERE)
    ours = accelerator()
    with pytest.raises(gt.GlobalTensorError, match=r"plain parameters(.|\n)*gt.parallelize"):
        ours.prepare(plain)
    with pytest.raises(gt.GlobalTensorError, match=r"SGD of plain parameters(.|\n)*gt.parallelize"):
        ours.prepare(torch.optim.SGD(plain.parameters()))
    with pytest.raises(gt.ArgumentError, match="device_placement"):
        ours.prepare(made, device_placement=[True])
    with pytest.raises(gt.GlobalTensorError, match=r"before a model was prepared(.|\n)*accelerator.prepare\(model"):
        next(iter(ours.prepare(DataLoader(torch.ones(4, 2)))))
    with pytest.raises(gt.GlobalTensorError, match=r"offloaded(.|\n)*test_accelerate.py"):
        ours.prepare(accelerate.cpu_offload(nn.Linear(2, 2), torch.device("cpu")))
    ours.prepare(made)
    (tmp_path / "random_states_0.pkl").touch()
    with pytest.raises(gt.ArgumentError, match="neither model.safetensors nor pytorch_model.bin"):
        ours.load_state(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(gt.ArgumentError, match=r"ACCELERATE_USE_FSDP(.|\n)*globaltensor run"):
        accelerator()


def test_the_example_changes_three_lines():
    lines = [line for line in Path(EXAMPLE).read_text().splitlines() if line.rstrip().endswith(("# 1", "# 2", "# 3"))]
    assert len(lines) == 3
