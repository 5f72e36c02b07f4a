"""Planning: the graph of a model's step, what it costs, and the layouts under which it costs least.

Nothing here runs on a device: a model may be on the meta device, and a cluster is a description.
"""
