"""ZeRO: what an optimizer keeps, and then more, is split along data parallelism instead of being held by every rank.

    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=1e-3), axis="dp", stage=1)

An optimizer of torch's is handed parts: of every parameter that is broadcast along the axis, a leaf of its own that is
split along it. Its state lies like the part, so each rank has 1/N of it. Nothing about the loop changes: gradients come
split (a reduce-scatter instead of an all-reduce), and are those of the parameter and of its part alike; after each step
the parts that it changed are gathered into the parameters, in one move, or over a link during the next forward pass
(write_behind.py).

    stage 1   optimizer state split. Sent per rank and step: 2 (N-1)/N of the parameters' bytes, as without ZeRO
    stage 2   also gradients: pending sums are split during backward, once 25 MB wait: so for every micro-batch
    stage 3   also the parameters: gathered where an op needs them, forward and backward, or given the model a layer at
              a time, one layer ahead (zero3.py). 3 (N-1)/N

Parameters of 16 bits get parts of float32, master weights: bytes per rank for P parameters and Adam are 4P + 12P/N,
2P + 14P/N and 16P/N. Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO", SC'20, table 1.
"""
from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, KeysView, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import SbpError, closest, expect
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.sbp import split
from globaltensor.parallel.master_params import MasterParams
from globaltensor.parallel.offload import check_offload, folder_of, offload_state
from globaltensor.parallel.optimizer_state import globalize_state, lay_like, split_state
from globaltensor.parallel.state_by_name import know_parameters_by_name
from globaltensor.parallel.zero3 import ShardedLayers
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

O = TypeVar("O", bound=torch.optim.Optimizer)


@api_boundary
def zero(optimizer: O, axis: str = "dp", stage: int = 1, model: nn.Module | None = None,
         offload: str | os.PathLike[str] | None = None) -> O:
    """Split an optimizer's state (1), the gradients (2) and the parameters (3) along an axis. Returns the optimizer.

    optimizer   new, or one that has taken steps: what it keeps is split, too, and so are parameters that its
                `add_param_group` is given later. One that works element by element, as Adam and SGD do, moves nothing
                in its step; one that looks at whole matrices, as Muon does, gathers what it needs
    axis        a name that the parameters' placements have; parameters that are split along it already stay as they are
    model       of stage 3: gather its parameters layer by layer, one layer ahead (zero3.py), not op by op
    offload     where the state is while it is not stepped (offload.py): in files of a folder on a disk; or "cpu", in
                the host's memory, which changes nothing of parameters that are there. Parameters on GPUs and other
                devices that are gathered layer by layer (stage 3, with a model) are too, but for those of 16 bits.
                torch's optimizers are stepped 32 MB of parameters at a time, and others all at once, as a step of
                theirs may count or add up what it steps: then all of the state is brought for it
    Collective; moves nothing yet. Raises SbpError for another stage, a model where it is not stage 3 or whose
    parameters are not the optimizer's, a parameter that is not global or lacks the axis, an optimizer that `gt.zero`
    was called for before, or that calls no hooks; ArgumentError for offload of LBFGS, OSError for a folder that cannot
    be made. The optimizer is then as it was.
    """
    expect(optimizer, torch.optim.Optimizer, "gt.zero of no optimizer",
           "gt.zero(torch.optim.AdamW(model.parameters()))")
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise SbpError(f"ZeRO has no stage {stage!r}", "1 splits optimizer state, 2 gradients too, 3 parameters too",
                       "gt.zero(optimizer, stage=1)")
    if model is not None and stage != 3:
        raise SbpError(f"gt.zero was told the model for stage {stage}",
                       "only stage 3 gathers parameters layer by layer", "stage=3, or no model")
    if model is not None:
        expect(model, torch.nn.Module, "gt.zero told of no model", "gt.zero(optimizer, stage=3, model=model)")
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if stepped.isdisjoint(map(id, model.parameters())):
            raise SbpError("gt.zero was told another model than the optimizer's", "the optimizer has none of its "
                           "parameters", "gt.zero(torch.optim.AdamW(model.parameters()), stage=3, model=model)")
    if offload is not None:
        check_offload(offload, optimizer)
    by_layer: set[int] = set()                       # ids of the parameters that are gathered with their layers

    def gather_by_layer() -> None:
        if model is not None:
            layers = ShardedLayers.of(model, axis, without=by_layer)
            by_layer.update(id(p) for layer in layers.layers for p, _ in layer.parameters)
            if offload is not None:
                layers.offload(optimizer, folder_of(offload))

    _step_parts(optimizer, axis, lambda _: stage, gather_by_layer)
    if offload is not None:
        offload_state(optimizer, offload)
    return optimizer


