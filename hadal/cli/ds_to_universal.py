"""`python -m deepspeed.checkpoint.ds_to_universal`: conversion to the universal format."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hadal.cli.parser import Parser
from hadal.cli.terminal import FAILED, byte_progress, fail, show
from hadal.errors import HadalError

if TYPE_CHECKING:
    from hadal.checkpoint.storage import Location


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint of Hadal or DeepSpeed; return the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        written = convert(parsed)
    except HadalError as error:
        fail(str(error))
        return FAILED
    show(str(written))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the program that runs."""
    return _parser().parse_args()


def _parser() -> Parser:
    made = Parser(
        description="Convert a checkpoint of Hadal or DeepSpeed to DeepSpeed's universal format,"
        " which loads at any stage and number of ranks.",
        examples=(
            "python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step3"
            " --output_folder run/global_step3_universal",
        ),
    )
    made.add_argument("--input_folder", required=True, metavar="DIR", help="One checkpoint")
    made.add_argument(
        "--output_folder", required=True, metavar="OUT", help="The directory to write to"
    )
    made.add_argument(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="Accept patterns in universal_checkpoint_info that match no parameter",
    )
    unused = made.add_argument_group("Accepted and not needed")
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        unused.add_argument(flag, type=int, metavar="N", help="One process reads and writes")
    for flag in ("--keep_temp_folder", "--inject_missing_state"):
        unused.add_argument(flag, action="store_true", help="Nothing is missing or left over")
    return made


def convert(parsed: argparse.Namespace) -> Location:
    """Convert as the flags say; return the folder.

    Raises:
        HadalError: the checkpoint cannot be converted.
    """
    from hadal.checkpoint.files import location_of
    from hadal.checkpoint.formats.universal import export_universal, nbytes_of_universal
    from hadal.checkpoint.opening import opened

    source = opened(parsed.input_folder)
    with byte_progress(nbytes_of_universal(source), "converting") as progress:
        written = export_universal(
            source,
            location_of(parsed.output_folder),
            strict=getattr(parsed, "strict", True),
            progress=progress,
        )
    source.close()
    return written
