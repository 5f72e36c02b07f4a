"""Families of neural networks' own ops: convolution, pooling, normalization, attention, classification losses.

    n  batch    c o  channels    g  groups    b h  batch and heads    q s  queries and keys
    y* k* z*    spatial dims of input, kernel and output, which stay whole

A dim of groups, `(g c)`, is cut between groups only. A rank's local call is given the number of groups in its part
(`op_table/line.py`).
"""
from __future__ import annotations

from math import prod

from globaltensor.rules.call import Call
from globaltensor.rules.families import (
    MEAN,
    NONE,
    Family,
    broadcast_labels,
    kept_whole,
    regardless_of_size,
    with_nonlinear,
)
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule


def _conv_dims(call: Call, space: int) -> tuple[str, str, str, str, tuple[tuple[str, int], ...]]:
    """Dims of input, weight, bias and output, and the labels that must be cut evenly."""
    k, groups, tiled = " ".join(f"k{i}!" for i in range(space)), call["groups"], _tiles(call, space)
    y = " ".join(f"y{i}" if i in tiled else f"y{i}!" for i in range(space))
    z = " ".join(f"(y{i} p{i})" if i in tiled else f"z{i}!" for i in range(space))
    rows = tuple((f"y{i}", call["input"].shape[i - space]) for i in tiled)
    if groups == 1:
        weight = f"c o {k}" if call["transposed"] else f"o c {k}"
        return f"n c {y}", weight, "o", f"n o {z}", rows
    # a group reads all of its own channels, so these stay whole: "(g i)" is cut between groups
    weight = f"(g i) o! {k}" if call["transposed"] else f"(g o) i! {k}"
    x, bias, out = f"n (g i) {y}", "(g o)", f"n (g o) {z}"
    channels = call["weight"].shape[0] * (call["weight"].shape[1] if call["transposed"] else 1)
    if groups == call["input"].shape[1] == channels:         # one channel a group: any cut is one between groups
        x, weight, bias, out = (dims.replace("(g i)", "g").replace("(g o)", "g") for dims in (x, weight, bias, out))
        return x, weight, bias, out, rows
    return x, weight, bias, out, (("g", groups), *rows)


def _tiles(call: Call, space: int) -> list[int]:
    """Spatial dims of a transposed convolution each row of which makes rows of its own: kernels that do not overlap."""
    if not call["transposed"]:
        return []
    each = [list(call[name]) * (1 if len(call[name]) == space else space)
            for name in ("stride", "padding", "dilation", "output_padding")]
    kernel = call["weight"].shape[-space:]
    return [i for i, numbers in enumerate(zip(*each)) if numbers == (kernel[i], 0, 1, 0)]


def convolved(call: Call) -> Rule:
    """convolution, transposed or not. Kernels take no empty channels."""
    x, weight, bias, out, even = _conv_dims(call, call.tensors[0].dim() - 2)
    return rule(f"{x}, {weight}, {bias} -> {out}", "a*b+c", ndims=call.ndims, even=even, nonempty="c o g")


def convolved_backward(call: Call) -> Rule:
    """Gradients of input, weight and bias, each by a contraction of its own."""
    x, weight, bias, out, even = _conv_dims(call, call.tensors[1].dim() - 2)
    return rule(f"{out}, {x}, {weight} -> {x}, {weight}, {bias}", "a*c;a*b;a", even=even, nonempty="n c o g")


def spatial(dims: int, algebra: str = "", *, operands: int = 1, outputs: int = 1) -> Family:
    """Works on the last `dims` dims, which stay whole: pooling, upsampling, padding, and their gradients. Means of
    integers are rounded, so they are not linear."""

    def write(call: Call) -> Rule:
        dtype = call.tensors[0].dtype
        terms = algebra if dtype.is_floating_point or dtype.is_complex else algebra.upper()
        batch = [f"b{i}" for i in range(call.tensors[0].dim() - dims)]
        row = " ".join([*batch, *(f"y{i}!" for i in range(dims))])
        return rule(f"{', '.join([row] * operands)} -> {', '.join([row] * outputs)}",
                    # torch's kernels take an empty batch, but no empty channels, the last dim before space
                    ";".join([terms] * outputs) if terms else "", nonempty=batch[-1])

    return write


def fractional(dims: int) -> Family:
    """Pooling at random places, which are drawn for each channel; one image alone has those of a batch of one."""

    def write(call: Call) -> Rule:
        batch = "n c" if call.tensors[0].dim() == dims + 2 else "c"
        drawn = batch if batch == "n c" else "1 c"
        x, out = (" ".join(f"{name}{i}!" for i in range(dims)) for name in "yz")
        return rule(f"{batch} {x}, {drawn} k! -> {batch} {out}, {batch} {out}", nonempty=batch)

    return write


