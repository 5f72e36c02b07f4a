"""Train a small causal language model (gpt.py) on one long sequence that is split over ranks: ring attention.

    python examples/long_context.py --sp 4                      one process drives all ranks
    globaltensor run -n 4 examples/long_context.py --sp 4       one process per rank

One sample and one head: nothing but the sequence can be dealt out. The text is split along it (`spread`), the weights
are whole on every rank, and the rest follows: only attention moves anything before the gradients are summed, keys and
values in turns. A row for 1, 2, ... ranks shows what a longer sequence costs, and what each rank keeps for backward.
`--verify` trains the same model on plain torch.
"""
from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT
from torch import Tensor, nn

import globaltensor as gt

VOCAB, TOLERANCE = 256, 1e-4                         # every byte is a token; of --verify, relative


def spread(model: nn.Module, parts: list[Tensor], ranks: int) -> list[Tensor]:
    """The weights whole on every rank; inputs and targets [1, t] split along the sequence."""
    where = gt.placement("cpu", list(range(ranks)), axis_names=("sp",))
    gt.to_global(model, where, gt.sbp.broadcast)
    return [gt.from_full(part, where, {"sp": gt.sbp.split(1)}) for part in parts]


def train(model: nn.Module, parts: list[Tensor], steps: int) -> tuple[list[float], int, int]:
    """The losses; of the last step, bytes that attention moved to a rank, and bytes that rank 0 kept for backward."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        kept: dict[int, int] = {}
        with gt.record() as moves, torch.autograd.graph.saved_tensors_hooks(partial(keep, kept), lambda t: t):
            loss = F.cross_entropy(model(parts[0]).flatten(0, 1), parts[1].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(m.bytes for m in moves if "attention" in m.op), sum(kept.values())


def keep(kept: dict[int, int], t: Tensor) -> Tensor:
    """Note the size of what rank 0 has of an activation, once for all that share its memory."""
    shard = t.shards.get(0) if isinstance(t, gt.GlobalTensor) else t
    if shard is not None and not isinstance(t, nn.Parameter):
        kept[shard.untyped_storage().data_ptr()] = shard.untyped_storage().nbytes()
    return t


def main(argv: list[str] | None = None) -> list[tuple[int, int]]:
    """Train on 1, 2, 4, ... ranks; bytes moved and kept, by row."""
    parser = argparse.ArgumentParser(description="Train on one long sequence that is split over ranks.")
    for name, default, what in [("sp", 4, "most ranks"), ("seq", 2048, "length"), ("steps", 3, "optimizer steps"),
                                ("hidden", 32, "size of the one head")]:
        parser.add_argument(f"--{name}", type=int, default=default, help=what, metavar="N")
    parser.add_argument("--verify", action="store_true", help="compare the losses with plain torch's")
    options = parser.parse_args(argv)
    gt.init(ranks=options.sp)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()[:options.seq + 1]), dtype=torch.uint8).long()
    torch.manual_seed(0)
    fresh, parts = GPT(VOCAB, options.seq, 2, options.hidden, 1), [text[None, :-1].clone(), text[None, 1:].clone()]
    expected = train(copy.deepcopy(fresh), parts, options.steps)[0] if options.verify else []
    rows = []
    for ranks in [2 ** i for i in range(options.sp.bit_length())]:
        model = copy.deepcopy(fresh)
        losses, moved, kept = train(model, spread(model, parts, ranks), options.steps)
        apart = max((abs(a - b) / b for a, b in zip(losses, expected)), default=0.0)
        rows.append((moved, kept))
        if gt.rank() == 0:
            print(f"sp {ranks:2}   loss {losses[-1]:.6f}   attention moved {moved:10,} bytes   a rank keeps {kept:10,}"
                  + f"   difference {apart:.1e}" * options.verify, flush=True)
        if not apart <= TOLERANCE:                   # not a number is not either
            sys.exit(f"long_context.py: losses on {ranks} ranks and on plain torch differ by {apart:.1e}")
    return rows


if __name__ == "__main__":
    main()
