"""Ops of our own, registered with torch so that they dispatch, trace and run on plain tensors like any other.

    contract(equation, a, b)     einsum of two tensors
    linear(x, weight, bias)      x [..., k] @ weight [n, k].T + bias [n], of any number of dims
    embedding_backward(grad, indices, rows, padding_idx)
                                 the gradient of an embedding's weight, of as many rows as `rows` has
    squares_around(x, centre)    per channel (dim 1), the sum of the squares of what lies around a centre
    norm_gradient(grad, x, mean, shift, slope, scale)
                                 (grad - shift - (x - mean) * slope) * scale, with a value of the last four per channel
    products_for_peers(left, right, added)
                                 the sum of the products of matrices, left[i] @ right[i], and of what is added, where
                                 other processes of this host can read it

And the linear maps between plain and global tensors (tensors/linear_maps.py, map_ops.py), which name layouts by their
text:

    redistribute(x, layout, grad_layout)
    from_full(t, layout)         full_tensor(x)
    from_local(t, layout)        to_local(x)
    spread(t, layout, shape)     part(x, layout, shape)

And what stands in the graphs of torch.compile (boxings/graph_op.py):

    box(shards, layouts, sizes, op, purpose, unrelated)
    draw_key()                                    of random numbers, fill(key, ...) makes them (random_ops.py)
    check_range(index, n, what, lowest)           raises for an index that no rank has
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from globaltensor.errors import RuleError
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import OpOverload, OpOverloadPacket

_library = torch.library.Library("globaltensor", "DEF")


def _contract(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One product of matrices, that of the native code: the same sums in another order end in other bits."""
    operands, out = equation.split("->")
    left, right = operands.split(",")
    batch = [label for label in left if label in right and label in out]
    rows, inner = ([label for label in left if (label in out) is kept and label not in batch] for kept in (True, False))
    columns = [label for label in right if label not in left]
    if rows and list(out) == batch + columns + rows:
        return _contract(f"{right},{left}->{out}", b, a)

    def merged(t: torch.Tensor, labels: str, *groups: list[str]) -> torch.Tensor:
        sizes = [prod(t.shape[labels.index(label)] for label in group) for group in groups]
        return _permuted(t, [labels.index(label) for group in groups for label in group]).reshape(sizes)

    lead = [batch] if batch else []
    multiply = torch.bmm if batch else torch.mm
    product = multiply(merged(a, left, *lead, rows, inner), merged(b, right, *lead, inner, columns))
    has = batch + rows + columns
    sizes = dict(zip(left, a.shape)) | dict(zip(right, b.shape))
    return _permuted(product.view([sizes[label] for label in has]), [has.index(label) for label in out]).contiguous()


def _permuted(t: torch.Tensor, order: list[int]) -> torch.Tensor:
    return t if order == sorted(order) else t.permute(order)             # a graph has a node less


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, padding_idx: int
                        ) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, indices, rows.shape[0], padding_idx, False)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _squares_around(x: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    return torch.square(x - _per_channel(centre, x)).sum([d for d in range(x.dim()) if d != 1])


def _norm_gradient(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, shift: torch.Tensor, slope: torch.Tensor,
                   scale: torch.Tensor) -> torch.Tensor:
    shift, mean, slope, scale = (_per_channel(values, x) for values in (shift, mean, slope, scale))
    return ((grad - shift - (x - mean) * slope) * scale).to(x.dtype)


def _products_for_peers(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], added: torch.Tensor | None = None
                        ) -> torch.Tensor:
    first = left[0] @ right[0]
    return sum((a @ b for a, b in zip(left[1:], right[1:])), first if added is None else first + added)


