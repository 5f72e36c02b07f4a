"""Derivatives of every kind through what is not torch's own op: boxing, whole values, parts, products and lookups.

A table of programs, run on global tensors in several layouts and on plain ones, by every way that torch has to derive,
batch and trace a program. Plain torch is the oracle.
"""
from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd.functional import hessian as functional_hessian, jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import globaltensor as gt
from globaltensor.layouts.layout import layout
from globaltensor.parallel.experts import Relabel
from globaltensor.pipelining.actions import _SameMemory
from globaltensor.runtime.native import torch_ext
from globaltensor.tensors.dealt_parts import with_dealt_parts
from tests.harness import PROGRAMS as FOLDER, PYTHON, RUN, environment, good
from tests.programs.autograd_functions import (
    batch_of,
    differentiated_again,
    functions_of_autograd,
    in_batches,
    of_a_batch,
)
from tests.shards import B, P, place

S = gt.sbp.split
long = pytest.mark.long
LAYOUTS = [*(([0, 1, 2], (sbp,)) for sbp in (S(0), S(1), B, P)), ([[0, 1], [2, 3]], (S(0), S(1))),
           ([[0, 1], [2, 3]], (P, B))]


class Plain:
    """What programs do, of plain tensors: all but products and lookups leaves a tensor as it is."""

    place = box = begin = full = lift = staticmethod(lambda t, *_: t)


class Spread:
    """The same of global tensors, in a layout."""

    def __init__(self, ranks, sbp):
        self.placement, self.sbp = place(ranks), sbp

    def place(self, t):
        """t, global in this layout, without the splits of dims that it lacks."""
        return gt.from_full(t, self.placement, [B if s.is_split and s.dim >= t.dim() else s for s in self.sbp])

    def box(self, x, *sbp):
        return x.to_global(sbp=[sbp[i % len(sbp)] for i in range(len(self.sbp))])

    def begin(self, x, *sbp):
        return x.to_global(sbp=[sbp[i % len(sbp)] for i in range(len(self.sbp))], wait=False)

    def full(self, x):
        return x.full_tensor()

    def lift(self, t):
        """Through a plain tensor, and back."""
        return gt.from_full(t.full_tensor(), self.placement, [B] * len(self.sbp))


generator = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, dtype=torch.float64, generator=generator)
W = torch.randn(5, 4, dtype=torch.float64, generator=generator)
V = torch.randn(4, 3, dtype=torch.float64, generator=generator)
BIAS = torch.randn(5, dtype=torch.float64, generator=generator)
INDEX = torch.tensor([0, 2, 2, 1])



def write_to_views(x, on):
    y = x.sin()
    y[..., 1:].mul_(x[..., :-1])
    y[..., 0] = x[..., 3] * 2
    y.narrow(-1, 2, 2).exp_()
    return y * x


def write_to_a_base(x, on):
    y = x * 2
    view, moved = y[..., 2:], y.movedim(-1, 0)
    y.mul_(x)
    moved[1].add_(x[..., 0])
    return y * view.sum(-1, keepdim=True)


# Of tensors of any number of dims, the last of size 4.
PROGRAMS = {
    "boxing": lambda x, on: on.box(x.sin(), B) * x,
    "boxings": lambda x, on: on.box(on.box(x ** 2, S(0), B).exp(), P, S(0)).sin(),
    "begun boxing": lambda x, on: on.begin(x.sin(), B).exp() * x,
    "full_tensor": lambda x, on: on.full(x.sin() * x).pow(2).sum(-1),
    "from_full": lambda x, on: on.lift(x.exp()).cos() * x,
    "a whole value beside its tensor": lambda x, on: on.full(x.sin()) * x,
    "linear": lambda x, on: F.linear(x, on.place(W), on.place(BIAS)).tanh(),
    "linear of a number of dims": lambda x, on: F.linear((x * x).unsqueeze(0).expand(2, *x.shape), on.place(W)),
    "matmul": lambda x, on: (x.sin() @ on.place(V)) @ on.place(V).T,
    "batched matmul": lambda x, on: torch.matmul(x.unsqueeze(-1), x.unsqueeze(-2)).sum(-1),
    "einsum": lambda x, on: torch.einsum("...i,ij->...j", x.cos(), on.place(V)),
    "lookup": lambda x, on: F.embedding(on.place(INDEX), on.place(V) * x.sum()).sin(),
    "pointwise": lambda x, on: F.softsign(x) + x ** 3 + x.abs(),
    "results that are saved": lambda x, on: (x.tanh().relu() + x.sigmoid().exp()).softmax(-1).sqrt() * x.sin().tanh(),
    "chosen elements": lambda x, on: x.sin() * x.max() + x * x.median(),
    "picked elements": lambda x, on: torch.stack([x.sin(), x ** 2], -1).movedim((-2, -1), (0, 1))[INDEX, INDEX % 2],
    "norm": lambda x, on: F.layer_norm(x, (4,)) * torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "writes to views": write_to_views, "writes to a base": write_to_a_base,
}


