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

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

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
    """Work is queued inside; at the end nobody has touched memory that was not his."""
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


def late_tasks() -> int:
    """How many tasks have been begun late so far."""
    return int(_native[0].number_of_late_tasks())
