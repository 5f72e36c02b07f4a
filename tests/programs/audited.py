"""Copies that go apart where nothing moves, in processes of their own: an audit tells all ranks the same."""
import sys

import torch

import globaltensor as gt

B, S = gt.sbp.broadcast, gt.sbp.split
odd = gt.rank() == 1
where = gt.placement.all("cpu")
model = torch.nn.Linear(4, 3).to_global(where, B)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = gt.ones(2, 4, placement=where, sbp=B)


def step(n):
    optimizer.zero_grad()
    model(x).sum().backward()                        # broadcast all through: nothing is sent
    optimizer.step()
    print("step", n)


if len(sys.argv) > 1:
    for n in range(1, 9):
        optimizer.param_groups[0]["lr"] = 0.2 if odd and n > 2 else 0.1
        step(n)
    sys.exit("nobody noticed")

step(1)
assert gt.audit(model, optimizer) > 4
optimizer.param_groups[0]["lr"] = 0.2 if odd else 0.1
step(2)
try:
    gt.audit(model, optimizer)
except gt.DisagreementError as error:
    text = str(error)
assert "optimizer.param_groups[0]['lr']: rank 1 beside rank 0: 0.1 on rank 0, 0.2 on rank 1" in text, text
assert "weight: rank 1 beside rank 0: at [0, 0]" in text and "bias: rank 1 beside rank 0: at [0]" in text, text
assert "momentum_buffer" not in text and "audited.py:" in text, text
print("all is found")
