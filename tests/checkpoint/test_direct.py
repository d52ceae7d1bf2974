"""Bytes past the cache: what goes in comes out, wherever it is cut."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.checkpoint import direct
from hadal.checkpoint.direct import Output, blocks_of

BLOCK = 8192


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(direct, "_free", [])


def written(path: Path, pieces: list[bytes], doubled: bool) -> None:
    with (
        open(path, "wb", buffering=0) as file,
        Output(file.fileno(), doubled=doubled) as output,
    ):
        for piece in pieces:
            output.write(piece)


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.booleans())
def test_what_goes_in_comes_out(data: st.DataObject, doubled: bool, knows_direct: bool) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3 * BLOCK), max_size=5))
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    real = direct._set_direct
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not knows_direct:
            patch.setattr(direct, "_set_direct", lambda descriptor, wanted: False)
        path = Path(folder, "x")
        written(path, pieces, doubled)
        assert path.read_bytes() == whole
        with open(path, "rb", buffering=0) as file:
            assert b"".join(map(bytes, blocks_of(file.fileno(), start, stop))) == whole[start:stop]
            with pytest.raises(OSError, match="ends too early"):
                list(blocks_of(file.fileno(), start, len(whole) + BLOCK))
    assert direct._set_direct is real


@pytest.mark.parametrize("doubled", [False, True])
def test_a_full_disk_is_told(
    doubled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [2 * BLOCK + 100]

    def write(descriptor: int, given: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(descriptor, given[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "x", [bytes(5 * BLOCK)], doubled)
