"""safetensors files, written past the page cache and read by plain reads.

    8 bytes      the length of the header
    header       JSON: {"<key>": {"dtype": "F32", "shape": [7, 5], "data_offsets": [0, 140]}, ...}, then spaces
    tensors      their bytes, one behind the other, the largest items first

What is written will not be read again soon. So it need not pass through the kernel's cache, whose pages have to be
found, filled and written back: where the file system can (O_DIRECT), the disk takes a chunk of aligned memory while the
next one is filled. The header is as long as makes the tensors begin at a block. A file is read block by block, which
keeps the kernel reading ahead, where touching a mapped file waits for each page; and a file that has become shorter is
an error then, not a signal that ends the process.
"""
from __future__ import annotations

import errno
import json
import mmap
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from globaltensor.checkpoint.hashes import KINDS
from globaltensor.errors import act_for, where
from globaltensor.layouts.layout import Shape
from globaltensor.runtime.memory import flat_bytes
from globaltensor.runtime.process_limits import allow_files

try:
    from safetensors import safe_open
except ImportError:                                  # an optional dependency: see need_safetensors
    pass

BLOCK = 4096                                         # no disk wants more of addresses, offsets and lengths
CHUNK = 8 << 20                                      # bytes that are written at once
SPARE_FILES = 64                                     # that a process can still open before its limit is raised
READ = 1 << 20                                       # that are read and hashed at once, while a core's cache holds them
NAMES = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
         torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def threads() -> int:
    """How many threads work on the files of a process: launchers divide the cores among the ranks by this."""
    return min(8, torch.get_num_threads())


