"""Evaluation: views, layers and linear algebra under no_grad and in inference mode, beside plain torch."""
from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.errors import GlobalTensorError
from tests.shards import B, P, place

S = gt.sbp.split
LAYOUTS = [*(([0, 1, 2], (sbp,)) for sbp in (S(0), S(1), B, P)), ([[0, 1], [2, 3]], (S(0), S(1)))]
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def spread(t, ranks, sbp):
    """t on these ranks; splits of dims that it lacks become broadcasts."""
    return gt.from_full(t, place(ranks), [B if s.is_split and s.dim >= t.dim() else s for s in sbp])


def whole(value):
    """Plain tensors in the same nesting."""
    if isinstance(value, (tuple, list)):
        return [whole(v) for v in value]
    return value.full_tensor() if getattr(value, "is_global", False) else value


def compare(found, expected):
    torch.testing.assert_close(whole(found), whole(expected), rtol=1e-4, atol=1e-5)


VIEWS = {
    "x[0]": lambda x: x[0], "x[1:, ::2]": lambda x: x[1:, ::2], "view": lambda x: x.view(24),
    "reshape": lambda x: x.reshape(12, 2), "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(0, 1), "split": lambda x: x.split(4), "unbind": lambda x: x.unbind(1),
    "detach": lambda x: x.detach(), "expand": lambda x: x.unsqueeze(0).expand(2, 6, 4), "real": lambda x: x.real,
    "diagonal": lambda x: x.diagonal(), "a view of a view": lambda x: x.t()[1:].flatten() + 1,
}


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("used", MODES)
@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_views(ranks, sbp, used, made):
    plain = torch.arange(24.).reshape(6, 4)
    for name, view in VIEWS.items():
        with MODES[made]():
            x = spread(plain.clone(), ranks, sbp)
            like = plain.clone()
        for _ in range(3):                           # decided, cached, and as cached
            with MODES[used]():
                found, expected = view(x), view(like)
                compare(found, expected)
            assert name == "a view of a view" or _inference(found) == _inference(expected), name


def _inference(views):
    return [v.is_inference() for v in (views if isinstance(views, (tuple, list)) else [views])]


def test_a_view_made_in_inference_mode_sees_a_write_to_its_base():
    x = spread(torch.zeros(6, 4), [0, 1, 2], (S(0),))
    with torch.inference_mode():
        rows = x.view(6, 2, 2)
    version = rows._version
    x.add_(1)
    assert rows._version == x._version == version + 1
    compare(rows, torch.ones(6, 2, 2))


MODULES = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (6, 5, 8), 3),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (6, 5, 8), 2),
    "decoder": (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (6, 5, 8), 2),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), (6, 5, 8), 1),
    "RNN": (lambda: nn.RNN(4, 3, 2), (5, 6, 4), 1), "GRU": (lambda: nn.GRU(4, 3, 2), (5, 6, 4), 1),
    "LSTM": (lambda: nn.LSTM(4, 3, 2), (5, 6, 4), 1),
    "LSTM both ways": (lambda: nn.LSTM(4, 3, bidirectional=True), (5, 6, 4), 1),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (6, 3, 4, 4), 1),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(4, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU()), (6, 4, 5), 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, mode):
    make, shape, inputs = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(shape)
    for ranks, sbp in LAYOUTS:
        spread_module = copy.deepcopy(module).to_global(place(ranks), [B] * len(sbp))
        for _ in range(2):
            with MODES[mode]():
                compare(spread_module(*[spread(x, ranks, sbp)] * inputs), module(*[x] * inputs))


@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_with_a_padding_mask_takes_no_nested_tensors(mode):
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, mask = torch.randn(6, 5, 8), torch.arange(5).expand(6, 5) >= torch.tensor([5, 4, 3, 3, 2, 1]).unsqueeze(1)
    for ranks, sbp in LAYOUTS[:3]:
        spread_module = copy.deepcopy(module).to_global(place(ranks), B)
        with MODES[mode]():
            found = spread_module(spread(x, ranks, sbp), src_key_padding_mask=spread(mask, ranks, (B,)))
            expected = module(x, src_key_padding_mask=mask)
        compare(found.full_tensor()[~mask], expected[~mask])


def of_global(layout, make=torch.nested.nested_tensor):
    x = spread(torch.randn(4, 3), [0, 1, 2], (B,))
    return make([x, x[:2]], layout=layout)


def plain_nested(layout):
    return torch.nested.nested_tensor([torch.ones(4, 3), torch.ones(2, 3)], layout=layout)


