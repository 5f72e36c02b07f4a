"""Data loading against plain torch: batches, tails, order, state, reads, randomness, workers, real processes."""
from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter, namedtuple

import numpy
import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good, results
from shards import gather, place
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import globaltensor as gt
from globaltensor.data import DataLoader, Sampler
from globaltensor.data.seeding import mix
from globaltensor.errors import GlobalTensorError, SbpError, ShapeError

S, B = gt.sbp.split, gt.sbp.broadcast

ONE = [([0], None, S(0)), ([0, 1], None, S(0)), ([0, 1, 2], None, S(0)), ([2, 0], None, S(0)), ([0, 1], None, B)]
GRID = [([[0, 1], [2, 3]], ("dp", "tp"), sbp) for sbp in (
    {"dp": S(0)}, {"tp": S(0)}, (S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (B, B), (S(2), S(1)), (S(0), S(2)),
    (B, S(1)))]


class Samples(Dataset):
    """Sample i: x [6, 3] of values that tell i, its label i. Remembers what was read."""

    def __init__(self, n):
        self.n, self.read = n, Counter()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read[i] += 1
        return torch.arange(18.0).view(6, 3) + 100 * i, i


def at(epoch, position, samples):
    """The state of a loader there."""
    return {"epoch": epoch, "position": position, "samples": samples}


def plain(dataset, sampler):
    """The batches that plain torch makes of an epoch."""
    return [default_collate([dataset[i] for i in indices]) for indices in sampler]


def same(got, want):
    """A batch of global tensors holds exactly the values of a plain one."""
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert x.is_global and x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(gather(x), y) and torch.equal(x.full_tensor(), y)
        assert all(shard.is_contiguous() for shard in x.shards.values())


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("ranks, names, sbp", ONE + GRID, ids=str)
@pytest.mark.parametrize("n, batch", [(12, 4), (11, 3), (7, 5), (9, 8), (2, 4), (5, 1), (0, 2)])
def test_batches_are_those_of_plain_torch(ranks, names, sbp, n, batch):
    where = place(ranks, names)
    for tail in ("exact", "pad", "drop"):
        dataset = Samples(n)
        loader = DataLoader(dataset, batch, where, sbp, shuffle=True, seed=3, tail=tail)
        want = plain(Samples(n), Sampler(n, batch, shuffle=True, seed=3, tail=tail))
        got = list(loader)
        assert len(got) == len(want) == len(loader)
        for x, y in zip(got, want):
            same(x, y)
            assert x[0].placement is where or x[0].placement == where
        times = Counter(i for indices in Sampler(n, batch, shuffle=True, seed=3, tail=tail) for i in indices)
        assert dataset.read == times, "each sample is read once, however many ranks hold it"


def test_the_sbp_of_each_tensor():
    where = place([[0, 1], [2, 3]], ("dp", "sp"))
    x, label = next(iter(DataLoader(Samples(5), 5, where, {"dp": S(0), "sp": S(1)})))
    assert x.sbp == (S(0), S(1)) and label.sbp == (S(0), B)
    assert [tuple(x.shards[r].shape) for r in range(4)] == [(3, 3, 3), (3, 3, 3), (2, 3, 3), (2, 3, 3)]
    assert [label.shards[r].tolist() for r in range(4)] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    label.shards[0].add_(1)
    assert label.shards[1].tolist() == [0, 1, 2], "ranks have no memory in common"


def test_batches_move_nothing():
    with gt.record() as moves:
        list(DataLoader(Samples(7), 3, place([[0, 1], [2, 3]], ("dp", "sp")), {"dp": S(0), "sp": S(1)}))
    assert not moves


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    words: list


def words(n=5):
    return [{"x": torch.full((2,), float(i)), "pair": (i, [float(i), torch.tensor(i)]), "word": f"w{i}",
             "named": Pair(i, f"n{i}")} for i in range(n)]


def test_nested_samples_keep_their_structure():
    where = place([0, 1, 2])
    got = next(iter(DataLoader(words(), 5, where, S(0))))
    want = default_collate(words())
    assert list(got) == list(want) and got["word"] == want["word"] == [f"w{i}" for i in range(5)]
    same([got["x"], got["pair"][0], *got["pair"][1]], [want["x"], want["pair"][0], *want["pair"][1]])
    assert isinstance(got["named"], Pair) and got["named"].right == want["named"].right
    same([got["named"].left], [want["named"].left])


def test_collate_fn_of_the_user():
    def collate(samples):
        x, _ = default_collate(samples)
        return Record(x, ["w"] * len(samples)), (6, 3), None, {"n": 5}

    record, size, nothing, n = next(iter(DataLoader(Samples(5), 5, place([0, 1]), S(0), collate_fn=collate)))
    assert isinstance(record, Record) and record.words == ["w"] * 5 and (size, nothing, n) == ((6, 3), None, {"n": 5})
    same([record.x], [default_collate([Samples(5)[i] for i in range(5)])[0]])


# -------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_the_seed_and_the_epoch(shuffle):
    def epochs(batch, seed=5):
        sampler = Sampler(11, batch, shuffle=shuffle, seed=seed)
        return [[i for indices in sampler for i in indices] for _ in range(3)]

    assert epochs(2) == epochs(4) == epochs(11) == epochs(64)
    for e, order in enumerate(epochs(3)):
        oracle = torch.randperm(11, generator=torch.Generator().manual_seed(mix(5, e))).tolist()
        assert order == (oracle if shuffle else list(range(11)))
    if shuffle:
        distinct = epochs(3) + epochs(3, seed=6)
        assert len({tuple(order) for order in distinct}) == 6


def test_mix_is_splitmix64():
    assert mix(0) == 0xE220A8397B1DCDAF and mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4    # its first two values
    assert mix(-1) == mix(2 ** 64 - 1) and len({mix(a, b) for a in range(50) for b in range(50)}) == 2500


@pytest.mark.parametrize("n, batch, tail, want", [
    (7, 3, "exact", [[0, 1, 2], [3, 4, 5], [6]]), (7, 3, "drop", [[0, 1, 2], [3, 4, 5]]),
    (7, 3, "pad", [[0, 1, 2], [3, 4, 5], [6, 0, 1]]), (2, 5, "pad", [[0, 1, 0, 1, 0]]), (2, 5, "drop", []),
    (6, 3, "pad", [[0, 1, 2], [3, 4, 5]]), (0, 3, "pad", []), (0, 3, "exact", [])])
def test_tails(n, batch, tail, want):
    sampler = Sampler(n, batch, tail=tail)
    assert list(sampler) == want and len(sampler) == len(want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_grow_and_shrink_between_epochs(shuffle, workers):
    """Each epoch has the samples that torch's own loader finds, and a state goes on from any of them."""
    values = [torch.tensor([float(i)]) for i in range(4)]

    def load():
        return DataLoader(values, 3, place([0, 1]), S(0), shuffle=shuffle, num_workers=workers)

    def epoch(loader):
        return [gather(batch).flatten().tolist() for batch in loader]

    ours, torchs = load(), torch.utils.data.DataLoader(values, 3)
    for change in (lambda: None, lambda: values.extend(torch.arange(4.0, 9).split(1)), lambda: values.__delitem__(
            slice(2, None)), values.clear, lambda: values.extend(torch.arange(5.0).split(1))):
        change()
        assert len(ours) == len(torchs)
        again = load()
        again.load_state_dict(ours.state_dict())
        got = epoch(ours)
        assert sorted(sum(got, [])) == sorted(x for batch in torchs for x in batch.flatten().tolist())
        assert epoch(again) == got and len(got) == len(torchs)
    next(iter(ours))                                 # broken off
    values += torch.arange(5.0, 7).split(1)
    assert len(sum(epoch(ours), [])) == 7
    next(iter(ours))
    state = ours.state_dict()
    ours.load_state_dict(state)
    values.pop()
    with pytest.raises(gt.GlobalTensorError, match="6 samples that had 7"):
        iter(ours)
    ours.set_epoch(9)
    assert len(sum(epoch(ours), [])) == 6


def test_epochs_follow_each_other():
    """One that was gone through is followed by the next, one that was broken off is begun again."""
    sampler = Sampler(5, 2, shuffle=True)
    first = list(sampler)
    assert sampler.epoch == 1, "between iterations it is the next one"
    second = list(sampler)
    assert sampler.epoch == 2 and second != first
    next(iter(sampler))
    assert sampler.epoch == 2 and sampler.state_dict() == at(2, 2, 5)
    third = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(2)
    assert list(sampler) == third
    dropping = Sampler(2, 5, tail="drop")
    assert list(dropping) == list(dropping) == [] and dropping.epoch == 2


def test_a_sampler_of_the_user():
    class Weighted(Sampler):
        def order(self, epoch):
            generator = torch.Generator().manual_seed(epoch)
            return torch.multinomial(torch.tensor([0.1, 0.9, 0.5]), self.n, True, generator=generator)

    loader = DataLoader(Samples(3), 4, place([0, 1]), S(0), sampler=Weighted(10, 4))
    got = torch.cat([label.full_tensor() for _, label in loader])
    assert torch.equal(got, Weighted(10, 4).order(0))


# -------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_resume_goes_on_with_the_next_batch(after, workers):
    """On other ranks, with another batch size and tail; what workers have prefetched is not counted."""
    def epoch_of(loader):
        return [i for _, label in loader for i in label.full_tensor().tolist()]

    orders = [torch.randperm(11, generator=torch.Generator().manual_seed(mix(9, e))).tolist() for e in range(3)]
    options = {"shuffle": True, "seed": 9, "num_workers": workers}
    first = DataLoader(Samples(11), 4, place([0, 1]), S(0), **options)
    taken, seen = 0, []
    while taken < after:
        for _, label in first:
            taken, seen = taken + 1, seen + label.full_tensor().tolist()
            if taken == after:
                break
    state = first.state_dict()
    everything = [i for order in orders for i in order]
    assert state["epoch"] * 11 + state["position"] == len(seen) and seen == everything[:len(seen)]
    second = DataLoader(Samples(11), 3, place([2, 0, 1]), S(0), **{**options, "num_workers": 0})
    second.load_state_dict(state)
    for epoch in range(second.epoch, 3):
        second.set_epoch(epoch)
        seen += epoch_of(second)
    assert seen == everything


# how a program counts its epochs, from the one that it was in when it saved
COUNTS = {
    "its own": lambda loader, start: iter(range(start, EPOCHS)),
    "its own, set": lambda loader, start: (loader.set_epoch(e) or e for e in range(start, EPOCHS)),
    "the loader's": lambda loader, start: iter(range(loader.epoch, EPOCHS)),
    "the loader's, set": lambda loader, start: (loader.set_epoch(e) or e for e in range(loader.epoch, EPOCHS)),
    "asks the loader": lambda loader, start: iter(lambda: loader.epoch if loader.epoch < EPOCHS else None, None),
}
EPOCHS = 3
MOMENTS = ("before the first batch", "in the loop", "loop broken off", "after the loop")


def batches_of_job(loader, count, saved, ends=None):
    """The batches of a job that goes on from what was saved, and what it saves at its end: ends is (after how many
    batches of this job, at which moment)."""
    seen, start = [], 0
    if saved is not None:
        loader.load_state_dict(saved["loader"])
        start = saved["epoch"]

    def save(epoch):
        return seen, {"loader": loader.state_dict(), "epoch": epoch}

    for epoch in COUNTS[count](loader, start):
        iteration, ended = iter(loader), False
        if ends == (len(seen), "before the first batch"):
            return save(epoch)
        for batch in iteration:
            seen.append(batch if isinstance(batch[0], int) else batch[1].full_tensor().tolist())
            if ends == (len(seen), "in the loop"):
                return save(epoch)
            if ends == (len(seen), "loop broken off"):
                break
        else:
            ended = True
        if not ended:
            return save(epoch)
        if ends == (len(seen), "after the loop"):
            return save(epoch + 1)
    return save(EPOCHS)


def assert_job_goes_on(make, makes_next, count, same_batches):
    """Wherever it ends, and ends again right after it has gone on, it has the batches of one that is not interrupted:
    the same ones, or the same samples in batches of another size."""
    want, _ = batches_of_job(make(), count, None)
    again = [(k, moment) for k in range(2) for moment in MOMENTS]
    for first in [(k, moment) for k in range(len(want) + 1) for moment in MOMENTS]:
        for second in again:
            got, saved = batches_of_job(make(), count, None, first)
            for ends in (second, None):
                more, saved = batches_of_job(makes_next(), count, saved, ends)
                got = got + more
            told = f"ended {first}, then {second}, epochs counted by {count}"
            assert got == want if same_batches else sum(got, []) == sum(want, []), told
            assert saved["loader"] == at(EPOCHS, 0, saved["loader"]["samples"]), told


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("n, batch, tail", [(6, 3, "exact"), (7, 3, "exact"), (7, 3, "pad"), (7, 3, "drop"),
                                            (2, 3, "exact"), (2, 3, "pad"), (2, 3, "drop"), (0, 3, "exact")], ids=str)
def test_a_job_that_ends_anywhere_has_neither_more_nor_fewer_batches(n, batch, tail, count):
    """A state saved after the last batch of an epoch, in the loop, is not that of the epoch that follows."""
    def make(size=batch):
        return Sampler(n, size, shuffle=True, seed=4, tail=tail)

    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(mix(4, e))).tolist() for e in range(EPOCHS)]
    uninterrupted = sum(batches_of_job(make(), count, None)[0], [])
    assert tail != "exact" or uninterrupted == sum(orders, [])
    assert_job_goes_on(make, make, count, True)
    if tail == "exact":
        for size in (1, 2, 9):
            assert_job_goes_on(make, lambda size=size: make(size), count, False)


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks, sbp", [([0, 1, 2], S(0)), ([1], S(0)), ([0, 1], B)], ids=str)
@pytest.mark.parametrize("batch", [2, 3])
def test_a_job_that_ends_anywhere_goes_on_in_another_layout(ranks, sbp, batch, count):
    def make(size=2, where=(0, 1), layout=S(0)):
        return DataLoader(Samples(4), size, place(list(where)), layout, shuffle=True, seed=4)

    assert_job_goes_on(make, lambda: make(batch, ranks, sbp), count, batch == 2)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_with_workers_that_ends_after_the_last_batch_of_an_epoch(moment, persistent):
    """What workers have read ahead, and that they have no more, says nothing about where the program is."""
    def make():
        return DataLoader(Samples(5), 2, place([0, 1]), S(0), num_workers=1, persistent_workers=persistent)

    got, saved = batches_of_job(make(), "its own", None, (3, moment))
    assert got + batches_of_job(make(), "its own", saved)[0] == [[0, 1], [2, 3], [4]] * EPOCHS


