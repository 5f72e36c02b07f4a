"""The global tensor itself: making one, looking at it, its value, its attributes, assignment."""
from __future__ import annotations

import copy
import io
import itertools
import pickle

import numpy
import pytest
import torch
from torch import nn

import globaltensor as gt
from globaltensor.layouts.layout import layout
from globaltensor.layouts.regions import split_range
from globaltensor.tensors.copying import view_again

B, S, P = gt.sbp.broadcast, gt.sbp.split, gt.sbp.partial_sum
TWO = gt.placement("cpu", [0, 1])
PLACES = [TWO, gt.placement("cpu", [2, 0, 1]), gt.placement("cpu", [[0, 1], [2, 3]]), gt.placement("cpu", [5])]


@pytest.mark.parametrize("n, parts", [(10, 3), (2, 4), (0, 2), (7, 7), (8, 4)])
def test_cuts_are_balanced(n, parts):
    assert [b - a for a, b in (split_range(n, parts, i) for i in range(parts))] == [n // parts + (i < n % parts)
                                                                           for i in range(parts)]


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (0, 4), (8, 8)], ids=str)
def test_from_full_and_back(where, shape):
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for sbp in itertools.product([B, P, S(0), S(1)], repeat=where.ndim):
        x = gt.from_full(value, where, sbp)
        held = tuple(B if s is P and n == 1 else s for s, n in zip(sbp, where.shape))    # a sum of one is whole
        assert x.shape == shape and x.is_global and x.placement == where and x.sbp == held
        assert set(x.shards) == set(where.flat)
        for r, shard in x.shards.items():
            assert tuple(shard.shape) == layout(where, sbp).local_shape(shape, r)
        assert torch.equal(x.full_tensor(), value) and numpy.array_equal(x.numpy(), value.numpy())


FACTORIES = {
    "zeros": lambda **k: gt.zeros(4, 5, **k), "ones": lambda **k: gt.ones((4, 5), dtype=torch.int32, **k),
    "full": lambda **k: gt.full((4, 5), 3.5, **k), "arange": lambda **k: gt.arange(2, 20, 3, **k),
    "linspace": lambda **k: gt.linspace(0, 1, 7, **k), "eye": lambda **k: gt.eye(4, 5, **k),
    "tensor": lambda **k: gt.tensor([[1.0, 2], [3, 4], [5, 6]], **k), "logspace": lambda **k: gt.logspace(0, 2, 5, **k),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name):
    make = FACTORIES[name]
    expected = make()
    assert type(expected) is torch.Tensor
    for where, sbp in itertools.product(PLACES, [B, P, S(0)]):
        got = make(placement=where, sbp=sbp)
        assert got.dtype == expected.dtype and torch.equal(got.full_tensor(), expected)
    assert gt.zeros(2, placement=TWO, sbp=B, requires_grad=True).requires_grad


def test_unlisted_attributes_are_torchs():
    assert gt.matmul is torch.matmul and gt.nn is torch.nn and gt.float16 is torch.float16 and gt.optim is torch.optim
    with pytest.raises(AttributeError):
        gt.no_such_thing                             # noqa: B018


@pytest.mark.parametrize("sbp", [S(0), P, B], ids=str)
def test_from_local_and_from_shards(sbp):
    parts = {0: torch.tensor([[1.0, 2]]), 1: torch.tensor([[3.0, 4]])}
    expected = {"S": torch.cat([*parts.values()]), "P": parts[0] + parts[1], "B": parts[0]}[sbp.kind]
    if sbp is not B:
        assert torch.equal(gt.from_shards(parts, TWO, sbp).full_tensor(), expected)
    t = torch.tensor([[1.0, 2]], requires_grad=True)
    x = t.to_global(TWO, sbp)
    assert torch.equal(x.full_tensor(), {"S": torch.cat([t, t]), "P": t + t, "B": t}[sbp.kind])
    x.sum().backward()
    assert torch.equal(t.grad, torch.full_like(t, {"S": 2.0, "P": 2.0, "B": 1.0}[sbp.kind]))


def test_from_full_is_differentiable():
    t = torch.randn(3, 2, requires_grad=True)
    (gt.from_full(t, TWO, S(0)) ** 2).sum().backward()
    torch.testing.assert_close(t.grad, 2 * t.detach())


