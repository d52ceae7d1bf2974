"""Inspection of a folder of checkpoints: their contents, and damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from hadal.checkpoint import folders
from hadal.checkpoint.contents import WEIGHT
from hadal.checkpoint.export import Progress, untold
from hadal.checkpoint.files import Given, is_folder, items_of, location_of, storage_of
from hadal.checkpoint.formats.deepspeed import faults_of_files
from hadal.checkpoint.formats.registry import format_of, open_source
from hadal.checkpoint.index import INDEX
from hadal.checkpoint.opening import folder_of
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.storage import Location, StorageItem
from hadal.errors import CheckpointError, HadalError


@dataclass(frozen=True, slots=True)
class Holding:
    """The values of one kind and dtype in a checkpoint."""

    kind: str
    dtype: str
    tensors: int
    numel: int
    nbytes: int
    """The stored bytes; weights that are their rounded masters are not stored."""


@dataclass(slots=True)
class CheckpointReport:
    """The contents and faults of one checkpoint."""

    tag: str
    folder: str
    is_latest: bool
    writer: str = "unknown"
    stage: int | None = None
    world_size: int | None = None
    parts: int = 1
    """The number of model-parallel parts."""
    global_steps: int | None = None
    saved_at: float | None = None
    parameters: int = 0
    """Elements of all weights; tied ones count once, those in several parts once for each part."""
    file_count: int = 0
    file_nbytes: int = 0
    holdings: list[Holding] = field(default_factory=list)
    checked: bool = False
    """True if every byte was compared with its checksum."""
    faults: list[str] = field(default_factory=list)


def inspected(
    path: Given, tag: str | None = None, *, verify: bool = True, progress: Progress = untold
) -> list[CheckpointReport]:
    """Inspect one checkpoint, or all in a folder in the order of their steps.

    `progress` is called with the bytes of each file that was compared with its checksum.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = location_of(path)
    if tag is not None or format_of(path):
        folder = folder_of(path, tag)
        return [_report(folder, _latest(folder.parent), verify, progress)]
    if not is_folder(path):
        raise CheckpointError(
            f"{path} is not a directory; pass the directory given to save_checkpoint"
        )
    names = [item.name for item in items_of(path) if not item.name.startswith(".")]
    found = [path / name for name in names if format_of(path / name)]
    reports = [report for folder in found if (report := _stable_report(folder, verify, progress))]
    if not reports:
        folder_of(path)  # raises with the reason
        raise CheckpointError(f"{path} holds no checkpoint")
    # Read last, as the job may have saved since.
    latest = _latest(path)
    for report in reports:
        report.is_latest = report.tag == latest
    is_here = latest is None or latest in {report.tag for report in reports}
    if not is_here and not format_of(path / str(latest)):
        lost = f"{path / folders.LATEST} names {latest!r}, but there is no such checkpoint"
        reports.append(CheckpointReport(str(latest), str(path / str(latest)), True, faults=[lost]))
    return sorted(reports, key=lambda report: (report.global_steps or 0, report.tag))


def _stable_report(folder: Location, verify: bool, progress: Progress) -> CheckpointReport | None:
    """Inspect a folder, again if a save replaces it; None if it was removed."""
    while True:
        before = _identity_of(folder)
        report = _report(folder, None, verify, progress)
        if before is None or not report.faults:
            break
        if _identity_of(folder) == before:
            break
    return report if before is not None else None


def _identity_of(folder: Location) -> StorageItem | None:
    """Return an item that changes if another checkpoint replaces this one; None if missing."""
    with suppress(OSError):
        return storage_of(folder).find(folder / INDEX) or storage_of(folder).find(folder)
    return None


def _latest(folder: Location) -> str | None:
    with suppress(CheckpointError):
        if (found := folders.find(folder, None)) is not None:
            return found.name
    return folders.latest_tag(folder)


def _report(
    folder: Location, latest: str | None, verify: bool, progress: Progress
) -> CheckpointReport:
    report = CheckpointReport(folder.name, str(folder), folder.name == latest)
    try:
        source = open_source(folder)
    except HadalError as error:
        report.faults.append(str(error))
        return report
    try:
        _describe(report, source)
        if verify:
            report.faults += [*_damage(source, progress), *faults_of_files(source, folder)]
            report.checked = True
    finally:
        source.close()
    return report


def _describe(report: CheckpointReport, source: Source) -> None:
    report.stage, report.world_size = source.stage, source.world_size
    report.writer, report.saved_at = source.writer, source.saved_at
    report.global_steps = _steps(source.scalars)
    report.parts = source.parts
    report.holdings = _holdings(source)
    report.parameters = sum(one.numel for one in report.holdings if one.kind == WEIGHT)
    for path in source.files:
        with suppress(OSError):
            if (item := storage_of(path).find(path)) is not None:
                report.file_nbytes += item.nbytes
                report.file_count += 1


def _steps(scalars: Any) -> int | None:
    counters = scalars.get("counters", {}) if isinstance(scalars, dict) else {}
    steps = counters.get("global_steps")
    return steps if isinstance(steps, int) else None


def _holdings(source: Source) -> list[Holding]:
    found: dict[tuple[str, torch.dtype], list[Entry]] = {}
    for part in range(source.parts):
        for (_, kind), entry in source.of_part(part).entries.items():
            found.setdefault((kind, entry.dtype), []).append(entry)
    return [
        Holding(
            kind,
            str(dtype).removeprefix("torch."),
            len(entries),
            sum(entry.numel for entry in entries),
            sum(entry.numel for entry in entries if not entry.is_rounded) * dtype.itemsize,
        )
        for (kind, dtype), entries in found.items()
    ]


def _damage(source: Source, progress: Progress) -> Iterator[str]:
    """Yield the fault of each file that is missing or damaged; `progress` is called after each."""
    for check, nbytes in source.checks():
        try:
            check()
        except CheckpointError as error:
            yield str(error)
        progress(nbytes)
