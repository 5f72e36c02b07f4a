"""A step of a model as a graph of ops, forward and backward, found without memory and without a device.

    graph = capture(model, example_inputs, loss)     # a networkx.DiGraph; the model may be on the meta device

The model runs once on global tensors of one imaginary rank on the meta device, while a dispatch mode looks on: so the
ops are those that the library dispatches, with `linear` and `contract` whole, and backward ops are what autograd really
calls. (torch.export and make_fx show the ops that torch makes of them instead, which no rule here would ever see.)

What follows from sizes alone (positions, masks) has its values while it is small, as models look at those; what follows
from an input or a parameter has none.

A node is a number, in the order of the calls, with these attributes:

    kind      "op", or where a value comes from: "parameter", "buffer", "input", "constant", "seed" (the gradient with
              which backward begins); "repeat", a block that is equal to an earlier one (repeats.py); "output", where
              a loss that is not told takes what the model returns
    op        the op; None where there is none
    args      its arguments by name, with a Ref (node, output) in the place of each tensor
    shapes, strides, dtypes     of the outputs
    name      of a parameter, buffer or input
    module    path of the innermost module that runs; of a backward op: of the one whose op it belongs to
    phase     "forward" or "backward"
    line      the user's file:line; of a backward op: that of its forward op
    origin    of a backward op: the node of its forward op
    block     which block it is in, by number; None outside of blocks that repeat

An edge has `uses`: pairs of an output of its source and an operand of its target, which are counted as in `Call`. One
without uses says only that the source wrote to memory that the target reads. The graph itself has `blocks` (block ->
Block), `outputs` (Refs of what the model returns), `loss` and `gradients` (name of a parameter or input -> Ref).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from globaltensor.errors import GlobalTensorError, raised_at
from globaltensor.planner.device_kernels_of import kernels_of
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.repeats import DifferentiatedAgain, repeating
from globaltensor.planner.tracer import Tracer, as_tree
from globaltensor.runtime.torch_internals import tree_leaves
from globaltensor.tensors.global_tensor import GlobalTensor

if TYPE_CHECKING:
    import networkx


def capture(model: nn.Module, example_inputs: Any, loss: Callable[[Any], torch.Tensor] | None = None,
            repeats: bool = True) -> networkx.DiGraph:
    """The graph of one step of a model; the model stays as it is, and nothing is allocated.

    example_inputs   a tensor, a tuple of arguments or a dict of them by name; of tensors only shapes and dtypes count
    loss             what the model returns -> a scalar. None: the model returns it, alone or as `.loss`; where it does
                     not, backward begins with a gradient for each of its outputs, as in a stage of a pipeline
    repeats          capture equal members of a ModuleList, ModuleDict or Sequential once, where that is possible
    Raises CaptureError with the line where the step cannot go on without values.
    """
    args, named = read_inputs(example_inputs)
    try:
        return _capture(model, args, named, loss, repeats)
    except DifferentiatedAgain:
        return _capture(model, args, named, loss, repeats=False)


def _capture(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any],
             loss: Callable[[Any], torch.Tensor] | None, repeats: bool) -> networkx.DiGraph:
    tracer = Tracer()
    with ExitStack() as stack:
        leaves = tracer.leaves(model)
        args, named = tracer.inputs(args, named)
        stack.enter_context(tracer.following_modules(model))
        if repeats:
            stack.enter_context(repeating(model, tracer))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(kernels_of("cpu"))
        stack.enter_context(capture_errors(model))
        stack.enter_context(tracer)
        result = torch.func.functional_call(model, leaves, args, named)
        tracer.graph.graph["outputs"] = [tracer.ref(t) for t in tree_leaves(as_tree(result))
                                         if isinstance(t, GlobalTensor)]
        tracer.run_backward(loss_of(result, loss), result)
    tracer.note_gradients(leaves)
    return tracer.graph


@contextmanager
def capture_errors(model: nn.Module) -> Iterator[None]:
    """Inside, a step of this model runs without values: what it raises is a CaptureError that names its line."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:                       # anything may be raised by a forward that finds no values
        message = (str(error).splitlines() or [""])[0]
        # where values are asked for, torch says that a "meta tensor" has none; what else it says is of the operands
        looks = "meta" in message.lower() or isinstance(error, GlobalTensorError)
        raise CaptureError(f"the step of a {type(model).__name__} cannot be captured",
                           f"{type(error).__name__}: {message}",
                           "a forward that does not look at the values of tensors (`.item()`, `if x.any():`)" if looks
                           else "inputs, targets and a loss that fit the model",
                           raised_at(error)) from error


def read_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as arguments by position and by name."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def loss_of(result: Any, loss: Callable[[Any], Any] | None) -> Any:
    """The loss of what a model returns. Without one, that which the model returns itself, if it does."""
    if loss is not None:
        value = loss(result)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"a loss that returns {value!r:.40}", "backward begins at a scalar tensor",
                               "loss=lambda output: output.mean()")
        return value
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if own is None and isinstance(result, torch.Tensor) and not result.dim():
        return result
    return own
