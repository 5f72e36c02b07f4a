"""How torch.compile sees a global tensor: as the shards that this process drives, and a spec.

torch's protocol for such tensors has two halves. Flattened, a tensor is its shards, one attribute per rank (`_s0`,
`_s1`, ...), and its spec; a graph takes and returns those. Unflattened of fake shards, it is a tensor by which torch
traces: our dispatch then runs as usual; what it does with shards (ops of torch, boxings, random draws) is the graph.

So a graph is made for layouts, dtypes and sizes, and for this process's ranks. Another layout of an input makes another
graph; a graph that torch finds on disk is one of a process that drives the same ranks (`_stable_hash_for_caching`).
Where torch has symbols for sizes, one graph is for many (dispatch/symbolic.py): the sizes of the whole are symbols, and
those of its shards are told by them. All ranks must make their graphs at the same calls, as what they decide may depend
on the sizes that they make them with; so none may ask what is so on one rank alone.

A tensor of a trace is a wrapper made in Python, whatever native code there is: its sizes may be symbols. It has a
dispatch key of its own, by which products and lookups are taken before torch decomposes them.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from globaltensor.algorithms.aliasing import value_spec
from globaltensor.boxings.graph_merging import inductor_merges
from globaltensor.boxings.graph_products import register_product_pass
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Shards, Spec, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.sbp import Sbp
from globaltensor.layouts.symbols import has_symbols, tell_symbol_by
from globaltensor.runtime.agreement import compare_plain
from globaltensor.runtime.compiler_skips import keep_compiler_out
from globaltensor.runtime.graph_symbols import in_graph
from globaltensor.runtime.torch_internals import (
    TRACED_KEYS,
    ExcludeDispatchKeys,
    compiling,
    is_of_a_trace,
    let_sizes_be_symbols,
    register_graph_constant,
    register_graph_value,
    storage_id,
)
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors import attention, lookup, products
from globaltensor.tensors.full_value import FromFull
from globaltensor.tensors.graph_edges import expect_global_tangents, is_view_to_torch, watch_graph_edges
from globaltensor.tensors.graph_gradients import read_for_guard, read_for_new_graph
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import api_boundary

T = TypeVar("T", bound=Callable[..., Any])


def let_torch_trace(cls: Any) -> None:
    """Give the class of global tensors torch's protocol."""

    @remembered
    def names(of: Layout) -> list[str]:
        ranks = local_ranks_of(of.placement)
        if not ranks:
            raise GlobalTensorError(f"torch.compile of a tensor on {of.placement}, of which this process has no part",
                                    "what is traced are the shards of a process, and it has none",
                                    "this outside of what is compiled, or a placement of all ranks")
        for nth in range(len(ranks)):
            setattr(cls, f"_s{nth}", _nth_shard(nth))
        return [f"_s{nth}" for nth in range(len(ranks))]

    def flattened(x: Any) -> tuple[list[str], Spec]:
        """Guards call it twice for every parameter, whenever a graph is called."""
        if compiling():
            if not x.traced:
                read_for_new_graph()
            keep_compiler_out()
            _register_graph_calls()
            inductor_merges()
            register_product_pass()
            watch_graph_edges()
            expect_global_tangents(True)             # torch looks for a graph on disk by its settings
            for shard in x.shards.values() if not isinstance(x, torch.nn.Parameter) else ():
                let_sizes_be_symbols(shard)          # of parameters it would only be more to guard
        elif not x.traced:
            read_for_guard(x)
        own = x.spec
        if not x.traced:
            return names(own.layout), own
        # symbols stand for sizes within one trace, and this outlives it: torch hands sizes back by themselves
        return names(own.layout), (value_spec(own) if x.origin is not None else own).expected

    def unflattened(inner: Mapping[str, torch.Tensor], of: Spec, size: Sequence[Any], stride: Sequence[Any]) -> Any:
        shards = dict(zip(sorted(local_ranks_of(of.placement)), inner.values()))
        if any(n is None for n in size):
            raise GlobalTensorError("torch.compile of an op whose gradient has a graph for one size only, in a graph "
                                    "that is for any", "the gradient has no rule for symbols in the place of sizes",
                                    "torch.compile(..., dynamic=False)")
        traced = any(map(is_of_a_trace, inner.values()))
        sizes, strides = in_graph((tuple(size), tuple(stride))) if traced else (tuple(size), tuple(stride))
        own = spec(of.layout, sizes, strides, of.dtype, of.copied and traced, of.lazy_bits)
        if traced:
            _tie_sizes(own, shards)
        return cls.wrap(own, shards if traced else _apart(shards))

    register_graph_value(placement)
    cls.__tensor_flatten__, cls.__tensor_unflatten__ = flattened, staticmethod(unflattened)
    cls.__metadata_guard__ = classmethod(_same_but_for_sizes)
    cls.__coerce_tangent_metadata__ = lambda x: to_layout(x, x.spec.layout.without_partials)
    cls.__coerce_same_metadata_as_tangent__ = _in_layout_of
    torch.Tensor.__coerce_same_metadata_as_tangent__ = _placed_like  # type: ignore[attr-defined]  # torch asks for it
    cls._stable_hash_for_caching, cls._is_view = _name_for_cache, is_view_to_torch
    _library.impl("linear", _here(products.linear))
    _library.impl("matmul", _here(products.matmul))
    _library.impl("einsum", _here(lambda equation, operands, path=None: products.einsum(equation, *operands)))
    _library.impl("embedding", _here(_embedding))
    _library.impl("scaled_dot_product_attention", attention.traced_attention)


