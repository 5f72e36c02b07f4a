"""No keyword of a factory is passed over, and a generator that is given is the one that is drawn from.

With a placement, a keyword is honoured as torch does or an error that names it, the nearest one that would do, and the
user's line. Without one, all is torch's own. The random ops that take a generator are found in torch's schemas.
"""
from __future__ import annotations

import inspect

import pytest
import torch
from shards import gather
from torch import nn
from torch.utils._pytree import tree_leaves

import globaltensor as gt
from globaltensor.errors import ArgumentError, GlobalTensorError
from globaltensor.layouts.sbp import broadcast, partial_sum, split

TWO = gt.placement("cpu", [0, 1])
FACTORIES = {                                        # positional arguments, the same by name
    "zeros": ((4, 6), {"size": (4, 6)}), "ones": ((4, 6), {"size": [4, 6]}), "empty": (((4, 6),), {"size": (4, 6)}),
    "full": (((4, 6), 2.5), {"size": (4, 6), "fill_value": 2.5}),
    "arange": ((1, 9, 2), {"start": 1, "end": 9, "step": 2}),
    "linspace": ((0, 1, 5), {"start": 0, "end": 1, "steps": 5}),
    "logspace": ((0, 1, 5, 2.0), {"start": 0, "end": 1, "steps": 5, "base": 2.0}), "eye": ((4, 6), {"n": 4, "m": 6}),
    "tensor": (([1.0, 2.0, 3.0],), {"data": [1.0, 2.0, 3.0]}), "rand": ((4, 6), {"size": (4, 6)}),
    "randn": ((4, 6), {"size": (4, 6)}), "normal": ((1.0, 2.0, (4, 6)), {"mean": 1.0, "std": 2.0, "size": (4, 6)}),
    "randint": ((-3, 100, (4, 6)), {"low": -3, "high": 100, "size": (4, 6)}), "randperm": ((9,), {"n": 9}),
}
RANDOM = ("rand", "randn", "normal", "randint", "randperm")


def call(name, *, by_name=False, **keywords):
    positional, named = FACTORIES[name]
    torch.manual_seed(5)
    return getattr(gt, name)(**named, **keywords) if by_name else getattr(gt, name)(*positional, **keywords)


def told(name, said, where=TWO, **keywords):
    """The error of a call, which tells the keyword, and this file."""
    with pytest.raises(ArgumentError) as caught:
        call(name, placement=where, sbp=broadcast, **keywords)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, GlobalTensorError)
    assert "test_factories.py:" in caught.value.where
    assert said in caught.value.what and f"gt.{name}" in caught.value.what
    return caught.value


# -------------------------------------------------------------------------------------------------------- keywords


@pytest.mark.parametrize("name", FACTORIES)
def test_an_unknown_keyword_is_an_error_that_names_the_nearest(name):
    for wrong, right in {"dtyp": "dtype", "placment": "placement", "require_grad": "requires_grad", "zqx": ""}.items():
        error = told(name, repr(wrong), **{wrong: None})
        assert error.fix == (f"{right}=..." if right else f"the same without {wrong}=")
        with pytest.raises(TypeError):
            call(name, **{wrong: None})
    with pytest.raises(ArgumentError, match="'spb'"):
        call(name, placement=TWO, spb=broadcast)
    if name in RANDOM:
        assert told(name, "'genrator'", genrator=None).fix == "generator=..."
    else:
        told(name, "'generator'", generator=torch.Generator())


