"""Turns the runs into rows, ratios, goal lines, JSON and a chart."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from peers.launch import Run
from peers.settings import Contestant, Workload, is_default

STEP_GOALS = {"deepspeed": 0.6, "fsdp2": 0.7, "ddp": 1.0, "zero_redundancy": 1.0}
OFFLOAD_GOAL = 1.03
INIT_GOAL_S = 2.0
IMPORT_GOAL_S = 0.2


@dataclass(frozen=True)
class Part:
    """One part of a step, measured separately: its seconds, if it ran, and its bytes."""

    seconds: float | None
    bytes: int

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.bytes / self.seconds / 1e9 if self.bytes and self.seconds else None


@dataclass(frozen=True)
class Turns:
    """Ratios of steps with offload to those without, in turns in one process: medians."""

    clock: float
    """Ratio of the slower rank's seconds."""
    processor: float
    """Ratio of the processor seconds of all ranks."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> Turns:
        """Create it from the ranks' measurements."""

        def ratio(kind: str, merge: Callable[[tuple[float, ...]], float]) -> float:
            ours, plain = (
                [merge(each) for each in zip(*(rank[way][kind] for rank in ranks), strict=True)]
                for way in ("with", "without")
            )
            return median(a / b for a, b in zip(ours, plain, strict=True))

        return cls(ratio("clock", max), ratio("processor", sum))


@dataclass
class Results:
    """All measurements of one invocation; None for a round in which a contestant failed."""

    workload: Workload
    runs: dict[Contestant, list[Run | None]] = field(default_factory=dict)
    failures: dict[Contestant, str] = field(default_factory=dict)
    imports: dict[str, float | None] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    turns: dict[Contestant, Turns] = field(default_factory=dict)

    def finished(self, contestant: Contestant) -> list[Run]:
        return [run for run in self.runs.get(contestant, []) if run is not None]

    def step(self, contestant: Contestant) -> float:
        return median(seconds for run in self.finished(contestant) for seconds in run.steps)

    def peak(self, contestant: Contestant) -> float:
        return max(run.peak_mib for run in self.finished(contestant))

    def init(self, contestant: Contestant) -> float:
        return median(run.init_s for run in self.finished(contestant))


def hadal_like(contestant: Contestant) -> Contestant:
    """Hadal at the same stage with the same traffic type and offload."""
    return replace(contestant, library="hadal")


def step_ratio(results: Results, ours: Contestant, peer: Contestant) -> float | None:
    """Median over rounds of Hadal's step time divided by the peer's in the same round."""
    pairs = zip(results.runs.get(ours, []), results.runs.get(peer, []), strict=False)
    ratios = [
        median(one.steps) / median(other.steps)
        for one, other in pairs
        if one is not None and other is not None
    ]
    return median(ratios) if ratios else None


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _peak_ratio(results: Results, ours: Contestant, peer: Contestant) -> float | None:
    if not results.finished(ours):
        return None
    return results.peak(ours) / results.peak(peer)


def _row(results: Results, contestant: Contestant) -> list[str]:
    traffic = contestant.traffic + (" (default)" if is_default(contestant) else "")
    name = f"{contestant.library}, {contestant.offload}".removesuffix(", ")
    head = [str(contestant.stage), name, traffic]
    runs = results.finished(contestant)
    if not runs:
        return [*head, *["-"] * 8]
    ours = hadal_like(contestant)
    peer = contestant.library != "hadal"
    return [
        *head,
        _number(results.step(contestant)),
        _number(min(seconds for run in runs for seconds in run.steps)),
        _number(step_ratio(results, ours, contestant) if peer else None, ".2f"),
        _number(results.peak(contestant), ".0f"),
        _number(_peak_ratio(results, ours, contestant) if peer else None, ".2f"),
        _number(median(run.init_mib for run in runs), ".0f"),
        _number(results.init(contestant), ".2f"),
        _number(runs[-1].losses[-1]),
    ]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    padded = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    padded.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(padded)


def step_table(results: Results) -> str:
    """One row per contestant."""
    header = ["stage", "library", "gradients", "step s", "min s", "Hadal/it"]
    header += ["peak MiB", "Hadal/it", "after init MiB", "init s", "loss"]
    return markdown_table(header, [_row(results, contestant) for contestant in results.runs])


def import_table(results: Results) -> str:
    rows = [[name, _number(seconds)] for name, seconds in results.imports.items()]
    return markdown_table(["import", "s beyond torch"], rows)


def step_limit(parts: Mapping[str, Part], stage: int) -> float | None:
    """The sum of computation, traffic and update of a step, from the separate parts.

    Two ranks exchange a share of the gradients and a share of the parameters, and at stage 3
    the parameters a second time. At stage 0 every rank updates all values.
    """
    exchanges = 3 if stage == 3 else 2
    update = "fused AdamW on all values, fp32" if stage == 0 else "fused AdamW on one share, fp32"
    names = ["forward and backward, bf16", update, *["exchange of one share, bf16"] * exchanges]
    seconds = [parts[name].seconds for name in names if name in parts]
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(names) else None


def parts_table(results: Results) -> str:
    rows = [
        [name, _number(part.seconds, ".4f"), _number(part.gigabytes_per_second, ".2f")]
        for name, part in results.parts.items()
    ]
    for stage in sorted({contestant.stage for contestant in results.runs}):
        limit = step_limit(results.parts, stage)
        rows.append([f"stage {stage}: these one after another", _number(limit, ".4f"), "-"])
    return markdown_table(["part alone", "s", "GB/s"], rows)


