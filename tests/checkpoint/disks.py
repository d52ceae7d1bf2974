"""A file system of fsspec on this machine's disk, which fails as it is told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "faulty"


def nothing(operation: str, path: str) -> None:
    """Let an operation happen."""


class FaultyDisk(LocalFileSystem):
    """Calls `before` with each operation's name and path, which may raise or kill."""

    protocol = SCHEME
    before: Callable[[str, str], None] = staticmethod(nothing)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{SCHEME}://"))

    def _tell(self, operation: str, path: Any) -> None:
        FaultyDisk.before(operation, str(path))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file."""
        self._tell("open" if "r" in mode else "write", path)
        return super().open(path, mode, **options)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> Any:
        """Read a range."""
        self._tell("cat_file", path)
        with super().open(path, "rb") as file:
            file.seek(start or 0)
            return file.read(None if end is None else end - (start or 0))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        """Write a file."""
        self._tell("pipe_file", path)
        with super().open(path, "wb") as file:
            file.write(value)

    def mv(self, source: str, target: str, **options: Any) -> None:
        """Rename a file."""
        self._tell("mv", target)
        super().mv(source, target, **options)

    def info(self, path: str, **options: Any) -> Any:
        """Describe a file."""
        self._tell("info", path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        """List a folder."""
        self._tell("ls", path)
        return super().ls(path, detail=detail, **options)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove a file or a folder."""
        self._tell("rm", path)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


fsspec.register_implementation(SCHEME, FaultyDisk, clobber=True)
