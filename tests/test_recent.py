"""What is remembered is bounded by bytes, whatever an entry takes up: gt.config.cache_bytes."""
import os
import subprocess
import sys
from random import Random
from threading import Thread
from weakref import finalize, ref

import pytest
import torch

import globaltensor as gt
from globaltensor.layouts import recent
from globaltensor.layouts.recent import KEPT, Recent, bytes_of, remembered

MEGABYTE = 1 << 20


@pytest.fixture
def small():
    before = gt.config.cache_bytes
    gt.config.cache_bytes = 16 * MEGABYTE
    for cache in [*recent._caches.values()]:         # to weigh what earlier tests have left takes long
        cache.clear()
    yield 16 * MEGABYTE
    gt.config.cache_bytes = before


class Value:
    """Of so many bytes."""

    def __init__(self, nbytes):
        self.text = "x" * nbytes


def test_an_object_is_weighed_with_what_it_holds_but_not_with_what_many_share():
    assert bytes_of(Value(MEGABYTE)) > MEGABYTE
    shared = "x" * MEGABYTE
    assert bytes_of([shared, (shared, {1: shared})]) < 1.01 * MEGABYTE
    assert bytes_of({"t": torch.zeros(1000)}) > 4000
    layout = gt.zeros(4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.broadcast).spec.layout
    for rank in range(2):
        layout.region((4,), rank)
    assert bytes_of((layout, gt.Plan, torch.ops.aten.add.Tensor)) < 200


SIZES = {"alike": [100_000] * 1500, "one large": [100, 100, 100, 2_000_000] * 200, "growing": range(0, 900_000, 900),
         "shrinking": range(900_000, 0, -900)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["remembered", "Recent"])
def test_entries_of_any_sizes_stay_below_the_limit(small, kind, sizes):
    """By what is alive, not by what was estimated."""
    alive, most = set(), 0
    results, dictionary = remembered(lambda k, nbytes: Value(nbytes)), Recent()
    for k, nbytes in enumerate(SIZES[sizes]):
        if kind == "remembered":
            value = results(k, nbytes)
        else:
            dictionary[k] = value = Value(nbytes)
        alive.add(k)
        finalize(value, alive.discard, k)
        del value
        most = max(most, sum(SIZES[sizes][k] for k in alive))
    assert small / 8 < most < small * 0.65


def test_what_a_value_works_out_later_counts(small):
    values = []

    @remembered
    def empty(k):
        values.append(ref(value := Value(0)))
        return value

    for k in range(400):
        empty(k).text = "x" * 100_000
        Recent()[k] = Value(100_000)                     # so that all are weighed now and then
    assert sum(of() is not None for of in values) * 100_000 < small


def test_the_number_of_entries_is_bounded_too():
    results, dictionary = remembered(lambda k: k), Recent()
    for k in range(3 * KEPT):
        results(k)
        dictionary[k] = k
    assert len(dictionary) <= 2 * KEPT and results.cache_info().currsize == KEPT
    assert dictionary.get(3 * KEPT - 1) == 3 * KEPT - 1 and dictionary.get(0) is None


PROGRAM = """
import gc, sys, torch
import globaltensor as gt
gt.config.cache_bytes = int(sys.argv[1])
where = gt.placement("cpu", [list(range(8 * k, 8 * k + 8)) for k in range(2)])
S = gt.sbp.split

def step(k):
    full = torch.arange(float((k + 33) * 35)).view(k + 33, 35)
    x = gt.from_full(full, where, [S(0), S(0)])
    assert torch.equal((x.to_global(sbp=[S(1), S(1)]) * 2).full_tensor(), full * 2)

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for k in range(15):
    step(k)
before = resident()
for k in range(15, 75):
    step(k)
print((resident() - before) / 1e6)
"""


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_boxings_of_many_ranks_do_not_pile_up(native):
    """Each new length takes up some 200 KB on 16 ranks of one process, 2.8 MB on 64: thousands of them gigabytes."""
    env = {**os.environ, "GLOBALTENSOR_RANKS": "16", "OMP_NUM_THREADS": "1", "GLOBALTENSOR_NATIVE": native}
    left = [float(subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(nbytes)], env=env, check=True,
                                 capture_output=True, text=True).stdout) for nbytes in (2 * MEGABYTE, 1 << 40)]
    assert left[0] < 5 and left[1] > left[0] + 5, left


@pytest.mark.parametrize("wrong", ["64MB", -1, 0, 2.0, True, None, 1000])
def test_a_limit_that_is_none(wrong):
    before = gt.config.cache_bytes
    with pytest.raises(gt.ArgumentError, match="a number of bytes, 1 MiB or more") as raised:
        gt.config.cache_bytes = wrong
    assert "gt.config.cache_bytes = 64 << 20" in str(raised.value) and gt.config.cache_bytes == before


def test_a_setting_that_is_none():
    with pytest.raises(gt.ArgumentError, match="no setting 'cache_byte'") as raised:
        gt.config.cache_byte = 3
    assert "gt.config.cache_bytes=..." in str(raised.value)
    assert repr(gt.config) == f"gt.config(cache_bytes={gt.config.cache_bytes})"


def test_settings_have_an_effect_at_once(small):
    gt.config.cache_bytes = 1 << 40                  # other caches of this process count, too
    dictionary = Recent()
    for k in range(60):
        dictionary[k] = Value(100_000)
    assert len(dictionary) == 60
    gt.config.cache_bytes = MEGABYTE
    assert not dictionary and recent.limit.nbytes == MEGABYTE


class SlowKey:
    """Its hash and equality are Python's, where another thread may come in."""

    def __init__(self, n):
        self.n = n

    def __hash__(self):
        return hash(self.n)

    def __eq__(self, other):
        return self.n == other.n


def test_several_threads_share_one():
    wrong, kept = [], Recent(8)

    def use(seed):
        numbers = Random(seed)
        try:
            for i in range(20_000):
                key = SlowKey(numbers.randrange(20))
                if kept.get(key) is None:
                    kept[key] = 1
                if i % 500 == seed:
                    kept.clear()
                if i % 50 == seed:
                    kept.forget(lambda key: key.n == seed)
        except Exception as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
