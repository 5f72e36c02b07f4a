"""globaltensor: write PyTorch for one device, say where tensors live and how they are laid out, run it on many.

    import globaltensor as gt
    P = gt.placement("cpu", [0, 1])
    x = gt.randn(4, 5, placement=P, sbp=gt.sbp.split(0))
    w = gt.randn(5, 8, placement=P, sbp=gt.sbp.broadcast)
    x @ w                                            # (4, 8), split along dim 0

Every name that is not listed here is torch's own (`gt.matmul`, `gt.nn`, `gt.optim`, `gt.manual_seed`, ...).

`FACE` lists ours, each with the module that it is loaded from when it is first asked for. A type checker reads the
imports instead; a test compares the two.
"""
from __future__ import annotations

import difflib as _difflib
import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING

if _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)] == "globaltensor":     # python -m globaltensor ...
    from globaltensor_command import say_ended_by_ctrl_c as _say_ended_by_ctrl_c

    _say_ended_by_ctrl_c()

import torch

from globaltensor.checkpoint import dcp_protocol as _dcp_protocol
from globaltensor.parallel import modules as _modules
from globaltensor.runtime import (
    compiler_skips as _compiler_skips,
    process_group as _process_group,  # registers the backend with torch.distributed
    start as _start,  # the world begins with the first placement
)
from globaltensor.tensors import plain as _plain
from globaltensor.tensors.global_tensor import GlobalTensor as _GlobalTensor
from globaltensor.tracebacks import api_boundary as _api_boundary

__version__ = "0.1.0"

_plain.install_attributes()
_dcp_protocol.install_dcp_protocol()
torch.nn.Module.to_global = _modules.to_global  # type: ignore[attr-defined]  # a module learns two methods
torch.nn.Module.to_local = _modules.module_to_local  # type: ignore[attr-defined]
_GlobalTensor.to_dtensor = _api_boundary(lambda x, mesh=None: _importlib.import_module(  # type: ignore[attr-defined]
    "globaltensor.dtensor.conversion").to_dtensor(x, mesh))          # and tensors one

_ERRORS = ("ArgumentError", "BoxingError", "DisagreementError", "GlobalTensorError", "InPlaceError",
           "MixedPlacementError", "OutOfRangeError", "PlacementError", "PlainTensorError", "RuleError",
           "RuleSyntaxError", "SbpError", "ShapeError", "TransportError")
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
              "randperm", "tensor", "zeros")
_LIKE_FACTORIES = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
FACE = dict.fromkeys(_FACTORIES, "globaltensor.tensors.factories") | dict.fromkeys(
    _LIKE_FACTORIES, "globaltensor.tensors.like_factories") | dict.fromkeys(_ERRORS, "globaltensor.errors") | {
    "CheckpointError": "globaltensor.checkpoint.manifest",
    "GlobalTensor": "globaltensor.tensors.global_tensor",
    "Plan": "globaltensor.parallel.plan",
    "ScheduleError": "globaltensor.schedules.schedule",
    "StageError": "globaltensor.pipelining.stages",
    "Strategy": "globaltensor.planner.strategy",
    "StrategyError": "globaltensor.planner.checking",
    "strategy": "globaltensor.planner.planning",
    "StateError": "globaltensor.checkpoint.tree",
    "audit": "globaltensor.debug.audit",
    "boxing": "globaltensor.boxings.watch",
    "config": "globaltensor.layouts.config",
    "data": "globaltensor",                          # a room that is public as it stands, as is rules
    "dtensor": "globaltensor",
    "explain": "globaltensor.debug.explain",
    "export_chrome_trace": "globaltensor.debug.merged_trace",
    "export_ranks": "globaltensor.parallel.exporting",
    "from_dtensor": "globaltensor.dtensor.conversion",
    "from_full": "globaltensor.tensors.convert",
    "from_local": "globaltensor.tensors.convert",
    "from_shards": "globaltensor.tensors.convert",
    "from_mesh": "globaltensor.dtensor.conversion",
    "init": "globaltensor.runtime.start",
    "load": "globaltensor.checkpoint.torch_files",
    "load_safetensors": "globaltensor.checkpoint.huggingface",
    "materialize": "globaltensor.tensors.materialize",
    "metrics": "globaltensor.debug.metrics",
    "parallelize": "globaltensor.parallel.plan",
    "partition_activations": "globaltensor.parallel.partitioned",
    "pipeline": "globaltensor.pipelining.runner",
    "placement": "globaltensor.layouts.placement",
    "preempted": "globaltensor.runtime.preemption",
    "rank": "globaltensor.runtime.world",
    "record": "globaltensor.debug.recording",
    "REQUEUE": "globaltensor.runtime.preemption",
    "resume": "globaltensor.checkpoint.resuming",
    "set_grad_reduce_dtype": "globaltensor.tensors.reduce_dtype",
    "save": "globaltensor.checkpoint.torch_files",
    "save_safetensors": "globaltensor.checkpoint.huggingface",
    "rule": "globaltensor.dispatch.core",
    "rules": "globaltensor",
    "sbp": "globaltensor.layouts",
    "show": "globaltensor.debug.show",
    "to_global": "globaltensor.parallel.modules",
    "to_mesh": "globaltensor.dtensor.conversion",
    "world_size": "globaltensor.runtime.world",
    "zero": "globaltensor.parallel.zero",
}

