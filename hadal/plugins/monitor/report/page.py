"""The page: figures, plots and tables of a run, in one self-contained file."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hadal.plugins.monitor.report.pictures import pictures_of
from hadal.plugins.monitor.report.run import RunRecord, read_run, understood

_MOST_ROWS = 200


def write_page(place: Path, output: Path | None = None) -> Path:
    """Write the page of a run, next to its file by default, and return its path.

    Raises:
        UsageError: `place` is not a run, or damaged, or matplotlib is not installed.
        OSError: the page cannot be written.
    """
    run = read_run(place)
    path = output or run.path.with_name("report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    with understood(run.path):
        text = page_of(run)
    path.write_text(text, encoding="utf-8")
    return path


def page_of(run: RunRecord) -> str:
    """Return the page as HTML, below two megabytes."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=_title(run),
        figures=dict(_figures(run)),
        pictures=pictures_of(run),
        machine=_flat({k: run.description[k] for k in ("machine", "versions", "ranks")}),
        settings=_settings(run),
        modules=_modules(run),
        compression=run.compression[:_MOST_ROWS],
        communication=run.communication[:_MOST_ROWS],
        checkpoints=[{**each, "when": _when(each["time"])} for each in run.checkpoints],
        warnings=[{**each, "when": _when(each["time"])} for each in run.warnings[-_MOST_ROWS:]],
        starts=[_when(each["time"]) for each in run.starts],
    )


def _title(run: RunRecord) -> str:
    return f"{run.description['model']['class']}, {run.path.parent.name}"


def _figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    model, series = run.description["model"], run.series
    yield "parameters", f"{model['parameters']:,}"
    if model["trained"] != model["parameters"]:
        yield "trained", f"{model['trained']:,}"
    yield "ranks", str(run.description["world_size"])
    yield "updates", f"{run.updates:,}"
    if "train_loss" in series:
        losses = series["train_loss"].values
        yield "loss", f"{losses[0]:.4g} → {losses[-1]:.4g}"
    for label, name in (("samples/s", "samples_per_sec"), ("tokens/s", "tokens_per_sec")):
        if name in series:
            yield label, f"{_median(series[name].values):,.1f}"
    if "peak_memory_bytes" in series:
        yield "peak memory", f"{max(series['peak_memory_bytes'].values) / (1 << 30):.2f} GiB"
    if run.profile is not None and run.profile.get("mfu") is not None:
        yield "MFU (profiled)", f"{100 * run.profile['mfu']:.1f} %"
    if "skipped_steps" in series:
        yield "skipped updates", f"{int(series['skipped_steps'].values[-1]):,}"
    yield "time", str(datetime.timedelta(seconds=round(run.duration_s)))
    yield "state", "ended" if run.has_ended else "running, or killed"


def _median(values: Any) -> float:
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


def _settings(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return path, value and origin of each non-default value; of all if no origins are known."""
    values = dict(_flat(run.description["config"]))
    origins = run.description.get("origins") or {}
    names = origins or values
    return [(name, values[name], str(origins.get(name, ""))) for name in names if name in values]


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [
            pair
            for name, inner in value.items()
            for pair in _flat(inner, f"{path}.{name}" if path else str(name))
        ]
    return [(path, value if isinstance(value, str) else json.dumps(value))]


def _modules(run: RunRecord) -> list[dict[str, Any]]:
    """Return the profiled modules in order, each with its depth and fractions of the whole."""
    if run.profile is None:
        return []
    root = run.profile["modules"]
    rows: list[dict[str, Any]] = []

    def add(module: Mapping[str, Any], depth: int) -> None:
        seconds, whole = module["forward_seconds"], root["forward_seconds"]
        rows.append(
            {
                **{key: module[key] for key in ("name", "class", "parameters", "forward_macs")},
                "depth": depth,
                "macs": _share(module["forward_macs"], root["forward_macs"]),
                "time": _share(seconds or 0.0, whole or 0.0),
            }
        )
        for child in module["children"]:
            add(child, depth + 1)

    add(root, 0)
    return rows[:_MOST_ROWS]


def _share(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
