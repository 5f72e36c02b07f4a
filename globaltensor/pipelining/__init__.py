"""Running a pipeline: a model cut into stages on several ranks, a batch cut into micro-batches.

    runner            gt.pipeline: a step of training, an evaluation
    stages, tracing   a model cut into stages: by hand, by cost, by tracing its forward
    stage_placement   stages and their parameters on placements; parameters that stages share
    actions           the actions of a schedule, executed for one step
    stage_comm        transfers between stages, asynchronous
    split_backward    a backward pass in two parts, for inputs and for weights
    dry_run           whether the stages fit together, checked once
"""
