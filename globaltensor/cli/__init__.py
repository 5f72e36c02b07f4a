"""The command `globaltensor`: run a program on several ranks, show the environment, run benchmarks, plan ahead.

    globaltensor run -n 4 train.py --steps 100     the program on 4 ranks of this host
    globaltensor ps                                the jobs that run on this host, and their ranks
    globaltensor stacks                            where in its program each rank is
    globaltensor info                              versions, devices, transports, the world
    globaltensor doctor                            what an installation lacks, and what to type
    globaltensor bench dispatch                    one of the benchmarks
    globaltensor simulate --schedule zb-h1 ...     a pipeline schedule, on any cluster, without running it
    globaltensor report run.json                   a page of a recorded run, for a browser
    globaltensor play                              layouts and boxings to try out, in a browser
    globaltensor memory --params 7.5e9 --zero 2    the memory of a rank
    globaltensor plan --evaluate rows.csv          what parallel plans take, by the rows of a table
    globaltensor calibrate rows.csv                the description of a cluster, fitted to measured steps
    globaltensor recipe slurm --nodes 4 ...        a script that starts a program on a cluster
"""
from globaltensor_command import main as main
