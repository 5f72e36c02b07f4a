"""What ops return, as told without running them, beside what torch gives: shapes, strides and dtypes.

The oracle is the op on the CPU. Where torch's meta kernel differs from it (dtypes of statistics in half precision), so
may we, in the same way. Where only running the op tells, both raise.
"""
from __future__ import annotations

import itertools
import os

import pytest
import torch
from harness import PYTHON, good
from rule_samples import ELSEWHERE, SAMPLES
from test_rules import made, name_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import globaltensor as gt
from globaltensor.op_table.table import TABLE
from globaltensor.runtime import meta as shape_functions
from globaltensor.runtime.meta import meta
from globaltensor.runtime.torch_internals import OpOverload

SEED = int(os.environ.get("META_SEED") or 20_261_121)
print(f"tests/test_meta.py: META_SEED={SEED}")
aten = torch.ops.aten
OPS = [f for f in TABLE if name_of(f) in SAMPLES and name_of(f) not in ELSEWHERE]


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def spread(t):
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def overlapping(t):
    """Of its first column only: elements of a row share memory."""
    return t[..., :1].expand_as(t) if t.dim() else t


LAYS = (torch.clone, transposed, spread, overlapping)


def on_meta(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def told(run, func, args, kwargs):
    """(shape, stride, dtype) of each result; the exception where there is none."""
    args, kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            return described(run(func, args, kwargs))
    except Exception as error:
        return error


def described(result):
    return [(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else None
            for t in (() if result is None else tree_leaves(result))]


def wrong(func, args, kwargs, result):
    """What is told of a call beside its result, where that is neither the same nor what torch's meta kernel says."""
    mine = told(meta, func, args, kwargs)
    if mine == described(result):
        return None
    torchs = told(lambda func, args, kwargs: func(*args, **kwargs), func, args, kwargs)
    same = type(mine) is type(torchs) if isinstance(torchs, Exception) else mine == torchs
    return None if same else f"{func}{args}{kwargs} gives {described(result)}; told: {mine}; META_SEED={SEED}"


@pytest.mark.parametrize("func", OPS, ids=name_of)
def test_line(func):
    generator = torch.Generator().manual_seed(SEED % 2**31)
    for (args, kwargs), lay in itertools.product(SAMPLES[name_of(func)], LAYS):
        drawn = made(args, generator), made(kwargs, generator)
        args, kwargs = tree_map_only(torch.Tensor, lay, drawn)
        given = tree_map_only(torch.Tensor, lambda t: lay(t.clone()), drawn)
        try:
            result = func(*given[0], **given[1])
        except RuntimeError:
            continue                                 # a kernel that wants contiguous operands
        assert not wrong(func, args, kwargs, result), wrong(func, args, kwargs, result)


# Of these torch has shape functions in Python only, by which strides follow from code.
SYMPY = {"grid_sampler_2d", "grid_sampler_3d", "grid_sampler_3d_backward", "linalg_matrix_exp",
         "linalg_solve_triangular", "_fft_c2c", "_fft_c2r", "_fft_r2c", "searchsorted.Tensor", "take", "cholesky",
         "cholesky_inverse", "cholesky_solve", "linalg_householder_product", "ormqr", "linalg_eig", "_linalg_eigvals",
         "affine_grid_generator", "multi_margin_loss", "multilabel_margin_loss_forward"}
WITHOUT_SYMPY = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from rule_samples import ELSEWHERE, SAMPLES
from test_rules import made, name_of
from torch.utils._pytree import tree_map_only
from globaltensor.op_table.table import TABLE
from globaltensor.runtime.meta import meta
for func in TABLE:
    name = name_of(func)
    for call in () if name in ELSEWHERE or name in {SYMPY} else SAMPLES.get(name, ()):
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), made(list(call), torch.Generator()))
        meta(func, args, kwargs | ({{"device": torch.device("meta")}} if "device" in kwargs else {{}}))
        assert "sympy" not in sys.modules, f"{{name}} {{call}}"
