"""The command `globaltensor`: run a program on several ranks, check an installation, plan and simulate.

    globaltensor new my_project                    a small project to start from
    globaltensor run -n 4 train.py --steps 100     run a program on 4 ranks of this host
    globaltensor doctor                            check the installation, and say what to type
    globaltensor plan --model gpt ...              find the fastest parallel plan for a cluster
    globaltensor report run.json                   make a page of a recorded run, for a browser
    globaltensor play                              try out layouts and boxings in a browser
    globaltensor run --help                        explain a command and its options
"""
from globaltensor_command import main as main
