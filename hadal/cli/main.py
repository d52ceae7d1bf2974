"""`hadal`: reads the command line and hands over to a subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hadal import __version__
from hadal.cli import bench, checkpoint, estimate, explain, plot_schedule, schema

SUBCOMMANDS = (bench, checkpoint, estimate, explain, plot_schedule, schema)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="hadal", description="Train large PyTorch models from one ds_config.json."
    )
    parser.add_argument("--version", action="version", version=f"hadal {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subparsers)
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code
