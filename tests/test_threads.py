"""Several threads of one process: what plain torch lets them do at once. Each case in a process that it may end."""
from __future__ import annotations

import pytest
from harness import PROGRAMS, PYTHON, environment, good

from globaltensor.runtime.native import torch_ext

# as programs/threads.py has them
CASES = ("a view", "a view of a view", "results of one call", "a write elsewhere", "views of one view",
         "one backward each", "micro-batches", "read by another", "models", "specs at new sizes")


@pytest.mark.sample(4)
@pytest.mark.parametrize("native", ["1", "0"] if torch_ext is not None else ["0"])
@pytest.mark.parametrize("case", CASES)
def test_threads(case, native):
    env = environment(GLOBALTENSOR_RANKS="2", GLOBALTENSOR_NATIVE=native)
    assert good([PYTHON, PROGRAMS / "threads.py", case], env).endswith("ok\n")
