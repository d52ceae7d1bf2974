"""The page: figures, charts and tables of one run or of several, in one self-contained file."""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hadal.errors import UsageError
from hadal.plugins.monitor.report.run import (
    RunRecord,
    Series,
    Values,
    files_of,
    read_run,
    smoothed,
    summaries_of,
    thinned,
    understood,
)
from hadal.units import shown_binary

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


_MOST_ROWS = 200
_UNKNOWN = "not measured"


def write_page(
    places: Sequence[Path], output: Path | None = None, reload_s: float | None = None
) -> tuple[Path, bool]:
    """Write the page of one run or several, and return its path and whether all runs have ended.

    Args:
        places: the runs' directories, their files, or directories of several runs; searches' too.
        output: the page; by default `report.html` in the directory that has all of these.
        reload_s: after how many seconds an open page loads itself again until all runs have ended.

    Raises:
        UsageError: there is no run, or one is damaged, or plotly is not installed.
        OSError: the page cannot be written.
    """
    searches = list(dict.fromkeys(file.resolve() for p in places for file in summaries_of(p)))
    files = list(dict.fromkeys(file.resolve() for place in places for file in files_of(place)))
    top = Path(os.path.commonpath([file.parent for file in (*files, *searches)]))
    runs = {_name(file, top): read_run(file) for file in files}
    is_over = all(run.end is not None for run in runs.values())
    path = output or top / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    with understood(*files):
        about = [{"name": _name(file, top), **_search(file)} for file in searches]
        text = page_of(runs, about, None if is_over else reload_s)
    written = path.with_name(f".{path.name}.tmp")  # a browser never loads half a page
    written.write_text(text, encoding="utf-8")
    written.replace(path)
    return path, is_over


def _name(file: Path, top: Path) -> str:
    return file.parent.name if file.parent == top else str(file.parent.relative_to(top))


def _search(summary: Path) -> dict[str, Any]:
    """Return the tables, the other lines and the picture of a search for a configuration."""
    tables: list[list[list[str]]] = []
    notes = []
    for is_row, lines in groupby(summary.read_text(encoding="utf-8").splitlines(), _is_row):
        if is_row:
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            tables.append([rows[0], *rows[2:]])
        else:
            notes += [line for line in lines if line]
    picture = summary.with_suffix(".png")
    encoded = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
    return {"tables": tables, "notes": notes, "picture": encoded, "folder": str(summary.parent)}


def _is_row(line: str) -> bool:
    return line.startswith("|")


def page_of(
    runs: Mapping[str, RunRecord], searches: Sequence[Mapping[str, Any]], reload_s: float | None
) -> str:
    """Return the page as HTML: plotly.js, which is 4.8 MB, and up to a megabyte."""
    import jinja2
    from markupsafe import Markup, escape

    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise UsageError("a report needs plotly for its charts: pip install plotly") from None

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["significant"] = _significant
    # Keys and paths break after dots, underscores and slashes only.
    environment.filters["breakable"] = lambda text: Markup(
        "".join(f"{escape(one)}<wbr>" if one in "._/" else escape(one) for one in str(text))
    )
    return environment.get_template("page.html.j2").render(
        title=_title(runs),
        plotly=Markup(get_plotlyjs()),
        data=Markup(_data(runs)),
        reload_s=reload_s,
        names=list(runs),
        figures=_side_by_side([dict(_figures(run)) for run in runs.values()]),
        differences=_differences(list(runs.values())),
        runs=[{"name": name, **_details(run)} for name, run in runs.items()],
        searches=searches,
    )


def _title(runs: Mapping[str, RunRecord]) -> str:
    if not runs:
        return "Autotuning"
    classes = dict.fromkeys(run.description["model"]["class"] for run in runs.values())
    names = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs"
    return f"{', '.join(classes)}, {names}"


def _data(runs: Mapping[str, RunRecord]) -> str:
    content = {"runs": list(runs), "charts": charts_of(list(runs.values()))}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# ---- figures -------------------------------------------------------------------------------------


def _figures(run: RunRecord) -> Iterator[tuple[str, str | None]]:
    """Yield the figures by name; None if one was not measured."""
    model, series, about = run.description["model"], run.series, run.description
    yield "parameters", f"{model['parameters']:,}"
    yield "trained", f"{model['trained']:,}"
    yield "ranks", str(about["world_size"])
    yield "updates", f"{run.updates:,}"
    losses = series["train_loss"].values if "train_loss" in series else None
    yield "loss", None if losses is None else f"{losses[0]:.4g} → {losses[-1]:.4g}"
    for label, name in (("samples/s", "samples_per_sec"), ("tokens/s", "tokens_per_sec")):
        yield label, f"{_median(series[name].values):,.1f}" if name in series else None
    peak = series.get("peak_memory_bytes")
    yield "peak memory", None if peak is None else shown_binary(int(max(peak.values)))
    mfu = (run.profile or {}).get("mfu")
    yield "MFU (profiled)", None if mfu is None else f"{100 * mfu:.1f} %"
    skipped = series.get("skipped_steps")
    yield "skipped updates", None if skipped is None else f"{int(skipped.values[-1]):,}"
    yield "time", str(datetime.timedelta(seconds=round(run.duration_s)))
    yield "state", _state(run)


