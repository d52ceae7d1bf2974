"""The effect of the `aio` keys: the amount under way, and the number of system calls."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.errors import ConfigError
from hadal.offload import DiskStore, aligned
from hadal.offload.requests import Queue

PAGE = 4096


def settings_from(**keys: object) -> Aio:
    return load_config({"train_batch_size": 1, "aio": keys}).aio


class Held:
    """A call that lasts until it is released."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.begun, self.go, self.done = (threading.Event() for _ in range(3))

    def run(self) -> None:
        self.begun.set()
        assert self.go.wait(30)
        self.done.set()


def begun(calls: list[Held], expected: int) -> list[int]:
    """Wait for the expected number of calls to begin, and return them."""
    end = time.monotonic() + 30
    while sum(call.begun.is_set() for call in calls) < expected and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)  # for one too many
    return [number for number, call in enumerate(calls) if call.begun.is_set()]


@pytest.fixture
def held() -> list[Held]:
    return [Held() for _ in range(10)]


@pytest.mark.claims("aio.queue_depth")
@pytest.mark.parametrize("depth", [1, 3])
def test_a_queue_limits_the_blocks_under_way(depth: int, held: list[Held]) -> None:
    queue = Queue(settings_from(queue_depth=depth, single_submit=True), "test")
    queue.put(held[:2])
    queue.put(held[2:])
    assert begun(held, depth) == list(range(depth))
    held[0].go.set()
    assert begun(held, depth + 1) == list(range(depth + 1))
    for call in held:
        call.go.set()
    assert begun(held, 10) == list(range(10))
    queue.close()


@pytest.mark.claims("aio.overlap_events")
def test_without_overlap_a_batch_waits_for_the_one_before(held: list[Held]) -> None:
    queue = Queue(settings_from(queue_depth=4, single_submit=True, overlap_events=False), "test")
    queue.put(held)
    assert begun(held, 4) == [0, 1, 2, 3]
    for call in held[:3]:
        call.go.set()
    assert begun(held, 4) == [0, 1, 2, 3]
    held[3].go.set()
    assert begun(held, 8) == list(range(8))
    for call in held:
        call.go.set()
    assert begun(held, 10) == list(range(10))
    queue.close()


def test_blocks_count_not_calls() -> None:
    calls = [Held(count) for count in (3, 3, 2, 9)]
    queue = Queue(Aio(queue_depth=8), "test")
    queue.put(calls)
    assert begun(calls, 3) == [0, 1, 2]
    for call in calls[:3]:
        call.go.set()
    assert begun(calls, 4) == [0, 1, 2, 3]  # alone, as it never fits
    calls[3].go.set()
    queue.close()


def calls_of_write(folder: Path, settings: Aio, nbytes: int) -> int:
    """Return the kernel's count of system calls for one write."""

    def counted() -> int:
        text = Path("/proc/self/io").read_text()
        return int(text.split("syscw:")[1].split()[0])

    store = DiskStore(folder, settings)
    region, buffer = store.allocate("it", nbytes), aligned(nbytes)
    before = counted()
    store.start_write(region, 0, buffer).wait()
    found = counted() - before
    store.close()
    return found


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel tells no counts")
@pytest.mark.claims("aio", "aio.block_size", "aio.single_submit")
def test_blocks_and_batches_are_system_calls(tmp_path: Path) -> None:
    nbytes = 64 * PAGE
    singly = settings_from(block_size=PAGE, single_submit=True)
    assert calls_of_write(tmp_path, singly, nbytes) == 64
    assert calls_of_write(tmp_path, settings_from(block_size=PAGE), nbytes) == 32
    assert calls_of_write(tmp_path, settings_from(block_size=PAGE, queue_depth=16), nbytes) == 16
    assert calls_of_write(tmp_path, settings_from(block_size=4 * PAGE), nbytes) == 8
    # Up to whole pages.
    odd = settings_from(block_size=4 * PAGE - 1, single_submit=True)
    assert calls_of_write(tmp_path, odd, nbytes) == 16


@pytest.mark.claims("aio.intra_op_parallelism", "aio.thread_count")
@pytest.mark.parametrize("name", ["intra_op_parallelism", "thread_count"])
def test_queues_share_a_request(name: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, settings_from(block_size=PAGE, queue_depth=1, **{name: 3}))
    region, buffer = store.allocate("it", 30 * PAGE), aligned(30 * PAGE)
    buffer.random_(generator=None)
    store.start_write(region, 0, buffer).wait()
    names = {thread.name for thread in threading.enumerate()}
    assert {f"hadal-disk-{number}-0" for number in range(3)} <= names
    assert "hadal-disk-0-1" not in names
    again = aligned(30 * PAGE)
    store.start_read(region, 0, again).wait()
    assert again.equal(buffer)
    store.close()


@pytest.mark.claims("aio.use_gds")
def test_gpudirect_storage_is_refused() -> None:
    settings_from(use_gds=False)
    with pytest.raises(ConfigError, match=r"aio\.use_gds.*GPUDirect Storage.*leave it out"):
        settings_from(use_gds=True)
