"""Small values that all processes must have, or must have alike: agreed on, gathered, or broadcast."""
from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from globaltensor.errors import DisagreementError, GlobalTensorError, TransportError, where
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.deadlock import SAME_PROGRAM, rank_names
from globaltensor.runtime.exchange import AGREE, BROADCAST, GATHER, exchange
from globaltensor.runtime.lineage import checking
from globaltensor.runtime.memory import flat_bytes
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import rank, world

_uncoordinated = False
_waiting = threading.local()                         # the call in which a thread waits for others
_LARGEST = 1 << 30                                  # bytes of a message

T = TypeVar("T")


@contextmanager
def uncoordinated() -> Iterator[None]:
    """Inside, the processes do different things, so nothing is agreed on and nothing is broadcast."""
    global _uncoordinated
    before, _uncoordinated = _uncoordinated, True
    try:
        yield
    finally:
        _uncoordinated = before


def ranks_apart() -> bool:
    """Do the processes do different things now?"""
    return _uncoordinated


class Advice(NamedTuple):
    """What an error says where ranks disagree."""

    what: str
    why: str
    fix: str


_CREATE = Advice("the ranks disagree about what to create", "every rank runs the same program",
                 "create the same tensors in the same order everywhere, the same seed before random ones")
_PLAIN = Advice("the ranks use different plain tensors", "a plain tensor counts as broadcast: the same on every rank",
                "gt.data.from_ranks(loader, placement) where every rank has batches of its own, "
                "gt.from_local(batch, placement, gt.sbp.split(0)) for one batch, or gt.data.DataLoader")
_OF_EMPTY = Advice(_PLAIN.what, f"{_PLAIN.why}; what torch.empty gives is not, until all of it is written",
                    f"torch.zeros instead of torch.empty, torch.use_deterministic_algorithms(True) where a library "
                    f"makes it (VonMises.sample); or {_PLAIN.fix}")
_PLAIN_FOR = Advice("the ranks use a plain tensor differently", "its values are the same on all of them, and they ask "
                    "for another shape, layout or number of micro-batches", "the same arguments on every rank")
OF_A_MODEL = Advice("the ranks have different models", "each makes the same one: of the same random numbers, or the "
                    "same file", "torch.manual_seed(0) on every rank, before the model is made")
_OTHER_CALLS = Advice("the ranks disagree about what to do", "every rank runs the same program", SAME_PROGRAM)
_INCOMPLETE = Advice("only some of the ranks save a checkpoint", "all ranks save it together, each its part",
                     "gt.save(...) on every rank, not under `if gt.rank() == 0`")
_OF_VALUES = ", of values with checksum "
FAILED = "failed: "                                  # before an error that a rank tells the others in place of its part


def agree(what: str, ranks: Sequence[int] | None = None, advice: Advice = _CREATE, changed: bool = False) -> bool:
    """Check that the processes of these ranks (default: all) call this with the same `what`, with one small all-gather;
    nothing in a lone process. Has anything `changed` on any of them?

    Raises DisagreementError on every one of them, which shows what each rank does.
    """
    ranks = range(world().size) if ranks is None else ranks
    if world().single_process or _uncoordinated or len(ranks) < 2:
        return changed
    mine = torch.tensor([zlib.crc32(what.encode()), len(what), changed], device="cpu")
    others = _all_gather(mine, dict.fromkeys(ranks, 3), what, AGREE)
    if all(torch.equal(mine[:2], other[:2]) for other in others):
        return any(bool(other[2]) for other in others)
    texts = gather_unchecked(f"{what}   at {where()}", what, ranks)
    of_failure = _of_failure(ranks, texts)
    advice = of_failure or _advice_for(texts, advice)
    rows = "".join(f"\n    rank {r}: {text}" for r, text in zip(ranks, texts))
    error = DisagreementError(advice.what + rows, advice.why, advice.fix)
    error.follows = of_failure is not None
    raise error


def _of_failure(ranks: Sequence[int], texts: Sequence[str]) -> Advice | None:
    """What to say where ranks tell of an error."""
    failed = [r for r, text in zip(ranks, texts) if FAILED in text]
    return Advice(f"{rank_names(failed)} failed, where the others go on", "each gives its part of what all do",
                  "look at that error, of the rank that had it") if failed else None


