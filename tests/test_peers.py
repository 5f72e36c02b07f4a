"""The cases of peers' own tests: operator, sizes, layouts, as tables, against plain torch.

    data/oneflow_cases.csv    OneFlow, python/oneflow/test/modules/test_global_*.py
    data/dtensor_cases.csv    torch, test/distributed/tensor/test_*.py

A row is one call: its source, the op, the ranks, the operands ("float32 16x8 -1..1 grad": dtype, sizes, range, whether
its gradient is compared), the arguments as JSON, in which {"$": 0} is the first operand, and the layouts of the
operands. Values are drawn anew; floats are drawn as float64, so that rounding hides nothing. `make test-peers` runs the
peers' files themselves.
"""
from __future__ import annotations

import csv
import json
import os
import re
import zlib
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PYTHON, ROOT, run
from torch.utils._pytree import tree_leaves

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

SEED = int(os.environ.get("PEERS_SEED") or 20_261_122)
print(f"tests/test_peers.py: PEERS_SEED={SEED}")
DATA = Path(__file__).parent / "data"
PEERS = ["oneflow", "dtensor"]


@cache
def rows(peer: str) -> list[dict[str, str]]:
    with open(DATA / f"{peer}_cases.csv", newline="") as file:
        return list(csv.DictReader(file))


def operands(row: dict[str, str]) -> Iterator[torch.Tensor]:
    """Plain tensors as the row tells."""
    generator = torch.Generator().manual_seed(SEED ^ zlib.crc32(str(row).encode()))
    for text in row["operands"].split("; "):
        dtype, size, *rest = text.split()
        shape = [] if size == "0-dim" else [int(n) for n in size.split("x")]
        low, high = next(([float(n) for n in part.split("..")] for part in rest if ".." in part), (0, 1))
        t = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            yield t.requires_grad_("grad" in rest)
        elif kind.is_complex:
            yield torch.complex(t, 1 - t)
        else:
            yield t.round().to(kind) if kind is not torch.bool else t > 0.5


def read(value: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument from its JSON."""
    if isinstance(value, list):
        return [read(v, tensors) for v in value]
    if isinstance(value, dict):
        (kind, own), = value.items()
        if kind == "$":
            return tensors[own]
        if kind == "dtype":
            return torch.float64 if own == "float32" else getattr(torch, own)
        return ... if own == "..." else slice(*own)
    return value


def call(row: dict[str, str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results, and the gradients of the operands."""
    arguments = json.loads(row["arguments"])
    args = [tuple(a) if isinstance(a, list) and "etitem" in row["op"] else a
            for a in read(arguments["args"], [t.clone() for t in tensors])]
    kwargs = {name: read(value, tensors) for name, value in arguments.get("kwargs", {}).items()}
    torch.manual_seed(SEED)
    result = attrgetter(row["op"].removeprefix("torch."))(torch)(*args, **kwargs)
    results = [t for t in tree_leaves(args[0] if result is None else result) if isinstance(t, torch.Tensor)]
    if any(t.requires_grad for t in results):
        sum((t * t).sum() for t in results if t.requires_grad).backward()
    return [whole(t) for t in results] + [whole(t.grad) for t in tensors if t.grad is not None]


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().full_tensor() if t.is_global else t.detach()


def sbps(text: str) -> list[Any]:
    """S(0)B as sbps."""
    kinds = {"B": gt.sbp.broadcast, "P": gt.sbp.partial_sum}
    return [kinds[part[0]] if part[0] in kinds else gt.sbp.split(int(part[2:-1]))
            for part in re.findall(r"S\(\d+\)|B|P", text)]


def lay(t: torch.Tensor, where: Any, text: str) -> torch.Tensor:
    if text == "plain":
        return t.detach().clone().requires_grad_(t.requires_grad)
    return gt.from_full(t.detach(), where, sbps(text)).requires_grad_(t.requires_grad)


def wrong(row: dict[str, str]) -> tuple[list[str], int]:
    """What differs from plain torch, layout by layout, and how many layouts there are."""
    plain, texts = list(operands(row)), row["layouts"].split(" | ")
    try:
        expected = call(row, [deepcopy(t) for t in plain])
    except (RuntimeError, ValueError, IndexError) as error:
        return [f"plain torch refuses it: {error!r}"[:200]], len(texts)
    where, said = gt.placement("cpu", json.loads(row["ranks"])), []
    for layouts in texts:
        try:
            ours = [lay(t, where, text) for t, text in zip(plain, layouts.split(", "), strict=True)]
            torch.testing.assert_close(call(row, ours), expected, equal_nan=True)
        except (AssertionError, RuntimeError, GlobalTensorError, IndexError, TypeError, ValueError) as error:
            case = f"{row['source']} {row['op']} [{row['operands']}] {row['arguments']} {layouts}"
            said.append(f"{case}: {error!r}"[:600])
    return said, len(texts)


def check(peer: str, some: list[dict[str, str]]) -> None:
    said, count = [], 0
    for row in some:
        differences, n = wrong(row)
        said += differences
        count += n
    print(f"{peer}: {len(some)} calls in {count} layouts, {len(said)} wrong")
    assert not said, "\n".join(said[:30])


@pytest.mark.parametrize("peer", PEERS)
def test_a_handful_of_a_peer_s_cases(peer):
    check(peer, rows(peer)[::len(rows(peer)) // 15])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("peer", PEERS)
def test_all_of_a_peer_s_cases(peer, part):
    check(peer, rows(peer)[part::8])


FILE = """
import oneflow as flow
import oneflow.unittest
from oneflow.test_utils.automated_test_util import *

@autotest(n=1)
def program(test_case, placement, sbp):
    x = random_tensor(2, 8, random(1, 3) * 8).to_global(placement=placement, sbp=sbp)
    return x.relu() + (WRONG if x.is_global else 0)

class Test(flow.unittest.TestCase):
    def test_it(test_case):
        for placement in all_placement():
            for sbp in all_sbp(placement, max_dim=2):
                program(test_case, placement, sbp)
"""


@pytest.mark.long
def test_files_of_oneflow_run(tmp_path):
    """One that passes, one that compares what differs, one that asks for what is OneFlow's alone."""
    folder = tmp_path / "oneflow" / "python" / "oneflow" / "test" / "modules"
    folder.mkdir(parents=True)
    for name, text in (("good", FILE.replace("WRONG", "0")), ("bad", FILE.replace("WRONG", "1")),
                       ("other", FILE.replace("WRONG", "flow.no_such_function()"))):
        (folder / f"test_global_{name}.py").write_text(text)
    code, out, err = run([PYTHON, ROOT / "tests" / "peers" / "run.py", tmp_path / "oneflow"])
    assert code == 1, err
    assert "test_global_good.py  1 passed  0 failed  0 skipped  20 compared" in out
    assert "test_global_bad.py  0 passed  1 failed" in out and "oneflow.no_such_function is none of torch's" in out
