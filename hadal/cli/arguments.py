"""The arguments that subcommands share."""

from __future__ import annotations

import argparse


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, and for how many ranks it is read."""
    parser.add_argument("config", metavar="CONFIG", help="a ds_config.json, or its base64 text")
    parser.add_argument(
        "--world-size", type=positive, default=1, metavar="N", help="number of ranks (default 1)"
    )


def positive(text: str) -> int:
    """Read an integer that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text}")
    return value
