"""The files of tensors: what safetensors itself reads of them, a disk that is full, and more files than a process may
have open at first."""
from __future__ import annotations

import errno
import resource
import threading

import pytest
import torch
from safetensors.torch import load_file

from globaltensor.checkpoint import tensor_files
from globaltensor.checkpoint.tensor_files import CHUNK, TensorFile, write_tensors

SIZES = [0, 1, 4095, 4096, CHUNK - 4096, CHUNK, CHUNK + 1]


@pytest.mark.parametrize("past", [True, False])
def test_safetensors_reads_what_is_written_past_the_cache_and_through_it(past, tmp_path, monkeypatch):
    if not past:
        monkeypatch.setattr(tensor_files, "_open_uncached", lambda path: None)
    data = {f"{k}": torch.randint(0, 256, (size,), dtype=torch.uint8) for k, size in enumerate(SIZES)}
    data |= {"number": torch.tensor(2.5), "é": torch.randn(3, 5, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "x", data)
    found = load_file(tmp_path / "x")
    assert found.keys() == data.keys() and all(torch.equal(found[key], t) for key, t in data.items())


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_ends_the_writing_on_all_threads(kind, tmp_path, monkeypatch):
    def refuse(file, data, offset):
        if offset:
            raise OSError(kind, "refused")
        return len(data)

    def write():
        try:
            write_tensors(tmp_path / "x", {"t": torch.zeros(64 << 12)})
        except OSError as error:
            errors.append(error.errno)

    monkeypatch.setattr(tensor_files, "CHUNK", 4096)
    monkeypatch.setattr(tensor_files, "_write_at", refuse)
    errors: list[int | None] = []
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    assert errors == [kind]


def test_a_disk_that_refuses_unaligned_blocks_is_written_through_the_cache(tmp_path, monkeypatch):
    write, short = tensor_files._write_at, []

    def half(file, data, offset):
        if not short:                                # the disk takes a part of a block, as one that is nearly full
            short.append(offset)
            data = data[:512]
        return write(file, data, offset)

    monkeypatch.setattr(tensor_files, "_write_at", half)
    t = torch.randn(CHUNK // 3)
    write_tensors(tmp_path / "x", {"t": t})
    assert short and torch.equal(load_file(tmp_path / "x")["t"], t)


def test_more_files_can_be_open_than_the_limit_says_at_first(tmp_path):
    write_tensors(tmp_path / "x", {"t": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    one = TensorFile(tmp_path / "x")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (one.file.fileno() + 80, before[1]))
        files = [TensorFile(tmp_path / "x") for _ in range(200)]
        assert all(file.tensors.keys() == {"t"} for file in files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