def value(t):
    """The value of a global tensor, an element of structures."""
    if isinstance(t, (tuple, list)):
        return [value(one) for one in t]
    return t.full_tensor().detach() if t.is_global else t.detach()


def scalar(program, on):
    return lambda x: program(x, on).sin().sum()


def backward(program, x, on):
    x = x.detach().requires_grad_()
    scalar(program, on)(x).backward()
    return x.grad


def double_backward(program, x, on):
    x = x.detach().requires_grad_()
    first, = torch.autograd.grad(scalar(program, on)(x), x, create_graph=True)
    (first ** 2).sum().backward()
    return x.grad


def forward(program, x, on):
    with forward_ad.dual_level():
        y = program(forward_ad.make_dual(x, x.cos()), on)
        return forward_ad.unpack_dual(y).tangent


def forward_over_backward(program, x, on):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x.detach(), x.detach().cos()).requires_grad_()
        first, = torch.autograd.grad(scalar(program, on)(x), x, create_graph=True)
        return forward_ad.unpack_dual(first).tangent


def of_plain_gradients(program, x, on):
    x = x.detach().requires_grad_()
    y = program(x, on)
    first, = torch.autograd.grad(y, x, batch_of(value(y)), is_grads_batched=True, create_graph=True)
    first.sin().sum().backward()
    return [first, x.grad]


def vmap_of_backward(program, x, on):
    x = x.detach().requires_grad_()
    y = program(x, on)
    first = vmap(lambda v: torch.autograd.grad(y, x, v, create_graph=True)[0])(batch_of(y))
    first.sin().sum().backward()
    return [first, x.grad]


LAZY = [lambda t: t, torch.conj, torch._neg_view, lambda t: t.conj().t()]
VIEWS = [torch.real, torch.imag, torch.conj, torch.t, lambda t: t[1:], lambda t: t.exp()]


@pytest.mark.parametrize("ranks, sbp", LAYOUTS[:4])
def test_tangents_of_lazy_tensors(ranks, sbp):
    """torch copies a tangent into memory that is conjugated and negated as that of its tensor is."""
    x = torch.complex(torch.arange(12.0).reshape(4, 3), torch.ones(4, 3))

    def tangent(lazy, other, view, put):
        with forward_ad.dual_level():
            t = other(put(x.sin()))
            return forward_ad.unpack_dual(view(forward_ad.make_dual(lazy(put(x)), t))).tangent

    for lazy in LAZY:
        for other in LAZY[:3] if lazy is not LAZY[3] else LAZY[3:]:
            for view in VIEWS:
                got = tangent(lazy, other, view, Spread(ranks, sbp).place).full_tensor()
                torch.testing.assert_close(got, tangent(lazy, other, view, lambda t: t))


@pytest.mark.parametrize("ranks, sbp", LAYOUTS[:4])
@pytest.mark.parametrize("of, into", [(torch.float32, torch.float64), (torch.float64, torch.float32),
                                      (torch.float32, torch.complex64)])
