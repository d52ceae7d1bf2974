"""The command names that come with DeepSpeed; `compat/deepspeed-stub` installs them."""

from __future__ import annotations

import argparse
import sys

from hadal.cli.main import main
from hadal.errors import NotBuiltYetError

_FAULTY = 2
# Switches of ds_report that choose among parts that `hadal report` does not have.
_OF_REPORT = ("--hide_operator_status", "--hide_errors_and_warnings")


def run() -> int:
    """`deepspeed`: starts a program, as `hadal run` does."""
    return main(["run", *sys.argv[1:]])


def report() -> int:
    """`ds_report`, `dsr`: what is installed and available."""
    return main(["report", *(word for word in sys.argv[1:] if word not in _OF_REPORT)])


def ssh() -> int:
    """`ds_ssh`: a command on every host."""
    return main(["ssh", *sys.argv[1:]])


def elastic() -> int:
    """`ds_elastic -c CONFIG [-w RANKS]`: the batch, and who can train it."""
    parser = argparse.ArgumentParser(prog="ds_elastic")
    parser.add_argument("-c", "--config", required=True, help="a ds_config.json")
    parser.add_argument("-w", "--world-size", default="0", help="number of ranks")
    parsed = parser.parse_args()
    ranks = [] if parsed.world_size == "0" else ["--world-size", parsed.world_size]
    return main(["elastic", parsed.config, *ranks])


def unbuilt() -> int:
    """A command that has nothing behind it yet."""
    name = sys.argv[0].rpartition("/")[2]
    print(f"{name}: {NotBuiltYetError(f'{name} is not built yet in Hadal')}", file=sys.stderr)
    return _FAULTY
