"""Rows that are global tensors, from workers of torch's DataLoader: an error in several processes, and no hang."""
from __future__ import annotations

import pytest
import torch

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

S = gt.sbp.split


class Rows(torch.utils.data.Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i]}


def main():
    for sbp in (S(1), gt.sbp.broadcast, S(0)):       # a row of the last one must be moved
        x = gt.from_full(torch.arange(24.0).view(4, 6), gt.placement("cpu", [0, 1]), sbp)
        for options in ({}, {"batch_size": None}, {"collate_fn": list}):
            loader = torch.utils.data.DataLoader(Rows(x), **{"batch_size": 2, **options}, num_workers=1)
            with pytest.raises(GlobalTensorError) as error:
                list(loader)
            assert "worker_rows.py" in str(error.value).partition("where:")[2].splitlines()[0]
    x = x.to_global(sbp=S(1))
    batches = list(torch.utils.data.DataLoader(Rows(x), 2, num_workers=0))
    assert torch.equal(torch.cat([batch["x"] for batch in batches]).full_tensor(), x.full_tensor())


if __name__ == "__main__":
    main()
