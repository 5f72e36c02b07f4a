"""A program that ends badly, in the way its first argument names."""
import os
import signal
import sys
import time
from pathlib import Path

import globaltensor as gt
from globaltensor.runtime import deadlock
from globaltensor.runtime.agreement import agree, broadcast_object, gather_objects

how = sys.argv[1]
where = gt.placement.all("cpu")
x = gt.ones(8, 5, placement=where, sbp=gt.sbp.split(0))
odd = gt.rank() == 1


def turns_of(threads):
    """How often each has been given a core."""
    return [(task / "status").read_text().partition("voluntary_ctxt_switches")[2] for task in threads]


if how == "arguments":
    print(*sys.argv[1:], os.environ["OMP_NUM_THREADS"], __name__, __file__)
if how == "raises" and odd:
    raise ValueError("bad luck")
if how in ("all raise", "exits with a word"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)    # one that is late is not ended before it has done so
    x.full_tensor()                                  # now all ignore it
if how == "all raise":
    gt.placement("cpu", [9])
if how == "exits" and odd:
    sys.exit(3)
if how == "exits with a word":
    sys.exit("not today")
if how == "is killed" and odd:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    print(f"rank {gt.rank()} is process {os.getpid()}", flush=True)
    time.sleep(600)
if how == "waits for a dead one":                    # the others wait inside a boxing when rank 1 dies
    if odd:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    x.to_global(sbp=gt.sbp.broadcast)                # the line that must be named
if how == "is patient":                              # exchanges for 9 seconds of rank 0's, whoever makes it wait
    print(f"rank {gt.rank()} is process {os.getpid()}", flush=True)
    began = time.monotonic()
    while x.to_global(sbp=gt.sbp.broadcast).sum().item() * broadcast_object(time.monotonic() - began, 0) < 40 * 9:
        pass
if how == "is asked until its end":                  # the deadlock watch is in the store whenever the program ends
    deadlock.PERIOD = 1e-5
    deadlock.enter("nothing", (1 - gt.rank(),), 7)
    time.sleep(2.5)
    sys.exit()
if how == "asks no thread":                          # of torch's; one such may hold tensors when the interpreter ends
    threads = [task for task in Path("/proc/self/task").iterdir() if "gloo_runloop" in (task / "comm").read_text()]
    before, after = None, []
    while before != after:                           # on a busy machine they may still be at work on the start
        time.sleep(0.1)
        before, after = after, turns_of(threads)
    agree("x"), gather_objects((1,), "x"), broadcast_object(1, 0), x.to_global(sbp=gt.sbp.broadcast)
    time.sleep(0.1)
    assert before and before == turns_of(threads)
if how == "is early" and odd:                        # ends well, but the others need it
    sys.exit()
if how == "faults" and odd:
    os.kill(os.getpid(), signal.SIGSEGV)
if how == "saves":                                   # when it is ended, for 7 seconds
    def save(*_):
        time.sleep(7)
        Path(sys.argv[2], f"saved {gt.rank()}").touch()
        sys.exit(1)

    signal.signal(signal.SIGTERM, save)
    print(f"rank {gt.rank()} is process {os.getpid()}", flush=True)
    time.sleep(600)
if how == "forks":                                   # as multiprocessing does
    if not os.fork():
        try:
            x.sum().item()
        except gt.TransportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
if how == "parts ways":                              # ranks that do different things
    if gt.rank() == 0:
        print(x.sum().item())
    else:
        gt.zeros(3, placement=where, sbp=gt.sbp.broadcast)
if how == "swaps":
    y = gt.zeros(40, placement=where, sbp=gt.sbp.split(0))
    first, second = (x, y) if odd else (y, x)
    first.full_tensor(), second.full_tensor()

print("the value is", x.sum().item())
