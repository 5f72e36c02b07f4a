"""Which kernels of ours a device may use: none that was not tried on it first.

A library of kernels was compiled on some machine, perhaps by another compiler, and runs on a device that nobody who
wrote it has seen. So the first use on a device runs a self-test: some 200 boxings and all laws of random numbers are
compared with what torch ops make of them. It decides kernel by kernel, and says so once. What failed, and where there
is no library at all, is done by torch ops, which are right on every device.

    copies         moves and transposes              words, uniform, normal,
    float sums     reductions of floats              exponential, integers,     random numbers
    integer sums   reductions of integers            bernoulli
    tables         programs of many regions
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from globaltensor.errors import GlobalTensorError, first_sentence, warn
from globaltensor.runtime import native
from globaltensor.runtime.kernel_library import LAWS, KernelLibrary

BOXING_KERNELS = ("copies", "float sums", "integer sums", "tables")
KERNELS = (*BOXING_KERNELS, *LAWS)
WANTED = native.WANTED and os.environ.get("GLOBALTENSOR_GPU_KERNELS", "1") != "0"
_log = logging.getLogger("globaltensor")


class MissingKernels(GlobalTensorError):
    """There is no library of kernels for these devices: why, and what to type."""


class KernelVerdict(NamedTuple):
    """What the self-test found on a device. `failed`: what is wrong with each kernel that is not used."""

    library: KernelLibrary
    device: torch.device
    failed: dict[str, str]
    seconds: float

    @property
    def passed(self) -> frozenset[str]:
        """The kernels that are used."""
        return frozenset(KERNELS) - self.failed.keys()

    def __str__(self) -> str:
        good = f"{len(self.passed)} of {len(KERNELS)} kernels passed the self-test ({self.seconds:.2f} s)"
        return good + "".join(f"; {name} is not used: {why}" for name, why in self.failed.items())


_providers: dict[str, Callable[[], KernelLibrary]] = {}
_self_test: Callable[[KernelLibrary, int], dict[str, str]]       # set by boxings/self_test.py
_verdicts: dict[torch.device, KernelVerdict | None] = {}
_on_trial: dict[torch.device, KernelVerdict] = {}
_libraries: dict[str, KernelLibrary | MissingKernels] = {}
_reached: dict[tuple[str, int, int], bool] = {}
_lock = threading.RLock()


def provide_kernels(type: str, find: Callable[[], KernelLibrary]) -> None:
    """Say where the kernels for devices of a type come from; `find` raises MissingKernels where there are none."""
    _providers[type] = find
    forget_verdicts(type)


def set_self_test(self_test: Callable[[KernelLibrary, int], dict[str, str]]) -> None:
    """Say what tests the kernels on a device: it returns what is wrong, by kernel."""
    global _self_test
    _self_test = self_test


def forget_verdicts(type: str) -> None:
    """Find and test the kernels of these devices anew at their next use."""
    with _lock:
        _libraries.pop(type, None)
        for device in [device for device in _verdicts if device.type == type]:
            del _verdicts[device]


def kernel_verdict(device: torch.device) -> KernelVerdict | None:
    """What is used on a device, found out and said at its first use; None where no kernel is."""
    if not WANTED or device.type not in _providers:
        return None
    if device not in _verdicts:
        with _lock:                                  # a thread of autograd may come here first
            if device in _on_trial:                  # the self-test itself
                return _on_trial[device]
            if device not in _verdicts:
                _verdicts[device] = _try_kernels(device)
    return _verdicts[device]


def kernels_that_pass(device: torch.device) -> frozenset[str]:
    """The names of the kernels that are used on a device."""
    verdict = kernel_verdict(device) if device.type in _providers else None
    return frozenset() if verdict is None else verdict.passed


def devices_reach(devices: tuple[torch.device, ...]) -> bool:
    """Can kernels on each of these devices, of one type, read and write the memory of all others?"""
    for a in devices:
        for b in devices:
            key = (a.type, a.index, b.index)
            if a != b and key not in _reached:
                library = _libraries[a.type]
                assert isinstance(library, KernelLibrary)
                _reached[key] = library.reaches(a.index, b.index)
                if not _reached[key]:
                    _log.warning("globaltensor: %s cannot read the memory of %s (no peer access), so boxings between "
                                 "them are done by torch ops", a, b)
            if a != b and not _reached[key]:
                return False
    return True


def are_provided(type: str) -> bool:
    """Are there kernels at all for devices of a type?"""
    return type in _providers


def why_missing(type: str) -> MissingKernels | None:
    """Why there is no library for these devices, once it was looked for; None where there is one."""
    library = _libraries.get(type)
    return library if isinstance(library, MissingKernels) else None


def _library_for(type: str) -> KernelLibrary | None:
    if type not in _libraries:
        try:
            _libraries[type] = _providers[type]()
        except MissingKernels as missing:
            _libraries[type] = missing
            if os.environ.get("LOCAL_RANK", "0") == "0":             # once on a host
                warn(f"{missing}")
    library = _libraries[type]
    return library if isinstance(library, KernelLibrary) else None


def _try_kernels(device: torch.device) -> KernelVerdict | None:
    library = _library_for(device.type)
    if library is None:
        return None
    began = time.perf_counter()
    try:
        library.load(device.index)
        _on_trial[device] = KernelVerdict(library, device, {}, 0.0)
        failed = _self_test(library, device.index)
    except GlobalTensorError as error:               # a launch that failed: nothing after it can be trusted
        failed = dict.fromkeys(KERNELS, error.what)
    except RuntimeError as error:                    # of torch: where a kernel was ended, all after it is, too
        raise GlobalTensorError(f"the self-test of kernels was ended by {device}", first_sentence(error),
                                "GLOBALTENSOR_GPU_KERNELS=0, and please report it") from error
    finally:
        _on_trial.pop(device, None)
    verdict = KernelVerdict(library, device, failed, time.perf_counter() - began)
    if failed:
        warn(f"globaltensor does not use all of its kernels on {device}: {verdict}"
             "\n  instead: torch ops, which are slower"
             "\n  try:     globaltensor doctor, and please report what it prints")
    else:
        _log.info("globaltensor on %s: %s", device, verdict)
    return verdict