@pytest.mark.parametrize("set_epoch", [False, True])
def test_a_loop_broken_off_after_the_last_batch_is_followed_by_the_next_epoch(set_epoch):
    """In the program that breaks it off; so is one that was begun with the rest of an epoch, which is none."""
    sampler = Sampler(4, 2)
    for epoch in range(3):
        if set_epoch:
            sampler.set_epoch(epoch)
        assert [batch for _, batch in zip(range(2), sampler)] == [[0, 1], [2, 3]] and sampler.state_dict() == at(
            epoch, 4, 4)
    sampler.load_state_dict(sampler.state_dict())
    assert next(iter(sampler), None) is None and len(list(sampler)) == 2 and sampler.epoch == 4


def test_a_position_is_one_among_the_samples_of_its_epoch():
    """In the middle of an epoch it is refused for a dataset of other length; at its end that has no more."""
    sampler = Sampler(5, 2)
    sampler.load_state_dict(at(3, 4, 4))
    assert list(sampler) == [] and len(list(sampler)) == 3 and sampler.state_dict() == at(5, 0, 5)
    sampler.load_state_dict(at(3, 2, 4))
    with pytest.raises(GlobalTensorError, match="5 samples that had 4"):
        list(sampler)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 3
    values = [torch.zeros(1)] * 4
    loader = DataLoader(values, 2, place([0, 1]), S(0))
    for step, _ in enumerate(loader, 1):
        if step == 2:
            values.append(torch.zeros(1))            # while the program is still in the loop
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert list(loader) == [] and len(list(loader)) == 3


