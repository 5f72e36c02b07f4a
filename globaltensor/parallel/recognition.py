"""Which layers of a module can be cut for tensor parallelism, as their names and sizes tell; and why others are whole.

    columns      a linear layer is cut along its outputs: the first of a pair, a head
    rows         along its inputs: the second of a pair
    vocabulary   an embedding is cut along what it can look up

Where a name says nothing, two linear layers of one module of which the first widens and the second narrows are a pair.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from globaltensor.layouts.sbp import Sbp, broadcast, split

# The last parts of names, as torch, transformers (Llama, Mixtral, GPT-2, BERT) and this library's examples call them.
_FIRST = ("q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value", "up", "fc1",
          "gate_proj", "up_proj", "w1", "w3", "linear1", "intermediate.dense", "c_fc", "wi", "wi_0", "wi_1")
_SECOND = ("o", "o_proj", "attention.output.dense", "down", "fc2", "down_proj", "w2", "linear2", "output.dense", "wo")
_MLP_OF_GPT2 = "mlp.c_proj"                          # attn.c_proj follows q, k and v that lie in one matrix
_VOCABULARY = ("token", "wte", "embed_tokens", "word_embeddings", "tok_embeddings", "shared")
_HEADS = ("head", "lm_head", "output_projection")
# Layers whose one matrix stands for several, of GPT-2 and nanoGPT, GPT-NeoX, Falcon, Phi, GLM and others.
_FUSED = ("c_attn", "query_key_value", "qkv", "qkv_proj", "Wqkv", "in_proj", "W_pack", "gate_up_proj")
_POSITIONS = ("wpe", "position", "position_embeddings", "pos_embed", "embed_positions")


def layer_kind(name: str, layer: nn.Module, root: nn.Module) -> str | None:
    """columns: cut along the outputs; rows: along the inputs; vocabulary: along dim 0; None: broadcast."""
    if isinstance(layer, nn.Embedding):
        return "vocabulary" if _ends(name, _VOCABULARY) else None
    if not _is_linear(layer):
        return None
    if _ends(name, _HEADS) or _ends(name, _FIRST):
        return "columns"
    if _ends(name, (*_SECOND, _MLP_OF_GPT2)):
        return "rows"
    return _in_pair(name, layer, root)


def output_between(kind: str | None, layer: nn.Module, same_ranks: bool) -> Sbp | None:
    """How what a layer gives lies along the sequence's axis. Where that also cuts the layers, the first of a pair needs
    all of the sequence: it is gathered once, behind the norm, and each sum is scattered instead of being reduced."""
    if kind == "vocabulary" or kind == "rows" and same_ranks:
        return split(1)
    return broadcast if same_ranks and type(layer).__name__.endswith("Norm") else None


def _in_pair(name: str, layer: nn.Module, root: nn.Module) -> str | None:
    """Two linear layers of one module, the second undoing the sizes of the first, are a pair whatever their names."""
    parent = root.get_submodule(name.rpartition(".")[0])
    linears = [child for child in parent.children() if isinstance(child, nn.Linear)]
    if isinstance(parent, nn.MultiheadAttention) or len(linears) != 2:
        return None
    first, second = linears
    # two square layers may be anything; one that widens and one that narrows again are an MLP
    if first.out_features != second.in_features or first.in_features == first.out_features:
        return None
    return "columns" if layer is first else "rows"


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
    parent, _, own = name.rpartition(".")
    if own in _FUSED or isinstance(layer, nn.MultiheadAttention):
        return "one matrix of several: split along its outputs, heads of one would be parted; a layer for each"
    siblings = [key for key, _ in root.get_submodule(parent).named_children()] if name else []
    if own == "c_proj" and any(key in _FUSED for key in siblings):
        return f"it follows {next(key for key in siblings if key in _FUSED)}, which is whole"
    if isinstance(layer, nn.Embedding):
        return "an embedding whose name is not one of a vocabulary's: split(0) for one of tokens"
    if not _is_linear(layer):
        return f"a {type(layer).__name__}, of which no row is ready made"
    return "its name says neither first nor second of a pair, and its sizes do not either"
