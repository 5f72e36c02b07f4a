"""The order of samples: one permutation per epoch, an epoch and a position of state, independent of ranks.

Epoch e of n samples is order(e), n indices: torch.randperm from a generator seeded with mix(seed, e), or 0 ... n - 1
without shuffling. A batch is the next batch_size of them. The position in an epoch is 0 ... n: from there training can
resume with another batch size, on other ranks.

    state saved                               epoch   position   the first iteration after it was loaded
    in the loop of epoch e, after k samples   e       k          the rest of epoch e
    in that loop, after its last batch        e       n          no batches: the program's loop of epoch e ends
    after that loop                           e + 1   0          epoch e + 1

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

    An epoch has ended when its iteration has: a state saved in the loop, after the last batch, resumes with no batches,
    so that the program's own loop of that epoch ends too. A loop that does not ask for more after the last batch, such
    as one over `itertools.islice(loader, len(loader))`, has not ended the epoch: there let `set_epoch` begin each.

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
        self._samples = n                            # of the epoch that the position is in; n: of those that follow

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

    def resize(self, n: int) -> None:
        """The epochs that begin from now on have n samples."""
        self.n = n

    def state_dict(self) -> dict[str, int]:
        """The epoch, how many of its samples were yielded, and how many it has."""
        return {"epoch": self._epoch, "position": self._position, "samples": self._samples}

    @api_boundary
    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at this position, whatever the batch size, tail or ranks were when the state was saved.

        Raises GlobalTensorError for an invalid state.
        """
        values = state if isinstance(state, dict) else {}
        numbers = [values.get(name) for name in ("epoch", "position", "samples")]
        epoch, position, samples = (n if _is_count(n) else -1 for n in numbers)
        if min(epoch, position) < 0 or position > samples:
            raise GlobalTensorError(f"not the state of a sampler: {state!r}",
                                    'a state is {"epoch": an int, "position": an int up to samples, "samples": an int}',
                                    "sampler.load_state_dict(other.state_dict())")
        self._epoch, self._position, self._samples, self._resume = epoch, position, samples, True

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.count_batches(self.n)

    def count_batches(self, samples: int) -> int:
        """Batches of so many samples that follow each other."""
        full, rest = divmod(samples, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    @api_boundary
    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches()
        epoch = self._epoch
        for batch in batches:
            self.yielded(batch)
            yield batch.indices
        self.ended(epoch)

    def order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """The n indices of an epoch, in their order; must be the same on every rank."""
        if not self.shuffle:
            return range(self.n)
        return torch.randperm(self.n, generator=torch.Generator().manual_seed(mix(self.seed, epoch)), device="cpu")

    def batches(self) -> Iterator[Batch]:
        """Begin an iteration. Its batches may be prefetched; `yielded` says which one has reached the user."""
        over = self._samples > 0 and self._position == self._samples
        if not self._resume:
            self._epoch, self._position = self._epoch + over, 0
        elif over:                                   # the program is in the loop of this epoch, after its last batch
            self._position = self.n
        elif self._position and self._samples != self.n:
            raise GlobalTensorError(f"a dataset of {self.n} samples that had {self._samples} when a position in it was "
                                    "saved", "the position is one among the samples of that epoch",
                                    "iterate while the dataset is as it was, or begin an epoch: "
                                    f"set_epoch({self._epoch + 1})")
        self._samples, self._resume = self.n, False
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

    def ended(self, epoch: int) -> None:
        """The iteration of this epoch has ended: state_dict() is now that of the next epoch, at its start.

        Not before: a program that counts epochs and saves after the last batch, but within its loop, is still in this
        one when it resumes.
        """
        if (self._epoch, self._position) == (epoch, self._samples):          # no other was set meanwhile
            self._epoch, self._position = epoch + 1, 0

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
