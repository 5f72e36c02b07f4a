"""Ops whose local kernel would not do: distributed algorithms, written over boxing and other global ops.

    decompositions    an op as other global ops: means, losses, softmax, norms of what is split
    layer_norm, batch_norm, group_norm   statistics are summed, nothing else is sent
    ring_attention    attention over a split sequence, one block of keys at a time
    summa             products of matrices on a grid of ranks
    halo, pooling     images whose rows are split: only the rows at the seams cross ranks
    grouped_mm        experts on ranks of their own
    scans             results that depend on the order of the parts: cumsum, argmax, topk
    histograms        counts of the parts
    random_ops        the same numbers in every layout
    fused_attention, attention_kernels   attention on GPUs, by the op that CPUs have
    offer, reduction_offers, halo_offers  what an algorithm would take, to compete with the op's signatures
    local_impls       local kernels that stand in for the op itself on a rank
"""