NESTED = {
    "made of global ones": of_global,
    "made as they are": lambda layout: of_global(layout, torch.nested.as_nested_tensor),
    "an operand beside": lambda layout: spread(torch.randn(4, 3), [0, 1], (S(0),)) + plain_nested(layout),
    "made global": lambda layout: gt.from_full(plain_nested(layout), place([0, 1]), B),
    "a mask's": lambda layout: torch._nested_tensor_from_mask(spread(torch.randn(2, 3, 4), [0, 1, 2], (B,)),
                                                              torch.ones(2, 3, dtype=torch.bool)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_refused(name, layout):
    with pytest.raises(GlobalTensorError, match="nested tensor"):
        NESTED[name](layout)


MULTIPLIED = {
    "linear": lambda t, y: F.linear(t, y[0].mT), "linear with a bias": lambda t, y: F.linear(t, y[0].mT, y[0, 0]),
    "matmul of each": lambda t, y: t @ y[0], "matmul": lambda t, y: t @ y, "bmm": torch.bmm,
    "matmul from the left": lambda t, y: y.mT @ t.transpose(1, 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_of_nested_tensors_are_refused(name, grad):
    """These are taken before torch looks at their operands, and a nested one has no sizes to ask for."""
    plain = torch.randn(2, 3, 5)
    for ranks, sbp in LAYOUTS[:3]:
        with pytest.raises(GlobalTensorError, match="nested tensor"):
            MULTIPLIED[name](plain_nested(torch.strided), spread(plain, ranks, sbp).requires_grad_(grad))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [False, True])
def test_so_are_jagged_ones_whose_elements_would_be_global(grad):
    """torch calls an op on the elements of those, and its backward pass knows no global ones."""
    for ranks, sbp in LAYOUTS[:3]:
        w = spread(torch.randn(4, 3), ranks, sbp).requires_grad_(grad)
        v = spread(torch.randn(3), ranks, [B] * len(sbp)).requires_grad_(grad)
        for run in (lambda t: F.linear(t, w), lambda t: t * v, lambda t: t @ w.T,
                    lambda t: F.layer_norm(t, (3,), v, v)):
            with pytest.raises(GlobalTensorError, match="nested tensor"):
                run(plain_nested(torch.jagged))


LINALG = {
    "inv": torch.linalg.inv, "solve": lambda a: torch.linalg.solve(a, a.mT),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "lu_factor": torch.linalg.lu_factor, "ldl_factor": lambda a: torch.linalg.ldl_factor(a + a.mT),
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -2), "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "eigvals": lambda a: torch.linalg.eigvals(a @ a.mT).real.sort().values,
    "tensorinv": lambda a: torch.linalg.tensorinv(a.reshape(-1, 4, 4)[0].reshape(4, 2, 2), ind=1),
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a.reshape(-1, 4, 4)[0], a.reshape(-1, 4, 4)[0][0]),
    "normal": lambda a: torch.distributions.MultivariateNormal(a[..., 0], a @ a.mT).log_prob(a[..., 1]),
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_that_checks_its_operands(name):
    """torch ends such functions with an op that returns nothing."""
    torch.manual_seed(0)
    for shape in ((4, 4), (3, 4, 4)):
        a = torch.randn(shape, dtype=torch.float64) + 4 * torch.eye(4, dtype=torch.float64)
        for ranks, sbp in LAYOUTS:
            for _ in range(3):
                compare(LINALG[name](spread(a, ranks, sbp)), LINALG[name](a))


def test_a_singular_matrix_is_torchs_error():
    for _ in range(3):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            torch.linalg.inv(spread(torch.zeros(4, 4), [0, 1, 2], (S(0),)))


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_to_meta(ranks, sbp):
    x = spread(torch.randn(6, 4), ranks, sbp)
    for found in (x.to("meta"), x.to("meta", torch.int32), torch.empty_like(x, device="meta")):
        assert found.placement == gt.placement("meta", x.placement.ranks) and found.device.type == "meta"
        assert [s.shape for s in found.shards.values()] == [found.spec.local_shape(r) for r in found.shards]
        assert found.shape == x.shape and (found.sbp == x.sbp or P in x.sbp)
        assert (found + torch.ones(4, device="meta")).device.type == "meta"


@pytest.mark.parametrize("name", ["softsign", "i1e", "renorm", "sgn"])
@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_gradients_that_are_zero_by_torchs_lazy_zeros(name, ranks, sbp):
    function = {"softsign": F.softsign, "i1e": torch.special.i1e, "renorm": lambda x: torch.renorm(x, 2, 0, 1.),
                "sgn": lambda x: x.sgn() * x}[name]
    torch.manual_seed(0)
    plain = torch.randn(6, 4, dtype=torch.float64)

    def twice(x):
        x = x.detach().requires_grad_()
        first, = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (first ** 2).sum().backward()
        return x.grad

    for _ in range(2):
        compare(twice(spread(plain, ranks, sbp)), twice(plain))


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_views_that_torch_itself_ties_to_their_base(ranks, sbp):
    """`chunk` and `narrow` are made of other views, and tied by torch all the same."""
    plain = torch.arange(24.0).reshape(6, 4)
    x = spread(plain, ranks, sbp) * 1
    with torch.inference_mode():
        for view in (lambda t: t.chunk(2)[1], lambda t: t.narrow(0, 1, 3), lambda t: t.diff(dim=0)):
            compare(view(x), view(plain))


@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
def test_data_of_what_inference_mode_made(ranks, sbp):
    with torch.inference_mode():
        plain = torch.arange(24.0).reshape(6, 4)
        x = spread(plain, ranks, sbp) * 1
    compare(x.data.add_(1), plain.data.add_(1))
    compare(x, plain)
