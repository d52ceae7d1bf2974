"""Collectives under way, without ranks."""

from __future__ import annotations

import pytest
import torch

from hadal.comm.pending import Pending, finished, relayed
from hadal.comm.works import Letter
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
    pending = Pending("a gather", [Failing(RuntimeError("closed"))])
    if is_relayed:
        pending = relayed(pending, lambda: finished("a second hop"), torch.device("cpu"))
    with pytest.raises(CommunicationError, match="a gather failed: closed"):
        pending.wait()


def test_a_fault_names_the_rank() -> None:
    class Arrives:
        def wait(self) -> None:
            pass

    letters = [Letter(Arrives(), 4), Letter(Failing(RuntimeError("closed")), 3)]
    with pytest.raises(CommunicationError, match=r"a gather failed \(with rank 3\): closed"):
        Pending("a gather", letters).advance()
