"""Random ops: the same numbers however a tensor lies, because no number depends on another.

An op draws one key of 64 bits from torch's own CPU generator, and element i of the global tensor is a function of the
key and of i (`philox.py`). So each rank makes its own elements and no others, nothing is sent, and all that torch has
for that generator (seeds, saved states, `fork_rng`, the recomputation in a checkpoint) holds here too. Every process
draws, also one that holds no part of the tensor: their generators must go on in step.

    fill(draw)          x.uniform_(): into the memory that the shards have, so that views of them see it
    like(draw)          rand_like(x): a tensor that lies like x, filled
    *_dropout, ...      ops made of these and of ops that are not random
    seeded              an op without a line (multinomial, poisson): every rank runs the whole of it, from one seed

Where a tensor lies as a pending sum, the first rank of the axis holds the values and the others hold zeros. Values
are made by sums, products, comparisons and conversions only, which IEEE 754 defines to the last bit: those of `exp`
or `tan` in torch would depend on where in a shard an element stands.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from globaltensor.algorithms.aliasing import check_writable
from globaltensor.algorithms.run import Decomposition, Run
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.regions import Region, slices
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime import philox
from globaltensor.runtime.philox import draw_key

aten = torch.ops.aten

# (call, key, global shape, box, dtype, device, this part of each parameter that is a tensor) -> the values of the box
Draw = Callable[..., Tensor]


# ------------------------------------------------------------------------------------------------ distributions


def uniform(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any) -> Tensor:
    """A complex one is two real ones: element i is made of 2 i and 2 i + 1."""
    low, high = call.get("from", 0.0), call.get("to", 1.0)
    if not dtype.is_complex:
        return philox.uniform(key, shape, region, dtype, device, low, high)
    parts = philox.uniform(key, (*shape, 2), (*region, (0, 2)), dtype.to_real(), device, low, high)
    return torch.view_as_complex(parts)


def _normal(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any, mean: float = 0.0,
            std: float = 1.0) -> Tensor:
    """A complex one has half its variance in each part, and a mean that is real."""
    if not dtype.is_complex:
        return philox.normal(key, shape, region, dtype, device, mean, std)
    parts = philox.normal(key, (*shape, 2), (*region, (0, 2)), dtype.to_real(), device, 0.0, std * math.sqrt(0.5))
    return torch.view_as_complex(parts).add_(mean)


def normal(call: Call, *where: Any) -> Tensor:
    return _normal(*where, call["mean"], call["std"])


def standard_normal(call: Call, *where: Any) -> Tensor:
    return _normal(*where)


def integers(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any) -> Tensor:
    """random_ (without bounds: every integer >= 0 that the dtype holds exactly) and randint_like."""
    low, high = call.get("from", call.get("low")) or 0, call.get("to", call.get("high"))
    high = _top(dtype) + 1 if high is None else int(high)
    wide = torch.int64 if dtype.is_floating_point else dtype      # a float rounds the integers that it does not hold
    return philox.integers(key, shape, region, wide, device, low, high)


def _top(dtype: torch.dtype) -> int:
    """The largest integer up to which the dtype holds all."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def bernoulli(call: Call, *where: Any) -> Tensor:
    return philox.bernoulli(*where, call.get("p", 0.5))


def bernoulli_each(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any,
                   p: Tensor) -> Tensor:
    """With a probability for each element."""
    return philox.bernoulli(key, shape, region, dtype, device, 0.5 if p.is_meta else p)


def kept(call: Call, *where: Any) -> Tensor:
    """What dropout keeps."""
    return philox.bernoulli(*where, 1 - call["p"])


def exponential(call: Call, *where: Any) -> Tensor:
    return philox.exponential(*where, call["lambd"])


def geometric(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any) -> Tensor:
    """How often to try until it works: an exponential, rounded up. p in (0, 1)."""
    rate = -math.log1p(-call["p"])
    return philox.exponential(key, shape, region, torch.float64, device, rate).ceil_()


def cauchy(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any) -> Tensor:
    """The quotient of two normals; finite, as torch's."""
    two = philox.normal(key, (*shape, 2), (*region, (0, 2)), _at_least_float32(dtype), device)
    value = two[..., 0].div(two[..., 1]).mul_(call["sigma"]).add_(call["median"])
    most = torch.finfo(dtype).max
    return value.nan_to_num_().clamp_(-most, most)


def log_normal(call: Call, key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Any) -> Tensor:
    return _exp(philox.normal(key, shape, region, _at_least_float32(dtype), device, call["mean"], call["std"]))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _exp(x: Tensor) -> Tensor:
    """exp, within 2 ulp: 2**k exp(r) with k a whole number and |r| <= log(2) / 2, by Taylor's series."""
    integer, shift, terms, least, most = ((torch.int64, 52, 13, -746.0, 710.0) if x.dtype is torch.float64 else
                                          (torch.int32, 23, 7, -104.0, 89.0))
    x = x.clamp(least, most)                                      # beyond these it is 0 and infinity
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
    """An in-place op: its target filled by `draw`, which also gets the arguments `names` that are tensors."""

    def decomposition(call: Call, run: Run) -> Any:
        key = draw_key(call["generator"])
        _check(call)
        return _fill(call, run, call.tensors[0], key, draw, *[call[name] for name in names])

    return decomposition


def like(draw: Draw, *names: str) -> Decomposition:
    """A new tensor that lies like the first operand."""

    def decomposition(call: Call, run: Run) -> Any:
        key = draw_key(call.get("generator"))
        _check(call)
        options = {name: call[name] for name in ("dtype", "layout", "device", "pin_memory", "memory_format")
                   if call.get(name) is not None}
        made = run(aten.empty_like.default, call.tensors[0], **options)
        return _fill(call, run, made, key, draw, *[call[name] for name in names])

    return decomposition


