"""What has no memory where torch or we look for it never ends the interpreter: it works, or is refused.

Each case runs in a child process (programs/no_memory.py), with the native code and without.
"""
from __future__ import annotations

import io
import json

import pytest
import torch
from harness import PROGRAMS, PYTHON, environment, good

import globaltensor as gt
from globaltensor.runtime.native import torch_ext


@pytest.mark.parametrize("native", ["1", "0"])
def test_no_case_ends_the_interpreter(native):
    said = json.loads(good([PYTHON, PROGRAMS / "no_memory.py"], environment(GLOBALTENSOR_NATIVE=native)))
    assert len(said) > 400
    wrong = [f"{case}: {what}" for case, what in said.items() if what]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(torch_ext is None, reason="without native code torch reads a null pointer")
@pytest.mark.parametrize("made", [torch.jit.script, lambda m: torch.jit.trace(m, m.weight)], ids=["script", "trace"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_torchscript_does_not_save_memory_that_is_not_there(made, in_memory, tmp_path):
    module = gt.parallelize(torch.nn.Linear(4, 4), gt.placement("cpu", [0, 1]))
    with pytest.raises(RuntimeError, match="it has no memory of its own"):
        torch.jit.save(made(module), io.BytesIO() if in_memory else str(tmp_path / "module.pt"))
