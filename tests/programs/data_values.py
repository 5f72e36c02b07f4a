"""Ranks that share rows of a batch must read the same of them: each case says at which batch all raise, if any."""
import os
import random

import torch

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
GRID = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
ALL, TURNED = gt.placement.all("cpu"), gt.placement("cpu", [[3, 1], [0, 2]])


class Samples(torch.utils.data.Dataset):
    """Sample i: four columns and a label, the same in every process but from sample `wrong` on, there in those of
    `ranks`; or drawn as `draw` says."""

    def __init__(self, wrong=99, ranks=(1,), column=True, draw=None):
        self.wrong, self.off, self.column, self.draw = wrong, gt.rank() in ranks, column, draw
        self.own = random.Random(gt.rank())

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if self.draw is not None:
            return torch.full((4,), self.draw(self)), i
        off = i >= self.wrong and self.off
        return torch.arange(4.0) + i + (off and self.column), i + (off and not self.column)


def reseeded(samples):
    """What the error says to type."""
    return random.Random(random.getrandbits(32)).random()


CASES = [   # what samples; where; sbp; the batch, of 5, in which all raise (None: in none); options of the loader
    (Samples(0), GRID, {"dp": S(0)}, 1, {}),
    (Samples(0, ranks=(2,)), GRID, {"dp": S(0)}, 1, {}),            # ranks 0 and 1 agree, and raise too
    (Samples(0, column=False), GRID, {"dp": S(0)}, 1, {}),
    (Samples(0, ranks=(2,)), TURNED, (S(0), B), 1, {}),
    (Samples(0, ranks=(0, 2)), TURNED, (S(0), B), None, {}),        # who shares rows, agrees
    (Samples(0), ALL, S(0), None, {}),                              # each row is read once
    (Samples(0), ALL, S(1), 1, {}),                                 # columns of one sample, of different ones
    (Samples(0, column=False), ALL, S(1), 1, {}),                   # labels, which have no such dim
    (Samples(0), GRID, (S(0), S(0)), None, {}), (Samples(0), GRID, (S(0), S(1)), 1, {}),
    (Samples(0), gt.placement("cpu", [1, 2]), B, 1, {}), (Samples(0), gt.placement("cpu", [1]), B, None, {}),
    (Samples(10), ALL, B, 4, {}), (Samples(10), ALL, B, 3, {"always": "1"}), (Samples(5), ALL, B, 2, {}),
    (Samples(0), ALL, B, None, {"check": False}), (Samples(10), ALL, B, 3, {"check": False, "always": "1"}),
    (Samples(0), ALL, B, 1, {"num_workers": 1}),
    (Samples(draw=lambda samples: samples.own.random()), ALL, B, 1, {}),
    (Samples(draw=lambda samples: random.random()), ALL, B, None, {}), (Samples(draw=reseeded), ALL, B, None, {}),
    (Samples(draw=lambda samples: samples.own.random()), ALL, B, 1, {"seed_samples": False}),
    (Samples(draw=lambda samples: random.random()), ALL, B, None, {"seed_samples": False}),
]

for number, (samples, where, sbp, want, options) in enumerate(CASES):
    os.environ["GLOBALTENSOR_CHECK"] = options.pop("always", "0")
    raised, batches = None, 0
    try:
        for _ in gt.data.DataLoader(samples, 5, where, sbp, **options):
            batches += 1
    except gt.DisagreementError as error:
        raised, text = batches + 1, str(error)
        cause = "seed_samples=True" if "seed_samples" in options else "random.Random(random.getrandbits(32))"
        assert cause in error.fix and "each process reads them for itself" in error.why, text
        assert f"samples {5 * batches} to {5 * batches + 5} of epoch 0" in text and text.count("\n    rank ") >= 2, text
    assert raised == want, (number, raised, want)
