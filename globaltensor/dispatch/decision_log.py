"""New decisions, as `logging` tells them under "globaltensor.dispatch" at level DEBUG; and how layouts are told.

    aten.mm.default of [4, 6], [6, 8] at train.py:12: S(0), B -> S(0) on placement("cpu", [0, 1]), boxed: mat2 S(0) -> B

A decision is made once for a kind of call. So a line says that an op, or layouts, are new: a training that still has
them after its first steps decides each time anew.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from globaltensor.dispatch.recipe import Decision, Recipe, spec_of_plain
from globaltensor.errors import where
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import sbp_text
from globaltensor.rules.call import Call
from globaltensor.runtime.torch_internals import OpOverload

_log = logging.getLogger(__name__)


def log_decision(func: OpOverload, decision: Decision, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Tell what was decided for a call, where someone listens."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    call = Call(func, args, kwargs)
    home = next(t.spec.placement for t in call.tensors if is_global(t))
    operands = [t.spec if is_global(t) else spec_of_plain(t, home) for t in call.tensors]
    if not isinstance(decision, Recipe):
        name = getattr(decision, "__name__", type(decision).__name__)
        how = f"{sbps_text([own.sbp for own in operands])} on {home}, as other ops ({name})"
    else:
        wanted = [want or own.layout for own, want in zip(operands, decision.wants)]
        outputs = [o.sbp for o in decision.outputs or () if o is not None]
        how = f"{signature_text([layout.sbp for layout in wanted], outputs)} on {home}"
        boxed = [f"{name} {sbp_text(own.sbp)} -> {sbp_text(want.sbp)}"
                 for name, own, want in zip(call.names, operands, wanted) if want is not own.layout]
        how += f", boxed: {texts_counted(boxed)}" if boxed else ""
    shapes = texts_counted([str(list(own.shape)) for own in operands])
    _log.debug("%s of %s at %s: %s", func, shapes, where(), how)


def signature_text(inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """`S(0), B -> S(0)`, of sbps."""
    return f"{sbps_text(inputs)} -> {sbps_text(outputs) or '?'}"


def sbps_text(of: Sequence[Any]) -> str:
    return texts_counted(list(map(sbp_text, of)))


def texts_counted(texts: Sequence[str]) -> str:
    """Long lists, of foreach ops, with counts instead of repetitions."""
    if len(texts) <= 5:
        return ", ".join(texts)
    return ", ".join(f"{text} x{len(list(same))}" for text, same in groupby(texts))
