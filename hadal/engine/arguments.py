"""The command-line arguments that training scripts share."""

from __future__ import annotations

import argparse
from typing import Any

from hadal.errors import UsageError

# In order of preference: (attribute of `args`, what it is).
_CONFIG_ATTRIBUTES = ("deepspeed_config", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a script's parser, and return it."""
    group = parser.add_argument_group("Hadal", "the names that DeepSpeed's scripts use")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that this run is distributed (for the script)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON config")
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among those that a caller may give in several ways.

    Raises:
        UsageError: none was given, or more than one.
    """
    given = {"config=": config, "config_params=": config_params}
    for name in _CONFIG_ATTRIBUTES:
        given[f"args.{name}"] = getattr(args, name, None)
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        raise UsageError(
            "initialize got no configuration; give config= a dict or the path of a JSON file, or"
            " start the script with --deepspeed_config FILE"
        )
    if len(found) > 1:
        raise UsageError(
            f"initialize got a configuration {len(found)} times: {', '.join(found)}; give it once"
        )
    return next(iter(found.values()))
