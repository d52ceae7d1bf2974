"""The handlers of `checkpoint.on_signal` in one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from ranks import on_ranks

from engine.logs import logged
from engine.toys import engine_of, train
from hadal.engine.preemption import Preemption
from hadal.errors import EXIT_PREEMPTED, UsageError

SECTION = {"on_signal": {"signals": ["SIGUSR1"]}}


@on_ranks(1)
def test_the_programs_handlers_come_back() -> None:
    heard = []

    def own(number: int, _: Any) -> None:
        heard.append(number)

    signal.signal(signal.SIGUSR1, own)
    with logged() as told:
        engine = engine_of(1, checkpoint=SECTION)
    assert "checkpoint.on_signal replaces the program's handler of SIGUSR1" in told
    with pytest.raises(UsageError, match="another engine of this program obeys signals"):
        engine_of(1, checkpoint=SECTION)
    faults: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine_of(1, checkpoint=SECTION)
        except UsageError as error:
            faults.append(error)

    assert not engine.is_preempted
    train(engine, range(2))
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 20
    while not engine.is_preempted and time.monotonic() < until:
        train(engine, range(1))
        time.sleep(0.01)
    assert engine.is_preempted
    with logged() as told:
        train(engine, range(2))  # it goes on
    assert len([line for line in told if "the program continues training" in line]) == 1
    with pytest.raises(SystemExit) as left:
        engine.leave_preempted()
    assert left.value.code == EXIT_PREEMPTED
    engine.destroy()
    assert heard == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]  # the program's own again
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "only the main thread can receive signals" in str(faults[0])
    other = engine_of(1, checkpoint=SECTION)  # not two at a time, but one after the other
    assert Preemption.present() is not None
    other.destroy()
    plain = engine_of(1)
    assert not plain.is_preempted
    with pytest.raises(UsageError, match=r"needs checkpoint\.on_signal; set it"):
        plain.leave_preempted()
    plain.destroy()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@on_ranks(1)
def test_signals_to_forked_children_are_theirs() -> None:
    """A forked child, such as a data loader's worker, survives SIGUSR1 and ends at SIGTERM."""
    section = {"on_signal": {"signals": ["SIGUSR1", "SIGTERM"]}}
    engine = engine_of(1, checkpoint=section)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGUSR1)
    time.sleep(0.2)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    train(engine, range(2))
    assert not engine.is_preempted
    engine.destroy()
