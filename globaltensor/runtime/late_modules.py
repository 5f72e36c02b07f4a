"""What is done to a module of torch that many programs never import: when it has been imported, and not before."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_awaited: dict[str, Callable[[], None]] = {}


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` once the module is there, which may be now."""
    if name in sys.modules:
        callback()
        return
    _awaited[name] = callback
    if _FIRST not in sys.meta_path:
        sys.meta_path.insert(0, _FIRST)


class _Awaiting:
    """Of the finders of modules, one that is asked first. It finds a module as the others do, and sees it run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _awaited:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            _awaited.pop(name)()

        spec.loader.exec_module = run_and_change
        return spec


_FIRST: Any = _Awaiting()
