"""What we use of torch that torch does not promise to keep: every private name, in one place.

Other files take these names from here. Private attributes of torch's objects (`op._schema`, `t._version`) are used
where they are needed. `docs/torch-internals.md` lists both and tells what we would do without them; a test compares.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch._higher_order_ops import flex_attention as flex_attention
from torch._higher_order_ops.flex_attention import (
    create_fw_bw_graph as _derivative_graph,
    flex_attention_backward as flex_attention_backward,
)
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as invoke_subgraph
from torch._library import opaque_object, simple_registry
from torch._library.effects import EffectType
from torch._ops import OpOverload as OpOverload, OpOverloadPacket as OpOverloadPacket, _higher_order_ops
from torch.optim import optimizer
from torch.utils import _device, _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
from torch.utils.data._utils.collate import default_collate_fn_map as default_collate_fn_map

TORCH = torch.torch_version.TorchVersion(torch.__version__)
_c: Any = torch._C                                   # its stubs leave some of these out

# Below the properties and functions that a subclass overrides.
TensorBase = _c.TensorBase
DisableTorchFunctionSubclass, torch_function_enabled = _c.DisableTorchFunctionSubclass, _c._is_torch_function_enabled
no_torch_function = _c._disabled_torch_function_impl
DisableTorchDispatch, below_transforms = _c._DisableTorchDispatch, _c._DisableFuncTorch     # the latter: of torch.func

# A tensor subclass without memory, and the dispatch key that only ours has.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
deny_data_ptr = _c._set_throw_on_mutable_data_ptr
dispatch_key = _c._parse_dispatch_key
CONJ, NEG = dispatch_key("Conjugate"), dispatch_key("Negative")
device_constructors: Callable[[], set[Any]] = _device._device_constructors
neg_view, set_view_replay = torch._neg_view, _c._set_view_replay_enabled     # the second: in this thread
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
DispatchKeySet, ExcludeDispatchKeys = _c.DispatchKeySet, _c._ExcludeDispatchKeyGuard
below_autograd = _c._AutoDispatchBelowAutograd       # inside it, ops do not go by way of autograd
OWN_KEY: Any = dispatch_key("TESTING_ONLY_GenericWrapper")       # no other tensor has it
OWN_KEYS = DispatchKeySet(OWN_KEY)
_BATCH_MODE, _IN_BATCH = dispatch_key("VmapMode"), dispatch_key("Batched")  # of a backward pass of a batch of gradients
KEYS_AFTER_BACKEND_SELECT: Any = _c._dispatch_keyset_full_after(dispatch_key("BackendSelect"))
# What global tensors have in its place while torch.compile traces.
TRACED_KEY: Any = dispatch_key("TESTING_ONLY_GenericMode")
TRACED_KEYS = DispatchKeySet(TRACED_KEY)

data_address: Callable[[torch.Tensor], int] = _c._data_address       # 0 for a tensor without memory
num_dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack
foreach_copy_ = torch._foreach_copy_
storage_use_count: Callable[[int], int] = _c._storage_Use_Count     # by the storage's `_cdata`
fused_sdp_choice = torch._fused_sdp_choice
PRINT_OPTIONS, print_options = torch._tensor_str.PRINT_OPTS, torch._tensor_str.printoptions
assert_async, traced_assert = torch._assert_async, torch._assert     # torch.fx keeps the second
_module = torch.nn.modules.module
BACKWARD_HOOKS_OF_ALL_MODULES: Any = _module._global_backward_hooks, _module._global_backward_pre_hooks
functional_value = torch._from_functional_tensor     # what one stands for at the moment
was_written_in_trace = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]


def has_internal_overlap(t: torch.Tensor) -> bool:
    """Do elements of the tensor surely share memory?"""
    return torch._debug_has_internal_overlap(t) == 1


def call_after_backward(done: Callable[[], None]) -> None:
    """Within a backward pass: call `done` at its end."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(done)


def foreach_supported_types() -> list[list[Any]]:
    """The classes of tensors that optimizers and clipping take many at a time: lists that may be added to."""
    return [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]


def default_store() -> Any:
    """The key-value store of torch.distributed's default group."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """All process groups of torch.distributed in this process, the default one too."""
    return list(dist.distributed_c10d._world.pg_map)


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """What moves a group's tensors on such devices."""
    return group._get_backend(torch.device(device_type))


def all_gather_flat(group: Any, result: torch.Tensor, source: torch.Tensor) -> dist.Work:
    """Begin to gather flat buffers of one length, one after the other, in a backend's group."""
    return group._allgather_base(result, source)


def reduce_scatter_flat(group: Any, result: torch.Tensor, source: torch.Tensor) -> dist.Work:
    """Begin to add up flat buffers, a part of the sum for each rank of a backend's group."""
    return group._reduce_scatter_base(result, source)


def storage_id(t: torch.Tensor) -> int:
    """The same number for tensors of one memory, even of no bytes."""
    return t.untyped_storage()._cdata


