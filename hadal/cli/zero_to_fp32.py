"""`zero_to_fp32.py` and `zero_to_torch.py` next to checkpoints, as in DeepSpeed."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hadal.cli.arguments import integer, size
from hadal.cli.parser import Parser
from hadal.cli.terminal import FAILED, fail
from hadal.errors import HadalError

_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "F32"),
    **dict.fromkeys(("fp16", "float16", "half"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the fp32 weights of a checkpoint; return the exit code."""
    return _write(_parser("fp32 weights").parse_args(arguments), "F32")


def main_torch(arguments: Sequence[str] | None = None) -> int:
    """Write the weights of a checkpoint in the dtype that is named; return the exit code."""
    parser = _parser("weights", " --dtype bf16")
    parser.add_argument(
        "--dtype", required=True, choices=sorted(_DTYPES), help="dtype of the weights"
    )
    parsed = parser.parse_args(arguments)
    return _write(parsed, _DTYPES[parsed.dtype])


def _parser(what: str, more: str = "") -> Parser:
    parser = Parser(
        description=f"Write the {what} of a checkpoint in Hugging Face layout.",
        examples=(f"python {Path(sys.argv[0]).name} . exported{more}",),
    )
    parser.add_argument(
        "checkpoint_dir", metavar="DIR", help="The directory or URL given to save_checkpoint"
    )
    parser.add_argument("output_dir", metavar="OUT", help="The directory or URL to write to")
    parser.add_argument(
        "--max_shard_size",
        type=size,
        default="5GB",
        metavar="SIZE",
        help="Size of the largest file (default: %(default)s)",
    )
    parser.add_argument(
        "--safe_serialization",
        action="store_true",
        help="Write safetensors files instead of torch.save's",
    )
    parser.add_argument("-t", "--tag", help="Which checkpoint (default: the latest)")
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="Leave out parameters that were not trained",
    )
    parser.add_argument(
        "--part",
        type=integer(ge=0),
        metavar="N",
        help="Which part of a model that was trained in model-parallel parts",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="Show the log, too")
    return parser


def _write(parsed: argparse.Namespace, dtype: str) -> int:
    if parsed.debug:
        logging.basicConfig(level=logging.DEBUG)

    from hadal.checkpoint.fp32 import convert_zero_checkpoint_to_state_dict
    from hadal.checkpoint.shards import DTYPE_OF

    try:
        convert_zero_checkpoint_to_state_dict(
            parsed.checkpoint_dir,
            parsed.output_dir,
            DTYPE_OF[dtype],
            max_shard_size=parsed.max_shard_size,
            safe_serialization=parsed.safe_serialization,
            tag=parsed.tag,
            exclude_frozen_parameters=parsed.exclude_frozen_parameters,
            part=parsed.part,
        )
    except (HadalError, ValueError) as error:
        fail(str(error))
        return FAILED
    return 0
