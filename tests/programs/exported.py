"""Every rank exports its part of an MLP, and runs it: together they give what plain torch gives."""
from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import globaltensor as gt

torch.manual_seed(5)
plain = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
where = gt.placement.all("cpu")
rows = {"0.weight": "S(0)", "1.weight": "S(0)", "1.bias": "S(0)", "3.weight": "S(1)"}
model = copy.deepcopy(plain).to_global(where, lambda name, _: rows.get(name, "B"))
ids = torch.arange(9).repeat(2)
program = gt.export_ranks(model, (gt.from_full(ids, where, gt.sbp.broadcast),))
assert program.state_dict["1.weight"].shape == (4, 6)
path = f"{sys.argv[1]}/rank-{gt.rank()}.pt2"
torch.export.save(program, path)
for one in (program, torch.export.load(path)):
    out, = one.module()(ids)
    torch.testing.assert_close(out, plain(ids).detach())
sys.stdout.write("equal\n")
