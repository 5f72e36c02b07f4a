"""The lineage of a global tensor: a hash of all that made its value, by which ranks notice that theirs differ.

Where no bytes move, nothing tells a rank that another one computes something else: `x * 0.5` here and `x * 0.25` there,
another learning rate, `x[7]` for `x[0]`, two tensors swapped. So every op hashes

    its name, the numbers and texts of its arguments, some elements of plain operands, the grad mode,
    the random numbers that it drew, and the lineages of its global operands

and what it returns or writes to has the result as its *lineage*. A tensor that no op made is the n-th of its placement.
A boxing keeps the value, and so the lineage. So does a copy: torch makes some for the sake of strides, which a rank
without a part may not know. Whatever moves bytes agrees on the lineage of what is moved, in the word that it sends
anyway: ranks whose programs went apart raise at the first boxing of anything that came of it. What a rank does alone
and never boxes (`if gt.rank() == 0: print(x.norm())` of a broadcast x) disturbs nobody.

Lineages are kept where several processes run one program. A pipeline keeps none, as its ranks do different things: what
comes out of it has lineage 0. Ops have theirs from native code (csrc/torch_ext/lineage.h), or else from here.
"""
from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from globaltensor.errors import TransportError, counted, where
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.placement import placement
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import OpOverload, default_store

RESULTS = 0xFF                                       # these bits of a lineage count the results of one call
_SAMPLES = 8                                         # elements of a plain operand that are looked at
_KEPT = {"aten::clone", "aten::detach", "aten::alias", "aten::lift", "aten::lift_fresh", "globaltensor::redistribute"}

_kept = False
_call = 0                                            # of the op that the program called, without native code
_boxed: list[int] = []                               # of what was boxed last, without native code
_MOST = 8192                                        # calls that are remembered
_history: deque[tuple[int, str, list[int], list[float], bool]] = deque(maxlen=_MOST)
_seeds: dict[int, int] = {}                          # of the random numbers that a call drew
_places: dict[int, str] = {}                         # the lines of calls, if `checking()`
_made: dict[placement, int] = {}                     # how many tensors no op made


def keep(on: bool) -> None:
    """From now on, or no longer, tensors have lineages."""
    global _kept
    _kept = on
    if torch_ext is not None:
        torch_ext.keep_lineages(on)
        torch_ext.note_places(_note_place if on and checking() else None)


def checking() -> bool:
    """GLOBALTENSOR_CHECK=1: verify each time that a plain tensor that meets a global one is the same everywhere, and
    note the line of each call, for errors."""
    return os.environ.get("GLOBALTENSOR_CHECK", "") not in ("", "0")


def _note_place(lineage: int) -> None:
    _note(_places, lineage, where())


def _note(notes: dict[int, Any], lineage: int, what: Any) -> None:
    """Keep what is known of a call, for as long as calls are remembered."""
    notes[lineage] = what
    if len(notes) > _MOST:
        del notes[next(iter(notes))]


@contextmanager
def paused() -> Iterator[None]:
    """Inside, the processes do different things, and nothing has a lineage."""
    before = _kept
    keep(False)
    try:
        yield
    finally:
        keep(before)


def begin_lineage(x: Any) -> Any:
    """Give a tensor that no op made its lineage: it is the n-th of its placement. Gives it back."""
    if _kept and is_global(x):
        where = x.spec.layout.placement
        nth = _made[where] = _made.get(where, 0) + 1
        lineage = _hash(("made", str(where), nth))
        x.lineage = lineage
        if torch_ext is not None:
            torch_ext.note_new_lineage(lineage, nth)
        else:
            _history.append((lineage, "", [], [nth], True))
    return x


@contextmanager
def taken_back_if_it_fails() -> Iterator[None]:
    """Inside, ranks make tensors and then agree that all could. Where that raises, which it does on every rank, those
    that some have made count on none: ranks that catch the error go on alike."""
    before = dict(_made)
    try:
        yield
    except BaseException:
        _made.clear()
        _made.update(before)
        raise


def of_boxing(lineages: Sequence[int]) -> int:
    """What a boxing of tensors of these lineages agrees on: the op that it is for counts, where there is one."""
    global _boxed
    if not _kept:
        return 0
    call = _call if torch_ext is None else torch_ext.call_lineage()
    _boxed = [call] if call else list(lineages)
    return _hash(_boxed)


