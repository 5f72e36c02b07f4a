"""torch's factories with `placement=` and `sbp=`: `gt.randn(4, 5, placement=P, sbp=gt.sbp.split(0))`.

Without a placement they are torch's own. With one, every rank makes only the elements it holds. What the elements of
rand, randn, normal and randint depend on:

    generator      torch's own of the CPU, or the one given as `generator=`: each call takes one number from it,
                   whatever the size. Ranks whose generators differ raise DisagreementError
    global index   the element's place in row-major order: gt.randn(6, 4) has the numbers of gt.randn(24)
    dtype          only for rounding: float32 is float64 with fewer bits
    nothing else   not sbp, placement, device, nor the number of ranks or processes

randperm depends on the generator and n. None are the numbers that torch makes of the same seed (`philox.py`).

`empty` holds what was in the memory. arange, linspace, logspace, eye and tensor are made whole on every process and
then cut, so their values are torch's to the last bit.

No keyword is passed over: `dtype`, `requires_grad` and `generator` mean what they do in torch, what a placement has no
use for (`device`, `out`, ...) is an error, and so is a name that torch does not know.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack, overload

import torch

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.errors import ArgumentError, GlobalTensorError, expect, keyword_fix, warnings_at_program, where
from globaltensor.layouts.layout import Layout, Shape, spec
from globaltensor.layouts.regions import Region
from globaltensor.runtime import lineage, philox
from globaltensor.runtime.agreement import agree
from globaltensor.runtime.memory import refuse_fake_mode
from globaltensor.runtime.torch_internals import break_graph, compiling, without_fake_mode
from globaltensor.runtime.world import has_devices, local_ranks_of, world
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.factory_types import (
    Arange,
    AsTorch,
    Drawn,
    Eye,
    Linspace,
    Logspace,
    OfData,
    Placed,
    PlacedRandom,
    RandomAsTorch,
    Sized,
)
from globaltensor.tensors.flatten import called_in_graphs
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.redistribution import check_named_placement, resolve_layout
from globaltensor.tracebacks import api_boundary, note_on_torch_error

Make = Callable[[Region, torch.device], torch.Tensor]

# torch's keywords that a tensor with a placement cannot honour: the value that asks for nothing, and why not
_UNMET = {
    "device": (None, "the placement says on which devices a global tensor is"),
    "out": (None, "what a factory makes with a placement is a tensor of its own"),
    "layout": (torch.strided, "the shards of a global tensor are dense"),
    "pin_memory": (False, "the shards of a global tensor are where the ranks can move them"),
    "memory_format": (torch.contiguous_format, "the shards of a new tensor are contiguous"),
    "names": (None, "the dims of a global tensor have no names"),
}


# ---------------------------------------------------------------------------------------------- what was asked for


def _checked(name: str, options: dict[str, Any], placement: Any, sbp: Any, *own: str) -> dict[str, Any]:
    """The keywords of a call of gt.<name> beyond placement, sbp, dtype and requires_grad; an error where one would be
    passed over. `own` are those that the factory has beside torch's common ones."""
    for key, value in options.items():
        if key not in own and key not in _UNMET:
            valid = ["placement", "sbp", "dtype", "requires_grad", *own]
            raise ArgumentError(f"gt.{name} takes no keyword {key!r}", f"with a placement it takes {', '.join(valid)}",
                                keyword_fix(key, [*valid, *_UNMET]))
        idle, why = _UNMET.get(key, (value, ""))
        if placement is not None and value is not None and value is not idle:
            raise ArgumentError(f"gt.{name} with a placement and {key}={value!r}", why, _without(key, value, placement))
    if sbp is None and placement is not None:
        raise GlobalTensorError(f"gt.{name} with a placement but no sbp", "which rank holds what is not known",
                                "sbp=gt.sbp.broadcast, or split(dim)")
    if sbp is not None and placement is None:
        raise GlobalTensorError("an sbp without a placement", "an sbp says how a tensor lies on the ranks of one",
                                'placement=gt.placement("cpu", [0, 1])')
    return options if placement is None else {key: value for key, value in options.items() if key in own}


def _without(key: str, value: Any, placement: Any) -> str:
    """What to type instead of a keyword that a placement has no use for."""
    device = str(value).partition(":")[0]
    if key != "device" or device == placement.type or not has_devices(device):
        return f"the same without {key}="
    return f'placement=gt.placement("{device}", {list(placement.ranks)})'


