"""torch's `*_like` with `placement=` and `sbp=`: `gt.zeros_like(x, placement=P, sbp=gt.sbp.split(0))`.

x, plain or global, gives the shape and the dtype. The tensor is made by the factory of the same name (factories.py):
its random numbers are those of gt.randn(x.shape, ...), and nothing of x is read or moved. Of a global x, a placement
or an sbp that is left out is x's own, as in `to_global`. With neither they are torch's, which lay the new tensor out
as x.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from globaltensor.errors import expect
from globaltensor.tensors import factories
from globaltensor.tensors.factory_types import FullLike, Like, RandintLike, RandomLike
from globaltensor.tensors.flatten import called_in_graphs
from globaltensor.tensors.linear_maps import layout_of
from globaltensor.tensors.redistribution import check_named_placement, filled_in
from globaltensor.tracebacks import api_boundary


def _like(name: str, make: Callable[..., torch.Tensor]) -> Any:
    """The factory `name` of x's shape; `make(shape, ...)` makes its tensor."""
    of_torch = getattr(torch, name)

    def factory(x: torch.Tensor, *values: Any, placement: Any = None, sbp: Any = None,
                dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        expect(x, torch.Tensor, f"gt.{name} of no tensor", f"gt.{name}(x, placement=placement, sbp=sbp)")
        check_named_placement(name, "values", (x, *values))
        if placement is None and sbp is None:
            with factories.with_line():
                return of_torch(x, *values, dtype=dtype, **options)
        own = layout_of(x)
        if own is not None:
            placement, sbp = filled_in(own, placement, sbp)
        return make(x.shape, *values, placement=placement, sbp=sbp, dtype=dtype or x.dtype, **options)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = (f"torch.{name} with `placement=` and `sbp=`; without them, torch's own. Of a global x, the one "
                       "that is left out is x's.\n\nCollective where the result is global. Raises what the factory of "
                       "that name raises.")
    return called_in_graphs(api_boundary(factory))


empty_like: Like = _like("empty_like", factories.empty)
zeros_like: Like = _like("zeros_like", factories.zeros)
ones_like: Like = _like("ones_like", factories.ones)
full_like: FullLike = _like("full_like", factories.full)
rand_like: RandomLike = _like("rand_like", factories.rand)
randn_like: RandomLike = _like("randn_like", factories.randn)
_randint: Any = factories.randint                    # whose overloads know no list of bounds
randint_like: RandintLike = _like("randint_like",
                                  lambda shape, *bounds, **options: _randint(*bounds, size=shape, **options))
