"""What torch says of an op, and more: which op it was, its operands with their layouts, and the program's line."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from globaltensor.dispatch.kernel_errors import name_element_of_whole
from globaltensor.errors import GlobalTensorError, where
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Spec
from globaltensor.rules.call import Call
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import KEYS_AFTER_BACKEND_SELECT, OpOverload, tree_leaves
from globaltensor.tracebacks import api_boundary, fold, note_on_torch_error, raised_by_torch

# Of torch's collectives, which DistributedDataParallel calls too, and of its fully_shard.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")


def refuse_collectives(func: OpOverload) -> None:
    """Raise for what torch.distributed does with values that each rank has for itself. A global tensor is one value,
    and its shards, of whatever layout, are not such values: to sum them would be wrong without a word."""
    if func.namespace in _COLLECTIVES:
        raise GlobalTensorError(
            f"{func._schema.name} of torch.distributed on a global tensor",
            "a collective combines what each rank has for itself, and a global tensor is one value on all ranks; its "
            "sums are made where the value is asked for",
            "x.item() or x.full_tensor() for the value, x.to_global(sbp=...) for another layout, x.to_local() for this "
            "rank's part; for a model gt.parallelize and gt.zero, without DistributedDataParallel or fully_shard; for "
            "a library that combines ranks by itself its own switch, such as torchmetrics' sync_on_compute=False")


def _see_lists_of_lists(library: Any) -> None:
    """Let collectives that take lists of lists refuse global tensors in them: torch's dispatcher looks into none."""
    for packet in ("allgather_", "allgather_coalesced_", "gather_", "reduce_scatter_", "scatter_"):
        func = getattr(torch.ops.c10d, packet).default

        def kernel(keys: Any, *args: Any, func: OpOverload = func, **kwargs: Any) -> Any:
            if any(map(is_global, tree_leaves(args))):
                refuse_collectives(func)
            return func.redispatch(keys & KEYS_AFTER_BACKEND_SELECT, *args, **kwargs)

        library.impl(packet, kernel, "BackendSelect", with_keyset=True)      # which every call comes to


_collectives = torch.library.Library("c10d", "IMPL")
if torch.distributed.is_available():
    _see_lists_of_lists(_collectives)


def add_operands(error: BaseException, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Tell more of an error of torch's that a call has raised, as a note: its type and its text stay. Fold it, and
    errors of ours."""
    if not isinstance(error, GlobalTensorError) and raised_by_torch(error):
        call = Call(func, args, kwargs)
        note_operands(error, str(func), zip(_numbered(call.names), call.tensors))
    fold(error)


def note_operands(error: BaseException, op: str, operands: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Add the note about an op with these operands, by name."""
    rows = [("op:", op), ("where:", where()), *[(f"{name}:", _description(t)) for name, t in operands]]
    width = max(len(head) for head, _ in rows)
    note_on_torch_error(error, "\n".join(f"  {head:{width}} {text}" for head, text in rows))


def _numbered(names: Sequence[str]) -> list[str]:
    """The tensors of a list by their index: tensors[0], tensors[1]."""
    return [f"{name}[{names[:i].count(name)}]" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _description(t: torch.Tensor) -> str:
    return str(t.spec) if is_global(t) else f"{list(t.shape)} {t.dtype}, a plain tensor"


def _note_native(error: Exception, op: str, names: list[str], tensors: list[torch.Tensor], rank: int,
                 outputs: list[Spec | None]) -> None:
    """What the native dispatcher calls where torch raises in it."""
    if tensors and rank >= 0:
        name_element_of_whole(error, tensors[0], rank, outputs)
    note_operands(error, op, zip(_numbered(names), tensors))


if torch_ext is not None:
    torch_ext.on_op_error(api_boundary(_note_native))
