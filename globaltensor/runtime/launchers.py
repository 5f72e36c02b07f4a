"""Launchers other than torch's: the environments of SLURM's `srun`, of Open MPI's and of Hydra's `mpirun`.

Each tells its processes their rank in variables of its own. They are put into torch's (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that all else knows one launcher. What torch's launcher, or the user,
has set is left as it is. A world of one process counts as started without a launcher: a lone process drives all ranks.
Variables of our own are checked here, too.

Sources: "Output environment variables" of srun(1); "Environment variables" of Open MPI's mpirun(1); MPICH's Hydra.
"""
from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from globaltensor.errors import TransportError, warn


def recognize_launcher(env: MutableMapping[str, str] = os.environ) -> str | None:
    """Set torch's variables from those of the launcher that started this process; its name, or None without one.

    Raises TransportError where the launcher does not tell where the ranks are to meet.
    """
    if {"RANK", "WORLD_SIZE"} <= env.keys():
        return None
    for name, read in _LAUNCHERS.items():
        if (variables := read(env)) is not None and int(variables["WORLD_SIZE"]) > 1:
            for variable, value in variables.items():
                env.setdefault(variable, value)
            _check_address(env, name)
            return name
    return None


def check_variables(env: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError for a variable that tells no rank, size or port; each would end elsewhere, in fewer words,
    or be waited for."""
    size = env.get("WORLD_SIZE", "")
    most = int(size) - 1 if size.isdecimal() and int(size) else None
    for name, first, last in (("WORLD_SIZE", 1, None), ("RANK", 0, most), ("LOCAL_WORLD_SIZE", 1, None),
                              ("LOCAL_RANK", 0, None), ("MASTER_PORT", 1 if most else 0, 65535),
                              ("TORCHELASTIC_RESTART_COUNT", 0, None)):
        value = env.get(name, str(first))
        if not value.isdecimal() or not first <= int(value) <= (int(value) if last is None else last):
            raise TransportError(f"{name}={value}", f"it is a whole number from {first} "
                                 f"{'on' if last is None else f'to {last}'}, which a launcher sets",
                                 "globaltensor run -n 2 program.py, or torchrun, which set it")


_SWITCHES = {"GLOBALTENSOR_CHECK": ("1", "0"), "GLOBALTENSOR_GPU_KERNELS": ("0", "1"),
             "GLOBALTENSOR_NATIVE": ("0", "1"), "GLOBALTENSOR_SHARE_GPU": ("1", "0"),
             "GLOBALTENSOR_TRACEBACK": ("full",)}
_OWN = (*_SWITCHES, "GLOBALTENSOR_AUDIT", "GLOBALTENSOR_RANKS", "GLOBALTENSOR_SECRET")


def check_own_variables(env: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError for a switch of ours that is neither on nor off, or steps that are not a number, and warn of
    what would have no effect: a variable that is misspelt, and one of RANK and WORLD_SIZE without the other."""
    if not (steps := env.get("GLOBALTENSOR_AUDIT") or "0").isdecimal():
        raise TransportError(f"GLOBALTENSOR_AUDIT={steps}", "it is a number of steps, 0 for never",
                             "GLOBALTENSOR_AUDIT=100")
    for name, values in _SWITCHES.items():
        if (value := env.get(name, "")) and value not in values:
            raise TransportError(f"{name}={value}", f"it is {' or '.join(values)}", f"{name}={values[0]}")
    for name in env:
        if name.startswith("GLOBALTENSOR_") and name not in _OWN:
            near = get_close_matches(name.removeprefix("GLOBALTENSOR_"), [one.removeprefix("GLOBALTENSOR_")
                                                                          for one in _OWN], 1, 0.75)
            if near:
                warn(f"{name} is read by nothing\n  try:   GLOBALTENSOR_{near[0]}={env[name]}")
    alone = {"RANK", "WORLD_SIZE"} & env.keys()
    if len(alone) == 1 and "MASTER_ADDR" in env:
        one, other = ("RANK", "WORLD_SIZE") if "RANK" in alone else ("WORLD_SIZE", "RANK")
        warn(f"this process drives all ranks, though {one}={env[one]} is set\n  why:   {other} is not"
             f"\n  try:   globaltensor run -n N program.py, or torchrun, which set both; or: unset {one}")


def _check_address(env: Mapping[str, str], name: str) -> None:
    """Raise TransportError where the ranks cannot know where to meet: torch would ask for minutes."""
    fix = "mpirun -x MASTER_ADDR=HOST ..., or MASTER_ADDR=HOST srun ..., where HOST is that of rank 0"
    if "MASTER_ADDR" not in env:
        raise TransportError(f"{name} does not tell the ranks of several hosts where to meet", "MASTER_ADDR is not set",
                             fix)
    try:
        socket.getaddrinfo(env["MASTER_ADDR"], None)
    except OSError as error:
        raise TransportError(f"the ranks cannot meet at {env['MASTER_ADDR']}", f"it has no address here: {error}",
                             fix) from None


def _slurm_step(env: Mapping[str, str]) -> dict[str, str] | None:
    """A step of srun. A batch script without srun has SLURM_PROCID as well, but no step: it is one process."""
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID",
            "SLURM_NODEID"} <= env.keys():
        return None
    _check_numbers(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", launcher="srun")
    per_node, node = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"]), int(env["SLURM_NODEID"])
    if node >= len(per_node):
        _refuse_variable(env, "SLURM_STEP_TASKS_PER_NODE", "it is a count for each host, such as 4(x2),3, of which "
                         f"SLURM_NODEID={node} names one", "srun")
    return {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"], "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(per_node[node]),
            "MASTER_ADDR": "127.0.0.1" if len(per_node) == 1 else first_host(env["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": _port(f"{env.get('SLURM_JOB_ID')} {env.get('SLURM_STEP_ID')}")}


def _open_mpi(env: Mapping[str, str]) -> dict[str, str] | None:
    return _mpi(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))


def _hydra(env: Mapping[str, str]) -> dict[str, str] | None:
    """MPICH and Intel MPI."""
    return _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_PORT", "PMI_ID"))


def _mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str,
         job: tuple[str, ...]) -> dict[str, str] | None:
    if not {rank, size, local_rank, local_size} <= env.keys():
        return None
    _check_numbers(env, rank, size, local_rank, local_size, launcher="mpirun")
    variables = {"RANK": env[rank], "WORLD_SIZE": env[size], "LOCAL_RANK": env[local_rank],
                 "LOCAL_WORLD_SIZE": env[local_size],
                 "MASTER_PORT": _port(next((env[name] for name in job if name in env), ""))}
    return {**variables, "MASTER_ADDR": "127.0.0.1"} if env[size] == env[local_size] else variables


def _check_numbers(env: Mapping[str, str], rank: str, size: str, *others: str, launcher: str) -> None:
    """Raise TransportError where one of these variables is no number, or the rank is none of so many."""
    for name in (rank, size, *others):
        if not env[name].isdecimal():
            _refuse_variable(env, name, "it is a whole number", launcher)
    if int(env[rank]) >= int(env[size]) > 1:
        _refuse_variable(env, rank, f"it is a rank of {size}={env[size]}, which are counted from 0", launcher)


def _refuse_variable(env: Mapping[str, str], name: str, why: str, launcher: str) -> NoReturn:
    raise TransportError(f"{name}={env[name]}", f"{why}, and {launcher} sets it",
                         f"{launcher} -n 2 python program.py, or: unset {name}")


# SLURM last: on several hosts of an allocation, mpirun has srun start what starts its ranks, which have that step's
# variables, too
_LAUNCHERS = {"Open MPI": _open_mpi, "Hydra": _hydra, "SLURM": _slurm_step}


def _port(job: str) -> str:
    """The same port in all processes of a job, and most likely another one in other jobs; below those that systems
    give to outgoing connections."""
    return str(20000 + zlib.crc32(job.encode()) % 10000)


def tasks_per_node(text: str) -> list[int]:
    """SLURM's short form: "4(x2),3" is [4, 4, 3]. Of anything else none."""
    counts: list[int] = []
    if not re.fullmatch(r"(\d+(\(x\d+\))?(,|$))+", text):
        return counts
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(text: str) -> str:
    """The first of a list of hosts in SLURM's short form: "rack1n[07-09,12],login" begins with rack1n07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    assert first is not None                         # it matches the empty text
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


_seat: tuple[int, int] | None = None                # as `take_seat` has seen it


def take_seat(hosts: Sequence[str], rank: int) -> None:
    """All ranks have met, each on one of these hosts: that tells who shares one, where no launcher does. Kubeflow's
    `PyTorchJob`, and what is typed by hand, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only."""
    global _seat
    _seat = hosts.count(hosts[rank]), hosts[:rank].count(hosts[rank])


def ranks_per_host(size: int) -> int:
    """Of a job of so many ranks; where no launcher says it, all of them until they have met."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", _seat[0] if _seat else size))


def local_rank(rank: int) -> int:
    """The number of this rank on its host."""
    if _seat and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys():
        return _seat[1]
    return int(os.environ.get("LOCAL_RANK", rank % int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))))


def is_one_host(size: int, address: str) -> bool:
    """Must the ranks that meet at this address be on one host? The same on all of them, before they have met."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return ranks_per_host(size) == size
    return address in ("localhost", "::1") or address.startswith("127.")
