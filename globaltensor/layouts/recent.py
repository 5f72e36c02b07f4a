"""How much is remembered: what was not used of late is forgotten, and worked out again where it is needed.

Every cache that a program whose shapes keep changing would fill is bounded, by its entries and by their bytes:
functions by `remembered`, what must be looked through by `Recent`, native code by csrc/torch_ext/generations.h. All
of them together hold at most `gt.config.cache_bytes`. What is kept differs between ranks, so nothing that ranks must
agree on may depend on it.
"""
from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from random import Random
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

KEPT = 2_000                                         # entries of one cache
_EACH = 8                                           # one entry of so many is weighed, where all together are light
_SAMPLES = 8                                         # entries of a cache that are weighed again

_chance = Random(0).random                           # not each eighth: programs repeat themselves

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

# Many caches refer to one object of these, so it is part of none. Their subclasses are.
_shared: set[type] = {ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType, FrameType}


def shared(cls: type[T]) -> type[T]:
    """A class of which equal objects are one: they are not weighed with what refers to them."""
    _shared.add(cls)
    return cls


def bytes_of(value: object) -> int:
    """The memory of an object and of all that only it refers to; an estimate."""
    total, known, left = 0, set(), [value]
    while left:
        of = left.pop()
        if id(of) in known or type(of) in _shared or isinstance(of, type):
            continue
        known.add(id(of))
        total += sys.getsizeof(of)
        if isinstance(of, torch.Tensor):
            total += of.untyped_storage().nbytes()
        elif not type(of).__module__.startswith("torch."):
            left += gc.get_referents(of)
    return total


class Cache:
    """One of the caches. Entries are weighed when they come, light ones now and then; and a few of them again when it
    is asked what all take up, as some values keep what they work out later."""

    __slots__ = ("_noted", "_weight", "_samples", "__weakref__")

    def __init__(self) -> None:
        self._noted = self._weight = 0               # of the entries that came since it was empty
        self._samples: list[tuple[object, int]] = []
        _caches[id(self)] = self

    def __len__(self) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        self._noted = self._weight = 0
        self._samples = []                           # another thread may be about to change one in the old list

    @property
    def nbytes(self) -> float:
        """About what all entries take up; of those that came some may be forgotten."""
        samples, noted, weight = self._samples[:], self._noted, self._weight      # another thread may clear it
        if not samples or not noted:
            return 0.0
        grown = sum(bytes_of(entry) for entry, _ in samples) / sum(before for _, before in samples)
        return len(self) * weight / noted * max(grown, 1.0)

    def note(self, key: object, value: object) -> None:
        """There is a new entry."""
        stands_for, samples = 1, self._samples
        if len(samples) == _SAMPLES and self._weight * KEPT < limit.nbytes * self._noted / 4:
            if _chance() * _EACH >= 1:
                return
            stands_for = _EACH
        entry = (key, value)
        weight = bytes_of(entry)
        self._noted += stands_for
        self._weight += weight * stands_for
        if len(samples) < _SAMPLES:
            samples.append((entry, weight))
        elif (at := int(_chance() * self._noted)) < _SAMPLES * stands_for:      # each that came by the same chance
            samples[at % _SAMPLES] = (entry, weight)
        limit.grown(weight * stands_for)


class Limit:
    """How many bytes all caches may hold together. Half of them are for native code, which weighs its own entries."""

    def __init__(self) -> None:
        self.nbytes = 256 << 20
        self._since = 0                              # bytes of new entries since all were weighed
        self._natives: list[Callable[[int], None]] = []

    def set(self, nbytes: int) -> None:
        self.nbytes = nbytes
        for tell in self._natives:
            tell(nbytes // 2)
        self._empty()

    def tell(self, native: Callable[[int], None]) -> None:
        """Native code is told its half, now and when it changes."""
        self._natives.append(native)
        native(self.nbytes // 2)

    def grown(self, nbytes: int) -> None:
        self._since += nbytes
        if self._since > self.nbytes // 32:
            self._empty()

    def _empty(self) -> None:
        """Where the caches hold too much, empty the largest ones, down to a half of that."""
        self._since, most = 0, self.nbytes // 2
        caches = [cache for each in _caches.valuerefs() if (cache := each()) is not None]
        sizes = sorted(((cache.nbytes, id(cache), cache) for cache in caches), reverse=True)
        total = sum(nbytes for nbytes, _, _ in sizes)
        if total > most:
            for nbytes, _, cache in sizes:
                cache.clear()
                total -= nbytes
                if total <= most / 2:
                    break


_caches: WeakValueDictionary[int, Cache] = WeakValueDictionary()
limit = Limit()


class _Results(Cache):
    """The cache of a function."""

    __slots__ = ("of",)
    of: _lru_cache_wrapper[object]

    def __len__(self) -> int:
        return self.of.cache_info().currsize

    def clear(self) -> None:
        super().clear()
        self.of.cache_clear()


def remembered(function: Callable[..., T], kept: int = KEPT) -> _lru_cache_wrapper[T]:
    """`functools.lru_cache(kept)`, whose entries count against the limit."""
    results = _Results()

    @wraps(function)
    def work_out(*args: Hashable) -> T:
        value = function(*args)
        results.note(args, value)
        return value

    results.of = known = lru_cache(kept)(work_out)
    known.__wrapped__ = function                     # for those who want it without a cache
    return known


class Recent(Cache, Generic[K, V]):
    """A dict of two generations: what is new, and what is found in the old one, goes into the young one. Where that is
    full it becomes the old one. So the last `kept` that were used are always there, and never more than twice as many.
    """

    __slots__ = ("_kept", "_young", "_old")

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._kept = kept
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None and (value := self._old.pop(key, None)) is not None:
            self._insert(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self._insert(key, value)
        self.note(key, value)

    def _insert(self, key: K, value: V) -> None:
        if len(self._young) >= self._kept and key not in self._young:
            self._young, self._old = {}, self._young
        self._old.pop(key, None)
        self._young[key] = value

    def clear(self) -> None:
        super().clear()
        self._young, self._old = {}, {}

    def forget(self, wrong: Callable[[K], bool]) -> None:
        """Drop the entries with such keys."""
        for generation in (self._young, self._old):
            for key in list(generation):             # other threads use it meanwhile
                if wrong(key):
                    generation.pop(key, None)