def _state(run: RunRecord) -> str:
    if run.end is None:
        return "running, or killed"
    error = run.end.get("error")
    return f"ended by {error.partition(':')[0]}" if error else "ended"


def _median(values: Any) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median_high(finite) if finite else math.nan


def _side_by_side(rows: Sequence[Mapping[str, str | None]]) -> dict[str, list[str]]:
    """Return each name that some run has a value of, with every run's value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) or _UNKNOWN for row in rows] for name in names}


def _differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return what the runs were given that differs: ranks, versions and configuration."""
    about = ("model", "ranks", "hosts", "versions", "commit", "config")
    flat = [dict(_flat({name: run.description.get(name) for name in about})) for run in runs]
    rows = {
        name: [row.get(name, "–") for row in flat]
        for name in dict.fromkeys(name for row in flat for name in row)
    }
    return {name.removeprefix("config."): row for name, row in rows.items() if len(set(row)) > 1}


# ---- one run -------------------------------------------------------------------------------------


def _details(run: RunRecord) -> dict[str, Any]:
    about = run.description
    machine = about["machine"]
    nbytes, devices = machine.get("device_memory"), machine.get("devices")
    changed = {"device_memory": shown_binary(nbytes)} if nbytes else {}
    return {
        "starts": [_when(each["time"]) for each in run.starts],
        "last": ("ended", _when(run.end["time"]))
        if run.end
        else ("last update", _when(run.starts[0]["time"] + run.duration_s)),
        "error": (run.end or {}).get("error"),
        "warnings": [{**each, "when": _when(each["time"])} for each in run.warnings[-_MOST_ROWS:]],
        "checkpoints": [{**each, "when": _when(each["time"])} for each in run.checkpoints],
        "states": {
            name: shown_binary(n) for name, n in (run.memory or {"bytes": {}})["bytes"].items()
        },
        "modules": _modules(run),
        "compression": run.compression[:_MOST_ROWS],
        "communication": run.communication[:_MOST_ROWS],
        "settings": _settings(run),
        "machine": [
            ("command", about.get("command") or "not recorded"),
            ("directory", about.get("directory") or "not recorded"),
            ("commit", about.get("commit") or "no git repository"),
            ("hosts", _hosts(about.get("hosts") or {})),
            *_flat({**machine, **changed, "devices": ", ".join(map(str, devices or ())) or "none"}),
            *_flat({name: about[name] for name in ("versions", "ranks")}),
        ],
    }


def _hosts(ranks: Mapping[str, int]) -> str:
    names = [f"{host} ({number} ranks)" for host, number in ranks.items()]
    return ", ".join(names) or "not recorded"


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
    root = _folded([run.profile["modules"]])
    rows: list[dict[str, Any]] = []

    def add(module: Mapping[str, Any], depth: int) -> None:
        rows.append(
            {
                **{key: module[key] for key in ("name", "class", "parameters", "forward_macs")},
                "depth": depth,
                "macs": _share(module["forward_macs"], root["forward_macs"]),
                "time": _share(module["forward_seconds"], root["forward_seconds"]),
            }
        )
        for child in module["children"]:
            add(child, depth + 1)

    add(root, 0)
    return rows[:_MOST_ROWS]


def _folded(alike: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return modules of the same form as one, the sum of all; so too neighbours below them."""
    first, last, count = alike[0], alike[-1], len(alike)
    seconds = [each["forward_seconds"] for each in alike]
    children: list[list[Mapping[str, Any]]] = []
    for place, child in enumerate(first["children"]):
        column = [each["children"][place] for each in alike]
        is_numbered = child["name"].isdigit()
        if place and is_numbered and _form(child) == _form(first["children"][place - 1]):
            children[-1] += column
        else:
            children.append(column)
    return {
        "name": first["name"]
        if first["name"] == last["name"]
        else f"{first['name']}–{last['name']}",
        "class": first["class"] if count == 1 else f"{count} × {first['class']}",
        "parameters": sum(each["parameters"] for each in alike),
        "forward_macs": sum(each["forward_macs"] for each in alike),
        "forward_seconds": None if None in seconds else sum(seconds),
        "children": [_folded(each) for each in children],
    }


def _form(module: Mapping[str, Any]) -> tuple[Any, ...]:
    counts = (module["class"], module["parameters"], module["forward_macs"])
    return (*counts, *((child["name"], _form(child)) for child in module["children"]))


def _share(part: float | None, whole: float | None) -> str:
    return _UNKNOWN if part is None or not whole else f"{100 * part / whole:.1f}"


def _significant(value: float | None) -> str:
    """Format a figure with three digits; zero is what no clock has measured."""
    return f"{value:,.3g}" if value and math.isfinite(value) else _UNKNOWN


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
