"""A sample that one rank cannot read is an error on all, and ranks that catch it make tensors alike from then on."""
import torch

import globaltensor as gt

where = gt.placement.all("cpu")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 6:
            raise KeyError(f"sample {i}")
        return torch.full((3,), float(i)), torch.tensor(i)


read = 0
for workers in (0, 1):
    try:
        for _ in gt.data.DataLoader(Samples(), 4, where, gt.sbp.split(0), num_workers=workers):
            read += 1
    except (KeyError, gt.GlobalTensorError):
        read += 10
    assert float(gt.ones(4, placement=where, sbp=gt.sbp.split(0)).sum()) == 4
assert read == 22