def _advice_for(texts: Sequence[str], advice: Advice) -> Advice:
    """What to say of what all ranks are at; `advice` is for where all are at one call, so the same on all of them."""
    calls = {re.split(r"   at |\(| on |: |\[| \d", text)[0] for text in texts}
    if len(calls) > 1:
        return _INCOMPLETE if "saving a checkpoint" in calls else _OTHER_CALLS
    if advice in (_PLAIN, OF_A_MODEL) and len({text.partition(_OF_VALUES)[2][:8] for text in texts}) == 1:
        return _PLAIN_FOR
    if advice is _PLAIN and re.search(r"aten\.(where|masked_)", texts[0]):
        return _OF_EMPTY                            # a loop that fills in what a mask tells
    return advice


def gather_unchecked(value: object, what: str, ranks: Sequence[int] | None = None) -> list[Any]:
    """The `value` of the process of each of these ranks (default: all), in their order."""
    mine, ranks = as_bytes(value), range(world().size) if ranks is None else ranks
    sizes = _all_gather(torch.tensor([len(mine)], device="cpu"), dict.fromkeys(ranks, 1), what, GATHER)
    known = {r: _size_of_message(size, r) for r, size in zip(ranks, sizes)}
    return [from_bytes(t, r) for r, t in zip(ranks, _all_gather(mine, known, what, GATHER))]


def _all_gather(mine: torch.Tensor, sizes: Mapping[int, int], what: str, tag: int) -> list[torch.Tensor]:
    """The buffer of each of these ranks, of so many elements, each sent straight from one process to another.

    Not by gloo's collectives: their threads may still hold what they moved when the interpreter ends, and a thread
    that needs an interpreter that has ended aborts the process.

    Raises GlobalTensorError in a signal handler that has come while this thread waits here: the others wait for what it
    was about to send, and would take another message for it, or wait for ever.
    """
    if (within := getattr(_waiting, "call", None)) is not None:
        raise GlobalTensorError(f"{what} in a signal handler, while this rank waits in {within}",
                                "the handler has come between messages of that call, which others wait for",
                                "gt.preempted, or a flag that the handler sets and that the loop reads between steps")
    _waiting.call = what
    try:
        return _gather_of_all(mine, sizes, what, tag)
    finally:
        _waiting.call = None


def _gather_of_all(mine: torch.Tensor, sizes: Mapping[int, int], what: str, tag: int) -> list[torch.Tensor]:
    buffers = {r: mine if r == rank() else mine.new_empty(n) for r, n in sizes.items()}
    peers = [r for r in sizes if r != rank()]
    _exchange_small(dict.fromkeys(peers, mine), {r: buffers[r] for r in peers}, sizes, what, tag)
    return list(buffers.values())


def _exchange_small(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor],
                    members: Collection[int], what: str, tag: int) -> None:
    """Of buffers that nobody changes afterwards. Where all `members` share memory, they tell each other where these
    lie, which takes microseconds; gloo takes milliseconds."""
    if torch_ext is None or not world().host_peers.issuperset(members):
        exchange(outgoing, incoming, what, tag)
        return
    first = min(world().host_peers)
    numbers = [r - first for r in members if r != rank()]
    for r, t in outgoing.items():
        torch_ext.send(r - first, [t], tag, what, numbers)
    for r, t in incoming.items():
        t.copy_(torch_ext.recv(r - first, t.nbytes, tag, what, numbers).view(t.dtype))


def as_bytes(value: object) -> torch.Tensor:
    """A value as a flat tensor of bytes, signed by this rank; `from_bytes` makes it again."""
    return torch.frombuffer(bytearray(encode_message(value, rank())), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, sender: int) -> Any:
    """The value that this rank sent. Raises TransportError for bytes that it did not sign (codec.py)."""
    return decode_message(data.numpy().tobytes(), sender)


def _size_of_message(size: torch.Tensor, sender: int) -> int:
    """What stands before a message, read from outside: not believed to be small."""
    if not 0 <= int(size) <= _LARGEST:
        raise TransportError(f"a message of {int(size)} bytes from rank {sender}", "no rank sends that",
                             "the same version of globaltensor on all hosts, and no other program at its ports")
    return int(size)


