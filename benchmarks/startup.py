"""What a program waits for before it works: `import globaltensor`, the first op, the first training step.

CPU time, in fresh processes, plain torch and global tensors in turns; medians. Target: importing the package
takes at most 0.15 of the time of `import torch`.
"""
from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.timing import show

CODE = """
import time
laps = [time.process_time()]
lap = lambda: laps.append(time.process_time())
import torch
lap()
if {ours}:
    import globaltensor as gt
lap()
x = torch.ones(4, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
if {ours}:
    P = gt.placement("cpu", [0, 1])
    x, model = gt.from_full(x, P, gt.sbp.split(0)), gt.to_global(model, P, gt.sbp.broadcast)
    optimizer = torch.optim.AdamW(model.parameters())
lap()
x + x
lap()
model(x).square().mean().backward()
optimizer.step()
lap()
print(*(b - a for a, b in zip(laps, laps[1:])))
"""


def lap(ours: bool) -> list[float]:
    """Seconds of `import torch`, `import globaltensor`, the set-up, the first op, the first step of a small model."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", CODE.format(ours=ours)], env=env, capture_output=True, text=True,
                          check=True, timeout=120)
    return [float(word) for word in done.stdout.split()]


def main(json: bool = False, quick: bool = False) -> None:
    lap(ours=True)                                   # writes the bytecode, which an installed package has
    laps = [(lap(False), lap(True)) for _ in range(1 if quick else 7)]
    plain, ours = ([statistics.median(seconds) for seconds in zip(*side)] for side in zip(*laps))
    whats = ("import torch", "import globaltensor", "a model and AdamW", "first op, x + x", "first training step")
    show("startup: CPU time",
         [{"what": what, "ms": mine * 1e3, "plain torch ms": theirs * 1e3, "of import torch": mine / ours[0]}
          for what, mine, theirs in zip(whats, ours, plain)], json)


if __name__ == "__main__":
    main()
