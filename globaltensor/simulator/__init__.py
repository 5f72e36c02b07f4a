"""What a schedule would take on any machine: a simulation of its actions, and the memory that a plan needs.

    costs      the time of each action
    engine     when each action begins
    cluster    devices and links, described
    gpt        parameters, operations and activations of a GPT, by formula
    memory     parameters, gradients and optimizer state under ZeRO
    training   a step of a GPT under dp x tp x pp on a cluster
"""
