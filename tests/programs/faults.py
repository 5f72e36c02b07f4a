"""Something happens to rank 1 while the others wait for it: faults.py PLACE FAULT FOLDER [TIMEOUT].

It is another rank where the variable VICTIM says so. It notes when, in FOLDER; every other rank notes in
`<rank>.json` what it was told, and how long after. Without a fault, "none", it notes that nothing was raised.
"""
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import globaltensor as gt
from globaltensor.checkpoint import loading, saving
from globaltensor.runtime import host_processes, start

place, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rank, victim = int(os.environ["RANK"]), int(os.environ.get("VICTIM", 1))
if "HOSTS" in os.environ:                            # as if each rank were on a host of its own
    host_processes.host_id = lambda: f"host {rank}"
if len(sys.argv) > 4:                                # seconds
    gt.init(timeout=float(sys.argv[4]))


def go_wrong(*_):
    """What happens to the victim; the other ranks go on."""
    if rank != victim:
        return
    (folder / "when.new").write_text(str(time.time()))
    (folder / "when.new").rename(folder / "when")
    match fault:
        case "KILL" | "SEGV" | "STOP":
            os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))
        case "exit 0":
            os._exit(0)
        case "sys.exit":
            sys.exit(0)
        case "exit 3":
            os._exit(3)
        case "raise":
            raise ValueError("bad luck")
        case "MemoryError":
            raise MemoryError
        case "loop":
            while True:                              # the line that must be named
                pass
        case "keeps the lock":                       # a C call of that many seconds, which keeps the interpreter's lock
            ctypes.PyDLL(None).usleep(int(float(os.environ["SECONDS"]) * 1e6))


def before(module, name):
    """It goes wrong just before that function runs."""
    then = getattr(module, name)
    setattr(module, name, lambda *args, **keywords: (go_wrong(), then(*args, **keywords))[1])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        go_wrong()
        return torch.ones(2)


class Layer(nn.Linear):
    armed = False

    def forward(self, x):
        if self.armed:
            go_wrong()
        return super().forward(x)


def act():
    if place == "start":
        waits = folder / "waits"
        if rank != victim:
            waits.touch()
        while rank == victim and not waits.exists() and "TORCHELASTIC_RUN_ID" not in os.environ:
            time.sleep(0.1)
        time.sleep(2 * (rank == victim))
        go_wrong()
    elif place == "connecting":                      # of gloo, after they have met
        before(start, "_start_torch")
    elif place == "sharing":                         # of memory, last
        before(start.torch_ext, "connect_transport")
    where = gt.placement.all("cpu")
    x = gt.ones(8, 5, placement=where, sbp=gt.sbp.split(0))
    state = {"x": x}
    match place:
        case "boxing" | "large boxing":
            x = x if place == "boxing" else gt.ones(1024, 1024, placement=where, sbp=gt.sbp.split(0))
            x.full_tensor()
            go_wrong()
            x.full_tensor()                          # the line where they wait
        case "bystander":                            # rank 2 waits for rank 0, which waits for rank 1
            pairs = [gt.ones(8, placement=gt.placement("cpu", [0, r]), sbp=gt.sbp.split(0)) for r in (1, 2)]
            pairs[0].to_global(sbp=gt.sbp.broadcast)
            go_wrong()
            for pair in pairs:
                pair.to_global(sbp=gt.sbp.broadcast)
        case "pipeline":
            half = gt.world_size() // 2
            stages = [gt.placement("cpu", list(range(half))), gt.placement("cpu", list(range(half, 2 * half)))]
            runner = gt.pipeline(nn.Sequential(Layer(4, 4), nn.Linear(4, 4)), stages, "1f1b", 4,
                                 loss=lambda y, t: (y - t).square().mean())
            for _ in range(20):                      # in the second of many steps
                runner.step(torch.ones(8, 4), torch.zeros(8, 4))
                Layer.armed = True
        case "end":                                  # nobody needs rank 1 any more
            x.full_tensor()
            time.sleep(1)
            go_wrong()
            print("the value is", x.to_local().sum().item())
        case "saving":
            before(saving, "write_hashed")
            gt.save(state, folder / "checkpoint")
        case "loading":
            gt.save(state, folder / "checkpoint")
            before(loading, "read_manifest")
            gt.load(state, folder / "checkpoint")
        case "data":
            for batch in gt.data.DataLoader(Samples(), 4, where, gt.sbp.split(0)):
                batch.full_tensor()


caught = None
try:
    act()
except gt.GlobalTensorError as error:
    caught = error
if rank != victim:
    when = folder / "when"
    after = time.time() - float(when.read_text()) if when.exists() else None
    (folder / f"{rank}.json").write_text(json.dumps({"told": str(caught or "nothing"), "after": after}))
    if "TORCHELASTIC_RUN_ID" in os.environ and caught is not None:
        raise caught                                 # the launcher is to say whose fault it was
    if rank:
        os._exit(0)                                  # rank 0 has the store, and ends as programs do