def test_resume_in_a_tail():
    sampler = Sampler(7, 3, tail="pad")
    sampler.load_state_dict(at(1, 5, 7))
    assert sampler.epoch == 1 and list(sampler) == [[5, 6, 0]] and sampler.state_dict() == at(2, 0, 7)
    sampler = Sampler(7, 3, tail="drop")
    sampler.load_state_dict(at(0, 5, 7))
    assert list(sampler) == [] and list(sampler) == [[0, 1, 2], [3, 4, 5]] and sampler.state_dict() == at(2, 0, 7)


def test_a_loaded_state_is_resumed_once():
    loader = DataLoader(Samples(6), 2, place([0, 1]), S(0))
    loader.load_state_dict(at(0, 2, 6))
    assert [label.tolist() for _, label in loader] == [[2, 3], [4, 5]]
    assert len(list(loader)) == 3 and loader.epoch == 2
    loader.load_state_dict(at(0, 2, 6))
    loader.set_epoch(1)
    assert len(list(loader)) == 3


# --------------------------------------------------------------------------------------- randomness and workers


class Noisy(Dataset):
    """Draws from all three generators for each sample."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return i, torch.rand(2, dtype=torch.float64), random.random(), float(numpy.random.rand())


def noise(loader):
    """index -> what was drawn for it, over one epoch."""
    return {int(row[0]): row[1:].tolist() for i, *drawn in loader
            for row in torch.cat([t.full_tensor().double().view(len(i), -1) for t in (i, *drawn)], 1)}


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"num_workers": 2}, {"where": [0, 1, 2]},
                                     {"shuffle": True}], ids=str)
def test_augmentations_are_the_same_for_every_layout(options):
    def loader(batch_size=4, where=(0, 1), **rest):
        return DataLoader(Noisy(), batch_size, place(list(where)), S(0), **rest)

    want, got = loader(), loader(**options)
    first = noise(want)
    assert noise(got) == first and len({tuple(v) for v in first.values()}) == 9
    second = noise(want)
    assert all(first[i] != second[i] for i in first), "another epoch, other numbers"
    got.load_state_dict(at(1, 0, 9))
    assert noise(got) == second


@pytest.mark.parametrize("seed_samples", [True, False])
def test_reading_leaves_the_streams_of_the_program_alone(seed_samples):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in numpy.random.get_state()]

    before = states()
    loader = DataLoader(Noisy(), 4, place([0, 1]), S(0), seed_samples=seed_samples, shuffle=True)
    runs = [noise(loader)]
    loader.set_epoch(0)
    assert [noise(loader)] == runs and states() == before


class Told(Dataset):
    """Says in what process it is read, and what the worker's init function left on it."""

    mark = -1

    def __len__(self):
        return 8

    def __getitem__(self, i):
        info = torch.utils.data.get_worker_info()
        return i, self.mark, -1 if info is None else info.id


