"""Schedules as text: what a person writes, prints, compares and keeps in a file.

    # two stages on two ranks
    stages on ranks: 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

Actions are separated by spaces or commas. A rank may have several lines, one continuing the other. Only the actions
are required: without `rank 0:` each line is the next rank's (as torch.distributed.pipelining writes its schedules),
without `stages on ranks:` a stage is on the rank that runs it, and the highest micro-batch says how many there are. An
empty action, torch's mark for an idle moment, is skipped: when a rank waits follows from the order alone.
"""
from __future__ import annotations

import os
import re
from pathlib import Path

from globaltensor.schedules.schedule import KINDS, Action, Actions, Schedule, ScheduleError

_ACTION = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d+)")
_RANK = re.compile(r"rank\s+(\d+)\s*:", re.IGNORECASE)
_STAGES = re.compile(r"stages\s+on\s+ranks\s*:", re.IGNORECASE)
_LARGEST = 1 << 20                                    # rank, stage or micro-batch: a typo must not allocate 2 ** 60

LineAction = tuple[Action, int]                       # an action and the number of its line


def format_schedule(schedule: Schedule) -> str:
    """The text of a schedule, from which `parse_schedule` makes the same schedule again."""
    head = (f"# {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, "
            f"{schedule.micro_batches} micro-batches")
    rows = [f"rank {r}: {row!r}" for r, row in enumerate(schedule.actions)]
    return "\n".join([head, f"stages on ranks: {' '.join(map(str, schedule.rank_of))}", *rows, ""])


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in a file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {os.fspath(path)} could not be read", str(error),
                            "a text file with a line of actions for each rank") from None
    return parse_schedule(text, os.fspath(path))


def parse_schedule(text: str, source: str = "<text>") -> Schedule:
    """The schedule that a text describes. `check_schedule` says whether it can be run."""
    placed: dict[int, list[LineAction]] = {}
    rank_of: tuple[int, ...] | None = None
    unlabelled = 0                                    # lines without `rank r:` so far: each is the next rank's
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        stages, rank = _STAGES.match(line), _RANK.match(line)
        if stages:
            rank_of = tuple(_parse_number(word, source, number) for word in _words(line[stages.end():]))
            continue
        own = _parse_number(rank[1], source, number) if rank else unlabelled
        unlabelled += not rank
        words = _words(line[rank.end():] if rank else line)
        placed.setdefault(own, []).extend((_parse_action(word, source, number), number) for word in words)
    if not any(placed.values()):
        raise ScheduleError("a schedule without actions", f"{source} has no line of actions",
                            "rank 0: 0F0 0B0", at=source)
    return _assemble(placed, rank_of, source)


def _assemble(placed: dict[int, list[LineAction]], rank_of: tuple[int, ...] | None, source: str) -> Schedule:
    everything = [(rank, action, line) for rank, row in placed.items() for action, line in row]
    rank_of = _rank_of_stages(everything, source) if rank_of is None else rank_of
    for _, action, line in everything:
        if action.stage >= len(rank_of):
            raise ScheduleError(f"{action} is of a stage that does not exist",
                                f"the stages are 0 to {len(rank_of) - 1}",
                                "one rank for each stage in `stages on ranks:`", at=f"{source}:{line}")
    ranks = max(*placed, *rank_of) + 1 if rank_of else max(placed) + 1
    stages, rows = len(rank_of), [placed.get(rank, []) for rank in range(ranks)]
    actions = tuple(Actions.of((action for action, _ in row), stages) for row in rows)
    lines = tuple(tuple(line for _, line in row) for row in rows)
    micro_batches = max(action.micro_batch for _, action, _ in everything) + 1
    return Schedule(Path(source).stem if source != "<text>" else "own", rank_of, micro_batches, actions, source, lines)


def _rank_of_stages(everything: list[tuple[int, Action, int]], source: str) -> tuple[int, ...]:
    """The rank of each stage: the one that does its forwards."""
    rank_of: dict[int, int] = {}
    for rank, action, line in everything:
        if action.kind == "F" and rank_of.setdefault(action.stage, rank) != rank:
            raise ScheduleError(f"rank {rank} has {action}, but stage {action.stage} is on rank "
                                f"{rank_of[action.stage]}", "a stage is on one rank, where its weights are",
                                "move the action, or give the stage a number of its own", at=f"{source}:{line}")
    for stage in range(max((action.stage for _, action, _ in everything), default=0) + 1):
        if stage not in rank_of:
            raise ScheduleError(f"no rank has a forward of stage {stage}", "stages are numbered from 0, "
                                "and each runs every micro-batch", f"{stage}F0", at=source)
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _parse_action(word: str, source: str, line: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ScheduleError(f"{word!r} is not an action", "an action is stage, kind, micro-batch; the kinds are "
                            + ", ".join(KINDS), "0F0", at=f"{source}:{line}")
    return Action(_parse_number(match[1], source, line), match[2], _parse_number(match[3], source, line))


def _parse_number(word: str, source: str, line: int) -> int:
    if not word.isdecimal() or len(word) > 7 or int(word) > _LARGEST:
        raise ScheduleError(f"{word!r} is not a rank, stage or micro-batch", f"these are numbers from 0 to {_LARGEST}",
                            at=f"{source}:{line}")
    return int(word)