def test_full_tensor_is_differentiable():
    x = gt.randn(3, 2, placement=TWO, sbp=S(0), requires_grad=True)
    (x.full_tensor() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.full_tensor().detach())


def test_values_and_branches():
    x = gt.full((), 4.0, placement=gt.placement("cpu", [3]), sbp=B)
    assert x.item() == 4 and x > 3 and not x > 5 and float(x) == 4.0 and int(x) == 4
    assert gt.arange(3, placement=TWO, sbp=S(0)).tolist() == [0, 1, 2]


def test_it_prints_its_global_value():
    text = repr(gt.arange(4, placement=TWO, sbp=S(0)))
    assert text == 'tensor([0, 1, 2, 3], placement=placement("cpu", [0, 1]), sbp=S(0))'
    assert "requires_grad=True" in repr(gt.ones(2, placement=TWO, sbp=B, requires_grad=True))


def test_to_global_keeps_what_is_not_said():
    x = gt.randn(4, 4, placement=TWO, sbp=S(0))
    assert x.to_global() is x and x.to_global(sbp=B).placement == TWO
    assert x.to_global(gt.placement("cpu", [2, 3])).sbp == (S(0),)
    grid = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
    assert x.to_global(grid, {"tp": S(1)}).sbp == (B, S(1)) and x.to_global(grid).sbp == (B, B)


def test_modules_become_global():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "n": nn.BatchNorm1d(4)})
    model["b"].weight = model["a"].weight
    values = {k: v.clone() for k, v in model.state_dict().items()}
    names = [n for n, _ in model.named_parameters()]
    model.to_global(TWO, {"*.weight": S(0)})
    assert model["b"].weight is model["a"].weight and [n for n, _ in model.named_parameters()] == names
    assert all(isinstance(p, nn.Parameter) and p.is_global and p.is_leaf for p in model.parameters())
    assert model["a"].weight.sbp == (S(0),) and model["a"].bias.sbp == (B,) and model["n"].running_mean.is_global
    for k, v in model.state_dict().items():
        assert torch.equal(v.full_tensor(), values[k])
    again = gt.to_global(copy.deepcopy(model), TWO, lambda name, p: B)
    assert all(p.sbp == (B,) for p in again.parameters())
    with pytest.raises(gt.GlobalTensorError, match="fits no parameter"):
        nn.Linear(2, 2).to_global(TWO, {"wieght": S(0)})


def test_the_default_dtype_counts_when_it_is_used():
    x = gt.from_full(torch.arange(4), TWO, S(0))
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert {(x / 2).dtype for _ in range(3)} == {dtype} and (x * 0.5).full_tensor().dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_copies_and_pickles():
    p = nn.Parameter(gt.randn(4, 3, placement=TWO, sbp=S(0)))
    twin = copy.deepcopy(p)
    assert isinstance(twin, nn.Parameter) and twin.requires_grad and torch.equal(twin.full_tensor(), p.full_tensor())
    with torch.no_grad():
        twin.zero_()
    assert p.full_tensor().abs().sum() > 0
    again = pickle.load(io.BytesIO(pickle.dumps(p.detach())))
    assert again.sbp == p.sbp and torch.equal(again.full_tensor(), p.full_tensor())


ALIASES = {
    "row": lambda x: x[0], "rows": lambda x: x[1:3], "column": lambda x: x[:, 1], "transpose": torch.t,
    "detach": torch.detach, "view": lambda x: x.view(12), "view of a row": lambda x: x[2].view(3, 1),
    "chunk": lambda x: x.chunk(2)[1], "diagonal": torch.diagonal, "itself": lambda x: x,
    "row of the transpose": lambda x: x.t()[1], "strided": lambda x: x.as_strided((2, 2), (3, 1)),
}


@pytest.mark.parametrize("sbp", [B, S(0), S(1), P], ids=str)
@pytest.mark.parametrize("name", ALIASES)
def test_deep_copies_share_memory_as_what_they_are_of(name, sbp):
    for first in (0, 1):                             # which of the two is copied first
        seen = []
        for x in (torch.arange(12.0).view(4, 3), gt.from_full(torch.arange(12.0).view(4, 3), TWO, sbp)):
            pair = [x, ALIASES[name](x)]
            copies = copy.deepcopy(pair if first == 0 else pair[::-1])
            base, view = copies if first == 0 else copies[::-1]
            base.mul_(2)
            seen.append(view.tolist())
            view.add_(1)
            seen.append(base.tolist())
            seen.append(x.tolist())
        assert seen[:3] == seen[3:]