@contextmanager
def workers() -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` for work on the files of a process, on its threads; where there is one, in the thread that asks: to hand
    a piece to another one takes longer than to read a small one."""
    if threads() == 1:
        yield map
        return
    with ThreadPoolExecutor(threads(), initializer=act_for, initargs=(where(),)) as pool:
        yield pool.map


# ------------------------------------------------------------------------------------------------------------- writing


def write_tensors(path: Path, data: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A new file of these tensors (on the CPU, contiguous), on the disk when this returns. Other threads can run."""
    order = sorted(data, key=lambda key: (-data[key].dtype.itemsize, key))
    header = _header({key: data[key] for key in order}, metadata)
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *(flat_bytes(data[key]) for key in order)]
    starts = [0, *accumulate(len(part) for part in parts)]
    with open(path, "xb", buffering=0) as file:
        uncached = _open_uncached(path)
        try:
            _write_chunks(_Output(file, uncached), parts, starts)
        finally:
            if uncached is not None:
                uncached.close()
        file.truncate(starts[-1])                    # the last block was filled up
        os.fsync(file.fileno())


def _open_uncached(path: Path) -> FileIO | None:
    """None where the system, or the file system, cannot write that way."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return FileIO(path, "r+", opener=lambda name, flags: os.open(name, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _header(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    stop = 0
    for key, t in tensors.items():
        start, stop = stop, stop + t.nbytes
        fields[key] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [start, stop]}
    text = json.dumps(fields).encode()
    text += b" " * (-(8 + len(text)) % BLOCK)
    return len(text).to_bytes(8, "little") + text


def _write_chunks(output: _Output, parts: list[torch.Tensor], starts: list[int]) -> None:
    """Each chunk by a thread that has a buffer of its own: one is filled while the disk takes another."""
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    chunks = range(0, starts[-1], CHUNK)
    workers = min(1 + threads(), len(chunks))

    def write(start: int) -> None:
        buffer = buffers.get()
        try:
            size = min(CHUNK, starts[-1] - start)
            _fill_chunk(torch.frombuffer(buffer, dtype=torch.uint8)[:size], start, parts, starts)
            output.write(memoryview(buffer)[:size + -size % BLOCK], start)
        finally:
            buffers.put(buffer)                      # else a full disk would leave others waiting for one

    with ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            buffers.put(_chunk_buffer(CHUNK))
        written = [pool.submit(write, start) for start in chunks]
        try:
            for each in written:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _chunk_buffer(nbytes: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)           # a disk takes few pieces of memory at once
    return buffer


def _fill_chunk(buffer: torch.Tensor, start: int, parts: list[torch.Tensor], starts: list[int]) -> None:
    """The bytes of the file from `start` on. Copies without Python's lock."""
    done, k = 0, bisect_right(starts, start) - 1
    while done < len(buffer):
        part = parts[k][start + done - starts[k]:][:len(buffer) - done]
        buffer[done:done + len(part)].copy_(part)
        done, k = done + len(part), k + 1


class _Output:
    """Two handles of a file: what one of them does not take goes through the cache. Threads may write at once."""

    def __init__(self, file: FileIO, uncached: FileIO | None) -> None:
        self.file, self.uncached = file, uncached

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            uncached = self.uncached
            try:
                done += _write_at(uncached or self.file, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or uncached is None:
                    raise
                self.uncached = None                 # a disk that wants more, or a write that ended within a block


_moving = threading.Lock()                           # where nothing but a file's position says where to go on


def _write_at(file: FileIO, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(file.fileno(), data, offset)
    with _moving:                                    # Windows
        file.seek(offset)
        return file.write(data)


def _read_at(file: FileIO, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [into], offset)
    with _moving:
        file.seek(offset)
        return file.readinto(into)


# ------------------------------------------------------------------------------------------------------------- reading


class Place(NamedTuple):
    """A tensor of a file: where its bytes are."""

    dtype: torch.dtype
    shape: Shape
    offset: int
    nbytes: int


class TensorFile:
    """A file that stays open, so that what was checked is what is read. Raises OSError, or safetensors' error, where
    its header does not fit its size."""

    def __init__(self, path: Path) -> None:
        self.file = FileIO(path)
        try:
            # a checkpoint has a file per rank that saved it: more, perhaps, than a process may have open at first
            allow_files(self.file.fileno() + SPARE_FILES)
            same = f"/proc/self/fd/{self.file.fileno()}"         # what was opened, whatever has its name by now
            with safe_open(same if os.path.exists(same) else path, "numpy"):
                pass                                 # it checks the header
            length = int.from_bytes(self._bytes(8, 0), "little")
            header = json.loads(self._bytes(length, 8))
            header.pop("__metadata__", None)
            self.tensors = {key: _place_of(of, 8 + length) for key, of in header.items()}
        except BaseException:
            self.file.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def _bytes(self, count: int, offset: int) -> bytes:
        self.read(memoryview(buffer := bytearray(count)), offset)
        return bytes(buffer)

    def hash(self, of: Place, kind: str, into: torch.Tensor | None = None) -> str:
        """As `piece_hash` of its tensor, which is read into plain memory where there is some. Raises OSError where the
        file has become shorter."""
        hashed, buffer = KINDS[kind](), _read_buffer() if into is None else memoryview(b"")
        all_of_it = None if into is None else flat_bytes(into).numpy().data
        for start in range(0, of.nbytes, READ):
            part = buffer[:of.nbytes - start] if all_of_it is None else all_of_it[start:start + READ]
            self.read(part, of.offset + start)
            hashed.update(part)
        return f"{kind}:{hashed.hexdigest()}"

    def read(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = _read_at(self.file, into[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file is too short")
            done += count

    def copy_part(self, of: Place, index: tuple[slice, ...], into: torch.Tensor) -> None:
        """into.copy_(tensor[index]), of a tensor with dims. Reads whole rows, straight into their place if it can."""
        first, rows, row = index[0].start, into.shape[0], of.nbytes // of.shape[0]
        if into.shape[1:] == of.shape[1:] and into.dtype == of.dtype and is_plain_memory(into):
            self.read(flat_bytes(into).numpy().data, of.offset + first * row)
            return
        count = max(1, CHUNK // row)
        buffer = torch.empty(min(count, rows), *of.shape[1:], dtype=of.dtype, device="cpu")
        for start in range(0, rows, count):
            part = buffer[:rows - start]
            self.read(flat_bytes(part).numpy().data, of.offset + (first + start) * row)
            into[start:start + count].copy_(part[(slice(None), *index[1:])])


_buffers = threading.local()


def _read_buffer() -> memoryview:
    """One per thread, kept: the first write to new memory takes longer than the read."""
    if not hasattr(_buffers, "buffer"):
        _buffers.buffer = memoryview(bytearray(READ))
    return _buffers.buffer


def is_plain_memory(t: torch.Tensor) -> bool:
    """Can a file be read straight into this tensor?"""
    return t.device.type == "cpu" and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def _place_of(of: dict[str, Any], data: int) -> Place:
    start, stop = of["data_offsets"]
    if of["dtype"] not in DTYPES:
        raise OSError(errno.EINVAL, f"it has a tensor of {of['dtype']}, which this library does not read")
    return Place(DTYPES[of["dtype"]], tuple(of["shape"]), data + start, stop - start)