def zero_by_parameter(optimizer: O, axis: str, stage_of: Callable[[torch.Tensor], int]) -> O:
    """As `zero`, op by op where it gathers, with a stage for each parameter: 0 leaves one as it is."""
    _step_parts(optimizer, axis, stage_of)
    return optimizer


def _step_parts(optimizer: torch.optim.Optimizer, axis: str, stage_of: Callable[[torch.Tensor], int],
                after: Callable[[], None] = lambda: None) -> None:
    """Hand the optimizer the parts that it steps instead of parameters, also of groups that are added later. `after` is
    called when it has them."""
    _check_hooks(optimizer)
    pairs, own, kind = MasterParams(), weakref.ref(optimizer), type(optimizer)       # weak: it goes with its last user

    def add_param_group(group: dict[str, Any]) -> None:
        optimizer = own()
        assert optimizer is not None                 # its method was called
        stepped = {id(p) for before in optimizer.param_groups for p in before["params"]}
        kind.add_param_group(optimizer, group)
        try:
            if any(id(gradients.part_of(p)) in stepped for p in group["params"]):
                raise ValueError("some parameters appear in more than one parameter group")      # as torch says it
            _split_groups(optimizer, [group], axis, lambda t: 0 if gradients.part_of(t) is t else stage_of(t), pairs)
        except BaseException:
            del optimizer.param_groups[-1]
            raise
        after()
        pairs.watch()

    _split_groups(optimizer, optimizer.param_groups, axis, stage_of, pairs)
    after()
    optimizer.add_param_group = add_param_group  # type: ignore[assignment, method-assign]  # of this one
    _register_zero_hooks(optimizer, pairs)


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.register_load_state_dict_post_hook(lambda _: None).remove()
    except AttributeError as error:
        name = type(optimizer).__name__
        raise SbpError(f"gt.zero of a {name} that calls no hooks", "its __init__ does not call that of torch.optim."
                       "Optimizer, as a wrapper of another optimizer may not",
                       f"gt.zero(optimizer) of the one inside, and {name}(...) of that") from error


def _split_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], axis: str,
                  stage_of: Callable[[torch.Tensor], int], pairs: MasterParams) -> None:
    layouts = [[(p, _zero_layout(p, axis) if stage_of(p) else None) for p in group["params"]]
               for group in groups]                  # of all, before any is changed: an error leaves them as they were
    for group, wanted in zip(groups, layouts):
        group["params"] = [p if dst is None else _part_to_step(p, dst, stage_of(p), pairs) for p, dst in wanted]
        for (p, dst), part in zip(wanted, group["params"]):
            if dst is not None and p in optimizer.state:
                optimizer.state[part] = split_state(optimizer.state.pop(p), p, part)


def _register_zero_hooks(optimizer: torch.optim.Optimizer, pairs: MasterParams) -> None:
    pairs.watch()
    know_parameters_by_name()
    _give_state_by_parameter(optimizer)
    optimizer.register_load_state_dict_post_hook(api_boundary(globalize_state))
    optimizer.register_load_state_dict_post_hook(_give_state_by_parameter)
    optimizer.register_step_pre_hook(_take_state)
    optimizer.register_state_dict_pre_hook(_take_state)
    optimizer.register_step_pre_hook(api_boundary(lambda optimizer, *_: pairs.before_step(optimizer)))
    optimizer.register_step_post_hook(api_boundary(lambda optimizer, *_: pairs.gather(optimizer)))
    optimizer.register_state_dict_post_hook(api_boundary(lambda optimizer, state: state.update(
        pairs.saved_masters(optimizer))))
    optimizer.register_load_state_dict_pre_hook(api_boundary(lambda optimizer, state: pairs.load(optimizer, state)))


