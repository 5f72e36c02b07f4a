"""What `globaltensor doctor` looks at: software, this host, its devices; and under a launcher, all hosts of the job.

A check is a function that gives one Finding, or several. It looks at the real thing: it listens, maps memory, starts
the compiler, runs the kernels.
"""
from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist

from globaltensor.cli.parser import version
from globaltensor.runtime import device_kernels, native
from globaltensor.runtime.accelerators import GLOO, accelerator, accelerator_count, engine_of
from globaltensor.runtime.kernel_build import find_nvcc
from globaltensor.runtime.units import bytes_text

OLDEST_TORCH, NEXT_TORCH = (2, 11), (2, 15)          # as in pyproject.toml
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
MEETING_PORT = 29400                                         # where hosts meet, in all of our pages
_SMALL = 1 << 30                                     # bytes of /dev/shm; containers often have 64 MB
_EXTRAS = {"safetensors": "checkpoint", "rich": "progress", "matplotlib": "plot", "scipy": "plan"}


class Finding(NamedTuple):
    """What was found of one thing. `status` is ok, warning or wrong; `fix` says what to type where it is not ok."""

    name: str
    state: str
    status: str = "ok"
    fix: str = ""


def all_findings() -> list[Finding] | None:
    """Those of this process; under a launcher, of all ranks on rank 0, and None on the others."""
    own = [*_software(), *_this_host(), *_devices()]
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return own
    return _of_all_ranks(own)


# ------------------------------------------------------------------------------------------------------ software


def _software() -> Iterator[Finding]:
    yield Finding("globaltensor", version())
    yield _python()
    yield _torch()
    yield Finding("numpy", numpy.__version__)
    yield _native_code()
    yield _compiler()
    missing = [extra for module, extra in _EXTRAS.items() if find_spec(module) is None]
    yield Finding("extras", f"not installed: {', '.join(missing)}; to add them: pip install "
                  f"'globaltensor[{','.join(missing)}]'" if missing else f"all of {', '.join(_EXTRAS.values())}")


def _python() -> Finding:
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] > NEWEST_PYTHON:
        return Finding("Python", f"{text}: newer than any that was tried", "warning",
                       f"Python {'.'.join(map(str, NEWEST_PYTHON))}, if something fails")
    if sys.platform != "linux":
        return Finding("Python", f"{text}: works without shared memory, and without native code unless it was built",
                       "warning", "Linux, for speed")
    return Finding("Python", text)


def _torch() -> Finding:
    text = torch.__version__ + (f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", for CPUs")
    minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= minor < NEXT_TORCH:
        wanted = f"torch>={'.'.join(map(str, OLDEST_TORCH))},<{'.'.join(map(str, NEXT_TORCH))}"
        return Finding("torch", f"{text}: not supported", "wrong", f"{sys.executable} -m pip install '{wanted}'")
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("torch", f"{text}, without gloo: several processes cannot meet", "warning",
                       "another build of torch, or one process that drives all ranks")
    return Finding("torch", text)


def _native_code() -> Finding:
    trouble = native.why_slow()
    if not trouble:
        return Finding("native code", "used")
    return Finding("native code", trouble, "wrong", native.how_to_build()) if native.WANTED else \
        Finding("native code", trouble)


def _compiler() -> Finding:
    command = os.environ.get("CXX") or "g++"
    try:
        output = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding("compiler", f"no {command}, which is needed only to build native code from source")
    return Finding("compiler", output.stdout.partition("\n")[0])


# ------------------------------------------------------------------------------------------------------ this host


def _this_host() -> Iterator[Finding]:
    yield _shared_memory()
    yield from _temporary_memory()
    yield from _limits()
    yield _ports()
    yield _host_name()


def _shared_memory() -> Finding:
    """As the transport makes it (csrc/transport/segment.cpp): a file without a name, mapped."""
    create = getattr(os, "memfd_create", None)
    if create is None or not hasattr(socket, "AF_UNIX"):
        return Finding("shared memory", f"none between processes on {platform.system()}: their bytes go by gloo",
                       "warning", "one process that drives all ranks, or Linux")
    try:
        file = create("globaltensor-doctor")
        try:
            os.ftruncate(file, mmap.PAGESIZE)
            mmap.mmap(file, mmap.PAGESIZE).close()
        finally:
            os.close(file)
    except OSError as error:
        return Finding("shared memory", f"memfd_create fails: {error.strerror}", "wrong",
                       "a sandbox or container that allows memfd_create")
    return Finding("shared memory", "works, by memfd_create")


def _temporary_memory() -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        about = os.statvfs("/dev/shm")
        size, free = about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail
        text = f"{bytes_text(size)}, {bytes_text(free)} free"
        yield Finding("/dev/shm", text) if size >= _SMALL else Finding(
            "/dev/shm", f"{text}: little for NCCL and for the workers of DataLoader", "warning",
            "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory on /dev/shm")


