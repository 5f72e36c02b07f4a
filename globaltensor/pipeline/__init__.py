"""Pipelines: a model cut into stages on several ranks, a batch cut into micro-batches, and the order of the work.

    schedule        what a schedule is: lists of actions, data
    text            schedules written and read as text
    generators      those of the literature, by name
    early           backward passes in halves at the end of a step, where the rank before would wait for both
    communication   which values travel between ranks, and when: it follows from the lists
    check           what is wrong with a schedule, before it runs
    timetable       a step to look at: text, picture, trace

and what runs them on ranks:

    runner          gt.pipeline: a step of training, an evaluation
    stages          a model cut into stages
    homes           stages and their parameters on placements; parameters that stages share
    actions         what the actions do, for one step
    crossing        what goes from stage to stage, without a wait for the receiver
    halves          a backward pass in two halves, I and W
    trial           whether the stages fit together, asked once
"""
