"""A tensor on ranks that may map so many bytes more, or open so many files, than when the package is imported."""
import resource
import sys
from pathlib import Path

import globaltensor as gt
from globaltensor.runtime.world import world

_, kind, spare = sys.argv
if kind == "bytes":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(spare),) * 2)
else:                                                # files that the process may allow itself, or that are all
    hard = int(spare) if kind == "all files" else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(spare), hard))
x = gt.ones(600_000, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
assert x.sum().item() == 600_000 and x.full_tensor().numel() == 600_000
print("over", world().transport)
