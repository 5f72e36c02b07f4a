"""Which layers of a module can be cut for tensor parallelism, as their names and sizes tell; and why others are whole.

    columns      a linear layer is cut along its outputs: the first of a pair, a head
    rows         along its inputs: the second of a pair
    vocabulary   an embedding is cut along what it can look up

GPT-2's and nanoGPT's `c_attn`, whose outputs are q, k and v one after the other, is cut as it stands (dealt_parts.py).

Where a name says nothing, two linear layers of one module of which the first widens and the second narrows are a pair.

A layer with a low-rank adapter (peft's LoRA) has its matrix W in `base_layer`, and gives W x + B A x. B is cut as W is
where that is cut along its outputs, A where it is cut along its inputs: so both sums are cut, or pending, alike.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import nn

from globaltensor.layouts.sbp import Sbp, broadcast, split

# The last parts of names, as torch, transformers (Llama, Mixtral, GPT-2, BERT) and this library's examples call them.
_FIRST = ("q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value", "q_attn", "up", "fc1",
          "gate_proj", "up_proj", "w1", "w3", "linear1", "intermediate.dense", "c_fc", "wi", "wi_0", "wi_1")
_SECOND = ("o", "o_proj", "attention.output.dense", "down", "fc2", "down_proj", "w2", "linear2", "output.dense", "wo")
_MLP_OF_GPT2 = "mlp.c_proj"                          # attn.c_proj follows c_attn, in which q, k and v lie
_VOCABULARY = ("token", "wte", "embed_tokens", "word_embeddings", "tok_embeddings", "shared")
_HEADS = ("head", "lm_head", "output_projection")
# Layers whose one matrix stands for several, of GPT-NeoX, Falcon, Phi, GLM and others.
_FUSED = ("query_key_value", "qkv", "qkv_proj", "Wqkv", "in_proj", "W_pack", "gate_up_proj")
_FUSED_BY_PARTS = "c_attn"                           # one after the other, taken apart by split(): q, k, v, or k and v
_POSITIONS = ("wpe", "position", "position_embeddings", "pos_embed", "embed_positions")


# What stands in the place of a layer that has an adapter: its own matrix, those of the adapter, a copy that is trained.
_IN_ADAPTED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+|(lora_[AB])\.[^.]+)$")
_SIDE = {"lora_A": "rows", "lora_B": "columns"}      # of the layer's two sides, the one that a matrix of an adapter has


def name_of_adapted(name: str) -> str:
    """The name of the layer that this one is, or is a part of, where it has an adapter; else its own."""
    return _IN_ADAPTED.sub("", name)


def layer_kind(name: str, layer: nn.Module, root: nn.Module) -> str | None:
    """columns: cut along the outputs; rows: along the inputs; vocabulary: along dim 0; None: broadcast."""
    side = _adapter_side(name)
    if side is None:
        return _kind_by_name(name_of_adapted(name), layer, root)
    adapted = name_of_adapted(name)
    return side if _kind_by_name(adapted, _without_adapter(root.get_submodule(adapted)), root) == side else None


def _adapter_side(name: str) -> str | None:
    part = _IN_ADAPTED.search(name)
    return None if part is None else _SIDE.get(part[1] or "")


def _without_adapter(layer: nn.Module) -> nn.Module:
    base = layer._modules.get("base_layer")
    return layer if base is None else base


def _kind_by_name(name: str, layer: nn.Module, root: nn.Module) -> str | None:
    if isinstance(layer, nn.Embedding):
        return "vocabulary" if _ends(name, _VOCABULARY) and not _has_parametrized(layer) else None
    if not _is_linear(layer) or _has_parametrized(layer):
        return None
    if _ends(name, _HEADS) or _ends(name, _FIRST) or is_fused(name, layer):
        return "columns"
    if _ends(name, (*_SECOND, _MLP_OF_GPT2)) or _follows_fused(name, root):
        return "rows"
    return _in_pair(name, layer, root)


def is_fused(name: str, layer: nn.Module) -> bool:
    """Does one matrix stand for two or three as large, whose outputs lie one after the other?"""
    if _adapter_side(name) or not _ends(name_of_adapted(name), (_FUSED_BY_PARTS,)) or not _is_linear(layer):
        return False
    sizes: tuple[int, ...] = tuple(layer._parameters["weight"].shape)  # type: ignore[union-attr]  # a linear layer's
    return max(sizes) in (2 * min(sizes), 3 * min(sizes))


def _follows_fused(name: str, root: nn.Module) -> bool:
    """Does the layer mix the heads of a matrix that was dealt out by heads?"""
    parent, _, own = name.rpartition(".")
    if own != "c_proj":
        return False
    fused = dict(root.get_submodule(parent).named_children()).get(_FUSED_BY_PARTS)
    return fused is not None and is_fused(_FUSED_BY_PARTS, _without_adapter(fused))


def output_between(kind: str | None, layer: nn.Module, same_ranks: bool) -> Sbp | None:
    """How what a layer gives lies along the sequence's axis. Where that also cuts the layers, the first of a pair needs
    all of the sequence: it is gathered once, behind the norm, and each sum is scattered instead of being reduced."""
    if kind == "vocabulary" or kind == "rows" and same_ranks:
        return split(1)
    return broadcast if same_ranks and type(layer).__name__.endswith("Norm") else None


def _in_pair(name: str, layer: nn.Module, root: nn.Module) -> str | None:
    """Two linear layers of one module, the second undoing the sizes of the first, are a pair whatever their names."""
    parent = root.get_submodule(name.rpartition(".")[0])
    linears = [layer for layer in map(_without_adapter, parent.children()) if isinstance(layer, nn.Linear)]
    if isinstance(parent, nn.MultiheadAttention) or len(linears) != 2:
        return None
    first, second = linears
    # two square layers may be anything; one that widens and one that narrows again are an MLP
    if first.out_features != second.in_features or first.in_features == first.out_features:
        return None
    return "columns" if layer is first else "rows"


def _has_parametrized(layer: nn.Module) -> bool:
    """Is its weight made of other parameters, as by torch.nn.utils.parametrize or by torch's older weight_norm?"""
    return "weight" not in layer._parameters


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def split_dims(kind: str, layer: nn.Module) -> dict[str, int]:
    """Which dim of which of its parameters is split. A weight is [outputs, inputs], that of a Conv1D transposed."""
    if kind == "vocabulary":
        return {"weight": 0}
    transposed = not isinstance(layer, nn.Linear)
    dims = {"weight": int((kind == "rows") != transposed)}
    if kind == "columns" and getattr(layer, "bias", None) is not None:
        dims["bias"] = 0
    return dims


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in endings)


