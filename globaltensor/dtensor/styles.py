"""torch's styles of tensor parallelism, and `parallelize_module`: which parameters of a module are split, and what it
takes and gives.

    style                  Linear      Embedding   takes          gives          (each may be told otherwise)
    ColwiseParallel        S(0)        S(1)        Replicate      Shard(-1)
    RowwiseParallel        S(1)        S(0)        Shard(-1), of an Embedding Replicate      Replicate
    SequenceParallel       all parameters B        Shard(1)       Shard(1)

A plain tensor that comes in is this rank's part; `use_local_output` gives one out, where the process drives one rank
(of several ranks there is no one part, and the tensor stays whole).
"""
from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from globaltensor.dtensor.api import (
    DTensor,
    distribute_module,
    distribute_tensor,
    on_mesh,
    set_parameter,
)
from globaltensor.dtensor.device_mesh import DeviceMesh, mesh_or_current
from globaltensor.errors import ArgumentError, SbpError, expect
from globaltensor.runtime.world import world
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary, torch_boundary

Layouts = Placement | Sequence[Placement | None] | None
_OF_MODULES = {nn.Linear: "Linear", nn.Embedding: "Embedding"}


class ParallelStyle:
    """What `parallelize_module` does to one module."""

    src_data_rank: int | None = 0

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError


class _Style(ParallelStyle):
    """How a module's parameters lie (`rows`: by class of module and name), what it takes and what it gives."""

    rows: Mapping[type[nn.Module], Mapping[str, Placement]] = {}

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def _wants(self, module: nn.Module) -> Placement:
        """How the module has to find its input."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows = next((rows for kind, rows in self.rows.items() if isinstance(module, kind)), None)
        if rows is None:
            raise ArgumentError(f"{type(self).__name__} of a {type(module).__name__}",
                                f"it is for {' and '.join(_OF_MODULES[kind] for kind in self.rows)}",
                                "PrepareModuleInput or SequenceParallel, or a plan for the layers inside")

        def partition(name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for key, p in owner._parameters.items():
                if p is not None:
                    set_parameter(owner, key, distribute_tensor(p, mesh, [rows.get(key, Replicate())],
                                                                src_data_rank=self.src_data_rank))

        return distribute_module(module, device_mesh, partition, self._take, self._give)

    def _take(self, module: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        x = _laid_out(args[0], mesh, self.input_layouts)
        return (_brought_to(x, self._wants(module)), *args[1:])

    def _give(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return _given(_brought_to(out, self.output_layouts), self.use_local_output)

    def __repr__(self) -> str:
        return (f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
                f"use_local_output={self.use_local_output})")


class ColwiseParallel(_Style):
    """Cut a Linear along its outputs, an Embedding along what it embeds in. Arguments as torch's."""

    rows = {nn.Linear: {"weight": Shard(0), "bias": Shard(0)}, nn.Embedding: {"weight": Shard(1)}}

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
                 use_local_output: bool = True) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)

    def _wants(self, module: nn.Module) -> Placement:
        return Replicate()


class RowwiseParallel(_Style):
    """Cut a Linear along its inputs, an Embedding along the vocabulary. Arguments as torch's."""

    rows = {nn.Linear: {"weight": Shard(1)}, nn.Embedding: {"weight": Shard(0)}}

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
                 use_local_output: bool = True) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)

    def _wants(self, module: nn.Module) -> Placement:
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)


class SequenceParallel(_Style):
    """A norm or dropout of which each rank has all parameters and a part of the sequence. Arguments as torch's."""

    rows = {nn.Module: {}}

    @torch_boundary
    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(Shard(sequence_dim), Shard(sequence_dim), use_local_output)

    def _wants(self, module: nn.Module) -> Placement:
        return self.input_layouts


