"""Slices, pads and the like of `test_shifts.py` on all ranks, against plain torch."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_shifts import OTHERS, PROGRAMS, S, rand, run

import globaltensor as gt

where = gt.placement.all("cpu")
for f in (*(f for f, _ in PROGRAMS.values()), *OTHERS.values()):
    for sbp in (S(0), S(1)):
        for rows in (37, 400):
            run(f, rand(rows, 6), where, sbp)
