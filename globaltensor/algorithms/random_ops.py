"""Random ops: the same numbers in every layout, because no number depends on another.

An op draws one key of 64 bits from torch's own CPU generator, and element i of the global tensor is a function of the
key and of i (`runtime/philox.py`). So each rank makes just its own elements, nothing is communicated, and whatever
torch has for that generator (seeds, saved states, `fork_rng`, the recomputation in a checkpoint) holds here too. Every
process draws the key, even one that holds no part of the tensor: their generators must stay in step.

    fill(draw)          x.uniform_(): into the memory of the shards, so that views of them see it
    like(draw)          rand_like(x): a new tensor laid out as x, filled
    *_dropout, ...      ops made of these and of ops that are not random
    seeded              an op without a line (multinomial, poisson): every rank runs all of it, from one seed

In a graph of torch.compile, drawing a key is an op with an ordered effect, and making elements of it one without: the
same numbers as outside, and backward may make a mask again instead of keeping it.

Of a pending sum, the first rank of the axis holds the values and the others hold zeros. Values are made by sums,
products, comparisons and conversions only, which IEEE 754 defines to the last bit: the results of torch's `exp` or
`tan` depend on where in a shard an element is.
"""
from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from globaltensor.algorithms.aliasing import check_writable
from globaltensor.algorithms.run import Decomposition, Run
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.regions import Region, slices
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime import custom_ops, philox
from globaltensor.runtime.graph_effects import call_effect
from globaltensor.runtime.philox import draw_key
from globaltensor.runtime.torch_internals import (
    OpOverload,
    break_graph,
    is_of_a_trace,
    modes_active,
    order_effects,
    without_modes,
)

aten = torch.ops.aten

class Arguments(Protocol):
    """What a draw reads of its call: arguments by name."""

    def __getitem__(self, name: str, /) -> Any: ...
    def get(self, name: str, default: Any = None, /) -> Any: ...


class Elements(NamedTuple):
    """The elements to make: a region of a tensor of this shape, from a key. In the order of philox's parameters."""

    key: int
    shape: Shape
    region: Region
    dtype: torch.dtype
    device: torch.device


Draw = Callable[..., Tensor]                         # (call, elements, their part of each tensor parameter) -> values


# ------------------------------------------------------------------------------------------------ distributions


def draw_uniform(call: Arguments, elements: Elements) -> Tensor:
    """uniform_ and rand_like."""
    return philox.uniform(*elements, call.get("from", 0.0), call.get("to", 1.0))


def draw_normal(call: Arguments, elements: Elements) -> Tensor:
    """normal_."""
    return philox.normal(*elements, call["mean"], call["std"])


def draw_standard_normal(call: Arguments, elements: Elements) -> Tensor:
    """randn_like."""
    return philox.normal(*elements)


def draw_integers(call: Arguments, elements: Elements) -> Tensor:
    """random_ (without bounds: every integer >= 0 that the dtype holds exactly) and randint_like."""
    low, high = call.get("from", call.get("low")) or 0, call.get("to", call.get("high"))
    high = _last_exact(elements.dtype) + 1 if high is None else int(high)
    # drawn as integers first: a float rounds those that it does not hold
    dtype = torch.int64 if elements.dtype.is_floating_point else elements.dtype
    return philox.integers(*elements._replace(dtype=dtype), low, high)


