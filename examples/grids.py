"""What a layer costs on a line, a square, a slab and a cube of ranks: tensor parallelism in 1, 2, 2.5 and 3 dims.

The same two linear layers under four plans, forward and backward. For each: the share of the weights that a rank keeps,
the bytes of activations that lie between the layers, and the bytes that a rank receives, beside what is published.

    GLOBALTENSOR_RANKS=8 python examples/grids.py                 # in one process
    globaltensor run -n 8 examples/grids.py --hidden 512
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt

S = gt.sbp.split


class Mlp(nn.Module):
    """norm, up, gelu, down; `up` and `down` are what plans call the first and the second layer of a pair."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


# ranks, names of the axes, which of them cut layers, how the input [batch, sequence, hidden] lies, and what two layers
# move, in parts of a matrix (q = d = 2). Along the depth of 2.5D weights are whole, as in data parallelism.
GRIDS = {
    "1D": ([0, 1, 2, 3], ("tp",), "tp", {}, "2 x 2 x 3/4", 3.0),
    "2D": ([[0, 1], [2, 3]], ("row", "column"), ("row", "column"), {"row": S(0), "column": S(2)}, "2 x 6 x 1/4", 3.0),
    "2.5D": ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("depth", "row", "column"), ("row", "column"),
             {"depth": S(0), "row": S(0), "column": S(2)}, "2 x (9/8 + 2/8)", 2.75),
    "3D": ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("j", "i", "l"), ("j", "i", "l"), {"j": S(1), "i": S(0), "l": S(2)},
           "2 x 6 x 1/8", 1.5),
}


def study(name: str, hidden: int) -> None:
    ranks, names, axes, lies, formula, published = GRIDS[name]
    torch.manual_seed(0)
    plain, full = Mlp(hidden), torch.randn(8, hidden // 8, hidden)
    expected = plain(full)
    model = Mlp(hidden)
    model.load_state_dict(plain.state_dict())
    where = gt.placement("cpu", ranks, names)
    gt.parallelize(model, where, gt.Plan.of(model, axes))
    x = gt.from_full(full, where, lies).requires_grad_()
    for _ in range(2):                               # the second time, all is decided
        with gt.record() as moves:
            y = model(x)
            y.to_global(sbp=lies).backward(x.detach())
            [p.grad for p in model.parameters()]                # read, so that they are reduced
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-4)
    matrix = hidden * hidden * 4
    moved = sum(m.bytes for m in moves if m.bytes >= matrix // 64) / matrix      # the norm's statistics are less
    weights = max(t.numel() for t in model.state_dict()["up.weight"].shards.values()) * 4 / matrix
    between = max(t.numel() for t in x.shards.values()) * 4 / matrix
    if gt.rank() == 0:
        print(f"{name:5} {len(where.flat)} ranks   weights {weights:5.3f}   activations {between:5.3f}   "
              f"moved {moved:5.3f}   published {formula} = {published}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hidden", type=int, default=256)
    hidden = options.parse_args().hidden
    for name in GRIDS:
        study(name, hidden)
