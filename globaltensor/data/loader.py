"""A DataLoader whose batches are global tensors: torch's own loader reads the rows that this process needs.

    Sampler                  rows of the global batch     the same in every process
    BatchCutter.rows         -> rows of this process      by the balanced split of the library
    torch                    -> read, collated, pinned    its workers, its prefetching
    BatchCutter.to_global    -> global tensors            each rank's shard is a slice

Ranks do not exchange data, only one small message per batch, to check that they are at the same batch and have the same
shapes: if one is a batch ahead, or pads to another length, all raise instead of computing with parts of different
batches. Where several processes read the same rows, they compare checksums of them too, often at first and then ever
more seldom: a dataset that draws from a random generator of its own gives each of them other samples.
"""
from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import tee
from typing import Any

import torch
import torch.utils.data

from globaltensor.data.batch import BatchCutter
from globaltensor.data.sampler import Batch, Sampler
from globaltensor.data.seeding import SeededDataset, UnwrapDataset, mix, random_streams
from globaltensor.errors import ArgumentError, DisagreementError, GlobalTensorError, counted, expect, in_brief
from globaltensor.layouts.layout import sbp_text
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import SbpLike
from globaltensor.runtime.agreement import FAILED, Advice, agree, compare_at, gather_unchecked, ranks_apart
from globaltensor.runtime.lineage import checking, taken_back_if_it_fails
from globaltensor.runtime.world import world
from globaltensor.tensors.convert import has_copies, heads_of
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

_OTHER_BATCHES = Advice("the ranks disagree about a batch", "each process reads its own samples of the same batch",
                        "the same loop on every rank; where shapes differ, a collate_fn that pads to a fixed length")
_TWICE = "these ranks share the samples, and each process reads them for itself: "
_OWN_GENERATOR = (f"{_TWICE}a dataset, or its transform, that draws from a random generator of its own draws other "
                  "numbers in each",
                  "random, torch or NumPy's global generator in __getitem__, which are seeded for each sample; or seed "
                  "its own there: rng = random.Random(random.getrandbits(32)), "
                  "transform.set_random_seed(random.getrandbits(32)) of albumentations")
_NOT_SEEDED = (f"{_TWICE}with seed_samples=False, what a dataset draws depends on the process and its workers",
               "seed_samples=True, and in __getitem__ no random generator but random, torch or NumPy's global one")


class _Requests:
    """The batch_sampler of the inner loader: for each batch, the keys of the rows that this process needs, or of its
    first sample where it needs none. It does not refer to the loader: a reference cycle would delay the end of the
    loader's workers until garbage collection."""

    def __init__(self, cutter: BatchCutter, seeded: bool) -> None:
        self.cutter, self.seeded = cutter, seeded
        self.batches: Iterator[Batch] = iter(())     # of the next iteration

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self.keys, self.batches)

    def keys(self, batch: Batch) -> list[Any]:
        start, stop = self.cutter.rows(len(batch.indices))
        indices = batch.indices[start:stop] or batch.indices[:1]
        return [(batch.epoch, i) for i in indices] if self.seeded else indices


