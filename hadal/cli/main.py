"""`hadal`: reads the command line and hands over to a subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from hadal import __version__
from hadal.cli import (
    bench,
    checkpoint,
    completion,
    compress,
    data,
    explain,
    init,
    plan,
    plot_schedule,
    report,
    run,
    ssh,
)
from hadal.cli.parser import Parser, add_group
from hadal.cli.run import UNREAD, divided
from hadal.cli.terminal import FAILED, MISUSED, fail
from hadal.errors import HadalError, LaunchError

SUBCOMMANDS = (
    init.add_to,
    run.add_to,
    explain.add_to,
    plan.add_to,
    plan.add_estimate_to,
    plot_schedule.add_to,
    explain.add_schema,
    checkpoint.add_to,
    data.add_to,
    compress.add_to,
    explain.add_elastic,
    bench.add_to,
    report.add_to,
    ssh.add_to,
    completion.add_to,
)
"""The functions that add a subcommand, in the order of the help."""


def command_line() -> Parser:
    """Return the parser of the command and of all below it."""
    parser = Parser(
        prog="hadal",
        description="Train large PyTorch models from one ds_config.json.",
        examples=("hadal run --num_gpus 8 train.py", "hadal explain ds_config.json --world-size 8"),
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hadal {__version__}",
        help="Show the version and exit",
    )
    group = add_group(parser, "command")
    for add_to in SUBCOMMANDS:
        add_to(group)
    parser.set_defaults(whole=parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own: list[str] = []
    program: list[str] = []
    if words[:1] == ["run"]:  # the program's arguments are not for our parsers
        own, program = divided(words[1:])
        words = ["run", *own]
    try:
        parsed = command_line().parse_args(words, argparse.Namespace(own=own, program=program))
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except HadalError as error:
        fail(error)
        return MISUSED if isinstance(error, LaunchError) else FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads on, as in `hadal report | head`: the interpreter must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")
        return FAILED
    return code
