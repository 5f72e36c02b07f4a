"""Pipeline parallel: the first matmul runs on rank 0, the second on rank 1, and only what lies between them moves.

    python examples/matmul_pipeline_parallel.py
    globaltensor run -n 2 examples/matmul_pipeline_parallel.py
"""
import globaltensor as flow

P0 = flow.placement(type="cpu", ranks=[0])
P1 = flow.placement(type="cpu", ranks=[1])
w0 = flow.randn(5, 8, placement=P0, sbp=flow.sbp.broadcast, requires_grad=True)
w1 = flow.randn(8, 3, placement=P1, sbp=flow.sbp.broadcast, requires_grad=True)
x = flow.randn(4, 5)                                 # a plain tensor

out0 = flow.from_local(x, P0, flow.sbp.broadcast) @ w0                 # (4, 8) on rank 0
out1 = out0.to_global(placement=P1, sbp=flow.sbp.broadcast) @ w1       # (4, 3) on rank 1
out1.sum().backward()                                # the gradient of out0 goes the other way

if flow.rank() == 0:
    print(out1.shape, out1.placement)
    assert w0.grad is not None
    print(w0.grad.shape, w0.grad.placement)
