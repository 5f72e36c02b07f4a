"""Parts of one element, which may have any stride: moved as rows, saved, and sent as messages. On two processes.

One process that needs exactly one row of the other had it fail, and that depends on the data.
"""
from __future__ import annotations

import sys
from pathlib import Path

import torch

import globaltensor as gt
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.memory import flat_bytes

S = gt.sbp.split(0)
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool)
READS = {
    "index": lambda x, i: x[:, 1][i],
    "mask": lambda x, i: x[x[:, 0] != x[0, 0], 1],
    "index_select": lambda x, i: x[:, 1].index_select(0, i),
    "take_along_dim": lambda x, i: x[:, 1].take_along_dim(i, 0),
    "index_put": lambda x, i: torch.zeros_like(x[:, 0]).index_put(((i + 1) % 12,), x[:len(i), 1]),
    "index_add": lambda x, i: torch.zeros_like(x[:, 0]).index_add(0, i, x[:len(i), 1]),
    "expanded": lambda x, i: x[:, :1].expand(len(x), 3)[i],
}


def check_reads() -> None:
    where = gt.placement("cpu", [0, 1])
    for kind in KINDS:
        plain = (torch.arange(48).reshape(12, 4) * 7 % 13).to(kind)
        for name, read in READS.items():
            for rows in ([0, 3, 4, 5, 7], [6, 5], [5, 6, 7, 8], [1, 11]):
                i = torch.tensor(rows)
                want = read(plain, i)
                got = read(gt.from_full(plain, where, S), gt.from_full(i, where, S)).full_tensor()
                assert torch.equal(got, want), (name, kind, rows, got, want)


def check_bytes() -> None:
    for kind in KINDS:
        column = torch.arange(8).reshape(2, 4).to(kind)[:1, 1]
        assert column.is_contiguous() and column.stride() == (4,)
        assert flat_bytes(column).tolist() == flat_bytes(column.clone(memory_format=torch.contiguous_format)).tolist()
        assert flat_bytes(column).numel() == column.element_size()
    assert flat_bytes(torch.empty(0, 3)).numel() == 0
    assert torch.equal(decode_message(encode_message(column)), column)


def check_saves() -> None:
    where = gt.placement("cpu", [0, 1])
    plain = torch.arange(8.0).reshape(2, 4)
    states = {"global": {"a": gt.from_full(plain, where, S)[:, 1]}, "plain": {"a": plain[:1, 1]}}
    for name, state in states.items():
        want = state["a"].full_tensor() if name == "global" else state["a"]
        target = Path(sys.argv[1]) / f"{name} {gt.world_size()}"
        gt.save(state, target)
        read = {"a": torch.zeros_like(state["a"])}
        gt.load(read, target)
        assert torch.equal(read["a"].full_tensor() if name == "global" else read["a"], want), name


def main() -> None:
    check_bytes()
    check_reads()
    check_saves()


if __name__ == "__main__":
    main()
