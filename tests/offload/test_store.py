"""The disk tier on real files: reads return what was written, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as some

from hadal.config.offload import Aio
from hadal.errors import OffloadError, UsageError
from hadal.offload import DiskStore, aligned

PAGE = 4096


def filled(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    buffer = aligned(nbytes)
    return buffer.copy_(values)


def files_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    nbytes=some.lists(some.integers(0, 9 * PAGE), min_size=1, max_size=4),
    keys=some.builds(
        Aio,
        block_size=some.integers(1, 3 * PAGE),
        queue_depth=some.integers(1, 9),
        intra_op_parallelism=some.integers(1, 3),
        single_submit=some.booleans(),
        overlap_events=some.booleans(),
    ),
    checksums=some.booleans(),
    pages=some.integers(1, 9),
)
def test_reads_return_what_was_written(
    nbytes: list[int], keys: Aio, checksums: bool, pages: int, tmp_path: Path
) -> None:
    """Regions of any length, in chunks of so many pages, all under way at once."""
    portion = pages * (2 if checksums else 1) * PAGE
    store = DiskStore(tmp_path, keys.model_copy(update={"verify_checksums": checksums}))
    regions = [store.allocate(f"region {number}", n) for number, n in enumerate(nbytes)]
    written = [filled(n, seed) for seed, n in enumerate(nbytes)]
    read = [aligned(n) for n in nbytes]
    for start, buffers in ((store.start_write, written), (store.start_read, read)):
        requests = [
            start(region, offset, buffer[offset : offset + portion])
            for region, buffer in zip(regions, buffers, strict=True)
            for offset in range(0, max(region.nbytes, 1), portion)
        ]
        for request in requests:
            request.wait()
            assert request.is_done
    assert all(map(torch.equal, written, read))
    store.close()
    assert files_under(tmp_path) == []


def test_the_short_end_of_a_region_overwrites_nothing_else(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.allocate("it", PAGE + 10)
    store.start_write(region, 0, filled(PAGE + 10)).wait()
    whole = filled(3 * PAGE, 1)
    before = whole.clone()
    store.start_read(region, PAGE, whole[PAGE : PAGE + 10]).wait()
    assert whole[PAGE : PAGE + 10].equal(filled(PAGE + 10)[PAGE:])
    assert whole[:PAGE].equal(before[:PAGE])
    assert whole[PAGE + 10 :].equal(before[PAGE + 10 :])
    store.close()


def test_regions_reserve_their_space_and_free_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    first, second = store.allocate("first", 3 * PAGE), store.allocate("second", 5)
    assert store.path.stat().st_size == store.nbytes == 4 * PAGE
    assert store.path.stat().st_blocks * 512 >= 4 * PAGE
    store.free(first)
    assert store.allocate("third", 2 * PAGE).extent.start == 0
    assert store.nbytes == 4 * PAGE
    store.free(second)
    assert store.path.stat().st_size == store.nbytes == 2 * PAGE
    with pytest.raises(UsageError, match=r"'second' is not a region of .*it was freed"):
        store.free(second)
    with pytest.raises(UsageError, match="it was freed"):
        store.start_read(second, 0, aligned(5))
    store.close()


def test_requests_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    region = store.allocate("it", 3 * PAGE + 10)
    for offset, nbytes in ((1, PAGE), (0, 10), (0, 4 * PAGE), (3 * PAGE, 9), (-PAGE, PAGE)):
        with pytest.raises(UsageError, match=r"of 'it' \(12298 bytes\) cannot be transferred"):
            store.start_write(region, offset, aligned(nbytes))
    for wrong in (
        aligned(2 * PAGE)[1 : PAGE + 1],
        torch.empty(PAGE, dtype=torch.int8),
        aligned(4 * PAGE)[::2],
        aligned(PAGE).view(2, -1),
    ):
        with pytest.raises(UsageError, match="a buffer for the disk must"):
            store.start_read(region, 0, wrong)
    store.close()
    store.close()
    with pytest.raises(UsageError, match="after it was closed"):
        store.start_read(region, 0, aligned(PAGE))
    with pytest.raises(UsageError, match="after it was closed"):
        store.allocate("more", 1)


def test_checksums_cover_cells(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, Aio(block_size=3 * PAGE, verify_checksums=True))
    region = store.allocate("it", 17 * PAGE + 1)
    buffer = filled(17 * PAGE + 1)
    for offset, nbytes in ((PAGE, PAGE), (2 * PAGE, PAGE), (0, 3 * PAGE)):
        with pytest.raises(UsageError, match="both ends must be multiples of 8192"):
            store.start_write(region, offset, buffer[:nbytes])
    store.start_write(region, 0, buffer).wait()
    # Other portions than were written, and over a part of them.
    store.start_write(region, 4 * PAGE, buffer[: 6 * PAGE]).wait()
    again = aligned(17 * PAGE + 1)
    store.start_read(region, 2 * PAGE, again[2 * PAGE :]).wait()
    assert again[4 * PAGE : 10 * PAGE].equal(buffer[: 6 * PAGE])
    assert again[10 * PAGE :].equal(buffer[10 * PAGE :])
    other = store.allocate("other", 8 * PAGE)
    store.start_write(other, 0, buffer[: 4 * PAGE]).wait()
    store.start_read(other, 0, again[: 4 * PAGE]).wait()
    with pytest.raises(
        OffloadError, match=r"'other' is damaged at byte 16384 .*differs from the data written"
    ):
        store.start_read(other, 0, again[: 8 * PAGE]).wait()
    store.close()


def test_a_region_with_a_request_under_way_is_not_freed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, Aio(block_size=PAGE, queue_depth=1))
    region = store.allocate("it", 400 * PAGE)
    request = store.start_write(region, 0, filled(400 * PAGE))
    if not request.is_done:
        with pytest.raises(UsageError, match="with a request under way"):
            store.free(region)
    request.wait()
    store.free(region)
    store.close()


def test_nothing_is_left_of_stores(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    gc.collect()  # what earlier tests have left
    before = held()
    for number in range(4):
        store = DiskStore(tmp_path)
        store.start_write(store.allocate("it", 4 * PAGE), 0, filled(4 * PAGE))
        if number % 2:
            store.close()
        del store
        gc.collect()
    assert held() == before
    assert files_under(tmp_path) == []


def test_a_store_may_be_collected_by_its_own_thread(tmp_path: Path) -> None:
    """The garbage collector may run in any thread."""
    box = [DiskStore(tmp_path)]
    queue = box[0]._queues[0]
    box[0].start_write(box[0].allocate("it", 1), 0, filled(1)).wait()

    class LetsGo:
        count = 1

        def run(self) -> None:
            box.clear()

    assert files_under(tmp_path)
    queue.put([LetsGo()])
    end = time.monotonic() + 30
    while any(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert files_under(tmp_path) == []