def affine_grid(call: Call) -> Rule:
    """A grid of as many dims as the matrices have rows, and of a size that is a number."""
    space = " ".join(f"y{i}!" for i in range(len(call["size"]) - 2))
    return rule(f"n r! k! -> n {space} i!", "a", nonempty="n")


def shuffled(*, up: bool) -> Family:
    """pixel_shuffle and its inverse: channels hold the pixels of a block."""

    def write(call: Call) -> Rule:
        batch = " ".join(f"b{i}" for i in range(call.tensors[0].dim() - 3))
        packed, plain = f"{batch} (c r) y x", f"{batch} c (y p) (x q)"
        c, y, x = call.shapes[0][-3:]
        r = call["upscale_factor" if up else "downscale_factor"]
        size = (c // r ** 2, y, x) if up else (c, y // r, x // r)
        return rule(f"{packed} -> {plain}" if up else f"{plain} -> {packed}", "a", even=tuple(zip("cyx", size)),
                    nonempty=batch)

    return write


def columns(*, apart: bool) -> Family:
    """im2col (`apart`) and col2im: the values of a patch are neighbours within a channel. Patches that lie side by side
    are rows of the image by rows of patches."""

    def write(call: Call) -> Rule:
        batch = "b" if call.tensors[0].dim() == (4 if apart else 3) else ""
        channels = call.shapes[0][-3] if apart else call.shapes[0][-2] // prod(call["kernel_size"])
        image, patches, even = f"{batch} c y! x!", f"{batch} (c k) l!", [("c", channels)]
        rows = (call.shapes[0] if apart else call["output_size"])[-2]
        kernel, *numbers = (call[name][0] for name in ("kernel_size", "stride", "padding", "dilation"))
        if numbers == [kernel, 0, 1] and rows % kernel == 0:
            image, patches = f"{batch} c (y p) x!", f"{batch} (c k) (y q)"
            even.append(("y", rows // kernel))
        return rule(f"{image} -> {patches}" if apart else f"{patches} -> {image}", "a", even=tuple(even))

    return write


def normalized(dims: str, algebra: str) -> Family:
    """layer_norm and rms_norm: over the last dims, d*, as many as `normalized_shape` has; statistics have as many, o*.
    """

    def write(call: Call) -> Rule:
        count = len(call["normalized_shape"])
        return rule(dims, algebra, ndims=call.ndims, stars=(("d", count), ("o", count)))

    return regardless_of_size(write)


def group_norm(dims: str, algebra: str) -> Family:
    """Channels can be cut between groups; anywhere if each is a group."""

    def write(call: Call) -> Rule:
        if call["group"] == call["C"]:
            return rule(dims.replace("(g c)", "g"), algebra, ndims=call.ndims, nonempty="g")
        return rule(dims, algebra, ndims=call.ndims, even=(("g", call["group"]),))

    return write


def batch_norm(call: Call) -> Rule:
    """In training, statistics need the whole batch and space (`algorithms/batch_norm.py` where they are cut); in
    evaluation nothing does."""
    if call.get("training", True):
        return rule("n! c y*!, c, c, c, c -> n! c y*!, c, c", "A*b+c;A;A", ndims=call.ndims, nonempty="c")
    # e, f: in evaluation nothing is saved for the gradient, and the kernel returns empty tensors
    return rule("n c y*, c, c, c, c -> n c y*, e!, f!", "A*b*D*E+c;;", ndims=call.ndims, nonempty="n c")


def batch_norm_backward(call: Call) -> Rule:
    """Operands: grad, input, weight, running mean and variance, saved mean and inverse deviation. In training only the
    gradient of the input needs those of the whole batch."""
    if call["train"] and not call["output_mask"][0]:
        return rule("n c y*, n c y*, c, c, c, c, c -> n c y*, c, c", "a*B*c*F*G;a*B*F*G;a", ndims=call.ndims,
                    nonempty="n c y*")
    if call["train"]:
        return rule("n! c y*!, n! c y*!, c, c, c, c, c -> n! c y*!, c, c", "a*B*c*F*G;a*B*F*G;a", ndims=call.ndims,
                    nonempty="c")
    return rule("n c y*, n c y*, c, c, c, e!, f! -> n c y*, c, c", "a*c*E;a*B*D*E;a", ndims=call.ndims, nonempty="n c")


def _head_dims(call: Call) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """The head dim of queries and that of keys: several heads of queries may share one of keys."""
    queries, keys = call["query"].shape[1], call["key"].shape[1]
    return ("h", "h", ()) if queries == keys else ("(h r)", "h", (("h", keys),))


def attention(*, backward: bool = False) -> Family:
    """Fused attention, softmax(q k^T + mask) v, and its gradients.

    Batch and heads can be cut. Queries too, unless it is causal: then the mask of a row depends on its position, and a
    kernel counts that from the start of its part. In the gradients keys can be cut as well. Features stay whole.
    """

    def write(call: Call) -> Rule:
        hq, hk, even = _head_dims(call)
        query = "q!" if call["is_causal"] else "q"
        key = "s" if backward and query == "q" else "s!"     # out and logsumexp hold all that a part needs
        q, k, v = f"b {hq} {query} d!", f"b {hk} {key} d!", f"b {hk} {key} e!"
        out, log = f"b {hq} {query} e!", f"b {hq} {query}"
        operands = {"query": q, "key": k, "value": v, "grad_out": out, "out": out, "logsumexp": log}
        if call["attn_mask"] is not None:
            size = (*call["query"].shape[:3], call["key"].shape[2])
            operands["attn_mask"] = broadcast_labels(tuple(call["attn_mask"].shape), size, ["b", hq, query, key])
        lhs = [operands[name] for name in call.names]
        if backward:
            linear = with_nonlinear("a", len(lhs) - 1)
            return rule(f"{', '.join(lhs)} -> {q}, {k}, {v}", ";".join([linear] * 3), even=even, nonempty=ATTENDED)
        mask = "*D" if len(lhs) > 3 else ""
        return rule(f"{', '.join(lhs)} -> {out}, {log}", f"A*B*c{mask};A*B{mask}", even=even, nonempty=ATTENDED)

    return regardless_of_size(write)


ATTENDED = "b h q s"                                 # fused attention kernels take none of these empty


def nll_loss(space: str = "", *, backward: bool = False) -> Family:
    """nll_loss of log-probabilities [n*, c, *space], targets and class weights.

    Where classes are cut, a local_impl ignores the targets of other ranks. A mean divides by the weight of all targets,
    so it stays whole (`decompositions.nll_mean` where they are cut); its gradient is given that weight.
    """

    def write(call: Call) -> Rule:
        n = call.tensors[int(backward)].dim() - 1 - len(space.split())
        batch = " ".join(f"n{i}" for i in range(n))
        one = "1" if not n and call.tensors[int(backward) + 1].dim() else ""      # the class of one row, as a list
        x, target = f"{batch} c {space}", f"{batch or one} {space}"
        how = call["reduction"]
        each = target if how == NONE and n else ""   # of one row the loss has no dims, however its class is told
        if backward:
            algebra = "a*C*d*E" if how == MEAN else "a*C*d"
            return rule(f"{each}, {x}, {target}, c, -> {x}", algebra, ndims=call.ndims)
        algebra = "a*B*C;B*c" if how == MEAN else "a*B*c;" if each.strip() else "a*B*c;A*B*c"
        of = rule(f"{x}, {target}, c -> {each}, ", algebra, ndims=call.ndims)
        return kept_whole(of) if how == MEAN else of

    return write


def margin_loss(*, of_each: bool = False, backward: bool = False) -> Family:
    """A loss of the classes of a row, [n, c], [c] or of one class [], and of the class that is meant or, `of_each`, of
    all that are. A mean stays whole, as that of other losses."""

    def write(call: Call) -> Rule:
        rows = call["self"].dim() == 2
        of_row = ("n" if rows else "1") if call["target"].dim() else ""          # the class of one row, as a list
        batch = of_row or "1" if rows else ""
        x = f"{batch} c!" if call["self"].dim() else ""
        meant, each = (x, batch) if of_each else (of_row, of_row)
        each = each if call["reduction"] == NONE else ""
        if of_each:
            dims, algebra = (f"{each}, {x}, {meant}, {meant} -> {x}", "a*B*C*D") if backward else (
                f"{x}, {meant} -> {each}, {meant}", "A*B;B")
        else:
            dims, algebra = (f"{each}, {x}, {meant}, c! -> {x}", "a*B*C*d") if backward else (
                f"{x}, {meant}, c! -> {each}", "A*B*c")
        # of no rows kernels leave a sum as it was
        of = rule(dims, algebra, ndims=call.ndims, nonempty=batch if batch == "n" else "")
        return kept_whole(of) if call["reduction"] == MEAN else of

    return write


def weight_norm(*, backward: bool = False) -> Family:
    """v g / |v|, with a norm for each slice along `dim`. The kernel divides by the number of slices."""

    def write(call: Call) -> Rule:
        n = call.tensors[0].dim()
        dim = call["dim"] % n
        row = " ".join("d" if i == dim else f"r{i}!" for i in range(n))
        one = " ".join("d" if i == dim else "1" for i in range(n))
        if backward:
            return rule(f"{row}, {row}, {one}, {one} -> {row}, {one}", "a*B*c*D;a*B*D", nonempty="d")
        return rule(f"{row}, {one} -> {row}, {one}", "A*b;A", nonempty="d")

    return write
