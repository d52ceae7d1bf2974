"""Retention: keep the newest and recent checkpoints, and those not saved as `latest`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from hadal.checkpoint import folders
from hadal.checkpoint.files import items_of
from hadal.checkpoint.index import mark_in, read_index
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)
_HOUR = 3600.0
JOBS = "jobs"
"""The index's key of the jobs of a run: each resumed from a checkpoint of the one before it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention limits: a checkpoint that meets either is kept; if both are None, all are kept."""

    last: int | None = None
    """Keep this many of the newest checkpoints."""
    hours: float | None = None
    """Keep checkpoints younger than this."""


def prune(save_dir: Location, saved: str, keep: Keep, jobs: Collection[str]) -> None:
    """Remove old checkpoints that `keep` does not cover; one rank calls it after a save.

    Only complete checkpoints of `jobs` (this job, and those that it resumed from) that were once
    `latest` are removed: one saved with `save_latest=False` belongs to the caller. The one just
    saved (`saved`) and the one that `latest` names are never removed. A checkpoint that cannot be
    removed is logged and kept.
    """
    if keep.last is None and keep.hours is None:
        return
    try:
        ages = sorted(_ages(save_dir, jobs))
    except (CheckpointError, OSError) as error:
        _log.warning("%s: old checkpoints are not removed: %s", save_dir, error)
        return
    spared = {saved, folders.latest_tag(save_dir)}
    for number, (age, name) in enumerate(ages):
        is_new = keep.last is not None and number < keep.last
        is_young = keep.hours is not None and age < keep.hours * _HOUR
        if is_new or is_young or name in spared:
            continue
        try:
            folders.remove(save_dir / name)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is not removed: %s", save_dir / name, error)


def _ages(save_dir: Location, jobs: Collection[str]) -> list[tuple[float, str]]:
    """Return (age in seconds, name) of each complete checkpoint that was saved as the latest."""
    now, ages = time.time(), []
    for folder in folders.all_of(save_dir, with_links=False):
        try:
            content = read_index(folder)
            sizes = {item.name: item.nbytes for item in items_of(folder / mark_in(content))}
            is_whole = all(sizes.get(name) == seal[0] for name, seal in content["files"].items())
            is_own = content[JOBS][-1] in jobs
            if is_whole and is_own and content["was_latest"] is True:
                ages.append((now - float(content["saved_at"]), folder.name))
        except (CheckpointError, OSError, LookupError, TypeError, ValueError, AttributeError):
            continue  # not a complete checkpoint of ours: left alone
    return ages
