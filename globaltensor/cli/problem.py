"""What a command cannot do, said in a line and an exit code."""
from __future__ import annotations


class Problem(Exception):
    """Printed as it is, without a traceback. `code` is what the command exits with; 2 is a wrong command line."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code
