"""The parser of the command and of each subcommand: help in one form, errors that suggest a name.

Flags may be written with dashes or with underscores, whichever way help shows them.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hadal.cli.terminal import MISUSED, WIDEST, console, fail, is_colourful
from hadal.errors import nearest
from hadal.units import nbytes_of, numel_of

if TYPE_CHECKING:
    pass


_NAMES_WIDTH = 30
_REQUIRED, _ONE_OF = "the following arguments are required: ", "one of the arguments "
# Coloured parts of help; each group is named after its style.
_STYLED = (
    r"(?m)^(?P<heading>Usage:|[A-Z][\w ,]*:$)",
    r"(?m)^ {2,}(?P<key>--?[a-zA-Z][\w-]*(?:, --?[\w-]+)*)",
    r"(?m)^  (?P<key>[A-Za-z][\w.-]*)(?=  |$)",
    r"(?P<key>`[^`\n]+`)",
    r"(?m)  (?P<faint># .*)$",
)


class Parser(argparse.ArgumentParser):
    """A parser of one (sub)command. Abbreviated flags are refused: tomorrow they may be two.

    `hadal run` alone takes them (`divided`).
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        description: str = "",
        examples: Sequence[str] = (),
        words: str = "",
        color: bool = False,  # Python 3.14 hands its own to subcommands
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.color = color
        self.examples = tuple(examples)
        self.words = words
        """Usage text for the words after the flags; empty: derived from their declarations."""
        self._optionals.title, self._positionals.title = "Options", "Arguments"
        self.add_argument("-h", "--help", action="help", help="Show this help and exit")

    # ---- reading ---------------------------------------------------------------------------------

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; a flag that this very subcommand does not know is an error here."""
        self._take_both_spellings()
        try:
            parsed, unknown = super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            name = f"{error.argument_name}: " if error.argument_name else ""
            self.error(f"{name}{error.message}")
        if unknown:
            self.refuse(unknown[0])
        return parsed, unknown

    def _take_both_spellings(self) -> None:
        known = self._option_string_actions
        for name, action in list(known.items()):
            known.setdefault(underscored(name), action)
            if name.startswith("--"):
                known.setdefault("--" + name[2:].replace("_", "-"), action)

    def refuse(self, word: str) -> NoReturn:
        """Report a word that this subcommand does not know; exit."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            self.error(f'unexpected argument "{word}"')
        self.error(f"unknown flag {name}", _meant(name, self.flags()))

    def flags(self) -> list[str]:
        """Return the flags that help shows."""
        return [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
        ]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.error(f'unknown command "{value}"', _meant(str(value), known))
        name = "/".join(action.option_strings) or str(action.metavar or action.dest)
        self.error(f'{name}: expected {_either(known)}, got "{value}"', _meant(str(value), known))

    def error(self, message: str, hint: str = "") -> NoReturn:
        """Report a fault of the command line, with the usage of this very subcommand; exit."""
        if message.startswith(_REQUIRED):
            message = f"missing {message.removeprefix(_REQUIRED)}"
        elif message.startswith(_ONE_OF):
            names = message.removeprefix(_ONE_OF).removesuffix(" is required").split()
            message = f"missing {_either(names)}"
        fail(message.replace("expected one argument", "expected a value"), hint)
        self._print_message(
            f"\n{self.format_usage()}\nFor more information, try `{self.prog} --help`.\n",
            sys.stderr,
        )
        sys.exit(MISUSED)

    # ---- help ------------------------------------------------------------------------------------

    def format_usage(self) -> str:
        """Return one line: required flags and words are named, the others are options."""
        words = [self.prog or ""]
        flags = [action for action in self._actions if action.option_strings]
        if any(not action.required for action in flags):
            words.append("[OPTIONS]")
        words += [f"{a.option_strings[-1]} {_value_of(a)}" for a in flags if a.required]
        for group in self._mutually_exclusive_groups:
            if group.required:
                one_of = [f"{a.option_strings[-1]} {_value_of(a)}" for a in group._group_actions]
                words.append(f"({' | '.join(one_of)})")
        words.append(self.words or " ".join(map(_word, self._get_positional_actions())))
        return f"Usage: {' '.join(filter(None, words))}\n"

    def format_help(self) -> str:
        """Return description, usage, arguments and options by group, examples."""
        width = min(shutil.get_terminal_size().columns, WIDEST)
        parts = [textwrap.fill(self.description or "", width), self.format_usage().rstrip()]
        groups = sorted(self._action_groups, key=lambda group: group is self._optionals)
        shown = {str(group.title): list(self._rows(group._group_actions)) for group in groups}
        names = [name for rows in shown.values() for name, _ in rows]
        room = min(max(map(len, names)), _NAMES_WIDTH)
        parts += [f"{t}:\n{_columns(rows, room, width)}" for t, rows in shown.items() if rows]
        if self.examples:
            noun = "Example" if len(self.examples) == 1 else "Examples"
            parts.append("\n".join([f"{noun}:", *(f"  {line}" for line in self.examples)]))
        found = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        if next(found, None) is not None:
            parts.append(f"`{self.prog} COMMAND --help` describes one of them.")
        return "\n\n".join(filter(None, parts)) + "\n"

    def _rows(self, actions: Sequence[argparse.Action]) -> Iterator[tuple[str, str]]:
        # -h comes last.
        for action in sorted(actions, key=lambda action: action.dest == "help"):
            if isinstance(action, argparse._SubParsersAction):
                yield from ((each.dest, each.help or "") for each in action._choices_actions)
            elif action.help is not argparse.SUPPRESS:
                yield _named(action), self._get_formatter()._expand_help(action)

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = sys.stderr if file is None else file
        if message and is_colourful(stream):
            from rich.text import Text

            text = Text(message.rstrip("\n"))
            for styled in _STYLED:
                text.highlight_regex(styled)
            console(stream).print(text, soft_wrap=True)
        elif message:
            stream.write(message)


