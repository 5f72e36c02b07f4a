"""How ranks meet: by few messages, whoever comes when, whatever ranks that were there before have left in the store."""
from __future__ import annotations

import heapq
import math
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from harness import PROGRAMS, PYTHON, TORCHRUN, Started, by_hand, environment, free_port, results

from globaltensor.errors import TransportError
from globaltensor.runtime import arrival, liveness, rank_number, store_tree
from globaltensor.runtime.host_processes import own_process
from globaltensor.runtime.liveness import Loss
from globaltensor.runtime.tcp_store import port_error

PATIENCE = timedelta(seconds=600)


class Counting:
    """A store, for one rank, that counts which messages the rank writes and reads; looks for what is not there and
    repeated looks at what has not changed are not messages, but calls."""

    def __init__(self, store, prefix=""):
        self.store, self.prefix, self.messages, self.calls = store, prefix, Counter(), Counter()

    def set(self, key, text):
        self.calls["set"] += 1
        self.messages["write", self.prefix + key, bytes(text)] += 1
        self.store.set(self.prefix + key, text)

    def get(self, key):
        self.calls["get"] += 1
        text = self.store.get(self.prefix + key)
        self.messages["read", self.prefix + key, bytes(text)] += 1
        return text

    def compare_set(self, key, expected, desired):
        self.calls["set"] += 1
        self.messages["write", self.prefix + key, bytes(desired)] += 1
        return self.store.compare_set(self.prefix + key, expected, desired)

    def check(self, keys):
        self.calls["check"] += 1
        return self.store.check([self.prefix + key for key in keys])

    def under(self, name):
        inner = Counting(self.store, f"{name}/")
        inner.messages, inner.calls = self.messages, self.calls
        return inner


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Ranks are threads here, and this process goes on afterwards."""
    monkeypatch.setattr(arrival, "_end_meeting", lambda: None)
    monkeypatch.setattr(arrival, "name_start", lambda name: None)
    monkeypatch.setattr(arrival, "of_this_start", lambda store, name: store.under(name))


@pytest.fixture
def torchruns_store(monkeypatch):
    """The store outlives a start, as it is not a rank that keeps it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def in_threads(size, act):
    """What `act(rank)` gives or raises for every rank, each in a thread."""
    ended = {}

    def run(rank):
        try:
            ended[rank] = act(rank)
        except TransportError as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[rank] for rank in range(size)]


class Turns:
    """A clock for ranks that are threads: one of them runs at a time, until it sleeps, and only sleep makes it late."""

    def __init__(self):
        self.now, self.running, self.wakes = 0.0, 0, []
        self.turns, self.back = defaultdict(partial(threading.Semaphore, 0)), threading.Semaphore(0)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        rank = self.running
        heapq.heappush(self.wakes, (self.now + seconds, rank))
        self.back.release()
        self.turns[rank].acquire()

    def threads(self, size, act):
        """As `in_threads`."""
        def run(rank):
            self.turns[rank].acquire()
            try:
                return act(rank)
            finally:
                self.back.release()

        def pass_on():
            while self.wakes:
                self.now, self.running = heapq.heappop(self.wakes)
                self.turns[self.running].release()
                self.back.acquire()

        self.wakes = [(0.0, rank) for rank in range(size)]
        for rank in range(size):
            self.turns[rank]
        clock = threading.Thread(target=pass_on)
        clock.start()
        ended = in_threads(size, run)
        clock.join()
        return ended


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [2, 9, 64, 256, 1024])
def test_a_rank_of_a_large_world_has_as_few_messages_as_one_of_a_small_world(size, monkeypatch):
    store, clock = dist.HashStore(), Turns()
    own = [Counting(store) for _ in range(size)]
    if size > 64:                                    # so many threads at once wait for each other, not for messages
        for module in (arrival, store_tree):
            monkeypatch.setattr(module, "time", clock)

    def act(rank):
        fresh, processes = arrival.meet(own[rank], rank, size, PATIENCE)
        assert processes == dict.fromkeys(range(size), own_process())
        return store_tree.gather_in_store(fresh, "seat", -rank, rank, size, lambda: None)

    in_turns = clock.threads if size > 64 else in_threads
    assert all(told == [-rank for rank in range(size)] for told in in_turns(size, act))
    # its challenge and the answer, those of 4 children, a value each way for both gatherings, a look at 4 others
    # and of rank 0, that all have met
    assert max(len(one.messages) for one in own) <= 2 + 4 * 2 + 2 * (4 + 2) + 4 + 1
    if size > 64:                                    # on a clock of their own, looks in vain can be counted as well
        assert max(sum(one.calls.values()) for one in own) <= 32 * math.log(size, 4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.long) for k in range(1, 4))])
