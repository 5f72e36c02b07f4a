"""Data parallel: every rank has its rows of x and the whole of w.

    python examples/matmul_data_parallel.py
    globaltensor run -n 2 examples/matmul_data_parallel.py
"""
import globaltensor as flow

P = flow.placement(type="cpu", ranks=[0, 1])
x = flow.randn(4, 5, placement=P, sbp=flow.sbp.split(dim=0))
w = flow.randn(5, 8, placement=P, sbp=flow.sbp.broadcast)
out = x @ w                                          # (4, 8), split along dim 0; nothing moves

if flow.rank() == 0:
    print(out.shape, out.sbp)