def note_draw(number: int, seed: int) -> None:
    """The op that the program called depends on this number as well: a key of random numbers, by a generator that was
    given this seed."""
    global _call
    if torch_ext is not None:
        torch_ext.note_lineage(number & 0xFFFFFFFFFFFFFFFF)
    elif _call:
        _call = _hash((_call, number))
    if call := _call if torch_ext is None else torch_ext.call_lineage():
        _note(_seeds, call, seed)


def kept_here() -> bool:
    """Do ops that arrive in Python have to be passed lineages, as there is no native code that did it?"""
    return _kept and torch_ext is None and not _call


@contextmanager
def within(lineage: int) -> Iterator[None]:
    """Inside, the op of this lineage is the one that the program called: a boxed view is made, as when it was asked
    for."""
    global _call
    before, _call = _call, lineage
    try:
        yield
    finally:
        _call = before


def current() -> int:
    """The lineage of the op that the program called, without native code; 0 outside of ops."""
    return _call


def call_with_lineage(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
    """run() is the call of an op that the program made: its results, and what it writes to, get their lineage."""
    schema = func._schema
    passed = [*zip(schema.arguments, args), *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)]
    parts: list[Any] = []
    operands: list[int] = []
    numbers: list[float] = []
    written: list[Any] = []
    for k, (a, value) in enumerate(passed):
        is_written = a.alias_info is not None and a.alias_info.is_write
        written += list(value) if is_written and isinstance(value, (list, tuple)) else [value] if is_written else []
        parts.append(_part(value, is_written or not k and ignores_first(func, kwargs), operands, numbers))
    begun = _hash((schema.name, schema.overload_name, torch.is_grad_enabled(), parts))
    event = f"{schema.name}.{schema.overload_name}", operands[:3], numbers[:3], torch.is_grad_enabled()
    _history.append((begun, *event))                 # before: a boxing in it may tell of it
    with within(begun):
        result = run()
        lineage = _call
    if lineage != begun:                             # random numbers were drawn
        _history.append((lineage, *event))
    if checking():
        _note_place(lineage)
    kept = operands[:1] if schema.name in _KEPT else operands[1:2] if schema.name == "aten::copy_" else []
    for nth, t in enumerate(result if isinstance(result, (list, tuple)) else [result]):
        if is_global(t):
            t.lineage = kept[0] if kept else lineage | min(nth, RESULTS)
    for nth, t in enumerate(written):
        if is_global(t):
            t.lineage = kept[0] if kept else lineage | min(nth, RESULTS)
            base = getattr(t, "_base", None)
            if base is not None and is_global(base):
                base.lineage = _hash((base.lineage, lineage | min(nth, RESULTS)))
    return result


def ignores_first(func: OpOverload, options: Mapping[str, Any]) -> bool:
    """Does the op not look at its first operand? So `torch.baddbmm(torch.empty(...), q, k, beta=0)`. The
    twin of `ignores_first` in recipe_cache.cpp."""
    return options.get("beta") == 0 and any(a.name == "alpha" for a in func._schema.arguments)


