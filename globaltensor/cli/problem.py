"""What a command cannot do, said in a line and an exit code."""
from __future__ import annotations

import os


class Problem(Exception):
    """Printed as it is, without a traceback. `code` is what the command exits with; 2 is a wrong command line."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


def unwritable(path: object, error: OSError | ValueError) -> Problem:
    """A file or folder that the command was to write."""
    why = getattr(error, "strerror", None) or error
    fix = ("a name in a folder that is there and may be written" if isinstance(error, OSError) else
           "a name that ends in .png, .svg or .pdf")             # what matplotlib knows no format for
    return Problem(f"{path} could not be written: {why}\n  try: {fix}", 1)


def check_new_file(path: object, option: str) -> None:
    """Raise Problem where a folder is named, in place of a file."""
    if not str(path) or os.path.isdir(str(path)):
        raise Problem(f"{option} {path!s}: that names no file\n  try: {option} FILE, a name in a folder that is there")
