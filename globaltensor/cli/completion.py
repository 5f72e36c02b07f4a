"""Print a script that lets a shell complete commands, options and their values.

    eval "$(globaltensor completion bash)"                                            in ~/.bashrc
    eval "$(globaltensor completion zsh)"                                             in ~/.zshrc, after compinit
    globaltensor completion fish > ~/.config/fish/completions/globaltensor.fish       once
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from globaltensor.cli.parser import parser


class Word(NamedTuple):
    """One of the options of a command, by each of its names; or a value of its positional arguments."""

    text: str
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()


def command(chosen: argparse.Namespace) -> int:
    """Print the script."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[chosen.shell](words_by_command()), end="")
    return 0


def words_by_command() -> dict[str, tuple[str, list[Word]]]:
    """name -> what the command does, and what can be typed after it. "" stands for what comes before a command."""
    top = parser()
    commands = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    words = {"": ("", list(_words_of(top)))}
    for listed in commands._choices_actions:
        words[listed.dest] = (listed.help or "", list(_words_of(commands.choices[listed.dest])))
    return words


def _words_of(of: argparse.ArgumentParser) -> Iterator[Word]:
    for action in of._actions:
        values = tuple(map(str, action.choices or ()))
        if action.option_strings and action.help != argparse.SUPPRESS:
            for name in action.option_strings:
                yield Word(name, action.help or "", action.nargs != 0, values)
        elif not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield from (Word(value, action.dest) for value in values)


_BASH = """\
_globaltensor() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$command $before" in
{values}
        *) case "$command" in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _globaltensor globaltensor
"""


def _bash(commands: dict[str, tuple[str, list[Word]]]) -> str:
    values = [f"        '{name} {word.text}') words=\"{' '.join(word.values)}\" ;;"
              for name, (_, words) in commands.items() if name for word in words if word.takes_value]
    options = [f"            {name}) words=\"{' '.join(word.text for word in words)}\" ;;"
               for name, (_, words) in commands.items() if name]
    first = " ".join([*filter(None, commands), *(word.text for word in commands[""][1])])
    return _BASH.format(commands=first, values="\n".join(values), options="\n".join(options))


_ZSH = """\
_globaltensor() {{
    local -a commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words; (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
compdef _globaltensor globaltensor
"""


def _zsh(commands: dict[str, tuple[str, list[Word]]]) -> str:
    def quoted(text: str) -> str:
        return "".join(f"\\{letter}" if letter in "[]:" else letter for letter in text.replace("'", "'\\''"))

    listed = [f"        '{name}:{quoted(meaning)}'" for name, (meaning, _) in commands.items() if name]
    cases = []
    for name, (_, words) in commands.items():
        if name:
            options = [f"'{one.text}[{quoted(one.help)}]" + (f":value:({' '.join(one.values)})'" if one.values else
                       ":value:_files'" if one.takes_value else "'") for one in words if one.text.startswith("-")]
            plain = [one.text for one in words if not one.text.startswith("-")]
            rest = f"'1:{name}:({' '.join(plain)})' '*:file:_files'" if plain else "'*:file:_files'"
            cases.append(f"    {name}) _arguments {' '.join([*options, rest])} ;;")
    return _ZSH.format(commands="\n".join(listed), cases="\n".join(cases))


def _fish(commands: dict[str, tuple[str, list[Word]]]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = []
    for name, (meaning, words) in commands.items():
        when = f"-n '__fish_seen_subcommand_from {name}'" if name else "-n __fish_use_subcommand"
        if name:
            lines.append(f"complete -c globaltensor -f -n __fish_use_subcommand -a {name} -d {quoted(meaning)}")
        for word in words:
            dashes = len(word.text) - len(word.text.lstrip("-"))
            what = {0: f"-a {word.text}", 1: f"-s {word.text[1:]}", 2: f"-l {word.text[2:]}"}[dashes]
            value = f" -x -a {quoted(' '.join(word.values))}" if word.values else " -r" if word.takes_value else ""
            lines.append(f"complete -c globaltensor {when} {what}{value} -d {quoted(word.help)}")
    return "\n".join(lines) + "\n"