def agree_on(t: torch.Tensor, what: str, ranks: Sequence[int] | None = None, advice: Advice = _PLAIN) -> None:
    """Check that the processes of these ranks (default: all) hold the same tensor `t`."""
    if not world().single_process:
        agree(f"{what}: {list(t.shape)}, {t.dtype}{_OF_VALUES}{checksum(t):08x}", ranks, advice)


_uses: dict[tuple[int, ...], dict[str, int]] = {}    # by ranks and key, without native code
# Shapes that change with every call would pile up. Ranks that share a placement must drop the same counts at the same
# use, or one would compare where another does not. They add the same keys in the same order, but neither know when each
# was last used (native code counts without looking a key up) nor share other placements: so each list of ranks has
# counts of its own, and all of them go when there is one too many.
_MOST_KEYS = 10_000


def plain_key(t: torch.Tensor, what: str) -> str:
    """What counts the uses of plain tensors like this one."""
    return f"{what} {tuple(t.shape)} {t.dtype}"


def _count_use(ranks: tuple[int, ...], key: str) -> int:
    if torch_ext is not None:
        return torch_ext.count_plain_use(ranks, key, _MOST_KEYS)
    counts = _uses.setdefault(ranks, {})
    if len(counts) >= _MOST_KEYS and key not in counts:
        counts.clear()
    counts[key] = counts.get(key, 0) + 1
    return counts[key]


def compare_plain(t: torch.Tensor, what: str, ranks: Sequence[int], once: bool = False) -> None:
    """A plain tensor meets global ones on these ranks: check that it is the same on all of them, often at first and
    then ever more seldom (at uses 1, 2, 4, 8, ...; at the first alone if `once`), so that training does not pay for it;
    always if `checking()`. Native code goes on with the same counts: ranks agree on when to compare, whichever way
    calls take.

    Raises DisagreementError on every rank. Whoever feeds each rank its own batch, as for DDP, learns it at the first.
    """
    if world().single_process or rank() not in ranks or t.layout is not torch.strided:
        return                                       # the values of a sparse tensor are not in one piece of memory
    n = _count_use(tuple(ranks), plain_key(t, what))
    if n == 1 or not once and compare_at(n) or checking():
        agree_on(t, what, ranks)


def compare_at(use: int) -> bool:
    """Is this use one of those at which ranks compare what all of them have: 1, 2, 4, 8, ...; each if `checking()`?"""
    return use & (use - 1) == 0 or checking()


def checksum(t: torch.Tensor) -> int:
    """A number that tells tensors of different values apart; reads them at about a gigabyte a second. 0 on the meta
    device, where there are none."""
    if t.is_meta:
        return 0
    data = t.detach().resolve_conj().resolve_neg().contiguous()
    crc = 0
    for part in flat_bytes(data).split(1 << 26):                 # not all of a GPU's tensor on the CPU at once
        crc = zlib.crc32(part.cpu().numpy(), crc)
    return crc


def broadcast_object(value: T, source: int, what: str = "broadcasting a result") -> T:
    """The object that rank `source` has, on every process; collective over the whole world."""
    if world().single_process or _uncoordinated:
        return value
    everybody = range(world().size)
    if rank() == source:
        data = as_bytes(value)
        for t in (torch.tensor([len(data)], device="cpu"), data):
            _exchange_small(dict.fromkeys({*everybody} - {rank()}, t), {}, everybody, what, BROADCAST)
        return value
    _exchange_small({}, {source: (size := torch.empty(1, dtype=torch.int64, device="cpu"))}, everybody, what, BROADCAST)
    data = torch.empty(_size_of_message(size, source), dtype=torch.uint8, device="cpu")
    _exchange_small({}, {source: data}, everybody, what, BROADCAST)
    return from_bytes(data, source)


def gather_objects(value: T, what: str) -> list[T]:
    """Every process's `value`, in the order of ranks.

    Raises DisagreementError on every rank where not all of them do `what`.
    """
    if world().single_process:
        return [value]
    if _uncoordinated:
        raise DisagreementError(f"{what} inside a pipeline stage", "other processes run other stages, so they cannot "
                                "take part", "do it outside the stages, or with what needs no other process: a "
                                "factory, an op")
    agree(what)
    return gather_unchecked(value, what)
