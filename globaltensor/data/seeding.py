"""Random numbers while samples are read: from (seed, epoch, index) alone, and never from the program's own stream.

A sample that is flipped or cropped at random comes out the same whichever rank, process or worker reads it, because
torch, `random` and NumPy are seeded for each sample by `mix(seed, epoch, index)`. Samples read in the main process draw
from `random_streams` of their own: how much they draw differs from rank to rank, and must not advance the stream that
all ranks share.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, get_worker_info

_64_BITS = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A seed of 64 well-mixed bits from a few ints: h = 0, then h = splitmix64(h ^ number) for each in turn."""
    h = 0
    for number in numbers:
        h = ((h ^ int(number) & _64_BITS) + 0x9E3779B97F4A7C15) & _64_BITS
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        h = (h ^ h >> 27) * 0x94D049BB133111EB & _64_BITS
        h ^= h >> 31
    return h


def _seed(value: int) -> None:
    """Seed what samples draw from: torch on the CPU, `random`, NumPy."""
    torch.default_generator.manual_seed(value)       # torch.manual_seed would also seed every GPU, in every worker
    random.seed(value)
    numpy.random.seed(value & 0xFFFFFFFF)


@contextmanager
def random_streams(seed: int) -> Iterator[None]:
    """Inside, random numbers come from streams seeded by `seed`; afterwards the program's own continue unchanged."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    _seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


class SeededDataset(Dataset[Any]):
    """A dataset read by keys (epoch, index); each sample is read with the random numbers of its own key.

    The epoch is part of the key because persistent workers keep the copy of the dataset they started with.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        _seed(mix(self.seed, epoch, index))
        return self.dataset[index]


class UnwrapDataset:
    """A worker_init_fn that makes `get_worker_info().dataset` the user's dataset, then calls the user's own one."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, SeededDataset)          # torch calls this in workers only
        object.__setattr__(info, "dataset", info.dataset.dataset)      # a WorkerInfo is read-only
        if self.then is not None:
            self.then(worker)
