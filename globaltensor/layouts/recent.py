"""How much is remembered: what was not used of late is forgotten, and worked out again where it is needed.

Every cache that a program whose shapes keep changing would fill is bounded: by `functools.lru_cache(KEPT)`, by `Recent`
where entries must be looked through, and in native code by csrc/torch_ext/generations.h. What is kept differs between
ranks, so nothing that ranks must agree on may depend on it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

KEPT = 2_000                                         # entries of one cache

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict of two generations: what is new, and what is found in the old one, goes into the young one. Where that is
    full it becomes the old one. So the last `kept` that were used are always there, and never more than twice as many.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None and key in self._old:
            value = self._old.pop(key)
            self[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if len(self._young) >= self._kept and key not in self._young:
            self._young, self._old = {}, self._young
        self._old.pop(key, None)
        self._young[key] = value

    def forget(self, wrong: Callable[[K], bool]) -> None:
        """Drop the entries with such keys."""
        for generation in (self._young, self._old):
            for key in [key for key in generation if wrong(key)]:
                del generation[key]
