"""One call of torch's: what it is named by, in the log of collectives and in errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.comms_log import Record, numbers_of, opened
from hadal.comm.progress import Begun, Queued, begin
from hadal.comm.start import get_rank
from hadal.comm.watchdog import watched
from hadal.comm.works import NamedWork, failure

Group = dist.ProcessGroup | None

# Not all ranks of a group make these calls, nor in one order.
_OF_TWO = ("send", "recv")


class Call:
    """One call: what it is named by in the log and in errors."""

    __slots__ = ("group", "label", "operation", "tensors", "times")

    def __init__(
        self,
        operation: str,
        tensors: Tensor | Sequence[Tensor],
        group: Group,
        label: str,
        times: int = 1,
    ) -> None:
        self.operation = operation
        self.tensors = tensors
        self.group = group
        self.label = label
        self.times = times

    def run(self, function: Callable[..., Any], *args: Any, is_async: bool, **rest: Any) -> Any:
        """Make it, at once or as a work under way."""
        if torch.compiler.is_compiling():
            return function(*args, **rest)
        record = opened(self.operation, self.tensors, self.group, self.label, self.times)
        name = self.label or self.operation
        begun = None if self.operation in _OF_TWO else begin(self.group, name)
        try:
            if is_async:
                return self._handed(function(*args, **rest), record, begun)
            with watched(name, () if begun is None else (begun,)):
                found = function(*args, **rest)
        except (RuntimeError, dist.DistError) as error:
            raise self.failed(error, record) from error
        if record is not None:
            record.end()
        return found

    def _handed(self, work: Any, record: Record | None, begun: Begun | None) -> Any:
        """The work for the caller: it names its own fault, unless he names what he waits for."""
        if work is None:
            return work
        if self.label and record is None:
            first = self.tensors if isinstance(self.tensors, Tensor) else self.tensors[0]
            return work if begun is None else Queued(work, begun, first.device)
        return NamedWork(work, self.failed, None if record is None else record.parts(1)[0])

    @contextmanager
    def named(self, record: Record | None) -> Iterator[None]:
        """Let a fault say what failed."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise self.failed(error, record) from error

    def failed(self, error: Exception, record: Record | None = None) -> Exception:
        """What to raise where the backend reports `error`."""
        if record is not None:
            record.give_up()
        found = [self.tensors] if isinstance(self.tensors, Tensor) else self.tensors
        nbytes = sum(one.nbytes for one in found) * self.times
        dtype = f" of {found[0].dtype}" if found else ""
        group = self.group if isinstance(self.group, dist.ProcessGroup) else dist.group.WORLD
        name = "" if group is None else f" of the group {group.group_name!r}"
        among = f"{self.operation} of {nbytes} bytes{dtype} among ranks {_shown(self.group)}{name}"
        label = self.label or self.operation
        return failure(label, error, f"{among}, on rank {get_rank()}")


def _shown(group: Group) -> str:
    """The numbers of ranks; of many, the first and the last."""
    numbers = numbers_of(group)
    if len(numbers) > 8:
        return f"[{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}] ({len(numbers)} ranks)"
    return str(list(numbers))
