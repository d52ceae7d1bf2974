"""`hadal schema`: the JSON schema of a ds_config.json, for editors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hadal.cli.parser import add_command
from hadal.cli.terminal import write_file


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "schema",
        help="Print the JSON schema of ds_config.json, for editors",
        description="Print the JSON schema of ds_config.json, with which editors complete keys,"
        " show their descriptions and underline mistakes. Set it as the configuration's `$schema`,"
        " or for a whole project in VS Code's `json.schemas`; Hadal and DeepSpeed ignore that key.",
        examples=(
            "hadal schema --output ds_config.schema.json",
            '# in ds_config.json:  "$schema": "./ds_config.schema.json",',
            '# in .vscode/settings.json:  "json.schemas": [{"fileMatch": ["ds_config*.json"],',
            '#                                              "url": "./ds_config.schema.json"}]',
        ),
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="Write the schema to a file instead"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the schema."""
    from hadal.config.document import config_schema

    text = json.dumps(config_schema(), indent=2) + "\n"
    if parsed.output is None:
        sys.stdout.write(text)
    else:
        write_file(parsed.output, text)
    return 0
