"""`zero_to_fp32.py` in a folder of checkpoints: the command line that users of DeepSpeed know."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from hadal.errors import HadalError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the fp32 weights of a checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint wrote to")
    parser.add_argument("output_dir", help="the folder to write to")
    parser.add_argument("--max_shard_size", default="5GB", help="longest file (default 5GB)")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="write safetensors, not torch.save's"
    )
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the latest)")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="show the log, too")
    parsed = parser.parse_args(arguments)
    if parsed.debug:
        logging.basicConfig(level=logging.DEBUG)

    from hadal.checkpoint.fp32 import convert_zero_checkpoint_to_fp32_state_dict

    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            parsed.checkpoint_dir,
            parsed.output_dir,
            max_shard_size=parsed.max_shard_size,
            safe_serialization=parsed.safe_serialization,
            tag=parsed.tag,
            exclude_frozen_parameters=parsed.exclude_frozen_parameters,
        )
    except (HadalError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