def whole_layers(root: nn.Module, cut: Collection[str]) -> Iterator[tuple[str, str]]:
    """(name, why) of the layers with matrices that are left whole; `cut` are the names of parameters that are not."""
    for name, layer in root.named_modules():
        for key, p in layer._parameters.items():
            full = f"{name}.{key}".lstrip(".")
            if p is not None and p.dim() > 1 and full not in cut and not _ends(name, _POSITIONS):
                yield full, _why_whole(name, layer, root)


def _why_whole(name: str, layer: nn.Module, root: nn.Module) -> str:
    if _adapter_side(name):
        return "a matrix of an adapter: one of the two is cut, on the side on which the layer is"
    name = name_of_adapted(name)
    parent, _, own = name.rpartition(".")
    if own in _FUSED or isinstance(layer, nn.MultiheadAttention):
        return "one matrix of several: split along its outputs, heads of one would be parted; a layer for each"
    siblings = [key for key, _ in root.get_submodule(parent).named_children()] if name else []
    if own == _FUSED_BY_PARTS:
        return "one matrix of several, of other sizes than its inputs': its parts are not known"
    if own == "c_proj" and any(key in (*_FUSED, _FUSED_BY_PARTS) for key in siblings):
        return "it follows a matrix of q, k and v, which is whole"
    if own == "weight" or "weight" not in layer._parameters and _is_linear(layer):
        return "the weight is made of it (weight_norm, parametrize), of which no row is ready made"
    if isinstance(layer, nn.Embedding):
        return "an embedding whose name is not one of a vocabulary's: split(0) for one of tokens"
    if not _is_linear(layer):
        return f"a {type(layer).__name__}, of which no row is ready made"
    return "its name says neither first nor second of a pair, and its sizes do not either"
