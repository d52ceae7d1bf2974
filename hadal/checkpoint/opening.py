"""Finding the checkpoint that a path refers to, and opening it as a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hadal.checkpoint import folders
from hadal.checkpoint.deepspeed.folder import is_deepspeed
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.files import Given, is_file, is_folder, location_of
from hadal.checkpoint.formats.dcp import is_dcp
from hadal.checkpoint.formats.dcp_source import DcpSource
from hadal.checkpoint.index import INDEX
from hadal.checkpoint.joined import Asked, JoinedSource
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location
from hadal.checkpoint.stored import StoredSource
from hadal.errors import CheckpointError


def folder_of(path: Given, tag: str | None = None) -> Location:
    """Return a checkpoint's folder: `path` itself, or the one in it that `tag` or `latest` names.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = location_of(path)
    if tag is None and is_checkpoint(path):
        return path
    if not is_folder(path):
        raise CheckpointError(
            f"{path} is not a directory; pass the directory given to save_checkpoint"
        )
    found = folders.find(path, tag)
    if found is None:
        raise CheckpointError(
            f"{path / folders.LATEST} is missing, and {path} is not a checkpoint; pass a tag or the"
            " folder of one checkpoint"
        )
    return found


def is_checkpoint(folder: Location) -> bool:
    """Return whether a folder is a checkpoint, rather than a folder of them."""
    return is_dcp(folder) or folders.is_complete(folder)


def open_source(
    folder: Location, part: int = 0, names: Sequence[Sequence[str]] | None = None
) -> Source:
    """Open a checkpoint; `part` selects one part of a model saved in model-parallel parts.

    `names` lists the parameters of each param group, for a checkpoint that does not store them.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    if not is_file(folder / INDEX):
        if is_dcp(folder):
            return DcpSource(folder, names)
        if isinstance(folder, Path) or is_deepspeed(folder):
            return DeepSpeedSource(folder, names)
    return StoredSource(folder, part)


def joined(source: Source, asked: Asked | None = None) -> JoinedSource:
    """Return all parts of a checkpoint as one: the whole model, or what one part asks for.

    Raises:
        CheckpointError: the position of a slice is not recorded, or tensors do not fit.
    """
    return JoinedSource([source.of_part(number) for number in range(source.parts)], asked)


def opened(path: Given, tag: str | None = None, part: int | None = None) -> Source:
    """Open the checkpoint that a path and a tag refer to, or one part of it.

    Raises:
        CheckpointError: it is damaged, not a checkpoint, has no such part, or has several parts
            without their positions in the whole model.
    """
    source = open_source(folder_of(path, tag), part or 0)
    if part is None and (source.parts > 1 or source.placements):
        return joined(source)
    if part is not None and not 0 <= part < source.parts:
        source.close()
        raise CheckpointError(f"{source.path} holds a whole model and has no part {part}")
    return source
