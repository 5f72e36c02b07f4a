"""The cases of test_moves.py: an op of the table, a sample, and layouts of its tensors on two ranks."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from rule_samples import ELSEWHERE, SAMPLES, made, name_of
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from globaltensor.op_table.table import TABLE

RANKS = 2


def cases() -> Iterator[tuple]:
    """Name of an op, the op, a function from tensors to arguments, the tensors, and the layouts to try them in."""
    for func in TABLE:
        name = name_of(func)
        if name not in SAMPLES or name in ELSEWHERE:
            continue
        drawn = [made(list(sample), torch.Generator().manual_seed(0)) for sample in SAMPLES[name]]
        most = max(drawn, key=lambda one: sum(isinstance(v, torch.Tensor) for v in tree_leaves(one)))
        values, tree = tree_flatten(most)
        at = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]

        def arguments(tensors: list, values=values, tree=tree, at=at) -> tuple:
            own = dict(zip(at, tensors))
            return tree_unflatten([own.get(i, v) for i, v in enumerate(values)], tree)

        tensors = [values[i] for i in at]
        yield name, func, arguments, tensors, layouts(tensors)


def layouts(tensors: list[torch.Tensor]) -> list[tuple[str, ...]]:
    """All tensors split along a dim, or pending; the first alone; the last alone; the rest broadcast."""
    many = []
    for sbp in ("S(0)", "S(1)", "S(2)", "P"):
        can = [t.is_floating_point() if sbp == "P" else t.dim() > int(sbp[2]) for t in tensors]
        many += [tuple(sbp if can[q] and q in which else "B" for q in range(len(tensors)))
                 for which in (range(len(tensors)), [0], [len(tensors) - 1])]
    return [each for each in dict.fromkeys(many) if set(each) != {"B"}]
