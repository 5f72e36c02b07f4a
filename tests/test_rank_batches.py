"""Batches that ranks read for themselves, against DDP's program and against rows put together by hand."""
from __future__ import annotations

import random
from collections import namedtuple

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good, results
from shards import gather, place
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import globaltensor as gt
from globaltensor.errors import GlobalTensorError, SbpError, ShapeError

S, B = gt.sbp.split, gt.sbp.broadcast
Pair = namedtuple("Pair", "x label")
SEED = 4


def lay_out(rows, place_of_x):
    """A batch of these rows, in one of several structures."""
    label = torch.tensor(rows, dtype=torch.int64)
    x = torch.stack([label, label + 0.5], 1)
    return {"tuple": (x, label), "list": [x, label], "dict": {"x": x, "label": label}, "named": Pair(x, label),
            "nested": {"deep": [{"x": x}, (label, ["words"])]}, "alone": x}[place_of_x]


def x_of(batch):
    """The tensor x of such a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "named", "nested", "alone"])
@pytest.mark.parametrize("ranks, names, sbp", [
    ([0], None, S(0)), ([0, 1, 2], None, S(0)), ([2, 0, 1], None, S(0)), ([0, 1], None, B),
    ([[0, 1], [2, 3]], ("dp", "tp"), {"dp": S(0)}), ([[0, 1], [2, 3]], ("dp", "tp"), {"tp": S(0)}),
    ([[0, 1], [2, 3]], ("a", "b"), (S(0), S(0)))], ids=str)
def test_the_rows_of_the_ranks_in_their_order(ranks, names, sbp, kind):
    where, luck = place(ranks, names), random.Random(SEED)
    print("seed", SEED)
    read = {r: [list(range(100 * r + 10 * k, 100 * r + 10 * k + luck.randrange(4))) for k in range(luck.randrange(4))]
            for r in where.flat}
    loader = gt.data.from_ranks(lambda r: [lay_out(rows, kind) for rows in read[r]], where, sbp)
    split = [s.is_split for s in loader.sbp]
    heads = [r for r, at in where.coords.items() if all(i == 0 or cut for i, cut in zip(at, split))]
    for _ in range(2):                               # an epoch after the other
        got = list(loader)
        assert len(got) == max(len(read[r]) for r in heads)
        for k, batch in enumerate(got):
            x = x_of(batch)
            rows = [row for r in heads for row in (read[r][k] if k < len(read[r]) else [])]
            assert type(batch) is type(lay_out([0], kind)) or kind == "alone"
            assert x.sbp == loader.sbp and x.placement == where
            want = x_of(lay_out(rows, "alone"))
            assert torch.equal(x.full_tensor(), want) and torch.equal(gather(x), want)


def test_rows_stay_where_they_are_where_the_library_cuts_so():
    where = place([0, 1, 2])
    with gt.record() as moves:
        for rows in ([[0, 1], [2, 3], [4, 5]], [[0, 1], [2], [3]], [[0], [], []]):
            next(iter(gt.data.from_ranks(lambda r, rows=rows: [torch.tensor(rows[r], dtype=torch.int64)], where)))
        assert not moves
        next(iter(gt.data.from_ranks(lambda r: [torch.arange(3 * r)], where)))
    assert [m.bytes for m in moves] == [24]          # of 0, 3 and 6 rows, 3 reach the first rank


def test_len_is_that_of_the_longest():
    where, data = place([0, 1]), TensorDataset(torch.arange(10.0))
    assert len(gt.data.from_ranks(lambda r: DataLoader(data, 2 + r), where)) == 5
    with pytest.raises(TypeError, match="len"):
        len(gt.data.from_ranks(lambda r: iter([]), where))


class Stream(IterableDataset):
    """Rows of ones, of a number that nobody is told."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        yield from torch.ones(self.n, 3)


def test_loaders_of_streams():
    batches = gt.data.from_ranks(lambda r: DataLoader(Stream(4 + 3 * r), 2), place([0, 1]))
    assert [tuple(x.shape) for x in batches] == [(4, 3), (4, 3), (2, 3), (1, 3)]
    with pytest.raises(TypeError, match="len"):
        len(batches)


