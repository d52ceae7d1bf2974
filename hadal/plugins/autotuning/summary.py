"""The findings of a search: the best trial, a table, and the reasons for failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hadal.plugins.autotuning.runs import Outcome
from hadal.plugins.autotuning.search import score
from hadal.plugins.autotuning.space import TuningTrial

SUMMARY, BEST_CONFIG, BEST_COMMAND = "summary.txt", "ds_config_optimal.json", "cmd_optimal.txt"
PICTURE = "summary.png"
_CLOSE = 0.02
TITLES = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
UNITS = {"throughput": "samples/s", "latency": "ms", "FLOPS_per_gpu": "operations/s"}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one experiment of a search."""

    trial: TuningTrial
    outcome: Outcome
    value: float | None
    """The metric's value, the mean of all runs; None if the experiment failed."""
    runs: int = 1

    @property
    def peak(self) -> int:
        """The bytes of a rank at the peak; 0 if unknown."""
        return int((self.outcome.found or {}).get("peak_memory_per_gpu", 0))

    @property
    def speed(self) -> float:
        """Samples of all ranks per second; 0 if unknown."""
        return float((self.outcome.found or {}).get("throughput", 0.0))


@dataclass(slots=True)
class Findings:
    """The results of a search so far."""

    metric: str
    results: list[Result]
    left_out: dict[str, str]
    """Trials that were not run, with the reason."""

    @property
    def runs(self) -> int:
        """Experiments so far, repeated ones too."""
        return sum(result.runs for result in self.results)

    def best(self, stage: int | None = None) -> Result | None:
        """Return the best result of a stage, or of all stages."""
        known = [r for r in self.of(stage) if r.value is not None]
        return max(known, key=lambda r: score(self.metric, r.value or 0.0), default=None)

    def of(self, stage: int | None) -> list[Result]:
        """Return the results of a stage, or of all stages."""
        return [r for r in self.results if stage in (None, r.trial.stage)]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the table's rows: one for each stage that was tried, and one for all."""
        stages: list[int | None] = [*dict.fromkeys(r.trial.stage for r in self.results), None]
        return [self._row(stage) for stage in stages]

    def _row(self, stage: int | None) -> tuple[str, str, str, str]:
        best = self.best(stage)
        name = "global" if stage is None else f"z{stage}"
        count = str(sum(result.runs for result in self.of(stage)))
        if best is None:
            return name, count, "failed" if self.of(stage) else "-", "-"
        return name, count, f"{best.value:.6g}", best.outcome.name

    def front(self) -> list[Result]:
        """Return the results that are better than all with as little memory, the best first."""
        known = [r for r in self.results if r.value is not None]
        known.sort(key=lambda r: (-score(self.metric, r.value or 0.0), r.peak))
        return [r for n, r in enumerate(known) if all(r.peak < better.peak for better in known[:n])]

    def notes(self) -> list[str]:
        """Return what else to know of the results: a second best with less memory, and failures."""
        notes, front = [], self.front()
        worths = [score(self.metric, result.value or 0.0) for result in front]
        near = [r for r, worth in zip(front, worths, strict=True) if _is_close(worth, worths[0])]
        if len(near) > 1:
            saved = (near[0].peak - near[-1].peak) / 1e9
            notes.append(
                f"{near[-1].outcome.name} is within {_CLOSE:.0%} of the best"
                f" ({near[-1].value:.6g}) with {saved:.3g} GB less memory"
            )
        return notes + self.failures()

    def failures(self) -> list[str]:
        """Return a line for each trial without a result, with the reason."""
        failed = [r.outcome for r in self.results if r.value is None]
        lines = [f"{outcome.name} failed: {outcome.failure}" for outcome in failed]
        return lines + [f"{name} was not run: {why}" for name, why in self.left_out.items()]

    def text(self, seconds: float, *, is_whole: bool) -> str:
        """Return the content of summary.txt."""
        state = "completed" if is_whole else "stopped"
        end = (
            f"Tuning {state} in {timedelta(seconds=seconds)}."
            f" Total number of experiments: {self.runs}."
        )
        less_is_better = " (less is better)" * (self.metric == "latency")
        titles = ("experiment", f"{self.metric}, {UNITS[self.metric]}{less_is_better}")
        front = self.front()
        peaks = [
            (r.outcome.name, f"{r.value:.6g}", f"{r.peak / 1e9:.3g}", "front" * (r in front))
            for r in self.results
            if r.value is not None
        ]
        lines = [*_aligned(TITLES, self.rows()), ""]
        if peaks:
            lines += [*_aligned((*titles, "memory, GB", ""), peaks), ""]
        return "\n".join([*lines, *self.notes(), end]) + "\n"


def _is_close(one: float, best: float) -> bool:
    return best - one <= _CLOSE * abs(best)


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as a Markdown table whose second and third columns are right-aligned numbers."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        aligned = (text.rjust(n) if at in (1, 2) else text.ljust(n) for at, (text, n) in cells)
        return f"| {' | '.join(aligned)} |"

    rule = (
        "-" * (n - 1) + ":" if at in (1, 2) else ":" + "-" * (n - 1) for at, n in enumerate(widths)
    )
    return [line(titles), f"| {' | '.join(rule)} |", *map(line, rows)]


def value_in(found: dict[str, Any] | None, metric: str) -> float | None:
    """Return a metric from an experiment's file, or None."""
    value = found.get(metric) if found is not None else None
    return float(value) if isinstance(value, int | float) else None