def _hash(parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~RESULTS


def _part(value: Any, is_left_out: bool, operands: list[int], numbers: list[float]) -> Any:
    """What an argument adds: the twin of `push` in recipe_cache.cpp."""
    if isinstance(value, (list, tuple)):
        return [_part(one, is_left_out, operands, numbers) for one in value]
    if is_global(value):
        operands.append(value.lineage)
        return value.lineage
    if isinstance(value, torch.Tensor):
        samples = None if is_left_out else _samples(value)
        if samples and value.numel() <= 3 and not value.is_complex():
            numbers += map(float, value.reshape(-1).tolist())
        return samples
    if isinstance(value, (int, float)):
        numbers.append(float(value))
    return value if isinstance(value, (int, float, complex, str, type(None))) else str(type(value))


def _samples(t: torch.Tensor) -> Any:
    """A few elements of a plain tensor, spread over all."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu" and t.layout is torch.strided
    if not plain or not t.is_contiguous() or not t.numel() or t.is_conj() or t.is_neg():
        return None
    n = t.numel()
    flat = t.detach().reshape(-1)
    return [str(flat[i * (n - 1) // max(1, min(n, _SAMPLES) - 1)].item()) for i in range(min(n, _SAMPLES))]


# ------------------------------------------------------------------------------------------- what ranks do differently


class PastCall(NamedTuple):
    """A call, or a tensor that no op made ("")."""

    op: str
    operands: list[int]
    numbers: list[float]
    gradients: bool                                  # the grad mode
    age: int                                         # calls since then
    seed: int | None                                 # of the random numbers that it drew
    place: str                                       # its line, "" where nobody noted it

    def __str__(self) -> str:
        if not self.op:
            return f"tensor number {self.numbers[0]:.0f} of those that were made there"
        name = self.op.replace("::", ".") + ("default" if self.op.endswith(".") else "")
        return (f"{name}({', '.join(f'{n:.9g}' for n in self.numbers)})" + " under no_grad" * (not self.gradients)
                + (f" with random numbers of seed {self.seed}" if self.seed is not None else "")
                + (f" at {self.place}" if self.place else ""))


def difference(rank: int, peers: Sequence[int], seconds: float = 0.3) -> str:
    """In what this rank differs from another one of these, after ranks disagreed in a boxing: the first call whose
    operands both have, and whose result only this one has. "" where that is not known. All of them call it."""
    if not _kept:
        return ""
    boxed = _boxed if torch_ext is None else torch_ext.boxed_lineages() or _boxed
    rows = list(_history) if torch_ext is None else torch_ext.lineage_history()
    events = {lineage: PastCall(op, operands, numbers, gradients, len(rows) - 1 - i, _seeds.get(lineage),
                                _places.get(lineage, ""))
              for i, (lineage, op, operands, numbers, gradients) in enumerate(rows)}
    with suppress(dist.DistError):                        # the store went with its rank, which has raised already
        return _first_difference(rank, peers, boxed, events, time.monotonic() + seconds)
    return ""


def _first_difference(rank: int, peers: Sequence[int], boxed: Sequence[int], events: dict[int, PastCall],
                      until: float) -> str:
    store = default_store()
    store.set(_history_key(rank), encode_message((boxed, _lineages_text(events)), rank))
    for peer in peers:
        if peer == rank:
            continue
        while not store.check([_history_key(peer)]) and time.monotonic() < until:
            time.sleep(0.005)
        if not store.check([_history_key(peer)]):
            continue
        try:
            other, packed = decode_message(store.get(_history_key(peer)), peer)
        except TransportError:
            continue                                 # not by a rank of this job
        only_here = [lineage for lineage in boxed if lineage not in other]
        if only_here:
            return _where_apart(only_here[0], events, _read_lineages(packed))
        swapped = [nth for nth, pair in enumerate(zip(boxed, other)) if pair[0] != pair[1]]
        if swapped:
            event = events.get(boxed[swapped[0]] & ~RESULTS)
            which = "" if event is None else f", that of {event}" if event.op else f", {event}"
            return f"; of the same tensors in another order, whose number {swapped[0] + 1} is another one{which}"
    return ""


def advice_of_apart(rows: str) -> tuple[str, str] | None:
    """Why ranks disagree that are at one boxing and have computed something else before it, and what to do; None where
    they are at several boxings. `rows` tell of one rank each, with what `difference` said of it."""
    ranks = [re.sub(r"^ *rank \d+(: | waits for ranks? [\d, ]+ in )", "", row) for row in rows.splitlines() if row]
    heads, parted = {row.partition("; ")[0] for row in ranks}, {row.partition("; ")[2] for row in ranks}
    if any(text.startswith("of the same tensors") for text in parted):
        return ("they move the same tensors in different orders", "one order on every rank: a list, or sorted(...), "
                "where a set or a dict may give each rank its own")
    if "elsewhere" in heads or len(heads) > 1 or not any(parted):
        return None
    why = "they are at one line, and what they move there was computed by different calls before it"
    if len(parted) == 1:                             # nothing that they tell of that call differs
        why += " (with other texts, elements of a plain tensor, or random numbers)"
    fix = "the same numbers, seeds and calls on every rank"
    return why, fix if checking() else f"{fix}; GLOBALTENSOR_CHECK=1 also shows the line of that call"


def _where_apart(lineage: int, events: dict[int, PastCall], known: set[int]) -> str:
    event = events.get(lineage & ~RESULTS)
    if event is None:
        return "" if not lineage else f"; apart for more than {len(events)} calls"
    if lineage & ~RESULTS in known:
        return f"; of another tensor, {'that of ' if event.op else ''}{event}"
    for operand in event.operands:
        if operand & ~RESULTS in events and operand & ~RESULTS not in known:
            return _where_apart(operand, events, known)
    return f"; apart since {event}, {counted(event.age, 'call')} ago"


def _history_key(rank: int) -> str:
    return f"globaltensor lineages {rank}"


def _lineages_text(events: dict[int, PastCall]) -> str:
    return base64.b64encode(struct.pack(f"<{len(events)}Q", *events)).decode()


def _read_lineages(text: str) -> set[int]:
    data = base64.b64decode(text)
    return set(struct.unpack(f"<{len(data) // 8}Q", data))