def test_nothing_that_an_earlier_start_left_is_believed(seed, torchruns_store):
    """Ranks come in any order to a store in which former ones left all they said, as where torchrun starts the ranks
    of several hosts again, each of which counts its own restarts."""
    store, size, names = dist.HashStore(), 7, []
    print("seed", seed)
    draw = random.Random(seed)
    for start in range(4):
        late = [draw.choice([0, 0, 0.05, 0.3]) for _ in range(size)]

        def act(rank, start=start, late=late):
            time.sleep(late[rank])
            fresh, _ = arrival.meet(Counting(store), rank, size, PATIENCE)
            assert not fresh.check([f"address {rank}"]), "of an earlier start"
            fresh.set(f"address {rank}", str(start).encode())
            return fresh.prefix

        told = in_threads(size, act)
        assert len(set(told)) == 1, told
        names.append(told[0])
    assert len(set(names)) == 4


def test_a_rank_follows_rank_0_that_was_started_again(torchruns_store):
    """Where launchers of several hosts start their ranks again without a word to each other, ranks may be answered by
    one that is about to end. They follow the new one as soon as it is there."""
    store, size, began = dist.HashStore(), 2, threading.Event()

    def act(rank):
        if rank == 0:                                # a former rank 0 answers, and ends
            former = arrival._Others(0, size, Counting(store), 60)
            former.come()
            began.wait()
            former.look()
            time.sleep(0.1)
        else:
            threading.Timer(0.2, began.set).start()
        return arrival.meet(Counting(store), rank, size, PATIENCE)[0].prefix

    first, second = in_threads(size, act)
    assert first == second


def test_whoever_notices_that_a_rank_is_gone_tells_all_who_wait():
    store, size = dist.HashStore(), 6

    def act(rank):
        if rank == 1:
            while not store.check([arrival.challenge_key(other) for other in range(size) if other != 1]):
                time.sleep(0.01)
            arrival._tell_of_loss(Counting(store), 1, size, arrival._ended_before({1}))
            return None
        return arrival.meet(Counting(store), rank, size, PATIENCE)

    began = time.monotonic()
    told = in_threads(size, act)
    assert told.pop(1) is None
    assert all("rank 1 ended before all ranks had met" in str(error) for error in told), told
    assert time.monotonic() - began < 5


class Interrupted:
    """A store in which something else happens just before the n-th thing that is done there."""

    def __init__(self, store, n, event):
        self.store, self.left, self.event = store, n, event

    def __getattr__(self, name):
        if self.left == 0:
            self.event()
        self.left -= 1
        return getattr(self.store, name)


@pytest.mark.parametrize("moment", [None, *range(6)])
def test_an_answer_does_not_take_the_place_of_a_loss(moment):
    """Somebody tells a child that a rank is gone, before its parent looks after it, or at any moment meanwhile."""
    store = dist.HashStore()
    parent, child = (arrival._Others(rank, 3, store, 60) for rank in (0, 1))

    def tell():
        arrival._tell_of_loss(store, 2, 3, arrival._ended_before({2}))

    child.come()
    if moment is None:
        tell()
    else:
        parent.store = Interrupted(store, moment, tell)
    parent.look()
    assert moment is None or parent.store.left < 0, "the parent does not do so much"
    with pytest.raises(TransportError, match="rank 2 ended before all ranks had met"):
        child.hear()


def test_ranks_that_were_started_with_other_sizes_are_told():
    store = dist.HashStore()
    told = in_threads(2, lambda rank: arrival.meet(Counting(store), rank, 2 + rank, PATIENCE))
    assert all("rank 1 was started as one of 3 ranks, rank 0 as one of 2" in str(error) for error in told), told


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 1), (1, 1, 2), (0, 0, 0, 0), (1, 1, 1)])
def test_all_are_told_of_a_rank_that_is_started_twice(ranks):
    """Whoever comes first, and whoever does not come because of it."""
    store, size, began = dist.HashStore(), 3, time.monotonic()
    told = in_threads(len(ranks), lambda k: arrival.meet(Counting(store), ranks[k], size, PATIENCE))
    twice = next(rank for rank in ranks if ranks.count(rank) > 1)
    for error in told:
        assert f"rank {twice} was started twice: as process " in error.what and "RANK=0, RANK=1" in error.fix, told
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("rank, text", [(0, "rank 0 was started twice"), (1, "rank 1 was started twice"),
                                        (2, "rank 2 came when all ranks had met")])