def leave_mark(worker):
    info = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Told)
    info.dataset.mark = 10 + worker


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(context):
    loader = DataLoader(Told(), 3, place([0, 1]), S(0), num_workers=2, worker_init_fn=leave_mark, prefetch_factor=1,
                        persistent_workers=True, multiprocessing_context=context, timeout=60)
    for _ in range(2):
        batches = [[t.tolist() for t in batch] for batch in loader]
        assert [i for index, _, _ in batches for i in index] == list(range(8))
        assert [worker[0] for _, _, worker in batches] == [0, 1, 0]
        assert [mark[0] for _, mark, _ in batches] == [10, 11, 10]
    began = time.monotonic()
    del loader
    assert time.monotonic() - began < 4, "workers that must be waited for were not told to end"


def labels(loader):
    return [label.tolist() for _, label in loader]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_iterations_that_are_broken_off(options):
    """What they left prefetched is in no later one; two at a time do not disturb each other."""
    loader = DataLoader(Samples(20), 2, place([0, 1]), S(0), **options)
    want = [[i, i + 1] for i in range(0, 20, 2)]
    for _ in range(2):
        iteration = iter(loader)
        assert [next(iteration)[1].tolist() for _ in range(3)] == want[:3]
    state = loader.state_dict()
    assert state == at(0, 6, 20) and labels(loader) == want
    loader.load_state_dict(state)
    assert labels(loader) == want[3:] and labels(loader) == want and loader.epoch == 2
    if not options.get("persistent_workers"):
        a, b = iter(loader), iter(loader)
        assert [x[1].tolist() for pair in zip(a, b) for x in pair] == [x for x in want for _ in range(2)]