def add_command(
    parent: Any,
    name: str,
    *,
    help: str,
    description: str,
    examples: Sequence[str] = (),
    words: str = "",
) -> Parser:
    """Add a subcommand: `help` in its parent's list, a description and examples in its own."""
    made: Parser = parent.add_parser(
        name, help=help, description=description, examples=examples, words=words
    )
    return made


def add_group(parser: argparse.ArgumentParser, dest: str) -> Any:
    """Let a command have subcommands; alone it prints its help."""
    group = parser.add_subparsers(
        dest=dest, metavar="COMMAND", title="Commands", parser_class=Parser, prog=parser.prog
    )

    def print_help(parsed: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    return group


def add_actions(parent: Any, name: str, **texts: Any) -> Any:
    """Add a subcommand that only has subcommands, and return their group; `add_command`'s texts."""
    return add_group(add_command(parent, name, **texts), "action")


def spelled(
    words: str, help: str, type: Any = None, default: Any = None, **keywords: Any
) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of `add_argument` for a flag: `-o --output FILE`, or a switch `--all`.

    A word that is not a flag is its name and the one shown: `path PATH`. Help ends with the
    default, unless it mentions that.
    """
    names = [word for word in words.split() if word.startswith("-")] or words.split()[:1]
    value = " ".join(word for word in words.split() if word not in names)
    if default not in (None, "") and "default" not in help:
        help += " (default: %(default)s)"
    shown = {"help": help, "type": type, "default": default, "metavar": value or None}
    if names[0].startswith("-") and not value and not keywords.keys() & {"action", "choices"}:
        keywords["action"] = "store_true"
    return names, {key: each for key, each in shown.items() if each is not None} | keywords


def add_flag(
    to: argparse._ActionsContainer,
    words: str,
    help: str,
    type: Any = None,
    default: Any = None,
    **keywords: Any,
) -> None:
    """Add a flag or a word to a parser or a group, by its spelling: see `spelled`."""
    names, its = spelled(words, help, type, default, **keywords)
    to.add_argument(*names, **its)


def underscored(flag: str) -> str:
    """Return a flag with underscores in place of dashes, save those that it begins with."""
    return "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag


def _word(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return "COMMAND"
    name = str(action.metavar or action.dest.upper())
    return {"*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _value_of(action: argparse.Action) -> str:
    """Return the name of a flag's value in help; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _named(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest.upper())
    indent = "" if len(action.option_strings[0]) == 2 else "    "
    return f"{indent}{', '.join(action.option_strings)} {_value_of(action)}".rstrip()


def _columns(rows: Sequence[tuple[str, str]], room: int, width: int) -> str:
    """Return names on the left, their help on the right; a long name has its own line."""
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(20, width - room - 4)) or [""]
        if len(name) > room:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:<{room}}  {wrapped.pop(0)}".rstrip())
        lines += [f"  {'':<{room}}  {line}" for line in wrapped]
    return "\n".join(lines)


