"""Trainers of others on global models, as they are installed: losses equal those of the program on one device."""
from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from harness import PYTHON, ROOT, RUN, compiled, environment, good, run

import globaltensor as gt

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate: pip install 'globaltensor[hf]'")
EXAMPLE = ROOT / "examples" / "trainer.py"
sys.path.insert(0, str(EXAMPLE.parent))


def said(text: str):
    """What the example prints at its end: losses, and the words that the model goes on with."""
    return ast.literal_eval(text.splitlines()[-1])


def same(ours, plain, bf16=False):
    assert ours[0] == pytest.approx(plain[0], rel=2e-2 if bf16 else 1e-4)
    assert bf16 or ours[1] == plain[1]


@pytest.mark.parametrize("options", [["--accumulate=2"], pytest.param(["--bf16"], marks=pytest.mark.long)], ids=str)
def test_transformers_trainer_in_one_process(options, tmp_path):
    import trainer

    plain = trainer.main(["--plain", "--steps=3", "--out", str(tmp_path / "plain"), *options])
    ours = trainer.main(["--steps=3", "--out", str(tmp_path / "ours"), *options])
    same(ours, plain, "--bf16" in options)
    import transformers

    loaded = [dict(transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).named_parameters())
              for name in ("plain", "ours")]
    if "--bf16" not in options:
        torch.testing.assert_close(loaded[1], loaded[0], rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_transformers_trainer_compiles_the_model(tmp_path, monkeypatch):
    """`TrainingArguments(torch_compile=True)` sets such a variable."""
    import trainer

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    plain, ours = (compiled(trainer.main, "--steps=3", "--out", tmp_path / f"out{len(options)}", *options)
                   for options in (["--plain"], []))
    same(ours, plain)


@pytest.mark.long
@pytest.mark.parametrize("n, grid", [(2, ("--dp=1", "--tp=2")), (4, ())])
def test_transformers_trainer_goes_on_after_it_was_killed(n, grid, tmp_path):
    """Ended after the third step, with a checkpoint of the second: the losses are those of one plain run."""
    options = ["--out", tmp_path / "out", *grid]
    code, _, _ = run([*RUN, "-n", n, EXAMPLE, *options, "--kill=3"], environment(), 400)
    assert code != 0 and (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()
    ours = said(good([*RUN, "-n", n, EXAMPLE, *options, "--resume"], timeout=400))
    plain = said(good([PYTHON, EXAMPLE, "--plain", "--out", tmp_path / "plain"], timeout=400))
    same(ours, plain)
    state = torch.load(tmp_path / "out" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert not any(getattr(t, "is_global", False) for one in state["state"].values() for t in one.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_transformers_trainer_with_gt_zero(stage, tmp_path):
    """As docs/bridges.md says it is typed. The trainer moves the model to its device, which it is on."""
    import transformers

    from globaltensor.trainers import huggingface

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.layer = torch.nn.Linear(4, 6).requires_grad_(False), torch.nn.Linear(6, 3)

        def forward(self, x, labels):
            logits = self.layer(self.frozen(x).tanh())
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": torch.full((4,), i / 8), "labels": i % 3} for i in range(8)]
    losses, weights = [], []
    for library in (transformers, huggingface):
        transformers.set_seed(1)
        model = Net()
        if library is huggingface:
            gt.parallelize(model, gt.placement("cpu", [0, 1], ("dp",)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        arguments = library.TrainingArguments(
            tmp_path, max_steps=4, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", use_cpu=True,
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False, gradient_accumulation_steps=2)
        trainer = library.Trainer(model, arguments, train_dataset=data, optimizers=(
            gt.zero(optimizer, stage=stage) if library is huggingface else optimizer, None))
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        weights.append([p.full_tensor() if library is huggingface else p.detach() for p in model.parameters()])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


def trained(library, model, folder, resume=None, **more):
    """A model after four steps, and what its trainer has logged; a checkpoint each two steps."""
    if library is not sys.modules["transformers"]:
        gt.parallelize(model, gt.placement("cpu", [0, 1], ("tp",)))
    rows = torch.randint(1, 32, (8, 6), generator=torch.Generator().manual_seed(5)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = library.TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, save_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **more)
    trainer = library.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def with_experts(seed):
    import transformers

    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1))


def with_adapters(seed):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = with_experts(0)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize("model_of", [with_experts, with_adapters])
def test_transformers_trainer_goes_on_with_experts_and_adapters(model_of, tmp_path):
    """transformers' own reads fused experts by their names in the files, and leaves them as they are."""
    import transformers

    from globaltensor.trainers import huggingface

    _, plain = trained(transformers, model_of(1), tmp_path / "plain")
    trained(huggingface, model_of(1), tmp_path)
    _, ours = trained(huggingface, model_of(2), tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert len(plain) == 4 and ours == pytest.approx(plain, rel=1e-4)


def test_transformers_trainer_takes_the_best_of_a_model_with_experts(tmp_path):
    import transformers

    from globaltensor.trainers import huggingface

    trainer, _ = trained(huggingface, with_experts(1), tmp_path, eval_strategy="steps", eval_steps=2,
                         load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    saved = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    own = {name: t.full_tensor() for name, t in trainer.model.state_dict().items()}
    torch.testing.assert_close(own, dict(saved), rtol=0, atol=0)


def test_errors_within_a_trainer_name_the_line_of_the_program(tmp_path):
    from globaltensor.trainers import huggingface

    gt.save_safetensors(torch.nn.Linear(2, 2), tmp_path / "checkpoint-2")
    with pytest.raises(gt.CheckpointError, match=rf"where: \S*{Path(__file__).name}:\d+"):
        trained(huggingface, with_experts(1), tmp_path, resume=str(tmp_path / "checkpoint-2"))


def test_what_a_trainer_cannot_do_says_what_to_type(tmp_path):
    import transformers

    from globaltensor.trainers import huggingface

    with pytest.raises(gt.ArgumentError, match=r"deepspeed(.|\n)*gt.zero"):
        huggingface.TrainingArguments(tmp_path, deepspeed={"zero_optimization": {"stage": 2}}, use_cpu=True)
    arguments = huggingface.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    with pytest.raises(gt.GlobalTensorError, match=r"plain parameters(.|\n)*gt.parallelize"):
        huggingface.Trainer(torch.nn.Linear(2, 2), arguments)
    with pytest.raises(gt.ArgumentError, match="TrainingArguments of transformers"):
        huggingface.Trainer(torch.nn.Linear(2, 2), transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[]))


def test_the_example_changes_three_lines():
    lines = [line for line in Path(EXAMPLE).read_text().splitlines() if line.rstrip().endswith(("# 1", "# 2", "# 3"))]
    assert len(lines) == 3
