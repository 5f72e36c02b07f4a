"""Products of tensors of more than two dims, without flattening any of them.

torch turns `linear` and `matmul` of such tensors into 2-d products of views that melt the leading dims into one. A
view like that keeps a split only along the first of them, and only an even one; a sequence or heads split along
another dim would be gathered. So for global tensors these two (and a plain `einsum`) are one op of ours,
`contract(equation, a, b)`, whose rule is its equation: any label can be cut. Its gradients are contractions too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from string import ascii_letters
from typing import Any

import torch
from torch.nn import functional as F

from globaltensor.algorithms.aliasing import sizes_of_rows
from globaltensor.layouts.global_like import is_global
from globaltensor.runtime import custom_ops
from globaltensor.runtime.memory import missing
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import as_batch, below_autograd, in_batch, stood_for, transforms_active

_contract = custom_ops.contract
_linear = custom_ops.linear
_LEADING = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


DeferredGrad = tuple[torch.Tensor, str, torch.Tensor, torch.Tensor]   # a leaf; contract(equation, a, b) is its gradient
# Inside `defer_weight_grads`: the leaves whose gradients are not deferred, and the gradients that were.
_deferring: tuple[Sequence[torch.Tensor], list[DeferredGrad]] | None = None


@contextmanager
def defer_weight_grads(inputs: Sequence[torch.Tensor]) -> Iterator[list[DeferredGrad]]:
    """In backward passes inside, products that only a leaf waits for are not made but noted in the list, whole once the
    block ends. They are most of what the gradients of weights cost. `inputs` are leaves that are waited for."""
    global _deferring
    deferred: list[DeferredGrad] = []
    _deferring = inputs, deferred
    if torch_ext is not None:
        torch_ext.defer_weight_grads(list(inputs))
    try:
        yield deferred
    finally:
        _deferring = None
        if torch_ext is not None:
            deferred += torch_ext.pop_deferred_weight_grads()


def contract(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The contraction as a function of autograd. Where more is asked of it than a backward pass, torch's own ops do it,
    which have formulas for all."""
    if transforms_active():
        return _contract_batch(equation, a, b) if in_batch(a) or in_batch(b) else torch.einsum(equation, a, b)
    return Contract.apply(equation, a, b)


