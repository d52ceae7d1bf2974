"""Types of command-line arguments: numbers, sizes, counts, files. One message for each."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from hadal.units import nbytes_of, numel_of

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
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_world_size(parser)


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks for which a configuration is read."""
    parser.add_argument(
        "--world-size",
        type=positive,
        default=1,
        metavar="N",
        help="Number of ranks (default: %(default)s)",
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the switch for programs that read the output."""
    parser.add_argument("--json", action="store_true", help="Print JSON")
