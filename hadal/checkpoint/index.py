"""`index.json`: the contents of a checkpoint, as JSON that carries its own checksum."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, NoReturn

from hadal.checkpoint.files import CHECKSUM, Seal, read_small, replace_file
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError

INDEX = "index.json"
FORMAT = 1
MARK = re.compile(r"[0-9a-f]{16}")
"""The mark of a save."""
_HEAD = {"format": FORMAT, "checksum": CHECKSUM}
_LIMIT = 1 << 30
# The index's own checksum covers the file without this line, so a flipped bit never matches.
_SUM = re.compile(rb'\{\n "crc32": "([0-9a-f]{8})",')


def write_index(folder: Location, content: dict[str, Any]) -> None:
    """Write or replace a checkpoint's index atomically, which commits it."""
    # One line per key: the values are long, and only programs read them.
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in {**_HEAD, **content}.items()
    ]
    body = ("{\n " + ",\n ".join(lines) + "\n}").encode()
    line = b'{\n "crc32": "%08x",' % zlib.crc32(body)
    replace_file(folder / INDEX, line + body[1:], str(content.get("save", "")))
    read_index(folder)


def read_index(folder: Location) -> dict[str, Any]:
    """Return a checkpoint's index, verified against its checksum.

    Raises:
        CheckpointError: it is missing, damaged, or of an unsupported version.
    """
    path = folder / INDEX
    raw = read_small(path, _LIMIT)
    found = _SUM.match(raw)
    body = b"{" + raw[found.end() :] if found else b""
    if found is None or zlib.crc32(body) != int(found[1], 16):
        _refuse(path, raw)
    content = strict_json(body, path)
    if (content.get("format"), content.get("checksum")) != (FORMAT, CHECKSUM):
        _refuse(path, raw)
    return content


def mark_in(content: dict[str, Any]) -> str:
    """Return the mark that names the folder of the files.

    Raises:
        ValueError: the index has no such mark.
    """
    mark = content.get("save")
    if not isinstance(mark, str) or not MARK.fullmatch(mark):
        raise ValueError(f"the save's mark is {mark!r}, expected 16 hexadecimal digits")
    return mark


def strict_json(text: str | bytes, path: Location) -> dict[str, Any]:
    """Parse a JSON object; refuse the infinities and NaNs that JSON does not have.

    Raises:
        CheckpointError: the text is not such an object; the message names `path`.
    """
    try:
        content = json.loads(text, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object")
    return content


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _refuse(path: Location, raw: bytes) -> NoReturn:
    """Raise, distinguishing an unsupported version from damage."""
    try:
        content = json.loads(raw)
        version = content["format"] if isinstance(content, dict) else FORMAT
    except (ValueError, RecursionError, KeyError):
        version = FORMAT
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r}, but this version of Hadal reads format {FORMAT}; load"
            " it with the version that wrote it"
        )
    raise CheckpointError(
        f"{path} is damaged: its checksum does not match its contents; use another checkpoint"
    )


def seals_of(content: dict[str, Any], names: list[str], path: Location) -> dict[str, Seal]:
    """Return the expected seal of each named file.

    File names never come from the index, so a forged index cannot point to other files.

    Raises:
        CheckpointError: the index lists other files.
    """
    files = content["files"]
    missing = [name for name in names if name not in files]
    if missing or len(files) != len(names):
        raise CheckpointError(
            f"{path} lists the files {sorted(files)[:8]}, expected {sorted(names)[:8]}"
        )
    if any(type(number) is not int or number < 0 for name in names for number in files[name]):
        raise CheckpointError(f"{path} is damaged: sizes and checksums must be whole numbers")
    return {name: Seal(*files[name]) for name in names}