def _fill(call: Call, run: Run, target: Any, key: int, draw: Draw, *parameters: Any) -> Any:
    """Write into the target's shards; ranks that hold the same part share the work where one process drives them."""
    check_writable(target, call.func, "self")
    own = target.spec
    ready = own.layout.without_partials
    held = [_lying(run, p, own.shape, ready) for p in parameters]
    made: dict[tuple[Region, torch.device], Tensor] = {}
    for rank, shard in target.shards.items():
        if _waits(own.layout, rank):
            shard.zero_()
            continue
        part, device = own.region(rank), shard.device
        if (part, device) not in made:
            made[part, device] = draw(call, key, own.shape, part, own.dtype, device, *[of(rank) for of in held])
        shard.copy_(made[part, device])
    return target


def _waits(of: Layout, rank: int) -> bool:
    """Does this rank hold zeros, as not the first one of an axis that adds up? (A maximum is the same on all.)"""
    return of.partial and any(s.is_partial and s.op == "sum" and i > 0
                              for s, i in zip(of.sbp, of.placement.coords[rank]))


def _lying(run: Run, parameter: Any, shape: Shape, where: Layout) -> Callable[[int], Tensor]:
    """A tensor parameter, broadcast to `shape` and laid out like the target: rank -> its part."""
    if is_global(parameter):
        if tuple(parameter.shape) != shape:
            parameter = run(aten.expand.default, parameter, list(shape))
        return run.redistribute([parameter], [where], "random")[0].shards.__getitem__
    whole = tuple((0, n) for n in shape)
    return lambda rank: parameter.expand(shape)[slices(where.region(shape, rank), whole)]


def _check(call: Call) -> None:
    """torch's own errors for arguments that do not do (std < 0, a dtype): it runs the op on one element, and draws
    from a generator that nobody else uses; on none where the op has no generator of its own."""
    args, kwargs = [], {}
    for a in arguments(call.func):
        value = call[a.name]
        if isinstance(value, Tensor):
            value = torch.zeros(int("generator" in call.values), dtype=value.dtype, device="cpu")
        elif a.name in ("generator", "device", "memory_format"):
            value = _unused if a.name == "generator" else None
        if a.keyword:
            kwargs[a.name] = value
        else:
            args.append(value)
    call.func(*args, **kwargs)


_unused = torch.Generator()


# -------------------------------------------------------------------------------------------- ops made of others


def randint_like_tensor(call: Call, run: Run) -> Any:
    """randint_like with a bound that is a tensor of one element."""
    high = call["high"]
    high = run(aten._local_scalar_dense.default, high) if is_global(high) else high.item()
    options = {name: value for name, value in call.values.items() if name not in ("self", "high")}
    return like(integers)(Call(aten.randint_like.generator, (call["self"], high), options), run)


def normal_around(call: Call, run: Run) -> Any:
    """normal(mean, std) where one of them is a tensor, or both: z std + mean, in the dtype of the first that is."""
    key = draw_key(call["generator"])
    tensors = call.tensors
    _check_std(call["std"])
    own = next(t for t in tensors if is_global(t))
    shape = torch.broadcast_shapes(*call.shapes)
    z = run(aten.new_empty.default, own, list(shape), dtype=tensors[0].dtype)
    _fill(call, run, z, key, standard_normal)
    return run(aten.add_.Tensor, run(aten.mul_.Tensor, z, call["std"]), call["mean"])


def _check_std(std: Any) -> None:
    parts = std.shards.values() if is_global(std) else [std] if isinstance(std, Tensor) else []
    if any(not s.is_meta and bool((s < 0).any()) for s in parts):
        raise RuntimeError("normal expects all elements of std >= 0.0")


def native_dropout(call: Call, run: Run) -> Any:
    """x * mask / (1 - p), and the mask. A pending sum stays one: its terms are dropped alike on every rank."""
    x, p = call["input"], call["p"]
    mask = run(aten.empty_like.default, x, dtype=torch.bool)
    if call["train"] is False:
        return run(aten.clone.default, x), run(aten.fill_.Scalar, mask, 1)
    mask = _fill(call, run, mask, draw_key(), kept)
    dropped = run(aten.mul.Tensor, x, mask)
    return run(aten.mul.Tensor, dropped, 1 / (1 - p) if p < 1 else 0.0), mask


def rrelu(call: Call, run: Run) -> Any:
    """x times its noise: a random slope where x <= 0, else 1. Without training, leaky_relu of the middle slope."""
    x, lower, upper = call["self"], float(call["lower"]), float(call["upper"])
    if not call["training"]:
        out = run(aten.leaky_relu.default, x, (lower + upper) / 2)
    else:
        key = draw_key(call["generator"])
        x, = run.redistribute([x], [x.spec.layout.without_partials], str(call.func))
        slope = _fill(call, run, run(aten.empty_like.default, x), key,
                      lambda call, *where: philox.uniform(*where, lower, upper))
        slope = run(aten.where.ScalarOther, run(aten.le.Scalar, x, 0), slope, 1.0)
        run(aten.copy_.default, call["noise"], slope)
        out = run(aten.mul.Tensor, x, slope)
    return run(aten.copy_.default, call["self"], out) if call.func is aten.rrelu_with_noise_.default else out


# ----------------------------------------------------------------------------------------------- ops without a line


def seeded(func: OpOverload, key: int, device: torch.device, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a local op so that what it draws depends on the key only: each rank that does so gets the same."""
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
