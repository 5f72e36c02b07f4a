"""Starting a backward pass with torch's overrides in force.

torch hands `x.backward()` and `torch.autograd.grad` to a tensor subclass that overrides functions, and the subclass
runs them with overrides switched off. What runs inside a backward pass (the recomputation of a checkpoint, a hook)
would then take other ways than the forward pass did. So these two enter the engine in ways that torch does not hand
over.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from globaltensor.runtime.torch_internals import DisableTorchFunctionSubclass

_GRAD = signature(torch.autograd.grad)


def backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
             grad_variables: Any = None, inputs: Any = None) -> None:
    """torch.autograd.backward, with tensors named by their edges in the graph."""
    outs, ins = _sequence(tensors), _sequence(inputs) if inputs is not None else None
    if _cannot(*outs, *(ins or ())):
        with DisableTorchFunctionSubclass():
            return torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, inputs=inputs)
    return torch.autograd.backward([_edge(t) for t in outs], _seeds(outs, grad_tensors), retain_graph, create_graph,
                                   inputs=[_edge(t) for t in ins] if ins is not None else None)


def method(x: torch.Tensor, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
           inputs: Any = None) -> None:
    """x.backward(...)"""
    backward(x, gradient, retain_graph, create_graph, inputs=inputs)


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, with tensors named by their edges in the graph."""
    if type(inputs) is dict:
        return dict(zip(inputs, grad(outputs, tuple(inputs.values()), grad_outputs, *args, **kwargs)))
    how = dict(_GRAD.bind(outputs, inputs, grad_outputs, *args, **kwargs).arguments)
    outs, ins = _sequence(how.pop("outputs")), _sequence(how.pop("inputs"))
    seeds, zeros = how.pop("grad_outputs"), how.pop("materialize_grads", False)
    if _cannot(*outs, *ins) or zeros and how.get("allow_unused") is False:
        with DisableTorchFunctionSubclass():
            return torch.autograd.grad(outputs, inputs, seeds, **how, materialize_grads=zeros)
    if zeros:
        how["allow_unused"] = True
    edges, others = [_edge(t) for t in outs], [_edge(t) for t in ins]
    grads: tuple[Any, ...] = torch.autograd.grad(edges, others, _seeds(outs, seeds), **how)
    if not zeros:
        return grads
    if any(g is None and not isinstance(t, torch.Tensor) for g, t in zip(grads, ins)):         # torch says it so
        raise RuntimeError("materialize_grads cannot be used when the given input is a GradientEdge")
    again = how.get("create_graph", False)
    return tuple(torch.zeros_like(t, requires_grad=again) if g is None else g for g, t in zip(grads, ins))


def _cannot(*tensors: Any) -> bool:
    """Will torch refuse these? Then it shall say so itself."""
    return any(isinstance(t, torch.Tensor) and not t.requires_grad for t in tensors)


def _seeds(outs: Sequence[Any], grads: Any) -> list[Any]:
    """The gradients to start from: one where none is given for a scalar."""
    seeds = _sequence(grads) if grads is not None else [None] * len(outs)
    for out in (out for out, seed in zip(outs, seeds) if seed is None and isinstance(out, torch.Tensor)):
        if out.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if not out.dtype.is_floating_point:
            raise RuntimeError(f"grad can be implicitly created only for real scalar outputs but got {out.dtype}")
    # of a global tensor a global one: from its edge alone, torch could make a plain one at most
    return [torch.ones_like(out) if seed is None and isinstance(out, torch.Tensor) else seed
            for out, seed in zip(outs, seeds)]


def _edge(t: Any) -> Any:
    return get_gradient_edge(t) if isinstance(t, torch.Tensor) else t


def _sequence(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, torch.Tensor) or not isinstance(value, (tuple, list)) else value


TAKEN: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.backward: method, torch.autograd.backward: backward, torch.autograd.grad: grad,
}
