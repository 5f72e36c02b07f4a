"""What a command cannot do, said in a line and an exit code."""
from __future__ import annotations

import argparse


class Problem(Exception):
    """Printed as it is, without a traceback. `code` is what the command exits with; 2 is a wrong command line."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


def positive(text: str) -> int:
    """The type of an option that is a whole number from 1 on."""
    if not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
