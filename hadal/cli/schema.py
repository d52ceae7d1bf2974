"""`hadal schema`: the JSON schema of a ds_config.json, for editors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("schema", help="print a JSON schema of ds_config.json")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it to a file instead")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the schema."""
    from hadal.config.schema import config_schema

    text = json.dumps(config_schema(), indent=2) + "\n"
    if parsed.output is None:
        sys.stdout.write(text)
        return 0
    try:
        parsed.output.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{parsed.output} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0
