"""The global tensor: one logical torch tensor whose shards lie on several ranks.

A `GlobalTensor` is a torch.Tensor without memory of its own. Its `spec` says what it is (layout, shape, strides,
dtype); `shards` holds, rank by rank, the plain tensors that this process drives. torch's autograd runs above it as
above any tensor; ops arrive below, at `__torch_dispatch__`.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from globaltensor.algorithms.aliasing import BoxedView, Origin, note_write, take_memory
from globaltensor.algorithms.completed import Completed
from globaltensor.boxings.redistribute import ArrivingShards
from globaltensor.dispatch.core import arrive, remake, traced_operand
from globaltensor.errors import GlobalTensorError, warnings_at_program
from globaltensor.layouts.layout import Shape, Shards, Spec, spec
from globaltensor.layouts.placement import placement, placement as Placement
from globaltensor.layouts.sbp import NdSbp, SbpLike
from globaltensor.op_table.variants import LOSES_OUT, READS_MEMORY
from globaltensor.runtime import custom_ops, trace_order
from globaltensor.runtime.memory import NoMemory, makes_nested, refuse_nested
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import (
    OWN_KEY,
    OWN_KEYS,
    TRACED_KEYS,
    DisableTorchFunctionSubclass,
    OpOverload,
    TensorBase,
    deny_data_ptr,
    introduced_to_make_fx,
    is_of_a_trace,
    keys_with,
    make_fx_traces,
    make_wrapper_subclass,
    modes_active,
    no_torch_function,
    reading_lazy_bits,
)
from globaltensor.runtime.world import device_here
from globaltensor.tensors import (
    attention,
    backward,
    copying,
    dealt_parts,
    flatten,
    flex_attention,
    formulas,
    gradients,
    lookup,
    multihead_attention,
    native_specs,
    products,
    recurrent,
    value_reads,
)
from globaltensor.tensors.full_value import FullTensor, no_gradient_placements, with_bits_of
from globaltensor.tensors.printing import format_of, text_of
from globaltensor.tensors.redistribution import box_from, resolve_layout, to_layout, to_local
from globaltensor.tensors.wrappers import TorchMethods
from globaltensor.tracebacks import api_boundary, fold, torch_boundary

_data: Any = torch.Tensor.data                       # a descriptor of C, as is requires_grad

_TAKEN: dict[Any, Any] = products.TAKEN | lookup.TAKEN | gradients.TAKEN | attention.TAKEN | value_reads.TAKEN
# overrides stay in force inside these
_WITHIN: dict[Any, Callable[..., Any]] = {**backward.TAKEN, **multihead_attention.TAKEN}
_requires_grad: Any = TensorBase.requires_grad


if TYPE_CHECKING:
    import numpy as np


class GlobalTensor(TorchMethods):
    """Made by the factories (`gt.randn`, ...), `gt.from_full`, `gt.from_local`, `gt.from_shards` and `to_global`."""

    spec: Spec
    boxed_view: BoxedView | None = None              # a boxed view: how it was made, without native code
    arriving: ArrivingShards | None = None           # until they are needed
    viewed = False                                   # a view was made of it, without native code
    traced = False                                   # its shards are those of a trace (flatten.py)
    completed: Completed | None = None               # of a pending one, with nothing pending, without native code
    made_after = 0                                   # of a trace: no later boxing leads to it (trace_order.py)
    emptied_later: Any = None                        # what keeps its memory, which ZeRO 3 frees behind a layer
    deals_parts = False                              # its parts are dealt out when it is split (dealt_parts.py)
    lineage: int = 0                                 # of its value: what ranks agree on (runtime/lineage.py)
    _shards: Shards

    @classmethod
    def wrap(cls, of: Spec, shards: Shards, keys: Any = OWN_KEYS) -> GlobalTensor:
        """A global tensor of these shards; nothing is checked."""
        first = next(iter(shards.values()), None)
        if first is not None and keys is OWN_KEYS and is_of_a_trace(first):
            return cls.wrap_traced(of, shards)
        device = device_here(of.placement.type) if first is None else first.device
        x = make_wrapper_subclass(cls, of.shape, strides=of.stride, dtype=of.dtype, device=device,
                                  _extra_dispatch_keys=keys_with(of.lazy_bits, keys))
        deny_data_ptr(x)
        x.spec, x._shards = of, shards
        return x

    @classmethod
    def wrap_traced(cls, of: Spec, shards: Shards) -> GlobalTensor:  # by which torch.compile traces: fake ones, or none
        x = cls._wrap_in_python(of, shards, TRACED_KEYS)
        x.traced, x.made_after = True, trace_order.so_far()
        return x

    _wrap_in_python = wrap                           # native code has a `wrap` of its own

    @property
    def shards(self) -> Shards:
        """The parts this process drives, rank -> plain tensor; those of a boxed view are made when they are read."""
        if self.arriving is not None:
            self._shards, self.arriving = self.arriving.read(), None
        return self._shards if self.boxed_view is None else self.boxed_view.read()

    @shards.setter
    def shards(self, value: Shards) -> None:
        self._shards, self.arriving, self.completed, self.boxed_view = value, None, None, None

    @property
    def origin(self) -> Origin | None:
        """The call that made this boxed view; None for a tensor that has memory."""
        return None if self.boxed_view is None else self.boxed_view.origin

    @classmethod
    @api_boundary
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        within = _WITHIN.get(func)
        if within is not None:
            return within(*args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            return _TAKEN.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    @api_boundary
    def __torch_dispatch__(cls, func: Any, types: Any,  # type: ignore[override]  # torch declares a function of C
                           args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if modes_active() and make_fx_traces(cls) and not traced_operand(args, kwargs):
            with introduced_to_make_fx(cls):
                return func(*args, **kwargs or {})   # once more, by way of the mode
        with reading_lazy_bits():
            return arrive(cls, func, *args, **kwargs or {})

    # ---------------------------------------------------------------------------------------------- what it is

    @property
    def placement(self) -> Placement:
        """Where it lives."""
        return self.spec.layout.placement

    @property
    def sbp(self) -> NdSbp:
        """How it lies, one sbp per placement axis."""
        return self.spec.layout.sbp

    @property
    def is_global(self) -> bool:
        return True

    def to_global(self, placement: Placement | None = None, sbp: SbpLike | None = None,
                  grad_sbp: SbpLike | None = None, wait: bool = True) -> GlobalTensor:
        """Boxing: the same value on another placement, with another sbp, or both; differentiable.

        placement  default: x's own
        sbp        one, one per axis, or a dict by axis name; default: as it is, where the placement has as many axes,
                   else broadcast
        grad_sbp   the sbp in which the gradient leaves, on x's placement (default: dual to x's)
        wait       False: return while it moves between processes. The first use of a value of the result waits for it,
                   on all ranks at the same point of the program; until then x may not be written to. Recorded there

        Along one axis of n ranks, for a tensor of T bytes in all, what each rank receives:

            src    dst    collective        rounds   bytes
            S(i)   S(i)   none              0        0
            S(i)   S(j)   all-to-all        1        (n - 1) / n**2 * T
            S(i)   B      all-gather        1        (n - 1) / n * T
            S(i)   P      none              0        0
            B      S(i)   none              0        0
            B      B      none              0        0
            B      P      none              0        0
            P      S(i)   reduce-scatter    1        (n - 1) / n * T
            P      B      all-reduce        2        2 * (n - 1) / n * T
            P      P      none              0        0

        A P of another op is reduced first: P(max) to P(sum) costs as much as P to S. Between two ranks, and for tensors
        so small that rounds cost more than bytes, an all-reduce is one round, in which each rank receives (n - 1) * T.
        Over several axes, and between placements, the plan is the cheapest sequence of such steps. `gt.record()` tells
        what was moved.

        Raises, before anything moves, SbpError for a placement that is none, sbps that are not one per axis, or a split
        dim that x lacks; on all ranks DisagreementError where they mean different layouts or ask at different
        lines of the program, and TransportError where one of them died.
        """
        try:
            return box_from(self, placement, sbp, grad_sbp, wait)
        except BaseException as error:               # written out: a decorator would cost as much as a small boxing
            fold(error)
            raise

    @api_boundary
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch calls it so
        return text_of(self)

    @api_boundary
    def _set_data(self, value: torch.Tensor) -> None:
        if not isinstance(value, GlobalTensor):
            raise GlobalTensorError("x.data = t of a global tensor x and a plain tensor t",
                                    f"x would have the memory of t, and has parts on {self.spec.layout}",
                                    "x.data.copy_(t), or x.data = gt.from_full(t, x.placement, x.sbp); "
                                    "a library's resize_token_embeddings before gt.parallelize")
        note_write(self)                             # who watches its memory watches other memory from now on
        with DisableTorchFunctionSubclass():
            _data.__set__(self, value)
        if torch_ext is None:
            take_memory(self, value)
        gradients.watch_anew(self)

    if TYPE_CHECKING:
        data: GlobalTensor
        with_dealt_parts: Callable[[], GlobalTensor]
    else:
        split, chunk, with_dealt_parts = dealt_parts.split_parts, dealt_parts.chunk_parts, dealt_parts.with_dealt_parts
        data = property(copying.data_of, _set_data, doc="As torch has it; to be set to a global tensor, of any layout.")

    # --------------------------------------------------------------------------------------------- its gradient

    @property
    @api_boundary
    def grad(self) -> GlobalTensor | None:
        """The gradient, in the tensor's own layout: reading one reduces all that are still pending, together."""
        return gradients.read_grad(self)

    @grad.setter
    @api_boundary
    def grad(self, value: torch.Tensor | None) -> None:
        gradients.replace_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        gradients.replace_grad(self, None)

    @api_boundary
    def requires_grad_(self, requires_grad: bool = True) -> GlobalTensor:
        super().requires_grad_(requires_grad)
        if requires_grad:
            gradients.watch_leaf(self)
        return self

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)

    @requires_grad.setter
    @api_boundary
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> GlobalTensor:
        """self[...] = src; of a global tensor on another placement too, which this asks to be moved."""
        if isinstance(src, GlobalTensor) and src.placement != self.placement:
            dst = self.spec.layout.without_partials
            src = to_layout(src, dst if src.shape == self.shape else dst.replicated)
        with warnings_at_program(value_reads.loses_part(self, src)):
            super().copy_(src, non_blocking)
        if self.origin is None and not (self.traced or self.is_inference()):
            torch.autograd.graph.increment_version(self.shards.values())     # a graph may have saved them
        return self

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None,  # type: ignore[override]  # options by name
                   **options: Any) -> torch.Tensor:
        """A plain tensor of this data, with this tensor's dtype and device."""
        return value_reads.new_plain(self, data, {"dtype": dtype, **options})

    def new(self, *args: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]  # global, or plain
        """Of sizes a global tensor, as `new_empty`; of data a plain one, with this tensor's dtype and device."""
        if args and (isinstance(args[0], torch.Size) or all(isinstance(n, int) for n in args)):
            return self.new_empty(*args)
        return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **options)

    def data_ptr(self) -> int:
        """0, by which torch knows a tensor without memory of its own."""
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        """As large as the tensor, without memory; of a traced one the same at each call, by which graphs know it."""
        if makes_nested(sys._getframe(1)):
            refuse_nested()
        storage = NoMemory(self.spec.expected.nbytes if self.traced else self.nbytes, device="meta")
        return vars(self).setdefault("no_memory", storage) if self.traced else storage

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("a global tensor has no memory of its own; try x.full_tensor() or x.shards[rank]")

    @api_boundary
    def apply_(self, *_: Any, **__: Any) -> Any:
        raise GlobalTensorError("apply_, map_, share_memory_ or DLPack of a global tensor",
                                "it has no memory of its own",
                                "x.full_tensor(), x.to_local(), or its shards: x.shards[rank]")

    map_ = map2_ = share_memory_ = __dlpack__ = apply_

    # ------------------------------------------------------------------------------------------------ its value

    @api_boundary
    def to_local(self) -> torch.Tensor:
        """This rank's part, sharing its memory; differentiable, gradients of the parts lie dual to x.

        Raises GlobalTensorError in a process that drives several ranks, or none of x's.
        """
        return to_local(self)

    @api_boundary
    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole value as a plain tensor, on every process; collective, and differentiable. Of a tensor on a mesh of
        gt.dtensor each rank may bring its part of a gradient that lies as `grad_placements` say."""
        return FullTensor.of(self) if grad_placements is None else self._full_with_gradient(grad_placements)
    _full_with_gradient = no_gradient_placements     # until gt.dtensor is imported

    @torch_boundary
    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The whole value as a NumPy array; collective. A copy, and read-only: writes would not reach the tensor."""
        whole = self.detach().full_tensor() if force else with_bits_of(self, self.full_tensor())
        array = whole.numpy(force=force)
        array.flags.writeable = False
        return array

    @api_boundary
    def tolist(self) -> Any:
        """The whole value as nested lists; collective."""
        return self.full_tensor().tolist()

    @api_boundary
    def __format__(self, format_spec: str) -> str:
        return format_of(self, format_spec)

    @torch_boundary
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array.astype(array.dtype if dtype is None else dtype) if copy or dtype is not None else array

    @api_boundary
    def __reduce_ex__(self, protocol: Any) -> Any:
        if (view := copying.saved_view(self)) is not None:
            return view
        own = self.spec                              # as plain values, which `torch.load(weights_only=True)` reads
        return _rebuild, (self.placement, [str(s) for s in self.sbp], copying.saved_shards(self), own.shape,
                          own.stride, own.dtype, *copying.saved_marks(self), sorted(own.lazy_bits))

    __copy__, __deepcopy__, as_subclass = copying.same_memory_copy, copying.deep_copy, copying.keep_global
    __float__, __int__, __index__, __bool__, __complex__ = value_reads.NUMBERS
    __dict__ = property(copying.attributes.__get__, copying.swap_attributes)     # `swap_tensors` alone sets it


