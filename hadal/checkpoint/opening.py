"""Finding the checkpoint that a path refers to, and opening it as a source."""

from __future__ import annotations

from hadal.checkpoint import folders
from hadal.checkpoint.files import Given, is_folder, location_of
from hadal.checkpoint.formats.registry import format_of, open_source
from hadal.checkpoint.joined import Asked, JoinedSource
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError


def folder_of(path: Given, tag: str | None = None) -> Location:
    """Return a checkpoint's folder: `path` itself, or the one in it that `tag` or `latest` names.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = location_of(path)
    if tag is None and format_of(path) is not None:
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