def _last_exact(dtype: torch.dtype) -> int:
    """The largest integer up to which the dtype holds all."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def draw_bernoulli(call: Arguments, elements: Elements) -> Tensor:
    """With one probability for all."""
    return philox.bernoulli(*elements, call.get("p", 0.5))


def draw_bernoulli_each(call: Arguments, elements: Elements, p: Tensor) -> Tensor:
    """With a probability for each element."""
    return philox.bernoulli(*elements, 0.5 if p.is_meta else p)


def kept(call: Arguments, elements: Elements) -> Tensor:
    """The mask of dropout: which elements it keeps."""
    return philox.bernoulli(*elements, 1 - call["p"])


def draw_slopes(call: Arguments, elements: Elements) -> Tensor:
    """The slopes of rrelu."""
    return philox.uniform(*elements, float(call["lower"]), float(call["upper"]))


def draw_exponential(call: Arguments, elements: Elements) -> Tensor:
    """exponential_."""
    return philox.exponential(*elements, call["lambd"])


def draw_geometric(call: Arguments, elements: Elements) -> Tensor:
    """The number of trials until one succeeds: an exponential, rounded up. p in (0, 1)."""
    rate = -math.log1p(-call["p"])
    return philox.exponential(*elements._replace(dtype=torch.float64), rate).ceil_()


def draw_cauchy(call: Arguments, elements: Elements) -> Tensor:
    """The quotient of two normals; finite, as torch's is, where its parameters are."""
    key, shape, region, dtype, device = elements
    pairs = philox.normal(key, *philox.pairs(shape, region, _at_least_float32(dtype)), device)
    value = pairs[..., 0].div(pairs[..., 1]).nan_to_num_().mul_(call["sigma"]).add_(call["median"])
    largest = torch.finfo(elements.dtype).max
    return value.clamp_(-largest, largest) if math.isfinite(call["sigma"] + call["median"]) else value


def draw_log_normal(call: Arguments, elements: Elements) -> Tensor:
    """exp of a normal."""
    return _exp(philox.normal(*elements._replace(dtype=_at_least_float32(elements.dtype)), call["mean"], call["std"]))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _exp(x: Tensor) -> Tensor:
    """exp, within 2 ulp, the same on every device: 2**k exp(r) with k a whole number and |r| <= log(2) / 2, by Taylor's
    series."""
    integer, shift, terms, lowest, highest = ((torch.int64, 52, 13, -746.0, 710.0) if x.dtype is torch.float64 else
                                              (torch.int32, 23, 7, -104.0, 89.0))
    x = x.clamp(lowest, highest)                                  # beyond these it is 0 and infinity
    k = (x / math.log(2)).round_()
    r = x.sub_(k * 0.693145751953125).sub_(k * 1.4286068203094172e-06)     # log 2; k times its first part is exact
    value = torch.full_like(r, 1 / math.factorial(terms))
    for n in range(terms - 1, -1, -1):
        value.mul_(r).add_(1 / math.factorial(n))
    k = k.to(integer)
    for part in (k >> 1, k - (k >> 1)):                           # 2**k itself may be out of range
        value.mul_((part + (127 if shift == 23 else 1023) << shift).view(value.dtype))
    return value


# ------------------------------------------------------------------------------------------- filling and making


def fill(draw: Draw, *names: str) -> Decomposition:
    """An in-place op: its target filled by `draw`, which also gets the arguments `names`, which may be tensors."""

    def decomposition(call: Call, run: Run) -> GlobalLike:
        key = _next_key(call)
        _raise_torchs_errors(call)
        return _fill(call, run, call.tensors[0], key, draw, *[call[name] for name in names])

    return decomposition


def like(draw: Draw, *names: str) -> Decomposition:
    """A new tensor, laid out as the first operand."""

    def decomposition(call: Call, run: Run) -> GlobalLike:
        key = _next_key(call)
        _raise_torchs_errors(call)
        options = {name: call[name] for name in ("dtype", "layout", "device", "pin_memory", "memory_format")
                   if call.get(name) is not None}
        target = run(aten.empty_like.default, call.tensors[0], **options)
        return _fill(call, run, target, key, draw, *[call[name] for name in names])

    return decomposition


def _next_key(call: Call) -> int | Tensor:
    """The next key; in a graph that is being traced, what draws it."""
    generator = call.get("generator")
    if not any(is_global(t) and t.traced for t in call.tensors):
        return draw_key(generator)
    if generator is not None:
        break_graph(call.func)
    return call_effect(custom_ops.draw_key)


