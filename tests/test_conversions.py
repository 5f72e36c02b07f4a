"""Folders of transformers whose names are not its models': `gt.load_safetensors` reads what from_pretrained reads."""
from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from shards import B, P, gather, place

import globaltensor as gt
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.layouts.sbp import split as S

transformers = pytest.importorskip("transformers", "5", reason="transformers 5 is not installed")
WORDS = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 11, "num_experts": 11, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 8,
           "num_experts_per_tok": 2}
IMAGES = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "intermediate_size": 32}
MODELS = {  # by the name of its class, and what its files have
    "MixtralForCausalLM": (WORDS | EXPERTS, "model.layers.0.block_sparse_moe.experts.10.w1.weight"),
    "Qwen2MoeForCausalLM": (WORDS | EXPERTS, "model.layers.0.mlp.experts.10.up_proj.weight"),
    "GraniteMoeForCausalLM": (WORDS | EXPERTS, "model.layers.0.block_sparse_moe.input_linear.weight"),
    "SwinForImageClassification": (dict(image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2],
                                        window_size=4),
                                   "swin.encoder.layers.0.blocks.0.attention.self.query.weight"),
    "EsmForMaskedLM": (WORDS | dict(pad_token_id=1, mask_token_id=3), "esm.encoder.layer.0.LayerNorm.gamma"),
    "VideoMAEForVideoClassification": (IMAGES | dict(num_frames=2, tubelet_size=2),
                                       "videomae.encoder.layer.0.attention.attention.q_bias"),
    "CLIPVisionModel": (IMAGES, "vision_model.embeddings.class_embedding"),
}
LAYOUTS = {
    "plain": None,
    "S(0) of 3": ([0, 1, 2], (S(0),)),
    "P, last dim": ([[3, 1], [0, 2]], (P, S(-1))),
}


def model_of(name: str, seed: int, layout=None, device: str = "cpu") -> torch.nn.Module:
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    with torch.device(device):
        model = cls(cls.config_class(**MODELS[name][0]))
    with torch.no_grad():
        for t in model.state_dict().values():
            t.normal_()
    if layout is None:
        return model
    where, nd_sbp = place(layout[0]), layout[1]
    return model.to_global(where, lambda _, p: tuple(
        s if not s.is_split else S(0 if s.dim == 0 else p.dim() - 1) if p.dim() else B for s in nd_sbp))


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: gather(t.detach()) if t.is_global else t for name, t in model.state_dict().items()}


def check_same(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    own = values_of(model)
    assert own.keys() == values.keys() and not [name for name, t in own.items() if not torch.equal(t, values[name])]


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """What transformers saved of a model, its values, and the model's name. In many files, if it has experts."""
    model = model_of(request.param, 1)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert MODELS[request.param][1] in names or request.param.startswith("CLIP"), sorted(names)
    check_same(type(model).from_pretrained(tmp_path), values_of(model))
    return tmp_path, values_of(model), request.param


def test_it_reads_what_transformers_writes(saved):
    folder, values, name = saved
    for layout in LAYOUTS.values():
        model = model_of(name, 2, layout)
        before = model.state_dict(keep_vars=True)
        assert gt.load_safetensors(model, folder) is model
        check_same(model, values)
        assert all(t is before[key] for key, t in model.state_dict(keep_vars=True).items())


@pytest.mark.parametrize("name", MODELS)
def test_its_own_folders_are_read_as_they_are(name, tmp_path):
    model, other = (model_of(name, seed, LAYOUTS["S(0) of 3"]) for seed in (1, 2))
    gt.save_safetensors(model, tmp_path)
    gt.load_safetensors(other, tmp_path)
    check_same(other, values_of(model))


def test_a_model_on_the_meta_device_and_of_another_dtype(tmp_path):
    model = model_of("MixtralForCausalLM", 1)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        other = type(model)(model.config).bfloat16()
    gt.parallelize(other, place([0, 1]))
    gt.load_safetensors(other, tmp_path)
    check_same(other, {name: t.bfloat16() for name, t in values_of(model).items()})


@pytest.mark.parametrize("spoil, words", [
    (lambda t: t.pop("model.layers.0.block_sparse_moe.experts.10.w1.weight"), "gate_up_proj' cannot be made of"),
    (lambda t: [t.pop(f"model.layers.0.block_sparse_moe.experts.10.w{i}.weight") for i in (1, 2, 3)],
     "[11, 24, 16] in the state, [10, 24, 16] in the checkpoint"),
    (lambda t: t.pop("model.norm.weight"), "the state has a tensor 'model.norm.weight'"),
    (lambda t: t.update(more=torch.ones(2)), "has a tensor 'more', the state does not"),
    (lambda t: t.update({"model.layers.0.block_sparse_moe.experts.3.w2.weight": torch.ones(3, 3)}),
     "down_proj' cannot be made of"),
])
def test_what_does_not_fit_changes_nothing(spoil, words, tmp_path):
    model_of("MixtralForCausalLM", 1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = model_of("MixtralForCausalLM", 2, LAYOUTS["S(0) of 3"])
    before = values_of(model)
    with pytest.raises(CheckpointError) as error:
        gt.load_safetensors(model, tmp_path)
    assert words in str(error.value), error.value
    assert "in the checkpoint" in words or (
        "MixtralForCausalLM.from_pretrained(folder), then gt.parallelize" in str(error.value)), error.value
    check_same(model, before)