def _meant(name: str, known: Sequence[str]) -> str:
    """Return a hint at the name that was probably meant; empty if none is close."""
    plain = {word.lstrip("-"): word for word in known}
    bare = name.lstrip("-")
    near = nearest(bare, plain) or next((w for w in plain if bare and w.startswith(bare)), None)
    return f"did you mean {plain[near]}?" if near else ""


def _either(known: Sequence[str]) -> str:
    *most, last = known
    return f"{', '.join(most)} or {last}" if most else last


# ---- types of arguments, with one message for each -----------------------------------------------


CONFIG_HELP = "A ds_config.json, its text, or the base64 of that"
# Less than any device has.
_LEAST_MEMORY = 1 << 20
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def integer(*, ge: int, le: int | None = None) -> Callable[[str], int]:
    """Return a reader of integers in a range: "4", "1e4"."""
    wanted = f"an integer >= {ge}" if le is None else f"an integer from {ge} to {le}"

    def read(text: str) -> int:
        value = _number(text)
        if value is None or not value.is_integer() or value < ge or value > (le or math.inf):
            raise expected(wanted, text)
        return int(value)

    return read


def number(*, gt: float, lt: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers in an open range: "0.5", "1e-3"."""
    wanted = f"a number > {gt:g}" if lt == math.inf else f"a number between {gt:g} and {lt:g}"

    def read(text: str) -> float:
        value = _number(text)
        if value is None or not gt < value < lt:
            raise expected(wanted, text)
        return value

    return read


positive = integer(ge=1)
port = integer(ge=1, le=65535)


def size(text: str) -> int:
    """Read a size in bytes: "500MB", "2GiB"."""
    try:
        return nbytes_of(text)
    except ValueError:
        raise expected("a size such as 500MB or 80GB", text) from None


def device_memory(text: str) -> int:
    """Read the memory of a device in bytes; a number alone is an oversight."""
    found = size(text)
    if found < _LEAST_MEMORY:
        raise expected("the memory of a device with its unit, such as 80GB", text)
    return found


def numel(text: str) -> int:
    """Read a number of elements: "1300000000", "7B"."""
    try:
        return numel_of(text)
    except ValueError:
        raise expected("a number such as 1300000000 or 7B", text) from None


def expected(wanted: str, found: str) -> argparse.ArgumentTypeError:
    """Return the one message for a word that is not as it should be."""
    return argparse.ArgumentTypeError(f'expected {wanted}, got "{found}"')


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text.strip()) else None


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, and for how many ranks it is read."""
    add_flag(parser, "config CONFIG", CONFIG_HELP)
    add_world_size(parser)


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks for which a configuration is read."""
    add_flag(parser, "--world-size N", "Number of ranks", positive, 1)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the switch for programs that read the output."""
    add_flag(parser, "--json", "Print JSON")