"""


def test_no_line_of_the_table_imports_sympy():
    good([PYTHON, "-c", WITHOUT_SYMPY])


class Recorder(TorchDispatchMode):
    """Look at every op that runs on plain CPU tensors, each kind of call once."""

    def __init__(self):
        super().__init__()
        self.seen, self.count, self.wrong = set(), {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = tensors and func.namespace == "aten" and all(
            t.is_cpu and t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
        result = func(*args, **kwargs)
        key = (func, str(tree_map_only(torch.Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs))))
        if plain and not any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments) and (
                key not in self.seen and self.count.get(func, 0) < 20):
            self.seen.add(key)
            self.count[func] = self.count.get(func, 0) + 1
            self.wrong += filter(None, [wrong(func, args, kwargs, result)])
        return result


def runs(op, dtype, count):
    """Run the first samples of an op, contiguous and not, forward and backward."""
    grad = dtype is torch.float32 and op.supports_autograd
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count):
        for given in (sample, sample.noncontiguous()):
            leaves = [t for t in tree_leaves((given.input, given.args, given.kwargs))
                      if isinstance(t, torch.Tensor) and t.requires_grad]
            results = [t for t in tree_leaves(op(given.input, *given.args, **given.kwargs))
                       if isinstance(t, torch.Tensor) and t.requires_grad]
            if results and leaves:
                torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)


@pytest.mark.long
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool), ids=str)
def test_torchs_own_samples(dtype):
    recorder, tried, failed = Recorder(), 0, {}
    for op in (op for op in op_db if dtype in op.supported_dtypes("cpu")):
        tried += 1
        try:
            with recorder:
                runs(op, dtype, 2)
        except Exception as error:
            failed[op.name] = error
    print(failed)
    assert not recorder.wrong, "\n".join(recorder.wrong)
    assert tried > 200 and len(failed) < tried // 10 and len(recorder.count) > 100, (tried, len(recorder.count), failed)


x, y = torch.ones(4, 3), torch.ones(3, 5)
MISTAKES = {
    "add": (aten.add.Tensor, (x, y)),
    "in place, wider": (aten.add_.Tensor, (torch.ones(3), x)),
    "in place, pointwise, wider": (aten.logical_and_.default, (torch.ones(3), x)),
    "in place, another dtype": (aten.div_.Scalar, (torch.ones(3, dtype=torch.int64), 2)),
    "where": (aten.where.self, (x > 0, x, y)),
    "relu of truths": (aten.relu.default, (x > 0,)),
    "mm": (aten.mm.default, (x, x)),
    "addmm": (aten.addmm.default, (torch.ones(7), x, y)),
    "mv": (aten.mv.default, (x, torch.ones(4))),
    "dot": (aten.dot.default, (torch.ones(3), torch.ones(4))),
    "cat": (aten.cat.default, ([x, y],)),
    "sum": (aten.sum.dim_IntList, (x, [2])),
    "softmax": (aten._softmax.default, (x, 2, False)),
    "logsumexp": (aten.logsumexp.default, (x, [2])),
    "var": (aten.var.correction, (x, [2])),
    "view": (aten.view.default, (x, [5])),
    "gather": (aten.gather.default, (x, 2, torch.zeros(4, 3, dtype=torch.int64))),
    "embedding": (aten.embedding.default, (x, torch.ones(2))),
    "layer norm": (aten.native_layer_norm.default, (x, [4], None, None, 1e-5)),
    "layer norm's weight": (aten.native_layer_norm.default, (x, [3], torch.ones(4), None, 1e-5)),
    "flip": (aten.flip.default, (x, [2])),
    "roll": (aten.roll.default, (x, [1, 1], [0])),
    "convolution": (aten.convolution.default, (torch.ones(1, 3, 4, 4), torch.ones(2, 4, 3, 3), None, [1, 1], [0, 0],
                                               [1, 1], False, [0, 0], 1)),
    "convolution of little": (aten.convolution.default, (torch.ones(1, 3, 2, 2), torch.ones(2, 3, 3, 3), None, [1, 1],
                                                         [0, 0], [1, 1], False, [0, 0], 1)),
    "group norm": (aten.native_group_norm.default, (torch.ones(2, 6, 4), torch.ones(5), None, 2, 6, 4, 3, 1e-5)),
    "adaptive pooling": (aten._adaptive_avg_pool2d.default, (x, [2, 2])),
    "im2col": (aten.im2col.default, (torch.ones(1, 1, 2, 2), [3, 3], [1, 1], [0, 0], [1, 1])),
    "binary cross entropy": (aten.binary_cross_entropy.default, (x, y)),
    "nll loss": (aten.nll_loss_forward.default, (x, torch.zeros(3, dtype=torch.int64), None, 1, -100)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_torchs_own_error(name):
    func, args = MISTAKES[name]
    with pytest.raises((RuntimeError, IndexError, ValueError)) as torchs:
        func(*args)
    mine = told(meta, func, args, {})
    assert isinstance(mine, (RuntimeError, IndexError, ValueError)), (mine, torchs.value)
    assert isinstance(torchs.value, NotImplementedError) or not isinstance(mine, NotImplementedError), mine


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_sums_of_attention_are_as_wide_as_the_kernel_gives_them(dtype, monkeypatch):
    """Also where torch's shape function says float32 of all dtypes, as that of torch 2.11 does."""
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    monkeypatch.setattr(shape_functions, "python_meta", lambda op: lambda q, *_, **__: (
        torch.empty_like(q), torch.empty(q.shape[:3], device="meta")))
    q = torch.rand(2, 3, 4, 8, dtype=dtype)
    _, log_sums = meta(func, [t.to("meta") for t in (q, q, q)], {})
    assert log_sums.dtype == func(q, q, q)[1].dtype and log_sums.shape == (2, 3, 4)


def test_shards_without_memory_have_them_too(monkeypatch):
    """A planner's shards go to torch's own shape function, which before 2.13 says float32 of all dtypes."""
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = gt.empty(2, 4, 4, 8, dtype=torch.float64, placement=gt.placement("meta", [0, 1]), sbp=gt.sbp.split(1))

    def says_float32(op, *operands, **options):
        return torch.empty_like(operands[0]), torch.empty(operands[0].shape[:3], device="meta")

    shape = OpOverload.__call__
    monkeypatch.setattr(OpOverload, "__call__", lambda op, *operands, **options: (
        says_float32 if op is func and type(operands[0]) is torch.Tensor else shape)(op, *operands, **options))
    attention, log_sums = func(q, q, q)
    assert {part.dtype for part in log_sums.shards.values()} == {log_sums.dtype} == {torch.float64}
