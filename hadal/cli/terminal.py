"""Output of all subcommands: one theme, one kind of table, one form of errors.

Colours are for terminals, unless NO_COLOR is set. There, messages are wrapped with a hanging
indent. Through a pipe the same text is plain, and no line of it is wrapped or truncated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hadal.errors import ConfigError, HadalError, needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


FAILED = 1
"""Exit code of a command that failed."""
MISUSED = 2
"""Exit code of a command line that cannot be understood."""
THEME = {
    "error": "bold red",
    "warning": "yellow",
    "good": "green",
    "best": "bold green",
    "key": "bold",
    "hint": "cyan",
    "faint": "dim",
    "heading": "bold",
}
WIDEST = 100
"""Columns of help and messages on a wide terminal."""
_PIPE_WIDTH = 10_000


class CommandError(HadalError):
    """A subcommand failed; the message contains the reason and the remedy."""


def is_colourful(stream: TextIO) -> bool:
    """Return True if colours are written to a stream."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def console(stream: TextIO | None = None) -> Console:
    """Return a console with the theme, on the standard output unless another stream is given."""
    from rich.console import Console
    from rich.theme import Theme

    stream = sys.stdout if stream is None else stream
    colourful = is_colourful(stream)
    return Console(
        file=stream,
        theme=Theme(THEME),
        force_terminal=colourful,
        color_system="auto" if colourful else None,
        width=None if stream.isatty() else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def show(*parts: RenderableType) -> None:
    """Write text and tables to the standard output, one below the other."""
    target = console()
    for part in parts:
        with target.capture() as capture:
            target.print(part, soft_wrap=isinstance(part, str) or _is_text(part))
        # Tables fill their last column; blanks at the end of a line are of no use to anybody.
        lines = capture.get().splitlines()
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))


def show_json(value: Any) -> None:
    """Write a value as JSON to the standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _is_text(part: object) -> bool:
    from rich.text import Text

    return isinstance(part, Text)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table; the columns named in `right` hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        header_style="heading",
    )
    numbers = set(right)
    for column in columns:
        is_number = column in numbers
        made.add_column(
            column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    return made


def aligned(rows: Sequence[tuple[RenderableType, ...]], indent: int = 0) -> Table:
    """Return rows in columns without a heading, as lists of keys and values have."""
    from rich.padding import Padding
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    for row in rows:
        first, *rest = row
        made.add_row(Padding(first, (0, 0, 0, indent)), *rest)
    return made


def heading(text: str) -> Text:
    """Return a line above a table."""
    from rich.text import Text

    return Text(text, "heading")


def key(text: str) -> Text:
    """Return the name of a key, a flag or a file that a message is about."""
    from rich.text import Text

    return Text(text, "key")


def fail(problem: HadalError | str, hint: str = "") -> None:
    """Report an error on the standard error; every fault of a configuration has a line."""
    head, *more = str(problem).splitlines() or [""]
    say("error", head, "error")
    faults = problem.faults if isinstance(problem, ConfigError) else ()
    if faults and more:
        target = console(sys.stderr)
        rows = [(key(fault.path), _marked(fault.message)) for fault in faults]
        with target.capture() as capture:
            target.print(aligned(rows, indent=2))
        sys.stderr.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    else:
        for line in more:
            say("", line, "")
    if hint:
        say("hint", hint, "hint")


def note(text: str, label: str = "note") -> None:
    """Print a note to standard error."""
    say(label, text, "warning")


def say(label: str, text: str, style: str) -> None:
    """Write a line to the standard error, behind a label in a style of the theme."""
    from rich.text import Text

    target = console(sys.stderr)
    body = _marked(text.lstrip())
    indent = " " * (len(text) - len(body))
    start = Text.assemble((f"{label}: " if label else "", style), indent)
    if sys.stderr.isatty():
        lines = body.wrap(target, max(20, min(target.width, WIDEST) - len(start)))
        for line in lines:
            line.rstrip()
        body = Text("\n" + " " * len(start)).join(lines)
    target.print(start + body, soft_wrap=True)


def _marked(text: str) -> Text:
    """Return a message, with the name that was probably meant in the colour of hints."""
    from rich.text import Text

    marked = Text(text)
    marked.highlight_regex(r"did you mean [^?]+\?", "hint")
    return marked


@contextmanager
def progress(total: int, what: str, *, is_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on the standard error, unless that is no terminal; the function advances it."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn as Remaining,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if is_bytes else MofNCompleteColumn(),
        Remaining(),
        console=console(sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(what, total=total)
    with bar:
        yield lambda count: bar.advance(task, count)


def write_file(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


# ---- pictures: drawn with matplotlib, in the format that the file's suffix names -----------------


COLOURS = ("#1f5fa8", "#d1682b", "#3c8d5a", "#8a4fa3", "#a8842c", "#5f6b76")
INK, FAINT = "#30363d", "#c9d1d9"
_DPI = 150


def picture_path(path: Path) -> Path:
    """Return the file for a picture; one without a suffix becomes a PNG.

    Raises:
        MissingPackageError: matplotlib is not installed.
        CommandError: it cannot write that format, or there is no such directory.
    """
    canvas = needed("matplotlib.backend_bases", "a picture").FigureCanvasBase
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
        note(f"a name without a suffix: the picture is written as {path}")
    known = sorted(canvas.get_supported_filetypes())
    suffix = path.suffix[1:].lower()
    if suffix not in known:
        listed = ", ".join(f".{each}" for each in known)
        raise CommandError(f"{path}: pictures cannot be written as .{suffix}; use one of {listed}")
    if not path.parent.is_dir():
        raise CommandError(f"{path} cannot be written: {path.parent} is not a directory")
    return path


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure, and print its path.

    Raises:
        CommandError: the file cannot be written.
    """
    save_picture(figure, path)
    print(path)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