def _limits() -> Iterator[Finding]:
    if find_spec("resource") is None:                # Windows
        return
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding("open files", f"{files:,} for each process") if files >= 1024 else Finding(
        "open files", f"{files:,} for each process: few for many ranks", "warning", "ulimit -n 65536")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked in (resource.RLIM_INFINITY, sys.maxsize)
    text = "unlimited" if unlimited else bytes_text(locked)
    yield Finding("locked memory", text) if unlimited or not accelerator_count() else Finding(
        "locked memory", f"{text}: little for GPUs that talk over InfiniBand", "warning", "ulimit -l unlimited")


def _ports() -> Finding:
    with socket.socket() as any_port:
        try:
            any_port.bind(("127.0.0.1", 0))
            any_port.listen()
        except OSError as error:
            return Finding("ports", f"this process may not listen on the loopback: {error.strerror}", "wrong",
                           "a sandbox or container with a loopback network; one process needs none")
    with socket.socket() as meeting:
        if sys.platform != "win32":
            meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            meeting.bind(("", MEETING_PORT))
        except OSError as error:
            return Finding("ports", f"{MEETING_PORT} is taken ({error.strerror})", "warning",
                           f"--rdzv-endpoint HOST:{MEETING_PORT + 1}, for a job on several hosts that meets here")
    return Finding("ports", f"{MEETING_PORT} is free, for hosts that meet here")


def _host_name() -> Finding:
    name = socket.gethostname()
    with suppress(OSError):
        return Finding("host name", f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}")
    return Finding("host name", f"{name} has no address", "warning",
                   "globaltensor run --local-addr ADDRESS, for a job on several hosts")


# ------------------------------------------------------------------------------------------------------- devices


def _devices() -> list[Finding]:
    nvcc, type = find_nvcc(), accelerator()
    compiler = Finding("nvcc", nvcc or "none, which is needed only for the kernels for GPUs")
    if type is None:
        hidden = shutil.which("nvidia-smi") and torch.version.cuda is None
        return [compiler, Finding("accelerators", "torch sees none") if not hidden else Finding(
            "accelerators", "torch sees none, but this host has nvidia-smi", "warning",
            f"{sys.executable} -m pip install torch, of a build with CUDA")]
    engine = engine_of(type) if dist.is_available() else GLOO
    between = "through the CPU: torch has no engine for them" if engine == GLOO else f"by {engine}" + (
        f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if engine == "nccl" else "")
    findings = [compiler, Finding("accelerators", f"{accelerator_count()} of type {type}"),
                Finding("between processes", between)]
    if not device_kernels.WANTED:
        return [*findings, Finding("kernels", "turned off by GLOBALTENSOR_GPU_KERNELS=0 or GLOBALTENSOR_NATIVE=0")]
    if not device_kernels.are_provided(type):
        return [*findings, Finding("kernels", f"none for {type} devices: torch ops do their work")]
    return [*findings, *(_kernels_on(torch.device(type, i)) for i in range(accelerator_count()))]


def _kernels_on(device: torch.device) -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict = device_kernels.kernel_verdict(device)
    name = f"kernels on {device}"
    if verdict is None:
        missing = device_kernels.why_missing(device.type)
        return Finding(name, missing.why, "wrong" if missing.fix else "warning", missing.fix) if missing else \
            Finding(name, f"{caught[0].message}", "warning")
    fix = "GLOBALTENSOR_GPU_KERNELS=0 to use none of them; and please report this" if verdict.failed else ""
    return Finding(name, str(verdict), "wrong" if fix else "ok", fix)


# ------------------------------------------------------------------------------------------------------ all hosts

_COMPARED = ("globaltensor", "Python", "torch", "numpy", "native code", "accelerators", "between processes")


def _of_all_ranks(own: list[Finding]) -> list[Finding] | None:
    """Ranks put their findings into the store at which they meet, as JSON; rank 0 reads and compares them."""
    store, rank, size = next(dist.rendezvous("env://"))
    report = {"host": socket.gethostname(), "findings": own}
    store.set(f"doctor/{rank}", json.dumps(report))
    if rank:
        store.wait(["doctor/read"])                  # it may be this process that keeps the store
        return None
    findings, hosts = list(own), {report["host"]}
    for other in range(1, size):
        report = json.loads(store.get(f"doctor/{other}"))
        hosts.add(report["host"])
        theirs = [Finding(*each) for each in report["findings"]]
        findings += _differences(own, theirs, f"rank {other} ({report['host']})")
    store.set("doctor/read", "")
    same = "all alike" if len(findings) == len(own) else "they differ: see below"
    names = f"{size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    return [*findings[:len(own)], Finding("hosts", f"{names}, {same}"), *findings[len(own):]]


def _differences(own: list[Finding], others: list[Finding], who: str) -> Iterator[Finding]:
    """What of another rank is not as on this one, and what is not ok there."""
    states = {one.name: one.state for one in own}
    for one in others:
        if one.name in _COMPARED and one.state != states.get(one.name):
            yield Finding(f"{one.name} of {who}", f"{one.state}; rank 0 has: {states.get(one.name, 'none')}", "wrong",
                          one.fix or f"the same on all hosts, such as {states.get(one.name, 'none')}")
        elif one.status != "ok" and one.state != states.get(one.name):
            yield one._replace(name=f"{one.name} of {who}")
