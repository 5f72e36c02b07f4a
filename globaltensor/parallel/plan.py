"""Parallelism as a table: which parameters and activations of a module lie how, along the named axes of a placement.

    plan = gt.Plan.of(model)                         # made by recognising what the names and the layers say
    print(plan)
    plan["*.up.*"] = {"tp": gt.sbp.split(0)}         # edit it like a dict
    plan.save("plan.txt")                            # the text that print shows; gt.Plan.load reads it back
    gt.parallelize(model, gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")), plan)

    # name                     tp
    token.weight               S(0)
    *.q.weight                 S(0)
    *.o.weight                 S(1)
    token ->                   S(1)

A row is a pattern as in fnmatch; the first that fits a parameter or buffer says how it lies, and what none fits is
broadcast. `module ->` is about activations instead: what those modules give is brought to lie so, `module <-` what they
take, and `parameter ->` is how a parameter lies while its module works. Tokens given to `module =>` travel to the ranks
that hold the experts they chose, and back (experts.py). What `module />` gives is several tensors in one, each dealt
out along the axis when it is split or chunked (tensors/dealt_parts.py). The model is not wrapped.

The ready-made rows are Megatron-LM's (Shoeybi et al., arXiv:1909.08053): a pair of linear layers is cut along the
outputs of the first and the inputs of the second, so that only the second leaves a sum behind; attention by heads;
embedding and head along the vocabulary. `sequence="tp"` splits what lies between the pairs along the sequence, over the
same ranks (Korthikanti et al., arXiv:2205.05198); over ranks of their own, `sequence="sp"`. With two or three axes the
layers lie on a grid (grids.py). `experts="ep"` puts whole experts on different ranks, as a rule those that also split
the batch.
"""
from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from globaltensor.errors import SbpError, closest, compiled_fix, counted, expect, expect_path, writing_to
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import Sbp, broadcast, not_an_sbp, read_sbp, split, with_axes
from globaltensor.parallel import experts as expert_layers, grids
from globaltensor.parallel.grids import PlanRow, PlanRows
from globaltensor.parallel.modules import M, check_module, first_fit, to_global
from globaltensor.parallel.recognition import (
    is_fused,
    layer_kind,
    name_of_adapted,
    output_between,
    split_dims,
    whole_layers,
)
from globaltensor.parallel.style_rows import rows_of_styles
from globaltensor.pictures.markup import chip, colour_of, html_table
from globaltensor.runtime.text_table import aligned
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.materialize import named_tensors
from globaltensor.tensors.parameter_swap import SwappedIn
from globaltensor.tracebacks import api_boundary

_OUT, _IN, _EXPERTS, _PARTS, _UNCHANGED = " ->", " <-", " =>", " />", "-"
OF_MODULES = (_OUT, _IN, _EXPERTS, _PARTS)
_WHOLE = "# whole: "

R = TypeVar("R")


