"""What we use of torch that torch does not promise to keep: every private name, in one place.

`docs/torch-internals.md` lists them with what breaks without them; a test looks for others.
"""
from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

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
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
