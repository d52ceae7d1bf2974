"""The configuration's settings for saving and loading, as frozen values."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# The names of a model saved by itself, and the size of its largest file.
NAME, PICKLE, MAX_SHARD = "model.safetensors", "pytorch_model.bin", "5GB"


class Keep(NamedTuple):
    """Retention limits: a checkpoint that meets either is kept; if both are None, all are kept."""

    last: int | None = None
    """Keep this many of the newest checkpoints."""
    hours: float | None = None
    """Keep checkpoints younger than this."""


class Writing(NamedTuple):
    """Settings for writing files."""

    buffer_nbytes: int = 1 << 26
    """The number of bytes that are copied from a device, summed and written at a time."""
    is_doubled: bool = True
    """True if one such buffer is written while the next is filled."""
    logs_speed: bool = False


class StagingRules(NamedTuple):
    """The place in which an asynchronous save keeps the state until it is written."""

    folder: Path | None = None
    """A directory of this machine; None: host memory."""
    nbytes: int | None = None
    """The most bytes that it may take in a process; None: any number."""


class Rules(NamedTuple):
    """The configuration's settings for saving and loading."""

    verifies: bool = True
    """True if loading compares every byte with its checksum; otherwise only sizes and headers."""
    keep: Keep = Keep()
    tag_validation: str = "Warn"
    """Action if ranks save under different tags: "Ignore", "Warn" or "Fail"."""
    prefers_universal: bool = False
    """True if a load without a tag follows `latest_universal` rather than `latest`."""
    is_node_local: bool = False
    """True if each node has its own folder, which other nodes do not see."""
    is_async: bool = False
    """True if a save returns once the state is copied, and a thread writes the copy."""
    staging: StagingRules = StagingRules()
    uses_masters: bool = True
    """True if masters are loaded from saved masters; otherwise from the weights."""
    writing: Writing = Writing()
    gathers_weights: bool = False
    """True if partitioned weights are gathered to save the model alone."""
    cuts_weights: bool = False
    """True if weights are partitioned."""
    stage: int = 0
    """The ZeRO stage, recorded for tools that read the folder."""
    writes_deepspeed: bool = False
    """True if a save writes the files of DeepSpeed's ranks as well."""
