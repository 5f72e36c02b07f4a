"""A compiled optimizer, on two processes: the values of plain torch, and two graphs, of first gradients and of others.

Later, one process at a time forgets its graphs: it reads gradients for a new one, and the other process in a guard.
"""
import copy

import torch
from torch import nn

import globaltensor as gt

STEPS = 8
torch.manual_seed(7)
plain, batches, graphs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(STEPS, 4, 4), []


def backend(graph, inputs):
    graphs.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


where = gt.placement("cpu", [0, 1], ("dp",))
model = gt.parallelize(copy.deepcopy(plain), where)
optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, model)]
take = torch.compile(optimizers[1].step, backend=backend)
for k, x in enumerate(batches):
    plain(x).square().mean().backward()
    model(gt.from_full(x, where, gt.sbp.split(0))).square().mean().backward()
    if k == STEPS // 2:
        assert len(graphs) == 2, len(graphs)
    if k >= STEPS // 2 and k % 2 == gt.rank():
        torch.compiler.reset()
    take()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p.full_tensor(), q)
print("right")
