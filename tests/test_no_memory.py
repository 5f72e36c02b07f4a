"""What has no memory where torch or we look for it never ends the interpreter: it works, or is refused.

Each case runs in a child process (programs/no_memory.py), with the native code and without.
"""
from __future__ import annotations

import json

import pytest
from harness import PROGRAMS, PYTHON, environment, good


@pytest.mark.parametrize("native", ["1", "0"])
def test_no_case_ends_the_interpreter(native):
    said = json.loads(good([PYTHON, PROGRAMS / "no_memory.py"], environment(GLOBALTENSOR_NATIVE=native)))
    assert len(said) > 400
    wrong = [f"{case}: {what}" for case, what in said.items() if what]
    assert not wrong, "\n".join(wrong)