def _tie_sizes(own: Spec, shards: Shards) -> None:
    """Tell torch of every symbol of a shard what it is of those of the whole: all that is asked is asked of these,
    which are the same on all ranks. Where the whole has a number, or parts are uneven, the shard has a number."""
    for rank, shard in shards.items():
        if has_symbols(shard.shape) or own.symbolic:
            part = own.local_shape(rank)
            for n, size in zip(shard.shape, part):
                tell_symbol_by(n, size)
            if tuple(shard.shape) != part:
                raise GlobalTensorError(f"rank {rank} holds a shard of shape {list(shard.shape)} in a trace",
                                        f"its part of {own} is of shape {list(part)}", "mark_dynamic of fewer dims")


@lru_cache(1)
def _register_graph_calls() -> None:
    """Of what a program may do with layouts inside: sbps that it reads from a tensor, and calls that make tensors."""
    register_graph_constant(Sbp)
    for function in _called_in_graphs:
        torch.compiler.allow_in_graph(function)


_called_in_graphs: list[Callable[..., Any]] = []


def called_in_graphs(function: T) -> T:
    """Decorate a function that makes global tensors of what dynamo knows: a graph calls it as it stands.

    To tell dynamo of that is to import it, which takes a second. So it is told by the first graph that comes here.
    """
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            _register_while_tracing()
        return function(*args, **kwargs)

    public = api_boundary(called)
    _called_in_graphs.extend((function, public))
    return public  # type: ignore[return-value]  # it takes and gives what the function does


def _register_while_tracing() -> None:
    """What dynamo calls when it comes here, and does not trace: as `torch.compiler.assume_constant_result`, which would
    import dynamo, lets it."""
    _register_graph_calls()


_register_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # which is dynamo's


def _nth_shard(nth: int) -> property:

    def get(x: Any) -> torch.Tensor:
        shards = x.shards
        return shards[sorted(shards)[nth] if len(shards) > 1 else next(iter(shards))]

    def replace(x: Any, value: torch.Tensor) -> None:
        shards = x.shards
        shards[sorted(shards)[nth]] = value
        x.shards = shards

    return property(get, replace)


_library = torch.library.Library("aten", "IMPL", "TESTING_ONLY_GenericMode")
_passed_by = torch.library.Library("_", "IMPL", "TESTING_ONLY_GenericMode")
_passed_by.fallback(torch.library.fallthrough_kernel)


def _here(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function at the key of traced tensors, which calls torch's own where it wants that."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeys(TRACED_KEYS):
            return function(*args, **kwargs)

    return kernel


def _embedding(weight: Any, indices: Any, padding: int = -1, scale_grad_by_freq: bool = False,
               sparse: bool = False) -> torch.Tensor:
    return lookup.embedding(indices, weight, None if padding < 0 else padding,
                            scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _apart(shards: Shards) -> Shards:
    """The shards, none of which share memory: a graph may compute once what several ranks hold alike, and a write to
    one shard would be a write to all."""
    apart: Shards = {}
    memories: set[int] = set()
    for rank, shard in shards.items():
        apart[rank] = shard.clone() if storage_id(shard) in memories else shard
        memories.add(storage_id(apart[rank]))
    return apart


def _same_but_for_sizes(cls: type, ours: Spec, theirs: Spec) -> bool:
    """Is a graph that was made for a tensor of one spec good for one of the other? torch itself looks at sizes."""
    return ((ours.layout, ours.dtype, ours.copied, ours.lazy_bits, ours.ndim)
            == (theirs.layout, theirs.dtype, theirs.copied, theirs.lazy_bits, theirs.ndim))


def _in_layout_of(x: Any, of: Any, kind: type | None = None) -> Any:
    """A gradient as the graph of a backward pass wants it; None where it wants none of our kind."""
    if not is_global(x) or not isinstance(of, Spec):
        return None
    own: Any = x
    if own.spec.lazy_bits != of.lazy_bits:           # inductor reads memory, and what is lazy is not in it
        own = own.resolve_conj().resolve_neg()
    return to_layout(own, of.layout)


def _placed_like(x: torch.Tensor, of: Any, kind: type | None = None) -> Any:
    """The same of a plain gradient. Autograd makes zeros of it where an output was not used: a model returns logits
    beside its loss."""
    if not isinstance(of, Spec) or type(x) is not torch.Tensor:
        return None
    compare_plain(x, "a plain gradient of a compiled function", of.placement.flat)
    return FromFull.of(x, of.layout)


def _name_for_cache(x: Any) -> str:
    """What a graph on disk depends on, but for the ops: ranks share that disk, and each has a graph of its own."""
    own, here = x.spec, world()
    # a graph for many sizes too is one that was decided with these: other ranks find theirs, or make it, with them
    return repr((own, own.expected, own.stride, own.copied, sorted(own.lazy_bits), x.requires_grad, here.local_ranks,
                 here.size, here.machine, _code()))


@lru_cache(None)
def _code() -> int:
    """Tells versions of this package apart, those between releases too."""
    package = Path(__file__).parent.parent
    files = sorted(path for kind in ("*.py", "*.so") for path in package.rglob(kind))
    return zlib.crc32(repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]).encode())
