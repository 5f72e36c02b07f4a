"""What convolutions and poolings of images whose rows are split offer (offer.py): the rows at the seams are exchanged.

The image stays as the user cut it. Splitting the batch instead moves the whole image there, and what comes out back:
less only where kernels are about as long as the parts.
"""
from __future__ import annotations

from math import prod
from typing import Any

from globaltensor.algorithms.halo import Slide, conv_layouts, cuts_space, result_shapes, slides_of
from globaltensor.algorithms.offer import Offer, boxings_to, largest_part
from globaltensor.layouts.layout import Layout, Shape, Spec
from globaltensor.layouts.regions import split_range
from globaltensor.rules.call import Call

NAME = "halo exchange"


def _missing_rows(slide: Slide, rows: int, out_rows: int, parts: int) -> int:
    """How many input rows the part lacks that lacks most, to make its output rows."""
    most = 0
    for i in range(parts):
        start, stop = slide.reads(*split_range(out_rows, parts, i))
        first, last = split_range(rows, parts, i)
        start, stop = max(start, 0), min(stop, rows)
        held = max(0, min(stop, last) - max(start, first))
        most = max(most, stop - start - held)
    return most


def _halo_elements(own: Layout, shape: Shape, out_space: Shape, slides: tuple[Slide, ...]) -> int:
    """Elements of the halo of one part, the largest."""
    lead, with_halo, without = len(shape) - len(slides), 1, 1
    for d, n in enumerate(shape):
        parts = own.num_parts(d)
        rows = -(-n // parts)
        without *= rows
        with_halo *= rows + (_missing_rows(slides[d - lead], n, out_space[d - lead], parts) if d >= lead else 0)
    return with_halo - without


def offer_convolution(call: Call, operands: list[Spec]) -> Offer | None:
    """Of a convolution: the halo of the image."""
    if not cuts_space(call):
        return None
    (shape,), image, weight = result_shapes(call), operands[0], operands[1]
    wants, _ = conv_layouts(image.layout.without_partials, weight.layout, image.shape[1], call["groups"])
    halo = _halo_elements(wants.x, image.shape, shape[2:], slides_of(call))
    laid_out = (wants.x, wants.weight, wants.bias)[:len(operands)]
    work = float(prod(shape) * prod(weight.shape[1:]))
    return Offer(NAME, laid_out, (wants.out,), work * _cut_share(wants.x, wants.weight), op_work=work,
                 **_exchange(operands, laid_out, halo * image.dtype.itemsize))


def offer_convolution_backward(call: Call, operands: list[Spec]) -> Offer | None:
    """Of its gradients: the halo of the image, for the weight, and back that of its gradient."""
    if not cuts_space(call):
        return None
    grad, image, weight = operands
    forward, backward = conv_layouts(image.layout.without_partials, weight.layout, image.shape[1], call["groups"])
    halo = _halo_elements(forward.x, image.shape, grad.shape[2:], slides_of(call))
    wanted, wants = call["output_mask"], (backward.out, forward.x, forward.weight)
    work = float(prod(grad.shape) * prod(weight.shape[1:])) * (bool(wanted[0]) + bool(wanted[1]))
    gives = tuple(to for to, asked in zip((backward.x, backward.weight, backward.bias), wanted) if asked)
    # starts are counted as forward, so that an image stays where its gradient does
    received = halo * image.dtype.itemsize * (bool(wanted[0]) + bool(wanted[1]))
    return Offer(NAME, wants, gives, work * _cut_share(forward.x, forward.weight), op_work=work,
                 **_exchange(operands, wants, received))


def offer_pooling(call: Call, operands: list[Spec]) -> Offer | None:
    """Of a pooling and its gradient: the halo of the image, or of its gradient."""
    if not cuts_space(call):
        return None
    image, slides = operands[call.names.index("self")], slides_of(call)
    out = call["grad_output"].shape if "grad_output" in call.values else result_shapes(call)[0]
    own = image.layout.without_partials
    halo = _halo_elements(own, image.shape, tuple(out[-len(slides):]), slides)
    wants, kernel = (own,) * len(operands), prod(slide.kernel for slide in slides)
    return Offer(NAME, wants, (own,) * len(call.func._schema.returns), float(largest_part(own, tuple(out)) * kernel),
                 op_work=float(prod(out) * kernel), **_exchange(operands, wants, halo * image.dtype.itemsize))


def _exchange(operands: list[Spec], wants: tuple[Layout, ...], received: int) -> dict[str, Any]:
    """What is sent: the halo goes together with what is boxed."""
    turn = boxings_to(operands, wants)
    return {"turns": (turn,), "exchanges": int(received > 0 and not turn), "received": received}


def _cut_share(image: Layout, weight: Layout) -> float:
    """The part of a convolution that each rank does."""
    return prod(1 / n for x, w, n in zip(image.sbp, weight.sbp, image.placement.shape) if x.is_split or w.is_split)
