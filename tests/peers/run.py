"""Peers' own test files on globaltensor: `make test-peers PEERS=FOLDER`, where FOLDER is a clone of OneFlow.

Prints a line per file: how many tests passed, failed and were skipped, with the reasons. Each file runs in a child
process, with the shims of this folder in place of the peer. `python tests/peers/run.py FOLDER [PATTERN]`
"""
from __future__ import annotations

import importlib.util
import os
import re
import sys
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["GLOBALTENSOR_RANKS"] = "4"
# what OneFlow's tests ask of OneFlow alone: its own functions, pairs of tensors, generators of bools and tuples; CUDA
NOT_TORCH = re.compile(r"AttributeError: (module 'torch|'(bool|tuple|torch.Size)' object|'Tensor' .* 'to_local')|"
                       r"KeyError: 'double'|received <class 'numpy.ndarray'>|Torch not compiled with CUDA")
FILES = "python/oneflow/test/modules/test_global_*.py"

from children import outcomes  # noqa: E402  (needs the path)


def run_file(path: str) -> dict[str, Any]:
    """Counts of the tests of a file, and the first lines of what went wrong."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, unittest.SkipTest) as error:
        return {"passed": 0, "failed": {}, "skipped": {f"not loaded: {error}"[:120]: 1}}
    from oneflow.test_utils.automated_test_util import runs

    runs.clear()
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    wrong = Counter(lines[-1][:160] for _, text in result.failures + result.errors if (lines := text.splitlines()))
    skipped = Counter(reason for _, reason in result.skipped)
    skipped.update({reason: n for reason, n in wrong.items() if NOT_TORCH.search(reason)})
    failed = Counter({reason: n for reason, n in wrong.items() if not NOT_TORCH.search(reason)})
    passed = result.testsRun - sum(failed.values()) - sum(skipped.values())
    return {"passed": passed, "failed": failed, "skipped": skipped, **runs}


def main(folder: str, pattern: str = "") -> int:
    if not any(Path(folder).glob(FILES)):
        sys.exit(f"{folder} holds no OneFlow: no {FILES}")
    import oneflow.test_utils.automated_test_util  # noqa: F401  (the shim, loaded once for all children)

    files = sorted(str(path) for path in Path(folder).glob(FILES) if pattern in path.name)
    total: Counter[str] = Counter()
    for path, came in outcomes(files, run_file, timeout=600).items():
        if isinstance(came, str):
            came = {"passed": 0, "failed": {came: 1}, "skipped": {}}
        counts = {kind: sum(n.values()) if isinstance(n, dict) else n for kind, n in came.items()}
        total.update(counts)
        print(Path(path).name, *(f"{n} {kind}" for kind, n in counts.items()), sep="  ")
        for kind in ("failed", "skipped"):
            for reason, n in came[kind].items():
                print(f"    {kind} {n}: {reason}")
    print("all", *(f"{n} {kind}" for kind, n in total.items()), sep="  ")
    return total["failed"] > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
