"""Where a tensor lives and how it is laid out: values that know nothing of torch's processes.

    placement     which ranks, arranged in axes
    sbp           how, on one axis: split, broadcast, pending partial sum
    layout        both together, the part of a tensor that each rank holds, and a tensor's spec
"""
