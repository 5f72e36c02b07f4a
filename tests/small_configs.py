"""Small random models of the architectures of `transformers`: a config shrunk by rules, and inputs it accepts.

An architecture names its sizes as it likes, but most names are shared. `SIZES` says how large what a name says may be;
lists shrink with it. `attempts` yields ways to shrink, the smallest first; the first whose model runs is taken.
"""
from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SIZES = (  # names of whole words between underscores, the first that fits; the size of a model that has it
    (r".*(bucket|factor|ratio|mult|expansion).*", None),
    (r"vocab_size|.*_vocab_size", 96),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|.*_num_key_value_heads", 2),
    (r"(.*_)?(num_)?(attention_)?n?_?heads?|.*num_heads|.*_n_heads?|n_heads?|.*attention_heads", 4),
    (r"qk_head_dim", 16),
    (r"head_dim|.*_head_dim|d_kv|dim_head|v_head_dim|attention_head_dim|attention_head_size|kv_channels", 8),
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|residual_)?(n_)?layers?|depth|n_layer|.*_num_layers|.*_depth", 2),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dim_feedforward|mlp_dim|intermediate_dim|d_inner)", 64),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k|moe_k", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"image_size|.*_image_size|input_size", 32),
    (r"patch_size", 8),
    (r"temporal_patch_size", 1),
    (r"(max_)?(position_embeddings|n_positions|max_position_embeddings|max_seq_len|n_ctx)", 64),
    (r"max_source_positions|max_target_positions|context_length", 64),
    (r"num_mel_bins|feature_size|mel_dim", 16),
    (r"num_queries", 6),
    (r"upsample_initial_channel", 32),
    (r"n_embd|d_model|emb_dim|embed_dim|dim|width|(.*_)?(hidden_size|embed_dim|hidden_dim|embedding_size|d_embed)", 32),
    (r"(.*_)?(projection_dim|output_dim|proj_dim|embed_proj_dim|out_hidden_size|projection_size)", 32),
    (r"num_groups|.*_groups", 2),
    (r"sliding_window|local_attention|attention_window|max_window_layers", 4),
)
PER_LAYER = "num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers", "layers"


def architectures() -> list[str]:
    """Every architecture that has a model."""
    mappings = [m for _, m in MODELS]
    return [name for name in CONFIG_MAPPING_NAMES if any(name in m for m in mappings)]


MODELS = [  # what is tried of an architecture, the most telling first
    (task, getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")) for task in (
        "FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_IMAGE_CLASSIFICATION_",
        "FOR_SEQUENCE_CLASSIFICATION_", "FOR_CTC_", "")]


