"""Print a script that starts a program on SLURM, Kubernetes or Ray.

    globaltensor recipe slurm --nodes 4 --gpus 8 train.py --steps 100 > train.sbatch && sbatch train.sbatch
    globaltensor recipe k8s --nodes 4 --gpus 8 --image my/image train.py > train.yaml && kubectl apply -f train.yaml
    globaltensor recipe ray --nodes 4 --gpus 8 train.py > on_ray.py && ray job submit -- python on_ray.py

The script starts one process per GPU or, without --gpus, one per host. docs/clusters.md explains each script.
"""
from __future__ import annotations

import argparse
import json
import re
import secrets
import shlex
from pathlib import PurePath

from globaltensor.cli.problem import Problem

# The step's own environment says who is which rank (runtime/launchers.py). All of them must share one secret, and
# batch scripts run on one node only: so it is drawn here, where srun takes it from.
_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}
{gpus}#SBATCH --distribution=block
#SBATCH --signal=TERM@120
set -euo pipefail
umask 077
export GLOBALTENSOR_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
srun --kill-on-bad-exit=1 python {program}
"""

# An indexed Job gives each pod its number, and a headless Service gives it a name, by which the others find pod 0.
_KUBERNETES = """\
apiVersion: v1
kind: Service
metadata:
  name: "{name}"
spec:
  clusterIP: None
  selector:
    job-name: "{name}"
---
apiVersion: v1
kind: Secret
metadata:
  name: "{name}"
stringData:
  secret: "{secret}"                                 # drawn for this file: who reads it may join the job
---
apiVersion: batch/v1
kind: Job
metadata:
  name: "{name}"
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: "{name}"
      restartPolicy: Never
      containers:
      - name: ranks
        image: {image}
        command: {command}
        env:
        - name: GLOBALTENSOR_SECRET
          valueFrom:
            secretKeyRef:
              name: "{name}"
              key: secret
{gpus}        volumeMounts:
        - name: shared-memory
          mountPath: /dev/shm
      volumes:
      - name: shared-memory
        emptyDir:
          medium: Memory
"""

# Ray places one actor for each rank; a group that is packed node by node keeps the ranks of a host together.
_RAY = '''\
"""Starts a program on a Ray cluster, one actor for each rank."""
import os
import runpy
import secrets
import socket
import sys

import ray

NODES, RANKS_PER_NODE, GPUS = {nodes}, {ranks}, {gpus}
PROGRAM = {program}


@ray.remote(num_cpus=1, num_gpus=GPUS)
class Rank:
    def place(self):
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), str(s.getsockname()[1]), list(map(str, ray.get_gpu_ids()))

    def run(self, environment):
        os.environ.update(environment)
        sys.argv = PROGRAM
        sys.path.insert(0, os.path.dirname(os.path.abspath(PROGRAM[0])))
        runpy.run_path(PROGRAM[0], run_name="__main__")


ray.init()
bundles = [{{"CPU": RANKS_PER_NODE, **({{"GPU": RANKS_PER_NODE}} if GPUS else {{}})}}] * NODES
group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if NODES > 1 else "PACK")
ray.get(group.ready())
actors = [Rank.options(placement_group=group, placement_group_bundle_index=rank // RANKS_PER_NODE).remote()
          for rank in range(NODES * RANKS_PER_NODE)]
places = ray.get([actor.place.remote() for actor in actors])
shared = {{"WORLD_SIZE": str(len(actors)), "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE), "MASTER_ADDR": places[0][0],
          "MASTER_PORT": places[0][1], "GLOBALTENSOR_SECRET": secrets.token_hex(32)}}


def environment(rank):
    own = {{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_NODE)}}
    first = rank - rank % RANKS_PER_NODE
    gpus = [gpu for _, _, ids in places[first:first + RANKS_PER_NODE] for gpu in ids]    # each sees all of its node
    return {{**own, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}} if GPUS else own


ray.get([actor.run.remote(environment(rank)) for rank, actor in enumerate(actors)])
'''



def command(chosen: argparse.Namespace) -> int:
    """Print the script."""
    if not chosen.program.endswith(".py"):
        raise Problem(f"{chosen.program!r} is not a Python file\n  try: globaltensor recipe {chosen.cluster} train.py")
    if chosen.image is not None and chosen.cluster != "k8s":
        raise Problem(f"--image does nothing for {chosen.cluster}: its hosts run what they have\n  try: the same "
                      "without --image")
    print(_WRITE[chosen.cluster](chosen), end="")
    return 0


def _job_name(chosen: argparse.Namespace) -> str:
    """The program's, as names of services may be written: they begin with a letter."""
    name = re.sub("[^a-z0-9]+", "-", PurePath(chosen.program).stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:40].strip("-")


def _batch_script(chosen: argparse.Namespace) -> str:
    return _SLURM.format(name=_job_name(chosen), nodes=chosen.nodes, ranks=chosen.gpus or 1,
                         gpus=f"#SBATCH --gpus-per-node={chosen.gpus}\n" if chosen.gpus else "",
                         program=shlex.join([chosen.program, *chosen.args]))


def _kubernetes_job(chosen: argparse.Namespace) -> str:
    name = _job_name(chosen)
    run = shlex.join(["globaltensor", "run", "-n", str(chosen.gpus or 1), "--nnodes", str(chosen.nodes)])
    run += f' --node-rank "$JOB_COMPLETION_INDEX" --rdzv-endpoint {name}-0.{name}:29400 '
    program = shlex.join([chosen.program, *chosen.args]).replace("$", "$$")      # Kubernetes makes one of two
    words = ["/bin/sh", "-c", f"exec {run}{program}"]
    limits = f"        resources:\n          limits:\n            nvidia.com/gpu: {chosen.gpus}\n"
    return _KUBERNETES.format(name=name, nodes=chosen.nodes, image=json.dumps(chosen.image or "python:3.12"),
                              command=json.dumps(words), secret=secrets.token_hex(32),
                              gpus=limits if chosen.gpus else "")


def _actors(chosen: argparse.Namespace) -> str:
    return _RAY.format(nodes=chosen.nodes, ranks=chosen.gpus or 1, gpus=int(chosen.gpus is not None),
                       program=json.dumps([chosen.program, *chosen.args]))


_WRITE = {"slurm": _batch_script, "k8s": _kubernetes_job, "ray": _actors}
