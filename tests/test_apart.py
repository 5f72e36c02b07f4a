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
    "grad mode": ("aten.", "under no_grad, "),
    "training mode": ("aten.", "of another tensor"),
    "scalar, an integer": ("aten.mul.Tensor(2)", "aten.mul.Tensor(3)"),
    "seed of dropout": ("with random numbers of seed 1, ", "with random numbers of seed 2, "),
    "order of parameters": ("of the same tensors in another order", "of the same tensors in another order"),
}
# where all ranks are at one line: why they disagree
AT_ONE_LINE = {**dict.fromkeys(["scalar", "scalar, an integer", "seed of dropout", "learning rate of SGD"], (
                   "why:   they are at one line, and what they move there was computed by different calls before it: ",
                   "try:   the same numbers, seeds and calls on every rank; GLOBALTENSOR_CHECK=1 also shows the line")),
               "order of parameters": ("why:   they move the same tensors in different orders", "one order on every")}
QUICK = ["order in a loop", "order when warm", "owner of an index", "inputs of a pipeline", "a step left out",
         "a rank prints", "a rank computes for itself", "a rank records",
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
            assert all(words in text for words in AT_ONE_LINE.get(way, ())), text


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_the_line_of_the_call_is_told_where_it_was_noted():
    for _, _, text in outcomes(["scalar"], GLOBALTENSOR_CHECK="1")["scalar"]:
        assert all(re.search(rf"rank .* since aten.mul.Tensor\({number}\) at \S*apart.py:\d+, ", text)
                   for number in (0.5, 0.25)) and "GLOBALTENSOR_CHECK" not in text, text


@pytest.mark.long
@pytest.mark.parametrize("size, native, per_host", [(2, "1", 2), (4, "1", 4), (2, "0", 2), (3, "1", 1), (4, "1", 2)])
def test_every_way_to_part(size, native, per_host):
    ended = outcomes([], size, GLOBALTENSOR_NATIVE=native, PER_HOST=str(per_host))
    assert len(ended) >= 48
    for way, ranks in ended.items():
        check(way, ranks)
