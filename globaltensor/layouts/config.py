"""`gt.config`: settings of this process."""
from __future__ import annotations

from globaltensor.errors import ArgumentError, keyword_fix
from globaltensor.layouts.recent import limit


class Config:
    """Settings of this process.

    cache_bytes    what all caches may hold together, in bytes; 256 MiB unless set. A program whose shapes keep changing
                   fills them: with layouts, prices, decisions, boxings. What is not used of late is forgotten then, and
                   worked out again where it is needed. Not collective: ranks may differ
    """

    __slots__ = ()

    @property
    def cache_bytes(self) -> int:
        return limit.nbytes

    @cache_bytes.setter
    def cache_bytes(self, nbytes: int) -> None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1 << 20:
            raise ArgumentError(f"gt.config.cache_bytes = {nbytes!r}", "it is a number of bytes, 1 MiB or more",
                                "gt.config.cache_bytes = 64 << 20")
        limit.set(nbytes)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _NAMES:
            raise ArgumentError(f"gt.config has no setting {name!r}", f"its settings: {', '.join(_NAMES)}",
                                keyword_fix(name, _NAMES, "gt.config."))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"gt.config({', '.join(f'{name}={getattr(self, name)}' for name in _NAMES)})"


_NAMES = [name for name, value in vars(Config).items() if isinstance(value, property)]
config = Config()