if TYPE_CHECKING:                                    # ours, and all of torch's with torch's types
    from globaltensor import data as data, dtensor as dtensor, rules as rules
    from globaltensor.boxings.watch import boxing as boxing
    from globaltensor.checkpoint.huggingface import (
        load_safetensors as load_safetensors,
        save_safetensors as save_safetensors,
    )
    from globaltensor.checkpoint.manifest import CheckpointError as CheckpointError
    from globaltensor.checkpoint.resuming import resume as resume
    from globaltensor.checkpoint.torch_files import load as load, save as save
    from globaltensor.checkpoint.tree import StateError as StateError
    from globaltensor.debug.audit import audit as audit
    from globaltensor.debug.explain import explain as explain
    from globaltensor.debug.merged_trace import export_chrome_trace as export_chrome_trace
    from globaltensor.debug.metrics import metrics as metrics
    from globaltensor.debug.recording import record as record
    from globaltensor.debug.show import show as show
    from globaltensor.dispatch.core import rule as rule
    from globaltensor.dtensor.conversion import (
        from_dtensor as from_dtensor,
        from_mesh as from_mesh,
        to_mesh as to_mesh,
    )
    from globaltensor.errors import (
        ArgumentError as ArgumentError,
        BoxingError as BoxingError,
        DisagreementError as DisagreementError,
        GlobalTensorError as GlobalTensorError,
        InPlaceError as InPlaceError,
        MixedPlacementError as MixedPlacementError,
        OutOfRangeError as OutOfRangeError,
        PlacementError as PlacementError,
        PlainTensorError as PlainTensorError,
        RuleError as RuleError,
        RuleSyntaxError as RuleSyntaxError,
        SbpError as SbpError,
        ShapeError as ShapeError,
        TransportError as TransportError,
    )
    from globaltensor.layouts import sbp as sbp
    from globaltensor.layouts.config import config as config
    from globaltensor.layouts.placement import placement as placement
    from globaltensor.parallel.exporting import export_ranks as export_ranks
    from globaltensor.parallel.modules import to_global as to_global
    from globaltensor.parallel.partitioned import partition_activations as partition_activations
    from globaltensor.parallel.plan import Plan as Plan, parallelize as parallelize
    from globaltensor.parallel.zero import zero as zero
    from globaltensor.pipelining.runner import pipeline as pipeline
    from globaltensor.pipelining.stages import StageError as StageError
    from globaltensor.planner.checking import StrategyError as StrategyError
    from globaltensor.planner.planning import strategy as strategy
    from globaltensor.planner.strategy import Strategy as Strategy
    from globaltensor.runtime.preemption import REQUEUE as REQUEUE, preempted as preempted
    from globaltensor.runtime.start import init as init
    from globaltensor.runtime.world import rank as rank, world_size as world_size
    from globaltensor.schedules.schedule import ScheduleError as ScheduleError
    from globaltensor.tensors.convert import (
        from_full as from_full,
        from_local as from_local,
        from_shards as from_shards,
    )
    from globaltensor.tensors.factories import (
        arange as arange,
        empty as empty,
        eye as eye,
        full as full,
        linspace as linspace,
        logspace as logspace,
        normal as normal,
        ones as ones,
        rand as rand,
        randint as randint,
        randn as randn,
        randperm as randperm,
        tensor as tensor,
        zeros as zeros,
    )
    from globaltensor.tensors.global_tensor import GlobalTensor as GlobalTensor
    from globaltensor.tensors.like_factories import (
        empty_like as empty_like,
        full_like as full_like,
        ones_like as ones_like,
        rand_like as rand_like,
        randint_like as randint_like,
        randn_like as randn_like,
        zeros_like as zeros_like,
    )
    from globaltensor.tensors.materialize import materialize as materialize
    from globaltensor.tensors.reduce_dtype import set_grad_reduce_dtype as set_grad_reduce_dtype
    from globaltensor.tensors.torch_names import *
else:
    __all__ = sorted(FACE)
    _ROOMS = ("globaltensor", "globaltensor.layouts")        # what they give is a module

    def __getattr__(name):
        if name in FACE:
            home = FACE[name]
            value = (_importlib.import_module(f"{home}.{name}") if home in _ROOMS else
                     getattr(_importlib.import_module(home), name))
            _compiler_skips.keep_compiler_out()
            globals()[name] = value
            return value
        if hasattr(torch, name):
            return getattr(torch, name)
        as_printed = {"S": "sbp.split", "B": "sbp.broadcast", "P": "sbp.partial_sum"}       # as layouts print
        near = [as_printed[name]] if name in as_printed else (       # ours first
            _difflib.get_close_matches(name, FACE, 1) or _difflib.get_close_matches(name, __dir__(), 1)
            if not name.startswith("_") else [])     # tools ask every module for such names; nobody mistypes one
        raise AttributeError(f"module 'globaltensor' has no attribute {name!r}" +
                             (f"; did you mean {near[0]!r}?" if near else ""), name=name)

    def __dir__():
        return sorted({*FACE, "__version__", *(name for name in dir(torch) if not name.startswith("_"))})

_compiler_skips.keep_compiler_out()
if _os.environ.get("GLOBALTENSOR_AUDIT"):
    _importlib.import_module("globaltensor.debug.audit").audit_as_asked()
