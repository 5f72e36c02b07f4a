"""Ranks that do not do the same raise, all of them within seconds, and are told in what; what harms nobody goes on."""
from __future__ import annotations

import json
import re

import pytest
from harness import PROGRAMS, PYTHON, ROOT, environment, good

from globaltensor.runtime.native import torch_ext

ODD = "1"                                            # the rank that goes its own way
SECONDS = 20                                         # less than 5 alone; other tests may keep all cores busy
# of boxings over shared memory: what each rank is told that it did otherwise than the other
TOLD = {
    "order of lines": ("of another tensor, that of aten.view", "of another tensor, tensor number 2"),
    "index of a whole tensor": ("aten.select.int(0, 0)", "aten.select.int(0, 7)"),
    "scalar": ("aten.mul.Tensor(0.5)", "aten.mul.Tensor(0.25)"),
    "scalar, long ago": (r"aten.mul.Tensor(0.5), 101 calls ago", r"aten.mul.Tensor(0.25), 101 calls ago"),
    "alpha": ("aten.add.Tensor(1)", "aten.add.Tensor(2)"),
    "learning rate of SGD": ("aten._foreach_add_.List(-0.1)|aten.add_.Tensor(-0.1)",
                             "aten._foreach_add_.List(-0.2)|aten.add_.Tensor(-0.2)"),
    "grad mode": ("aten.", "aten."),
    "training mode": ("aten.", "of another tensor"),
}
QUICK = ["order in a loop", "order when warm", "owner of an index", "inputs of a pipeline", "a step left out",
         "seed of dropout", "a rank prints", "a rank computes for itself", "a rank records",
         "a rank copies", "index of a copy"]


def outcomes(ways: list[str], size: int = 2, **env: str) -> dict[str, list]:
    path = f"{ROOT / 'tests'}"
    out = good([PYTHON, PROGRAMS / "apart.py", size, *ways], environment(
        PYTHONPATH=f"{ROOT}:{path}", **env), timeout=900)
    return json.loads(out.splitlines()[-1])


def check(way: str, ranks: list) -> None:
    """All raise in time; the odd rank and at least one other in what they disagree, of which both are named."""
    told: set[str] = set()
    for rank, (code, seconds, text) in enumerate(ranks):
        if "a rank " in way:
            assert code == 0 and "the value is there" in text, f"{way}, rank {rank}: {text}"
            continue
        assert code == 1 and "the value is there" not in text, f"{way}, rank {rank}: {code} {text}"
        assert seconds < SECONDS, f"{way}, rank {rank}: {seconds} seconds"
        named = set(re.findall(r"rank (\d+)(?::| waits)", text))
        if re.search(r"(Disagreement|Shape)Error: ", text):
            assert ODD in named and len(named) > 1, f"{way}, rank {rank}: {text}"
            told.add(str(rank))
        else:                                        # it met neither, and one of them has ended
            assert "TransportError: " in text and len(ranks) > 2, f"{way}, rank {rank}: {text}"
    assert "a rank " in way or (ODD in told and len(told) > 1), f"{way}: {ranks}"


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_ranks_that_went_apart_are_told_in_what():
    ended = outcomes([*TOLD, *QUICK])
    for way, ranks in ended.items():
        check(way, ranks)
    for way, told in TOLD.items():
        for _, _, text in ended[way]:
            for rank, choices in enumerate(told):
                row = next(line for line in text.splitlines() if f"    rank {rank}:" in line)
                assert any(words in row for words in choices.split("|")), f"{way}: {row}"


@pytest.mark.long
@pytest.mark.parametrize("size, native, per_host", [(2, "1", 2), (4, "1", 4), (2, "0", 2), (3, "1", 1), (4, "1", 2)])
def test_every_way_to_part(size, native, per_host):
    ended = outcomes([], size, GLOBALTENSOR_NATIVE=native, PER_HOST=str(per_host))
    assert len(ended) >= 48
    for way, ranks in ended.items():
        check(way, ranks)
