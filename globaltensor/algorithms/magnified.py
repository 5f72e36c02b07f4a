"""Upsampling of split images to the nearest pixel, by a whole number along the dims that are split: each rank magnifies
its own rows, and its rows of the gradient are those of its own rows."""
from __future__ import annotations

from typing import Any

from globaltensor.algorithms.halo import local_op
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import spec_of
from globaltensor.layouts.layout import Shape, spec
from globaltensor.layouts.symbols import has_symbols
from globaltensor.rules.call import Call

# From 41 on, torch's kernels round 1 / factor so that some rows are copies of the row before, depending on their place.
_GREATEST_FACTOR = 40


def _image_and_result(call: Call) -> tuple[Shape, Shape]:
    """The shapes of the image and of what it is magnified to."""
    image = tuple(call["input_size"]) if "input_size" in call.values else tuple(call["self"].shape)
    return image, (*image[:2], *call["output_size"])


def _factors(call: Call) -> dict[int, int]:
    """The number of rows that each row of a split spatial dim becomes, 0 where it is none; without its float."""
    own = spec_of(call.tensors[0])
    image, result = _image_and_result(call)
    if own is None or has_symbols([*image, *result]) or not all(image):
        return {}
    cut = {s.dim for s in own.sbp if s.is_split and s.dim > 1}
    return {d: result[d] // image[d] * (result[d] % image[d] == 0 and image[d] % own.layout.num_parts(d) == 0)
            for d in cut}


def is_cut_into_rows(call: Call) -> bool:
    """May each rank magnify its own rows, as far as sizes tell?"""
    factors = _factors(call)
    return bool(factors) and all(0 < factor <= _GREATEST_FACTOR for factor in factors.values())


def magnify(call: Call, run: Run) -> Any:
    """upsample_nearest and its gradient, by each rank; where the scale is told as a float that is another one, by its
    rule."""
    x, = call.tensors
    scales = [value for name, value in call.values.items() if name.startswith("scales")]
    if any(scales[d - 2] not in (None, factor) for d, factor in _factors(call).items()):
        return run.plain(call)
    own, (image, result) = x.spec.layout, _image_and_result(call)
    backward = "input_size" in call.values
    shards = {}
    for rank, part in x.shards.items():
        sizes: dict[str, Any] = {"output_size": list(own.local_shape(result, rank)[2:])}
        if backward:
            sizes["input_size"] = list(own.local_shape(image, rank))
        shards[rank] = local_op(call, **{call.names[0]: part.contiguous()}, **sizes).contiguous()
    return run.wrap(spec(own, image if backward else result, None, x.dtype), shards)
