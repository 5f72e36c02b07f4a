"""The order of samples: one permutation per epoch, one integer of state, independent of ranks.

Epoch e of n samples is order(e), n indices: torch.randperm from a generator seeded with mix(seed, e), or 0 ... n - 1
without shuffling. A batch is the next batch_size of them. The position in an epoch is 0 ... n, so the samples consumed
are e * n + position: from there training can resume with another batch size, on other ranks.

A tail, the n % batch_size samples that fill no batch, is one of

    exact   a smaller batch: every sample once
    pad     a full batch, filled up with the first samples of the epoch's order
    drop    left out
"""
from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.utils.data

from globaltensor.data.seeding import mix
from globaltensor.errors import GlobalTensorError
from globaltensor.tracebacks import api_boundary

TAILS = ("exact", "pad", "drop")


class Batch(NamedTuple):
    """The samples of one global batch, and the positions in the epoch before and after it (n after the last)."""

    epoch: int
    start: int
    stop: int
    indices: list[int]


class Sampler(torch.utils.data.Sampler[list[int]]):
    """Yields the indices of each global batch, as a batch_sampler of torch does.

    n           how many samples an epoch has
    batch_size  of a global batch
    shuffle     a new permutation each epoch, which depends on (seed, epoch) alone; else in order
    tail        "exact", "pad" or "drop": what happens to the samples that fill no batch

    Each `iter` begins an epoch: right after `load_state_dict` at the loaded position, otherwise at its start. A
    completed epoch is followed by the next; one that was broken off starts again. `set_epoch` chooses another. Another
    order, such as a weighted one, is a subclass with its own `order`.

    Raises GlobalTensorError for an invalid batch_size, n or tail.
    """

    @api_boundary
    def __init__(self, n: int, batch_size: int, *, shuffle: bool = False, seed: int = 0, tail: str = "exact") -> None:
        if not _is_count(batch_size) or batch_size < 1:
            raise GlobalTensorError(f"batch_size={batch_size!r}", "the global batch size is a positive int",
                                    "batch_size=32")
        if not _is_count(n):
            raise GlobalTensorError(f"a sampler of {n!r} samples", "n is their number", "n=len(dataset)")
        if tail not in TAILS:
            near = difflib.get_close_matches(str(tail), TAILS, 1) or ["exact"]
            raise GlobalTensorError(f"tail={tail!r}", 'a tail is one of "exact", "pad", "drop"', f'tail="{near[0]}"')
        self.n, self.batch_size, self.shuffle, self.seed, self.tail = n, batch_size, shuffle, seed, tail
        self._epoch, self._position, self._resume = 0, 0, False

    @property
    def epoch(self) -> int:
        """The current epoch, or between iterations the next one."""
        return self._epoch

    @api_boundary
    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its start; a position in it that was just loaded is kept."""
        if not _is_count(epoch):
            raise GlobalTensorError(f"epoch {epoch!r}", "epochs are counted from 0", "sampler.set_epoch(0)")
        # torch's loops set the epoch before each one, so right after a state was loaded as well
        if not (self._resume and epoch == self._epoch):
            self._epoch, self._position, self._resume = epoch, 0, False

    @property
    def between_epochs(self) -> bool:
        """Is no epoch begun that is not over?"""
        return self._position in (0, self.n)

    @api_boundary
    def resize(self, n: int) -> None:
        """Between iterations: the epochs that follow have n samples. An epoch that was broken off starts again.

        Raises GlobalTensorError where it would go on in the middle, as its position was loaded.
        """
        if n == self.n:
            return
        if self._resume and not self.between_epochs:
            raise GlobalTensorError(f"a dataset of {n} samples that had {self.n} when a position in it was loaded",
                                    "the position is one among the samples of that epoch",
                                    "load the state once the dataset is as it was, or begin an epoch: "
                                    f"set_epoch({self._epoch + 1})")
        if self.n and self._position == self.n:      # that epoch is over
            self._epoch, self._position = self._epoch + 1, 0
        self.n = n

    def state_dict(self) -> dict[str, int]:
        """How many samples were yielded, including those of earlier epochs, which count as if of the same size."""
        return {"consumed": self._epoch * self.n + self._position}

    @api_boundary
    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after so many samples, whatever the batch size, tail or ranks were when the state was saved.

        Raises GlobalTensorError for an invalid state.
        """
        consumed = state.get("consumed") if isinstance(state, dict) else None
        if not _is_count(consumed):
            raise GlobalTensorError(f"not the state of a sampler: {state!r}", 'a state is {"consumed": an int}',
                                    "sampler.load_state_dict(other.state_dict())")
        self._epoch, self._position = divmod(consumed, self.n) if self.n else (0, 0)
        self._resume = True

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.count_batches(self.n)

    def count_batches(self, samples: int) -> int:
        """Batches of so many samples that follow each other."""
        full, rest = divmod(samples, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches():
            self.yielded(batch)
            yield batch.indices

    def order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """The n indices of an epoch, in their order; must be the same on every rank."""
        if not self.shuffle:
            return range(self.n)
        return torch.randperm(self.n, generator=torch.Generator().manual_seed(mix(self.seed, epoch)), device="cpu")

    def batches(self) -> Iterator[Batch]:
        """Begin an iteration. Its batches may be prefetched; `yielded` says which one has reached the user."""
        if not self._resume:
            done = self.n > 0 and self._position == self.n
            self._epoch, self._position = self._epoch + done, 0
        self._resume = False
        epoch, start, count = self._epoch, self._position, self.count_batches(self.n - self._position)
        order = self.order(epoch)
        if len(order) != self.n:
            raise GlobalTensorError(f"an order of {len(order)} indices in a sampler of {self.n} samples",
                                    "order(epoch) returns n of them", "Sampler(len(order), batch_size)")
        if count == 0:                               # only a tail that is dropped: the epoch is over
            self._position = self.n
        return self._cut(order, epoch, start, count)

    def yielded(self, batch: Batch) -> None:
        """This batch has reached the user: state_dict() is now the state after it."""
        self._epoch, self._position = batch.epoch, batch.stop

    def _cut(self, order: Any, epoch: int, start: int, count: int) -> Iterator[Batch]:
        for k in range(count):
            first = start + k * self.batch_size
            last = first + self.batch_size
            indices = _ints(order[first:last])
            # once more and once more, where an epoch is shorter than a batch
            while self.tail == "pad" and len(indices) < self.batch_size:
                indices += _ints(order[:self.batch_size - len(indices)])
            # a tail that is dropped counts as consumed with the last batch: the next epoch begins
            yield Batch(epoch, first, self.n if k == count - 1 else last, indices)


def _ints(part: Any) -> list[int]:
    return part.tolist() if isinstance(part, torch.Tensor) else [int(i) for i in part]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
