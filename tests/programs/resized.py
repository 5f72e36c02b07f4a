"""Every op of torch that writes to operands, on split ones, also on targets that are empty: its kernel may resize them.

    python resized.py N FIRST

runs every N-th case from this one on and prints a line of JSON, case -> "right", "refused", "no arguments", "plain
torch died of ...", or what is wrong. Each case runs in a child process, first of plain torch.
"""
from __future__ import annotations

import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parent.parent))
from children import outcomes

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

ON, S = gt.placement("cpu", [2, 0, 1]), gt.sbp.split(0)
Args = dict[str, Any]
# Those that the types do not tell: name -> (schema names of arguments -> values).
R = torch.rand
OWN: dict[str, Args] = {
    "_fused_moving_avg_obs_fq_helper": {
        "self": R(5, 6), "observer_on": torch.ones(1, dtype=torch.uint8), "ch_axis": 0, "per_row_fake_quant": True,
        "fake_quant_on": torch.ones(1, dtype=torch.uint8), "running_min": torch.full((5,), math.inf),
        "running_max": torch.full((5,), -math.inf), "scale": torch.ones(5), "averaging_const": 0.01,
        "zero_point": torch.zeros(5, dtype=torch.int32), "quant_min": -128, "quant_max": 127, "symmetric_quant": True},
    "_native_batch_norm_legit": {"input": R(4, 3), "weight": None, "bias": None, "running_mean": R(3),
                                 "running_var": R(3), "training": True, "momentum": 0.1, "eps": 1e-5},
    "_batch_norm_with_update": {"input": R(4, 3), "weight": None, "bias": None, "running_mean": R(3),
                                "running_var": R(3), "momentum": 0.1, "eps": 1e-5},
    "adaptive_avg_pool3d_backward": {"grad_output": R(2, 2, 2, 2, 2), "self": R(2, 2, 4, 4, 4)},
    "_slow_conv2d_backward": {"grad_output": R(2, 2, 2, 2), "self": R(2, 2, 4, 4), "weight": R(2, 2, 3, 3),
                              "kernel_size": [3, 3], "stride": [1, 1], "padding": [0, 0]},
    "_amp_update_scale_": {"self": R(1), "growth_tracker": torch.ones(1, dtype=torch.int32), "found_inf": R(1),
                           "scale_growth_factor": 2.0, "scale_backoff_factor": 0.5, "growth_interval": 1},
    "_convert_indices_from_coo_to_csr": {"self": torch.tensor([0, 1, 3, 3]), "size": 4},
    "embedding_renorm_": {"self": R(5, 3), "indices": torch.tensor([1, 4]), "max_norm": 0.5, "norm_type": 2.0},
}
OWN["fused_moving_avg_obs_fake_quant"] = OWN["_fused_moving_avg_obs_fq_helper"]
# What they write is memory that nobody has written, or other numbers.
UNWRITTEN = ("aten.empty", "new_empty", "resize", "rand", "normal", "bernoulli", "multinomial", "poisson", "cauchy",
             "exponential", "geometric", "weight_norm_interface_backward", "rrelu", "uniform", "dropout", "binomial",
             "random", "philox", "gamma", "dirichlet")
SHAPES = ((4, 4), (6,), (2, 4, 4), (2, 4, 6, 6), ())
DTYPES = (torch.float32, torch.int64, torch.bool)


def writing() -> dict[str, Any]:
    """Ops with a kernel that write to what they do not make anew."""
    found = {}
    for name in sorted({s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}):
        packet = getattr(torch.ops.aten, name[6:], None)
        for overload in packet.overloads() if packet is not None else ():
            func = getattr(packet, overload)
            try:
                known = torch._C._dispatch_has_kernel(func.name())
            except RuntimeError:                     # of TorchScript alone
                continue
            if known and func._schema.is_mutable and not any(word in name for word in ("sparse", "record_stream")):
                found[str(func)] = func
    return found


def value(kind: str, shape: tuple[int, ...], dtype: torch.dtype, number: int, size: int | None) -> Any:
    tensor = (torch.rand(shape) * 3 + 0.5).to(dtype)
    plain = kind.removeprefix("Optional[").rstrip("]") if kind.startswith("Optional[") else kind
    if plain == "Tensor":
        return tensor
    if "List[Tensor" in kind or "List[Optional[Tensor" in kind:
        return [tensor, tensor.clone()]
    if plain.startswith("List["):
        return [number] * (size or max(len(shape), 1))
    return {"float": 0.5, "bool": False, "str": "mean"}.get(plain, number)


def arguments(func: Any, fresh: bool) -> Iterator[Args]:
    """By the schema: one shape and dtype for all tensors, one number; `fresh`: targets are empty."""
    own = OWN.get(func._schema.name.removeprefix("aten::"), {})
    for shape, dtype, number in itertools.product(SHAPES, DTYPES, (1, 0, 2)):
        drawn = {a.name: deepcopy(own[a.name]) if a.name in own else value(str(a.type), shape, dtype, number, a.N)
                 for a in func._schema.arguments if a.name in own or a.is_out or not a.has_default_value()}
        for a in func._schema.arguments if fresh else ():
            if a.alias_info is not None and a.alias_info.is_write and isinstance(drawn.get(a.name), torch.Tensor):
                drawn[a.name] = drawn[a.name].new_empty(0)
        yield drawn


def outcome(func: Any, args: Args) -> Any:
    torch.manual_seed(7)
    try:
        func(**args)
    except Exception as error:                       # whichever it is, ours must be one, too
        return error
    return [t for a in func._schema.arguments if a.alias_info is not None for t in tree_leaves(args.get(a.name))
            if isinstance(t, torch.Tensor)]


def plainly(case: str) -> int | None:
    """The number of the arguments with which plain torch runs."""
    func = OPS[case.split()[0]]
    return next((i for i, args in enumerate(arguments(func, "empty" in case.split()))
                 if not isinstance(outcome(func, args), Exception)), None)


def compared(case: str) -> str:
    func = OPS[case.split()[0]]
    torch.manual_seed(1)
    args = next(itertools.islice(arguments(func, "empty" in case.split()), RUNS[case], None))
    own = tree_map_only(torch.Tensor, lambda t: gt.from_full(t, ON, S if t.dim() else gt.sbp.broadcast), deepcopy(args))
    theirs, ours = outcome(func, args), outcome(func, own)
    if isinstance(ours, GlobalTensorError):
        return "refused"
    if isinstance(ours, Exception):
        return f"{type(ours).__name__}: {ours}"[:300]
    for a, b in zip(ours, theirs):
        whole = a.full_tensor()
        if not a.shape == whole.shape == b.shape or a.dtype != b.dtype:
            return f"{list(a.shape)}, {list(whole.shape)}, {a.dtype} for {list(b.shape)}, {b.dtype}"
        if not any(word in case for word in UNWRITTEN) and not torch.allclose(whole.double(), b.double(), 1e-3, 1e-4,
                                                                              equal_nan=True):
            return f"{whole} for {b}"[:300]
    return "right"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    OPS = writing()
    cases = [f"{name} {kind}" for name in OPS for kind in ("sized", "empty")][int(sys.argv[2])::int(sys.argv[1])]
    RUNS = outcomes(cases, plainly)
    said = {case: "plain torch " + at if isinstance(at, str) else "no arguments" for case, at in RUNS.items()
            if not isinstance(at, int)}
    said.update(outcomes([case for case in cases if case not in said], compared))
    print(json.dumps(said))