def test_a_tangent_has_the_dtype_of_what_it_is_written_into(of, into, ranks, sbp):
    x, value = torch.zeros(4, 3, dtype=into), torch.arange(6.0, dtype=of).reshape(2, 3)

    def tangent(put):
        with forward_ad.dual_level():
            y = put(x)
            y[1:3] = forward_ad.make_dual(put(value), put(value / 3))
            return forward_ad.unpack_dual(y).tangent

    torch.testing.assert_close(tangent(Spread(ranks, sbp).place).full_tensor(), tangent(lambda t: t))


KINDS = {
    "backward": backward, "double backward": double_backward, "forward": forward,
    "forward over backward": forward_over_backward,
    "grad": lambda program, x, on: grad(scalar(program, on))(x),
    "vjp": lambda program, x, on: vjp(lambda x: program(x, on), x)[1](program(x, on).detach().cos())[0],
    "jvp": lambda program, x, on: jvp(lambda x: program(x, on), (x,), (x.cos(),))[1],
    "vmap": lambda program, x, on: vmap(lambda row: program(row, on))(x),
    "vmap of grad": lambda program, x, on: vmap(grad(scalar(program, on)))(x),
    "product with the hessian": lambda program, x, on: jvp(grad(scalar(program, on)), (x,), (x.cos(),))[1],
    "batches of gradients": lambda program, x, on: in_batches(lambda x: program(x, on), x),
    "batch of plain gradients": of_plain_gradients, "vmap of backward": vmap_of_backward,
    "make_fx of backward": lambda program, x, on: make_fx(lambda x: backward(program, x, on))(x * 2)(x),
    "make_fx of grad": lambda program, x, on: make_fx(grad(scalar(program, on)))(x * 2)(x),
}
WHOLE = {
    "jacobian at once": lambda program, x, on: jacobian(lambda x: program(x, on), x, True, vectorize=True),
    "jacobian at once, forward": lambda program, x, on: jacobian(lambda x: program(x, on), x, vectorize=True,
                                                                 strategy="forward-mode"),
    "hessian at once": lambda program, x, on: functional_hessian(scalar(program, on), x, vectorize=True),
    "jacrev": lambda program, x, on: jacrev(lambda x: program(x, on))(x),
    "jacfwd": lambda program, x, on: jacfwd(lambda x: program(x, on))(x),
    "hessian": lambda program, x, on: hessian(scalar(program, on))(x),
    "linearize": lambda program, x, on: linearize(lambda x: program(x, on), x)[1](x.cos()),
}


def compare(kind, program, ranks, sbp):
    expected = value(kind(PROGRAMS[program], X, Plain))
    on = Spread(ranks, sbp)
    for _ in range(2):                               # decided, and as cached
        torch.testing.assert_close(value(kind(PROGRAMS[program], on.place(X), on)), expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks, sbp", [LAYOUTS[0], *LAYOUTS[3:5], *(pytest.param(*one, marks=long) for one in (
    *LAYOUTS[1:3], LAYOUTS[5]))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind, ranks, sbp):
    for program in PROGRAMS:
        compare(KINDS[kind], program, ranks, sbp)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks, sbp", [pytest.param(*LAYOUTS[0], marks=long), LAYOUTS[4]], ids=str)
@pytest.mark.parametrize("kind", WHOLE)
def test_jacobians(kind, ranks, sbp):
    for program in PROGRAMS:
        compare(WHOLE[kind], program, ranks, sbp)


