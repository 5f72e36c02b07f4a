"""What does `import globaltensor` cost on top of `import torch`? Target: at most 0.15 s.

Fresh processes, in turns; medians.
"""
from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.timing import show

CODE = """
import time
began = time.perf_counter()
import torch
middle = time.perf_counter()
import globaltensor
print(middle - began, time.perf_counter() - middle)
"""


def main(json: bool = False, quick: bool = False) -> None:
    laps = [list(map(float, subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
                                           timeout=120).stdout.split())) for _ in range(1 if quick else 7)]
    show("startup: seconds to import", [{"import": "torch", "seconds": statistics.median(a for a, _ in laps)},
                                        {"import": "globaltensor, after torch",
                                         "seconds": statistics.median(b for _, b in laps)}], json)


if __name__ == "__main__":
    main()
