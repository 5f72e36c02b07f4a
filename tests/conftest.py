"""The tiers of the tests: which of them `make check`, `make test` and `make test-all` run.

    make check      one quick test of every file: of every kind, one
    make test       all but the long proofs, in three processes; those that tests start are forks of one
    make test-all   everything, two files at a time; what passed is not run again until a source changes
"""
from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

LONG = 1800                                          # seconds a long test may take, beside another one
collect_ignore = ["peers"]                           # a stand-in for oneflow, which changes torch when it is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of-each", action="store_true",
                     help="of every file, the test marked `check`, or else the first that is quick")
    parser.addoption("--forks", action="store_true", help="Python processes are forks of one that has imported torch")


@pytest.hookimpl(tryfirst=True)                        # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    draw(items)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG))
    if not config.getoption("--one-of-each"):
        return
    chosen: dict[str, pytest.Item] = {}
    for item in items:
        before = chosen.get(str(item.path))
        if item.get_closest_marker("check") and not (before and before.get_closest_marker("check")):
            chosen[str(item.path)] = item
        elif not any(item.get_closest_marker(kind) for kind in ("long", "processes")):
            chosen.setdefault(str(item.path), item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen.values()])
    items[:] = chosen.values()


def draw(items: list[pytest.Item]) -> None:
    """Of a function that is marked `sample(n)`, one case in n is drawn for `make test`, and always the first. The
    others are long. Its name alone decides whether a case is drawn, so new cases change nothing for others."""
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        sample = item.get_closest_marker("sample")
        if sample and function in seen and crc32(item.nodeid.encode()) % sample.args[0]:
            item.add_marker(pytest.mark.long)
        seen.add(function)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage among new objects only: torch's many ones took a sixth of the time of tests in one process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and so would the processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def forks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process that is forked, in which torch is imported: see forks.py."""
    if not request.config.getoption("--forks"):
        yield
        return
    from forks import start_forking

    server = start_forking(tmp_path_factory.mktemp("forks") / "socket")
    yield
    server.stdin.close()
    server.wait()


@pytest.fixture(autouse=True)
def no_gradient_waits() -> Iterator[None]:
    """Gradients that a test has not read are dropped: the next one that reads any would reduce them too, and count
    their communication as its own."""
    yield
    gradients: Any = sys.modules.get("globaltensor.tensors.gradients")
    for leaf in () if gradients is None else list(gradients.pending.values()):
        gradients.replace_grad(leaf, None)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is about the start of a process: no forks."""
    monkeypatch.setenv("TEST_FORKS", "")


@pytest.fixture
def seeded_compiler(request: pytest.FixtureRequest) -> None:
    """Random numbers begin at the file's SEED, and torch.compile has compiled nothing."""
    import torch

    print(f"seed {request.module.SEED}")
    torch.manual_seed(request.module.SEED)
    torch.compiler.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], object]]:
    """So many processes with the backend "globaltensor" (ranks.py), started once for the tests of all files."""
    from ranks import Ranks  # which imports torch: not while tests are only collected

    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in pools or not pools[size].alive():
            pools[size] = Ranks(size)
        return pools[size]

    yield of
    for pool in pools.values():
        pool.end()


@pytest.fixture(scope="module")
def many_ranks() -> Iterator[None]:
    """A world in which placements of 1,024 ranks may be named; nothing runs on them."""
    import globaltensor as gt
    from globaltensor.runtime import world

    own = gt.init()
    world.begin(replace(own, size=1024, local_ranks=tuple(range(1024))))
    yield
    world.begin(own)
