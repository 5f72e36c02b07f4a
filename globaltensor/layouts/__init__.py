"""Where a tensor lives and how it is laid out: values that know nothing of torch's processes.

    placement     which ranks, arranged in axes
    sbp           how, on one axis: split, broadcast, pending partial sum
    regions       ranges of indices, one per dim: their intersections, differences and sizes
    layout        placement and sbp together, the region of a tensor that each rank holds, and a tensor's spec
    recent        caches, which are bounded, and `gt.config` that says by how much
    rank_regions  layouts with a region of its own for every rank
"""
