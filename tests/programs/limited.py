"""A tensor on ranks that may map so many bytes more than they have when the package is imported."""
import resource
import sys
from pathlib import Path

import globaltensor as gt
from globaltensor.runtime.world import world

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
x = gt.ones(600_000, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
assert x.sum().item() == 600_000 and x.full_tensor().numel() == 600_000
print("over", world().transport)
