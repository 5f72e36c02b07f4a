"""Every spelling of an sbp means the same wherever an sbp is asked for."""
from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import globaltensor as gt
from globaltensor.layouts.sbp import nd_sbp

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
ONE, GRID = gt.placement("cpu", [0, 1]), gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))

SPELLINGS = [                                        # what is written, for how many axes, what it means
    ("S(0)", 1, (S(0),)), (" S(-1) ", 1, (S(-1),)), ("B", 1, (B,)), ("P", 1, (P,)), ("P(sum)", 1, (P,)),
    ("P(max)", 1, (gt.sbp.partial_max,)), ("P(min)", 1, (gt.sbp.partial_min,)),
    ("S(1)", 2, (S(1), S(1))), ("(S(0), B)", 2, (S(0), B)), ("(P(max),S(1))", 2, (gt.sbp.partial_max, S(1))),
    ("(B,)", 1, (B,)), (("S(0)", B), 2, (S(0), B)), ([B, "P"], 2, (B, P)),
    (Shard(1), 1, (S(1),)), (Shard(-1), 2, (S(-1), S(-1))), (Replicate(), 1, (B,)), (Partial(), 1, (P,)),
    (Partial("max"), 1, (gt.sbp.partial_max,)), ((Shard(0), Replicate()), 2, (S(0), B)), ([Partial(), "B"], 2, (P, B)),
    ({"tp": "S(1)"}, 2, (B, S(1))), ({"dp": Shard(0), "tp": P}, 2, (S(0), P)),
]


@pytest.mark.parametrize("written, axes, meant", SPELLINGS, ids=lambda value: str(value))
def test_every_spelling(written, axes, meant):
    assert nd_sbp(written, ("dp", "tp")[:axes], axes) == meant


def test_what_an_sbp_prints_as_is_read_again():
    for nd in [(S(0),), (B,), (P,), (gt.sbp.partial_max,), (S(1), B), (B, gt.sbp.partial_min, S(-1))]:
        assert nd_sbp(str(nd), (), len(nd)) == nd
        assert len(nd) > 1 or nd_sbp(str(nd[0]), (), 1) == nd


@pytest.mark.parametrize("written", ["S", "S()", "S(x)", "split(0)", "b", "", "()(", "(S(0), Q)", "P(avg)", 3, None,
                                     b"B", [3], torch.ones(1), Partial("avg")], ids=str)
def test_what_is_none(written):
    with pytest.raises(gt.GlobalTensorError, match="not an sbp"):
        nd_sbp(written, (), 1)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2,), float(i))


def parallelized(sbp):
    model = gt.parallelize(torch.nn.Linear(4, 4), ONE, {"weight": {"dp": sbp}})
    return model.weight


TAKERS = {                                           # everything public that is given an sbp, on one axis
    "factory": lambda sbp: gt.ones(4, 4, placement=ONE, sbp=sbp),
    "random": lambda sbp: gt.randn(4, 4, placement=ONE, sbp=sbp),
    "from_full": lambda sbp: gt.from_full(torch.ones(4, 4), ONE, sbp),
    "from_local": lambda sbp: gt.from_local(torch.ones(4, 4), ONE, sbp),
    "from_shards": lambda sbp: gt.from_shards({0: torch.ones(4, 4), 1: torch.ones(4, 4)}, ONE, sbp),
    "Tensor.to_global": lambda sbp: torch.ones(4, 4).to_global(ONE, sbp),
    "boxing": lambda sbp: gt.ones(4, 4, placement=ONE, sbp=B).to_global(sbp=sbp),
    "a module": lambda sbp: gt.to_global(torch.nn.Linear(4, 4), ONE, sbp).weight,
    "a module by function": lambda sbp: gt.to_global(torch.nn.Linear(4, 4), ONE, lambda name, p: sbp if name == "weight"
                                                     else B).weight,
    "a module by pattern": lambda sbp: gt.to_global(torch.nn.Linear(4, 4), ONE, {"weight": sbp}).weight,
    "a plan": parallelized,
    "a data loader": lambda sbp: next(iter(gt.data.DataLoader(Rows(), 4, ONE, sbp))),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("spellings", [(S(0), "S(0)", Shard(0)), (B, "B", Replicate())], ids=lambda s: s[1])
def test_taken_everywhere(taker, spellings):
    want, *others = spellings
    for written in [want, *others]:
        assert TAKERS[taker](written).sbp == (want,), f"{taker} of {written!r}"


def test_the_gradient_of_a_boxing():
    x = gt.ones(4, placement=ONE, sbp=B).requires_grad_()
    x.to_global(sbp="S(0)", grad_sbp=Replicate()).sum().backward()
    assert x.grad.full_tensor().tolist() == [1.0] * 4


def test_one_axis_needs_no_name():
    """It is called "dp", in dicts, plans and for gt.zero."""
    assert gt.ones(4, placement=ONE, sbp={"dp": "S(0)"}).sbp == (S(0),)
    model = gt.parallelize(torch.nn.Linear(4, 4), ONE)
    optimizer = gt.zero(torch.optim.SGD(model.parameters(), lr=0.5))
    plain = torch.nn.Linear(4, 4)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    x = torch.randn(6, 4)
    model(gt.from_full(x, ONE, "S(0)")).square().sum().backward()
    plain(x).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert torch.allclose(model.weight.full_tensor(), plain.weight, atol=1e-5)


@pytest.mark.usefixtures("real_processes")
def test_torchs_words_are_known_without_importing_them():
    code = ("import sys, globaltensor as gt; gt.ones(4, placement=gt.placement('cpu', [0, 1]), sbp='S(0)');"
            "assert 'torch.distributed.tensor' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
