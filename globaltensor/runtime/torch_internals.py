"""What we use of torch that torch does not promise to keep: every private name, in one place.

`docs/torch-internals.md` lists them with what breaks without them; a test looks for others.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from globaltensor.errors import RuleError


def overload_of(op: Any) -> OpOverload:
    """The one op that `op` names: an op of torch.ops, a custom op of torch.library, or "mine::twice".

    Raises RuleError where it is no op, or a packet of several overloads.
    """
    if isinstance(op, str):
        library, _, name = op.partition("::")
        packet = getattr(getattr(torch.ops, library), name.partition(".")[0], None) if name else None
        op = getattr(packet, name.partition(".")[2], None) if "." in name else packet
    op = getattr(op, "_opoverload", op)              # of torch.library.custom_op and triton_op
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        if len(names) > 1:
            raise RuleError(f"{op} has {len(names)} overloads", "each of them has a rule of its own",
                            " or ".join(f"torch.ops.{op}.{name}" for name in names))
        op = getattr(op, names[0])
    if not isinstance(op, OpOverload):
        raise RuleError(f"not an op: {op!r}", "a rule is given to an op that torch's dispatcher knows",
                        '@torch.library.custom_op("mine::twice", mutates_args=()) before your function')
    return op


def is_composite(func: OpOverload) -> bool:
    """Does torch itself make this op of others, before it reaches us?"""
    return has_kernel(func, "CompositeImplicitAutograd")


def has_kernel(func: OpOverload, key: str) -> bool:
    """Has the op a kernel of its own at this dispatch key?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def call_kernel(func: OpOverload, key: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call that kernel, whatever the operands' own keys are."""
    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def python_meta(func: OpOverload) -> Callable[..., Any] | None:
    """The op's kernel for the meta device, where torch wrote that one in Python."""
    registered = torch._meta_registrations._meta_lib_dont_use_me_use_register_meta._op_impls
    in_python = func.name().replace("::", "/") + "/Meta" in registered
    return func.py_kernels[torch._C.DispatchKey.Meta] if in_python else None


def counting_writes() -> AbstractContextManager[Any]:
    """Inside it, ops that come from below autograd count writes and tie views to what they view, as those above it."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


class UntracedMode(TorchDispatchMode):
    """A dispatch mode that torch does not import dynamo for, to tell it to keep out of there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
