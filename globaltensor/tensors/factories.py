"""torch's factories with `placement=` and `sbp=`: `gt.randn(4, 5, placement=P, sbp=gt.sbp.split(0))`.

Without a placement they are torch's own. Every rank makes only the elements it holds; random ones depend on the seed
and the element's place in the global tensor alone (`philox.py`), never on sbp, placement or the number of processes.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from globaltensor.boxings.run import Boxed, box
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Box, Layout, spec
from globaltensor.runtime import philox
from globaltensor.runtime.agreement import agree
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor, resolve

Make = Callable[[Box, torch.device], torch.Tensor]


def build(shape: tuple[int, ...], dtype: torch.dtype, dst: Layout, make: Make) -> GlobalTensor:
    """A global tensor whose part for a box is `make(box, device)`; pending sums: the first rank holds the value."""
    ranks = local_ranks_of(dst.placement)
    ready = dst.settled
    made: dict[tuple, torch.Tensor] = {}
    shards = {}
    for r in ranks:
        part, device = ready.box(shape, r), world().device(dst.placement.type, r)
        known = made.get((part, device))
        shards[r] = make(part, device) if known is None else known.clone()
        made[part, device] = shards[r]
    of = spec(ready, shape, None, dtype)
    if ready is not dst:
        shards = box([Boxed(of, shards, dst)], "factory")[0]
    return GlobalTensor.wrap(of.on(dst), shards)


def _finish(name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Any, sbp: Any, requires_grad: bool,
            make: Make, key: int = 0) -> GlobalTensor:
    if sbp is None:
        raise GlobalTensorError(f"gt.{name} with a placement but no sbp", fix="sbp=gt.sbp.broadcast, or split(dim)")
    dst = resolve(where, sbp, len(shape))
    agree(f"{name}({list(shape)}, {dtype}) on {dst}" + (f", random state {key:x}" if key else ""))
    made = build(shape, dtype, dst, make)
    return made.requires_grad_() if requires_grad else made


def _extent(part: Box) -> list[int]:
    return [stop - start for start, stop in part]


def _sizes(size: tuple) -> tuple[int, ...]:
    """`(4, 5)`, `((4, 5),)` and torch.Size alike."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(int(n) for n in size)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call without placement, as torch takes them."""
    if options.pop("sbp", None) is not None:
        raise GlobalTensorError("an sbp without a placement", fix="placement=gt.placement(...)")
    options.pop("placement", None)
    return options


def _sized(name: str, make: Callable[..., torch.Tensor], given: int = 0) -> Callable[..., torch.Tensor]:
    """A factory of `size`s, after `given` other positional arguments; make(box, extent, device, dtype, *given)."""

    def factory(*args: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
                requires_grad: bool = False, size: Any = None, **options: Any) -> torch.Tensor:
        args = (*args, size) if size is not None else args
        if placement is None:
            options = {k: v for k, v in dict(options, dtype=dtype).items() if v is not None}
            return getattr(torch, name)(*args, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
        dtype = dtype or torch.get_default_dtype()
        shape = _sizes(args[:1] if name == "full" else args[given:])
        rest = args[1:] if name == "full" else args[:given]
        return _finish(name, shape, dtype, placement, sbp, requires_grad,
                       lambda part, device: make(_extent(part), *rest, dtype=dtype, device=device))

    factory.__name__ = name
    factory.__doc__ = f"torch.{name} with `placement=` and `sbp=`; without them, torch's own."
    return factory


zeros = _sized("zeros", torch.zeros)
ones = _sized("ones", torch.ones)
empty = _sized("empty", torch.empty)


def full(size: Any, fill_value: Any, *, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
         requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """torch.full with `placement=` and `sbp=`; without them, torch's own."""
    if placement is None:
        return torch.full(size, fill_value, dtype=dtype, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
    dtype = dtype or torch.full((), fill_value).dtype
    return _finish("full", _sizes((size,)), dtype, placement, sbp, requires_grad,
                   lambda part, device: torch.full(_extent(part), fill_value, dtype=dtype, device=device))


def _from_plain(name: str) -> Callable[..., torch.Tensor]:
    """A factory whose whole value is cheap to make on every process, and then cut."""
    make = getattr(torch, name)

    def factory(*args: Any, placement: Any = None, sbp: Any = None, requires_grad: bool = False,
                **options: Any) -> torch.Tensor:
        if placement is None:
            return make(*args, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
        if sbp is None:
            raise GlobalTensorError(f"gt.{name} with a placement but no sbp", fix="sbp=gt.sbp.broadcast, or split(dim)")
        options.pop("device", None)
        made = from_full(make(*args, **options), placement, sbp)
        return made.requires_grad_() if requires_grad else made

    factory.__name__ = name
    factory.__doc__ = f"torch.{name} with `placement=` and `sbp=`; without them, torch's own."
    return factory


arange, linspace, eye, tensor = (_from_plain(name) for name in ("arange", "linspace", "eye", "tensor"))
logspace = _from_plain("logspace")


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Any, sbp: Any, requires_grad: bool,
            draw: Callable[..., torch.Tensor]) -> GlobalTensor:
    key = philox.draw_key()
    return _finish(name, shape, dtype, where, sbp, requires_grad,
                   lambda part, device: draw(key, shape, part, dtype, device), key)


def rand(*size: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
         requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Uniform in [0, 1), as torch.rand, with `placement=` and `sbp=`."""
    if placement is None:
        return torch.rand(*size, dtype=dtype, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
    return _random("rand", _sizes(size), dtype or torch.get_default_dtype(), placement, sbp, requires_grad,
                   philox.uniform)


def randn(*size: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype | None = None,
          requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Standard normal, as torch.randn, with `placement=` and `sbp=`."""
    if placement is None:
        return torch.randn(*size, dtype=dtype, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
    return _random("randn", _sizes(size), dtype or torch.get_default_dtype(), placement, sbp, requires_grad,
                   philox.normal)


def normal(mean: Any, std: Any, size: Any = None, *, placement: Any = None, sbp: Any = None,
           dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Normal of float `mean` and `std`, as torch.normal, with `placement=` and `sbp=`."""
    if placement is None:
        args = (mean, std) if size is None else (mean, std, size)
        return torch.normal(*args, **({"dtype": dtype} if dtype else {}), **_plain(dict(options, sbp=sbp)))
    return _random("normal", _sizes((size,)), dtype or torch.get_default_dtype(), placement, sbp, requires_grad,
                   lambda *where: philox.normal(*where, mean, std))


def randint(*args: Any, placement: Any = None, sbp: Any = None, dtype: torch.dtype = torch.int64,
            requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Integers in [low, high): randint(high, size) or randint(low, high, size), with `placement=` and `sbp=`."""
    if placement is None:
        return torch.randint(*args, dtype=dtype, requires_grad=requires_grad, **_plain(dict(options, sbp=sbp)))
    *bounds, size = args
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return _random("randint", _sizes((size,)), dtype, placement, sbp, requires_grad,
                   lambda key, shape, part, dtype, device: philox.integers(key, shape, part, dtype, device, low, high))


def randperm(n: int, *, placement: Any = None, sbp: Any = None, dtype: torch.dtype = torch.int64,
             **options: Any) -> torch.Tensor:
    """A random permutation of 0 .. n-1, with `placement=` and `sbp=`."""
    if placement is None:
        return torch.randperm(n, dtype=dtype, **_plain(dict(options, sbp=sbp)))
    return _random("randperm", (n,), dtype, placement, sbp, False,
                   lambda key, shape, part, dtype, device:
                   philox.permutation(key, n, device)[part[0][0]:part[0][1]].to(dtype, copy=True))
