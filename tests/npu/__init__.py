"""A second torch device that needs no hardware: `npu`, as Ascend's torch_npu joins torch.

Its memory is the host's and its kernels are the CPU's, so that the same training gives the same
bits there. To torch, and to whoever asks torch, it is a device of another type: tensors of the
host beside its own are refused, its memory is counted, its generators are its own, its backward
runs in a thread of its own, and its collectives go through a backend of its own, `hccl`. With
`asynchronous()` its work is late (see device.cpp): whoever forgets to wait finds old values.

`join()` makes it the accelerator of this process, for good: the ranks of the fixture `npus` call
it, and no process that tests something else.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from hadal.device import streams as product, widest_float

_native: list[ModuleType] = []


def join() -> None:
    """Make it this process's accelerator."""
    if _native:
        return
    from . import build, module

    torch.utils.rename_privateuse1_backend("npu")
    _native.append(build.loaded())
    module.native = _native[0]
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend("hccl", _hccl, devices=["npu"])


def _hccl(store: torch.distributed.Store, rank: int, size: int, timeout: object) -> object:
    inside = torch.distributed.PrefixStore("hccl", store)
    return _native[0].hccl(torch.distributed.ProcessGroupGloo(inside, rank, size, timeout))


@contextmanager
def asynchronous(longest_delay: float = 0.02) -> Iterator[None]:
    """Queue work inside the context; at the end check that no work touched foreign memory.

    Each task starts after a random delay, in seconds, or when somebody waits for it: only then if
    the longest delay is infinite. Another rank's wait for a collective does not count.
    """
    native = _native[0]
    native.set_delay(longest_delay)
    native.faults()
    native.set_asynchronous(True)
    try:
        yield
    finally:
        native.set_asynchronous(False)
    found = native.faults()
    assert not found, f"{len(found)} faults: {found[:5]}"


@contextmanager
def slow(seconds: float) -> Iterator[None]:
    """Work beside the device's own stream, and the copies of `staged`, are so late inside."""
    if not seconds:
        yield
        return
    import staged

    with staged.delayed(lambda: _native[0].sleep(seconds)):
        yield


def late_tasks() -> int:
    """The number of tasks that were started late so far."""
    return int(_native[0].number_of_late_tasks())


@contextmanager
def with_float64() -> Iterator[None]:
    """The device knows float64 inside, as most do; outside it is one of those that do not."""
    _native[0].set_has_float64(True)
    widest_float.cache_clear()
    try:
        yield
    finally:
        _native[0].set_has_float64(False)
        widest_float.cache_clear()


@contextmanager
def with_memory(nbytes: int) -> Iterator[None]:
    """Each device has so many bytes inside."""
    _native[0].set_total(nbytes)
    try:
        yield
    finally:
        _native[0].set_total(4 << 30)


class Wait(NamedTuple):
    """A wait of the host for the device: what for, and which line of the product caused it."""

    what: str
    """An operation whose result the host is given, a copy, or what is synchronized."""
    where: str
    name: str = ""
    """What the product's watchdog would report that it waits for."""


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """All waits of this process for the device inside, in every thread.

    These are operations that give the host a number or a shape (`item`, `equal`, `nonzero`, masks
    and indices of the host in brackets),
    copies from and to pageable memory, or blocking ones, and `synchronize` of the device, a stream
    or an event.
    """
    found: list[Wait] = []
    names, watch = threading.local(), product._watch[0]

    @contextmanager
    def named(name: str) -> Iterator[None]:
        names.now = name
        with watch(name):
            yield
        names.now = ""

    def tell(what: str) -> None:
        found.append(Wait(what, _line_of_product(), getattr(names, "now", "")))

    product.watch_waits(named)
    _native[0].set_watcher(tell)
    try:
        yield found
    finally:
        _native[0].set_watcher(None)
        product.watch_waits(watch)


def _line_of_product() -> str:
    """The innermost line of the product above its device folder; else that of the program."""
    frames = traceback.extract_stack()[:-2]
    device = f"{os.sep}hadal{os.sep}device{os.sep}"
    own = [f for f in frames if f"{os.sep}hadal{os.sep}" in f.filename and device not in f.filename]
    if not frames:
        return "a thread of torch's backward"
    frame = (own or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
