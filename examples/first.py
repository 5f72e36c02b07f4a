"""The first program: plain torch, on tensors that say where they live and how they are laid out.

    python examples/first.py
    globaltensor run -n 2 examples/first.py
"""
import globaltensor as gt

P = gt.placement("cpu", ranks=[0, 1])
x = gt.ones(4, 5, placement=P, sbp=gt.sbp.split(0))                    # two rows on each rank
w = gt.ones(5, 8, placement=P, sbp=gt.sbp.broadcast, requires_grad=True)

with gt.record() as moves:
    y = x @ w                                        # (4, 8), two rows on each rank
    loss = (y ** 2).mean()                           # each rank has its share of the sum
    loss.backward()
    assert w.grad is not None                        # here the ranks add up the gradient
    step = w - 0.1 * w.grad

value = loss.item()                                  # the same on every rank
if gt.rank() == 0:
    print(y.shape, y.sbp)
    print(value)
    for move in moves:
        if move.bytes:
            print(move.op, move.src.sbp, "->", move.dst.sbp, move.bytes, "bytes")
