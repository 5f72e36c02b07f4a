"""Boxings over hosts: plans in two levels, steps by groups, collectives of torch.distributed, many tensors as one."""
from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from harness import PROGRAMS, ROOT, by_hand, results
from shards import cut, place

import globaltensor as gt
from globaltensor.boxings.group_step import group_step
from globaltensor.boxings.levels import divide_axes
from globaltensor.boxings.plan import plan, plan_bytes
from globaltensor.boxings.redistribute import Move, plan_together
from globaltensor.boxings.route import route
from globaltensor.boxings.run_steps import RunningBoxing
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.regions import volume
from globaltensor.layouts.sbp import broadcast as B, partial_max, partial_sum as P, split as S
from globaltensor.runtime import collectives, world
from globaltensor.runtime.machine import nccl, shared_memory
from globaltensor.simulator.cluster import hypothetical_placements

sys.path.insert(0, str(ROOT))                        # benchmarks/ is part of a checkout, not of the package
from benchmarks.hosts import overlap

SEED = 20_261_123
STATES = [B, P, S(0), S(1)]
PLACES = {                                           # ranks, and the host of each
    "4 on 2": ([0, 1, 2, 3], (0, 0, 1, 1)),
    "4 on 2 in turns": ([0, 1, 2, 3], (0, 1, 0, 1)),
    "8 on 2": ([*range(8)], (0, 0, 0, 0, 1, 1, 1, 1)),
    "8 on 4": ([*range(8)], (0, 0, 1, 1, 2, 2, 3, 3)),
    "grid": ([[0, 1], [2, 3]], (0, 0, 1, 1)),
    "grid across": ([[0, 2], [1, 3]], (0, 0, 1, 1)),
    "wide grid": ([[0, 1, 2, 3], [4, 5, 6, 7]], (0, 0, 1, 1, 2, 2, 3, 3)),
    "three axes": ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], (0, 0, 0, 0, 1, 1, 1, 1)),
}


@pytest.fixture
def on(monkeypatch):
    """A placement of that name, and a machine that says its ranks are on several hosts."""
    def placed(name):
        ranks, hosts = PLACES[name]
        return place(ranks), replace(shared_memory, hosts=hosts)
    return placed


def over_link(of, shape, hosts):
    """Elements that all hosts together receive from others in a plan, counted piece by piece."""
    return sum(volume(region) for step in of.steps for rank in step[1].placement.flat
               for region, sources in route(*step, of.view or shape).pieces(rank)
               for source in sources if hosts[source] != hosts[rank])


def least_over_link(src, dst, shape, hosts):
    """The least that any algorithm needs: per element, its terms are added up host by host, reach one host that wants
    it, and go from there to the others that do."""
    everyone = sorted({hosts[rank] for rank in src.placement.flat})
    terms, wanting = {}, {}
    for rank in src.placement.flat:
        at = src.placement.coords[rank]
        term = tuple(i for i, s in zip(at, src.sbp) if s.is_partial)
        for of, held, key in ((src, terms, (term, hosts[rank])), (dst, wanting, hosts[rank])):
            mask = held.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            mask[tuple(slice(*ends) for ends in of.region(shape, rank))] = True
    total = torch.full(shape, 1_000)
    names = {term for term, _ in terms}
    none = torch.zeros(shape, dtype=torch.bool)
    alone = {host: torch.stack([terms.get((term, host), none) for term in names]).all(0) for host in everyone}
    for n in range(1, len(everyone) + 1):
        for adding in itertools.combinations(everyone, n):
            covered = torch.stack([torch.stack([terms.get((term, host), none) for host in adding]).any(0)
                                   for term in names]).all(0)
            for root in everyone:
                wants = wanting.get(root, none)
                others = sum(((wanting.get(host, none) & ~alone[host]).long() for host in everyone if host != root),
                             torch.zeros(shape))
                cost = (n - (root in adding)) + others
                total = torch.where(covered & wants, torch.minimum(total, cost.long()), total)
    return int(total.sum())


