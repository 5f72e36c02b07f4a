"""Says into FOLDER/<rank>.json how its process began: beginning.py FOLDER [ARGUMENT ...]"""
import json
import os
import random
import sys
from pathlib import Path

import numpy
import torch

alike = {
    "main": [__name__, Path(sys.modules["__main__"].__file__).name, Path(sys.argv[0]).name, sys.argv[2:]],
    "first folder": sys.path[0],
    "leads its session and group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "threads": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]],
    "rank": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
    "variables": sorted(os.environ),
    "open files": len(os.listdir("/proc/self/fd")),
}
own = {"parent": os.getppid(), "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()]}
shown = dict(line.split("=", 1) for line in Path("/proc/self/environ").read_text().split("\0") if "=" in line)
own["shown"] = {name: shown.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
assert own["shown"] == {name: os.environ.get(name) for name in own["shown"]}
Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps({"alike": alike, "own": own}))
print("said", flush=True)