@pytest.mark.parametrize("name", FACTORIES)
def test_a_keyword_without_use_beside_a_placement_is_an_error(name):
    for keyword, value in {"device": "cpu", "out": torch.empty(1), "layout": torch.sparse_coo, "pin_memory": True,
                           "memory_format": torch.channels_last, "names": ("a", "b")}.items():
        error = told(name, f"{keyword}=", **{keyword: value})
        assert error.why and error.fix
    assert told(name, "device=", device="meta").fix == 'placement=gt.placement("meta", [0, 1])'
    assert told(name, "device=", device="cuad").fix == "the same without device="
    nothing = {"device": None, "out": None, "layout": torch.strided, "pin_memory": False, "names": None,
               "memory_format": torch.contiguous_format}
    plain = call(name, placement=TWO, sbp=broadcast)
    if name != "empty":
        assert torch.equal(gather(call(name, placement=TWO, sbp=broadcast, **nothing)), gather(plain))


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_honoured(name):
    for sbp in (broadcast, split(0), partial_sum):
        plain, here = call(name), call(name, placement=TWO, sbp=sbp)
        named = call(name, by_name=True, placement=TWO, sbp=sbp)
        assert here.dtype == plain.dtype and here.shape == plain.shape and not here.requires_grad
        assert call(name, placement=TWO, sbp=sbp, dtype=None).dtype == plain.dtype
        assert named.dtype == here.dtype and named.shape == here.shape
        if name != "empty":
            assert torch.equal(gather(named), gather(here))
        if name not in (*RANDOM, "empty"):
            assert torch.equal(gather(here), plain)
        for dtype in (torch.float64, float, torch.float16):
            made = call(name, placement=TWO, sbp=sbp, dtype=dtype, requires_grad=True)
            assert made.dtype == call(name, dtype=dtype).dtype and made.requires_grad and made.is_leaf
            made.sum().backward()
            assert torch.equal(gather(made.grad).double(), torch.ones(made.shape, dtype=torch.float64))


@pytest.mark.parametrize("name", FACTORIES)
def test_without_a_placement_it_is_torch_s_own(name):
    positional, named = FACTORIES[name]
    for keywords in ({}, {"dtype": torch.float64}, {"dtype": torch.float64, "requires_grad": True}):
        torch.manual_seed(5)
        expected = getattr(torch, name)(*positional, **keywords)
        for by_name in (False, True):
            found = call(name, by_name=by_name, **keywords)
            assert type(found) is torch.Tensor and found.dtype == expected.dtype and found.shape == expected.shape
            assert found.requires_grad == expected.requires_grad and (name == "empty" or torch.equal(found, expected))
    if name in RANDOM:
        own = torch.Generator().manual_seed(9)
        expected = getattr(torch, name)(*positional, generator=torch.Generator().manual_seed(9))
        assert torch.equal(call(name, generator=own), expected)


@pytest.mark.parametrize("mean, std", [((3.0,), ()), ((3.0,), (2.0,)), ((), ((2.0,),)), ((3.0,), ((2.0,),))], ids=str)
def test_normal_of_tensors_is_torch_s_own(mean, std):
    arguments = [torch.tensor(mean) if mean else 1.0, *(torch.tensor(value) for value in std)]
    expected = torch.normal(*arguments, generator=torch.Generator().manual_seed(9))
    assert torch.equal(gt.normal(*arguments, generator=torch.Generator().manual_seed(9)), expected)


def test_arguments_that_do_not_fit_are_torch_s_errors():
    at = {"placement": TWO, "sbp": broadcast}
    for wrong in (lambda: gt.rand(2, 3.5, **at), lambda: gt.rand(**at), lambda: gt.zeros("4", **at),
                  lambda: gt.randint(5, **at), lambda: gt.randint(0, 5, 3, **at),
                  lambda: gt.randn(2, dtype="float", **at)):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (lambda: gt.randperm(-1, **at), lambda: gt.zeros(-1, **at), lambda: gt.randint(5, 5, (3,), **at)):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(ArgumentError, match="two numbers and a size"):
        gt.normal(torch.zeros(2), 1.0, **at)


def test_every_factory_is_in_the_table():
    """A factory is what takes a placement and a dtype."""
    takes = {name for name in dir(gt) if callable(getattr(gt, name)) and not inspect.isclass(getattr(gt, name))
             and getattr(getattr(gt, name), "__module__", "").startswith("globaltensor.tensors.factories")}
    assert takes == FACTORIES.keys()


# ------------------------------------------------------------------------------------------------------------- like

LIKE = {"zeros_like": (), "ones_like": (), "empty_like": (), "full_like": (2.5,), "rand_like": (), "randn_like": (),
        "randint_like": (-3, 100)}                   # what each takes behind x
OTHER = gt.placement("cpu", [[2, 0], [1, 3]])