@pytest.mark.parametrize("sbp", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("shape, view", [
    ((7, 3), lambda y: y), ((9, 3), lambda y: y[1:]), ((9, 4), lambda y: y[1:, 1:]), ((4, 3, 3), lambda y: y[1:]),
    ((3, 4, 3), lambda y: y[:, 1:])])
@pytest.mark.parametrize("transform", [False, pytest.param(True, marks=pytest.mark.skipif(
    torch_ext is None, reason="torch's own function is called there"))])
def test_diagonals_of_views_are_filled(transform, shape, view, sbp):
    """torch's own goes by strides and an offset in memory."""
    for wrap in (False, True):
        def run(x, wrap=wrap):
            y = x * 1
            view(y).fill_diagonal_(0.5, wrap)
            return (y * y * x).sum(), y

        def results(x):
            if transform:
                return grad(run, has_aux=True)(x)
            x = x.clone().requires_grad_()
            loss, y = run(x)
            return torch.autograd.grad(loss, x)[0], y

        x = torch.rand(shape, generator=generator)
        on = Spread([0, 1], [sbp])
        for ours, expected in zip(results(on.place(x)), results(x)):
            torch.testing.assert_close(value(ours), expected.detach())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)).double()


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_functions_of_the_parameters_of_a_module(ranks, sbp):
    module, on = network(), Spread(ranks, sbp)

    def loss(parameters, x):
        return functional_call(module, parameters, (x,)).pow(2).sum()

    plain = {name: p.detach() for name, p in module.named_parameters()}
    spread = {name: on.place(p) for name, p in plain.items()}
    for found, expected in ((grad(loss)(spread, on.place(X)), grad(loss)(plain, X)),
                            (vmap(grad(loss), (None, 0))(spread, on.place(X)), vmap(grad(loss), (None, 0))(plain, X)),
                            (jacrev(loss)(spread, on.place(X)), jacrev(loss)(plain, X))):
        assert {name: value(t).shape for name, t in found.items()} == {name: t.shape for name, t in expected.items()}
        for name, t in found.items():
            torch.testing.assert_close(value(t), expected[name])


def matrices(dtype):
    """Singular values that differ and that repeat, singular matrices, and numbers."""
    a, two = torch.randn(2, 3, 3, dtype=dtype, generator=generator), 2 * torch.eye(3, dtype=dtype)
    rows = a[0].clone()
    rows[2] = rows[0] + rows[1]
    return {"one": a[0], "repeated": two, "rotated": 3 * torch.linalg.qr(a[1])[0], "none": a[:0],
            "mixed": torch.stack([two, rows, a[0], a[1] @ a[1].mH]), "columns": torch.stack([two, rows]).mT,
            "numbers": torch.tensor([0, 3], dtype=dtype)[:, None, None], "inf": a * torch.inf}


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_the_determinant_differentiated_twice(dtype, ranks, sbp):
    """torch has another formula for the gradient of a tensor subclass, which is nan where singular values repeat."""
    def derivatives(a):
        a = a.detach().requires_grad_()
        once, = torch.autograd.grad((torch.linalg.det(a) * (1 + a.mean())).abs().sum(), a)
        first, = torch.autograd.grad((torch.linalg.det(a) * a.mean()).abs().sum(), a, create_graph=True)
        second, = torch.autograd.grad((first.abs() ** 2).sum(), a)
        return once, first, second

    on = Spread(ranks, sbp)
    for name, a in matrices(dtype).items():
        if name != "inf" or P not in sbp:            # of parts of inf the sum is nan
            for got, want in zip(derivatives(on.place(a)), derivatives(a), strict=True):
                torch.testing.assert_close(value(got), want.detach(), equal_nan=True,
                                           msg=lambda text, name=name: f"{name}: {text}")


VECTORS = {
    "eig": lambda a: torch.linalg.eig(a), "eigh": lambda a: torch.linalg.eigh(a + a.mH),
    "eigh of the upper triangle": lambda a: torch.linalg.eigh(a + a.mH, "U")}