def pairs_of_sbps(where):
    """Without pending results: ranks may share a pending sum as they like."""
    every = itertools.product(STATES, repeat=where.ndim)
    return [(src, dst) for src, dst in itertools.product(every, repeat=2) if src != dst and P not in dst]


def hands_over(src, dst):
    """Does an axis split a dim that another one split, so that a split of it does not just end or begin?"""
    paths = [[[axis for axis, s in enumerate(sbp) if s == S(d)] for sbp in (src, dst)] for d in (0, 1)]
    return any(a[:min(len(a), len(b))] != b[:min(len(a), len(b))] for a, b in paths)


@pytest.mark.parametrize("name", PLACES)
def test_bytes_over_the_link_are_the_least_possible(name, on):
    """Of pairs of layouts; but where dims pass from axis to axis, of most."""
    (where, machine), shape, more = on(name), (64, 64), []
    pairs = pairs_of_sbps(where)
    for src, dst in random.Random(SEED).sample(pairs, min(len(pairs), 300)):
        a, b = layout(where, src), layout(where, dst)
        best = plan(a, b, shape, 64 << 20, machine)
        moved, least = over_link(best, shape, machine.hosts), least_over_link(a, b, shape, machine.hosts)
        assert moved >= least, f"{src} -> {dst} takes {moved} over the link, and {least} is the least"
        if hands_over(src, dst):
            more.append((moved, least))
        else:
            assert moved == least, f"{src} -> {dst} takes {moved} over the link, not {least}"
    moved, least = (sum(column) for column in zip((0, 0), *more))
    print(f"{name}: {sum(a > b for a, b in more)} of {len(more)} that pass dims from axis to axis: {moved} for {least}")
    assert moved <= 1.7 * least


