"""`hadal completion SHELL`: a script by which a shell completes this command's words.

It is made of the parsers themselves, so it knows every flag, and is static: a shell that uses it
starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hadal.cli.parser import add_command

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Option:
    """One flag, by one of its names."""

    name: str
    help: str
    takes_value: bool
    known: tuple[str, ...]
    """The values that it accepts; empty: files, or any text."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command or subcommand."""

    path: str
    """Its words: `hadal bench io`."""
    options: tuple[Option, ...]
    below: Mapping[str, str]
    """Its subcommands (or the words that it takes), and the help of each."""
    starts_program: bool
    """True if the first word that is not a flag is a program, followed by its own arguments."""


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "completion",
        help="Print a completion script for bash, zsh or fish",
        description="Print a script with which a shell completes commands and flags. Completing"
        " starts no Python.",
        examples=(
            'eval "$(hadal completion bash)"  # in ~/.bashrc',
            'eval "$(hadal completion zsh)"  # in ~/.zshrc, after compinit',
            "hadal completion fish > ~/.config/fish/completions/hadal.fish",
        ),
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the script."""
    commands = list(commands_of(parsed.whole, "hadal"))
    sys.stdout.write({"bash": _bash, "zsh": _zsh, "fish": _fish}[parsed.shell](commands))
    return 0


def commands_of(parser: argparse.ArgumentParser, path: str) -> Iterator[Command]:
    """Return a command and all below it, as its parser knows them."""
    below: dict[str, str] = {}
    options: list[Option] = []
    parsers: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = {each.dest: each.help or "" for each in action._choices_actions}
            parsers = dict(action.choices)
        elif not action.option_strings and action.choices:
            below |= dict.fromkeys(map(str, action.choices), "")
        for name in action.option_strings:
            known = tuple(map(str, action.choices or ()))
            options.append(Option(name, _line(action, parser), action.nargs != 0, known))
    yield Command(path, tuple(options), below, path in ("hadal run", "hadal ssh"))
    for name, own in parsers.items():
        yield from commands_of(own, f"{path} {name}")


def _line(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return a flag's help in one line, with its values filled in."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return " ".join(text.split())


# ---- shared by all shells --------------------------------------------------------------------


def _below(commands: Sequence[Command]) -> list[str]:
    return [f"{each.path} {name}" for each in commands for name in each.below]


def _valued(commands: Sequence[Command]) -> list[str]:
    return [f"{c.path} {o.name}" for c in commands for o in c.options if o.takes_value]


def _known(commands: Sequence[Command]) -> list[tuple[str, str]]:
    """Return the allowed values of a flag."""
    return [
        (f"{c.path} {o.name}", " ".join(o.known)) for c in commands for o in c.options if o.known
    ]


def _patterns(texts: Sequence[str]) -> str:
    return "|".join(map(shlex.quote, texts))


def _programs(commands: Sequence[Command]) -> list[str]:
    return [shlex.quote(f"{each.path} ") for each in commands if each.starts_program]


# ---- bash ------------------------------------------------------------------------------------


def _bash(commands: Sequence[Command]) -> str:
    programs = _programs(commands)
    known = [f"        {shlex.quote(at)}) known={shlex.quote(k)} ;;" for at, k in _known(commands)]
    words = [
        f"        {shlex.quote(c.path)}) known={shlex.quote(' '.join([*c.below, *_names(c)]))} ;;"
        for c in commands
    ]
    leaves = _patterns([c.path for c in commands if not c.below])
    lines = [
        "# made by `hadal completion bash`",
        "_hadal() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} path=hadal known= at",
        "    COMPREPLY=()",
        "    for ((at = 1; at < COMP_CWORD; at++)); do",
        '        case "$path ${COMP_WORDS[at]}" in',
        f'        {_patterns(_below(commands))}) path="$path ${{COMP_WORDS[at]}}" ;;',
        f"        {_patterns(_valued(commands))})",
        "            at=$((at + 1))",
        "            [[ ${COMP_WORDS[at]} == = ]] && at=$((at + 1)) ;;",
        f"        {'|'.join(each + '-*' for each in programs)}) ;;",
        f"        {'|'.join(each + '*' for each in programs)}) return ;;",
        "        esac",
        "    done",
        "    local before=${COMP_WORDS[COMP_CWORD - 1]}",
        "    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD - 2]}",
        "    [[ $word == = ]] && word=",
        '    case "$path $before" in',
        *known,
        f"        {_patterns(_valued(commands))}) return ;;",
        "    esac",
        '    [[ -z $known && $word != -* ]] && case "$path" in',
        f"        {leaves}) return ;;",
        "    esac",
        '    [[ -z $known ]] && case "$path" in',
        *words,
        "    esac",
        '    COMPREPLY=($(compgen -W "$known" -- "$word"))',
        "}",
        "complete -o default -F _hadal hadal",
    ]
    return "\n".join(lines) + "\n"


def _names(command: Command) -> list[str]:
    return [option.name for option in command.options]


# ---- zsh -------------------------------------------------------------------------------------


def _zsh(commands: Sequence[Command]) -> str:
    programs = _programs(commands)
    known = [f"        {shlex.quote(at)}) known=({k}) ;;" for at, k in _known(commands)]
    described = [f"        {shlex.quote(c.path)}) described=({_described(c)}) ;;" for c in commands]
    leaves = _patterns([c.path for c in commands if not c.below])
    lines = [
        "#compdef hadal",
        "# made by `hadal completion zsh`",
        "_hadal() {",
        "    local where=hadal at",
        "    local -a known described",
        "    for ((at = 2; at < CURRENT; at++)); do",
        '        case "$where ${words[at]}" in',
        f'        {_patterns(_below(commands))}) where="$where ${{words[at]}}" ;;',
        f"        {_patterns(_valued(commands))}) at=$((at + 1)) ;;",
        f"        {'|'.join(each + '-*' for each in programs)}) ;;",
        f"        {'|'.join(each + '*' for each in programs)}) _files; return ;;",
        "        esac",
        "    done",
        '    case "$where ${words[CURRENT - 1]}" in',
        *known,
        f"        {_patterns(_valued(commands))}) _files; return ;;",
        "    esac",
        "    if (( ${#known} )); then compadd -- $known; return; fi",
        '    [[ ${words[CURRENT]} != -* ]] && case "$where" in',
        f"        {leaves}) _files; return ;;",
        "    esac",
        '    case "$where" in',
        *described,
        "    esac",
        "    _describe hadal described",
        "}",
        # Read by `eval` or `source` it registers itself; as a file in fpath it is the function.
        'if [[ ${funcstack[1]} == _hadal ]]; then _hadal "$@"; else compdef _hadal hadal; fi',
    ]
    return "\n".join(lines) + "\n"


def _described(command: Command) -> str:
    pairs = [*command.below.items(), *((o.name, o.help) for o in command.options)]
    return " ".join(shlex.quote(f"{name}:{text}" if text else name) for name, text in pairs)


# ---- fish ------------------------------------------------------------------------------------


def _fish(commands: Sequence[Command]) -> str:
    lines = [
        "# made by `hadal completion fish`",
        "function __hadal_at",
        "    set -l where hadal",
        "    set -l skips 0",
        "    for word in (commandline -opc)[2..]",
        "        if test $skips = 1",
        "            set skips 0",
        "            continue",
        "        end",
        '        switch "$where $word"',
        f"            case {' '.join(map(_quoted, _below(commands)))}",
        '                set where "$where $word"',
        f"            case {' '.join(map(_quoted, _valued(commands)))}",
        "                set skips 1",
    ]
    programs = [each.path for each in commands if each.starts_program]
    lines += [
        f"            case {' '.join(_quoted(f'{each} -*') for each in programs)}",
        f"            case {' '.join(_quoted(f'{each} *') for each in programs)}",
        "                set where program",
        "        end",
        "    end",
        '    test "$where" = "$argv"',
        "end",
    ]
    for command in commands:
        there = f"complete -c hadal -n {_quoted(f'__hadal_at {command.path}')}"
        lines += [f"{there} -f -a {n} -d {_quoted(text)}" for n, text in command.below.items()]
        for option in command.options:
            dashes = "-l" if option.name.startswith("--") else "-s"
            words = [there, dashes, option.name.lstrip("-"), "-d", _quoted(option.help)]
            words += ["-x", "-a", _quoted(" ".join(option.known))] if option.known else []
            words += ["-r"] if option.takes_value and not option.known else []
            lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