class Batched(Samples):
    def __getitems__(self, indices):
        self.batches = [*getattr(self, "batches", []), indices]
        return [self[i] for i in indices]


def test_batched_reading_where_samples_are_not_seeded():
    dataset = Batched(5)
    list(DataLoader(dataset, 3, place([0, 1]), S(0), seed_samples=False))
    assert dataset.batches == [[0, 1, 2], [3, 4]]
    dataset = Batched(5)
    assert len(list(DataLoader(dataset, 3, place([0, 1]), S(0)))) == 2 and not hasattr(dataset, "batches")


# ------------------------------------------------------------------------------------------------------- errors


class Endless(Dataset):
    def __getitem__(self, i):
        return i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def ragged(samples):
    return torch.zeros(len(samples) + 1, 2)


@pytest.mark.parametrize("kind, text, change", [
    (GlobalTensorError, "batch_size=0", {"batch_size": 0}), (GlobalTensorError, "batch_size=-2", {"batch_size": -2}),
    (GlobalTensorError, "batch_size=2.5", {"batch_size": 2.5}), (GlobalTensorError, 'tail="exact"', {"tail": "exakt"}),
    (GlobalTensorError, 'tail="drop"', {"tail": "drop_last"}), (GlobalTensorError, "no len", {"dataset": Endless()}),
    (GlobalTensorError, "read by index", {"dataset": Stream()}),
    (GlobalTensorError, "read by index", {"dataset": iter([1, 2])}),
    (GlobalTensorError, "order()", {"sampler": torch.utils.data.SequentialSampler(range(6))}),
    (GlobalTensorError, "other arguments", {"sampler": Sampler(6, 4)}),
    (GlobalTensorError, "other arguments", {"sampler": Sampler(6, 3), "shuffle": True}),
    (SbpError, "not sums", {"sbp": gt.sbp.partial_sum}), (SbpError, "from the start", {"sbp": S(-1)}),
    (SbpError, "2 sbps", {"sbp": (S(0), B)}), (SbpError, "axis 'tp'", {"sbp": {"tp": S(0)}}),
    (SbpError, "not a placement", {"placement": "cpu"}), (ShapeError, "from 3 samples", {"collate_fn": ragged}),
    (ShapeError, "one row per sample", {"collate_fn": lambda samples: torch.tensor(3)}),
], ids=lambda v: v.__name__ if isinstance(v, type) else v if isinstance(v, str) else "-".join(v))
def test_errors(kind, text, change):
    with pytest.raises(kind) as told:
        arguments = {"dataset": Samples(6), "batch_size": 3, "placement": place([0, 1]), "sbp": S(0), **change}
        list(DataLoader(**arguments))
    assert text in str(told.value) and "test_data.py" in told.value.where


