"""A run as its file of JSON lines describes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.errors import HadalError, UsageError
from hadal.plugins.monitor.files import FILE, read_lines

_SUMMARY, _FIRST_OF_SUMMARY = "summary.txt", b"| tuning_space "

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """One scalar over the run."""

    samples: Values
    """Samples so far on all ranks, at each value."""
    values: Values


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run's file. A killed run lacks only its last line."""

    path: Path
    starts: tuple[Mapping[str, Any], ...]
    """The description at each start: the first one, then those of resumed runs."""
    axes: Mapping[str, Values]
    """Each update's samples, number, tokens (if they were measured) and time in seconds since the
    start. A repeated update counts once, with its last values."""
    series: Mapping[str, Series]
    """The scalars of updates by name, without the prefix `Train/Samples/`."""
    profile: Mapping[str, Any] | None = None
    """The flops profiler's last profile."""
    memory: Mapping[str, Any] | None = None
    """Bytes of model states of rank 0, by kind."""
    compression: tuple[Mapping[str, Any], ...] = ()
    """Compressed modules at the end."""
    communication: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[Mapping[str, Any], ...] = ()
    end: Mapping[str, Any] | None = None
    """The line at the end of the last run; None if it still runs or was killed."""
    own: Mapping[str, Series] = field(default_factory=dict)
    """The program's own scalars."""

    @property
    def description(self) -> Mapping[str, Any]:
        """The description at the last start."""
        return self.starts[-1]

    @property
    def updates(self) -> int:
        """The last update's number."""
        return int(max(self.axes["update"], default=0))

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last update."""
        return float(max(self.axes["seconds"], default=0.0))

    def places(self, samples: Values) -> dict[str, Values]:
        """Return where numbers of samples are on each axis.

        The axes are those of updates, and each own scalar that never falls, such as an epoch.
        """
        places = {"samples": samples}
        knots = self.axes["samples"]
        for name, values in self.axes.items():
            if knots.size and name != "samples":
                places[name] = np.interp(samples, knots, values)
        for name, own in self.own.items():
            if own.values.size > 1 and (np.diff(own.values) >= 0).all():
                places[name] = np.interp(samples, own.samples, own.values, np.nan, np.nan)
        return places


def summaries_of(place: Path) -> list[Path]:
    """Return the summaries of autotuning at `place`: a search's directory, or one of several."""
    found = (*place.glob(_SUMMARY), *sorted(place.glob(f"*/{_SUMMARY}")))
    return [path for path in found if path.read_bytes().startswith(_FIRST_OF_SUMMARY)]


def files_of(place: Path) -> list[Path]:
    """Return the files of the runs at `place`: a file, a run's directory, or one of several runs.

    Raises:
        UsageError: there is neither a run nor a summary of autotuning.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UsageError(f"{place} does not exist; pass the directory of a run, with {FILE}")
    found = [place / FILE] if (place / FILE).is_file() else sorted(place.glob(f"*/{FILE}"))
    if not found and not summaries_of(place):
        raise UsageError(
            f'{place} has no {FILE}; train with "jsonl_monitor": {{"enabled": true}}, which'
            " writes it"
        )
    return found


def read_run(path: Path) -> RunRecord:
    """Read a run's file.

    Raises:
        UsageError: the file is damaged.
    """
    with understood(path):
        return _read(path)


@contextmanager
def understood(*paths: Path) -> Iterator[None]:
    """Re-raise the errors of a block that uses the contents of runs' files as UsageError."""
    try:
        yield
    except (HadalError, ImportError, OSError):
        raise
    except Exception as error:  # lines of another form may raise any kind
        raise UsageError(
            f"{' or '.join(map(str, paths))} is damaged, or was not written by jsonl_monitor:"
            f" {type(error).__name__}: {error}; pass the directory of another run"
        ) from error


def _read(path: Path) -> RunRecord:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    last_kind = ""
    for line in read_lines(path):
        last_kind = str(line.get("kind"))
        by_kind.setdefault(last_kind, []).append(line)
    if not by_kind.get("run"):
        raise UsageError(f'{path} has no line of kind "run"; it is not a run\'s file')
    updates = _last_of_each(by_kind.get("update", []))
    series = _series(updates)
    return RunRecord(
        path=path,
        starts=tuple(by_kind["run"]),
        axes=_axes(updates, series, by_kind["run"][0]["time"]),
        series=series,
        profile=_last(by_kind, "profile"),
        memory=_last(by_kind, "memory"),
        compression=tuple((_last(by_kind, "compression") or {}).get("rows", ())),
        communication=tuple((_last(by_kind, "communication") or {}).get("rows", ())),
        checkpoints=tuple(by_kind.get("checkpoint", ())),
        warnings=tuple(by_kind.get("warning", ())),
        end=_last(by_kind, "end") if last_kind == "end" else None,
        own=_series(by_kind.get("events", [])),
    )


def _last(by_kind: Mapping[str, list[dict[str, Any]]], kind: str) -> dict[str, Any] | None:
    return by_kind[kind][-1] if by_kind.get(kind) else None


def _last_of_each(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each update once: a resumed run trained some of them again."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        by_step[int(line["step"])] = line
    return [by_step[step] for step in sorted(by_step)]


_HEAD = {"kind", "step", "samples", "time"}


def _series(lines: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    points: dict[str, dict[float, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in _HEAD and value is not None:
                short = name.removeprefix("Train/Samples/")
                # A resumed run may repeat what it wrote: the last value counts.
                points.setdefault(short, {})[float(line["samples"])] = float(value)
    return {
        name: Series(*np.array(sorted(found.items()), dtype=np.float64).T)
        for name, found in points.items()
    }


def _axes(
    updates: Sequence[Mapping[str, Any]], series: Mapping[str, Series], start: float
) -> dict[str, Values]:
    def column(name: str) -> Values:
        return np.array([line[name] for line in updates], dtype=np.float64)

    samples = column("samples")
    axes = {"update": column("step"), "samples": samples, "seconds": column("time") - start}
    tokens, rate = (series.get(f"{name}_per_sec") for name in ("tokens", "samples"))
    if tokens is not None and rate is not None:
        # The first update has no rate: its samples count as many tokens as those of the second.
        per_sample = np.interp(
            samples,
            tokens.samples,
            tokens.values / np.interp(tokens.samples, rate.samples, rate.values),
        )
        axes["tokens"] = np.cumsum(per_sample * np.diff(samples, prepend=0.0))
    return axes


def thinned(series: Series, most: int = 800) -> Series:
    """Return at most about `most` points: the minimum and maximum of each group."""
    count = series.values.size
    if count <= most:
        return series
    kept: set[int] = {0, count - 1}
    for part in np.array_split(np.arange(count), most // 2):
        values = np.nan_to_num(series.values[part], nan=-np.inf)
        kept |= {int(part[values.argmin()]), int(part[values.argmax()])}
    order = np.array(sorted(kept))
    return Series(series.samples[order], series.values[order])


def smoothed(values: Values, window: int) -> Values:
    """Return the mean of each value and the finite ones before it, at most `window` values."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    before = np.concatenate([np.zeros(min(window, values.size)), sums[:-window]])[: values.size]
    fewer = np.concatenate([np.zeros(min(window, values.size)), counts[:-window]])[: values.size]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums - before) / (counts - fewer))