class DataLoader:
    """Iterates over a dataset in batches of global tensors.

    dataset      map-style: `dataset[i]` and `len(dataset)`; the same in every process. It may grow or shrink between
                 epochs, if no `sampler` is given; an epoch is resumed while it is as long as it was in that epoch
    batch_size   of the global batch, whatever the number of ranks
    placement    of the batches
    sbp          of the batches: split(0) along axes that divide the batch, broadcast along others; split(1), ... along
                 an axis splits the samples themselves, after they are read; tensors without that dim are broadcast
    shuffle, seed, tail
                 the order of samples, see `Sampler`; or, instead, a `sampler` made with the same batch_size
    seed_samples each sample is read with torch, `random` and NumPy seeded by (seed, epoch, index), so that random
                 augmentations are the same for every layout, number of processes and of workers. It takes about 10 us
                 a sample, and the dataset's `__getitems__` is not used. False: random numbers depend on the workers
    collate_fn   gets the samples of this process, a list (default: torch's default_collate); dim 0 of every tensor it
                 returns is the samples; the other dims must not depend on the samples: pad to a fixed length
    check        False: processes compare notes at the start of an iteration only, not for each batch, which takes a
                 fraction of a millisecond; DisagreementError, below, is then raised at the start only, unless
                 GLOBALTENSOR_CHECK=1
    num_workers, pin_memory, prefetch_factor, persistent_workers, timeout, worker_init_fn, multiprocessing_context
                 as torch's; num_workers is per process. `generator` draws only the base seed of the workers
                 (default: one that depends on seed and epoch)

    Yields the results of collate_fn, nested tuples, lists, dicts and dataclasses, with each tensor [b, ...] of samples
    replaced by the global tensor of the whole batch. Other values are this process's own: a list of strings has an
    entry for each of *its* samples. Each process reads and collates only the samples its ranks hold, once; a process
    that holds none of a batch reads one sample to learn the shapes. A dataset must give the same sample to each process
    that reads it: ranks that share rows compare them, at the 1st, 2nd, 4th, 8th, ... batch. Every process of the
    program must iterate, including those outside the placement.

    The state, `state_dict()`, is the epoch and the samples of it that were yielded, not those prefetched. Iterations
    and epochs are those of `Sampler`.

    Workers are not ranks: datasets must not use global tensors. Raises GlobalTensorError for a dataset that is not
    map-style, and for arguments that do not fit together; SbpError for a partial sbp; while iterating, ShapeError for
    tensors whose dim 0 is not the samples, and DisagreementError, on every rank, where ranks are at different batches,
    have different shapes, or read different values of the same samples.
    """

    @api_boundary
    def __init__(self, dataset: Any, batch_size: int, placement: Placement, sbp: SbpLike, *, shuffle: bool = False,
                 seed: int = 0, tail: str = "exact", sampler: Sampler | None = None, seed_samples: bool = True,
                 num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] | None = None, pin_memory: bool = False,
                 prefetch_factor: int | None = None, persistent_workers: bool = False, timeout: float = 0,
                 worker_init_fn: Callable[[int], None] | None = None, multiprocessing_context: Any = None,
                 generator: torch.Generator | None = None, check: bool = True) -> None:
        _check_dataset(dataset)
        self._own_sampler = sampler is None
        if not isinstance(num_workers, int) or num_workers < 0:
            raise ArgumentError(f"num_workers={num_workers!r}", "it is how many processes load the samples of a rank",
                                "num_workers=2; 0: none")
        _check_loader_options(shuffle, seed, collate_fn, prefetch_factor, timeout, num_workers)
        if sampler is None:
            _check_len(dataset)
            sampler = Sampler(len(dataset), batch_size, shuffle=shuffle, seed=seed, tail=tail)
        else:
            _check_sampler(sampler, batch_size, (shuffle, seed, tail))
        self.dataset, self.batch_size, self.sampler, self.num_workers = dataset, batch_size, sampler, num_workers
        self._cutter = BatchCutter(placement, sbp)
        self.placement, self.sbp = self._cutter.placement, self._cutter.sbp
        self._check, self._batches = check, 0        # so many were checked
        self._own_generator = generator is None
        self._generator = torch.Generator() if generator is None else generator
        self._requests = _Requests(self._cutter, seed_samples)
        if seed_samples and num_workers:
            worker_init_fn = UnwrapDataset(worker_init_fn)
        self._inner = torch.utils.data.DataLoader(
            SeededDataset(dataset, sampler.seed) if seed_samples else dataset, batch_sampler=self._requests,
            num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory, timeout=timeout,
            worker_init_fn=worker_init_fn, multiprocessing_context=multiprocessing_context, generator=self._generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers)

    def __len__(self) -> int:
        """Batches in a whole epoch; where the dataset has grown or shrunk, in the next one."""
        return self.sampler.count_batches(self._samples())

    def _samples(self) -> int:
        """How many samples an epoch that begins now has."""
        return len(self.dataset) if self._own_sampler else self.sampler.n

    @api_boundary
    def __iter__(self) -> Iterator[Any]:
        self.sampler.resize(self._samples())
        batches = self.sampler.batches()
        state, s = self.sampler.state_dict(), self.sampler
        agree(f"DataLoader of {s.n} samples from {state}, batch_size={s.batch_size}, shuffle={s.shuffle}, "
              f"seed={s.seed}, tail={s.tail}, on {self.placement} {sbp_text(self.sbp)}")
        self._requests.batches, expected = tee(batches)
        if self._own_generator:
            first = self._cutter.rows(s.batch_size)[0]           # else the workers of all ranks would draw the same
            self._generator.manual_seed(mix(s.seed, s.epoch, first))
        return self._iterate(iter(self._inner), expected, s.epoch)

    @property
    def epoch(self) -> int:
        """The current epoch, or between iterations the next one."""
        return self.sampler.epoch

    @api_boundary
    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; a position in it that was just loaded is kept. See `Sampler`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, how many of its samples were yielded, and how many it has: all that is needed to go on there."""
        return self.sampler.state_dict()

    @api_boundary
    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at this position, possibly on other ranks and with another batch size."""
        self.sampler.resize(self._samples())
        self.sampler.load_state_dict(state)

    @api_boundary
    def _iterate(self, loaded: Iterator[Any], batches: Iterator[Batch], epoch: int) -> Iterator[Any]:
        for batch in batches:
            total, sums = len(batch.indices), None
            seed = mix(self.sampler.seed, batch.epoch, batch.start, self._cutter.rows(total)[0])
            with taken_back_if_it_fails():
                try:
                    with nullcontext() if self.num_workers else random_streams(seed):
                        collated = next(loaded)
                    global_batch, described = self._cutter.to_global(collated, total)
                    if self._compares_values():
                        sums = self._cutter.checksums(collated, total)
                except Exception as error:           # the other ranks would wait for this one for ever
                    with suppress(GlobalTensorError):
                        self._check_agreement(batch, [FAILED + in_brief(error)])
                    raise
                self._check_agreement(batch, described)
                if sums is not None:
                    self._compare_values(batch, described, sums)
            self.sampler.yielded(batch)
            yield global_batch
        next(loaded, None)                           # lets the workers end, or wait for the next epoch
        self.sampler.ended(epoch)

    def _checks(self) -> bool:
        """Are batches compared? In a lone process there is nobody to compare them with."""
        return not world().single_process and (self._check or checking())

    def _check_agreement(self, batch: Batch, described: list[str]) -> None:
        """Check that all processes hold parts of this one batch, of the same shapes."""
        if not self._checks():
            return
        order = zlib.crc32(array("q", batch.indices).tobytes())
        agree(f"samples {batch.start} to {batch.stop} of epoch {batch.epoch} (indices {order:08x}): "
              f"{', '.join(described)}", advice=_OTHER_BATCHES)

    def _compares_values(self) -> bool:
        """Are the values of this batch compared, and not its shapes alone? So all ranks say, or none."""
        rows = self._cutter.layout(1)
        if not self._checks() or ranks_apart() or not has_copies(rows.placement, rows.sbp):
            return False
        self._batches += 1
        return compare_at(self._batches)

    def _compare_values(self, batch: Batch, described: list[str], sums: dict[int, list[int]]) -> None:
        """Check that ranks that have the same rows of this batch have read the same."""
        all_sums = {r: s for each in gather_unchecked(sums, "comparing the values of a batch") for r, s in each.items()}
        heads = heads_of(self._cutter.layout(1))
        wrong = [(i, heads[r]) for r, s in sorted(all_sums.items()) for i in range(len(s))
                 if s[i] != all_sums[heads[r]][i]]
        if not wrong:
            return
        i, head = min(wrong)
        rows = "".join(f"\n    rank {r}: {described[i]}, its rows with checksum {s[i]:08x}"
                       for r, s in sorted(all_sums.items()) if heads[r] == head)
        raise DisagreementError(f"the ranks read different values of samples {batch.start} to {batch.stop} of epoch "
                                f"{batch.epoch}{rows}", *(_OWN_GENERATOR if self._requests.seeded else _NOT_SEEDED))


