"""The program of torch's tutorials on DDP, and the same on global tensors: what differs is where WAY is read.

Every process writes, to FOLDER/<rank>.json: the samples it read, and the losses and parameters of the whole.
"""
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import globaltensor as gt

RANKS, BATCH, EPOCHS = 2, 4, 2


class Samples(Dataset):
    """21 samples: not a multiple of the ranks, nor of the batch."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y, self.read = torch.randn(21, 6, generator=generator), torch.arange(21) % 3, []

    def __len__(self):
        return 21

    def __getitem__(self, i):
        self.read.append(i)
        return {"x": self.x[i], "target": (self.y[i], f"sample {i}")}


def loader_of(rank, dataset):
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, RANKS, rank, shuffle=True, seed=3))


def main(way, folder):
    torch.manual_seed(0)
    model, dataset = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), Samples()
    samplers = []

    def own(r):
        samplers.append((loader := loader_of(r, dataset)).sampler)
        return loader

    if way == "ddp":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
        loader = own(rank)
    else:
        P = gt.placement("cpu", range(RANKS))
        rank = gt.rank()
        model.to_global(P, gt.sbp.broadcast)
        loader = gt.data.from_ranks(own if way == "one process" else own(rank), P)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batch in loader:
            loss = cross_entropy(model(batch["x"]), batch["target"][0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole = loss.detach()
            if way == "ddp":
                dist.all_reduce(whole)
                whole = whole / RANKS
            losses.append(whole.item())
    parameters = [p.full_tensor() if p.is_global else p for p in model.parameters()]
    seen = {"losses": losses, "parameters": [p.tolist() for p in parameters], "read": dataset.read, "len": len(loader)}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
