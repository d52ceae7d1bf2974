"""`hadal elastic CONFIG`: the batch that elasticity chooses, and how many ranks can train it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.arguments import CONFIG_HELP, add_json, positive
from hadal.cli.parser import add_command
from hadal.cli.terminal import aligned, key, show, show_json
from hadal.errors import ConfigError

if TYPE_CHECKING:
    from hadal.config.elasticity import Elasticity

_NUMBERS = 16
"""The count of numbers on a line."""


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "elastic",
        help="Show which batch `elasticity` chooses, and how many ranks can train it",
        description="Show the batch that the configuration's `elasticity` section chooses, and the"
        " numbers of ranks that can train it.",
        examples=("hadal elastic ds_config.json --world-size 64",),
    )
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="Also show the batch of each of N ranks"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show it.

    Raises:
        ConfigError: there is no batch, or none for so many ranks.
    """
    result = _result(_section(parsed.config), parsed.world_size)
    if parsed.json:
        show_json(result)
    else:
        _show(result)
    return 0


class Bounds(NamedTuple):
    """Explain the numbers of ranks that an elastic job may have."""

    world_sizes: tuple[int, ...] = ()
    """Empty: any."""
    pause_s: float = 0.0


def bounds_of(source: str) -> Bounds:
    """Return the `elasticity` section of a configuration.

    Raises:
        ConfigError: it has faults.
    """
    from hadal.config.elasticity import list_of
    from hadal.config.reading import read

    result = read(source)[1].get("elasticity")
    if not isinstance(result, dict) or result.get("enabled") is not True:
        return Bounds()
    section = _section(source)
    shared = section.model_parallel_size
    return Bounds(
        tuple(count * shared for count in list_of(section).ranks), 60.0 * section.min_time
    )


def _section(source: str) -> Elasticity:
    """Return the section by itself, whether it is on or not."""
    from hadal.config import load_config
    from hadal.config.elasticity import elastic_faults
    from hadal.config.reading import read
    from hadal.errors import written

    name, raw = read(source)
    if not isinstance(raw.get("elasticity"), dict):
        raise ConfigError(
            f"{name} has no `elasticity` section; add one with max_train_batch_size and"
            " micro_batch_sizes"
        )
    alone = {"elasticity": {**raw["elasticity"], "enabled": False}, "train_batch_size": 1}
    section = load_config(alone).elasticity
    assert section is not None  # it was given
    faults = elastic_faults(section)
    if faults:
        raise ConfigError(written(name, faults), faults)
    return section


def _result(section: Elasticity, world_size: int | None) -> dict[str, Any]:
    from hadal.config.elasticity import choice_of, list_of, sizes_of
    from hadal.config.general import Sizes

    shared = section.model_parallel_size
    choice = list_of(section) if world_size is None else choice_of(section, world_size)
    result: dict[str, Any] = {
        "train_batch_size": choice.train,
        "world_sizes": [count * shared for count in choice.ranks],
        "model_parallel_size": shared,
    }
    if world_size is None:
        return result
    sizes = sizes_of(section, world_size, world_size // shared)
    if not isinstance(sizes, Sizes):
        raise ConfigError(f"{sizes.path}: {sizes.message}", (sizes,))
    return result | {
        "world_size": world_size,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
    }


def _show(result: dict[str, Any]) -> None:
    counts, shared = result["world_sizes"], result["model_parallel_size"]
    by = f", {shared} of them for each copy of the model" if shared > 1 else ""
    rows = [(key("batch"), f"{result['train_batch_size']} samples")]
    rows.append((key("ranks"), f"{len(counts)} numbers{by}"))
    for start in range(0, len(counts), _NUMBERS):
        rows.append((key(""), " ".join(map(str, counts[start : start + _NUMBERS]))))
    show(aligned(rows))
    if "world_size" in result:
        micro, times = (
            result["train_micro_batch_size_per_gpu"],
            result["gradient_accumulation_steps"],
        )
        show(f"{result['world_size']} ranks: {times} micro-batches of {micro} samples each")