def is_composite(func: OpOverload) -> bool:
    """Does torch itself make this op of others, before it reaches us? Not where it has a kernel, too: silu_backward."""
    return has_kernel(func, "CompositeImplicitAutograd") and not has_kernel(func, "CPU")


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
    return torch._C._ForceDispatchKeyGuard(_included(), _excluded().remove(torch._C.DispatchKey.ADInplaceOrView))


def keys_with(lazy_bits: frozenset[str], own: Any = OWN_KEYS) -> Any:
    """The dispatch keys of a global tensor, with those of lazy bits ("conj", "neg")."""
    keys: Any = own.add(CONJ) if "conj" in lazy_bits else own
    return keys.add(NEG) if "neg" in lazy_bits else keys


def reading_lazy_bits() -> AbstractContextManager[Any]:
    """Inside it, kernels see the bits of conj() and similar views, which torch hides on its own way to Python."""
    return torch._C._ForceDispatchKeyGuard(_included(), _excluded().remove(CONJ).remove(NEG))


def reaching_subclasses() -> AbstractContextManager[Any]:
    """Inside it, ops come to subclasses, which torch leaves out while it makes a tensor of a list."""
    return torch._C._ForceDispatchKeyGuard(_included(), _excluded().remove(torch._C.DispatchKey.Python))


def modes_active() -> bool:
    """Does a dispatch mode look on: FakeTensorMode, make_fx, a FLOP counter?"""
    return num_dispatch_modes() > 0


_FAKE = torch._C._TorchDispatchModeKey.FAKE


def in_fake_mode() -> bool:
    """Does FakeTensorMode look on, under which torch's own tensors have no memory?"""
    return modes_active() and torch._C._get_dispatch_mode(_FAKE) is not None


@contextmanager
def without_fake_mode() -> Iterator[None]:
    """Inside, ops do not go by way of FakeTensorMode, where it is active."""
    mode = torch._C._unset_dispatch_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


def fake_mode() -> AbstractContextManager[Any]:
    """Inside it, tensors have shapes and devices, also ones that are not there, but no memory."""
    return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


def next_sequence_number() -> int:
    """What autograd will call the next function that it notes in this thread: they are numbered."""
    return torch._C._autograd._get_sequence_nr()


def backward_sequence_number() -> int | None:
    """The number of the function of autograd whose backward runs in this thread; None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def graph_is_kept() -> bool:
    """Within a backward pass: can the same graph run backward once more, as it was asked to retain it?"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def let_sizes_be_symbols(t: Any) -> None:
    """Let dynamo have symbols for all sizes of a tensor, as far as it has any; nothing is guarded for that."""
    if TORCH >= "2.13":
        t._dynamo_propagated_dynamic_indices = set(range(t.dim()))
    else:                                            # one name for this and for users' marks
        t._dynamo_weak_dynamic_indices = set(range(t.dim()))


def graph_inputs_by_symbol() -> dict[Any, Any] | None:
    """By symbol of a size, what stands for it in the graph that make_fx traces; None where it traces none."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer.sympy_expr_tracker


def make_fx_traces(cls: type) -> bool:
    """Does make_fx trace, and not yet take tensors of this class that it did not see being made?"""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None:
        return False
    return cls not in sys.modules["torch.fx.experimental.proxy_tensor"].HANDLED_TYPES


@contextmanager
def introduced_to_make_fx(cls: type) -> Iterator[None]:
    """Inside, it takes them.

    It hands other subclasses back to be traced as what they are made of, and then knows their results as constants.
    That is what torch.compile wants of it, so it is not for ever.
    """
    tracing: Any = sys.modules["torch.fx.experimental.proxy_tensor"]
    before = tracing.HANDLED_TYPES
    tracing.HANDLED_TYPES = (*before, cls)
    try:
        yield
    finally:
        tracing.HANDLED_TYPES = before


def shapes_of_symbols(n: Any) -> AbstractContextManager[Any]:
    """Inside it, ops on tensors without memory tell shapes in symbols, of the trace that a symbol belongs to."""
    fake: Any = sys.modules["torch._subclasses.fake_tensor"]
    return fake.FakeTensorMode(shape_env=n.node.shape_env, static_shapes=False)


def is_of_a_trace(t: torch.Tensor) -> bool:
    """Is this a tensor by which torch.compile traces: a FakeTensor, or a FunctionalTensor?"""
    return type(t) is not torch.Tensor and type(t).__name__ in ("FakeTensor", "FunctionalTensor")


def compiling_before_2_13() -> bool:
    """What `torch.compiler.is_compiling` tells since 2.13: torch.compile is at work, in what follows dynamo too."""
    return torch.compiler.is_compiling() or torch._guards.CompileContext.try_get() is not None


compiling = torch.compiler.is_compiling if TORCH >= "2.13" else compiling_before_2_13


def break_graph(func: OpOverload) -> NoReturn:
    """End the graph that is being traced before this op, which then runs as it does outside of graphs. Where the user
    asked for one graph, that is an error which names the op."""
    fake: Any = sys.modules["torch._subclasses.fake_tensor"]
    raise fake.DataDependentOutputException(func)


def end_graph(why: str) -> None:
    """End the graph that torch.compile makes of the program's function before what calls this. Where the user asked for
    one graph, that is an error which says why. Outside of graphs, nothing."""
    if compiling():
        torch._dynamo.graph_break(msg=why)


def leave_alone(code: CodeType) -> None:
    """Let torch.compile leave this function alone, and those in it, where it is called outside of what is compiled."""
    alone, inside = _c._dynamo.eval_frame._FrameAction.SKIP, _c._dynamo.eval_frame._FrameAction.DEFAULT
    _c._dynamo.eval_frame.set_code_exec_strategy(code, _c._dynamo.eval_frame._FrameExecStrategy(alone, inside))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            leave_alone(inner)


def register_graph_value(cls: type) -> None:
    """Let values of this class be arguments of what is called in a graph. They must be hashable, have `__fx_repr__` and
    attributes for what a graph asks of them: torch 2.13 fails at properties. torch 2.11 ends a graph at them."""
    registry: Any = opaque_object
    if TORCH >= "2.14":
        registry.register_custom_class(cls, typ="constant")
    elif TORCH >= "2.12":
        registry.register_opaque_type(cls, typ="value")


def register_graph_constant(cls: type) -> None:
    """Let values of this class, which is a frozen dataclass, come up while torch.compile traces: read from a tensor
    that the program has just computed. It then takes them for globals of the program."""
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    source: Any = importlib.import_module("torch._dynamo.source")
    builder.SourcelessBuilder._type_handlers[cls] = lambda tx, value: builder.VariableBuilder(
        tx, source.GlobalSource(tx.output.install_global_by_id(cls.__name__, value)))(value)


def uncounted_writes(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """Inside, autograd does not count what is written to these tensors."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode looks on."""
    return _disable_current_modes()


