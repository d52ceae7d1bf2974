"""Which checkpoint a path means, whoever wrote it, and its values as a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hadal.checkpoint import folders
from hadal.checkpoint.deepspeed.folder import is_deepspeed
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.source import Source
from hadal.checkpoint.stored import StoredSource
from hadal.errors import CheckpointError, NotBuiltYetError


def folder_of(path: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint: `path` itself, or the one in it that `tag` or `latest` names.

    Raises:
        CheckpointError: there is none.
    """
    if tag is None and is_checkpoint(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give the one that save_checkpoint wrote to")
    found = folders.find(path, tag)
    if found is None:
        raise CheckpointError(
            f"{path / folders.LATEST} is missing, and {path} is no checkpoint; give a tag, or the"
            " folder of one checkpoint"
        )
    return found


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint."""
    return (folder / folders.INDEX).is_file() or is_deepspeed(folder)


def open_source(
    folder: Path, part: int = 0, names: Sequence[Sequence[str]] | None = None
) -> StoredSource | DeepSpeedSource:
    """The values of a checkpoint: of one part of its model, where that was cut.

    `names` tells the parameters of each param group to a checkpoint that lacks them.

    Raises:
        CheckpointError: it is damaged, or none.
    """
    if (folder / folders.INDEX).is_file():
        return StoredSource(folder, part)
    return DeepSpeedSource(folder, names)


def opened(path: Path, tag: str | None = None, part: int | None = None) -> Source:
    """The values of the checkpoint that a path and a tag mean; of one part, of a model in parts.

    Raises:
        CheckpointError: it is damaged, or none, or has no such part.
        NotBuiltYetError: it holds several parts, and none is named.
    """
    source = open_source(folder_of(path, tag), part or 0)
    parts = source.parts
    if part is None and parts > 1:
        source.close()
        raise NotBuiltYetError(
            f"{source.path} holds a model in {parts} model-parallel parts, and joining them is not"
            f" built yet; take them one by one: part= (--part of a command) 0 to {parts - 1}"
        )
    if part is not None and not 0 <= part < parts:
        source.close()
        raise CheckpointError(f"{source.path} holds a whole model: it has no part {part}")
    return source
