"""Pipelines: a model cut into stages on several ranks, a batch cut into micro-batches, and the order of the work.

    schedule        what a schedule is: lists of actions, data
    text            schedules written and read as text
    generators      those of the literature, by name
    communication   which values travel between ranks, and when: it follows from the lists
    check           what is wrong with a schedule, before it runs
    timetable       a step to look at: text, picture, trace
"""