def test_global_tensors_are_no_data():
    x = gt.ones(4, 2, placement=place([0, 1]), sbp=S(0))
    with pytest.raises(GlobalTensorError, match="TensorDataset.tensors"):
        DataLoader(TensorDataset(x), 2, place([0, 1]), S(0))
    with pytest.raises(GlobalTensorError, match="returns global tensors"):
        list(DataLoader(Samples(4), 4, place([0, 1]), S(0), collate_fn=lambda samples: x))


@pytest.mark.parametrize("state", [{}, {"epoch": 0}, {"epoch": -1, "position": 0, "samples": 4},
                                   {"epoch": 0, "position": 1.5, "samples": 4}, {"epoch": 0, "position": 5,
                                                                                 "samples": 4}, 3, None], ids=str)
def test_no_state(state):
    with pytest.raises(GlobalTensorError, match="not the state"):
        Sampler(4, 2).load_state_dict(state)
    with pytest.raises(GlobalTensorError, match="counted from 0"):
        Sampler(4, 2).set_epoch(-1)


# -------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("ranks, names, sbp", [([0, 1], None, S(0)), ([0, 1, 2], None, S(0)), (GRID[0])], ids=str)
def test_training_with_an_uneven_tail_gives_the_losses_of_plain_torch(ranks, names, sbp):
    where, generator = place(ranks, names), torch.Generator().manual_seed(1)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(x, x @ torch.randn(4, 2, generator=generator, dtype=torch.float64))

    def train(model, loader):
        opt, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for _ in range(3):
            for a, b in loader:
                loss = torch.nn.functional.mse_loss(model(a), b)
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).double()
    copy = torch.nn.Linear(4, 2).double()
    copy.load_state_dict(model.state_dict())
    want = train(model, torch.utils.data.DataLoader(dataset, batch_sampler=Sampler(13, 6, shuffle=True)))
    got = train(copy.to_global(where, B), DataLoader(dataset, 6, where, sbp, shuffle=True))
    assert len(got) == 9 and want[-1] < want[0] / 2
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------- real processes


