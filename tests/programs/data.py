"""Loads data in each process; every process writes the values, and which samples it read, to FOLDER/<rank>.json."""
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

import globaltensor as gt
from globaltensor.data import DataLoader

S, B = gt.sbp.split, gt.sbp.broadcast


class Samples(Dataset):
    """Sample i, with noise; remembers what was read."""

    def __init__(self, n, width=lambda i: 4):
        self.n, self.width, self.read = n, width, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        width = self.width(i)
        return {"x": torch.full((width,), float(i)), "noise": torch.rand(2), "label": i, "word": f"w{i}"}


CASES = {  # name -> ranks, sbp, and what each process reads of 7 samples, in batches of 3
    "split": ([0, 1], S(0), [[0, 1, 3, 4, 6], [2, 5, 6]]),       # rank 1 has no row of the tail; it learns from one
    "swapped": ([1, 0], S(0), [[2, 5, 6], [0, 1, 3, 4, 6]]),
    "broadcast": ([0, 1], B, [[0, 1, 2, 3, 4, 5, 6]] * 2),
    "sequence": ([0, 1], S(1), [[0, 1, 2, 3, 4, 5, 6]] * 2),
    "one of two": ([1], S(0), [[0, 3, 6], [0, 1, 2, 3, 4, 5, 6]]),
}


def values(loader):
    return [{key: v.full_tensor().tolist() for key, v in batch.items() if key != "word"} for batch in loader]


def mistake(dataset, **options):
    """The class and text of what a loop raises."""
    try:
        list(DataLoader(dataset, 2, gt.placement("cpu", [0, 1]), S(0), **options))
    except (RuntimeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def luck(i):
    if i == 3:
        raise ValueError("bad luck")
    return 4


def main(folder):
    seen, read, errors = {}, {}, {}
    for name, (ranks, sbp, _) in CASES.items():
        dataset = Samples(7)
        loader = DataLoader(dataset, 3, gt.placement("cpu", ranks), sbp, seed=2)
        seen[name] = values(loader)
        read[name] = dataset.read
    where = gt.placement("cpu", [0, 1])
    first = DataLoader(Samples(7), 3, where, S(0), shuffle=True, num_workers=1)
    next(iter(first))
    loader = DataLoader(Samples(7), 2, where, S(0), shuffle=True, num_workers=1)
    loader.load_state_dict(first.state_dict())
    seen["resumed, with workers"] = values(loader)
    seen["unchecked"] = values(DataLoader(Samples(7), 3, where, S(0), check=False))
    gt.manual_seed(4)
    values(DataLoader(Samples(7), 3, where, S(0), seed_samples=False))
    seen["a random op"] = gt.rand(3, placement=where, sbp=B).tolist()      # from a stream of all ranks still
    if gt.world_size() > 1 and len(loader._cutter.local_ranks) == 1:         # several processes, which may disagree
        errors["len"] = mistake(Samples(6 + gt.rank()))
        errors["order"] = mistake(Samples(6), shuffle=True, seed=gt.rank())
        errors["shapes"] = mistake(Samples(6, lambda i: 3 + i))
        errors["a sample that cannot be read"] = mistake(Samples(6, luck))
        errors["a sample that a worker cannot read"] = mistake(Samples(6, luck), num_workers=1)
    expected = {name: case[2] for name, case in CASES.items()}
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps({"values": seen, "read": read, "errors": errors,
                                                             "expected": expected}))


if __name__ == "__main__":
    main(sys.argv[1])