def _rebuild(on: placement, sbps: list[str], shards: Shards, shape: Shape, stride: Shape, dtype: torch.dtype,
             requires_grad: bool, is_parameter: bool, attributes: dict[str, Any], lazy_bits: Sequence[str] = ()) -> Any:
    """A tensor that was pickled, of shards that this process has."""
    of = spec(resolve_layout(on, sbps, len(shape)), tuple(shape), tuple(stride), dtype, lazy_bits=frozenset(lazy_bits))
    return copying.with_marks(GlobalTensor.wrap(of, shards), requires_grad, is_parameter, attributes)


torch.serialization.add_safe_globals([_rebuild, copying.view_again, placement])  # it runs nothing that the file says


def _at_our_key(func: OpOverload) -> None:
    """Give an op its function in Python, at our own key: what the native dispatcher calls where it has no recipe."""
    func.py_kernels.pop(OWN_KEY, None)
    func.py_impl(OWN_KEY)(partial(arrive, GlobalTensor, custom_ops.named_now(func)))     # a partial has no frame


flatten.let_torch_trace(GlobalTensor)
_aten = torch.library.Library("aten", "IMPL", "TESTING_ONLY_GenericWrapper")
_kernels: dict[Any, Callable[..., Any]] = {func: partial(arrive, GlobalTensor, func)
                                           for func in READS_MEMORY + LOSES_OUT}
for _func, _kernel in (_kernels | recurrent.KERNELS | value_reads.KERNELS | lookup.KERNELS | formulas.KERNELS).items():
    _aten.impl(_func.name(), _kernel)
flex_attention.take_flex_attention()
if torch_ext is None:
    _everything = torch.library.Library("_", "IMPL", "TESTING_ONLY_GenericWrapper")
    _everything.fallback(torch.library.fallthrough_kernel)
    _aten.impl("_has_compatible_shallow_copy_type", value_reads.may_take_data)
else:                                                # the same class, with its memory and its ways in C++
    native_specs.bind_specs()
    torch_ext.bind_class(GlobalTensor, GlobalTensor.wrap_traced)
    native_class: Any = GlobalTensor
    native_class.wrap = torch_ext.wrap
    native_class.__torch_function__ = no_torch_function
    native_class.__setitem__ = value_reads.assign
    torch_ext.on_view_read(api_boundary(remake))
    torch_ext.on_arrival(api_boundary(_at_our_key))
    torch_ext.on_lookup(api_boundary(lookup.Lookup.apply))
    torch_ext.on_pick(api_boundary(lookup.PickedElements.apply))
