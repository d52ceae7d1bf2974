"""Direct file I/O: bytes read equal bytes written, for any chunking."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings, strategies as st

from hadal.offload import direct
from hadal.offload.direct import Kept, Output, blocks_of, read_into

BLOCK = 8192


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(direct, "_DIRECT_NBYTES", 100)
    monkeypatch.setattr(direct, "_free", [])
    # So small ones take longer to keep than to read.
    monkeypatch.setattr(direct, "_TRIED_BLOCKS", sys.maxsize)


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
def test_bytes_read_equal_bytes_written(
    data: st.DataObject, doubled: bool, knows_direct: bool
) -> None:
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
            low, high = kept.start, kept.stop
            now = (bytes(low) + whole[low:high] + bytes(len(whole)))[start:stop]
            assert together(file, start, stop, kept) == now
            out = bytearray(stop - start)
            read_into(memoryview(out), file.fileno(), start, kept)
            assert out == now
            read_into(memoryview(out), file.fileno(), start)
            assert out == bytes(stop - start)
            with pytest.raises(OSError, match="ends too early"):
                read_into(memoryview(bytearray(len(whole) + 1)), file.fileno(), 0, kept)
            with pytest.raises(OSError, match="ends too early"):
                list(blocks_of(file.fileno(), start, len(whole) + BLOCK))
    assert direct.set_direct is real


def test_uncached_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "x", Kept(2 * BLOCK + 1)
    whole = os.urandom(3 * BLOCK + 5)
    path.write_bytes(whole)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    with open(path, "rb", buffering=0) as file:
        assert together(file, 0, len(whole), kept) == whole
        assert (kept.start, kept.stop, kept.room) == (0, 2 * BLOCK, 1)
        os.truncate(path, 0)
        assert together(file, 1, 2 * BLOCK, kept) == whole[1 : 2 * BLOCK]
        with pytest.raises(OSError, match="ends too early"):
            together(file, 1, 2 * BLOCK + 1, kept)


def test_bytes_after_the_cached_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_PATIENCE", 0)
    path, kept = tmp_path / "x", Kept(8 * BLOCK, [(BLOCK + 7, BLOCK + 100)])
    whole = os.urandom(4 * BLOCK + 5)
    path.write_bytes(whole)
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], place: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT and place >= BLOCK:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(descriptor, buffers, place, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with open(path, "rb", buffering=0) as file:
        assert together(file, 0, len(whole), kept) == whole
        assert (kept.start, kept.stop) == (BLOCK, len(whole))
        path.write_bytes(bytes(len(whole)))
        assert together(file, 5, len(whole) - 1, kept) == bytes(BLOCK - 5) + whole[BLOCK:-1]
        assert together(file, 5, BLOCK, kept) == bytes(BLOCK - 5)
    found = kept.whole(BLOCK + 7, BLOCK + 100)
    assert found is not None
    assert found.numpy().tobytes() == whole[BLOCK + 7 : BLOCK + 100]


@settings(max_examples=60)
@given(st.data(), st.integers(0, 4))
def test_extents_get_tensors_of_their_own(data: st.DataObject, blocks: int) -> None:
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
            held = kept.stop
            start = data.draw(st.integers(0, len(whole)))
            expected = (whole[:held] + bytes(len(whole)))[start : len(whole)]
            assert together(file, start, len(whole), kept) == expected
    assert held == min(len(whole), blocks * BLOCK)
    for begin, stop in apart:
        found = kept.whole(begin, stop)
        assert (found is not None) == (begin < stop <= held)
        assert found is None or found.numpy().tobytes() == whole[begin:stop]
    assert kept.whole(0, len(whole) + 1) is None


@pytest.mark.parametrize("missing", [1, 3, 20])
def test_a_few_cache_misses_are_waited_for(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "x", os.urandom(12 * BLOCK)
    path.write_bytes(whole)
    real, asked = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], place: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT and 0 <= place // 4096 - 5 < missing:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        asked.extend([] if flags else [(place // 4096, len(buffers[0]) // 4096)])
        return real(descriptor, buffers, place, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with open(path, "rb", buffering=0) as file:
        assert together(file, 0, len(whole)) == whole
    # (page, pages): each of the first four alone, then all that is left past the cache.
    waited, past = asked[:4], asked[4:]
    assert waited == [(5 + number, 1) for number in range(min(missing, 4))]
    assert sum(pages for _, pages in past) == (24 - 9 if missing > 4 else 0)


def test_memory_that_is_slower_than_the_disk_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_TRIED_BLOCKS", 2)
    block = memoryview(bytearray(b"x" * BLOCK))

    def keep(kept: Kept, seconds: float) -> int:
        for _ in range(2):
            kept.take(block, kept.stop, seconds)
        return kept.stop // BLOCK

    quick, slow = Kept(7 * BLOCK), Kept(7 * BLOCK)
    assert [keep(quick, 60.0) for _ in range(4)] == [2, 4, 6, 7], "until there is no more room"
    assert [keep(slow, 0.0) for _ in range(2)] == [2, 2]
    assert slow.room == 0, "nor for other files"
    assert b"".join(slow.between(1, 2 * BLOCK)) == b"x" * (2 * BLOCK - 1)


@pytest.mark.parametrize("doubled", [False, True])
def test_a_full_disk_raises(doubled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
