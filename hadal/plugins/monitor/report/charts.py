"""The charts of a report, as values: the page draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hadal.plugins.monitor.report.run import RunRecord, Series, Values, smoothed, thinned

_CURVES = (
    ("Loss", "train_loss", 1),
    ("Learning rate", "lr", 1),
    ("Gradient norm", "grad_norm", 1),
    ("Loss scale", "loss_scale", 1),
    ("Samples per second", "samples_per_sec", 1),
    ("Tokens per second", "tokens_per_sec", 1),
    ("Peak memory, GiB", "peak_memory_bytes", 1 << 30),
)
_TIME = "elapsed_time_ms_"
_PHASES = ("forward", "backward_inner", "backward_allreduce", "step")


def charts_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the charts for which a run has values: title, and curves with their run's number."""
    charts = [
        _chart(title, runs, [_scaled(run, name, divisor) for run in runs])
        for title, name, divisor in _CURVES
    ]
    charts.append(_chart("Model FLOPS utilisation, %", runs, [_mfu(run) for run in runs]))
    charts += _phases(runs)
    for name in dict.fromkeys(name for run in runs for name in run.own):
        charts.append(_chart(name, runs, [run.own.get(name) for run in runs]))
    return [chart for chart in charts if chart["curves"]]


def _scaled(run: RunRecord, name: str, divisor: float) -> Series | None:
    found = run.series.get(name)
    return found and Series(found.samples, found.values / divisor)


def _mfu(run: RunRecord) -> Series | None:
    """Return the utilisation of each update, from the profiled update's operations."""
    profile, rate = run.profile, run.series.get("samples_per_sec")
    if profile is None or rate is None or not profile.get("peak_flops_per_second"):
        return None
    samples = profile["micro_batch"] * profile["data_parallel_size"] * profile["micro_steps"]
    share = profile["flops"] / samples / profile["peak_flops_per_second"]
    return Series(rate.samples, 100 * share * rate.values)


def _chart(
    title: str, runs: Sequence[RunRecord], series: Sequence[Series | None]
) -> dict[str, Any]:
    curves: list[dict[str, Any]] = []
    for number, (run, each) in enumerate(zip(runs, series, strict=True)):
        if each is None or not np.isfinite(each.values).any():
            continue
        window = each.values.size // 50
        has_mean = window >= 4 and title != "Learning rate"
        curves.append(_curve(number, run, "", thinned(each), is_faint=has_mean))
        if has_mean:
            mean = thinned(Series(each.samples, smoothed(each.values, window)))
            curves.append(_curve(number, run, f"mean of {window}", mean))
    return {"title": title, "curves": curves, "is_of_phases": False}


def _phases(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the times of an update: of one run a chart with all phases, else one of each phase."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        found = {
            name.removeprefix(_TIME): each
            for name, each in run.series.items()
            if name.startswith(_TIME)
        }
        for name in [name for name in _PHASES if name in found] or found:
            # All of them at the same updates, few enough for a page.
            each = found[name]
            stride = max(1, each.values.size // 400)
            values = smoothed(each.values, stride)[::stride]
            series = Series(each.samples[::stride], values)
            curves.setdefault(name, []).append(_curve(number, run, name, series))
    if len(runs) == 1:
        stack = [curve for each in curves.values() for curve in each]
        return [{"title": "Time of an update by phase, ms", "curves": stack, "is_of_phases": True}]
    return [
        {"title": f"Time of {name}, ms", "curves": each, "is_of_phases": True}
        for name, each in curves.items()
    ]


def _curve(
    number: int, run: RunRecord, name: str, series: Series, *, is_faint: bool = False
) -> dict[str, Any]:
    return {
        "run": number,
        "name": name,
        "is_faint": is_faint,
        "x": {axis: _plain(at, 10) for axis, at in run.places(series.samples).items()},
        "y": _plain(series.values, 6),
    }


def _plain(values: Values, digits: int) -> list[float | None]:
    """Return numbers for JSON, which has no NaN and no infinity."""
    return [float(f"{each:.{digits}g}") if np.isfinite(each) else None for each in values]