def _fill(call: Call, run: Run, target: GlobalLike, key: int | Tensor, draw: Draw, *parameters: Tensor | GlobalLike
          ) -> GlobalLike:
    """Write into the target's shards; ranks of this process that hold the same part share the work."""
    check_writable(target, call.func, "self")
    own = target.spec
    parts = [_parts_of(run, parameter, own.shape, own.layout.without_partials) for parameter in parameters]
    drawn: dict[tuple[Region | str, torch.device], Tensor] = {}
    for rank, shard in target.shards.items():
        if _holds_zeros(own.layout, rank):
            shard.zero_()
            continue
        region, device = own.region(rank), shard.device
        where = str(region) if own.symbolic else region, device      # symbols have no hash
        if where not in drawn:
            of_rank = [part(rank) for part in parts]
            if isinstance(key, Tensor):
                edges = [edge for edges in region for edge in edges]
                drawn[where] = custom_ops.fill(key, own.shape, edges, own.dtype, device, _law(draw, call), of_rank)
            else:
                drawn[where] = draw(call, Elements(key, own.shape, region, own.dtype, device), *of_rank)
        shard.copy_(drawn[where])
    return target


def _law(draw: Draw, call: Call) -> str:
    """A draw and the numbers of its call, as a text."""
    numbers = {name: value for name, value in call.values.items() if isinstance(value, (int, float))}
    return repr((draw.__name__, numbers))


def _fill_in_graph(key: Tensor, shape: Shape, edges: Sequence[int], dtype: torch.dtype, device: torch.device, law: str,
                   parts: Sequence[Tensor]) -> Tensor:
    name, numbers = ast.literal_eval(law)
    elements = Elements(int(key), tuple(shape), tuple(zip(edges[::2], edges[1::2])), dtype, device)
    return globals()[name](numbers, elements, *parts).to(dtype)


def _draw_key_in_graph() -> Tensor:
    return torch.tensor(draw_key(), device="cpu")


custom_ops.implement(custom_ops.draw_key, _draw_key_in_graph)
custom_ops.tell_shapes(custom_ops.draw_key, lambda: torch.empty((), dtype=torch.int64, device="cpu"))
order_effects(custom_ops.draw_key)
custom_ops.implement(custom_ops.fill, _fill_in_graph)
custom_ops.tell_shapes(custom_ops.fill, lambda key, shape, edges, dtype, device, law, parts: torch.empty(
    [stop - start for start, stop in zip(edges[::2], edges[1::2])], dtype=dtype, device=device))


def _holds_zeros(of: Layout, rank: int) -> bool:
    """Is this not the first rank of an axis with a pending sum? (The terms of a maximum are the same on all.)"""
    return of.partial and any(s.is_partial and s.op == "sum" and i > 0
                              for s, i in zip(of.sbp, of.placement.coords[rank]))


def _parts_of(run: Run, parameter: Tensor | GlobalLike, shape: Shape, where: Layout) -> Callable[[int], Tensor]:
    """A tensor parameter, broadcast to `shape` and laid out as the target: rank -> its part."""
    if is_global(parameter):
        full: GlobalLike = parameter
        if tuple(parameter.shape) != shape:
            full = run(aten.expand.default, parameter, list(shape))
        return run.redistribute([full], [where], "random")[0].shards.__getitem__
    whole = tuple((0, n) for n in shape)
    return lambda rank: parameter.expand(shape)[slices(where.region(shape, rank), whole)]


def _raise_torchs_errors(call: Call) -> None:
    """torch's own errors for bad arguments (std < 0, a dtype): it runs the op on one element, with a generator that
    nobody else uses; on no element if the op takes no generator, so that nothing is drawn."""
    args, kwargs = [], {}
    for a in arguments(call.func):
        value = call[a.name]
        if isinstance(value, Tensor):
            with without_modes() if modes_active() else nullcontext():
                value = torch.zeros(int("generator" in call.values), dtype=value.dtype, device="cpu")
        elif a.name in ("generator", "device", "memory_format"):
            value = _unused if a.name == "generator" else None
        if a.keyword:
            kwargs[a.name] = value
        else:
            args.append(value)
    with without_modes() if modes_active() else nullcontext():
        call.func(*args, **kwargs)


_unused = torch.Generator()


# -------------------------------------------------------------------------------------------- ops made of others


