"""`hadal run --autotuning`: the search for the fastest configuration, as people see it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hadal.cli.run import CommandOutput, choices_of
from hadal.cli.terminal import COLOURS, FAILED, MISUSED, fail, save_picture, show
from hadal.errors import HadalError, LaunchError

if TYPE_CHECKING:
    from hadal.launcher.choices import Choices
    from hadal.plugins.autotuning.summary import Findings
    from hadal.plugins.autotuning.tuner import Tuner


def tune(parsed: argparse.Namespace) -> tuple[int, list[str]]:
    """Search. Return the exit code, and the program's words with the best configuration.

    1: nothing runs. 2: the search cannot begin. 128 and a signal's number: it was stopped.
    """
    from hadal.launcher.processes import exit_code
    from hadal.plugins.autotuning.runs import Stopped

    said = CommandOutput(parsed)
    try:
        tuner = _tuner(parsed, said)
    except (HadalError, OSError) as error:
        fail(error if isinstance(error, HadalError) else str(error))
        return MISUSED, []
    code = 0
    try:
        with tuner.runner.stoppable():
            tuner.run()
    except Stopped as stopped:
        said.report(f"{stopped.sent.name}: the search is stopped")
        code = exit_code(-stopped.sent)
    except (HadalError, OSError) as error:  # TuningError, mostly
        fail(error if isinstance(error, HadalError) else str(error))
        code = FAILED
    _show(tuner)
    return code, [] if code else list(tuner.best_words())


def _tuner(parsed: argparse.Namespace, said: CommandOutput) -> Tuner:
    """Return the search, once the flags and the configuration are checked."""
    from hadal.launcher.choices import planned
    from hadal.plugins.autotuning.runs import Runner
    from hadal.plugins.autotuning.space import read_request
    from hadal.plugins.autotuning.tuner import Tuner

    choices, folder = choices_of(parsed), Path.cwd()
    _refuse(choices, parsed.dry_run)
    plan = planned(choices, os.environ, folder)
    for note in plan.notes:
        said.note(note)
    wish = read_request(choices.words, plan.job.world_size)
    # Notes on the configuration are printed now; each experiment prints its own.
    logging.getLogger("hadal.config").setLevel(logging.ERROR)
    own, variables = _without_search(parsed.own), dict(os.environ)
    runner = Runner(choices, own, variables, folder, wish.section, plan.job.pool, said.note)
    return Tuner(wish, runner)


def _refuse(choices: Choices, is_dry: bool) -> None:
    if is_dry:
        raise LaunchError("--dry-run shows one job, --autotuning starts many; pass one of them")
    if choices.elastic_training:
        raise LaunchError(
            "--elastic_training changes the number of ranks, for which --autotuning searches; pass"
            " one of them"
        )
    if choices.no_ssh:
        raise LaunchError(
            "--autotuning starts all hosts for each experiment; leave out --no_ssh and --node_rank"
        )


def _without_search(own: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of the command without those of the search."""
    kept = list(own)
    for at, word in enumerate(own):
        if word == "--autotuning":
            del kept[at : at + 2]
            break
        if word.startswith("--autotuning="):
            del kept[at]
            break
    return tuple(kept)


def _show(tuner: Tuner) -> None:
    """Show the summary, and the path of the best configuration."""
    from hadal.plugins.autotuning.summary import BEST_COMMAND, BEST_CONFIG, PICTURE, SUMMARY

    findings, folder = tuner.findings, tuner.runner.results
    show((folder / SUMMARY).read_text(encoding="utf-8").rstrip())
    if findings.best() is not None:
        show(f"best configuration: {folder / BEST_CONFIG}, its command: {folder / BEST_COMMAND}")
        if find_spec("matplotlib") is not None:
            _draw(findings, folder / PICTURE)
            show(f"speed against memory: {folder / PICTURE}")
    sys.stdout.flush()


def _draw(findings: Findings, path: Path) -> None:
    """Draw samples per second against memory, with the front as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for results, colour, style in (
        (findings.measured, COLOURS[5], "o"),
        (findings.front(), COLOURS[0], "o-"),
    ):
        peaks = [result.peak / 1e9 for result in results]
        axes.plot(peaks, [result.speed for result in results], style, color=colour)
    axes.margins(0.1)
    axes.locator_params(nbins=6)
    middle = sum(axes.get_xlim()) / 2
    for result in findings.measured:  # names stay inside the picture
        at = result.peak / 1e9, result.speed
        side, offset = ("left", 6) if at[0] < middle else ("right", -6)
        name = axes.annotate(result.outcome.name, at, (offset, 0), textcoords="offset points")
        name.set(ha=side, va="center", fontsize=7)
    axes.set_xlabel("memory of a rank at the peak, GB")
    axes.set_ylabel("samples per second")
    save_picture(figure, path)
