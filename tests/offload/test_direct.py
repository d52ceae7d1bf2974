"""Short transfers, and direct transfers that a file system refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as some

from hadal.errors import OffloadError
from hadal.offload.direct import moved, pages
from hadal.offload.file import DiskFile

PAGE = 4096


def coming_short(move: Callable[..., int], limits: list[int]) -> Callable[..., int]:
    """Return a system call that moves at most these numbers of bytes in turn, then everything.

    It begins where a page does, as a direct one must.
    """
    left = list(limits)

    def short(descriptor: int, parts: Sequence[memoryview], place: int) -> int:
        assert place % PAGE == 0
        limit = left.pop(0) if left else 1 << 30
        some_parts = []
        for part in parts:
            some_parts.append(part[:limit])
            limit -= len(some_parts[-1])
        return move(descriptor, [part for part in some_parts if part], place)

    return short


limits = some.lists(some.integers(1, 5 * PAGE), max_size=8)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(written=limits, read=limits, border=some.integers(1, 3 * PAGE))
def test_short_transfers_are_continued(
    written: list[int], read: list[int], border: int, tmp_path: Path
) -> None:
    # More than two in a row without a whole page are the end; here they are not in a row.
    written, read = (
        [limit if number % 3 == 2 or limit >= PAGE else PAGE for number, limit in enumerate(one)]
        for one in (written, read)
    )
    whole = pages(4 * PAGE)
    whole[:] = os.urandom(4 * PAGE)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        parts = [whole[:border], whole[border:]]
        assert moved(coming_short(os.pwritev, written), file.fileno(), parts, PAGE) == 4 * PAGE
        again = pages(4 * PAGE)
        parts = [again[: 4 * PAGE - border], again[4 * PAGE - border :]]
        assert moved(coming_short(os.preadv, read), file.fileno(), parts, PAGE) == 4 * PAGE
    assert again == whole


@pytest.mark.parametrize("there", [0, 100, PAGE, 2 * PAGE + 5])
def test_the_end_of_a_file_ends_a_read(there: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * there)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert moved(os.preadv, file.fileno(), [pages(4 * PAGE)], 0) == there


def test_a_refused_direct_transfer_uses_the_cache(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "file", tmp_path)
    file.reserve(4 * PAGE, "it")
    memory = pages(2 * PAGE)
    memory[:] = os.urandom(2 * PAGE)
    file.write([memory[1 : PAGE + 1]], PAGE, "it")  # no page begins there
    again = pages(PAGE)
    file.read([again], PAGE, "it")
    assert again == memory[1 : PAGE + 1]
    with pytest.raises(
        OffloadError, match=r"'it'|it, 4096 bytes at 16384, cannot be read: it ended after 0"
    ):
        file.read([again], 4 * PAGE, "it")
    file.close()
