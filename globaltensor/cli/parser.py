"""The parser of the command line: help that fits the terminal, and the word that was meant for one that is misspelt.

Only the standard library is imported, and of the commands only docstrings are read, so help comes at once.
"""
from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from globaltensor.cli.options import OPTIONS

_WIDEST = 112                                        # columns; longer lines are hard to read


def parser(chosen: str | None = None) -> Parser:
    """The parser of all commands, with the options of the chosen one, or of all where none is."""
    top = Parser(prog="globaltensor", formatter_class=Help, description=docstring("__init__"))
    top.add_argument("--version", action="version", version=f"globaltensor {version()}",
                     help="show the version and exit")
    commands = top.add_subparsers(metavar="command", dest="command", required=True, title="commands")
    for name, options in OPTIONS.items():
        doc = docstring(name)
        one = commands.add_parser(name, help=doc.splitlines()[0].rstrip("."), description=doc, formatter_class=Help)
        if chosen in (name, None):
            options(one)
    return top


def docstring(name: str) -> str:
    """That of a file of this folder, which is read for it, not imported."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text), clean=False) or name


def version() -> str:
    """globaltensor.__version__, without torch."""
    text = Path(__file__).parents[1].joinpath("__init__.py").read_text(encoding="utf-8")
    return re.findall(r'(?m)^__version__ = "(.+)"', text)[0]


class Parser(argparse.ArgumentParser):
    """A parser that suggests what was meant."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._negative_number_matcher = re.compile(r"-\.?\d")         # also of several: --times -1,1,1,0

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._typed = list(args or ())
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._misspelt(unknown) or
                       f"there is no argument {' '.join(unknown)}\n  try: {self.prog} --help")
        return chosen, unknown

    def _misspelt(self, unknown: list[str]) -> str:
        """The first of what was typed and is not known that is like a flag; else ""."""
        flags = [flag for action in self._actions for flag in action.option_strings
                 if flag.startswith("--") and action.help != argparse.SUPPRESS]
        near = (f"{one}: did you mean {meant[0]}?" for one in unknown if one.startswith("-") and
                (meant := _meant(one.partition("=")[0], flags)))
        return next(near, "")

    def error(self, message: str) -> NoReturn:
        """What is wrong with the command line, and what to type. Ends the process."""
        if "arguments are required: " in message:    # which is what comes of a flag that takes their place
            known = [flag for action in self._actions for flag in action.option_strings]
            unknown = [one for one in self._typed if one.partition("=")[0] not in known]
            message = self._misspelt(unknown) or message
        message = re.sub(r"(required: .*), argument$", r"\1", message)      # a program may have none of its own
        hinted = any(hint in message for hint in ("try: ", "did you mean", "choose from"))
        super().error(message if hinted else f"{message}\n  try: {self.prog} --help")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # as of a shell variable that is not set; a program has its own arguments
        if not text and action.nargs not in (argparse.REMAINDER, argparse.PARSER):
            wanted = action.metavar if action.option_strings else None
            raise argparse.ArgumentError(action, "it is empty" + (
                f"\n  try: {action.option_strings[0]} {wanted}" if wanted else ""))
        return super()._get_value(action, text)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            return super()._print_message(message, file)
        file.write(message)                          # argparse keeps silent about help that could not be written

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        near = difflib.get_close_matches(str(value), choices, 1)
        raise argparse.ArgumentError(action, f"there is no {str(value)!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(choices)}"))


def _meant(typed: str, known: list[str]) -> list[str]:
    """The flags that may have been meant, the likeliest first: one of which a part was typed, or one that is close."""
    begun = [flag for flag in known if typed != "--" and flag.startswith(typed)]
    return begun or difflib.get_close_matches(typed, known, 1)


class Help(argparse.HelpFormatter):
    """Help as wide as the terminal. Of a description, lines that are indented are examples or rows of a table: on a
    narrow terminal, what stands behind a gap goes below what stands before it."""

    def __init__(self, prog: str, **how: Any) -> None:
        width = how.pop("width", None) or max(20, min(shutil.get_terminal_size().columns, _WIDEST) - 2)
        super().__init__(prog, max_help_position=min(26, width // 3), width=width, **how)

    def add_usage(self, usage: Any, *others: Any, **how: Any) -> None:
        if usage and usage is not argparse.SUPPRESS and len(usage) + len("usage: ") > self._width:
            option = r"\[-[^][ ]+ [^][ ]+\]"        # with its value, which stays on its line
            together = re.sub(option, lambda match: match[0].replace(" ", "\xa0"), usage)
            usage = "\n".join(textwrap.wrap(together, self._width - len("usage: "), subsequent_indent="    ",
                                            break_on_hyphens=False)).replace("\xa0", " ")
        super().add_usage(usage, *others, **how)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 2             # its commands are indented, which the base class forgets

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.strip("\n").splitlines()
        if max(map(len, lines)) > width:             # then continued lines are cut elsewhere
            lines = re.sub(r" *\\\n\s*", " ", "\n".join(lines)).splitlines()
        filled = []
        for is_prose, several in itertools.groupby(lines, lambda line: bool(line[:1].strip())):
            block = list(several)
            filled += textwrap.wrap(" ".join(block), width) if is_prose else [
                part for line in block for part in _refilled(line, width)]
        return "\n".join(filled)


def _refilled(line: str, width: int) -> list[str]:
    """An example, or a row of a table, in as many lines as it takes."""
    if len(line) <= width:
        return [line]
    lead = " " * min(len(line) - len(line.lstrip()), 2 if width < 60 else 4)
    before, *behind = re.split(r"\s{2,}", line.strip(), maxsplit=1)
    together = re.sub(r"(?<=\s)(--?[\w-]+) (?=[^-\s])", "\\1\xa0", before)       # an option and its value
    typed = textwrap.wrap(together, width - 2, initial_indent=lead, subsequent_indent=f"{lead}    ",
                          break_on_hyphens=False, break_long_words=False)
    under = f"{lead}    " + "    " * (len(typed) > 1)
    meaning = textwrap.wrap(behind[0], width, initial_indent=under, subsequent_indent=under) if behind else []
    typed = [part.replace("\xa0", " ") for part in typed]
    return [*(f"{part} \\" for part in typed[:-1]), typed[-1], *meaning]