class Plan(MutableMapping[str, PlanRow]):
    """Rows of pattern -> {axis: sbp}, in order; the first that fits counts.

    rows   a mapping of patterns to dicts by axis name, with `gt.sbp` values or their printed form ("S(0)", "B")
    Raises SbpError for what is not an sbp.
    """

    @api_boundary
    def __init__(self, rows: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        expect(rows or {}, Mapping, "a plan of no rows", "gt.Plan({'*.weight': {'tp': gt.sbp.split(0)}})")
        self._rows: PlanRows = {}
        self.whole: dict[str, str] = {}              # what `of` left whole, and why
        for pattern, row in (rows or {}).items():
            self[pattern] = row

    @classmethod
    @api_boundary
    def of(cls, module: nn.Module, axis: str | Sequence[str] = "tp", sequence: str = "",
           experts: str = "") -> Plan:
        """The tensor-parallel plan of a module, for the layers that are recognised; the rest is broadcast.

        axis       along which layers are cut; "" for none; two (row, column) for 2D, the batch then split along
                   the first of them; three for 3D, the batch then split along the second (grids.py)
        sequence   along which, also, the activations between the pairs are split: dim 1 of [batch, sequence, hidden]
        experts    along which experts lie on different ranks; it may be the axis that splits the batch
        Not collective. Raises ArgumentError for what is not a module, SbpError for axes that do not fit each other.
        """
        expect(module, nn.Module, "gt.Plan.of no module", "gt.Plan.of(model)")
        one_axis = "" if isinstance(axis, (tuple, list)) else axis
        for name, along in {"axis": one_axis, "sequence": sequence, "experts": experts}.items():
            expect(along, str, f"gt.Plan.of along no axis, {name}", f"gt.Plan.of(model, {name}='tp')")
        if not isinstance(axis, str):
            if len(axis) > 1:
                return cls._on_grid(module, tuple(axis))
            axis = axis[0] if axis else ""
        weights: PlanRows = {}
        outputs: PlanRows = {}
        travels: PlanRows = {}
        dealt: PlanRows = {}
        for name, layer in module.named_modules():
            kind = layer_kind(name, layer, module)
            if kind and axis:
                dims = split_dims(kind, layer)
                weights |= {f"{name}.{key}".lstrip("."): {axis: split(dim)} for key, dim in dims.items()}
                dealt |= {name_of_adapted(name): {axis: split(-1)}} if is_fused(name, layer) else {}
            if sequence and (brought := output_between(kind, layer, sequence == axis)):
                outputs[name] = {sequence: brought}
            if experts and (stacked := expert_layers.stacked_parameters(name, layer)):
                weights |= {f"{name}.{key}".lstrip("."): {experts: split(0)} for key in stacked}
                travels |= {name: {experts: split(0)}} if expert_layers.takes_choices(layer) else {}
        parameters = [name for name, *_ in named_tensors(module)]
        whole = _merged(dict(whole_layers(module, weights)) if axis else {}, parameters)
        weights = _merged(weights, parameters)
        names = [name for name, _ in module.named_modules()]
        plan = cls(weights | {f"{pattern}{suffix}": row for suffix, rows in
                              ((_PARTS, dealt), (_EXPERTS, travels), (_OUT, outputs))
                              for pattern, row in _merged(rows, names).items()})
        plan.whole = whole
        return plan

    @classmethod
    @api_boundary
    def of_styles(cls, module: nn.Module, styles: Mapping[str, Any] | None = None, axis: str = "tp") -> Plan:
        """A plan from one in torch's, torchtitan's or `transformers`' form.

        styles   a dict of names to styles: `ColwiseParallel()` and the like of torch or of gt.dtensor, or "colwise" and
                 the like of transformers; default: the model's own, `model.tp_plan`
        What has no row (packed matrices, quantization) is left whole, and `print(plan)` says so. Raises ArgumentError
        where a model has no plan of its own, SbpError for a name that fits no module.
        """
        expect(module, nn.Module, "gt.Plan.of_styles of no module", "gt.Plan.of_styles(model)")
        plan = cls()
        for pattern, row, why in rows_of_styles(module, styles, axis):
            if why:
                plan.whole[pattern] = why
            else:
                plan[pattern] = row
        return plan

    @classmethod
    def _on_grid(cls, module: nn.Module, axes: tuple[str, ...]) -> Plan:
        if len(axes) > 3 or len(set(axes)) < len(axes):
            raise SbpError(f"a plan along {len(axes)} axes: {', '.join(axes)}", "layers are cut along one, two or "
                           "three, each of them once", f"gt.Plan.of(model, {tuple(dict.fromkeys(axes))[:3]})")
        layers = [(name, layer) for name, layer in module.named_modules() if name_of_adapted(name) == name]
        tensors, moved = grids.plan_rows([(name, layer, layer_kind(name, layer, module)) for name, layer in layers],
                                         axes)
        moved |= {f"{name}{_PARTS}": {axes[-1]: split(-1)} for name, layer in layers if is_fused(name, layer)}
        named = [name for name, *_ in named_tensors(module)]
        parts = [*named, *[name for name, _ in module.named_modules()]]
        moving = [f"{name}{suffix}" for name in parts for suffix in (_IN, _OUT, _PARTS)]
        return cls(_merged(tensors, named) | _merged(moved, moving))

    @classmethod
    @api_boundary
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote. Raises SbpError with the line that is wrong."""
        expect_path(path, "gt.Plan.load of no file", 'gt.Plan.load("plan.txt")')
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SbpError(f"the plan {os.fspath(path)} cannot be read", str(error),
                           "a file that plan.save wrote") from None
        return cls.parse(text, os.fspath(path))

    @classmethod
    @api_boundary
    def parse(cls, text: str, name: str = "plan") -> Plan:
        """A plan from its text: a heading of axis names, then a row per pattern."""
        expect(text, str, "gt.Plan.parse of no text", "gt.Plan.parse(str(plan))")
        lines = [(k, line) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines or not re.match(r"#\s*name\b", lines[0][1]):
            raise SbpError(f"{name} is not a plan", "its first line names the axes", "# name   dp   tp")
        axes, plan = lines[0][1].lstrip("#").split()[1:], cls()
        if len(set(axes)) < len(axes):
            raise SbpError(f"{name} has an axis twice: {' '.join(axes)}", "each has one column", "# name   dp   tp")
        for k, line in lines[1:]:
            if line.lstrip().startswith("#"):
                if note := re.match(rf"{re.escape(_WHOLE)}(\S+) +(.*)", line.strip()):
                    plan.whole[note[1]] = note[2]
                continue
            words = line.split()
            # from the right, as a pattern may have blanks: "block.0 ->"
            named, values = words[:len(words) - len(axes)], words[len(words) - len(axes):]
            more = len(named) > 1 and (named[-1] == _UNCHANGED or read_sbp(named[-1]) is not None)
            if not named or more or len(values) != len(axes):
                of = counted(len(axes), "axis", "axes")
                raise SbpError(f"{name}, line {k}: {line.strip()!r} is not a row of {of}",
                               f"the heading names {', '.join(axes)}", "pattern   S(0)   B")
            plan[" ".join(named)] = {axis: _parsed(value, f"{name}, line {k}: ") for axis, value in zip(axes, values)
                             if value != _UNCHANGED}
        return plan

    @api_boundary
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text that `print` shows. Not collective: let one process do it."""
        with writing_to(path, "a plan into no file", 'plan.save("plan.txt")'), open(path, "w", -1, "utf-8") as file:
            file.write(f"{self}\n")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that its rows name, in order of appearance."""
        return tuple(dict.fromkeys(axis for row in self._rows.values() for axis in row))

    def __getitem__(self, pattern: str) -> PlanRow:
        return self._rows[pattern]

    @api_boundary
    def __setitem__(self, pattern: str, row: Mapping[str, Any]) -> None:
        expect(pattern, str, "a row of a plan for no name", "plan['*.up.weight'] = {'tp': gt.sbp.split(0)}")
        if not isinstance(row, Mapping):
            raise SbpError(f"the plan's row {pattern!r} is {row!r}", "a row says how along each axis",
                           f"plan[{pattern!r}] = {{'tp': gt.sbp.split(0)}}")
        self._rows[pattern] = {axis: _parsed(s) for axis, s in row.items()}

    def __delitem__(self, pattern: str) -> None:
        del self._rows[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        table = [("# name", *self.axes)]
        table += [(pattern, *[str(row.get(axis, _default_of(pattern))) for axis in self.axes])
                  for pattern, row in self.items()]
        whole = [(f"{_WHOLE}{pattern}", why) for pattern, why in self.whole.items() if pattern not in self._rows]
        return "\n".join([*aligned(table, gap="   "), *aligned(whole, gap="   ")])

    def _repr_html_(self) -> str:
        rows = [[escape(pattern), *(_sbp_chip(row.get(axis, _default_of(pattern))) for axis in self.axes)]
                for pattern, row in self.items()]
        rows += [[escape(pattern), f"whole: {escape(why)}"] for pattern, why in self.whole.items()
                 if pattern not in self._rows]
        return html_table(["name", *self.axes], rows, "what no row fits is broadcast")

    def __repr__(self) -> str:
        return f"Plan({self._rows})"


_CHIP_COLOURS = {"S": 0, "P": 1, "B": 9}             # of ranks, which say nothing here


def _sbp_chip(value: Any) -> str:
    """A split in one colour, what is whole in grey; "-" where a row leaves an axis as it is."""
    return chip(str(value), colour_of(_CHIP_COLOURS[value.kind])) if isinstance(value, Sbp) else escape(str(value))


@api_boundary
def parallelize(module: M, placement: Placement, plan: Mapping[str, Any] | None = None) -> M:
    """Make a module's parameters and buffers global, as a plan says. Returns the module, changed in place.

    placement   with axis names; along those that the plan does not name all is broadcast (dp: data parallel)
    plan        default: `Plan.of(module)`, for the axes "tp", "sp" and "ep" where there are such
    Collective; moves nothing where all is plain. Raises SbpError, before anything is changed, for a row that fits no
    name, an axis that the placement lacks, or a dim that a parameter lacks.
    """
    check_module(module, placement, "parallelize")
    names = placement.names
    if plan is None:
        plan = Plan.of(module, *[axis if axis in names else "" for axis in ("tp", "sp", "ep")])
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    for axis in plan.axes:
        if axis not in names:
            raise SbpError(f"the plan names the axis {axis!r}, which the placement does not have",
                           f"its axes are {', '.join(names) or 'without names'}" + _nearest(axis, names),
                           f"gt.placement({placement.type!r}, ranks, axis_names=({axis!r}, ...))")
    _check_rows(module, plan)                        # before the first change
    to_global(module, placement, lambda name, _: _row_of(plan, name))
    for pattern, row in plan.items():
        _register_hooks(module, pattern, row)
    return module


def _register_hooks(module: nn.Module, pattern: str, row: PlanRow) -> None:
    """Hooks for a row about what modules take or give, or how a parameter lies in use."""
    fitting = [layer for _, layer in _modules_of_row(module, pattern)]
    if pattern.endswith(_IN):
        for layer in fitting:
            layer.register_forward_pre_hook(
                api_boundary(lambda layer, args, named: (_laid_out_as(row, args), _laid_out_as(row, named))),
                with_kwargs=True)
    elif pattern.endswith(_EXPERTS):
        for layer in fitting:
            exchange = expert_layers.TokenExchange()
            layer.register_forward_pre_hook(exchange.to_experts)
            # always: where the module raises, its parameters must be swapped out all the same
            layer.register_forward_hook(exchange.combine, always_call=True)
    elif pattern.endswith(_PARTS):
        for layer in fitting:
            layer.register_forward_hook(api_boundary(lambda layer, args, output: _deal_parts(output)))
    elif pattern.endswith(_OUT):
        for layer in fitting:
            layer.register_forward_hook(api_boundary(lambda layer, args, output: _laid_out_as(row, output)))
        for owner, key in [] if fitting else _parameters_of_row(module, pattern):
            calls: list[SwappedIn] = []              # that are at work
            owner.register_forward_pre_hook(api_boundary(lambda owner, args, key=key, calls=calls: calls.append(
                SwappedIn([(owner, key)], owner._parameters[key], _laid_out_as(row, owner._parameters[key])))))
            owner.register_forward_hook(lambda owner, args, output, calls=calls: calls.pop().end(), always_call=True)


def _deal_parts(output: Any) -> Any:
    """Mark what a module gave."""
    return output.with_dealt_parts() if isinstance(output, GlobalTensor) else output


def _laid_out_as(row: PlanRow, value: Any) -> Any:
    """Global tensors brought to lie as the row says; other axes stay as they are, and so does everything else."""
    if isinstance(value, dict):
        return type(value)((key, _laid_out_as(row, one)) for key, one in value.items())
    if isinstance(value, (tuple, list)):
        return type(value)(_laid_out_as(row, one) for one in value)
    if not isinstance(value, GlobalTensor):
        return value
    return value.to_global(sbp=with_axes(value.sbp, value.placement.names, row))


def _row_of(plan: Plan, name: str) -> PlanRow:
    return first_fit({pattern: row for pattern, row in plan.items() if not pattern.endswith(OF_MODULES)}, name, {})


def _modules_of_row(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    wanted = _without_suffix(pattern)
    return [(name, layer) for name, layer in module.named_modules() if fnmatch.fnmatchcase(name, wanted)]


def _parameters_of_row(module: nn.Module, pattern: str) -> list[tuple[nn.Module, str]]:
    """Owner and key of every parameter that fits."""
    return [(owner, key) for name, owner, key, _, kind in named_tensors(module)
            if kind == "_parameters" and fnmatch.fnmatchcase(name, _without_suffix(pattern))]


def _default_of(pattern: str) -> Any:
    """What an axis that a row does not name stands for."""
    return _UNCHANGED if pattern.endswith(OF_MODULES) else broadcast


def _without_suffix(pattern: str) -> str:
    return pattern[:-len(_OUT)] if pattern.endswith(OF_MODULES) else pattern


def _check_rows(module: nn.Module, plan: Plan) -> None:
    """Every row fits something, and every dim that it splits is there."""
    tensors = {name: tensor for name, _, _, tensor, _ in named_tensors(module)}
    for pattern in plan:
        if pattern.endswith(OF_MODULES):
            parameters = _parameters_of_row(module, pattern) if pattern.endswith(_OUT) else []
            if not _modules_of_row(module, pattern) and not parameters:
                modules = [name for name, _ in module.named_modules() if name]
                raise SbpError(f"the plan's row {pattern!r} fits no module",
                               f"its modules are {_listing(modules)}" + _nearest(_without_suffix(pattern), modules),
                               compiled_fix(_without_suffix(pattern), modules)
                               or "a pattern as in fnmatch, such as 'blocks.* ->'")
            continue
        fitting = [name for name in tensors if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise SbpError(f"the plan's row {pattern!r} fits no parameter or buffer",
                           f"they are {_listing(list(tensors))}" + _nearest(pattern, list(tensors)),
                           compiled_fix(pattern, tensors) or "a pattern as in fnmatch, such as '*.weight'")
    for name, tensor in tensors.items():
        for axis, s in _row_of(plan, name).items():
            if s.is_split and not -tensor.dim() <= s.dim < tensor.dim():
                raise SbpError(f"the plan splits dim {s.dim} of {name!r} along {axis!r}, which has {tensor.dim()} dims",
                               f"its shape is {list(tensor.shape)}", "a row of its own, above the one that fits now")


def _listing(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")


def _nearest(word: str, words: Any) -> str:
    matches = closest(word, words, 3, 0.5)
    return f"; near it: {', '.join(matches)}" if matches else ""


def _parsed(value: Any, at: str = "") -> Sbp:
    sbp = read_sbp(value)
    if sbp is None:
        raise not_an_sbp(value, at)
    return sbp


def _merged(rows: Mapping[str, R], names: list[str]) -> dict[str, R]:
    """Layers that differ by their number in a list share one row, where that fits nothing else."""
    patterns = {name: re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in rows}
    fitting = {pattern: [name for name in names if fnmatch.fnmatchcase(name, pattern)]
               for pattern in set(patterns.values())}
    return {pattern if all(rows.get(other) == row for other in fitting[pattern]) else name: row
            for (name, row), pattern in zip(rows.items(), patterns.values())}
