"""Ops that torch does, or differentiates, by another formula for a tensor subclass than for a plain tensor.

`max()`, `min()` and `median()` of all elements: those that were chosen share the gradient, and others get none. torch
writes it to them for a plain tensor, but for a tensor subclass multiplies it by a mask, and 0 times inf is nan.

The determinant, differentiated again: torch solves equations for a plain matrix, and takes a singular value
decomposition of one that is singular; for a tensor subclass of all. Its derivative divides by differences of singular
values, so it is nan for twice the identity.

The gradient of complex eigenvectors: they are what they are up to a phase, so torch refuses the gradient of a loss that
depends on it, but of a tensor subclass it does not look.

So for global tensors these are functions of ours, by the formula of a plain tensor, or look as it does.

Eigenvalues and singular values: without a gradient a plain tensor has no vectors computed, a tensor subclass has.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from globaltensor.errors import where
from globaltensor.runtime.torch_internals import OWN_KEYS, ExcludeDispatchKeys, OpOverload, transforms_active
from globaltensor.tracebacks import api_boundary, note_on_torch_error

aten = torch.ops.aten


class ChosenElement(torch.autograd.Function):
    """The element of x that the op chooses."""

    @staticmethod
    def forward(ctx: Any, func: OpOverload, x: torch.Tensor) -> torch.Tensor:
        value = func(x)
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        x, value = ctx.saved_tensors
        chosen = (x == value) | (x.isnan() & value.isnan())
        return None, torch.where(chosen, grad / chosen.sum(), 0)


class Determinant(torch.autograd.Function):
    """The determinants of matrices, with their factors and pivots."""

    @staticmethod
    def forward(ctx: Any, func: OpOverload, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        det, factors, pivots = func(a)
        ctx.save_for_backward(a, det, factors, pivots)
        ctx.mark_non_differentiable(factors, pivots)
        ctx.set_materialize_grads(False)
        return det, factors, pivots

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[None, torch.Tensor | None]:
        a, det, factors, pivots = ctx.saved_tensors
        n, eps = a.shape[-1], torch.finfo(a.dtype).eps
        if grad is None or n == 1 or not a.numel():
            return None, grad if grad is None else grad[..., None, None].expand_as(a)
        scaled = torch.diag_embed((grad * det.conj()).unsqueeze(-1).expand(*det.shape, n)).mT   # a.mH @ the gradient
        if not torch.is_grad_enabled():
            factors = factors + torch.diag_embed(torch.where(factors.diagonal(0, -2, -1) == 0, eps, 0.))
            transposed = a.is_contiguous() and not a.is_complex()        # that was factored
            return None, torch.linalg.lu_solve(factors, pivots, scaled, adjoint=not transposed)
        # where the other formula is taken, each gets a matrix like the identity, and no gradient: no nan comes of it
        singular = det.detach().abs() < 100 * eps
        here = singular[..., None, None]
        distinct = torch.diag(torch.arange(1, n + 1, device=a.device).to(a.dtype))
        regular = torch.where(here, torch.eye(n, dtype=a.dtype, device=a.device), a)
        return None, torch.where(here, _adjugate(torch.where(here, a, distinct), torch.where(singular, grad, 0)),
                                 torch.linalg.solve(regular.mH, torch.where(here, 0, scaled)))


def _adjugate(a: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the determinant of matrices that may be singular: times each of its singular values that of a
    diagonal matrix is the product of all others."""
    u, values, vh = torch.linalg.svd(a)
    one = torch.ones_like(values[..., :1])
    before = torch.cat([one, values[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, values[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    scale = (torch.linalg.det(u) * torch.linalg.det(vh)).conj() * grad
    return (u * (scale.unsqueeze(-1) * before * after).unsqueeze(-2)) @ vh


def _eigenvectors(func: OpOverload, a: torch.Tensor, *how: Any) -> Any:
    """Eigenvalues and eigenvectors. Where these are complex, their gradient is looked at when it comes."""
    with ExcludeDispatchKeys(OWN_KEYS):
        values, eigenvectors = func(a, *how)
    if eigenvectors.grad_fn is not None and eigenvectors.is_complex() and not eigenvectors.is_meta:
        eigenvectors.grad_fn.register_prehook(partial(_refuse_phases, func, eigenvectors.detach()))
    return values, eigenvectors


@api_boundary
def _refuse_phases(func: OpOverload, eigenvectors: torch.Tensor, grads: tuple[torch.Tensor | None, ...]) -> None:
    """Raise torch's error if the gradient of eigenvectors says that the loss depends on what they are multiplied by."""
    if grads[1] is None or transforms_active():
        return
    with torch.no_grad():
        turned = (eigenvectors.conj() * grads[1]).sum(-2).imag
        ill_defined = not bool((turned.abs() <= 1e-2).all())
    if ill_defined:                                  # as is this gradient of a plain matrix
        one = torch.ones(1, 1, dtype=torch.complex64, device="cpu", requires_grad=True)
        try:
            with torch.enable_grad():
                torch.autograd.grad(func(one)[1], one, torch.full((1, 1), 1j, device="cpu"))
        except RuntimeError as error:
            note_on_torch_error(error, f"  where: {where()}")
            raise


def _needs_derivatives(a: torch.Tensor) -> bool:
    """May a derivative be asked of eigenvalues or singular values?"""
    return torch.is_grad_enabled() and a.requires_grad or transforms_active()


def _eigenvalues(a: torch.Tensor) -> Any:
    return aten.linalg_eig.default(a)[0] if _needs_derivatives(a) else aten._linalg_eigvals.default(a)


def _hermitian_eigenvalues(a: torch.Tensor, triangle: str = "L") -> Any:
    return aten._linalg_eigh.default(a, triangle, _needs_derivatives(a))[0]


def _singular_values(a: torch.Tensor, *, driver: str | None = None) -> Any:
    return aten._linalg_svd.default(a, False, _needs_derivatives(a), driver=driver)[1]


def _with_own_gradient(function: type[torch.autograd.Function], func: OpOverload, x: torch.Tensor) -> Any:
    """Where more is asked than a backward pass, torch's own has all formulas."""
    if torch.is_grad_enabled() and x.requires_grad and not transforms_active():
        return function.apply(func, x)
    with ExcludeDispatchKeys(OWN_KEYS):
        return func(x)


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    **{func: partial(_with_own_gradient, ChosenElement, func)
       for func in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default)},
    aten._linalg_det.default: partial(_with_own_gradient, Determinant, aten._linalg_det.default),
    **{func: partial(_eigenvectors, func) for func in (aten.linalg_eig.default, aten._linalg_eigh.default)},
    aten.linalg_eigvals.default: _eigenvalues, aten.linalg_eigvalsh.default: _hermitian_eigenvalues,
    aten.linalg_svdvals.default: _singular_values,
}