class _StateOfParts(defaultdict[Any, Any]):
    """An optimizer's state, by what it steps, and iterated so. A parameter stands for its part, whatever is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.by_parameter: dict[Any, Any] = {}       # part -> parameter, of those that were asked for so since a step

    def __missing__(self, key: Any) -> Any:
        part = self._own_key(key)
        return super().__missing__(key) if part is key else self[part]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._own_key(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._own_key(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._own_key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._own_key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._own_key(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(self._own_key(key), default)

    def update(self, *others: Any, **names: Any) -> None:
        for key, value in dict(*others, **names).items():
            self[key] = value

    def __ior__(self, other: Any) -> _StateOfParts:  # type: ignore[misc]  # as dict's
        self.update(other)
        return self

    def keys(self) -> KeysView[Any]:  # type: ignore[override]  # it asks `in` of this
        return KeysView(self)

    def _own_key(self, key: Any) -> Any:
        part = gradients.part_of(key) if isinstance(key, GlobalTensor) else None
        if part is None or part is key:
            return key
        self.by_parameter[part] = key
        return part

    def split_whole(self) -> None:
        """Split what a program may have made like a parameter, for what is stepped in its place."""
        for part, p in self.by_parameter.items():
            lay_like(super().get(part), p, part)
        self.by_parameter.clear()


def _give_state_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer.state, _StateOfParts):
        state, optimizer.state = optimizer.state, _StateOfParts(dict)
        optimizer.state.update(state)


def _take_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step or `state_dict`: what a program changed of the state, or put in its place, as a step needs it."""
    _give_state_by_parameter(optimizer)
    state: Any = optimizer.state
    state.split_whole()


def _zero_layout(p: torch.Tensor, axis: str) -> Layout | None:
    """The parameter's layout, split along the axis too; None where there is nothing to split.

    Along the longest of the dims that no other axis splits: a rank's part is then a part of what it has.
    """
    if not isinstance(p, GlobalTensor):
        raise SbpError("gt.zero takes an optimizer of global parameters", f"one of shape {list(p.shape)} is plain",
                       "gt.parallelize(model, placement) before gt.zero")
    if gradients.part_of(p) is p:
        raise SbpError("gt.zero of an optimizer that it was called for before", "it steps parts of parameters already",
                       "gt.zero(...) once for each optimizer")
    names = p.placement.names
    if axis not in names:
        near = "".join(map(repr, closest(axis, names))) or "..."
        raise SbpError(f"a parameter of shape {list(p.shape)} has no axis {axis!r}",
                       f"its placement has {', '.join(names) or 'axes without names'}", f"axis={near}, one of these")
    return split_layout(p.spec.layout, tuple(p.shape), axis)


def split_layout(lies: Layout, shape: Shape, axis: str) -> Layout | None:
    """The layout of a parameter of which each rank of the axis has a part; None where there is nothing to split."""
    taken = {s.dim for s in lies.sbp if s.is_split}
    dims = range(len(shape))
    free = [d for d in dims if d not in taken] or list(dims)     # a bias that tp splits: once more
    if not lies.sbp[lies.placement.names.index(axis)].is_broadcast or not free:
        return None
    return lies.along({axis: split(max(free, key=lambda d: shape[d]))})


def _part_to_step(p: Any, dst: Layout, stage: int, pairs: MasterParams) -> Any:
    """What the optimizer works on in the place of p; of one that it has worked on before, the same."""
    before = gradients.part_of(p)
    if before is not None and before.dtype == accumulation_dtype(p.dtype) and pairs.has(before):
        return before
    with torch.no_grad():
        part, = redistribute([p], [dst], "zero")
        master = accumulation_dtype(p.dtype)
        if stage == 3:
            p.data = part
            if master == p.dtype:                    # the parameter is its own part from now on
                gradients.set_grad_layout(p, dst, early=True)
                return p
        part = nn.Parameter(part.to(master), requires_grad=p.requires_grad)
    # Stage 1 leaves them pending until they are read: a step of many micro-batches reduces once. Stage 2 gives that up
    # for memory.
    gradients.set_grad_layout(p, dst, early=stage > 1)
    pairs.append(p, part)
    return part