def order_effects(op: OpOverload) -> None:
    """In a graph, calls of this op stay in order, and none is left out or done twice."""
    simple_registry.singleton.find(op._schema.name).effect.register(EffectType.ORDERED)


def nodes_of_trace() -> Any:
    """The nodes of the graph that make_fx traces, so far; none where it traces none."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return () if mode is None else mode.tracer.graph.nodes


def pass_higher_order_ops(key: torch._C.DispatchKey) -> None:
    """Let tensors with this dispatch key be operands of ops that take functions: they pass it by."""
    for op in _higher_order_ops.values():
        op.fallthrough(key)


def take_higher_order_op(op: Any, key: torch._C.DispatchKey, function: Callable[..., Any]) -> None:
    """Let an op that takes functions come to `function` where an operand has this dispatch key."""
    op.py_impl(key)(function)
    op.non_fallthrough_keys = op.non_fallthrough_keys.add(key)


def derivative_of_score(score: Callable[..., Any], like: torch.Tensor, tensors: Sequence[Any]) -> Callable[..., Any]:
    """What flex attention's backward op wants of a score function: a graph of its gradients. `like`: of which dtype."""
    inputs: Any = (like.new_zeros((), requires_grad=True), *(like.new_zeros((), dtype=torch.int) for _ in range(4)))
    tracing: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")       # slow to import
    with torch.enable_grad(), tracing.TransformGetItemToIndex():
        return _derivative_graph(score, inputs, tuple(tensors))[1]


def block_mask_of_rows(*tensors: Any, **options: Any) -> tuple[Any, ...]:
    """A block mask of flex attention, made of its rows, as the tuple that its op takes."""
    module: Any = sys.modules["torch.nn.attention.flex_attention"]
    return module.BlockMask.from_kv_blocks(*tensors, **options).as_tuple()


def transforms_active() -> bool:
    """Is more asked of tensors than a backward pass: by forward AD, by a transform of torch.func, or by a backward pass
    of a batch of gradients (`is_grads_batched`)?"""
    return (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
            or _c._dispatch_tls_is_dispatch_key_included(_BATCH_MODE))


def stood_for(t: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """What a tensor stands for in a transform of torch.func or a batch of gradients, and which dim of that it does not
    show (-1: it shows all). None of one that stands for itself."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return torch._C._functorch.get_unwrapped(t), torch._C._functorch.maybe_get_bdim(t)
    return (torch._remove_batch_dim(t, _batch_level(), 1, 0), 0) if in_batch(t) else None


def in_batch(t: torch.Tensor) -> bool:
    """Does it stand for a batch of gradients?"""
    return _c._dispatch_keys(t).has(_IN_BATCH)


def as_batch(t: torch.Tensor) -> torch.Tensor:
    """What stands for a batch along dim 0."""
    return torch._add_batch_dim(t, 0, _batch_level())


def _batch_level() -> int:
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


record_function = torch.autograd.profiler.record_function


def profiling() -> bool:
    """Is torch's profiler on?"""
    return torch.autograd.profiler._is_profiler_enabled


class UntracedMode(TorchDispatchMode):
    """A dispatch mode that torch does not import dynamo for, to tell it to keep out of there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
