"""Lightning's Trainer on global models, as it is installed: losses equal those of the program on one device."""
from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from harness import PYTHON, ROOT, RUN, environment, good, run
from torch import nn

import globaltensor as gt

lightning = pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'globaltensor[lightning]'")
EXAMPLE = ROOT / "examples" / "lightning_trainer.py"
sys.path.insert(0, str(EXAMPLE.parent))
WHERE = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))


def same(ours, plain, rel=1e-6):
    """Losses, what validation said, and what the model predicts."""
    assert ours[0] == pytest.approx(plain[0], rel=rel) and ours[1] == pytest.approx(plain[1], rel=rel)
    assert rel > 1e-6 or ours[2] == plain[2]


def said(text: str):
    return ast.literal_eval(text.splitlines()[-1])


def strategy(*args, **options):
    from globaltensor.trainers.lightning import GlobalTensorStrategy

    return GlobalTensorStrategy(*args, **options)


def trainer(folder, chosen, **options):
    return lightning.Trainer(**{**dict(accelerator="cpu", devices=1, strategy=chosen, max_steps=2, logger=False,
                                       enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                                       enable_checkpointing=False), **options})


class Line(lightning.LightningModule):
    """A layer, stepped by ZeRO where it is global."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, index):
        assert not self.layer.weight.is_global or batch.is_global
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return gt.zero(optimizer) if self.layer.weight.is_global else optimizer


@pytest.mark.parametrize("options", [[], pytest.param(["--accumulate=1", "--dp=4", "--tp=1"], marks=pytest.mark.long),
                                     pytest.param(["--precision=bf16-mixed"], marks=pytest.mark.long)], ids=str)
def test_losses_equal_those_on_one_device_and_either_goes_on(options, tmp_path):
    import lightning_trainer

    rel = 2e-2 if "--precision=bf16-mixed" in options else 1e-6
    plain = lightning_trainer.main(["--plain", "--out", str(tmp_path / "plain"), *options])
    ours = lightning_trainer.main(["--out", str(tmp_path / "ours"), *options])
    same(ours, plain, rel)
    for name, then in (("plain", []), ("ours", ["--plain"])):
        lightning_trainer.EPOCHS, before = 4, lightning_trainer.EPOCHS
        try:                                         # a further epoch, from what the other one has saved
            more = lightning_trainer.main([*then, "--out", str(tmp_path / name), "--resume", *options])
        finally:
            lightning_trainer.EPOCHS = before
        assert len(more[0]) == 6
        if name == "plain":
            first = more
    same(first, more, rel)
    state = torch.load(tmp_path / "ours" / "last.ckpt", weights_only=True)
    assert not any(getattr(t, "is_global", False) for t in state["state_dict"].values())


@pytest.mark.long
@pytest.mark.parametrize("n, grid", [(2, ("--dp=1", "--tp=2")), (4, ())])
def test_goes_on_after_it_was_killed(n, grid, tmp_path):
    """Ended in the second epoch, with a checkpoint of the first; then on another number of ranks."""
    code, _, _ = run([*RUN, "-n", n, EXAMPLE, "--out", tmp_path / "out", *grid, "--kill=4"], environment(), 400)
    assert code != 0 and (tmp_path / "out" / "last.ckpt").is_file()
    ours = said(good([*RUN, "-n", 4, EXAMPLE, "--out", tmp_path / "out", "--resume"], timeout=400))
    plain = said(good([PYTHON, EXAMPLE, "--plain", "--out", tmp_path / "plain"], timeout=400))
    same(ours, (plain[0][6:], *plain[1:]))


def test_zero_and_a_module_that_is_global_by_then(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(7, 4), batch_size=4)
    modules = [Line(), Line(), gt.parallelize(Line(), WHERE)]
    for module, chosen in zip(modules, ["auto", strategy(WHERE), strategy()]):
        trainer(tmp_path, chosen).fit(module, data)
    plain = modules[0].layer.weight.detach()
    for module in modules[1:]:
        torch.testing.assert_close(module.layer.weight.detach().full_tensor(), plain)


def test_metrics_of_the_module_do_not_add_up_over_ranks(tmp_path):
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
    module = Line()
    module.seen = metrics.SumMetric()
    trainer(tmp_path, strategy(WHERE)).fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    assert module.seen.distributed_available_fn() is False


@pytest.mark.parametrize("options, message", [
    (dict(devices=4), r"devices=4(.|\n)*Trainer\(devices=1\)"), (dict(num_nodes=2), "num_nodes=2")])
def test_what_a_strategy_cannot_do_says_what_to_type(options, message, tmp_path):
    with pytest.raises(gt.ArgumentError, match=message):
        trainer(tmp_path, strategy(WHERE), **options)


def test_wrong_programs(tmp_path):
    with pytest.raises(gt.ArgumentError, match="GlobalTensorStrategy on no placement"):
        strategy("ddp")
    with pytest.raises(gt.GlobalTensorError, match=r"Line of plain parameters(.|\n)*gt.parallelize"):
        trainer(tmp_path, strategy()).fit(Line(), torch.utils.data.DataLoader(torch.randn(7, 4)))


def test_the_example_changes_two_lines():
    lines = [line for line in Path(EXAMPLE).read_text().splitlines() if "GlobalTensorStrategy" in line]
    assert len(lines) == 2
