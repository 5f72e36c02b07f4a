"""Each line marked so is an error for a type checker, and nothing else is (tests/test_types.py)."""
import torch

import globaltensor as gt

P = gt.placement("cpu", [0, 1])
x = gt.ones(4, placement=P, sbp="B")
gt.randn(3, placment=P, sbp="B")  # error
gt.zeros(3, placement=P, sbp=3)  # error
gt.full((3,), 1.0, placement=P, spb="B")  # error
gt.arange(3, placement=[0, 1], sbp="B")  # error
gt.arange("3", placement=P, sbp="B")  # error
gt.arange(3, placement=P)  # error
gt.arange(start=3, placement=P, sbp="B")  # error
gt.linspace(0, 1, placement=P, sbp="B")  # error
gt.linspace(0, 1, 5, base=2.0, placement=P, sbp="B")  # error
gt.eye(2.5, placement=P, sbp="B")  # error
gt.eye((2, 3), placement=P, sbp="B")  # error
gt.tensor(placement=P, sbp="B")  # error
gt.tensor([1.0], sbp="B")  # error
gt.randperm("3", placement=P, sbp="B")  # error
gt.randint(5, placement=P, sbp="B")  # error
gt.randn(3, placement=P, sbp="B", device="cpu")  # error
gt.from_full(torch.ones(3), P, 1.5)  # error
gt.from_full(torch.ones(3), "cpu", "B")  # error
x.to_global(spb="B")  # error
x.to_global(sbp=0)  # error
gt.sbp.split("rows")  # error
gt.sbp.spilt(0)  # error
gt.spilt(x)  # error
x.sbps  # error
x.placement.rank  # error
x.placement.ranks = (1, 2)
gt.placement("cpu", [0], axes=("dp",))  # error
gt.parallelize(torch.nn.Linear(2, 2), P, "tp")  # error
gt.world_size() + "1"  # error
