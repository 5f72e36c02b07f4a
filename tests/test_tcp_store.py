"""Connections to the store that ask no name server, and leave the resolver as it was."""
from __future__ import annotations

import ctypes
import inspect
import os
import platform
import re
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import good

from globaltensor.runtime import deadlock, liveness, store_tree, tcp_store
from globaltensor.runtime.host_processes import ProcessId
from globaltensor.runtime.liveness import Liveness, Loss, of_this_start, own_connection
from globaltensor.runtime.tcp_store import NamelessStore, connect_store, no_name_server

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has name servers per thread")
PATIENCE = timedelta(seconds=30)


def name_servers() -> int:
    """What glibc has noted of them for this thread: the fifth number of `struct __res_state`."""
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    libc.__res_init()
    return libc.__res_state()[4]


def test_a_thread_has_no_name_server_for_a_while_and_others_keep_theirs():
    path = Path("/etc/resolv.conf")
    lines = path.read_text().splitlines() if path.exists() else []
    listed = min(3, sum(line.split()[:1] == ["nameserver"] for line in lines)) or 1      # glibc takes this host, then
    libc, seen = ctypes.CDLL(None), []
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    assert name_servers() == listed
    with pytest.raises(KeyError), no_name_server():
        seen.append(libc.__res_state()[4])
        other = threading.Thread(target=lambda: seen.append(name_servers()))
        other.start()
        other.join()
        assert socket.getaddrinfo("127.0.0.1", 80)
        with pytest.raises(OSError):
            socket.getaddrinfo("no-such-host.invalid", 80)
        raise KeyError
    assert seen == [0, listed] and libc.__res_state()[4] == listed


def test_a_store_that_may_be_gone_is_asked_without_a_name_server():
    """Torch's error names the host: where an answer was lost, a rank that had raised took 5 seconds to end."""
    libc, seen = ctypes.CDLL(None), []
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    state_of_thread = libc.__res_state

    class Gone(dist.Store):
        def check(self, *args):
            seen.append(state_of_thread()[4])
            raise RuntimeError("the store is gone")

        get = set = add = check

    gone = Gone()                                    # C++ alone would not keep what Python adds to it
    store = of_this_start(gone)
    assert name_servers() > 0
    own = Liveness({1: ProcessId("another", 1, 1)}, store, own=0)
    own.ends(0)
    assert own.first_loss() is None and own.ending([1]) is None and own.lost([1]) is None
    assert own.first_lost(Loss(1, "it was lost")) == Loss(1, "it was lost")
    own.await_readers()
    assert len(seen) >= 6
    for ask in (lambda: store.add("key", 1), lambda: store.check(["key"]), lambda: store.get("key"),
                lambda: store.set("key", b"value")):
        with pytest.raises(RuntimeError, match="the store is gone"):
            ask()
    assert not any(seen) and state_of_thread()[4] > 0


def test_what_ranks_tell_each_other_goes_through_such_a_store():
    keeper = connect_store("localhost", 0, PATIENCE, is_master=True)
    own = of_this_start(own_connection(keeper))
    for store in own_connection(keeper), own:
        assert isinstance(store, NamelessStore)
        store.set("key", b"value")
        assert store.check(["key"]) and store.get("key") == b"value" and store.add("number", 2) == 2
    methods = {"add", "check", "get", "set"}         # that liveness, deadlocks and agreements use
    source = "".join(Path(inspect.getfile(m)).read_text() for m in (liveness, deadlock, store_tree))
    assert set(re.findall(r"\bstore\.([a-z_]+)\(", source)) <= methods | {"underlying_store", "set_timeout"}


@pytest.mark.parametrize("quiet", [True, False])
def test_a_store_is_connected_to_either_way(monkeypatch, quiet):
    monkeypatch.setattr(tcp_store, "_WARNINGS_OFF", quiet)
    keeper = connect_store("localhost", 0, PATIENCE, is_master=True)
    other = connect_store("localhost", keeper.port, PATIENCE)
    keeper.set("key", "value")
    assert other.get("key") == b"value"


@pytest.mark.usefixtures("real_processes")
def test_torch_is_told_once_and_warns_of_nothing():
    code = ("from datetime import timedelta; from globaltensor.runtime.tcp_store import connect_store as connect;"
            "keeper = connect('127.0.0.1', 0, timedelta(seconds=30), is_master=True);"
            "connect('127.0.0.1', keeper.port, timedelta(seconds=30)); print('connected')")
    assert good([sys.executable, "-c", code], {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}) == "connected\n"