MISTAKES = {
    "one loader for several ranks": (lambda: gt.data.from_ranks([], place([0, 1])), GlobalTensorError, "lambda rank:"),
    "a partial sum": (lambda: gt.data.from_ranks([], place([0]), gt.sbp.partial_sum), SbpError, "split(0)"),
    "another dim": (lambda: gt.data.from_ranks([], place([0]), S(1)), SbpError, "0"),
    "places": (lambda: loop({"x": torch.ones(2)}, {"y": torch.ones(2)}), ShapeError, "batch['y']"),
    "lengths": (lambda: loop((torch.ones(2), torch.ones(3)), None), ShapeError, "collate_fn"),
    "numbers": (lambda: loop(torch.tensor(1.0), None), ShapeError, "collate_fn"),
    "sizes of samples": (lambda: loop(torch.ones(2, 3), torch.ones(2, 4)), ShapeError, "pads"),
    "dtypes": (lambda: loop(torch.ones(2), torch.ones(2, dtype=torch.int64)), ShapeError, "dtype"),
    "meta": (lambda: loop(torch.ones(2), torch.ones(2, device="meta")), GlobalTensorError, "memory"),
}


def loop(first, second):
    return list(gt.data.from_ranks(lambda r: [second if r else first], place([0, 1])))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name):
    program, kind, text = MISTAKES[name]
    with pytest.raises(kind) as raised:
        program()
    assert text in str(raised.value) and "test_rank_batches.py" in raised.value.where


def test_an_error_of_the_loader_is_the_users_own():
    class Luck(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            raise KeyError("bad luck")

    with pytest.raises(KeyError, match="bad luck"):
        list(gt.data.from_ranks(lambda r: DataLoader(Luck(), 2), place([0, 1])))


# --------------------------------------------------------------------------------------------- real processes


@pytest.mark.processes
def test_processes_put_their_batches_together(tmp_path):
    good([*RUN, "-n", 2, PROGRAMS / "rank_batches.py", tmp_path])
    by_rank = results(tmp_path)
    assert sorted(by_rank) == [0, 1]
    for rank, told in by_rank.items():
        assert told["seen"] == told["expected"]
        for name, (kind, text) in told["errors"].items():
            own = {"luck": "ValueError", "rows": "ShapeError"}.get(name) if rank == 1 else None
            ours = ("luck", "rows", "class", "global")
            assert kind == (own or ("GlobalTensorError" if name in ours else "ShapeError")), text
            assert own or name == "global" or ("rank 1 had no batch" if name == "class" else "rank 1:") in text, text


@pytest.mark.long
@pytest.mark.processes
def test_the_program_of_torchs_tutorials_with_one_line_changed(tmp_path):
    """Losses and parameters as DDP's over gloo, of the same samples, in two processes and in one."""
    program, ways = PROGRAMS / "tutorial.py", ("ddp", "global", "one process")
    for way in ways:
        (tmp_path / way).mkdir()
    for way in ways[:2]:
        good([*RUN, "-n", 2, program, way, tmp_path / way])
    good([PYTHON, program, ways[2], tmp_path / ways[2]], environment(GLOBALTENSOR_RANKS="2"))
    ddp, many, one = (results(tmp_path / way) for way in ways)
    assert len(ddp[0]["losses"]) == 2 * ddp[0]["len"] == 6
    for rank in (0, 1):
        assert many[rank]["read"] == ddp[rank]["read"] and len(ddp[rank]["read"]) == 22
    assert sorted(one[0]["read"]) == sorted(ddp[0]["read"] + ddp[1]["read"])
    for told in (*many.values(), *one.values()):
        assert told["len"] == ddp[0]["len"]
        torch.testing.assert_close(torch.tensor(told["losses"]), torch.tensor(ddp[0]["losses"]), rtol=1e-6, atol=1e-6)
        for got, want in zip(told["parameters"], ddp[0]["parameters"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)
