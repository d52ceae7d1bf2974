"""Bytes past the cache: what goes in comes out, wherever it is cut."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.checkpoint import direct
from hadal.checkpoint.direct import Kept, Output, blocks_of

BLOCK = 8192


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(direct, "_DIRECT_NBYTES", 100)
    monkeypatch.setattr(direct, "_free", [])


def written(path: Path, pieces: list[bytes], doubled: bool) -> None:
    with (
        open(path, "wb", buffering=0) as file,
        Output(file.fileno(), doubled=doubled) as output,
    ):
        for piece in pieces:
            output.write(piece)


def together(file: BinaryIO, start: int, stop: int, kept: Kept | None = None) -> bytes:
    return b"".join(map(bytes, blocks_of(file.fileno(), start, stop, kept)))


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.booleans())
def test_what_goes_in_comes_out(data: st.DataObject, doubled: bool, knows_direct: bool) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3 * BLOCK), max_size=5))
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    real = direct.set_direct
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not knows_direct:
            patch.setattr(direct, "set_direct", lambda descriptor, wanted: False)
        path = Path(folder, "x")
        written(path, pieces, doubled)
        assert path.read_bytes() == whole
        kept = Kept(data.draw(st.integers(0, 3)) * BLOCK)
        with open(path, "rb", buffering=0) as file:
            if data.draw(st.booleans()):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert together(file, start, stop) == whole[start:stop]
            assert together(file, 0, len(whole), kept) == whole
            path.write_bytes(bytes(len(whole)))
            held = min(len(whole), kept.nbytes)
            assert (
                together(file, start, stop, kept) == (whole[:held] + bytes(len(whole)))[start:stop]
            )
            with pytest.raises(OSError, match="ends too early"):
                list(blocks_of(file.fileno(), start, len(whole) + BLOCK))
    assert direct.set_direct is real


def test_what_is_not_in_the_cache_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "x", Kept(2 * BLOCK + 1)
    whole = os.urandom(3 * BLOCK + 5)
    path.write_bytes(whole)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    with open(path, "rb", buffering=0) as file:
        assert together(file, 0, len(whole), kept) == whole
        assert (kept.nbytes, kept.room) == (2 * BLOCK, 1)
        os.truncate(path, 0)
        assert together(file, 1, 2 * BLOCK, kept) == whole[1 : 2 * BLOCK]
        with pytest.raises(OSError, match="ends too early"):
            together(file, 1, 2 * BLOCK + 1, kept)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 4))
def test_extents_are_held_apart(data: st.DataObject, blocks: int) -> None:
    whole = os.urandom(data.draw(st.integers(100, 3 * BLOCK)))
    edges = data.draw(st.lists(st.integers(0, len(whole)), max_size=6).map(sorted))
    apart = [*zip(edges[::2], edges[1::2], strict=False)]
    kept = Kept(blocks * BLOCK, apart)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "x")
        path.write_bytes(whole)
        patch.delattr(os, "RWF_NOWAIT")
        with open(path, "rb", buffering=0) as file:
            assert together(file, 0, len(whole), kept) == whole
            path.write_bytes(bytes(len(whole)))
            held = min(len(whole), kept.nbytes)
            start = data.draw(st.integers(0, len(whole)))
            expected = (whole[:held] + bytes(len(whole)))[start : len(whole)]
            assert together(file, start, len(whole), kept) == expected
    assert held == min(len(whole), blocks * BLOCK)
    for begin, stop in apart:
        found = kept.whole(begin, stop)
        assert (found is not None) == (begin < stop <= held)
        assert found is None or found.numpy().tobytes() == whole[begin:stop]
    assert kept.whole(0, len(whole) + 1) is None


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
