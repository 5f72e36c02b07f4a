"""Loading data: torch's DataLoader, where each process reads only its own rows of a global batch.

    loader = gt.data.DataLoader(dataset, 64, P, {"dp": gt.sbp.split(0)}, shuffle=True)
    for x, y in loader:                              # global tensors of the whole batch
        loss = model(x, y)

    for x, y in gt.data.from_ranks(own_loader, P):   # each rank's own batch, as for DDP, is a part of the global one
        ...

Which samples of a `DataLoader` form a batch, and the random numbers drawn while they are read, depend on seed, epoch
and index alone.
"""
from __future__ import annotations

from globaltensor.data.loader import DataLoader
from globaltensor.data.rank_batches import from_ranks
from globaltensor.data.sampler import Sampler

__all__ = ["DataLoader", "Sampler", "from_ranks"]
