"""Pictures: drawn with matplotlib, in the format that the file's suffix names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hadal.cli.terminal import CommandError, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1f5fa8", "#d1682b", "#3c8d5a", "#8a4fa3", "#a8842c", "#5f6b76")
INK, FAINT = "#30363d", "#c9d1d9"
_DPI = 150


def picture_path(path: Path) -> Path:
    """Return the file for a picture; one without a suffix becomes a PNG.

    Raises:
        CommandError: matplotlib is missing, or cannot write that format, or there is no such
            directory.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise CommandError(
            "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
        ) from None
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
        note(f"a name without a suffix: the picture is written as {path}")
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix[1:].lower()
    if suffix not in known:
        listed = ", ".join(f".{each}" for each in known)
        raise CommandError(f"{path}: pictures cannot be written as .{suffix}; use one of {listed}")
    if not path.parent.is_dir():
        raise CommandError(f"{path} cannot be written: {path.parent} is not a directory")
    return path


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure, and print its path.

    Raises:
        CommandError: the file cannot be written.
    """
    save_picture(figure, path)
    print(path)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
