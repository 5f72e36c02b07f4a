"""Planning: the fastest parallel plan that fits in memory, found before anything runs, and the graph of a model's step.

Nothing here runs on a device: a model may be on the meta device, and a cluster is a description. A whole plan is data:

    strategy                  a plan as one JSON object, to be read, edited, checked and run
    search                    the plan of a GPT, by its sizes, that takes least, and a bound on any other
    capture, within_stage     the graph of a step; the layouts of a stage under which it costs least
"""