LOSSES = {
    "values": lambda values, vectors: values.abs().sum(), "lengths": lambda values, vectors: vectors.abs().pow(3).sum(),
    "both": lambda values, vectors: (values.abs() * vectors.abs()[..., 0]).sum(), "sum": lambda _, v: v.sum().abs(),
    "phases": lambda _, v: v.real.pow(3).sum(), "one": lambda _, v: v[..., 0, 0].imag.sum()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
@pytest.mark.parametrize("program", VECTORS)
def test_gradients_of_eigenvectors_that_are_ill_defined(program, ranks, sbp):
    """torch looks whether a loss depends on the phases of complex eigenvectors; of a tensor subclass it does not."""
    def gradient(a, loss):
        a = a.detach().requires_grad_()
        try:
            return value(torch.autograd.grad(loss(*VECTORS[program](a)), a)[0]), ""
        except RuntimeError as error:
            return a.detach(), str(error)

    on, refused = Spread(ranks, sbp), 0
    for dtype in (torch.float64, torch.complex128):
        batch = torch.stack([torch.diag(torch.arange(1., 4)), X[:3, :3]]).to(dtype)
        for a in (matrices(dtype)["one"], batch):
            for name, loss in LOSSES.items():
                (got, error), (want, expected) = gradient(on.place(a), loss), gradient(a, loss)
                assert error == expected, name
                torch.testing.assert_close(value(got), want, msg=lambda text, name=name: f"{name}: {text}")
                refused += "ill-defined" in error
    assert refused


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_values_alone_are_computed_without_vectors(ranks, sbp):
    """As by torch of a plain tensor; of a tensor subclass it always has the vectors, of which eig refuses nan."""
    a = torch.stack([torch.diag(torch.tensor([1., 2, torch.nan])), X[:3, :3].float()])
    on = Spread(ranks, sbp)
    torch.testing.assert_close(value(torch.linalg.eigvals(on.place(a))), torch.linalg.eigvals(a), equal_nan=True)
    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func, *(args[1:] if "linalg" in str(func) else ())))
            return func(*args, **(kwargs or {}))

    for program in (torch.linalg.eigvals, torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cond,
                    lambda a: torch.linalg.matrix_norm(a, "nuc"),
                    lambda a: torch.linalg.matrix_rank(a, hermitian=True)):
        global_a, plain = on.place(a[1]), program(a[1])
        torch.testing.assert_close(value(program(global_a)), plain)
        torch.testing.assert_close(value(program(global_a.requires_grad_()).detach()), plain)
    aten, x = torch.ops.aten, on.place(a[1])
    with Calls():
        torch.linalg.eigvals(x), torch.linalg.eigvalsh(x), torch.linalg.svdvals(x)
    assert (aten._linalg_eigvals.default,) in calls and (aten.linalg_eig.default,) not in calls
    assert (aten._linalg_eigh.default, "L", False) in calls and (aten._linalg_svd.default, False, False) in calls


@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=str)
def test_from_local_differentiated_twice(sbp):
    """In one process: every rank has the same part."""
    on = Spread([0, 1, 2], (sbp,))
    whole = {S(0): lambda x: torch.cat([x, x, x]), S(1): lambda x: torch.cat([x, x, x], 1), P: lambda x: 3 * x}
    found = double_backward(lambda x, on: gt.from_local(x, on.placement, sbp) ** 2, X, on)
    torch.testing.assert_close(found, double_backward(lambda x, on: whole.get(sbp, torch.clone)(x) ** 2, X, Plain))


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_floating_point_operations_are_counted(ranks, sbp):
    on = Spread(ranks, sbp)

    def count(run, x):
        with FlopCounterMode(display=False) as counter:
            run(x)
        return counter.get_total_flops()

    for name, program in PROGRAMS.items():
        assert count(lambda x: program(x, on), on.place(X)) == count(lambda x: program(x, Plain), X), name
    x = on.place(X).requires_grad_()
    assert count(lambda x: F.linear(x, on.place(W)).sum().backward(), x) == 2 * 2 * X.numel() * len(W)


def test_a_traced_graph_names_the_boxings_and_is_differentiable():
    on = Spread([0, 1, 2], (S(0),))
    weight = on.place(W)
    graph = make_fx(lambda x: on.full(on.box(F.linear(x, weight), B).sin()))(on.place(X))
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called == ["globaltensor.linear.default", "globaltensor.redistribute.default", "aten.sin.default",
                      "globaltensor.full_tensor.default"]
    x = on.place(2 * X).requires_grad_()
    graph(x).sum().backward()
    torch.testing.assert_close(value(x.grad), (2 * X @ W.T).cos() @ W)


def test_a_wrapper_of_torch_func_answers_for_what_it_wraps():
    on = Spread([[0, 1], [2, 3]], (S(0), S(1)))
    seen = []

    def row(x):
        seen.append((x.is_global, x.placement, x.sbp, x.shape, hasattr(x, "full_tensor")))
        return x.to_global(sbp=(B, S(0))).sum()

    vmap(grad(row))(on.place(X))
    assert seen == [(True, on.placement, (B, S(0)), (4,), True)]
    assert not hasattr(X, "full_tensor") and not hasattr(X, "to_local") and not X.is_global


