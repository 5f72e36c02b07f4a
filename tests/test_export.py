"""torch.export programs of a rank's shards: the values of plain torch, and the boxings of the model as ops."""
from __future__ import annotations

import os
import sys

import pytest
import torch
from harness import PROGRAMS, ROOT, RUN, good
from torch import nn

import globaltensor as gt

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

SEED = 20_261_123
B, S = gt.sbp.broadcast, gt.sbp.split


def exported(model, x, want, tmp_path):
    """The program's values, its boxings, and the same of the program that was saved and loaded."""
    shards = [x.shards[rank] for rank in sorted(x.shards)]
    program = gt.export_ranks(model, (x,))
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    with gt.record() as moves:
        out = program.module()(*shards)
    assert all(type(t) is torch.Tensor for t in out)
    assert all(torch.equal(a, b) for a, b in zip(out, again.module()(*shards), strict=True))
    boxings = [node for node in program.graph.nodes if "globaltensor.box" in str(node.target)]
    return program, out, boxings, moves


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_gpt_under_tensor_parallelism(tied, tmp_path):
    print("seed", SEED)
    torch.manual_seed(SEED)
    model = GPT(32, 8, 1, 16, 4, dropout=0.2, tied=tied).eval()
    ids = torch.randint(32, (3, 8))
    want = model(ids).detach()
    place = gt.placement("cpu", [0, 1], ("tp",))
    gt.parallelize(model, place).train()             # the program is one of evaluation
    x = gt.from_full(ids, place, B)
    program, out, boxings, moves = exported(model, x, want, tmp_path)
    assert model.training
    torch.testing.assert_close(torch.cat(out, dim=2), want, rtol=1e-4, atol=1e-5)        # split along the vocabulary
    with gt.record() as eager, torch.no_grad():
        model.eval()(x)
    assert [m.bytes for m in moves] == [m.bytes for m in eager if m.bytes] and len(boxings) == len(moves)
    names = set(program.state_dict)
    assert "blocks.0.attention.q.weight_0" in names and ("head.weight_0" in names) != tied
    assert program.state_dict["blocks.0.attention.q.weight_1"].shape == (8, 16)


def test_what_is_pending_is_reduced_and_a_batch_stays_split(tmp_path):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    x, place = torch.randn(5, 4), gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    want = model(x).detach()
    gt.parallelize(model, place, {"0.*": {"tp": S(0)}, "2.*": {"tp": B}, "3.weight": {"tp": S(1)}})
    _, out, _, _ = exported(model, gt.from_full(x, place, {"dp": S(0)}), want, tmp_path)
    torch.testing.assert_close(torch.cat([out[0], out[2]]), want)
    assert torch.equal(out[0], out[1])


def test_what_cannot_be_exported_says_so():
    model = nn.Linear(2, 2)
    with pytest.raises(gt.ArgumentError, match="what is exported are shards"):
        gt.export_ranks(model, (torch.ones(1, 2),))
    with pytest.raises(gt.ArgumentError, match=r"gt.export_ranks\(model, \(x,\)\)"):
        gt.export_ranks(model, torch.ones(1, 2))


@pytest.mark.long
@pytest.mark.processes
def test_each_process_has_the_program_of_its_rank(tmp_path):
    assert good([*RUN, "-n", "2", PROGRAMS / "exported.py", tmp_path], timeout=200).count("equal") == 2
