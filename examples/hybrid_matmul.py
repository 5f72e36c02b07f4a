"""Data and model parallel at once: two matmuls on 2 x 2 ranks.

    rank    rows of x    columns of up, rows of down
    0       first        first
    1       first        second
    2       second       first
    3       second       second

    python examples/hybrid_matmul.py
    globaltensor run -n 4 examples/hybrid_matmul.py
"""
import globaltensor as gt

P = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
x = gt.randn(4, 6, placement=P, sbp={"dp": gt.sbp.split(0)})           # what is not named is broadcast
up = gt.randn(6, 8, placement=P, sbp={"tp": gt.sbp.split(1)})
down = gt.randn(8, 6, placement=P, sbp={"tp": gt.sbp.split(0)})

with gt.record() as moves:
    hidden = x @ up                                  # (4, 8): rows along dp, columns along tp
    partial = hidden @ down                          # (4, 6): rows along dp, a pending sum along tp
    out = partial.to_global(sbp={"dp": gt.sbp.split(0)})               # the one all-reduce

if gt.rank() == 0:
    print(hidden.sbp, partial.sbp, out.sbp)
    print(*moves, sep="\n")
