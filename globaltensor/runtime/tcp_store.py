"""torch's TCPStore, connected without a name server.

torch asks for the name of each address that it connects to, for its own messages; of 127.0.0.1 too, which it writes as
an address of IPv6, so that /etc/hosts has no answer. Where many ranks of a host start at once, some of these questions
are lost on the way. The resolver then asks again after 5 seconds, and all ranks wait: with three connections a rank,
64 ranks took 15 seconds longer.

glibc notes the name servers for each thread. So a thread can have none for a while, and then an address is its own
name, at once. torch sees that no name server answers, and asks no more in this process, where it also keeps a store. It
warns of that, once, so it is done only where its warnings are not shown.
"""
from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime.process_limits import allow_files

# when this is imported, right after torch, which looks then
_WARNINGS_OFF = os.environ.get("TORCH_CPP_LOG_LEVEL") in ("ERROR", "FATAL")


_IS_READ = 1                                         # RES_INIT of resolv.h


class _ResolverState(ctypes.Structure):
    """The beginning of `struct __res_state` in resolv.h."""

    _fields_ = [("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong),
                ("nscount", ctypes.c_int)]


def connect_store(host: str, port: int, timeout: timedelta, is_master: bool = False, listen_fd: int | None = None,
                  shared: bool = False) -> dist.TCPStore:
    """Connect to the store at this port, or keep one there. Ranks that have not come yet are not waited for.

    listen_fd   a socket that listens: the store does so there
    shared      another store of this process may be kept there, too
    Raises OSError where the host has no address, and what torch raises where nobody listens there.
    """
    if _WARNINGS_OFF:
        host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])     # is asked for before
        with no_name_server():
            return _connected(host, port, timeout, is_master, listen_fd, shared)
    return _connected(host, port, timeout, is_master, listen_fd, shared)


def _connected(host: str, port: int, timeout: timedelta, is_master: bool, listen_fd: int | None, shared: bool
               ) -> dist.TCPStore:
    if is_master:
        allow_files(1 << 16)                         # each rank will have some connections to it
    return dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False,
                         master_listen_fd=listen_fd, multi_tenant=shared)


@contextmanager
def no_name_server() -> Iterator[None]:
    """Inside, this thread asks no name server; what /etc/hosts tells is known still. With another C library than glibc,
    nothing changes."""
    libc = _resolver()
    if libc is None:
        yield
        return
    state = libc.__res_state().contents
    if not state.options & _IS_READ:                 # else the first question would fill it in
        libc.__res_init()
    before, state.nscount = state.nscount, 0
    try:
        yield
    finally:
        state.nscount = before


def port_error(port: int, text: str) -> TransportError:
    """Why no store can be kept at this port, of which torch says `text`."""
    why = re.split(r"message: |errno: \d+ - ", text.splitlines()[0])[-1].partition(")")[0].lower()
    if "in use" in why:
        why += ": another program listens there"
    free = next(filter(_is_free, (*range(max(port, 1023) + 1, 1 << 16), *range(1024, port))), "...")
    return TransportError(f"rank 0 cannot listen at port {port} of {socket.gethostname()}, where ranks meet", why,
                          f"MASTER_PORT={free}, the same for all ranks")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


class NamelessStore(dist.PrefixStore):
    """What has this prefix in a store that may be gone. It is asked without a name server: the message of torch's error
    names the host, and where that answer is lost, a rank that has raised takes 5 seconds longer to end."""

    add = no_name_server()(dist.Store.add)
    check = no_name_server()(dist.Store.check)
    get = no_name_server()(dist.Store.get)
    set = no_name_server()(dist.Store.set)


@cache
def _resolver() -> Any:
    """glibc; None where there is another."""
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(_ResolverState)
    return libc