def of_same_name(name, x, values, **options):
    """What the factory without `_like` makes of x's shape and dtype."""
    sized = getattr(gt, name.removesuffix("_like"))
    return sized(*values, x.shape, **options) if name == "randint_like" else sized(x.shape, *values, **options)


def like(name, x, **options):
    torch.manual_seed(5)
    return getattr(gt, name)(x, *LIKE[name], **options)


@pytest.mark.parametrize("name", LIKE)
def test_a_tensor_like_another_is_laid_out_as_asked(name):
    """Of a global tensor what is left out is its own; of a plain one nothing is."""
    x = gt.ones(4, 6, placement=TWO, sbp=split(1), dtype=torch.float64)
    for one in (x, gather(x)):
        for asked, where, sbp in (
                ({"placement": TWO, "sbp": split(0)}, TWO, (split(0),)), ({"sbp": partial_sum}, TWO, (partial_sum,)),
                ({"placement": gt.placement("cpu", [3, 2])}, gt.placement("cpu", [3, 2]), (split(1),)),
                ({"placement": OTHER}, OTHER, (broadcast, broadcast)),
                ({"placement": OTHER, "sbp": (split(0), split(1))}, OTHER, (split(0), split(1)))):
            if one is not x and len(asked) == 1:
                with pytest.raises(GlobalTensorError, match="placement"):
                    like(name, one, **asked)
                continue
            for more in ({}, {"dtype": torch.float32, "requires_grad": True}):
                got = like(name, one, **asked, **more)
                torch.manual_seed(5)
                want = of_same_name(name, one, LIKE[name], placement=TWO, sbp=broadcast,
                                    dtype=more.get("dtype", torch.float64))
                assert (got.placement, got.sbp, got.dtype) == (where, sbp, want.dtype), asked
                assert got.requires_grad == bool(more) and got.is_leaf and got.shape == x.shape
                assert name == "empty_like" or torch.equal(gather(got), gather(want))


@pytest.mark.parametrize("name", LIKE)
def test_a_tensor_like_another_is_torch_s_without_a_layout(name):
    x = gt.ones(4, 6, placement=TWO, sbp=split(1))
    plain, here = like(name, gather(x)), like(name, x)
    assert not plain.is_global and plain.shape == here.shape and here.sbp == x.sbp and plain.dtype == here.dtype
    torch.manual_seed(5)
    assert name == "empty_like" or torch.equal(plain, getattr(torch, name)(gather(x), *LIKE[name]))
    with pytest.raises(ArgumentError, match="'dtyp'"):
        like(name, x, sbp=broadcast, dtyp=torch.float64)
    with pytest.raises(ArgumentError, match="of no tensor"):
        like(name, [1.0])


def test_every_factory_like_another_tensor_is_in_the_table():
    assert {name for name in gt.FACE if name.endswith("_like")} == LIKE.keys()


# ------------------------------------------------------------------------------------------------------- generators


def same_for_all_layouts(draw):
    """`draw(generator, sbp)` depends on the state of the generator, moves it on, and leaves torch's own alone."""
    before = torch.get_rng_state()
    found = []
    for sbp in (broadcast, split(0), partial_sum):
        mine = torch.Generator().manual_seed(11)
        first, state = draw(mine, sbp), mine.get_state()
        second = draw(mine, sbp)
        mine.set_state(state)
        assert not torch.equal(first, second) and torch.equal(draw(mine, sbp), second)
        found.append(first)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(torch.get_rng_state(), before)
    return found[0]


@pytest.mark.parametrize("name", RANDOM)
def test_a_factory_draws_from_the_generator_it_is_given(name):
    def draw(generator, sbp):
        positional, _ = FACTORIES[name]
        return gather(getattr(gt, name)(*positional, placement=TWO, sbp=sbp, generator=generator))

    first = same_for_all_layouts(draw)
    torch.manual_seed(11)
    assert torch.equal(gather(getattr(gt, name)(*FACTORIES[name][0], placement=TWO, sbp=split(0))), first)