@pytest.mark.parametrize("shape", [(8, 16), (5, 3), (16, 4), (1, 7)], ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_values_survive_both_levels(name, shape, on):
    """Plans for several hosts, done in one process: the value is the same in every layout, even or not."""
    (where, machine), generator, r = on(name), torch.Generator().manual_seed(SEED), random.Random(SEED)
    pairs, in_levels = pairs_of_sbps(where), 0
    for src, dst in r.sample(pairs, min(len(pairs), 40)):
        value = torch.randint(-9, 10, shape, generator=generator).double()
        x, to = whole_of(value, where, src, generator), layout(where, dst)
        best = plan(x.spec.layout, to, shape, 64 << 20, machine)
        in_levels += bool(best.levels)
        shards, = RunningBoxing([Move(x.spec, x.shards, to)], [best], "a test").finish()
        for rank, shard in shards.items():
            expected = value[tuple(slice(*ends) for ends in to.region(shape, rank))]
            assert torch.equal(shard, expected), f"{src} -> {dst} of {shape}, rank {rank}: {best}"
    assert in_levels or shape == (1, 7) or shape == (5, 3)


def whole_of(value, where, sbp, generator):
    """A global tensor of that value, cut by hand; pending parts are whole numbers, which any order sums alike."""
    shards = [value]
    for s, parts in zip(sbp, where.shape):
        shards = [part for shard in shards for part in (
            _terms(shard, parts, generator) if s == P else cut(shard, s, parts, generator))]
    return gt.GlobalTensor.wrap(spec(layout(where, sbp), tuple(value.shape), None, value.dtype),
                                dict(zip(where.flat, shards)))


def _terms(t, parts, generator):
    terms = [torch.randint(-9, 10, t.shape, generator=generator).double() for _ in range(parts - 1)]
    return [*terms, t - sum(terms)]


def test_a_step_of_a_group_is_its_part_of_the_step():
    """The pieces that a group takes by its own step are those of the whole one: as many elements, of the same ranks."""
    r, where = random.Random(SEED), place([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    every, checked = list(itertools.product([*STATES, partial_max], repeat=3)), 0
    while checked < 150:
        src, dst, shape = r.choice(every), r.choice(every), r.choice([(8, 16), (5, 3), (11, 4)])
        if len({s.op for s in src if s.is_partial}) > 1 or partial_max in dst:
            continue
        a, b = layout(where, src), layout(where, dst)
        for rank in where.flat:
            group = group_step(a, b, shape, rank)
            if group is None:
                continue
            checked += 1
            whole, own = (sorted((volume(region), sources) for region, sources in step.pieces(rank) if region or shape)
                          for step in (route(a, b, shape), route(*group)))
            assert set(group.ranks) >= {q for _, sources in whole for q in sources}, f"{src} -> {dst}"
            assert sum(n * len(q) for n, q in whole) == sum(n * len(q) for n, q in own) or P in dst, f"{src} -> {dst}"
            assert group.dst.local_shape(group.shape, rank) == b.local_shape(shape, rank)


def test_many_tensors_are_planned_as_one(monkeypatch):
    """10,000 gradients of 128 KB on 8 ranks, NCCL's rates: reduced in two halves, 1.75 times their bytes, not 7."""
    where = place([*range(8)])
    monkeypatch.setattr(world.world(), "machine", nccl)
    gradient = spec(layout(where, (P,)), (256, 128), None, torch.float32)
    move = Move(gradient, {}, layout(where, (B,)))
    for many, factor in ((1, 7), (10_000, 1.75)):
        best = plan_together([move] * many)
        assert {max(plan_bytes(each, gradient.shape, 4).values()) for each in best} == {factor * gradient.nbytes}


# ---------------------------------------------------------------------------------------------------- processes


def check_notes(folder, ranks):
    """All processes counted the same, and named the same collectives."""
    seen = results(folder)
    assert sorted(seen) == list(range(ranks)) and all(notes == seen[0] for notes in seen.values())
    return seen[0]


HOSTS = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
LINE = ["[4] torch.float32", "[4] torch.int64"]


@pytest.mark.processes
@pytest.mark.parametrize("native, per_host, most, few", [
    ("1", 2, 12, 4), *[pytest.param(*case, marks=pytest.mark.long) for case in (
        ("1", 1, 12, 1), ("1", 2, 300, 4), ("0", 4, 300, 4), ("1", 1, 300, 4), ("1", 1, 300, 1), ("0", 1, 100, 1))]])
def test_processes_on_several_hosts(native, per_host, most, few, tmp_path):
    """Processes that are said to be on several hosts share no memory: collectives do what has their name, or messages
    where no more than a `few` ranks gather."""
    for one in by_hand([PROGRAMS / "hosts.py", tmp_path, most, few], 4, LOCAL_WORLD_SIZE=str(per_host),
                       GLOBALTENSOR_NATIVE=native, **HOSTS):
        code, out, err = one.end(200)
        assert code == 0, out + err
    notes, nbytes = check_notes(tmp_path, 4), 4 * (256 * 512 + 4 * 12)
    assert notes["[4] torch.float32 (P,) -> (B,)"] == [2 * 3 * nbytes // 4, ["all_reduce"]]
    assert notes["[4] torch.float32 (S(0),) -> (B,)"] == [3 * nbytes // 4, ["all_gather"]]
    assert notes["[4] torch.float32 (S(0),) -> (S(1),)"] == [
        nbytes * (4 if per_host == 2 else 3) // 16, ["all_to_all"]]
    assert notes["[4] torch.float32 (P,) -> (S(0),)"] == [3 * nbytes // 4, []]           # gloo would move twice that
    assert "all_reduce" not in notes["[4] torch.float32 (P(max),) -> (B,)"][1]           # gloo would lose a NaN


@pytest.mark.processes
@pytest.mark.parametrize("ranks, per_host, which", [
    (4, 2, "grid"), *[pytest.param(n, 1, "all", marks=pytest.mark.long) for n in (2, 4, 6)]])
def test_zero_gathers_while_the_next_forward_pass_begins(ranks, per_host, which):
    """Parameters over a link come while the program goes on, by messages or, of many ranks, by gloo's all-gather."""
    for one in by_hand([PROGRAMS / "write_behind.py", which], ranks, LOCAL_WORLD_SIZE=str(per_host), **HOSTS):
        code, out, err = one.end(100)
        assert code == 0, out + err


@pytest.mark.processes
def test_a_process_ends_with_its_messages_sent():
    for one in by_hand([PROGRAMS / "write_behind.py", "ends"], 2, LOCAL_WORLD_SIZE="1", **HOSTS):
        code, out, err = one.end(100)
        assert code == 0 and out == "with 0 messages that nobody waited for\n", out + err


@pytest.mark.processes
def test_gradients_are_reduced_during_backward_where_a_link_is_waited_for(tmp_path):
    """The same bits as when reduced at once, of two ranks; each is sent once, so not where gradients come twice."""
    for one in by_hand([PROGRAMS / "overlap.py", tmp_path], 2, LOCAL_WORLD_SIZE="1", **HOSTS):
        code, out, err = one.end(100)
        assert code == 0, out + err
    seen = check_notes(tmp_path, 2)
    first, *middle, _ = seen["plain"]
    assert first == 0 and all(n >= 3 for n in middle), seen
    assert seen["recorded by one"] == seen["plain"], seen
    assert seen["zero"][0] == 0 and min(seen["zero"][1:3]) >= 2 and seen["micro-batches"] == [0, 0, 0, 0], seen


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0 or None in (shutil.which("ip"), shutil.which("tc")),
                    reason="network namespaces need root, ip and tc")
def test_a_transfer_is_hidden_behind_computation_that_takes_as_long():
    """100 ms of transfer beside 100 ms of backward take at most 120 ms: the least of some steps, as load only adds. So
    does a boxing that was begun beside a sleep."""
    row = overlap(steps=10)
    print(row)
    assert 0.8 <= row["backward"] / row["transfer"] <= 1.25, row
    assert row["of the longer"] <= 1.2 and row["begun"] <= 1.2 * row["boxing"], row


def test_real_placements_stay_real_where_others_are_described():
    """What is run on described ranks is run for the first one; a plan is made in a program that has ranks of its own,
    and may ask for the groups of these while it is made: the answers are kept."""
    ranks, hosts = [[0, 1], [2, 3]], (0, 0, 1, 1)
    real = gt.placement("meta", ranks)
    src, dst = layout(real, (P, S(0))), layout(real, (B, S(0)))
    with hypothetical_placements():
        group, divided = group_step(src, dst, (4, 4), 1), divide_axes(real, hosts)
        described = gt.placement("meta", ranks)
        x = gt.ones(4, 4, placement=described, sbp=(S(0), S(1)))
        assert list((x @ x).shards) == [0]
    assert group is group_step(src, dst, (4, 4), 1) and world.local_ranks_of(group.src.placement) == (1, 3)
    assert divided is divide_axes(real, hosts) and world.local_ranks_of(divided.across_first) == (0, 1, 2, 3)
    assert described != real
    y = gt.ones(4, 4, placement=real, sbp=(S(0), S(1)))
    assert list((y @ y).shards) == [0, 1, 2, 3]


class Ended:
    """A collective that was not done when one last looked, and is once one asks."""

    def __init__(self, fails):
        self.fails, self.done = fails, False

    def wait(self, patience=None):
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self):
        return self.done


@pytest.mark.parametrize("fails", [False, True])
def test_a_collective_that_ends_right_after_a_look_has_ended(fails):
    """Its time-out is one of the look, and no failure of what has been done since."""
    call = collectives.Collective("all_gather", (0, 1), torch.zeros(1), torch.zeros(2))
    with pytest.raises(RuntimeError, match="closed by peer") if fails else nullcontext():
        collectives._wait_for_collective(call, Ended(fails))
