"""What a user does first, and some of each room: one process drives eight ranks, without native code."""
import tempfile

import torch
from torch import nn

import globaltensor as gt
from globaltensor.runtime import native

assert native.torch_ext is None and native.core_lib is None and gt.world_size() == 8
P = gt.placement("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], axis_names=("dp", "tp"))
x = gt.arange(32.0, placement=P, sbp={"dp": gt.sbp.split(0), "tp": gt.sbp.broadcast}).view(16, 2)
w = gt.ones(2, 3, placement=P, sbp=gt.sbp.broadcast).requires_grad_()
with gt.record() as moves:
    (x @ w).sum().backward()
    assert w.grad.full_tensor().tolist() == [[240.0] * 3, [256.0] * 3] and any(move.bytes for move in moves)

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
model.load_state_dict(plain.state_dict())
gt.parallelize(model, P, gt.Plan.of(model, "tp"))
with tempfile.TemporaryDirectory() as folder:
    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=0.1), axis="dp", stage=1, offload=f"{folder}/state")
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        inputs = gt.from_full(data, P, {"dp": gt.sbp.split(0), "tp": gt.sbp.broadcast})
        loss, expected = model(inputs).square().mean(), plain(data).square().mean()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for one, each in ((loss, optimizer), (expected, other)):
            one.backward()
            each.step()
            each.zero_grad()
    gt.save({"model": model, "step": 3}, f"{folder}/run")
    assert gt.load({"model": model, "step": 0}, f"{folder}/run")["step"] == 3

assert not gt.preempted()
gt.metrics()
assert gt.metrics()["peak_memory_bytes"] != 0
gt.audit(model)
gt.show(w)
print(gt.explain(lambda: x @ w))
print("all of it works")
