"""Ways to spread a model: tables of layouts for its parameters and activations, and what keeps memory down.

    plan        parallelism as a table along the named axes of a placement
    grids       the rows of a plan for grids of two and three dims
    experts     whole experts on different ranks
    zero, zero3 optimizer state, gradients and parameters split along data parallelism
    partitioned what recomputation keeps, split
    modules     the parameters of a module made global, or plain again
"""
