"""Collectives under way, without ranks."""

from __future__ import annotations

import signal

import pytest
import torch

from hadal.comm.pending import Pending, finished, relayed
from hadal.comm.works import PairMessage
from hadal.errors import CommunicationError


class Failing:
    """A call that ends with a fault."""

    def __init__(self, fault: BaseException) -> None:
        self._fault = fault

    def wait(self) -> None:
        raise self._fault


@pytest.mark.parametrize("fault", [OSError("no disk"), MemoryError(), KeyboardInterrupt()])
def test_a_fault_of_any_kind_ends_a_wait_in_a_thread(fault: BaseException) -> None:
    first = Pending("a gather", [Failing(fault)])
    pending = relayed(first, lambda: finished("a second hop"), torch.device("cpu"))
    with pytest.raises(type(fault)):
        pending.wait()


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_fault_of_the_backend_names_the_operation(is_relayed: bool) -> None:
    pending = Pending("a gather", [Failing(RuntimeError("ended"))])
    if is_relayed:
        pending = relayed(pending, lambda: finished("a second hop"), torch.device("cpu"))
    with pytest.raises(CommunicationError, match="a gather failed on rank 0: ended"):
        pending.wait()


def test_a_fault_names_the_rank() -> None:
    class Arrives:
        def wait(self) -> None:
            pass

    letters = [PairMessage(Arrives(), 4), PairMessage(Failing(RuntimeError("ended")), 3)]
    with pytest.raises(CommunicationError, match="a gather failed on rank 0, with rank 3: ended"):
        Pending("a gather", letters).advance()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            "connection closed by process 7 of this host",
            "rank 0 lost rank 3 in a gather: connection closed by process 7 of this host. Rank 3"
            " died (see its own message), or ended after fewer steps (uneven data?).",
        ),
        (
            "[pair.cc:553] Connection reset by peer [::1]:41",
            "rank 0 lost rank 3 in a gather: [pair.cc:553] Connection reset by peer [::1]:41.",
        ),
        (
            "timed out after 30 s",
            "rank 0 waited in vain for rank 3 in a gather: timed out after 30 s. Rank 3 waits"
            " elsewhere, hangs, or cannot be reached over the network.",
        ),
        (
            "16 bytes were sent where 64 are expected",
            "rank 0 and rank 3 are out of step in a gather: 16 bytes were sent where 64 are"
            " expected. Their programs differ, or an exception (Ctrl-C, a signal)",
        ),
    ],
)
def test_each_kind_of_fault_has_words_of_its_own(found: str, told: str) -> None:
    with pytest.raises(CommunicationError) as caught:
        Pending("a gather", [PairMessage(Failing(RuntimeError(found)), 3)]).wait()
    assert str(caught.value).startswith(told)


def test_the_exception_of_a_signals_handler_is_not_blamed_on_a_rank() -> None:
    """As that of torch's DataLoader when one of its workers is killed."""

    def handler(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")

    class Waits:
        def wait(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker") as caught:
            Pending("a gather", [PairMessage(Waits(), 3)]).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not isinstance(caught.value, CommunicationError)