def test_gradients_that_torch_makes_plain_are_global():
    for _ in range(3):
        x = Spread([0, 1, 2], (S(0),)).place(X).requires_grad_()
        x.sgn().sum().backward()
        assert x.grad.sbp == (S(0),) and not x.grad.any()


ERRORS = """
import torch, globaltensor as gt
import torch.autograd.forward_ad as forward_ad
S = gt.sbp.split
place = gt.placement("cpu", [0, 1, 2])
def x(): return gt.from_full(torch.randn(6, 4), place, S(0))
def dual(): return forward_ad.make_dual(x(), x())
def wrong(x): return x @ x
def raised(run):
    try: run()
    except Exception: return True
for run in (lambda: torch.quantile(dual(), .5, dim=0), lambda: wrong(dual()), lambda: dual().to_global(sbp=S(7)),
            lambda: torch.func.grad(wrong)(x()), lambda: torch.func.vmap(wrong)(x()), lambda: torch.linalg.inv(x()),
            lambda: wrong(x().requires_grad_()), lambda: torch.func.jvp(wrong, (x(),), (x(),)),
            lambda: dual() + x()[:5], lambda: torch.func.linearize(wrong, x()), lambda: wrong(x().full_tensor())):
    for _ in range(2):
        with forward_ad.dual_level(): raised(run)
        for t in (torch.ones(3, requires_grad=True), gt.ones(3, placement=place, sbp=S(0), requires_grad=True)):
            (t * 2).sum().backward()
            assert t.grad.tolist() == [2, 2, 2] and not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
print("as before")
"""


@pytest.mark.parametrize("native", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_an_error_leaves_the_thread_as_it_was(native, monkeypatch):
    monkeypatch.setenv("GLOBALTENSOR_NATIVE", native)
    assert good([PYTHON, "-c", ERRORS]).strip() == "as before"


UNUSED = """
import torch, globaltensor as gt
from torch.autograd.graph import get_gradient_edge
S, B, place = gt.sbp.split, gt.sbp.broadcast, gt.placement("cpu", [0, 1])
X = torch.arange(6.).reshape(3, 2)


def slopes(to, again, by_edge, **how):
    x, y = (to(X).requires_grad_() for _ in range(2))
    inner = y * 2
    asked = [x, y, inner, get_gradient_edge(y) if by_edge else y]
    try:
        return torch.autograd.grad([x.square().sum()], asked, None, None, again, **how)
    except (RuntimeError, ValueError) as error:
        return str(error)


for sbp in (S(0), S(1), B):
    for again in (False, True):
        for by_edge in (False, True):
            for how in ({"materialize_grads": True}, {"allow_unused": True, "materialize_grads": True}, {},
                        {"allow_unused": False, "materialize_grads": True}, {"allow_unused": True},
                        {"allow_unused": False}):
                ours = slopes(lambda t: gt.from_full(t, place, sbp), again, by_edge, **how)
                for g, w in zip(ours, slopes(torch.clone, again, by_edge, **how), strict=True):
                    if isinstance(w, torch.Tensor):
                        torch.testing.assert_close(g.full_tensor(), w)
                        assert g.requires_grad == w.requires_grad
                    else:
                        assert g == w, (g, w)
print("as torch's")
"""


@pytest.mark.parametrize("native", ["0", "1"])
def test_gradients_of_what_is_not_used(native, monkeypatch):
    monkeypatch.setenv("GLOBALTENSOR_NATIVE", native)
    assert good([PYTHON, "-c", UNUSED]).strip() == "as torch's"


# Where a gradient of these is not differentiated itself, and why.
NOT_AGAIN = {"_Enter": "the planner's trace", "_Leave": "the planner's trace", "_Repeated": "raises, and all run",
             "_FlexAttention": "raises, as torch's", "_Product": "products that a schedule defers, without a graph",
             "RedistributeMeanwhile": "its backward is that of Redistribute",
             **dict.fromkeys(["PartOnMesh", "OwnPart", "OwnCopy", "_MeanOfRanks", "FromDTensor", "ToDTensor", "ToLocal",
                              "Spread"], "parts_twice.py"),
             **dict.fromkeys(["Contract", "Linear", "Redistribute"] if torch_ext else [], "native code has its own")}


def check_sharded_parameters(derive):
    """Of ZeRO 3, by the gradients of all parameters."""
    nets = [network(), gt.parallelize(network(), gt.placement("cpu", [0, 1], ("dp",)))]
    gt.zero(torch.optim.SGD(nets[1].parameters()), "dp", stage=3, model=nets[1])
    for net in nets:
        first = derive(net(X).sin(), [*net.parameters()])
        sum(g.square().sum() for g in first).backward()
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(value(q.grad), p.grad)


def thrice(program, x):
    x = x.detach().requires_grad_()
    first, = torch.autograd.grad(program(x).sin().sum(), x, create_graph=True)
    second, = torch.autograd.grad((first ** 2).sum(), x, create_graph=True)
    (second ** 2).sum().backward()
    return x.grad


def by_minors(matrix):
    """Its determinant. torch's own is nan in the third derivative of a batch of gradients."""
    if not len(matrix):
        return 1
    columns = range(len(matrix))
    return sum((-1) ** k * matrix[0, k] * by_minors(matrix[1:, [j for j in columns if j != k]]) for k in columns)


@pytest.mark.parametrize("noted, derived, derive", [
    (differentiated_again, thrice, lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True)),
    (of_a_batch, in_batches, lambda y, x: torch.autograd.grad(y, x, batch_of(y), is_grads_batched=True,
                                                              create_graph=True))])
