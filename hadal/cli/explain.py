"""`hadal explain CONFIG`: what a configuration comes to, and where each value comes from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.arguments import add_config
from hadal.cli.parser import add_command

if TYPE_CHECKING:
    from hadal.config import Config

_LEFT_OPEN = "(default of the type)"


class Row(NamedTuple):
    """One value of the effective configuration."""

    path: str
    value: str
    origin: str


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "explain",
        help="Show the effective configuration and the origin of every value",
        description="Show what a configuration comes to, and where each value comes from.",
        examples=("hadal explain ds_config.json --world-size 8",),
    )
    add_config(parser)
    parser.add_argument("--all", action="store_true", help="Show defaults too")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show the configuration.

    Raises:
        ConfigError: it has faults.
    """
    from hadal.config import load_config

    config = load_config(parsed.config, world_size=parsed.world_size, allow_unbuilt=True)
    show(rows(config, with_defaults=parsed.all), config.notes)
    return 0


def rows(config: Config, *, with_defaults: bool) -> list[Row]:
    """List the values, in the order of their declaration."""
    from hadal.config.plain import leaves, shown

    values = dict(leaves(config.as_dict()))
    return [
        Row(path, shown(values[path]) if path in values else _LEFT_OPEN, origin)
        for path, origin in config.origins.items()
        if with_defaults or origin != "default"
    ]


def show(table: list[Row], notes: Iterable[str]) -> None:
    """Print a table for people, or plain columns for programs."""
    if sys.stdout.isatty():
        _show_rich(table)
    else:
        width = max((len(row.path) for row in table), default=0)
        room = max((len(row.value) for row in table), default=0)
        for row in table:
            print(f"{row.path:<{width}}  {row.value:<{room}}  {row.origin}")
    for note in notes:
        print(f"note: {note}")


def _show_rich(table: list[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"you": "green", "auto": "yellow", "inferred": "cyan", "default": "dim"}
    drawn = Table("key", "value", "origin")
    for row in table:
        colour = colours[row.origin]
        drawn.add_row(row.path, escape(row.value), f"[{colour}]{row.origin}[/{colour}]")
    Console().print(drawn)