def test_a_copied_module_shares_memory_among_its_own():
    module = nn.Module()
    module.register_buffer("flat", gt.zeros(6, placement=TWO, sbp=S(0)))
    module.head, module.flat.mark = module.flat[:4], [module.flat]
    again = copy.deepcopy(module)
    again.flat.add_(1)
    assert again.head.tolist() == [1] * 4 and module.head.tolist() == [0] * 4 and again.flat.mark[0] is again.flat
    assert again.flat.sbp == (S(0),) and again.flat.lineage == module.flat.lineage


@pytest.mark.parametrize("where, sbp", [(TWO, S(1)), (PLACES[1], S(0)), (PLACES[2], (S(0), S(0))),
                                        (gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")), (B, P))], ids=str)
def test_what_torch_saves_it_loads_without_trusting_the_file(where, sbp):
    x = gt.from_full(torch.arange(35.0).reshape(5, 7), where, sbp)
    for saved in (x, x.t(), x[1], nn.Parameter(x)):
        file = io.BytesIO()
        torch.save({"x": saved}, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["x"]
        assert str(loaded.spec) == str(saved.spec)
        assert isinstance(loaded, nn.Parameter) == isinstance(saved, nn.Parameter)
        assert torch.equal(loaded.full_tensor(), saved.full_tensor())


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


VIEWS = {"rows": lambda x: x[1:], "every other": lambda x: x[::2], "column": lambda x: x[:, 0], "row": lambda x: x[0],
         "t": lambda x: x.t(), "flat": lambda x: x.view(-1), "view": lambda x: x.view(2, 4),
         "expanded": lambda x: x[1:2].expand(3, 2), "chunk": lambda x: x.chunk(2)[1], "chain": lambda x: x[1:].t()[0],
         "conj": lambda x: x.conj(), "conj of rows": lambda x: x[1:].conj()}


@pytest.mark.parametrize("way", [_saved, lambda state: pickle.loads(pickle.dumps(state)), copy.deepcopy],
                         ids=["torch.save", "pickle", "deepcopy"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_saved_together_shares_memory_as_in_plain_torch(view, way):
    def run(x):
        x, seen = way([x, VIEWS[view](x)])
        results = [seen.clone(), seen.is_conj()]
        x.mul_(3)
        results.append(seen.clone())
        if view != "expanded":
            seen.mul_(2)
        return [*results, x]
    plain = torch.arange(8.0).reshape(4, 2).to(torch.complex64) * (1 + 2j)
    for where, sbp in [(TWO, B), (TWO, S(0)), (TWO, S(1)), (TWO, P), (PLACES[2], (S(0), S(1)))]:
        for wanted, got in zip(run(plain.clone()), run(gt.from_full(plain, where, sbp)), strict=True):
            assert torch.equal(wanted, got.full_tensor()) if isinstance(wanted, torch.Tensor) else wanted == got


def test_a_pickle_makes_no_view_by_an_op_that_is_none():
    x = gt.zeros(4, placement=TWO, sbp=S(0))
    for name in ("aten::add_.Scalar", "aten::mul.Scalar"):
        with pytest.raises(gt.GlobalTensorError, match="a pickled view by"):
            view_again(x, [(name, [1], 0)], False, False, {})
    assert x.tolist() == [0] * 4


INDICES = [1, -1, slice(1, 3), slice(None, None, 2), (slice(None), 0), (2, slice(1, 3)), (..., 1), slice(4, 2),
           (slice(1, 4, 2), slice(0, 2)), ...]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_assignment(index):
    base = torch.arange(15.0).reshape(5, 3)
    for where, sbp in [(TWO, S(0)), (TWO, S(1)), (TWO, B), (PLACES[2], (S(0), S(0))), (PLACES[2], (S(0), S(1))),
                       (PLACES[2], (P, S(0)))]:
        for value in (7.0, torch.tensor(8.0), -torch.ones_like(base[index]),
                      gt.from_full(-torch.ones_like(base[index]), where, B)):
            expected, x = base.clone(), gt.from_full(base, where, sbp)
            shards = dict(x.shards)
            expected[index] = value.full_tensor() if getattr(value, "is_global", False) else value
            x[index] = value
            assert torch.equal(x.full_tensor(), expected)
            assert all(x.shards[r] is shards[r] for r in shards)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_gradients_of_assignment(index):
    base = torch.randn(5, 3, dtype=torch.float64)
    new = torch.randn_like(base[index])
    a, v = base.clone().requires_grad_(), new.clone().requires_grad_()
    y = a * 2
    y[index] = v
    (y ** 2).sum().backward()
    for sbp in (S(0), S(1), B):
        x, value = gt.from_full(base, TWO, sbp).requires_grad_(), gt.from_full(new, TWO, B).requires_grad_()
        y = x * 2
        y[index] = value
        (y ** 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), a.grad)
        torch.testing.assert_close(value.grad.full_tensor(), v.grad)


def test_reading_by_index():
    base = torch.arange(30.0).reshape(5, 3, 2)
    for sbp in (S(0), S(1), B, P):
        x = gt.from_full(base, TWO, sbp)
        for index in [*INDICES, (slice(None), None), torch.tensor([0, 3, 3]), base[:, :, 0] > 5, (slice(None), [2, 0])]:
            torch.testing.assert_close(x[index].full_tensor(), base[index])


def test_in_place_keeps_layout_memory_and_views():
    x = gt.from_full(torch.arange(8.0).reshape(4, 2), TWO, S(0))
    shard, view = x.shards[1], x.view(8)
    x.add_(1).mul_(gt.full((2,), 2.0, placement=TWO, sbp=B))
    assert x.shards[1] is shard and x.sbp == (S(0),)
    assert torch.equal(view.full_tensor(), (torch.arange(8.0) + 1) * 2)
    view.zero_()
    assert x.full_tensor().sum() == 0


@pytest.mark.parametrize("sbp", [B, S(0), S(1), P], ids=str)
def test_in_place_on_every_layout(sbp):
    value, other = torch.randn(4, 6), torch.randn(4, 6)
    x = gt.from_full(value, TWO, sbp)
    for theirs in (B, S(0), S(1), P):
        y = gt.from_full(other, TWO, theirs)
        for op in ("add_", "mul_", "copy_", "sub_"):
            got, expected = x.clone(), value.clone()
            getattr(got, op)(y), getattr(expected, op)(other)
            assert got.sbp == x.sbp
            torch.testing.assert_close(got.full_tensor(), expected)
    got = x.clone().relu_()
    torch.testing.assert_close(got.full_tensor(), value.relu())


def test_a_boxed_view_is_a_view():
    x = gt.from_full(torch.arange(6.0).reshape(3, 2), TWO, S(0))
    flat = x.view(6)                                 # 3 rows over 2 ranks are not 6 elements over 2 ranks: moved
    assert torch.equal(flat.full_tensor(), torch.arange(6.0))
    flat.add_(1)
    x.add_(1)
    assert torch.equal((flat + 1).full_tensor(), torch.arange(6.0) + 3)
    assert torch.equal(x.view(6).full_tensor(), torch.arange(6.0) + 2)


def test_an_in_place_view_that_moves_is_the_tensor_itself():
    x = gt.from_full(torch.arange(4.0).reshape(1, 4), TWO, S(0))
    x.squeeze_(0)
    x.add_(1)
    assert torch.equal(x.full_tensor(), torch.arange(4.0) + 1)


def test_the_placement_says_the_device():
    x = gt.ones(4, placement=TWO, sbp=S(0))
    assert x.to(torch.float64).to("cpu").cpu().sbp == (S(0),)
    without_memory = x.to("meta")                    # tests/test_inference.py
    for move in (lambda: without_memory.to("cpu"), lambda: torch.zeros_like(without_memory, device="cpu")):
        with pytest.raises(gt.GlobalTensorError, match="to_global"):
            move()


def test_plain_operands_count_as_broadcast():
    x, plain = torch.randn(4, 3), torch.randn(3)
    for sbp in (S(0), S(1), P, B):
        torch.testing.assert_close((gt.from_full(x, TWO, sbp) + plain).full_tensor(), x + plain)
        torch.testing.assert_close((plain * gt.from_full(x, TWO, sbp)).full_tensor(), plain * x)


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
def test_a_value_behind_a_bit(sbp):
    """conj() and the imaginary part of a conjugate set a bit of the tensor and leave its memory alone."""
    value = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    for whole in (value.conj(), value.conj().imag):
        assert torch.equal(gt.from_full(whole, gt.placement("cpu", [0, 1]), sbp).full_tensor(), whole)


def test_a_plain_tensor_has_no_sbp():
    for t in (torch.ones(2), nn.Linear(1, 1).weight):
        assert not hasattr(t, "sbp") and getattr(t, "placement", None) is None


@pytest.mark.parametrize("kind", ["leaf", "parameter", "result", "view"])
def test_a_shallow_copy_shares_memory(kind):
    def make(t):
        t = nn.Parameter(t) if kind == "parameter" else t.requires_grad_(kind != "view")
        t = t * 2 if kind == "result" else t[1:] if kind == "view" else t
        t.mark = [1]
        return t

    plain, ours = make(torch.ones(4, 3)), make(gt.ones(4, 3, placement=TWO, sbp=S(0)))
    for t in (plain, ours):
        twin = copy.copy(t)
        assert twin is not t and twin.mark is t.mark and twin.is_leaf and isinstance(twin, nn.Parameter) == (
            kind == "parameter") and twin.requires_grad == t.requires_grad
        with torch.no_grad():
            twin.fill_(7)
        assert bool((t == 7).all())


class Named(torch.Tensor):
    """As data sets give them."""


def test_a_subclass_beside_a_global_tensor_counts_as_plain():
    value = torch.arange(4.0)
    x, t = gt.from_full(value, TWO, S(0)), value.as_subclass(Named)
    for result, expected in [(x + t, value * 2), (t + x, value * 2), (torch.cat([x, t]), torch.cat([value, value])),
                             (gt.from_full(t, TWO, S(0)) + 1, value + 1), (x.clone().mul_(t), value * value),
                             (torch.where(x > 1, t, 2.0), torch.where(value > 1, value, 2.0))]:
        assert type(result) is gt.GlobalTensor and torch.equal(result.full_tensor(), expected)


def test_a_global_tensor_is_not_taken_for_one_of_a_subclass():
    """What looks for the subclass, as transforms of torchvision do, would pass it by."""
    x = gt.from_full(torch.arange(4.0), TWO, S(0))
    with pytest.raises(gt.ArgumentError, match=r"as_subclass\(Named\)(.|\n)*x\.full_tensor\(\)\.as_subclass\(Named\)"):
        x.as_subclass(Named)
    assert type(x.full_tensor().as_subclass(Named)) is Named
    weight = nn.Parameter(x)
    assert x.as_subclass(torch.Tensor) is x.as_subclass(gt.GlobalTensor) is x
    assert weight.as_subclass(nn.Parameter) is weight


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_that_torch_does_not_add(dtype):
    t, i = (torch.arange(24).view(6, 4) - 12).to(dtype), torch.tensor([5, 0, 3])
    x = gt.from_full(t, TWO, S(0))
    for f in (lambda x: torch.cat([x, x]), lambda x: x[i], lambda x: x[i, i % 4], lambda x: x.diagonal(),
              lambda x: nn.functional.embedding(i, x), lambda x: x.index_select(0, i)):
        assert torch.equal(f(x).full_tensor(), f(t))
    assert torch.equal(x.to_global(sbp=P).full_tensor(), t)


LAZY = {"plain": lambda x: x.clone(), "conjugated": torch.conj, "negated": torch._neg_view, "learns": torch.sin,
        "both": lambda x: torch._neg_view(x.conj()), "imaginary": lambda x: x.conj().imag}
READS = {"numpy": lambda x: x.numpy(), "forced": lambda x: x.numpy(force=True), "array": numpy.array,
         "tolist": lambda x: x.tolist(), "detached": lambda x: x.detach().numpy(),
         "resolved": lambda x: x.detach().resolve_conj().resolve_neg().numpy()}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("lazy", LAZY)
def test_numpy_reads_what_it_reads_of_a_plain_tensor(lazy, read):
    """And refuses what is conjugated or negated when it is read, and what requires a gradient, in torch's words."""
    def outcome(x):
        try:
            return numpy.asarray(READS[read](LAZY[lazy](x))).tolist()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    z = torch.randn(4, 3, dtype=torch.complex64, requires_grad=lazy == "learns")
    for sbp in (S(0), S(1), B):
        x = gt.from_full(z.detach(), TWO, sbp).requires_grad_(z.requires_grad)
        got, wanted = outcome(x), outcome(z)
        assert numpy.allclose(got, wanted) if type(wanted) is list and type(got) is list else got == wanted