def test_every_function_of_autograd_is_differentiated_again(noted, derived, derive):
    grid = Spread([[0, 1], [2, 3]], (S(0), S(1)))
    swapped = layout(gt.placement("cpu", [[0, 2], [1, 3]], ("b", "a")), (S(1), S(0)))
    more = [
        (lambda x: gt.from_local(x.sin(), place([0, 1]), B).exp(), lambda x: x.sin().exp(), X),
        (lambda x: Relabel.apply(x.sin(), swapped, [1, 0]).exp(), lambda x: x.sin().exp(), grid.place(X)),
        (lambda x: torch.linalg.det(x[:4] / 8 + torch.eye(4, dtype=x.dtype)),
         lambda x: by_minors(x[:4] / 8 + torch.eye(4, dtype=x.dtype)), grid.place(X)),
        (lambda x: _SameMemory.apply(x.sin()).exp(), lambda x: x.sin().exp(), grid.place(X)),
        (lambda x: torch.cat([part.exp() for part in with_dealt_parts(x.sin()).split([3, 1], 1)], 1),
         lambda x: x.sin().exp(), grid.place(X)),
    ]
    with noted() as names:
        for ranks, sbp in LAYOUTS:
            for program in PROGRAMS.values():
                derived(lambda x, on=Spread(ranks, sbp), program=program: program(x, on), Spread(ranks, sbp).place(X))
        for program, plain, x in more:
            torch.testing.assert_close(value(derived(program, x)), value(derived(plain, X)))
        check_sharded_parameters(derive)
    others = {cls.__name__ for cls in functions_of_autograd()} - names
    if noted is differentiated_again:
        assert others == NOT_AGAIN.keys()
    else:                                            # the backward of what only a gradient that comes alone is made by
        assert others <= NOT_AGAIN.keys() | {"EmbeddingGradient", "JoinedParts"}


@pytest.mark.long
@pytest.mark.processes
def test_every_function_of_autograd_without_native_code():
    test = f"{__file__}::{test_every_function_of_autograd_is_differentiated_again.__name__}"
    good([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], environment(GLOBALTENSOR_NATIVE="0"))


@pytest.mark.long
@pytest.mark.processes
def test_parts_of_tensors_in_two_processes():
    assert good([*RUN, "-n", "2", FOLDER / "parts_twice.py"]).strip() == "as plain torch"
