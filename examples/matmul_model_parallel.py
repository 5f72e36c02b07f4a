"""Model parallel: every rank has the whole of x and its columns of w.

    python examples/matmul_model_parallel.py
    globaltensor run -n 2 examples/matmul_model_parallel.py
"""
import globaltensor as flow

P = flow.placement(type="cpu", ranks=[0, 1])
x = flow.randn(4, 5, placement=P, sbp=flow.sbp.broadcast)
w = flow.randn(5, 8, placement=P, sbp=flow.sbp.split(dim=1))
out = x @ w                                          # (4, 8), split along dim 1; nothing moves

if flow.rank() == 0:
    print(out.shape, out.sbp)