class PrepareModuleInput(ParallelStyle):
    """What a module takes: plain tensors lie as `input_layouts` say, and all are brought to `desired_input_layouts`;
    the same by keyword. None for what is to be left alone. `use_local_output` then hands out parts."""

    @api_boundary
    def __init__(self, *, input_layouts: Layouts = None, desired_input_layouts: Layouts = None,
                 input_kwarg_layouts: Mapping[str, Placement] | None = None,
                 desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
                 use_local_output: bool = False) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        _check_lengths("input_layouts", self.input_layouts, self.desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:

        @api_boundary
        def prepare(owner: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if self.input_layouts:
                _check_lengths("arguments", args, self.input_layouts)
                args = tuple(self._prepared(x, device_mesh, have, want)
                             for x, have, want in zip(args, self.input_layouts, self.desired_input_layouts))
            named = {key: self._prepared(x, device_mesh, self.input_kwarg_layouts.get(key),
                                         self.desired_input_kwarg_layouts.get(key)) for key, x in named.items()}
            return args, named

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _prepared(self, x: Any, mesh: DeviceMesh, have: Placement | None, want: Placement | None) -> Any:
        if have is None or not isinstance(x, torch.Tensor):
            return x
        return _given(_brought_to(_laid_out(x, mesh, have), want or have), self.use_local_output)


class PrepareModuleOutput(ParallelStyle):
    """What a module gives: as `PrepareModuleInput`."""

    @api_boundary
    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts,
                 use_local_output: bool = True) -> None:
        self.output_layouts = _as_tuple(output_layouts)
        self.desired_output_layouts = _as_tuple(desired_output_layouts)
        _check_lengths("output_layouts", self.output_layouts, self.desired_output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:

        @api_boundary
        def give(owner: nn.Module, args: Any, out: Any) -> Any:
            outs = out if isinstance(out, tuple) else (out,)
            _check_lengths("results", outs, self.output_layouts)
            outs = tuple(x if have is None or not isinstance(x, torch.Tensor) else
                         _given(_brought_to(_laid_out(x, device_mesh, have), want or have), self.use_local_output)
                         for x, have, want in zip(outs, self.output_layouts, self.desired_output_layouts))
            return outs if isinstance(out, tuple) else outs[0]

        module.register_forward_hook(give)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Both."""

    @api_boundary
    def __init__(self, *, input_layouts: Layouts = None, desired_input_layouts: Layouts = None,
                 input_kwarg_layouts: Mapping[str, Placement] | None = None,
                 desired_input_kwarg_layouts: Mapping[str, Placement] | None = None, use_local_input: bool = False,
                 output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True) -> None:
        self.both = (PrepareModuleInput(
            input_layouts=input_layouts, desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts, desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input), PrepareModuleOutput(
                output_layouts=output_layouts, desired_output_layouts=desired_output_layouts,
                use_local_output=use_local_output))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.both:
            style._apply(module, device_mesh)
        return module


@api_boundary
def parallelize_module(module: nn.Module, device_mesh: DeviceMesh | None = None,
                       parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None, *,
                       src_data_rank: int | None = 0) -> nn.Module:
    """Give modules their styles: one, or a dict of names (patterns as in fnmatch, part by part) to styles.

    device_mesh     of one dim: `mesh["tp"]` of a larger one
    src_data_rank   whose parameters count: see `distribute_tensor`
    Raises SbpError, before anything is changed, for a name that fits no module (torch warns), and a mesh of more dims.
    """
    expect(module, nn.Module, "parallelize_module of no module", "parallelize_module(model, mesh, plan)")
    device_mesh = mesh_or_current(device_mesh, "parallelize_module")
    if device_mesh.ndim > 1:
        raise SbpError(f"parallelize_module on a mesh of {device_mesh.ndim} dims", "a style is along one dim",
                       f"mesh[{(device_mesh.axis_names or ('tp',))[-1]!r}]")
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else dict(parallelize_plan or {})
    chosen: list[tuple[nn.Module, ParallelStyle]] = []
    for pattern, style in plan.items():
        expect(style, ParallelStyle, f"the plan's row {pattern!r}", "ColwiseParallel(), of globaltensor.dtensor")
        fitting = [owner for name, owner in module.named_modules() if _fits_by_part(name, pattern)]
        if not fitting:
            names = [name for name, _ in module.named_modules() if name]
            raise SbpError(f"the plan's row {pattern!r} fits no module",
                           f"its modules are {', '.join(names[:8])}{', ...' * (len(names) > 8)}", "one of these names")
        chosen += [(owner, style) for owner in fitting]
    for owner, style in chosen:
        style.src_data_rank = src_data_rank
        style._apply(owner, device_mesh)
    return module


def _fits_by_part(name: str, pattern: str) -> bool:
    """Part by part: `layers.*` is not `layers.0.up`."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _laid_out(x: torch.Tensor, mesh: DeviceMesh, how: Placement) -> GlobalTensor:
    """A plain tensor as this rank's part of one that lies so; one on a mesh as it is."""
    if on_mesh(x):
        return x
    if isinstance(x, GlobalTensor):
        raise ArgumentError("a global tensor on a placement, for a module of gt.dtensor", f"it lies on {x.placement}",
                            "x.to_global(mesh, sbp)")
    if len(world().local_ranks) > 1:                 # the one program's tensor, which is whole
        return from_full(x, mesh, how)
    return DTensor.from_local(x, mesh, [how])


def _brought_to(x: Any, how: Placement) -> Any:
    """A tensor on a mesh brought to lie so."""
    return x.to_global(sbp=(how,)) if on_mesh(x) else x


def _given(x: Any, as_part: bool) -> Any:
    return x.to_local() if as_part and on_mesh(x) and len(world().local_ranks) == 1 else x


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return () if layouts is None else (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _check_lengths(what: str, one: Sequence[Any], other: Sequence[Any]) -> None:
    if len(one) != len(other):
        raise ArgumentError(f"{len(one)} {what} and {len(other)} layouts", "each has one, or None", "as many of both")