def _contract_batch(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of operands that stand for a batch of gradients the products of all, as one."""
    label = next(letter for letter in ascii_letters if letter not in equation)
    operands, out = equation.split("->")
    sides = [label * in_batch(t) + side for t, side in zip((a, b), operands.split(","))]
    wholes = [(stood_for(t) or (t,))[0] for t in (a, b)]
    return as_batch(contract(f"{','.join(sides)}->{label}{out}", *wholes))


def _save_factors(ctx: Any, needs: Sequence[bool], a: torch.Tensor, b: torch.Tensor) -> None:
    """Of two factors those that the gradients need: the other may be written to before they are made."""
    need_a, need_b = needs
    ctx.save_for_backward(a if need_b else None, b if need_a else None)


def _gradient(ctx: Any, operand: int, equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The gradient of an operand of the product whose backward runs."""
    if _deferring is not None:
        leaf = getattr(ctx.next_functions[operand][0], "variable", None)   # what AccumulateGrad has
        if leaf is not None and not any(leaf is one for one in _deferring[0]):
            _deferring[1].append((leaf, equation, a, b))
            return None
    return contract(equation, a, b)


class Contract(torch.autograd.Function):
    """einsum(equation, a, b); every label of an operand stands in the output or in the other operand.

    In gradients the upstream one comes first: on a grid of ranks it stays where it is (algorithms/summa.py).
    """

    @staticmethod
    def forward(ctx: Any, equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.equation = equation
        _save_factors(ctx, ctx.needs_input_grad[1:], a, b)
        with below_autograd():
            return _contract(equation, a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        operands, out = ctx.equation.split("->")
        left, right = operands.split(",")
        _, need_a, need_b = ctx.needs_input_grad
        return (None, _gradient(ctx, 0, f"{out},{right}->{left}", grad, b.conj()) if need_a else None,
                _gradient(ctx, 1, f"{out},{left}->{right}", grad, a.conj()) if need_b else None)


class Linear(torch.autograd.Function):
    """x [..., k] @ weight [n, k].T + bias [n]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        _save_factors(ctx, ctx.needs_input_grad[:2], x, weight)
        with below_autograd():
            return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        lead = _LEADING[:grad.dim() - 1]
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (contract(f"{lead}n,nk->{lead}k", grad, weight.conj()) if need_x else None,
                _gradient(ctx, 1, f"{lead}n,{lead}k->nk", grad, x.conj()) if need_weight else None,
                grad.sum(list(range(grad.dim() - 1))) if need_bias else None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear; vectors go torch's own way."""
    if x.is_nested or x.dim() < 2 or weight.dim() != 2 or bias is not None and bias.dim() != 1 or transforms_active():
        return F.linear(x, weight, bias)
    _check_product(x.shape[-1] == weight.shape[1], "linear", x, weight)
    if x.dim() == 2 and weight.shape[0] <= weight.shape[1] and is_global(x) and (sizes := sizes_of_rows(x)) is not None:
        # rows that torch melted, as its attention does, and will part again: nothing need move for that
        return linear(x.view(sizes), weight, bias).view(x.shape[0], weight.shape[0])
    x, weight, bias = autocast(x, weight, bias)
    return Linear.apply(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul, leading dims broadcast; two dims and fewer go torch's own way."""
    a, b = autocast(a, b)
    if a.dim() < 2 or b.dim() < 2 or a.dim() == b.dim() == 2 or _is_odd(a, b) or transforms_active():
        return torch.matmul(a, b)
    _check_product(a.shape[-1] == b.shape[-2], "matmul", a, b)
    many = max(a.dim(), b.dim()) - 2
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, left = _without_ones(a, batch, many)
    b, right = _without_ones(b, batch, many)
    return contract(f"{left}mk,{right}kn->{_LEADING[:many]}mn", a, b)


def _without_ones(x: torch.Tensor, batch: tuple[int, ...], many: int) -> tuple[torch.Tensor, str]:
    """x without the leading dims of size 1 that are broadcast, and the labels of those that stay."""
    first = many - (x.dim() - 2)
    # a label has one size in both operands: the one that is repeated goes without
    gone = [i for i in range(x.dim() - 2) if x.shape[i] == 1 and batch[first + i] != 1]
    labels = "".join(_LEADING[first + i] for i in range(x.dim() - 2) if i not in gone)
    return (x.squeeze(gone) if gone else x), labels


def einsum(equation: str, *operands: Any) -> torch.Tensor:
    """torch.einsum; two operands with plain labels are one contraction, the rest goes torch's own way."""
    if len(operands) == 2 and _is_plain(equation, operands):
        a, b = autocast(*operands)
        if not _is_odd(a, b):
            return _contract_in_order(equation.replace(" ", ""), a, b)
    return torch.einsum(equation, *operands)


def _contract_in_order(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    operands, out = equation.split("->")
    left, right = operands.split(",")
    order = _einsum_memory_order(left, right, out)
    product = contract(f"{operands}->{order}", a, b)
    return product if order == out else product.permute([order.index(label) for label in out])


def _einsum_memory_order(left: str, right: str, out: str) -> str:
    """The labels of a product as torch has them in memory: those of both operands first, then those of one each."""
    shared = "".join(label for label in out if label in left and label in right)
    of_left = "".join(label for label in out if label not in right)
    of_right = "".join(label for label in out if label not in left)
    swapped = of_left and of_right and out.index(of_right[-1]) < out.index(of_left[0])
    return shared + (of_right + of_left if swapped else of_left + of_right)


def _is_plain(equation: Any, operands: tuple[Any, ...]) -> bool:
    """Letters only, none twice in a tensor, every label kept or shared, one summed, and no size broadcast."""
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    sides = text.split("->")
    if len(sides) != 2 or sides[0].count(",") != 1 or any(t.is_nested for t in operands):
        return False
    left, right = sides[0].split(",")
    tensors = (left, right, sides[1])
    if not all(all(c.isalpha() for c in t) and len(set(t)) == len(t) for t in tensors):
        return False
    if len(left) != operands[0].dim() or len(right) != operands[1].dim():
        return False
    sizes = dict(zip(left, operands[0].shape))
    if set(left) | set(right) == set(sides[1]):      # a product of elements, which torch multiplies
        # ours says what is wrong with an operand without memory
        return any(not is_global(t) and missing(t) is not None for t in operands)
    return (set(left) <= set(right + sides[1]) and set(right) <= set(left + sides[1])
            and all(sizes.get(c, n) == n for c, n in zip(right, operands[1].shape)))


def _is_odd(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Operands of several dtypes, and bools, are torch's: it multiplies them where there is nothing to add up, and else
    complains. So are nested tensors, which have no sizes to ask for."""
    return a.is_nested or b.is_nested or a.dtype != b.dtype or a.dtype == torch.bool


def _check_product(fits: bool, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if not fits:
        raise RuntimeError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """What autocast would do to the operands of a product."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
                 for t in tensors)


if torch_ext is None:                                # called by name, as a graph that torch traced calls them
    custom_ops.implement(_contract, Contract.apply, "Autograd")
    custom_ops.implement(_linear, lambda x, weight, bias=None: Linear.apply(x, weight, bias), "Autograd")

TAKEN: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    F.linear: linear, torch.matmul: matmul, torch.Tensor.matmul: matmul, torch.Tensor.__matmul__: matmul,
    torch.Tensor.__rmatmul__: lambda b, a: matmul(a, b), torch.einsum: einsum,
}
