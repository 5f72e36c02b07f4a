"""Write a small project to start from: a program that trains, its plan, and a test.

    globaltensor new my_project
    cd my_project
    python train.py                        one process drives all 4 ranks
    globaltensor run -n 4 train.py         one process per rank
    python -m pytest                       the same losses as plain torch on one device

The folder must be new or empty. The last part of its path is the name of the project.
"""
from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from globaltensor.cli.problem import Problem, unwritable

_TRAIN = '''\
"""{name}: trains a small network on 4 ranks, data parallel 2 x tensor parallel 2.

    python train.py                        one process drives all ranks
    globaltensor run -n 4 train.py         one process per rank
"""
from pathlib import Path

import torch
from torch import nn

import globaltensor as gt

PLAN = Path(__file__).with_name("plan.txt")          # how the parameters are laid out, as gt.Plan.of says


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step):                                     # the same in every process; replace it by your data
    points = 4 * torch.rand(256, 2, generator=torch.Generator().manual_seed(step)) - 2
    return points, torch.sin(points.sum(1, keepdim=True))


def train(model, lay_out=lambda tensor: tensor, steps=100):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        x, y = map(lay_out, batch(step))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if gt.rank() == 0 and step % 20 == 0:
            print(f"step {{step:3}}   loss {{losses[-1]:.4f}}")
    return losses


def train_on_ranks():
    ranks = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))                   # "cuda" for GPUs
    model = gt.parallelize(network(), ranks, gt.Plan.load(PLAN))
    return train(model, lambda tensor: gt.from_full(tensor, ranks, {{"dp": gt.sbp.split(0), "tp": gt.sbp.broadcast}}))


if __name__ == "__main__":
    train_on_ranks()
'''
_PLAN = '''\
# name     tp
0.weight   S(0)
0.bias     S(0)
2.weight   S(1)
'''
_TEST = '''\
"""The network learns, and on 4 ranks it learns what it learns with plain torch on one device."""
from train import network, train, train_on_ranks


def test_ranks_learn_what_one_device_learns():
    expected, losses = train(network()), train_on_ranks()
    assert all(abs(loss - other) < 1e-3 * (1 + other) for loss, other in zip(losses, expected)), (losses, expected)
    assert losses[-1] < losses[0] / 10


if __name__ == "__main__":
    test_ranks_learn_what_one_device_learns()
'''
FILES = {"train.py": _TRAIN, "plan.txt": _PLAN, "test_train.py": _TEST}


def command(chosen: argparse.Namespace) -> int:
    """Write the files, and say what to type next."""
    folder = Path(chosen.folder)
    name = check_name(folder)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise Problem(f"{folder} is not empty\n  try: {_suggestion(folder, f'{name}_2')}")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in FILES.items():
            (folder / file).write_text(text.format(name=name) if file == "train.py" else text, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from None
    if chosen.json:
        print(json.dumps({"folder": str(folder), "files": list(FILES)}, indent=2))
        return 0
    steps = (f"cd {shlex.quote(str(folder))}", "python train.py", "globaltensor run -n 4 train.py",
             "python test_train.py")
    print("\n  ".join([f"Wrote {', '.join(FILES)}. Now type:\n", *steps]))
    return 0


def check_name(folder: Path) -> str:
    """The name of the project. Raises Problem where it would be trouble to have."""
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        better = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_-0123456789") or "my_project"
        raise Problem(f"{name!r} is not a name for a project, which begins with a letter and has letters, digits, "
                      f"- and _\n  try: {_suggestion(folder, better)}")
    if name in sys.stdlib_module_names or name in ("globaltensor", "numpy", "torch"):
        raise Problem(f"{name!r} is the name of a Python module, which a folder of that name would hide\n"
                      f"  try: {_suggestion(folder, f'my_{name}')}")
    return name


def _suggestion(folder: Path, name: str) -> str:
    return f"globaltensor new {shlex.quote(str(folder.parent / name if folder.name not in ('', '..') else name))}"