for _schema, _kernel in (("contract(str equation, Tensor a, Tensor b) -> Tensor", _contract),
                         ("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _linear),
                         ("embedding_backward(Tensor grad, Tensor indices, Tensor rows, int padding_idx) -> Tensor",
                          _embedding_backward),
                         ("squares_around(Tensor x, Tensor centre) -> Tensor", _squares_around),
                         ("norm_gradient(Tensor grad, Tensor x, Tensor mean, Tensor shift, Tensor slope, Tensor scale) "
                          "-> Tensor", _norm_gradient),
                         ("products_for_peers(Tensor[] left, Tensor[] right, Tensor? added=None) -> Tensor",
                          _products_for_peers)):
    _library.define(_schema)
    if torch_ext is None or _kernel is _embedding_backward:          # the native code brings others
        _library.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")

for _map in ("redistribute(Tensor x, str layout, str? grad_layout=None)", "full_tensor(Tensor x)",
             "from_full(Tensor t, str layout)", "to_local(Tensor x)", "from_local(Tensor t, str layout)",
             "spread(Tensor t, str layout, SymInt[] shape)", "part(Tensor x, str layout, SymInt[] shape)"):
    _library.define(f"{_map} -> Tensor")
_library.define("box(Tensor[] shards, str layouts, SymInt[] sizes, str op, str purpose, int unrelated) -> Tensor[]")
_library.define("draw_key() -> Tensor")
_library.define("fill(Tensor key, SymInt[] shape, SymInt[] edges, ScalarType dtype, Device device, str law, "
                "Tensor[] parts) -> Tensor")
_library.define("check_range(Tensor index, SymInt n, str what, SymInt lowest) -> ()")


def implement(op: OpOverload, kernel: Callable[..., Any], key: str = "CompositeExplicitAutograd") -> None:
    """Give an op of ours what it does at a dispatch key."""
    _library.impl(op._schema.name.partition("::")[2], kernel, key)


def tell_shapes(op: OpOverload, fake: Callable[..., Any]) -> None:
    """Give an op of ours what tells its results without memory."""
    torch.library.register_fake(op, fake, lib=_library)


contract = torch.ops.globaltensor.contract.default
linear = torch.ops.globaltensor.linear.default
embedding_backward = torch.ops.globaltensor.embedding_backward.default
squares_around = torch.ops.globaltensor.squares_around.default
norm_gradient = torch.ops.globaltensor.norm_gradient.default
products_for_peers = torch.ops.globaltensor.products_for_peers.default
redistribute = torch.ops.globaltensor.redistribute.default
full_tensor = torch.ops.globaltensor.full_tensor.default
from_full = torch.ops.globaltensor.from_full.default
to_local = torch.ops.globaltensor.to_local.default
from_local = torch.ops.globaltensor.from_local.default
spread = torch.ops.globaltensor.spread.default
part = torch.ops.globaltensor.part.default
box = torch.ops.globaltensor.box.default
draw_key = torch.ops.globaltensor.draw_key.default
fill = torch.ops.globaltensor.fill.default
check_range = torch.ops.globaltensor.check_range.default
# What an op of ours is made of, for the graphs of torch.compile: torch's own ops, which inductor fuses.
MADE_OF: dict[OpOverload, Callable[..., torch.Tensor]] = {
    contract: _contract, linear: _linear, embedding_backward: _embedding_backward, squares_around: _squares_around,
    norm_gradient: _norm_gradient}
LINEAR_MAPS = {redistribute, full_tensor, from_full, to_local, from_local, spread, part}


@register_flop_formula(torch.ops.globaltensor.linear)
def _count_of_linear(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


@register_flop_formula(torch.ops.globaltensor.contract)
def _count_of_contract(equation: str, a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    left, right = equation.partition("->")[0].split(",")
    # every label once: a multiplication and an addition for each combination of indices
    return 2 * prod({**dict(zip(left, a)), **dict(zip(right, b))}.values())


def overload_of(op: Any) -> OpOverload:
    """The one op that `op` names: an op of torch.ops, a custom op of torch.library, or "mine::twice".

    Raises RuleError where it is not an op, or a packet of several overloads.
    """
    typed = op
    if isinstance(op, str):
        library, _, name = op.partition("::")
        packet = getattr(getattr(torch.ops, library), name.partition(".")[0], None) if name else None
        op = getattr(packet, name.partition(".")[2], None) if "." in name else packet
    op = getattr(op, "_opoverload", op)              # of torch.library.custom_op and triton_op
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        if len(names) > 1:
            raise RuleError(f"{op} has {len(names)} overloads", "each of them has a rule of its own",
                            " or ".join(f"torch.ops.{op}.{name}" for name in names))
        op = getattr(op, names[0])
    if not isinstance(op, OpOverload):
        raise RuleError(f"not an op: {typed!r}", "a rule is given to an op that torch's dispatcher knows",
                        '@torch.library.custom_op("mine::twice", mutates_args=()) before your function')
    return op


def named_now(func: OpOverload) -> OpOverload:
    """The op that has this one's name: another one where it was defined anew, as by a cell of a notebook. Torch gives
    C++ the first one, as long as any kernel stands at that name."""
    if func.namespace == "aten":                     # nobody defines those anew
        return func
    packet = getattr(getattr(torch.ops, func.namespace), func._schema.name.partition("::")[2])
    return getattr(packet, func._schema.overload_name or "default")