@dataclass(frozen=True)
class Verdict:
    """One goal, its measurement, and whether it was met (None if not measured)."""

    goal: str
    measured: float | None
    limit: float | None

    @property
    def passed(self) -> bool | None:
        if self.measured is None or self.limit is None:
            return None
        return self.measured <= self.limit

    def __str__(self) -> str:
        word = {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]
        return f"{word}  {self.goal}: {_number(self.measured)} (goal {_number(self.limit)})"


def _least_peak(results: Results, stage: int) -> float | None:
    peaks = [
        results.peak(contestant)
        for contestant in results.runs
        if contestant.stage == stage
        and contestant.library != "hadal"
        and results.finished(contestant)
    ]
    return min(peaks) if peaks else None


def _turn_verdicts(results: Results, stage: int) -> list[Verdict]:
    return [
        Verdict(
            f"stage {stage} step with {contestant.offload} over its own without,"
            f" processor's seconds ({turns.clock:.3f} by the clock)",
            turns.processor,
            OFFLOAD_GOAL if contestant.offload == "optimizer on cpu" else None,
        )
        for contestant, turns in results.turns.items()
        if contestant.stage == stage
    ]


def _stage_verdicts(results: Results, stage: int) -> list[Verdict]:
    plain = Contestant("hadal", stage, "bf16")
    offloaded = [one for one in results.runs if one.offload and hadal_like(one) == one]
    ours = next((one for one in offloaded if one.stage == stage), plain)
    ran = bool(results.finished(ours))
    peers = [one for one in results.runs if one.stage == stage and one.library in STEP_GOALS]
    steps = [
        Verdict(
            f"stage {stage} step over {peer.library}'s",
            step_ratio(results, ours, peer),
            STEP_GOALS[peer.library],
        )
        for peer in peers
        if peer.traffic == "bf16"
    ]
    return [
        *steps,
        *_turn_verdicts(results, stage),
        Verdict(
            f"stage {stage} peak MiB, at most the least of the peers'",
            results.peak(ours) if ran else None,
            _least_peak(results, stage),
        ),
        Verdict(f"stage {stage} init s", results.init(ours) if ran else None, INIT_GOAL_S),
    ]


def judge(results: Results) -> list[Verdict]:
    """The goals of every stage measured, and of the import."""
    stages = sorted({contestant.stage for contestant in results.runs})
    verdicts = [verdict for stage in stages for verdict in _stage_verdicts(results, stage)]
    if results.imports:
        ours = results.imports.get("hadal")
        verdicts.append(Verdict("import s beyond torch", ours, IMPORT_GOAL_S))
    return verdicts


def describe_environment() -> dict[str, str]:
    """The versions and the machine of the figures."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }


def write_json(results: Results, path: Path) -> None:
    """Every single measurement, with its settings."""
    runs = [
        {
            **asdict(contestant),
            "rounds": [None if run is None else asdict(run) for run in rounds],
            "failure": results.failures.get(contestant),
            "hadal_ratio": step_ratio(results, hadal_like(contestant), contestant),
        }
        for contestant, rounds in results.runs.items()
    ]
    document: dict[str, Any] = {
        "environment": describe_environment(),
        "workload": asdict(results.workload),
        "contestants": runs,
        "imports": results.imports,
        "turns": [
            {**asdict(contestant), **asdict(turns)} for contestant, turns in results.turns.items()
        ],
        "parts": {name: asdict(part) for name, part in results.parts.items()},
        "goals": [{**asdict(verdict), "passed": verdict.passed} for verdict in judge(results)],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def draw_chart(results: Results, path: Path) -> None:
    """Draw step time and peak memory as bars, grouped by stage, one for each library that ran."""
    ran = [contestant for contestant in results.runs if results.finished(contestant)]
    bars = [(c.stage, c.library, results.step(c), results.peak(c) / 1024) for c in ran]
    draw_bars(bars, path)


def draw_bars(bars: Sequence[tuple[int, str, float, float]], path: Path) -> None:
    """Draw (stage, library, seconds of a step, GiB at the peak) of each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"hadal": "#0b6e99", "deepspeed": "#e08e45", "fsdp2": "#777777", "ddp": "#c4c4c4"}
    stages = sorted({stage for stage, *_ in bars})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    named: set[str] = set()
    for axis, title, form, value in zip(
        axes,
        ["step, s", "peak memory of a process, GiB"],
        ["{:.2f}", "{:.1f}"],
        [2, 3],
        strict=True,
    ):
        for group, stage in enumerate(stages):
            of_stage = [bar for bar in bars if bar[0] == stage]
            for place, bar in enumerate(of_stage):
                label = None if bar[1] in named or value == 3 else bar[1]
                named.add(bar[1])
                x = group + (place - (len(of_stage) - 1) / 2) * 0.28
                colour = colours.get(bar[1], "#9fc2a8")
                drawn = axis.bar(x, bar[value], width=0.26, color=colour, label=label)
                axis.bar_label(drawn, fmt=form, fontsize=7, padding=1)
        axis.set_xticks(range(len(stages)), [f"ZeRO {stage}" for stage in stages])
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
