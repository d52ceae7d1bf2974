"""A process group for tests in which several processes share one accelerator.

NCCL connects one process to each device, so that a single GPU could show nothing of stages 1 to 3.
`staged` takes its place: tensors of the device are copied to pinned host memory, gloo sends them,
and the results are copied back. As in NCCL, all calls of a group run in their order in a stream of
its own, begin after the device's work so far, and only `wait` makes the device's later work follow.
A delay before each copy shows who does not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hadal.device import SideStream

# Names of torch's calls; some have another name in gloo.
_OPERATIONS = {
    **{name: name for name in ("allgather", "allreduce", "alltoall", "alltoall_base", "broadcast")},
    **{name: name for name in ("gather", "recv", "reduce", "reduce_scatter", "scatter", "send")},
    "_allgather_base": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    # of later releases
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_sleeps: list[Callable[[], None]] = []


def register(kind: str) -> None:
    """Make `staged` known as a backend of the accelerator `kind`."""
    dist.Backend.register_backend("staged", StagedGroup, devices=[kind])


@contextmanager
def delayed(sleep: Callable[[], None]) -> Iterator[None]:
    """Call `sleep`, which queues work on the current stream, before each copy of these groups.

    And before all other work beside the device's own stream.
    """
    plain = SideStream.current

    @contextmanager
    def current(self: SideStream) -> Iterator[None]:
        with plain(self):
            sleep()
            yield

    SideStream.current = current  # type: ignore[method-assign]
    _sleeps.append(sleep)
    try:
        yield
    finally:
        SideStream.current = plain  # type: ignore[method-assign]
        _sleeps.clear()


class StagedWork(dist.Work):
    """A call that the group's thread has not finished, or has."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.event: torch.Event | None = None
        self.error: BaseException | None = None
        self.copies: dict[int, Tensor] = {}
        """Host memory of the tensors, by their identity."""

    def is_completed(self) -> bool:
        """Return True if the results are in the device's memory."""
        return self.over.is_set() and (self.event is None or bool(self.event.query()))

    def wait(self, timeout: Any = None) -> bool:
        """Make the device's later work follow the call."""
        self.over.wait()
        if self.error is not None:
            raise RuntimeError(f"staged: {self.error}") from self.error
        if self.event is not None:
            torch.accelerator.current_stream().wait_event(self.event)
        return True


class StagedGroup(dist.ProcessGroup):
    """gloo for tensors of the host, and for those of the device by copies of them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged", store), rank, size, timeout)
        self._stream: torch.Stream | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def getBackendName(self) -> str:
        """Return the name that `register` gave it."""
        return "staged"

    @property
    def pg_name(self) -> str:
        """Name of the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self.pg_name

    def get_group_store(self) -> dist.Store:
        """Return the store by which its ranks have met."""
        return self._store

    def barrier(self, opts: Any = None) -> Any:
        """Let the hosts wait for each other."""
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def call(self, name: str, *args: Any) -> Any:
        """Start gloo's operation `name`; its tensors are on the host or on the device."""
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if all(each.device.type == "cpu" for each in tensors):
            return getattr(self._gloo, name)(*args)
        device, work = tensors[0].device, StagedWork()
        stream = self._own_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        copies = work.copies

        def leave(value: Tensor) -> Tensor:
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            copies[id(value)] = copy.copy_(value, non_blocking=True)
            return copy

        with stream:
            for sleep in _sleeps:
                sleep()
            away = tree_map_only(Tensor, leave, args)
            left = stream.record_event()

        def run() -> None:
            left.synchronize()
            scale = _without_mean(away, self.size())
            getattr(self._gloo, name)(*away).wait()
            with stream:
                for sleep in _sleeps:
                    sleep()
                for value in tree_leaves(args[0]) if name != "send" else ():
                    copy = copies[id(value)]
                    value.copy_(copy if scale is None else copy.mul_(scale), non_blocking=True)
                for value in tensors:
                    value.record_stream(stream)  # torch keeps tensors of NCCL's calls, too
                work.event = stream.record_event()

        def finish() -> None:
            try:
                run()
            except BaseException as error:
                work.error = error
            work.over.set()

        self._calls.put(finish)
        return work

    def _own_stream(self, device: torch.device) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(device)
            threading.Thread(target=self._work, args=(device.index,), daemon=True).start()
        return self._stream

    def _work(self, index: int) -> None:
        torch.accelerator.set_device_index(index)
        while True:
            self._calls.get()()


def _without_mean(args: Any, size: int) -> float | None:
    """Ask for a sum where the options ask for a mean, which gloo lacks; return the factor left."""
    for options in args:
        if getattr(options, "reduceOp", None) == dist.ReduceOp.AVG:
            options.reduceOp = dist.ReduceOp.SUM
            return 1 / size
    return None


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: StagedGroup, *args: Any) -> Any:
        return self.call(name, *args)

    return operation


for _name, _of_gloo in _OPERATIONS.items():
    setattr(StagedGroup, _name, _operation(_of_gloo))