def test_who_comes_when_all_have_met_is_told_and_they_go_on(rank, text):
    store, began = dist.HashStore(), time.monotonic()
    fresh = [fresh for fresh, _ in in_threads(2, lambda r: arrival.meet(Counting(store), r, 2, PATIENCE))]
    with pytest.raises(TransportError, match=text):
        arrival.meet(Counting(store), rank, 2 + rank // 2, PATIENCE)
    assert in_threads(2, lambda r: store_tree.gather_in_store(fresh[r], "seat", r, r, 2, lambda: None)) == [[0, 1]] * 2
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("process", [own_process()._replace(began=1), own_process()._replace(host="another")],
                         ids=["here", "elsewhere"])
def test_a_rank_that_was_killed_before_all_had_met_may_be_started_again(process, monkeypatch):
    """As Kubernetes does, on another host too: there the process of before answers nobody."""
    monkeypatch.setattr(rank_number, "_ANSWERING", 0.3)
    store, key = dist.HashStore(), arrival.challenge_key(1)
    store_tree.write_message(store, key, ("a challenge", process, "a host"))
    rank_number.take_rank(1, "another challenge", store)
    assert store_tree.read_message(store, key)[:2] == ("another challenge", own_process())


def test_a_rank_that_waits_answers_one_of_another_host(monkeypatch):
    """Of which no kernel tells."""
    store = dist.HashStore()
    monkeypatch.setattr(rank_number, "own_process", lambda: own_process()._replace(host=str(threading.get_ident())))
    told = in_threads(2, lambda _: arrival.meet(Counting(store), 1, 3, PATIENCE))
    assert all("rank 1 was started twice" in str(error) for error in told), told


def test_who_does_not_come_is_named():
    store, size = dist.HashStore(), 6
    told = in_threads(size, lambda rank: rank in (2, 4) or arrival.meet(Counting(store), rank, size,
                                                                        timedelta(seconds=2)))
    assert all("ranks 2, 4 did not come within 2 s" in str(told[rank]) for rank in (0, 1, 3, 5)), told


def test_an_answer_to_another_challenge_is_none():
    store = Counting(dist.HashStore())
    others = arrival._Others(1, 2, store, 60)
    for key, answer in ((arrival._answer_key(1), "a name"), (arrival.loss_key(1), tuple(Loss(0, "rank 0 ended")))):
        store_tree.write_message(store, key, ("of another", answer))
        others.hear()
        assert others.name == ""
    store_tree.write_message(store, arrival.loss_key(1), (others.challenge, (0, "rank 0 ended")))
    with pytest.raises(TransportError, match="rank 0 ended"):
        others.hear()
    store.set(arrival._answer_key(1), b"nonsense")   # which nobody of this job has signed
    with pytest.raises(TransportError, match="wrong signature"):
        others.hear()


def listening(answers):
    """A server that is no store, the pages that it gives being none that anybody asked for."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        held = []                                    # else what is silent would close
        with suppress(OSError):
            while True:
                held.append(server.accept()[0])
                if answers:
                    held[-1].sendall(answers)
                    held.pop().close()

    threading.Thread(target=serve, daemon=True).start()
    return server


@pytest.mark.parametrize("rank, host, answers, what, fix", [
    ("1", "no-such-host.invalid", None, "the ranks cannot meet at no-such-host.invalid", "MASTER_ADDR=HOST"),
    ("0", "no-such-host.invalid", None, "the ranks cannot meet at no-such-host.invalid", "MASTER_ADDR=HOST"),
    ("1", "two..dots", None, "the ranks cannot meet at two..dots", "MASTER_ADDR=HOST"),
    ("1", "127.0.0.1", b"", "what listens at 127.0.0.1:PORT is not rank 0", "another MASTER_PORT"),
    ("1", "127.0.0.1", b"HTTP/1.0 400 Bad Request\r\n\r\n", "what listens at 127.0.0.1:PORT is not", "another MASTER_"),
    ("0", "127.0.0.1", b"", "rank 0 cannot listen at port PORT", "MASTER_PORT="),
    ("0", "127.0.0.1", None, "rank 0 cannot listen at port PORT", "MASTER_PORT=")])
def test_a_place_to_meet_that_is_none_is_named_soon(rank, host, answers, what, fix, monkeypatch):
    """Not when the half hour is over that ranks may come later; a server that is silent would keep torch for ever."""
    monkeypatch.setattr(arrival, "_NAMELESS", 0.1)
    monkeypatch.setattr(arrival, "_ANSWERING", timedelta(seconds=1))
    server = listening(answers)
    port = str(server.getsockname()[1])
    for name, value in dict(RANK=rank, WORLD_SIZE="2", MASTER_ADDR=host, MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with server, pytest.raises(TransportError) as caught:
        arrival.open_store(PATIENCE)
    assert what.replace("PORT", port) in caught.value.what and fix in caught.value.fix and caught.value.why
    assert time.monotonic() - began < 40 and ("unset RANK WORLD_SIZE" in caught.value.fix or "another program listens "
                                              "there" in caught.value.why)


def test_the_port_that_is_to_be_typed_is_free(monkeypatch):
    with listening(None) as server:
        error = port_error(port := server.getsockname()[1], f"port: {port}, name: EACCES, message: permission denied")
    assert error.why == "permission denied"
    with socket.create_server(("", int(error.fix.removeprefix("MASTER_PORT=").partition(",")[0]))) as other:
        assert other.getsockname()[1] > port
    assert int(port_error(80, "x").fix.removeprefix("MASTER_PORT=").partition(",")[0]) >= 1024


@pytest.mark.processes
@pytest.mark.parametrize("ranks", ["011", pytest.param("001", marks=pytest.mark.long)])
def test_a_rank_in_two_processes_is_named_by_all(ranks, tmp_path):
    """None of them goes on, or ends, before the others come."""
    program = tmp_path / "program.py"
    program.write_text("import time, globaltensor as gt\ngt.placement.all('cpu')\ntime.sleep(30)\n")
    env = environment(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE="3")
    started = [Started([PYTHON, program], env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ranks]
    for code, out, err in [one.end() for one in started]:
        assert code == 1 and f"rank {ranks[1]} was started twice: as process " in err and "try:" in err, out + err


@pytest.mark.processes
def test_a_port_that_is_taken_is_named_and_the_other_ranks_do_not_wait_for_rank_0(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import globaltensor as gt\ngt.placement.all('cpu')\n")
    with listening(None) as server:
        port = str(server.getsockname()[1])
        env = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_WORLD_SIZE="2")
        started = [Started([PYTHON, program], env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
        errors = [one.end()[2] for one in started]
    assert f"rank 0 cannot listen at port {port} of " in errors[0] and "rank 0 ended before all" in errors[1], errors


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_waits_for_long_says_so(rank, monkeypatch):
    monkeypatch.setattr(arrival, "_SILENT", 0.1)
    monkeypatch.setattr(arrival, "of_this_start", lambda store, name: store)
    port = str(free_port())
    for name, value in dict(RANK=rank, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    patience, awaited = timedelta(seconds=1), "ranks 1, 2" if rank == "0" else "rank 0"
    with pytest.warns(UserWarning, match=f"rank {rank} of 3 waits at 127.0.0.1:{port} for {awaited}\n") as said:
        with pytest.raises(TransportError, match="did not come within 1 s"):
            arrival.meet(arrival.open_store(patience), int(rank), 3, patience)
    assert len(said) == 1


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_two_hosts_of_which_each_counts_its_own_restarts(tmp_path):
    """torchrun keeps one store for both starts. Its launchers are told apart by their counts."""
    place = f"127.0.0.1:{free_port()}"
    line = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 2, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", place, "--rdzv-id", "two", "--local-addr", "127.0.0.1", "--monitor-interval", 0.2,
            PROGRAMS / "started_again.py", tmp_path]
    hosts = [Started(line, environment(GLOO_SOCKET_IFNAME="lo", GLOBALTENSOR_SECRET="x")) for _ in range(2)]
    for host in hosts:
        code, out, err = host.end(200)
        assert code == 0, out + err
    told = results(tmp_path)
    assert sorted(each["restarts"] for each in told.values()) == ["0", "1"], told
    assert all(each["value"] == 28 * 21 for each in told.values()), told


@pytest.mark.processes
@pytest.mark.usefixtures("real_processes")           # a fork has imported this library before the program begins
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_before_the_meeting_says_so_before_it_has_ended(rank, tmp_path):
    """As where the end of the interpreter takes long on a busy host."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import atexit, os, time
if os.environ["RANK"] == "{rank}":
    atexit.register(time.sleep, 30)                  # the first that is registered is called last
import globaltensor as gt
if os.environ["RANK"] == "{rank}":
    time.sleep(2)
    raise ValueError("bad luck")
gt.placement.all("cpu")
""")
    began, started = time.monotonic(), by_hand([program], 3)
    for other, one in enumerate(started):
        if other != rank:
            assert f"rank {rank} ended before all ranks had met" in one.end(25)[2]
    assert started[rank].process.poll() is None and time.monotonic() - began < 25
    started[rank].process.kill()
    assert "bad luck" in started[rank].end()[2]


def test_a_store_is_connected_to_patiently_and_then_asked_with_little_patience(monkeypatch):
    """Where 64 ranks start on two cores, who keeps the store may take more than ten seconds to answer at first."""
    kept, asked = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    class Noted(dist.TCPStore):
        def __init__(self, *args, timeout, **kwargs):
            asked.append(timeout)
            super().__init__(*args, timeout=timeout, **kwargs)

    monkeypatch.setattr(dist, "TCPStore", Noted)
    near = Noted("127.0.0.1", kept.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    own = liveness.connected_to(near, patience=0.2)
    assert asked[1] >= timedelta(seconds=60) and own.timeout == timedelta(seconds=0.2)
    with pytest.raises(dist.DistStoreError):
        own.get("never")
