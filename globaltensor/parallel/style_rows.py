"""Plans in others' forms, read as rows of a `gt.Plan`: torch's and torchtitan's styles, and transformers' words.

    {"layers.*.w1": ColwiseParallel(), ...}          of torch.distributed.tensor.parallel, or of globaltensor.dtensor
    {"layers.*.self_attn.q_proj": "colwise", ...}    config.base_model_tp_plan, model.tp_plan

A style says how a module's parameters lie, and what it takes and gives where that is not what follows from them.
Whether parts are handed out as plain tensors (`use_local_output`) is no question here: a global tensor stays one.
"""
from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from globaltensor.errors import ArgumentError, SbpError, compiled_fix
from globaltensor.layouts.sbp import Sbp, broadcast, read_sbp, split
from globaltensor.parallel.grids import PlanRow

_COLUMNS = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "all_reduce", "moe_identity_expert", "local_params",
          "moe_tp_experts", "mla_kv_a_proj"}        # whose parameters have rows of their own, or are on every rank
_OF_MATRICES = {"packed_colwise": -2, "rowwise": -1}     # the dim of a parameter [..., outputs, inputs] that is split


def rows_of_styles(module: nn.Module, styles: Mapping[str, Any] | None, axis: str
                   ) -> Iterator[tuple[str, PlanRow, str]]:
    """(pattern, row, why it is left whole, or "") of every style that says something."""
    if styles is None:
        styles = getattr(module, "tp_plan", None)
        if not styles:
            raise ArgumentError(f"a {type(module).__name__} has no plan of its own", "it has no, or an empty, tp_plan",
                                "gt.Plan.of(model), or gt.Plan.of_styles(model, {name: style})")
    names = [name for name, _ in module.named_modules() if name]
    if all(isinstance(style, str) and not fnmatch.filter(names, pattern) for pattern, style in styles.items()):
        raise _no_module(next(iter(styles)), names)
    for pattern, style in styles.items():
        fitting = [layer for name, layer in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if isinstance(style, str) and style in _OF_MATRICES and not fitting:
            yield from _of_matrices(pattern, style, module, axis)
        elif isinstance(style, str):
            yield from _of_word(pattern, style, fitting, axis)
        elif not fitting:
            raise _no_module(pattern, names)
        else:
            yield from _of_style(pattern, style, fitting[0], axis)


def _no_module(pattern: str, names: list[str]) -> SbpError:
    near = difflib.get_close_matches(pattern, names, 3, 0.5)
    return SbpError(f"the plan's row {pattern!r} fits no module",
                    f"its modules are {', '.join(names[:8])}{', ...' * (len(names) > 8)}",
                    compiled_fix(pattern, names)
                    or f"{', '.join(map(repr, near)) or 'one of these names'}, or a pattern as in fnmatch")


def _of_word(pattern: str, word: str, fitting: list[nn.Module], axis: str) -> Iterator[tuple[str, PlanRow, str]]:
    """A word of transformers. Their plans name modules that a model may do without."""
    if word in _COLUMNS | _ROWS and fitting:
        yield from _of_parameters(pattern, fitting[0], "columns" if word in _COLUMNS else "rows", axis)
    elif word in ("embedding_rowwise", "embedding_colwise") and fitting:
        yield f"{pattern}.weight", {axis: split(int(word == "embedding_colwise"))}, ""
    elif word == "sequence_parallel" and fitting:
        yield f"{pattern} ->", {axis: split(1)}, ""
    elif word not in _WHOLE | _COLUMNS | _ROWS and not word.startswith("embedding_"):
        yield pattern, {}, f"{word}, for which there is no row"


def _of_matrices(pattern: str, word: str, module: nn.Module, axis: str) -> Iterator[tuple[str, PlanRow, str]]:
    """A word of transformers for a parameter: the matrices of all experts in one. Where gate and up are packed in one,
    ranks hold other columns than there: the code takes them apart, and the halves move."""
    for name, p in module.named_parameters():
        if fnmatch.fnmatchcase(name, pattern):
            yield pattern, {axis: split(p.dim() + _OF_MATRICES[word])}, ""
            return


def _of_parameters(pattern: str, layer: nn.Module, kind: str, axis: str) -> Iterator[tuple[str, PlanRow, str]]:
    transposed = type(layer).__name__ == "Conv1D"    # of GPT-2, [inputs, outputs]
    first = isinstance(layer, nn.Embedding) == (kind == "rows")
    yield f"{pattern}.weight", {axis: split(int(first == transposed))}, ""
    if kind == "columns" and getattr(layer, "bias", None) is not None:
        yield f"{pattern}.bias", {axis: split(0)}, ""


def _of_style(pattern: str, style: Any, layer: nn.Module, axis: str) -> Iterator[tuple[str, PlanRow, str]]:
    """A style of torch's or ours, told by the name of its class."""
    kind = type(style).__name__
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        yield from _of_parameters(pattern, layer, "columns" if kind == "ColwiseParallel" else "rows", axis)
        output = _one(style.output_layouts)
        if output not in (split(-1), None) if kind == "ColwiseParallel" else output not in (broadcast, None):
            yield f"{pattern} ->", {axis: output}, ""  # type: ignore[dict-item]  # it is not None
    elif kind == "SequenceParallel":
        along = _one(getattr(style, "sequence_sharding", None) or style.output_layouts)
        yield f"{pattern} ->", {axis: along or split(1)}, ""
    elif kind in ("PrepareModuleInput", "PrepareModuleOutput"):
        wanted = style.desired_input_layouts if kind == "PrepareModuleInput" else style.desired_output_layouts
        if (lie := _one(wanted)) is not None:
            yield f"{pattern} {'<-' if kind == 'PrepareModuleInput' else '->'}", {axis: lie}, ""
    else:
        yield pattern, {}, f"{kind}, for which there is no row"


def _one(layouts: Any) -> Sbp | None:
    """The one sbp that a style's layouts mean; None where they are none, or several."""
    several = layouts if isinstance(layouts, (tuple, list)) else [layouts]
    known = {read_sbp(one) for one in several if one is not None}
    return known.pop() if len(known) == 1 else None
