"""Who takes part and how bytes move: processes, devices, native code. Nothing here knows what an sbp is.

    world           all ranks, those that this process drives, their devices
    start           how the world starts: alone, or with the other processes of a launcher
    launchers       the environments of SLURM, Open MPI and Hydra
    exchange        flat buffers between processes: one primitive in which all sides meet
    agreement       small values that all processes must have, or must have alike
    lineage         a hash of all that made a tensor's value, by which ranks notice that theirs differ
    p2p             messages that one process leaves for another
    deadlock        deadlocks between ranks, found within seconds
    machine         what moving and computing cost
    dtypes          the dtype that sums are accumulated in
    memory          which plain tensors have memory to read
    native          the native code, loaded here and nowhere else
    custom_ops      ops of our own, registered with torch
    philox          random numbers that depend on a key and a global index
    process_group   torch.distributed over shared memory
"""
