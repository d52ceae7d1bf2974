"""All monitors behind one object: order, faults, speed, and the end of a program."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from engine.logs import logged

from hadal.config.monitors import CsvMonitor, JsonlMonitor, TensorBoard
from hadal.errors import UsageError
from hadal.plugins.monitor import monitor as monitor_module
from hadal.plugins.monitor.files import CsvWriter, JsonlWriter
from hadal.plugins.monitor.monitor import Monitor
from hadal.plugins.monitor.opening import TensorBoardWriter
from hadal.plugins.monitor.record import ScalarRecord


class Memory:
    """Records its arguments; raises the configured exception."""

    section = "memory"

    def __init__(self) -> None:
        self.records: list[ScalarRecord] = []
        self.calls: list[str] = []
        self.fault: Exception | None = None

    def _do(self, call: str) -> None:
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault

    def write(self, record: ScalarRecord) -> None:
        self._do("write")
        self.records.append(record)

    def flush(self) -> None:
        self._do("flush")

    def close(self) -> None:
        self._do("close")

    @property
    def names(self) -> list[str]:
        return [name for record in self.records for name in record.values]


def opened(*writers: Memory) -> Monitor:
    monitor = Monitor(enabled=True)
    monitor.open(writers)
    return monitor


class Late:
    """A draft whose values come later."""

    def __init__(self, name: str) -> None:
        self.name, self.is_known, self.was_waited_for = name, False, False

    def records(self) -> Iterable[ScalarRecord]:
        self.was_waited_for |= not self.is_known
        return [ScalarRecord(1, {self.name: 1.0}, 0.0)]


def test_scalars_are_written_in_order_when_they_are_known() -> None:
    memory, first, second = Memory(), Late("first"), Late("second")
    monitor = opened(memory)
    monitor.write_events([("before", 1, 1)])
    assert memory.names == ["before"]
    monitor.write(first)
    monitor.write_events([("between", 1, 1)])
    monitor.write(second)
    second.is_known = True
    monitor.write_known()
    assert memory.names == ["before"]
    first.is_known = True
    monitor.write_known()
    assert memory.names == ["before", "first", "between", "second"]
    third = Late("third")
    monitor.write(third)
    monitor.flush()
    assert third.was_waited_for and memory.names[-1] == "third" and memory.calls[-1] == "flush"
    monitor.close()
    assert memory.calls[-1] == "close"
    monitor.write_events([("too late", 1, 1)])
    assert "too late" not in memory.names


def test_the_end_of_a_program_does_not_wait_for_a_device_that_hangs() -> None:
    memory = Memory()
    monitor = opened(memory)
    hanging = Late("hanging")
    monitor.write_events([("known", 1, 1)])
    monitor.write(hanging)
    monitor.close_in_time(0.05)
    assert not hanging.was_waited_for and memory.names == ["known"]
    assert memory.calls[-1] == "close"


def test_a_monitor_without_writers_checks_its_arguments() -> None:
    elsewhere, off = Monitor(enabled=True), Monitor(enabled=False)
    elsewhere.write_events([("a", 1, 1)])
    with pytest.raises(UsageError):
        elsewhere.write_events([("a", "no number", 1)])
    off.write_events([("a", 1, 1)])
    elsewhere.close()


def test_a_writer_that_raises_is_logged_once_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: clock[0])
    broken, sound = Memory(), Memory()
    monitor = opened(broken, sound)
    with logged() as lines:
        monitor.write_events([("a", 1, 1)])
        broken.fault = OSError(28, "No space left on device")
        monitor.write_events([("b", 1, 1), ("c", 1, 1)])
        assert len(lines) == 1 and "memory: cannot write (OSError: [Errno 28] No space" in lines[0]
        tries = len(broken.calls)
        monitor.write_events([("d", 1, 1)])  # in the pause: not tried
        assert len(broken.calls) == tries
        clock[0] += 1.5
        monitor.write_events([("e", 1, 1)])  # tried in vain: the pause grows to two seconds
        assert len(broken.calls) == tries + 1
        clock[0] += 1.5
        monitor.write_events([("f", 1, 1)])
        assert len(broken.calls) == tries + 1
        clock[0] += 1.0
        broken.fault = None
        monitor.write_events([("g", 1, 1)])
        assert lines[1:] == []
        monitor.close()
    assert broken.names == ["a", "g"] and sound.names == list("abcdefg")
    assert len(lines) == 2
    assert "memory: 5 scalars of this run were not written; the first error was OSErr" in lines[1]


def test_faults_at_the_end_are_reported() -> None:
    broken, sound = Memory(), Memory()
    monitor = opened(broken, sound)
    broken.fault = ConnectionError("the network is dead")
    with logged() as lines:
        monitor.close()
    assert len(lines) == 1 and "memory: cannot write (ConnectionError: the network" in lines[0]
    assert sound.calls == ["flush", "close"]


# ---- speed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensorboard", "csv_monitor", "jsonl_monitor"])
def test_a_thousand_scalars_take_less_than_50_ms(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard" if kind == "tensorboard" else "json")
    where = {"enabled": True, "output_path": str(tmp_path)}
    writer = {
        "tensorboard": lambda: TensorBoardWriter(TensorBoard(**where), {}),
        "csv_monitor": lambda: CsvWriter(CsvMonitor(**where), {}),
        "jsonl_monitor": lambda: JsonlWriter(JsonlMonitor(**where), {}),
    }[kind]()
    monitor = Monitor(enabled=True)
    monitor.open([writer])
    spent = []
    for round_ in range(5):
        events = [(f"Mine/{number % 10}", 0.5, 1000 * round_ + number) for number in range(1000)]
        began = time.thread_time()  # what a program waits on a free machine: other work may run
        monitor.write_events(events)
        spent.append(time.thread_time() - began)
        monitor.flush()  # as TensorBoard's thread does between the updates of a program
    monitor.close()
    assert min(spent) < 0.05, spent


# ---- the end of a program ----------------------------------------------------------------------

PROGRAM = """
import sys
from hadal.config.monitors import CsvMonitor
from hadal.plugins.monitor.files import CsvWriter
from hadal.plugins.monitor.monitor import Monitor
from hadal.plugins.monitor.record import ScalarRecord

class Soon:
    asked = 0

    @property
    def is_known(self):
        self.asked += 1
        return self.asked > 3  # not before the program ends

    def records(self):
        return [ScalarRecord(2, {"loss": 0.5}, 0.0)]

monitor = Monitor(enabled=True)
monitor.open([CsvWriter(CsvMonitor(enabled=True, output_path=sys.argv[1], job_name="job"), {})])
monitor.write_events([("loss", 1, 1)])
monitor.write(Soon())
raise SystemExit(7)
"""


@pytest.mark.slow
def test_known_values_are_written_when_the_program_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "job/loss.csv").read_bytes() == b"step,loss\r\n1,1\r\n2,0.5\r\n"
