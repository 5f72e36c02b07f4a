"""Arguments for the functions and methods of torch: the operator database's, a table of ours, else by the signature.

`calls_of` gives, for a function and its name, calls that plain torch runs.
"""
from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@cache
def by_function() -> dict[Any, list[Any]]:
    """function or method -> entries of the operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    entries = defaultdict(list)
    for op in op_db:
        for one in (op, *op.aliases):
            for kind in ("op", "method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant"):
                if (function := getattr(one, kind, None)) is not None and op not in entries[function]:
                    entries[function].append(op)
    return entries


def samples(function: Callable[..., Any]) -> Iterator[Arguments]:
    """The first and a middle sample of each entry of the operator database."""
    for op in by_function().get(function, ()):
        supported = op.supported_dtypes("cpu")
        dtype = next((d for d in (torch.float32, torch.complex64, torch.int64, *supported) if d in supported), None)
        drawn = list(itertools.islice(op.sample_inputs("cpu", dtype), 60)) if dtype else []
        for sample in drawn[:1] + drawn[len(drawn) // 2:][:1] * (len(drawn) > 2):
            yield (sample.input, *sample.args), dict(sample.kwargs)


@cache
def annotations() -> dict[Any, list[dict[str, str]]]:
    from torch.testing._internal.generated.annotated_fn_args import annotated_args

    return annotated_args


SHAPES = ((4, 4), (6,), (2, 4, 4), (2, 4, 6, 6), (2, 4, 4, 4, 4), ())
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


def by_signature(function: Callable[..., Any]) -> Iterator[Arguments]:
    """What the types of the required arguments allow: one shape and dtype for all tensors, one number."""
    known = annotations().get(function, [{"name": "self", "simple_type": "Tensor", "is_kwarg_only": "False"}])
    for shape, dtype, number in itertools.product(SHAPES, DTYPES, (1, 0, 2)):
        args, kwargs = [], {}
        for one in known:
            value = _value(one, shape, dtype, number)
            if one["is_kwarg_only"] == "True":
                kwargs[one["name"]] = value
            else:
                args.append(value)
        yield tuple(args), kwargs


def _value(one: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, number: int) -> Any:
    kind = one["simple_type"].rstrip("?")
    t = (torch.rand(shape) * 3 + 0.5).to(dtype)
    if kind == "Tensor":
        return t
    if "List" in kind and "Tensor" in kind:
        return [t, t.clone()]
    if "Ref" in kind or "List" in kind:
        return [number] * int(one.get("size", 1))
    for name, value in (("bool", False), ("double", 0.5), ("Scalar", float(number)), ("string", "mean"),
                        ("ScalarType", torch.float32)):
        if kind.endswith(name):
            return value
    return number


def plain(args: Arguments, call: Callable[..., Any]) -> Any:
    """What plain torch gives, on copies."""
    positional, named = deepcopy(args)
    return call(*positional, **named)


def calls_of(name: str, function: Callable[..., Any], call: Callable[..., Any]) -> list[Arguments]:
    """Arguments with which plain torch runs `call`: of the operator database or the table, else of the signature."""
    if name in TABLE:
        return [TABLE[name]()]
    for source, most in ((samples(function), 2), (by_signature(function), 1)):
        if good := list(itertools.islice((args for args in source if _runs(args, call)), most)):
            return good
    return []


def _runs(args: Arguments, call: Callable[..., Any]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain(args, call)
        return True
    except Exception:                                # which of many it takes is the question
        return False



def r(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.1


def of(*args: Any, **kwargs: Any) -> Callable[[], Arguments]:
    """These arguments; tensors are copied before a call."""
    return lambda: (args, kwargs)


def leaf(*shape: int) -> torch.Tensor:
    return r(*shape).requires_grad_()


I4 = torch.tensor([2, 0, 1, 2])
CELL = (r(3, 4), r(3, 5), r(5, 4), r(5, 5))


def weights(gates: int) -> list[torch.Tensor]:
    """Of one layer of an RNN, 4 inputs and 6 states."""
    return [r(6 * gates, 4), r(6 * gates, 6), r(6 * gates), r(6 * gates)]


_NORM = (r(4, 3, 5), r(3), r(3), r(3), r(3))
_RNN = (True, 1, 0.0, False, False, False)
# what neither the database nor the signature gives arguments for
TABLE: dict[str, Callable[[], Arguments]] = {
    "method __array_wrap__": of(r(3), torch.ones(3).numpy()), "method __contains__": of(torch.arange(6.0), 3),
    "method __format__": of(r(), ""), "method __reduce_ex__": of(r(4), 2),
    "method __setitem__": of(r(4, 3), 1, 7.0), "method backward": of(leaf()), "method copy_": of(r(4, 3), r(3)),
    "method new_tensor": of(r(4), [1, 2]), "method float_power_": of(r(4, 3).double(), 2.0),
    "method apply_": of(r(4, 3), abs), "method map_": of(r(4), r(4), max),
    "method map2_": of(r(4), r(4), r(4), lambda x, y, z: x + y * z), "method register_hook": of(leaf(4), abs),
    "method register_post_accumulate_grad_hook": of(leaf(4), abs), "method retain_grad": of(leaf(4)),
    "method as_subclass": of(r(4), torch.Tensor), "method module_load": of(r(4), r(4)),
    "method sparse_mask": of(r(4, 3), torch.eye(4, 3).to_sparse()),
    "method sspaddmm": of(torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), r(3, 3)),
    "method smm": of(torch.eye(3).to_sparse(), r(3, 3)), "method to_padded_tensor": of(r(4, 3), 0.0),
    "function torch.affine_grid_generator": of(r(2, 2, 3), [2, 3, 4, 4], False),
    "function torch.nn.functional.affine_grid": of(r(2, 2, 3), [2, 3, 4, 4], False),
    "function torch.batch_norm": of(*_NORM, True, 0.1, 1e-5, False),
    "function torch.instance_norm": of(*_NORM, True, 0.1, 1e-5, False),
    "function torch.convolution": of(r(4, 3, 6, 6), r(6, 3, 3, 3), r(6), (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    "function torch.nn.functional.conv_tbc": of(r(5, 3, 4), r(3, 4, 6), r(6)),
    "function torch.cosine_embedding_loss": of(r(4, 3), r(4, 3), torch.tensor([1, -1, 1, -1])),
    "function torch.ctc_loss": of(r(6, 2, 5).log_softmax(2), torch.tensor([[1, 2, 3], [2, 1, 4]]), torch.tensor([6, 5]),
                                  torch.tensor([3, 2])),
    "function torch.functional.einsum": of("ij,jk->ik", r(4, 3), r(3, 5)),
    "function torch.embedding_bag": of(r(5, 3), I4, torch.tensor([0, 2])),
    "function torch.nn.functional.embedding_bag": of(I4, r(5, 3), torch.tensor([0, 2])),
    "function torch.nn.functional.embedding": of(I4, r(5, 3)),
    "function torch.grid_sampler": of(r(2, 3, 4, 4), r(2, 5, 5, 2), 0, 0, False),
    "function torch.gru": of(r(5, 2, 4), r(1, 2, 6), weights(3), *_RNN),
    "function torch.lstm": of(r(5, 2, 4), (r(1, 2, 6), r(1, 2, 6)), weights(4), *_RNN),
    "function torch.rnn_relu": of(r(5, 2, 4), r(1, 2, 6), weights(1), *_RNN),
    "function torch.rnn_tanh": of(r(5, 2, 4), r(1, 2, 6), weights(1), *_RNN),
    "function torch.gru_cell": of(r(3, 4), r(3, 5), r(15, 4), r(15, 5)),
    "function torch.lstm_cell": of(r(3, 4), (r(3, 5), r(3, 5)), r(20, 4), r(20, 5)),
    "function torch.rnn_relu_cell": of(*CELL), "function torch.rnn_tanh_cell": of(*CELL),
    "function torch._assert_async": of(torch.tensor(True)), "function torch.native_norm": of(r(4), 2),
    "function torch.hspmm": of(torch.eye(3).to_sparse(), r(3, 3)),
    "function torch.smm": of(torch.eye(3).to_sparse(), r(3, 3)),
    "function torch.sspaddmm": of(torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), r(3, 3)),
    "function torch.nuclear_norm": of(r(4, 3)), "function torch.view_as_complex_copy": of(r(4, 2)),
    "function torch.nn.functional.fold": of(r(2, 12, 4), (3, 3), (2, 2)),
    "function torch.nn.functional.fractional_max_pool2d": of(r(2, 3, 6, 6), 2, 3),
    "function torch.nn.functional.fractional_max_pool2d_with_indices": of(r(2, 3, 6, 6), 2, 3),
    "function torch.nn.functional.fractional_max_pool3d": of(r(2, 3, 6, 6, 6), 2, 3),
    "function torch.nn.functional.fractional_max_pool3d_with_indices": of(r(2, 3, 6, 6, 6), 2, 3),
    "function torch.nn.functional.multi_head_attention_forward": of(
        r(5, 2, 4), r(5, 2, 4), r(5, 2, 4), 4, 2, r(12, 4), r(12), None, None, False, 0.0, r(4, 4), r(4)),
    "function torch.nn.init.constant_": of(r(4, 3), 0.3),
    "function torch.quantize_per_tensor": of(r(4, 3), 0.1, 3, torch.quint8),
    "function torch.quantize_per_tensor_dynamic": of(r(4, 3), torch.quint8, False),
    "function torch.quantize_per_channel": of(r(4, 3), r(4), torch.zeros(4).long(), 0, torch.quint8),
    "function torch.fused_moving_avg_obs_fake_quant": of(
        r(4, 3), torch.ones(1).long(), torch.ones(1).long(), r(1), r(1) + 1, r(1), torch.zeros(1).int(), 0.1, 0, 9, 0),
    "function torch._rowwise_prune": of(r(4, 3), torch.tensor([True, False, True, True]), torch.int64),
    "function torch.functional.chain_matmul": of(r(4, 3), r(3, 5), r(5, 2)),
    "function torch.batch_norm_stats": of(r(4, 3, 5), 1e-5),
    "function torch.fbgemm_pack_gemm_matrix_fp16": of(r(4, 3)),
    **{f"function torch.nn.functional.{kind}{d}d{end}": of(r(2, 3, *[6] * d), 2.0, 2) if kind == "lp_pool" else
       of(r(2, 3, *[6] * d), 2)
       for d in (1, 2, 3) for kind, end in (("max_pool", "_with_indices"), ("adaptive_max_pool", "_with_indices"),
                                            ("lp_pool", ""))},
}
