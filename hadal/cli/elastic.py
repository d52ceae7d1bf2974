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
"""How many numbers a line has."""


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
        "--world-size", type=positive, metavar="N", help="Also show what each of N ranks does"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show it.

    Raises:
        ConfigError: there is no batch, or none for so many ranks.
    """
    told = _told(_section(parsed.config), parsed.world_size)
    if parsed.json:
        show_json(told)
    else:
        _show(told)
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
    from hadal.config.elastic import list_of
    from hadal.config.reading import read

    told = read(source)[1].get("elasticity")
    if not isinstance(told, dict) or told.get("enabled") is not True:
        return Bounds()
    section = _section(source)
    shared = section.model_parallel_size
    return Bounds(
        tuple(count * shared for count in list_of(section).ranks), 60.0 * section.min_time
    )


def _section(source: str) -> Elasticity:
    """Return the section by itself, whether it is on or not."""
    from hadal.config import load_config
    from hadal.config.reading import read
    from hadal.config.report import written
    from hadal.config.rules.sections import elastic_faults

    name, raw = read(source)
    if not isinstance(raw.get("elasticity"), dict):
        raise ConfigError(
            f"{name} has no `elasticity` section; add one with max_train_batch_size and"
            " micro_batch_sizes"
        )
    alone = {"elasticity": {**raw["elasticity"], "enabled": False}, "train_batch_size": 1}
    section = load_config(alone).elasticity
    assert section is not None  # it was given
    faults = tuple(elastic_faults(section))
    if faults:
        raise ConfigError(written(name, faults), faults)
    return section


def _told(section: Elasticity, world_size: int | None) -> dict[str, Any]:
    from hadal.config.elastic import choice_of, list_of, sizes_of
    from hadal.config.triangle import Sizes

    shared = section.model_parallel_size
    choice = list_of(section) if world_size is None else choice_of(section, world_size)
    told: dict[str, Any] = {
        "train_batch_size": choice.train,
        "world_sizes": [count * shared for count in choice.ranks],
        "model_parallel_size": shared,
    }
    if world_size is None:
        return told
    sizes = sizes_of(section, world_size, world_size // shared)
    if not isinstance(sizes, Sizes):
        raise ConfigError(f"{sizes.path}: {sizes.message}", (sizes,))
    return told | {
        "world_size": world_size,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
    }


def _show(told: dict[str, Any]) -> None:
    counts, shared = told["world_sizes"], told["model_parallel_size"]
    by = f", {shared} of them for each copy of the model" if shared > 1 else ""
    rows = [(key("batch"), f"{told['train_batch_size']} samples")]
    rows.append((key("ranks"), f"{len(counts)} numbers{by}"))
    for start in range(0, len(counts), _NUMBERS):
        rows.append((key(""), " ".join(map(str, counts[start : start + _NUMBERS]))))
    show(aligned(rows))
    if "world_size" in told:
        micro, times = told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]
        show(f"{told['world_size']} ranks: {times} micro-batches of {micro} samples each")
