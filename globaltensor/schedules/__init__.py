"""Pipeline schedules as data: which rank does what, in which order. Nothing here runs anything.

    schedule        what a schedule is: lists of actions
    text            schedules written and read as text
    generators      the schedules of the literature, by name
    early_send      backward passes split in two at the end of a step, where the rank before would wait for both
    communication   which values travel between ranks, and when: it follows from the lists
    check           what is wrong with a schedule, before it runs
    timetable       a step to look at: text, picture, trace
"""
