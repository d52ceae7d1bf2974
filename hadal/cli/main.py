"""`hadal`: reads the command line and hands over to a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hadal import __version__
from hadal.cli import (
    bench,
    checkpoint,
    completion,
    elastic,
    estimate,
    explain,
    plot_schedule,
    report,
    run,
    schema,
    ssh,
)
from hadal.cli.flags import divided
from hadal.cli.run import UNREAD

SUBCOMMANDS = (
    run,
    report,
    bench,
    checkpoint,
    elastic,
    estimate,
    explain,
    plot_schedule,
    schema,
    ssh,
    completion,
)


def command_line() -> argparse.ArgumentParser:
    """The parser of the command and of all below it."""
    parser = argparse.ArgumentParser(
        prog="hadal", description="Train large PyTorch models from one ds_config.json."
    )
    parser.add_argument("--version", action="version", version=f"hadal {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subparsers)
    parser.set_defaults(whole=parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own: list[str] = []
    program: list[str] = []
    if words[:1] == ["run"]:  # what follows a program's name is not for any parser of ours
        own, program = divided(words[1:])
        words = ["run", *own]
    parsed = command_line().parse_args(words, argparse.Namespace(own=own, program=program))
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as in `hadal report | head`: the interpreter must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return code
