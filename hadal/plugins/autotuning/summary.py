"""The findings of a search: the best trial, a table, and the reasons for failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hadal.plugins.autotuning.space import NO_GAIN, TuningTrial

SUMMARY, BEST_CONFIG, BEST_COMMAND = "summary.txt", "ds_config_optimal.json", "cmd_optimal.txt"
PICTURE = "summary.png"
_CLOSE = 0.02
_TITLES = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
UNITS = {"throughput": "samples/s", "latency": "ms", "FLOPS_per_gpu": "operations/s"}


@dataclass(slots=True)
class Findings:
    """The results of a search so far."""

    metric: str
    results: list[TuningTrial]
    left_out: dict[str, str]
    """Trials that were not run, with the reason."""

    @property
    def runs(self) -> int:
        """Experiments so far, repeated ones too."""
        return sum(trial.runs for trial in self.results)

    @property
    def measured(self) -> list[TuningTrial]:
        """The results that are no failures."""
        return [trial for trial in self.results if trial.gain > NO_GAIN]

    def gain_of(self, found: Mapping[str, Any] | None) -> float:
        """Return the metric of an experiment's file such that more is better, or NO_GAIN."""
        value = (found or {}).get(self.metric)
        sign = -1.0 if self.metric == "latency" else 1.0
        return sign * value if isinstance(value, int | float) else NO_GAIN

    def best(self, stage: int | None = None) -> TuningTrial | None:
        """Return the best result of a stage, or of all stages."""
        known = [trial for trial in self.measured if stage in (None, trial.stage)]
        return max(known, key=lambda trial: trial.gain, default=None)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the rows of the table: one for each stage that was tried, and one for all."""
        for stage in (*dict.fromkeys(trial.stage for trial in self.results), None):
            runs = sum(trial.runs for trial in self.results if stage in (None, trial.stage))
            name, value, _ = _shown(best) if (best := self.best(stage)) else ("-", "failed", "")
            yield "global" if stage is None else f"z{stage}", str(runs), value, name

    def front(self) -> list[TuningTrial]:
        """Return the results that are better than all with as little memory, the best first."""
        known = sorted(self.measured, key=lambda trial: (-trial.gain, trial.peak))
        return [t for n, t in enumerate(known) if all(t.peak < better.peak for better in known[:n])]

    def notes(self) -> list[str]:
        """Return what else to know of the results: a second best with less memory, and failures."""
        front = self.front()
        near = [t for t in front if front[0].gain - t.gain <= _CLOSE * abs(front[0].gain)]
        if len(near) < 2:
            return self.failures()
        name, value, _ = _shown(near[-1])
        saved = (near[0].peak - near[-1].peak) / 1e9
        close = (
            f"{name} is within {_CLOSE:.0%} of the best ({value}) with {saved:.3g} GB less memory"
        )
        return [close, *self.failures()]

    def failures(self) -> list[str]:
        """Return a line for each trial without a result, with the reason."""
        failed = [trial.outcome for trial in self.results if trial.gain == NO_GAIN]
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
        peaks = [(*_shown(trial), "front" * (trial in front)) for trial in self.measured]
        lines = [*_aligned(_TITLES, [*self._rows()]), ""]
        if peaks:
            lines += [*_aligned((*titles, "memory, GB", ""), peaks), ""]
        return "\n".join([*lines, *self.notes(), end]) + "\n"


def _shown(trial: TuningTrial) -> tuple[str, str, str]:
    """Return name, value and memory of a result."""
    return trial.outcome.name, f"{abs(trial.gain):.6g}", f"{trial.peak / 1e9:.3g}"


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
