"""`hadal plot-schedule CONFIG`: a picture of the learning rate over the training."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.arguments import add_config, positive
from hadal.errors import ConfigError, OptimizerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hadal.config import Config
    from hadal.optim.preview import Course

_FAULTY = 2
_COLOURS = ("#1f5fa8", "#d1682b", "#3c8d5a", "#8a4fa3", "#a8842c", "#5f6b76")
_INK, _FAINT = "#30363d", "#c9d1d9"


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plot-schedule", help="draw the learning rate (and momentum) of a configuration"
    )
    add_config(parser)
    parser.add_argument(
        "--steps", type=positive, required=True, metavar="N", help="how many updates"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("schedule.png"),
        metavar="FILE",
        help="where to write the PNG (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Draw the picture; return 2 where the configuration has faults, 1 where it cannot be drawn."""
    from hadal.config import load_config

    try:
        import matplotlib  # noqa: F401 - to tell before anything is read
    except ImportError:
        print(
            "hadal plot-schedule draws with matplotlib, which is not installed:"
            " pip install matplotlib",
            file=sys.stderr,
        )
        return 1
    try:
        config = load_config(parsed.config, world_size=parsed.world_size, allow_unbuilt=True)
        courses = _courses(config, parsed.steps)
    except (ConfigError, OptimizerError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY
    try:
        figure_of(config, courses).savefig(parsed.output, format="png", dpi=150)
    except OSError as error:
        print(f"{parsed.output} cannot be written: {error}", file=sys.stderr)
        return 1
    print(parsed.output)
    return 0


def _courses(config: Config, steps: int) -> list[Course]:
    from hadal.optim.preview import preview

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


def figure_of(config: Config, courses: Sequence[Course]) -> Figure:
    """Draw the rates, and the momenta below them where they move."""
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
    _mark_events(rows, config.scheduler.type, config.scheduler.params, steps)
    figure.suptitle(config.scheduler.type, fontsize=13, weight="bold")
    rows[0].set_title(_said(config.scheduler.params), fontsize=8.5, color=_INK)
    return figure


def _lines(axis: Axes, courses: Sequence[Sequence[float]], label: str) -> None:
    """Draw one line for all groups that are alike."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, course in enumerate(courses):
        alike.setdefault(tuple(course), []).append(number)
    for colour, (values, groups) in enumerate(alike.items()):
        names = ", ".join(map(str, groups))
        axis.plot(
            values,
            color=_COLOURS[colour % len(_COLOURS)],
            linewidth=2,
            label=f"param group{'s' if len(groups) > 1 else ''} {names}",
        )
    if len(alike) > 1:
        axis.legend(frameon=False, fontsize=9)
    axis.set_ylabel(label)
    axis.margins(y=0.08)
    axis.grid(color=_FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.spines[["top", "right"]].set_visible(False)


def _mark_events(rows: Sequence[Axes], kind: str, params: Mapping[str, Any], steps: int) -> None:
    for update, name in events(kind, params):
        if not 0 < update <= steps:
            continue
        for axis in rows:
            axis.axvline(update, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        late = update > 0.8 * steps
        rows[0].annotate(
            f"{name}: {update}",
            (update, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            fontsize=9,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )


def events(kind: str, params: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Where the course turns: (update, what happens there)."""
    from hadal.config.scheduler import PARAMS

    if kind not in PARAMS:
        return []
    values = {name: item.default for name, item in PARAMS[kind].model_fields.items()}
    values |= params
    if kind == "OneCycle":
        first = values["cycle_first_step_size"]
        second = values["cycle_second_step_size"]
        return [(first, "peak"), (first + (first if second is None else second), "end of cycle")]
    found = []
    if "warmup_num_steps" in values:
        found.append((max(2, values["warmup_num_steps"]), "end of warm-up"))
    if "total_num_steps" in values:
        found.append((values["total_num_steps"], "end of training"))
    return found


def _said(params: Mapping[str, Any]) -> str:
    """The params as they were given, in lines that fit above the picture."""
    shown = {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()}
    # A line breaks between params, not inside one.
    words = [f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in shown.items()]
    return textwrap.fill(" · ".join(words), 120, break_long_words=False, break_on_hyphens=False)
