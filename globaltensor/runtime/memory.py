"""Which plain tensors have memory that we can read.

The elements of a plain tensor that is an operand of an op, is assigned or is made global are read from its memory. Some
have none: tensors on the meta device, sparse and quantized ones, wrappers of other tensors (FakeTensor, DTensor), and
tensors whose storage was freed. Every place that takes a plain tensor asks here first.
"""
from __future__ import annotations

from types import FrameType
from typing import Any, NoReturn

import torch

from globaltensor.errors import GlobalTensorError, line_of_program
from globaltensor.layouts.global_like import is_global
from globaltensor.runtime.torch_internals import data_address, in_fake_mode


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, one behind the other."""
    # one element may have any stride, and is contiguous to torch, but no `view` of another dtype takes it
    return t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8)


def require(t: torch.Tensor, what: str) -> None:
    """Raise GlobalTensorError where `t` has no memory that we can read. `what` is done with it, for the message."""
    if (without := missing(t)) is not None:
        kind, fix = without
        raise GlobalTensorError(f"{what}: {kind}", "its elements are read from memory, and it has none", fix)


def missing(t: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor without memory is, and what to type instead; None for one that has memory."""
    if is_global(t):
        return "a global tensor", "x.to_global(placement, sbp), or x.full_tensor()"
    if t.is_nested:
        return "a nested tensor", "t.to_padded_tensor(0)"
    if t.layout is not torch.strided:
        return f"a tensor of layout {t.layout}", "t.to_dense()"
    if t.is_quantized:
        return "a quantized tensor", "t.dequantize()"
    if t.device.type != "meta" and (data_address(t) or not t.numel()):
        return None
    if hasattr(t, "full_tensor"):
        return f"a {type(t).__name__}", "gt.from_dtensor(t), or x.to_dtensor() of the global tensors beside it"
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        return (f"a {type(t).__name__}, a wrapper of other tensors",
                "the tensor that it stands for; of a model that a library quantizes (torchao's quantize_): first "
                "gt.to_global or gt.parallelize, and gt.save, then quantize_(model)")
    if t.device.type == "meta":
        return ("a tensor on the meta device",
                'torch.empty_like(t, device="cpu"), then filled; of a module: module.to_empty(device="cpu")')
    return "a tensor whose storage was freed", "t.clone(), taken before its storage was resized to 0"


def refuse_nested() -> NoReturn:
    """Raise GlobalTensorError for a nested tensor with the elements of a global one."""
    raise GlobalTensorError("a nested tensor made of a global one", "a global tensor has one size along each dim",
                            "padded tensors with a mask; nn.TransformerEncoder(..., enable_nested_tensor=False)")


def makes_nested(by: FrameType) -> bool:
    """Is it where torch gives a nested tensor its elements? Of jagged ones torch does each op itself."""
    return by.f_code.co_name == "__new__" and by.f_globals["__name__"].startswith("torch.nested.")


def refuse_fake_mode(placement: Any, what: str) -> None:
    """Raise GlobalTensorError under FakeTensorMode, where the shards on a placement would be fake: boxings read memory.
    On the meta device global tensors have none anyway."""
    if placement.type != "meta" and in_fake_mode():
        raise GlobalTensorError(f"{what} on {placement} under FakeTensorMode",
                                "its shards are read from memory, and fake ones have none",
                                f'gt.placement("meta", {list(placement.ranks)}), and modules that were made inside '
                                'torch.device("meta") and global before: shapes and layouts, backward too')


class NoMemory(torch.UntypedStorage):
    """The storage of a global tensor, by which others may count bytes, but not tell tensors apart, save traced ones."""

    def data_ptr(self, *_: Any, **__: Any) -> Any:
        raise GlobalTensorError("the address or the bytes of a global tensor's storage", "it has no memory of its own",
                                "x.full_tensor(), x.to_local(), or its shards: x.shards[rank]; to save a model, "
                                'gt.save_safetensors(model, folder) or gt.save({"model": model}, folder); with '
                                "Accelerate, that of globaltensor.trainers.accelerate", line_of_program())

    def resize_(self, size: int) -> Any:
        raise GlobalTensorError("another size for a global tensor's storage, as torch's FullyShardedDataParallel asks",
                                "it has no memory of its own", "for a model gt.parallelize and gt.zero(optimizer, "
                                "stage=3, model=model), without torch's wrapper; x.resize_(...) for a tensor")

    __reduce__ = cpu = cuda = to = clone = tolist = byteswap = data_ptr
