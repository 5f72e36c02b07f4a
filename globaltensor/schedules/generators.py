"""The schedules of the literature, each a few lines that list what a rank does.

    generate("zb-h1", ranks=4, micro_batches=8)          by name
    one_forward_one_backward(4, 8)                       or by its function

Every schedule works for any number of micro-batches, including fewer than ranks and numbers that ranks do not divide.
With p ranks, m micro-batches, v stages on each rank (chunks) and T = TF + TB + TW, the time that a rank works on one
micro-batch, the bubble, what a step takes beyond m T, is

    gpipe, 1f1b       (p-1) T                    zb-h1     (p-1)(TF + TB - TW)
    interleaved, bfs  (p-1) T / v                zb-h2     (p-1)(TF + TB - 2 TW)
                                                 zb-v      0 at equal times, from m = 2p-1 on

The docstring of each function gives the activations it keeps, in units of one rank's for one micro-batch.
"""
from __future__ import annotations

import difflib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from globaltensor.schedules.schedule import Actions, B, F, I, Schedule, ScheduleError, W, encode, loop, vee

ListOf = Callable[[int], Iterable[int]]              # rank -> its actions, encoded


class StageCodes(NamedTuple):
    """The encoded actions of a stage on micro-batch 0."""

    F: int
    B: int
    I: int
    W: int


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965). Keeps m activations.

    The backwards run in the order of the forwards, so that gradients are added in the order of a plain loop.
    """
    codes = _codes(loop(ranks), micro_batches)
    return _from_lists("gpipe", loop(ranks), micro_batches, lambda r: [*codes(F, r), *codes(B, r)])


def one_forward_one_backward(ranks: int, micro_batches: int) -> Schedule:
    """Backwards as early as possible (PipeDream-flush, arXiv:2104.04473). Rank r keeps min(m, p-r) activations.

    A rank begins with one forward for each rank after it, then alternates: each backward frees the memory that the
    next forward needs.
    """
    codes = _codes(loop(ranks), micro_batches)
    return _from_lists("1f1b", loop(ranks), micro_batches,
                     lambda r: _alternate(codes(F, r), codes(B, r), ranks - 1 - r))


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over v small stages a rank (arXiv:2104.04473). Rank 0 keeps p(1 + (p-1)/(pv)) activations.

    Micro-batches go in groups: a group passes the first chunk of all ranks, then the second, ... A group of p is back
    at the first rank just in time. Where p does not divide m the groups are larger, but by as little as possible:
    m // p groups whose sizes differ by at most one, so that none has to wait for its own tail.
    """
    if chunks == 1:
        return _renamed(one_forward_one_backward(ranks, micro_batches), "interleaved")
    rank_of, groups = loop(ranks, chunks), _micro_batch_groups(ranks, micro_batches)
    codes = _codes(rank_of, micro_batches)

    def row(r: int) -> Iterable[int]:
        stages = range(r, ranks * chunks, ranks)
        ahead = (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - r)
        return _alternate(_grouped(codes, F, stages, groups), _grouped(codes, B, stages[::-1], groups), ahead)

    return _from_lists("interleaved", rank_of, micro_batches, row)