def _check_size(name: str, size: tuple[Any, ...], options: dict[str, Any], placement: Any) -> None:
    if placement is not None and not size and options.get("size") is None:
        raise ArgumentError(f"gt.{name} without a size", "sizes come first, the rest by name",
                            f"gt.{name}(4, placement=P, sbp=gt.sbp.broadcast)")
    check_named_placement(name, "sizes", size)


@contextmanager
def with_line() -> Iterator[None]:
    """Around a call of torch's own: its errors are told the program's line."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        note_on_torch_error(error, f"  where: {where()}")
        raise


def _read(size: tuple[Any, ...], dtype: torch.dtype | None, extra: dict[str, Any]) -> tuple[Shape, torch.dtype]:
    """The shape and the dtype that arguments mean, and the errors of those that mean none: torch's own."""
    with with_line():
        asked = torch.empty(*size, **{k: v for k, v in extra.items() if k == "size"}, dtype=dtype, device="meta")
    return tuple(asked.shape), asked.dtype


_RAISES = """Collective: every process makes the same call; nothing is moved. Raises ArgumentError for a keyword that
it does not take, GlobalTensorError where only one of placement and sbp is given, SbpError for an sbp that does not fit,
and on all ranks DisagreementError where they ask for different tensors."""


def _with_doc(factory: Any, name: str, what: str) -> Any:
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"torch.{name} with `placement=` and `sbp=`; without them, torch's own. {what}\n\n{_RAISES}"
    return called_in_graphs(api_boundary(factory))


# ------------------------------------------------------------------------------------------------------ making it


def make_parts(shape: Shape, dtype: torch.dtype, dst: Layout, make: Make) -> GlobalTensor:
    """A global tensor whose part is `make(region, device)`; pending sums: the first rank holds the value."""
    ranks = local_ranks_of(dst.placement)
    ready = dst.without_partials
    parts: dict[tuple[Region, torch.device], torch.Tensor] = {}
    shards = {}
    for r in ranks:
        part, device = ready.region(shape, r), world().device(dst.placement.type, r)
        known = parts.get((part, device))            # cloned: a write into one rank's shard is not one into another's
        shards[r] = make(part, device) if known is None else known.clone()
        parts[part, device] = shards[r]
    of = spec(ready, shape, None, dtype)
    if ready is not dst:
        shards = move_shards([Move(of, shards, dst)], "factory")[0]
    return GlobalTensor.wrap(of.on(dst), shards)


def _with_grad(x: GlobalTensor, requires_grad: Any) -> GlobalTensor:
    expect(requires_grad, bool, f"requires_grad={requires_grad!r}", "requires_grad=True")
    if requires_grad and not (x.is_floating_point() or x.is_complex()):
        raise GlobalTensorError(f"requires_grad=True of {x.dtype}", "only floating point and complex numbers have "
                                "gradients", "dtype=torch.float32")
    return x.requires_grad_() if requires_grad else x


def _finish(name: str, shape: Shape, dtype: torch.dtype, where: Any, sbp: Any, requires_grad: bool,
            make: Make, key: int = 0) -> GlobalTensor:
    dst = resolve_layout(where, sbp, len(shape))
    if compiling():                                  # no values to compare
        return _with_grad(make_parts(shape, dtype, dst, make), requires_grad)
    refuse_fake_mode(dst.placement, f"gt.{name}")
    with without_fake_mode():
        agree(f"{name}({list(shape)}, {dtype}) on {dst}" + (f", random state {key:x}" if key else ""))
        x = lineage.begin_lineage(make_parts(shape, dtype, dst, make))
    return _with_grad(x, requires_grad)


def _extent(part: Region) -> list[int]:
    return [stop - start for start, stop in part]


def _sized(name: str, what: str) -> Sized:
    """A factory whose elements are all alike."""
    make = getattr(torch, name)

    def factory(*size: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
                requires_grad: bool = False, **options: Any) -> torch.Tensor:
        _check_size(name, size, options, placement)
        extra = _checked(name, options, placement, sbp, "size")
        if placement is None:
            return make(*size, dtype=dtype, requires_grad=requires_grad, **extra)
        shape, dtype = _read(size, dtype, extra)
        return _finish(name, shape, dtype, placement, sbp, requires_grad,
                       lambda part, device: make(_extent(part), dtype=dtype, device=device))

    return _with_doc(factory, name, what)


zeros, ones = (_sized(name, "Every rank fills its own part.") for name in ("zeros", "ones"))
empty = _sized("empty", "The values are what was in the memory, different on every rank.")


@overload
def full(size: Sequence[int] | int, fill_value: complex, **options: Unpack[Placed]) -> GlobalTensor: ...