def _check_loader_options(shuffle: object, seed: object, collate_fn: object, prefetch_factor: object, timeout: object,
                          num_workers: int) -> None:
    expect(shuffle, bool, "shuffle says neither yes nor no", "shuffle=True")
    expect(seed, int, "a seed that is not a number", "seed=0")
    if collate_fn is not None and not callable(collate_fn):
        raise ArgumentError(f"collate_fn={collate_fn!r}", "it is called with a list of samples",
                            "collate_fn=torch.utils.data.default_collate")
    if prefetch_factor is not None and not (isinstance(prefetch_factor, int) and prefetch_factor > 0 and num_workers):
        raise ArgumentError(f"prefetch_factor={prefetch_factor!r} with {counted(num_workers, 'worker')}",
                            "it is how many batches each worker reads ahead", "num_workers=2, prefetch_factor=2")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise ArgumentError(f"timeout={timeout!r}", "it is for how many seconds a worker is waited for; 0: for ever",
                            "timeout=60")


def _check_dataset(dataset: Any) -> None:
    """Check that it is map-style and holds no global tensors."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise GlobalTensorError(f"a DataLoader over {type(dataset).__name__}, which cannot be read by index",
                                "each process reads only its own samples, by index",
                                "a map-style dataset; or torch's DataLoader in every process over the same stream, and "
                                "gt.from_full(batch, placement, sbp)")
    for name, value in getattr(dataset, "__dict__", {}).items():
        for held in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, GlobalTensor):
                raise GlobalTensorError(f"a dataset that holds a global tensor, {type(dataset).__name__}.{name}",
                                        "each process reads samples for itself, in workers that are not ranks",
                                        "plain tensors: x.full_tensor()")


def _check_len(dataset: Any) -> None:
    try:
        len(dataset)
    except (TypeError, NotImplementedError):
        raise GlobalTensorError(f"a DataLoader over {type(dataset).__name__}, which has no len()",
                                "an epoch goes through all indices from 0 to len(dataset) - 1",
                                "def __len__(self): return n, or a gt.data.Sampler(n, ...)") from None


def _check_sampler(sampler: Any, batch_size: int, others: tuple[bool, int, str]) -> None:
    if not isinstance(sampler, Sampler):
        raise GlobalTensorError(f"sampler={type(sampler).__name__}", "the order must be the same on every rank, and "
                                "resumable from a position", "a subclass of gt.data.Sampler with its own order()")
    if sampler.batch_size != batch_size or others != (False, 0, "exact"):
        raise GlobalTensorError(f"a sampler of batch_size={sampler.batch_size}, shuffle={sampler.shuffle}, "
                                f"seed={sampler.seed}, tail={sampler.tail!r}, and other arguments",
                                "the sampler defines the order",
                                f"DataLoader(dataset, {sampler.batch_size}, placement, sbp, sampler=sampler)")
