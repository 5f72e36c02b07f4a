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


@pytest.mark.parametrize("how", [{}, {"profile_memory": True, "with_stack": True}], ids=["", "memory and stacks"])
def test_the_profiler_sees_the_shapes_of_operands(how, capfd):
    """It asks for their addresses, too. What it says of what raises there, and loses, is on stderr."""
    x, w = (gt.ones(6, 6, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.split(0), requires_grad=True)
            for _ in range(2))
    capfd.readouterr()
    with torch.profiler.profile(record_shapes=True, **how) as profile:
        (x @ w).view(36).sum().backward()
    shapes = [(event.name, event.input_shapes) for event in profile.events()]
    wanted = [("aten::matmul", [[6, 6], [6, 6]]), ("aten::mm", [[6, 6], [6, 6]]), ("aten::sum", [[36], []])]
    assert all(row in shapes for row in wanted), shapes
    assert not any(text in capfd.readouterr().err for text in ("Exception in", "inaccurate"))
    if torch_ext is not None:
        with pytest.raises(RuntimeError, match="it has no memory of its own"):
            torch.jit.save(torch.jit.trace(torch.nn.Linear(4, 4).to_global(x.placement, gt.sbp.broadcast), x[:4, :4]),
                           io.BytesIO())