@overload
def full(size: Sequence[int], fill_value: complex, **options: Unpack[AsTorch]) -> torch.Tensor: ...


@called_in_graphs
@api_boundary
def full(size: Any, fill_value: Any, *, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
         requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """torch.full with `placement=` and `sbp=`; without them, torch's own. Every rank fills its own part.

    Collective, and raises, as gt.ones does.
    """
    extra = _checked("full", options, placement, sbp)
    if placement is None:
        return torch.full(size, fill_value, dtype=dtype, requires_grad=requires_grad, **extra)
    with with_line():
        shape, dtype = _read((size,), torch.full((), fill_value, device="cpu").dtype if dtype is None else dtype, extra)
    return _finish("full", shape, dtype, placement, sbp, requires_grad,
                   lambda part, device: torch.full(_extent(part), fill_value, dtype=dtype, device=device))


def _from_plain(name: str, *names: str) -> Any:
    """A factory whose whole value is cheap to make on every process, and then cut."""
    make = getattr(torch, name)

    def factory(*args: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
                requires_grad: bool = False, **options: Any) -> torch.Tensor:
        check_named_placement(name, "values", args)
        extra = _checked(name, options, placement, sbp, *names)
        if placement is None:
            return make(*args, dtype=dtype, requires_grad=requires_grad, **extra)
        data = next(iter(args), extra.get("data"))
        made_on = data.device if isinstance(data, torch.Tensor) else "cpu"   # placement= says where
        with with_line(), warnings_at_program(name == "tensor" and isinstance(data, torch.Tensor)):
            whole = make(*args, dtype=dtype, device=made_on, **extra)
        return _with_grad(from_full(whole, placement, sbp), requires_grad)

    return _with_doc(factory, name, "Every process makes the whole value, torch's to the last bit, and cuts it.")


arange: Arange = _from_plain("arange", "start", "end", "step")
linspace: Linspace = _from_plain("linspace", "start", "end", "steps")
logspace: Logspace = _from_plain("logspace", "start", "end", "steps", "base")
eye: Eye = _from_plain("eye", "n", "m")
tensor: OfData = _from_plain("tensor", "data")


# ------------------------------------------------------------------------------------------------- random numbers


def _random(name: str, shape: Shape, dtype: torch.dtype, where: Any, sbp: Any, requires_grad: bool,
            generator: torch.Generator | None, draw: Callable[..., torch.Tensor],
            fill: Callable[[torch.Tensor], torch.Tensor] | None = None) -> GlobalTensor:
    """Random numbers. `draw` makes those of a part; in a graph of torch.compile `fill` makes the same, as an op."""
    if generator is not None:
        expect(generator, torch.Generator, f"generator={generator!r}", "generator=torch.Generator().manual_seed(0)")
    if compiling():
        if fill is None or generator is not None:
            break_graph(torch.ops.aten.randperm.default)
        x = _finish(name, shape, dtype, where, sbp, False, lambda part, device: torch.empty(
            _extent(part), dtype=dtype, device=device))
        fill(x)
        return _with_grad(x, requires_grad)
    key = philox.draw_key(generator)
    return _finish(name, shape, dtype, where, sbp, requires_grad,
                   lambda part, device: draw(key, shape, part, dtype, device), key)


_DEPENDENCE = """The numbers depend on the
generator's state, the elements' places in the global shape and, for rounding, the dtype; on no layout."""


def _drawn(name: str, what: str, draw: Callable[..., torch.Tensor], fill: Callable[[torch.Tensor], torch.Tensor]
           ) -> Drawn:
    """A random factory that is told nothing but the size."""
    make = getattr(torch, name)

    def factory(*size: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
                generator: torch.Generator | None = None, requires_grad: bool = False,
                **options: Any) -> torch.Tensor:
        _check_size(name, size, options, placement)
        extra = _checked(name, options, placement, sbp, "size", "generator")
        if placement is None:
            return make(*size, dtype=dtype, generator=generator, requires_grad=requires_grad, **extra)
        shape, dtype = _read(size, dtype, extra)
        return _random(name, shape, dtype, placement, sbp, requires_grad, generator, draw, fill)

    return _with_doc(factory, name, f"{what} {_DEPENDENCE}")


rand = _drawn("rand", "Uniform in [0, 1).", philox.uniform, torch.Tensor.uniform_)
randn = _drawn("randn", "Standard normal.", philox.normal, torch.Tensor.normal_)


@overload
def normal(mean: float, std: float, size: Sequence[int], **options: Unpack[PlacedRandom]) -> GlobalTensor: ...


@overload
def normal(mean: float, std: float, size: Sequence[int], **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...


@overload
def normal(mean: torch.Tensor, std: torch.Tensor | float = 1.0, *, generator: torch.Generator | None = None,
           out: torch.Tensor | None = None) -> torch.Tensor: ...


@overload
def normal(mean: float, std: torch.Tensor, *, generator: torch.Generator | None = None,
           out: torch.Tensor | None = None) -> torch.Tensor: ...


@called_in_graphs
@api_boundary
def normal(mean: Any, std: Any = 1.0, size: Any = None, *, placement: Any = None, sbp: Any = None,
           dtype: torch.dtype | None = None, generator: torch.Generator | None = None, requires_grad: bool = False,
           **options: Any) -> torch.Tensor:
    """Normal of float `mean` and `std`, as torch.normal, with `placement=` and `sbp=`.

    The numbers depend on what those of gt.randn do: they are its own, times std, plus mean. Collective, and raises,
    as gt.randn does; ArgumentError also for tensors as mean or std with a placement.
    """
    extra = _checked("normal", options, placement, sbp, "generator")
    if placement is None:                            # of tensors it takes neither size, dtype nor requires_grad
        some = {"size": size, "dtype": dtype, "generator": generator, "requires_grad": requires_grad or None}
        return torch.normal(mean, std, **{k: v for k, v in some.items() if v is not None}, **extra)
    if size is None or isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor):
        raise ArgumentError("gt.normal with a placement takes two numbers and a size",
                            "that of tensors is laid out as they are", "torch.normal(mean, std) of global tensors")
    shape, dtype = _read((size,), dtype, extra)
    return _random("normal", shape, dtype, placement, sbp, requires_grad, generator,
                   lambda key, shape, part, dtype, device: philox.normal(key, shape, part, dtype, device, mean, std),
                   lambda x: x.normal_(mean, std))


@overload
def randint(high: int, size: Sequence[int], **options: Unpack[PlacedRandom]) -> GlobalTensor: ...


@overload
def randint(low: int, high: int, size: Sequence[int], **options: Unpack[PlacedRandom]) -> GlobalTensor: ...


@overload
def randint(high: int, size: Sequence[int], **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...


@overload
def randint(low: int, high: int, size: Sequence[int], **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...


@called_in_graphs
@api_boundary
def randint(*args: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = torch.int64,
            generator: torch.Generator | None = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Integers in [low, high): randint(high, size) or randint(low, high, size), with `placement=` and `sbp=`.

    The numbers depend on the generator's state, on low and high, and on the elements' places in the global shape: on
    no dtype, no layout. Collective, as gt.randn. Raises GlobalTensorError where the dtype does not hold [low, high).
    """
    check_named_placement("randint", "values", args)
    extra = _checked("randint", options, placement, sbp, "low", "high", "size", "generator")
    if placement is None:
        return torch.randint(*args, dtype=dtype, generator=generator, requires_grad=requires_grad, **extra)
    with with_line():
        torch.randint(*args, **extra, dtype=dtype, device="meta")    # the errors of arguments that do not fit
    values = list(args)                              # the last of them is the size, the first may be missing
    size, high, low = (extra[key] if key in extra else values.pop() if values else 0 for key in ("size", "high", "low"))
    shape, dtype = _read((size,), dtype or torch.int64, {})
    return _random("randint", shape, dtype, placement, sbp, requires_grad, generator,
                   lambda key, shape, part, dtype, device: philox.integers(key, shape, part, dtype, device, low, high),
                   lambda x: x.random_(low, high))


@overload
def randperm(n: int, **options: Unpack[PlacedRandom]) -> GlobalTensor: ...


@overload
def randperm(n: int, **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...


@called_in_graphs
@api_boundary
def randperm(n: int, *, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = torch.int64,
             generator: torch.Generator | None = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """A random permutation of 0 .. n-1, with `placement=` and `sbp=`; of the generator's state and n alone.

    Every process orders all n keys, and keeps its part. Collective, and raises, as gt.randn does.
    """
    extra = _checked("randperm", options, placement, sbp, "generator")
    if placement is None:
        return torch.randperm(n, dtype=dtype, generator=generator, requires_grad=requires_grad, **extra)
    shape, dtype = _read((n,), dtype or torch.int64, extra)
    return _random("randperm", shape, dtype, placement, sbp, requires_grad, generator,
                   lambda key, shape, part, dtype, device:
                   philox.permutation(key, n, device)[part[0][0]:part[0][1]].to(dtype, copy=True))