def attempts(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Ways to build a small model of this architecture, the smallest and most telling first."""
    classes = [(task, mapping[name]) for task, mapping in MODELS if name in mapping]
    for how in ("lists", "numbers", "layers"):
        for _task, cls in classes:
            for one in cls if isinstance(cls, (tuple, list)) else [cls]:
                yield f"{one} by {how}", lambda one=one, how=how: build(name, one, how)


def build(name: str, cls: str, how: str) -> nn.Module:
    """A model with random weights; raises ValueError for one that would have too many, or be slow."""
    largest = 12_000_000 if how == "layers" else 30_000_000
    config = transformers.CONFIG_MAPPING[name]()
    shrink(config, how)
    config._attn_implementation = "eager"
    made = getattr(transformers, cls)
    with torch.device("meta"):
        count = sum(p.numel() for p in made(config).parameters())
    if count > largest:
        raise ValueError(f"{count:,} parameters")
    return made(config)


def shrink(config: Any, how: str) -> None:
    """Make a config small in place: its sizes, its per-layer lists, and those of the configs it holds."""
    values = dict(vars(config))
    layers = next((values[k] for k in PER_LAYER if isinstance(values.get(k), int)), None)
    kept = _layers_kept(values, layers)
    for key, value in values.items():
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value, how)
            continue
        new = _smaller(key, value, how, layers, kept)
        if new is not value:
            try:
                setattr(config, key, new)
            except (TypeError, ValueError):          # what a config checks itself; the model may still be small
                continue
    fit_together(config)


def fit_together(config: Any) -> None:
    """Sizes that follow from others, which a config does not derive itself."""
    values = vars(config)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict):
        for one in [rope, *rope.values()]:
            if isinstance(one, dict) and "rope_theta" in one:
                one["mrope_section"] = [2, 1, 1]     # of half a head of 8; some models have a default of their own
    if {"qk_rope_head_dim", "num_key_value_heads"} <= values.keys():
        config.num_key_value_heads = config.num_attention_heads      # latent attention has no groups
    heads, width = values.get("num_heads"), values.get("embed_dim")
    if isinstance(heads, (list, tuple)) and isinstance(width, int) and width % heads[0]:
        config.embed_dim = 8 * heads[0]
    if {"expand", "num_heads", "head_dim"} <= values.keys():
        config.num_heads = config.expand * config.hidden_size // config.head_dim     # of a state space model
    if "use_cache" in values:
        config.use_cache = False                     # a cache wants layers of certain kinds


def _layers_kept(values: dict[str, Any], layers: int | None) -> list[int]:
    """Which layers stay: two, or one of each kind."""
    if not layers or layers < 2:
        return list(range(layers or 0))
    kinds = next((v for k, v in values.items() if k in ("layer_types", "layers_block_type") and v), [0, 1])
    first = sorted({kinds.index(kind) for kind in kinds})
    return first if len(first) > 1 else [0, layers - 1]


def _smaller(key: str, value: Any, how: str, layers: int | None, kept: list[int]) -> Any:
    if isinstance(value, float) and "drop" in key:
        return 0.0
    if isinstance(value, bool) or value is None:
        return value
    if key in PER_LAYER and layers and value == layers:
        return len(kept)
    if isinstance(value, (list, tuple)) and layers and len(value) == layers > 2:
        return type(value)(value[i] for i in kept)
    if how == "layers":
        return value
    if isinstance(value, int):
        if key.endswith(("_token_id", "_token_index")):
            return value if value < 96 else 3 + sum(map(ord, key)) % 90
        for pattern, size in SIZES:
            if re.fullmatch(pattern, key):
                return value if size is None else min(value, size) if value > 0 else value
    if how == "lists" and isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        if "depth" in key or "num_blocks" in key or "numb_of_layers" in key or key == "layers":
            return type(value)(min(v, 1) for v in value)
        if re.fullmatch(r".*(hidden_sizes?|channels|embed_dims?|conv_dim|tdnn_dim|out_features)", key):
            return type(value)(max(v // 8, 8) if v > 16 else v for v in value)
        if re.fullmatch(r".*(image_size|input_size)", key):
            return type(value)(min(v, 32) for v in value)
    return value


# ---------------------------------------------------------------------------------------------------------- inputs


def inputs(model: nn.Module, n: int, seed: int) -> dict[str, Any]:
    """What the model's forward needs, a batch of n: random, but for a padded sample in a mask. The first of the ways to
    make them that it takes, else the plainest."""
    dtype = next(model.parameters()).dtype
    for how in WAYS:
        try:
            batch = _batch(model, n, seed, how)
            batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
            copy.deepcopy(model)(**batch)
            return batch
        except Exception:                            # whatever it says: another way may do
            continue
    return _batch(model, n, seed, WAYS[0])


WAYS = (                                             # what is other than usual
    (), ("images",), ("time first",), ("long",), ("long", "time first"), ("channel",), ("pairs",), ("bbox",))


def _batch(model: nn.Module, n: int, seed: int, how: tuple[str, ...]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    config = model.config
    wanted = {name: p.default is p.empty for name, p in inspect.signature(model.forward).parameters.items()
              if p.kind is p.POSITIONAL_OR_KEYWORD}
    main = model.main_input_name
    if "images" in how:
        wanted |= {name: True for name in ("input_ids", "pixel_values") if name in wanted}
    wanted |= {name: True for name in how if name in wanted}
    out: dict[str, Any] = {}
    vocab = _config(config, "vocab_size", 96)
    for name, required in wanted.items():
        if not (required or name in (main, "labels", "attention_mask", "decoder_input_ids", "pixel_values")):
            continue
        t = _input(name, config, n, vocab, g, main if not required else name, how)
        if t is not None:
            out[name] = t
        elif required:
            raise ValueError(f"no input {name!r} is known")
    if main != "input_ids":
        out.pop("attention_mask", None)
    if "labels" in out and ("ForImageClassification" in type(model).__name__
                            or "ForSequenceClassification" in type(model).__name__):
        out["labels"] = torch.randint(0, config.num_labels, (n,), generator=g)
    elif "labels" in out and "LM" not in type(model).__name__:
        del out["labels"]
    return out


def _config(config: Any, key: str, default: Any) -> Any:
    """A value of a config, or of one that it holds."""
    for c in [config, *(v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig))]:
        value = getattr(c, key, None)
        if isinstance(value, int) and value:
            return value
    return default


def _input(name: str, config: Any, n: int, vocab: int, g: torch.Generator, main: str, how: tuple[str, ...]) -> Any:
    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(3, max(vocab - 1, 4), shape, generator=g)

    if name in ("input_ids", "labels", "decoder_input_ids"):
        special = {one for k, v in vars(config).items() if k.endswith(("_token_id", "_token_index"))
                   for one in (v if isinstance(v, list) else [v])}
        t = ints(n, 8)
        return torch.where(sum((t == s for s in special if isinstance(s, int)), torch.zeros_like(t)) > 0, 3, t)
    if name == "attention_mask":
        mask = torch.ones(n, 8, dtype=torch.int64)
        mask[-1, 6:] = 0
        return mask
    if name == "pixel_values" and main == name:
        size = getattr(config, "image_size", None) or _config(config, "image_size", 32)
        h, w = size if isinstance(size, (list, tuple)) else (size, size)
        if "patch_size" not in vars(config):         # convolutions take images of any size
            h, w = min(h, 64), min(w, 64)
        return floats(n, *[2] * ("pairs" in how), _config(config, "num_channels", 3), h, w)
    if name == "input_values":
        return floats(n, *[1] * ("channel" in how), 1920)
    if name == "input_features":
        bins = _config(config, "num_mel_bins", 16)
        time = 128 if "long" in how else 64
        return floats(n, time, bins) if "time first" in how else floats(n, bins, time)
    if name == "past_values":
        return floats(n, config.context_length, config.num_input_channels)
    if name in ("hidden_states", "pixel_values") and {"spatial_merge_size", "patch_size"} <= vars(config).keys():
        return floats(n * 16, _config(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1)
                      * config.patch_size ** 2)      # of 4 x 4 patches each
    if name in ("grid_thw", "image_grid_thw"):
        return torch.tensor([[1, 4, 4]] * n)
    if name == "bbox":
        return torch.zeros(n, 8, 4, dtype=torch.int64)
    return None
