"""Collectives under way, without ranks."""

from __future__ import annotations

import pytest

from hadal.comm.pending import Pending
from hadal.comm.watchdog import Letter
from hadal.errors import CommunicationError


class Failing:
    """A call that ends with a fault."""

    def __init__(self, fault: BaseException) -> None:
        self._fault = fault

    def wait(self) -> None:
        raise self._fault


@pytest.mark.parametrize("fault", [OSError("no disk"), MemoryError(), KeyboardInterrupt()])
def test_a_fault_of_any_kind_ends_a_wait_in_a_thread(fault: BaseException) -> None:
    pending = Pending("a gather", [Failing(fault)])
    assert pending.arrives_within(20.0)
    with pytest.raises(type(fault)):
        pending.advance()


@pytest.mark.parametrize("watched", [False, True])
def test_a_fault_of_the_backend_says_in_what_it_was(watched: bool) -> None:
    pending = Pending("a gather", [Failing(RuntimeError("closed"))])
    assert not watched or pending.arrives_within(20.0)
    with pytest.raises(CommunicationError, match="a gather failed: closed"):
        pending.advance()


def test_a_fault_says_with_which_rank_it_was() -> None:
    class Arrives:
        def wait(self) -> None:
            pass

    letters = [Letter(Arrives(), 4), Letter(Failing(RuntimeError("closed")), 3)]
    with pytest.raises(CommunicationError, match=r"a gather failed \(with rank 3\): closed"):
        Pending("a gather", letters).advance()
