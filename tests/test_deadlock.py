"""Which waits are a deadlock, and that what a rank publishes does not mislead the others."""
from __future__ import annotations

import threading
import time

import pytest

from globaltensor.runtime import deadlock, liveness
from globaltensor.runtime.codec import encode_message
from globaltensor.runtime.deadlock import Wait, Watch, deadlocked
from globaltensor.runtime.host_processes import ProcessId, host_id


def waits(**of):
    """r0=(peers, tag) ... -> {0: Wait, ...}; None for a rank that does not wait."""
    return {int(rank[1:]): None if w is None else Wait(1, "a boxing", w[0], w[1]) for rank, w in of.items()}


@pytest.mark.parametrize("published, expected", [
    (waits(r0=((1,), 7), r1=((0,), 7)), False),                                  # slow, but met
    (waits(r0=((1,), 7), r1=((0,), 8)), True),                                   # another op
    (waits(r0=((1,), 7), r1=None), False),                                       # rank 1 computes
    (waits(r0=((1,), 7), r1=((2,), 7), r2=((0,), 7)), True),                     # a circle
    (waits(r0=((1,), 7), r1=((0, 2), 7), r2=((1,), 7)), False),                  # rank 0 and 2 are met
    (waits(r0=((1, 2), 7), r1=((0, 2), 7), r2=((3,), 9), r3=((0, 1, 2), 5)), True),
    (waits(r0=((1, 2), 7), r1=((0, 2), 7), r2=((3,), 9), r3=((2,), 9)), False),  # 2 and 3 go on, and then all
])
def test_what_is_a_deadlock(published, expected):
    assert deadlocked(published) is expected


def elsewhere(rank=1):
    """What that rank publishes."""
    return encode_message((1, "zeros", (0,), 8, "program.py:3"), rank)


class Store(dict):
    """The three calls of torch's store that are used."""

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def pair(monkeypatch):
    """Two ranks that share a store, watched without threads of their own."""
    store = Store()
    monkeypatch.setattr(deadlock, "PERIOD", 0.01)
    watches = [Watch(store, rank, 2) for rank in range(2)]
    monkeypatch.setattr(deadlock, "_watch", watches[0])
    return watches


def test_who_goes_on_withdraws_what_it_published(pair):
    mine, other = pair
    with deadlock.waiting("a boxing", (1,), 7):
        assert mine.publish(deadlock._current)
        assert "test_deadlock.py:" in mine.published.where
        assert other.waits() is None and other.busy == 1        # itself has published nothing
        for unsigned in (b"null", b"", elsewhere()[:-1], elsewhere(0)):
            other.store.set("globaltensor wait 1", unsigned)         # not written by rank 1
            assert other.waits() is None
        other.store.set("globaltensor wait 1", elsewhere())
        assert other.waits()[0].what == "a boxing"
    assert mine.published is None and other.waits() is None and other.busy == 0


def test_a_wait_that_is_over_is_not_published(pair):
    mine, _ = pair
    with deadlock.waiting("a boxing", (1,), 7):
        then = deadlock._current
    assert not mine.publish(then) and mine.published is None


def test_a_deadlock_is_found_and_the_last_rank_ends(pair, monkeypatch):
    mine, other = pair
    ended, shown = [], []
    monkeypatch.setattr(deadlock.os, "_exit", lambda code: (ended.append(code), setattr(deadlock, "_current", None)))
    monkeypatch.setattr(deadlock.sys, "excepthook", lambda kind, error, at: shown.append(str(error)))
    with deadlock.waiting("a boxing", (1,), 7):
        assert mine.publish(deadlock._current)
        other.store.set("globaltensor wait 1", elsewhere())
        monkeypatch.setattr(other, "publish", lambda now: True)
        threading.Thread(target=other.look, daemon=True).start()     # takes this process's wait for its own
        by = time.monotonic() + 10
        while not ended and time.monotonic() < by:
            time.sleep(0.01)
    assert ended == [1] and "rank 1 waits for rank 0 in zeros   at program.py:3" in shown[0]
    error = deadlock.detected()
    assert "rank 0 waits for rank 1 in a boxing" in str(error) and "test_deadlock.py" in error.where


def test_without_a_watch_there_is_no_verdict(monkeypatch):
    monkeypatch.setattr(deadlock, "_watch", None)
    assert deadlock.detected() is None


@pytest.mark.parametrize("file, told", [("torch/distributed/distributed_c10d.py", True), ("train.py", False)])
def test_a_rank_in_a_collective_of_its_own_is_told_to_be_there(monkeypatch, file, told):
    monkeypatch.setattr(liveness, "process_of", lambda rank: ProcessId(host_id(), 1, 0))
    monkeypatch.setattr(liveness, "stack_of", lambda pid: f'  File "/x/{file}", line 5 in barrier')
    assert ("in a call of torch.distributed" in liveness.stacks_of([0])) is told
