"""The plots of a report: SVG whose text colour follows the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hadal.errors import UsageError
from hadal.plugins.monitor.report.run import RunRecord, Series, smoothed, thinned

_TEXT = "#010203"  # placeholder for the page's text colour
_COLOURS = ("#2a8cc0", "#e0823d", "#58a55c", "#b26ab2", "#8a8a8a", "#c0504d")


def pictures_of(run: RunRecord) -> dict[str, str]:
    """Return the plots for which the run has values, by title.

    Raises:
        UsageError: matplotlib is not installed.
    """
    found: dict[str, str] = {}
    series = run.series
    for title, name, unit in (
        ("Loss", "train_loss", ""),
        ("Learning rate", "lr", ""),
        ("Gradient norm", "grad_norm", ""),
        ("Loss scale", "loss_scale", ""),
        ("Samples per second", "samples_per_sec", ""),
        ("Tokens per second", "tokens_per_sec", ""),
        ("Peak memory", "peak_memory_bytes", "GiB"),
    ):
        if name in series and np.isfinite(series[name].values).any():
            divisor = 1 << 30 if unit == "GiB" else 1
            found[title] = _curve(series[name], unit, divisor, is_noisy=name != "lr")
    mfu = _mfu(run)
    if mfu is not None:
        found["Model FLOPS utilisation"] = _curve(mfu, "%", 1, is_noisy=True)
    phases = {
        name.removeprefix("elapsed_time_ms_"): each
        for name, each in series.items()
        if name.startswith("elapsed_time_ms_")
    }
    if phases:
        found["Time of an update by phase"] = _phases(phases)
    if run.memory:
        nbytes = run.memory["bytes"]
        is_large = max(nbytes.values()) >= 1 << 30
        found["Model states of rank 0"] = _bars(
            nbytes, 1 << 30 if is_large else 1 << 20, "GiB" if is_large else "MiB"
        )
    for name, each in run.own.items():
        found[name] = _curve(each, "", 1, is_noisy=True, axis="samples")
    return found


def _mfu(run: RunRecord) -> Series | None:
    """Return the utilisation of each update, from the profiled update's operations."""
    profile, rate = run.profile, run.series.get("samples_per_sec")
    if profile is None or rate is None or not profile.get("peak_flops_per_second"):
        return None
    samples = profile["micro_batch"] * profile["data_parallel_size"] * profile["micro_steps"]
    share = profile["flops"] / samples / profile["peak_flops_per_second"]
    return Series(rate.steps, 100 * share * rate.values)


def _axes() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError(
            "a report needs matplotlib for its plots: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "hadal",
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(5.2, 2.6), constrained_layout=True)
    axis.grid(alpha=0.25, linewidth=0.5)
    return figure, axis


def _svg(figure: Any) -> str:
    import matplotlib
    from matplotlib import pyplot

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hadal"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    # The page decides how wide it is.
    text = re.sub(r'<svg ([^>]*?)height="[^"]+" ', r"<svg \1", text, count=1)
    return re.sub(r'<svg ([^>]*?)width="[^"]+" ', r"<svg \1", text, count=1)


def _curve(
    series: Series, unit: str, divisor: float, *, is_noisy: bool, axis: str = "update"
) -> str:
    figure, axes = _axes()
    few = thinned(series)
    window = max(1, series.values.size // 50)
    is_smoothed = is_noisy and window > 1
    axes.plot(
        few.steps,
        few.values / divisor,
        color=_COLOURS[0],
        linewidth=1,
        alpha=0.35 if is_smoothed else 1,
        marker="." if series.values.size < 3 else None,
    )
    if is_smoothed:
        mean = thinned(Series(series.steps, smoothed(series.values, window)))
        axes.plot(mean.steps, mean.values / divisor, color=_COLOURS[0], linewidth=1.4)
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    return _svg(figure)


def _phases(phases: Mapping[str, Series]) -> str:
    shown = [name for name in ("forward", "backward_inner", "backward_allreduce", "step")]
    present = [name for name in shown if name in phases] or list(phases)
    shortest = min(phases[name].values.size for name in present)
    figure, axes = _axes()
    means = [
        thinned(Series(each.steps[-shortest:], smoothed(each.values[-shortest:], 1)), 10**9)
        for each in (phases[name] for name in present)
    ]
    # All of them at the same updates, few enough for a page.
    stride = max(1, shortest // 400)
    values = [smoothed(each.values, stride)[::stride] for each in means]
    axes.stackplot(means[0].steps[::stride], *values, labels=present, colors=_COLOURS, alpha=0.85)
    # The first updates may take a hundred times as long as the others.
    axes.set_ylim(0, 1.4 * float(np.percentile(np.sum(values, axis=0), 95)))
    axes.set_xlabel("update")
    axes.set_ylabel("ms")
    _legend(axes)
    return _svg(figure)


def _bars(values: Mapping[str, float], divisor: float, unit: str) -> str:
    figure, axes = _axes()
    names: Sequence[str] = list(values)
    drawn = axes.barh(names, [values[name] / divisor for name in names], color=_COLOURS[0])
    axes.bar_label(drawn, fmt="{:.3g}", padding=2, color=_TEXT)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(unit)
    return _svg(figure)


def _legend(axes: Any) -> None:
    legend = axes.legend(fontsize=7, frameon=False, ncols=4, columnspacing=1, loc="upper left")
    for text in legend.get_texts():
        text.set_color(_TEXT)
