"""Running a pipeline: a model cut into stages on several ranks, a batch cut into micro-batches.

    runner            gt.pipeline: a step of training, an evaluation
    stages, tracing   a model cut into stages: by hand, by cost, by following its forward
    stage_placement   stages and their parameters on placements; parameters that stages share
    actions           what the actions of a schedule do, for one step
    stage_comm        what goes from stage to stage, asynchronously
    split_backward    a backward pass in two halves, for inputs and for weights
    dry_run           whether the stages fit together, asked once
"""