def randint_like_tensor(call: Call, run: Run) -> GlobalLike:
    """randint_like with a bound that is a tensor of one element."""
    high = call["high"]
    high = run(aten._local_scalar_dense.default, high) if is_global(high) else high.item()
    options = {name: value for name, value in call.values.items() if name not in ("self", "high")}
    return like(draw_integers)(Call(aten.randint_like.generator, (call["self"], high), options), run)


def normal_around(call: Call, run: Run) -> GlobalLike:
    """normal(mean, std) of which at least one is a tensor: z std + mean, in the dtype of the first tensor."""
    key = _next_key(call)
    tensors, std = call.tensors, call["std"]
    if is_global(std):                               # terms of a pending sum may be negative
        std, = run.redistribute([std], [std.spec.layout.without_partials], str(call.func))
    _check_std(std)
    own = next(t for t in tensors if is_global(t))
    shape = torch.broadcast_shapes(*call.shapes)
    z = run(aten.new_empty.default, own, list(shape), dtype=tensors[0].dtype)
    _fill(call, run, z, key, draw_standard_normal)
    return run(aten.add_.Tensor, run(aten.mul_.Tensor, z, std), call["mean"])


def _check_std(std: Tensor | GlobalLike | float) -> None:
    """torch's own errors, which depend on the values."""
    if isinstance(std, (int, float)):
        with without_modes() if modes_active() else nullcontext():
            torch.empty(0, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=_unused)
        return
    parts = std.shards.values() if is_global(std) else [std]
    if any(not s.is_meta and not is_of_a_trace(s) and not bool((s >= 0).all()) for s in parts):
        raise RuntimeError("normal expects all elements of std >= 0.0")


def native_dropout(call: Call, run: Run) -> tuple[GlobalLike, GlobalLike]:
    """x * mask / (1 - p), and the mask. A pending sum stays one: the same elements of every term are dropped."""
    x, p = call["input"], call["p"]
    mask = run(aten.empty_like.default, x, dtype=torch.bool)
    if call["train"] is False:
        return run(aten.clone.default, x), run(aten.fill_.Scalar, mask, 1)
    mask = _fill(call, run, mask, _next_key(call), kept)
    dropped = run(aten.mul.Tensor, x, mask)
    return run(aten.mul.Tensor, dropped, 1 / (1 - p) if p < 1 else 0.0), mask


def rrelu(call: Call, run: Run) -> GlobalLike:
    """x times its noise: a random slope where x <= 0, else 1. Without training, leaky_relu of the middle slope."""
    x, lower, upper = call["self"], float(call["lower"]), float(call["upper"])
    if not call["training"]:
        out = run(aten.leaky_relu.default, x, (lower + upper) / 2)
    else:
        key = _next_key(call)
        x, = run.redistribute([x], [x.spec.layout.without_partials], str(call.func), keep=True)
        slope = _fill(call, run, run(aten.empty_like.default, x), key, draw_slopes)
        slope = run(aten.where.ScalarOther, run(aten.le.Scalar, x, 0), slope, 1.0)
        run(aten.copy_.default, call["noise"], slope)
        out = run(aten.mul.Tensor, x, slope)
    return run(aten.copy_.default, call["self"], out) if call.func is aten.rrelu_with_noise_.default else out


# ----------------------------------------------------------------------------------------------- ops without a line


def seeded(func: OpOverload, key: int, device: torch.device, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a local op with a generator seeded by the key, so that every rank draws the same."""
    if device.type == "meta":
        return func(*args, **kwargs)
    names = [a.name for a in arguments(func)]
    if "generator" in names:
        at, own = names.index("generator"), torch.Generator(device).manual_seed(key)
        if at < len(args):
            return func(*args[:at], own, *args[at + 1:], **kwargs)
        return func(*args, **{**kwargs, "generator": own})
    # this op draws from the default generator of its device
    cpu = device.type == "cpu"
    generator = torch.default_generator if cpu else torch.get_device_module(device).default_generators[device.index]
    before = generator.get_state()
    try:
        generator.manual_seed(key)
        return func(*args, **kwargs)
    finally:
        generator.set_state(before)
