"""gloo's threads: when they run, and what is left of them where gloo has failed.

A thread of gloo serves the connections of each group. When a message comes while another thread is sending by the same
connection, that thread asks the kernel again and again until the other is done. Where it has taken the other's core,
that is some milliseconds. So these threads do not take a core from one that computes (`SCHED_BATCH`).

Where gloo has failed, its threads keep what they work on, so nothing of that may be freed.

A peer that does something else than this rank may send more than it asked for. gloo then throws in the thread that
serves its connections, which would end the process before anybody has said what the ranks do. Native code stops that
thread instead. The watch over waits finds what the ranks wait for, and all of them raise.
"""
from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime import native
from globaltensor.runtime.world import world

_NOBODY_SENDS = 7                                    # a tag
_SERVES = "gloo_tcp_loop\n"                          # the name of a thread that serves connections
_INTERFACES = "GLOO_SOCKET_IFNAME"


def choose_interfaces(one_host: bool) -> None:
    """Before gloo listens: ranks of one host listen to nobody else, where nobody has said on which network they do.

    Raises TransportError where gloo cannot listen on what the variable names. It would say so when the ranks have met,
    in words that do not name it, and those on other hosts would only see that this rank has ended.
    """
    if one_host and sys.platform == "linux":
        os.environ.setdefault(_INTERFACES, "lo")
    value = os.environ.get(_INTERFACES, "")
    names = value.removesuffix(",").split(",")
    refused = [name for name in names if not _listens(name)]
    if len(value) < 2 or not refused:                # gloo reads no shorter one
        return
    known = [name for _, name in socket.if_nameindex()]
    usable = sorted(filter(_listens, known), key=lambda name: (name == "lo") != one_host)
    near = [name for each in names for name in get_close_matches(each.strip(), usable, 1)]
    silent = next((name for name in refused if name in known), None)
    fixes = [f"{_INTERFACES}={','.join(dict.fromkeys(near)) or usable[0]}"] if usable else []
    fixes += ["ip link set lo up"] if silent == "lo" or not usable else []
    raise TransportError(
        f"{_INTERFACES}={value}: {socket.gethostname()} has no network interface "
        + (f"{refused[0]!r}" if silent is None else f"{silent!r} with an address"),
        f"the ranks talk over those that it names; with an address there are {', '.join(usable) or 'none'}",
        " or ".join(fixes))


def _listens(interface: str) -> bool:
    """Can gloo listen there?"""
    try:
        return bool(interface and dist.ProcessGroupGloo.create_device(interface=interface))
    except RuntimeError:
        return False


def yield_cores() -> None:
    """From now on the threads of gloo that there are wait until a core is free, or another thread has had its turn.
    To be called when a group has been made. Only Linux knows such threads."""
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):                      # it has ended, or a sandbox forbids it
            if (thread / "comm").read_text() == _SERVES and os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def gloo_error() -> str:
    """Why a thread of gloo was stopped in this process; "" where none was."""
    return "" if native.torch_ext is None else native.torch_ext.gloo_error()


def keep_for_ever(objects: Iterable[Any]) -> None:
    """Never free these, on which a thread of torch works that does not end: to end a group waits for that thread, which
    needs an interpreter that may have ended to free the others."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def close_connections(ranks: Iterable[int]) -> None:
    """Close all connections of this process to the others: waits for messages of these ranks then raise. gloo does that
    when one that is waited for has not come in time. Native code, where it is built, ends a wait and closes nothing."""
    for rank in ranks:
        with suppress(RuntimeError):                 # that it did not come
            _wait_in_vain(rank)[0].wait(timedelta(milliseconds=1))


def broken_connections(ranks: Iterable[int]) -> list[int]:
    """Those of these ranks to which the connection has closed. A message of them cannot be waited for any more, which
    torch says at once; where one can, its memory is not freed again."""
    broken = []
    for rank in ranks:
        try:
            keep_for_ever(_wait_in_vain(rank))
        except RuntimeError:
            broken.append(rank)
    return broken


def _wait_in_vain(rank: int) -> tuple[dist.Work, torch.Tensor]:
    """A wait for a message of a rank that it never sends."""
    message = torch.empty(1, dtype=torch.uint8, device="cpu")
    work = dist.irecv(message, rank, world().control, _NOBODY_SENDS)
    assert work is not None                          # this rank is a member
    return work, message
