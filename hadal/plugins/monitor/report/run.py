"""A run, read from its file of JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.errors import HadalError, UsageError
from hadal.plugins.monitor.files import FILE, read_lines

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """One scalar over the run."""

    steps: Values
    """Updates so far, at each value."""
    values: Values


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run's file. A killed run lacks only its last line."""

    path: Path
    starts: tuple[Mapping[str, Any], ...]
    """The description at each start: the first one, then those of resumed runs."""
    series: Mapping[str, Series]
    """Curves by name, without the prefix `Train/Samples/`; a repeated update has its last value."""
    seconds: Values
    """The time of each update, in seconds since 1970."""
    profile: Mapping[str, Any] | None = None
    """The flops profiler's last profile."""
    memory: Mapping[str, Any] | None = None
    """Bytes of model states of rank 0, by kind."""
    compression: tuple[Mapping[str, Any], ...] = ()
    """Compressed modules at the end."""
    communication: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[Mapping[str, Any], ...] = ()
    has_ended: bool = False
    """True if the last run ended normally."""
    own: Mapping[str, Series] = field(default_factory=dict)
    """The program's own scalars, by samples."""

    @property
    def description(self) -> Mapping[str, Any]:
        """The description at the last start."""
        return self.starts[-1]

    @property
    def updates(self) -> int:
        """The last update's number."""
        return int(max((each.steps[-1] for each in self.series.values()), default=0))

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last update."""
        last = self.seconds[-1] if self.seconds.size else self.starts[-1]["time"]
        return float(last - self.starts[0]["time"])


def file_of(place: Path) -> Path:
    """Return the file of a run: `place` itself, or the one in that directory.

    Raises:
        UsageError: there is none, or there are several below it.
    """
    if place.is_file():
        return place
    if not place.is_dir():
        raise UsageError(f"{place} does not exist; pass the directory of a run, with {FILE}")
    found = [place / FILE] if (place / FILE).is_file() else sorted(place.glob(f"*/{FILE}"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(one.parent.name for one in found)
        raise UsageError(f"{place} has several runs; pass the directory of one of them: {names}")
    raise UsageError(
        f'{place} has no {FILE}; train with "jsonl_monitor": {{"enabled": true}}, which writes it'
    )


def read_run(place: Path) -> RunRecord:
    """Read a run.

    Raises:
        UsageError: `place` is neither a run's file nor a directory that has one, or the file is
            damaged.
    """
    path = file_of(place)
    with understood(path):
        return _read(path)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Re-raise the errors of a block that uses the contents of a run's file as UsageError."""
    try:
        yield
    except (HadalError, ImportError, OSError):
        raise
    except Exception as error:  # lines of another form may raise any kind
        raise UsageError(
            f"{path} is damaged, or was not written by jsonl_monitor: {type(error).__name__}:"
            f" {error}; pass the directory of another run"
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
    return RunRecord(
        path=path,
        starts=tuple(by_kind["run"]),
        series=_series(updates, "step"),
        seconds=np.array([line["time"] for line in updates], dtype=np.float64),
        profile=_last(by_kind, "profile"),
        memory=_last(by_kind, "memory"),
        compression=tuple((_last(by_kind, "compression") or {}).get("rows", ())),
        communication=tuple((_last(by_kind, "communication") or {}).get("rows", ())),
        checkpoints=tuple(by_kind.get("checkpoint", ())),
        warnings=tuple(by_kind.get("warning", ())),
        has_ended=last_kind == "end",
        own=_series(by_kind.get("events", []), "samples"),
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


def _series(lines: Iterable[Mapping[str, Any]], axis: str) -> dict[str, Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in _HEAD and value is not None:
                short = name.removeprefix("Train/Samples/")
                points.setdefault(short, []).append((float(line[axis]), float(value)))
    return {
        name: Series(*np.array(found, dtype=np.float64).reshape(-1, 2).T)
        for name, found in points.items()
    }


def thinned(series: Series, most: int = 800) -> Series:
    """Return at most about `most` points: the minimum and maximum of each group of steps."""
    count = series.values.size
    if count <= most:
        return series
    kept: set[int] = {0, count - 1}
    for part in np.array_split(np.arange(count), most // 2):
        values = np.nan_to_num(series.values[part], nan=-np.inf)
        kept |= {int(part[values.argmin()]), int(part[values.argmax()])}
    order = np.array(sorted(kept))
    return Series(series.steps[order], series.values[order])


def smoothed(values: Values, window: int) -> Values:
    """Return the mean of each value and the finite ones before it, at most `window` values."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    before = np.concatenate([np.zeros(min(window, values.size)), sums[:-window]])[: values.size]
    fewer = np.concatenate([np.zeros(min(window, values.size)), counts[:-window]])[: values.size]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums - before) / (counts - fewer))