def breadth_first(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through a chunk before the next chunk (looped BFS, arXiv:2211.05953). Keeps m activations.

    Interleaved GPipe: the same bubble as interleaved 1F1B, and each stage gathers its weights and reduces its
    gradients only once, which suits ZeRO-3.
    """
    rank_of, groups = loop(ranks, chunks), [range(micro_batches)]
    codes = _codes(rank_of, micro_batches)

    def row(r: int) -> Iterable[int]:
        stages = range(r, ranks * chunks, ranks)
        return [*_grouped(codes, F, stages, groups), *_grouped(codes, B, stages[::-1], groups)]

    return _from_lists("bfs", rank_of, micro_batches, row)


def zero_bubble_h1(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B whose weight gradients fill the gaps (ZB-H1, arXiv:2401.10241). Keeps min(m, p) activations.

    The rank before waits for I only, so W is deferred: rank r runs r weight gradients late. With chunks, the same over
    a loop of stages, in groups as in `interleaved`.
    """
    rank_of, groups = loop(ranks, chunks), _micro_batch_groups(ranks, micro_batches)
    codes = _codes(rank_of, micro_batches)

    def row(r: int) -> Iterable[int]:
        stages = range(r, ranks * chunks, ranks)
        forwards, inputs, weights = (_grouped(codes, kind, order, groups) for kind, order in
                                     ((F, stages), (I, stages[::-1]), (W, stages[::-1])))
        return _alternate(forwards, inputs, (chunks - 1) * len(groups[0]) + ranks - 1 - r, weights, late=r)

    return _from_lists("zb-h1", rank_of, micro_batches, row)


def zero_bubble_h2(ranks: int, micro_batches: int) -> Schedule:
    """More memory, no bubble (ZB-H2, arXiv:2401.10241). Rank r keeps (2p-2r-1) + 2r Mw activations, where Mw is what
    is left of one between I and W.

    Enough forwards run ahead to fill the wait for the first gradient, and at the end weight gradients fill the rest:
    each rank is busy from its first action to its last, while the ranks begin and end one after the other.
    """
    codes = _codes(loop(ranks), micro_batches)
    return _from_lists("zb-h2", loop(ranks), micro_batches, lambda r: _alternate(
        codes(F, r), codes(I, r), 2 * (ranks - 1 - r), codes(W, r), late=2 * r))


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """No bubble in the memory of 1F1B (ZB-V, arXiv:2401.10241 and 2405.15362). Every rank keeps p activations.

    The stages are laid out in a V, two on a rank: the loss is back on rank 0, whose backward begins at once. In the
    steady state a rank repeats F I W of its first stage, F I W of its second. Before that come as many forwards down
    the V as fit until the first gradient is back; after it, first the gradients that others wait for, then weights.
    """
    # below 2p - 1 micro-batches the form has no steady state: that of 2p - 1 is taken, and what is too much left out
    steady = max(micro_batches, 2 * ranks - 1) - (2 * ranks - 1)

    def row(r: int, down: StageCodes, up: StageCodes) -> list[int]:
        return [*[down.F] * (2 * (ranks - r) - 1),
                *[up.F, down.F] * r,
                *[up.F, up.I, up.W] * (ranks - r),
                *[down.F, down.I, down.W, up.F, up.I, up.W] * (steady + r),
                *[down.I, down.W, up.F, up.I, up.W] * (ranks - r - 1),
                *[down.I, up.I] * r,
                *[down.I, down.W] * (ranks - r),
                *[up.W] * r, *[down.W] * r]

    return _counted("zb-v", ranks, micro_batches, row)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """A forward paired with each backward, to hide their communication (DualPipe-V, DeepSeek-V3's DualPipe cut in
    half, arXiv:2412.19437). Every rank keeps p + 1/2 activations from m = 2p on.

    The stages are laid out in a V. In the middle every forward of one direction is followed by a backward of the
    other, and a runner may run the two at once. At the ends an unpaired backward is split as in zero bubble.
    """
    middle = max(micro_batches, 2 * ranks) - 2 * ranks

    def row(r: int, down: StageCodes, up: StageCodes) -> list[int]:
        behind, half = ranks - 1 - r, (r + 2) // 2    # the first r + 1 of the last backwards are whole
        whole, split = [up.B, down.B] * half, [up.I, down.I] * (r + 1)
        closing = whole[:r + 1] + split[r + 1:]
        late = [down.W if code == down.I else up.W for code in split[r + 1:]] + [down.W] * behind
        return [*[down.F] * (2 * behind),
                *[down.F, up.F] * (r + 1),
                *[up.I, up.W, up.F] * behind,
                *[down.F, up.B, up.F, down.B] * (middle + r + 1),
                *[up.B, up.F, down.B] * behind,
                *closing,
                *(code for weight in late[:behind] for code in (weight, down.I)),
                *late[behind:]]

    return _counted("dualpipe-v", ranks, micro_batches, row)


GENERATORS: dict[str, tuple[Callable[..., Schedule], int | None]] = {   # its chunks (None: any)
    "gpipe": (gpipe, 1),
    "1f1b": (one_forward_one_backward, 1),
    "interleaved": (interleaved, None),
    "bfs": (breadth_first, None),
    "zb-h1": (zero_bubble_h1, None),
    "zb-h2": (zero_bubble_h2, 1),
    "zb-v": (zero_bubble_v, 2),
    "dualpipe-v": (dualpipe_v, 2),
}


def generate(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of this name. `chunks`, the stages on each rank, can be chosen for `interleaved`, `bfs` (default 2)
    and `zb-h1` (default 1); it is fixed for the others."""
    if name not in GENERATORS:
        near = difflib.get_close_matches(name.lower(), GENERATORS, 3, 0.4)
        raise ScheduleError(f"there is no schedule {name!r}", f"there are {', '.join(GENERATORS)}",
                            " or ".join(near) or "one of these, or a file with your own")
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks or 1)):
        if number < 1:
            raise ScheduleError(f"{number} {what}", f"a pipeline has at least one of {what}", f"1 or more {what}")
    generator, fixed = GENERATORS[name]
    if fixed is None:
        return generator(ranks, micro_batches) if chunks is None else generator(ranks, micro_batches, chunks)
    if chunks not in (None, fixed):
        raise ScheduleError(f"{name} with {chunks} stages on a rank", f"it has {fixed} on each",
                            f"{fixed}, or one of " + ", ".join(n for n, (_, v) in GENERATORS.items() if v is None))
    return generator(ranks, micro_batches)


def _alternate(forwards: Sequence[int], backwards: Sequence[int], ahead: int, weights: Sequence[int] = (),
               late: int = 0) -> array[int]:
    """`ahead` forwards, then a forward and a backward in turn, then the remaining backwards. Each backward after the
    first `late` is followed by the oldest weight gradient not yet done; the rest of these come at the end."""
    row = array("q", forwards[:ahead])
    for n, backward in enumerate(backwards):
        if n + ahead < len(forwards):
            row.append(forwards[n + ahead])
        row.append(backward)
        if weights and n >= late:
            row.append(weights[n - late])
    row.extend(weights[max(len(backwards) - late, 0):])
    return row


def _micro_batch_groups(ranks: int, micro_batches: int) -> list[range]:
    """The micro-batches in groups of at least `ranks` (if there are as many), as even as possible, larger ones
    first."""
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    # of `larger` groups with one more: where group g begins
    starts = [g * size + min(g, larger) for g in range(count + 1)]
    return [range(*both) for both in zip(starts, starts[1:])]


def _grouped(codes: Callable[[int, int], range], kind: int, stages: Sequence[int], groups: list[range]) -> list[int]:
    """One kind of action over groups of micro-batches: each group through all `stages` in turn."""
    per_stage = [codes(kind, stage) for stage in stages]
    return [code for group in groups for own in per_stage for code in own[group.start:group.stop]]


def _codes(rank_of: tuple[int, ...], micro_batches: int) -> Callable[[int, int], range]:
    """(kind, stage) -> that action for all micro-batches, encoded; a range, as their keys are `stages` apart."""
    stages = len(rank_of)
    step = encode(0, stages)

    def codes(kind: int, stage: int) -> range:
        return range(encode(kind, stage), encode(kind, stage) + step * micro_batches, step)

    return codes


def _from_lists(name: str, rank_of: tuple[int, ...], micro_batches: int, row: ListOf) -> Schedule:
    rows = (Actions.decode(row(r), len(rank_of)) for r in range(max(rank_of) + 1))
    return Schedule(name, rank_of, micro_batches, tuple(rows))


def _counted(name: str, ranks: int, micro_batches: int,
             row: Callable[[int, StageCodes, StageCodes], list[int]]) -> Schedule:
    """A schedule on a V from lists of kinds of a rank's two stages, the one on the way down and the one on the way up.
    The n-th mention of a kind means micro-batch n, B counting as both I and W. Mentions beyond the last micro-batch,
    in the shortest schedule that has the full form, are left out: what remains is legal."""
    rank_of = vee(ranks)

    def numbered(r: int) -> array[int]:
        both_stages = r, 2 * ranks - 1 - r
        down, up = (StageCodes(*(encode(kind, stage) for kind in (F, B, I, W))) for stage in both_stages)
        codes = np.array(row(r, down, up), np.int64)
        micro_batch = np.zeros_like(codes)
        for stage in both_stages:
            for counted in ((F,), (W, B), (I, B)):    # a B is assigned twice: its count among I and B is what remains
                mentions, = np.logical_or.reduce([codes == encode(kind, stage) for kind in counted]).nonzero()
                micro_batch[mentions] = np.arange(len(mentions))
        codes += micro_batch * encode(0, len(rank_of))
        return array("q", codes[micro_batch < micro_batches].tobytes())

    return _from_lists(name, rank_of, micro_batches, numbered)


def _renamed(schedule: Schedule, name: str) -> Schedule:
    return Schedule(name, schedule.rank_of, schedule.micro_batches, schedule.actions)
