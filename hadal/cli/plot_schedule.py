"""`hadal plot-schedule CONFIG`: a picture of the learning rate over the training."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.parser import add_command, add_config, add_flag, positive
from hadal.cli.terminal import COLOURS, FAINT, INK, note, picture_path, write_picture
from hadal.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hadal.config import Config
    from hadal.optim.build import ScheduleCourse


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "plot-schedule",
        help="Draw the learning rate of a configuration over the updates",
        description="Plot the learning rate of a configuration over the updates, and the momentum"
        " if it changes.",
        examples=("hadal plot-schedule ds_config.json --steps 10000 --output schedule.svg",),
    )
    add_config(parser)
    add_flag(parser, "--steps N", "How many updates to draw", positive, required=True)
    add_flag(
        parser,
        "--output FILE",
        "The picture, in the format of its suffix",
        Path,
        Path("schedule.png"),
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Draw the picture.

    Raises:
        HadalError: the configuration has faults, or the picture cannot be written.
    """
    from hadal.config import load_config

    path = picture_path(parsed.output)
    config = load_config(parsed.config, world_size=parsed.world_size, allow_unbuilt=True)
    courses = _courses(config, parsed.steps)
    assert config.scheduler is not None  # there are courses, so there is a schedule
    if config.scheduler.params.get("warmup_min_ratio"):
        note("the rate is 0 in the first update for any warmup_min_ratio, as in DeepSpeed")
    write_picture(figure_of(config, courses), path)
    return 0


def _courses(config: Config, steps: int) -> list[ScheduleCourse]:
    from hadal.optim.build import preview

    if config.scheduler is None:
        raise ConfigError(
            "the configuration has no `scheduler` section, so its learning rate is constant;"
            " name a schedule to draw it"
        )
    optimizer = config.optimizer
    return preview(
        (config.scheduler.type, config.scheduler.params),
        None if optimizer is None else (optimizer.type, optimizer.params),
        steps,
    )


def figure_of(config: Config, courses: Sequence[ScheduleCourse]) -> Figure:
    """Draw the rates, and below them the momenta if they change."""
    from matplotlib.figure import Figure

    assert config.scheduler is not None  # there are courses, so there is a schedule
    steps = len(courses[0].rates) - 1
    moves = any(len(set(course.momenta)) > 1 for course in courses)
    figure = Figure(figsize=(9, 6 if moves else 4.5), layout="constrained")
    ratios = [2, 1] if moves else [1]
    axes = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
    rows: list[Axes] = list(axes[:, 0])
    _lines(rows[0], [course.rates for course in courses], "learning rate")
    if moves:
        _lines(rows[1], [course.momenta for course in courses], "momentum")
    rows[-1].set_xlabel("update")
    rows[-1].set_xlim(0, steps)
    _mark(rows, events(config.scheduler.type, config.scheduler.params, courses[0].rates), steps)
    figure.suptitle(config.scheduler.type, fontsize=13, weight="bold")
    rows[0].set_title(_said(config.scheduler.params), fontsize=8.5, color=INK)
    return figure


def _lines(axis: Axes, courses: Sequence[Sequence[float]], label: str) -> None:
    """Draw one line for all groups with equal values."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, course in enumerate(courses):
        alike.setdefault(tuple(course), []).append(number)
    for colour, (values, groups) in enumerate(alike.items()):
        names = ", ".join(map(str, groups))
        axis.plot(
            values,
            color=COLOURS[colour % len(COLOURS)],
            linewidth=2,
            label=f"param group{'s' if len(groups) > 1 else ''} {names}",
        )
    if len(alike) > 1:
        axis.legend(frameon=False, fontsize=9)
    axis.set_ylabel(label)
    axis.margins(y=0.08)
    axis.grid(color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.spines[["top", "right"]].set_visible(False)


def _mark(rows: Sequence[Axes], found: Sequence[tuple[int, str]], steps: int) -> None:
    for update, name in found:
        for axis in rows:
            axis.axvline(update, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        late = update > 0.8 * steps
        rows[0].annotate(
            f"{name}: {update}",
            (update, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            fontsize=9,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )


def events(kind: str, params: Mapping[str, Any], rates: Sequence[float]) -> list[tuple[int, str]]:
    """Return the turning points of the curve: (update, description)."""
    from hadal.config.scheduler import PARAMS

    if kind not in PARAMS:
        return []
    values = {name: item.default for name, item in PARAMS[kind].model_fields.items()}
    values |= params
    found = []
    if kind == "OneCycle":
        first = values["cycle_first_step_size"]
        second = values["cycle_second_step_size"]
        found.append((first, "peak"))
        found.append((first + (first if second is None else second), "end of cycle"))
    if "warmup_num_steps" in values:
        # One update later than in the params if the warm-up is linear, as in DeepSpeed.
        peak = rates.index(max(rates))
        found += [(peak, "end of warm-up")] * (peak < len(rates) - 1)
    if "total_num_steps" in values:
        found.append((values["total_num_steps"], "end of training"))
    return [(update, name) for update, name in found if 0 < update < len(rates)]


def _said(params: Mapping[str, Any]) -> str:
    """Return the params as they were given, in lines that fit above the picture."""
    shown = {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()}
    # A line breaks between params, not inside one.
    words = [f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in shown.items()]
    return textwrap.fill(" · ".join(words), 120, break_long_words=False, break_on_hyphens=False)