UNREAD = ("a sample that cannot be read", "a sample that a worker cannot read")


@pytest.mark.processes
def test_a_process_reads_only_its_own_samples(tmp_path):
    program = PROGRAMS / "data.py"
    (tmp_path / "alone").mkdir()
    (tmp_path / "many").mkdir()
    good([PYTHON, program, tmp_path / "alone"], environment(GLOBALTENSOR_RANKS="2"))
    good([*RUN, "-n", 2, program, tmp_path / "many"])
    alone, many = results(tmp_path / "alone")[0], results(tmp_path / "many")
    assert sorted(many) == [0, 1]
    for rank, seen in many.items():
        assert seen["values"] == alone["values"]
        for case, read in seen["read"].items():
            assert read == alone["expected"][case][rank], f"rank {rank}, {case}"
        for case, (kind, text) in seen["errors"].items():
            failed = case in UNREAD and rank == 1
            assert kind == ("ValueError" if failed else "DisagreementError"), f"rank {rank}, {case}: {text}"
            assert failed or "rank 0:" in text and "rank 1:" in text, text
    for case in UNREAD:
        text = many[0]["errors"][case][1]
        assert "ValueError: bad luck" in text and text.startswith("rank 1 failed, where the others go on"), text
        assert "try:   look at that error, of the rank that had it" in text, text


@pytest.mark.processes
def test_ranks_that_catch_an_error_of_a_sample_go_on():
    good([*RUN, "-n", 2, str(PROGRAMS / "data_refused.py")])


@pytest.mark.processes
def test_ranks_that_share_rows_have_read_the_same():
    good([*RUN, "-n", 4, str(PROGRAMS / "data_values.py")])


class GlobalRows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "nested": (self.y[i], i)}


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"collate_fn": list}], ids=str)
@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_workers_of_torchs_loader_keep_rows_global(sbp, options):
    """As without workers: what they are, their layouts and their values."""
    x, y = torch.arange(24.0).view(4, 6), torch.arange(8).view(4, 2)
    rows = GlobalRows(*(gt.from_full(t, place([0, 1]), sbp) for t in (x, y)))
    own, wanted = (torch.utils._pytree.tree_leaves(list(torch.utils.data.DataLoader(
        rows, **{"batch_size": 2, **options}, num_workers=workers))) for workers in (1, 0))
    assert len(own) == len(wanted)
    for a, b in zip(own, wanted):
        assert type(a) is type(b)
        if isinstance(a, gt.GlobalTensor):
            assert a.sbp == b.sbp and a.dtype == b.dtype and torch.equal(gather(a), gather(b))


@pytest.mark.processes
def test_workers_of_torchs_loader_refuse_global_rows_in_several_processes():
    good([*RUN, "-n", 2, str(PROGRAMS / "worker_rows.py")])