def ops_with_generators():
    """Every op of torch that draws from a generator and takes a tensor."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):       # `dir` has those that were asked for before
        name, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if func is not None:
            kinds = {a.name: str(a.type) for a in func._schema.arguments}
            if "generator" in kinds and "Tensor" in kinds.values() and not func._schema.arguments[-1].is_out:
                yield func


def arguments_of(func, sbp, generator):
    """Arguments of the kinds that the op takes: probabilities, small counts, a tensor in the layout."""
    values = {"generator": generator, "training": True, "to": 100, "high": 100}
    for a in func._schema.arguments:
        kind = str(a.type)
        if kind == "Tensor":                         # rrelu draws where it is negative
            value = 8.0 if a.name == "count" else -0.5 if "rrelu" in func._schema.name else 0.5
            values[a.name] = gt.full((40, 3), value, placement=TWO, sbp=sbp)
        elif a.name not in values:
            some = {"int": 2, "Optional[int]": 2, "number": 2, "float": 0.5, "bool": True, "List[int]": [40, 3]}
            values[a.name] = a.default_value if a.has_default_value() else some[kind]
    return {a.name: values[a.name] for a in func._schema.arguments}


OPS = list(ops_with_generators())


@pytest.mark.parametrize("func", OPS, ids=str)
def test_an_op_draws_from_the_generator_it_is_given(func):
    def draw(generator, sbp):
        result = func(**arguments_of(func, sbp, generator))
        return torch.cat([gather(t).double().flatten() for t in tree_leaves(result)])

    try:
        func(**{k: v.full_tensor() if isinstance(v, torch.Tensor) else v
                for k, v in arguments_of(func, broadcast, torch.Generator()).items()})
    except (RuntimeError, NotImplementedError) as refused:
        pytest.skip(f"not by torch on a CPU: {refused}"[:90])
    same_for_all_layouts(draw)


def test_the_ops_with_generators_are_found():
    names = {str(func).removeprefix("aten.") for func in OPS}
    assert {"bernoulli.default", "bernoulli_.float", "uniform_.default", "normal_.default", "multinomial.default",
            "poisson.default", "normal.Tensor_float", "random_.from", "exponential_.default"} <= names, names


# sparse_ draws what is zero from torch's own generator, in plain torch too
INITS = [name for name in dir(nn.init) if name.endswith("_") and name[0] != "_" and name != "sparse_"
         and "generator" in inspect.signature(getattr(nn.init, name)).parameters]


@pytest.mark.parametrize("name", INITS)
def test_an_init_draws_from_the_generator_it_is_given(name):
    def draw(generator, sbp):
        weight = gt.zeros(8, 6, placement=TWO, sbp=sbp)
        return gather(getattr(nn.init, name)(weight, generator=generator))

    same_for_all_layouts(draw)
    assert len(INITS) >= 8


OF_SCALARS = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "Tensor": torch.Tensor,
    "FloatTensor": torch.FloatTensor,
    "new_tensor": lambda losses: torch.ones(1).new_tensor(losses),
    "new_tensor of a global one": lambda losses: losses[0].new_tensor(losses),
    "mixed": lambda losses: torch.tensor([*losses, 2.5]),
    "nested": lambda losses: torch.tensor([losses, losses]),
    "of one element": lambda losses: torch.tensor([t.reshape(1) for t in losses]),
    "integers": lambda losses: torch.tensor([t.long() for t in losses]),
    "LongTensor": lambda losses: torch.LongTensor([t.long() for t in losses]),
    "complex": lambda losses: torch.tensor([t + 1j for t in losses]),
    "bool": lambda losses: torch.tensor([t > 2 for t in losses]),
    "bfloat16": lambda losses: torch.tensor([t.bfloat16() for t in losses]),
}


@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("name", OF_SCALARS)
def test_a_list_of_global_scalars_is_a_tensor_of_their_values(name, sbp):
    t = torch.tensor([1.0, 2.0, 6.0])                # whose mean is exact
    x = gt.from_full(t, gt.placement("cpu", [0, 1]), sbp)
    got, want = (OF_SCALARS[name]([a.sum(), a.mean(), a[1]]) for a in (x, t))
    assert got.dtype == want.dtype and got.equal(want)
    assert gt.tensor([x.sum(), x[2]], placement=x.placement, sbp="B").tolist() == [9, 6]
