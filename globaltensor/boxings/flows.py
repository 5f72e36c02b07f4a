"""Who sends how much to whom in a boxing: bytes from rank to rank, over all steps of its plan.

    flows_of(plan of S(0) -> B on [0, 1], (8,), 4)      {(0, 1): 16, (1, 0): 16}

They follow from the pieces of each step, so nothing is measured and nothing is communicated.
"""
from __future__ import annotations

from itertools import pairwise

from globaltensor.boxings.plan import BoxingPlan
from globaltensor.boxings.route import route
from globaltensor.layouts.layout import Shape
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import volume

Flows = dict[tuple[int, int], int]                   # (from, to) -> bytes


@remembered
def flows_of(of: BoxingPlan, shape: Shape, itemsize: int) -> Flows:
    """Bytes from rank to rank, in all steps of a plan for a tensor of this shape. Not to be changed: it is kept."""
    flows: Flows = {}
    for path in of.levels or (of.layouts,):
        for src, dst in pairwise(path):
            step = route(src, dst, of.view or shape)
            for rank in dst.placement.flat:
                for region, sources in step.pieces(rank):
                    for source in sources:
                        if source != rank:
                            flows[source, rank] = flows.get((source, rank), 0) + volume(region) * itemsize
    return flows
