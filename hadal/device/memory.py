"""Memory of the host and of the device: how much is in use, and what becomes of freed memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from hadal.errors import OffloadError

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
# Of what limits a container, in the second and the first form: the limit, and what is in use.
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)

# glibc's mallopt(3): from how many bytes on memory is asked of the system and given back on its
# own, and how much may lie free at the end of the heap (-1: all that does).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MMAP_NBYTES = 1 << 30
# Of cudaHostRegister: locked for every device.
_PORTABLE = 1
_OLDER_MMAP_NBYTES = 1 << 25
# Shared memory, the default, may be short, and has pages of the usual size.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class MemoryUse(NamedTuple):
    """Bytes in use: all that this process holds on the host, torch's tensors on the device."""

    host: int
    device: int
    device_peak: int
    """The most since the peak was last reset; 0 on a CPU, like `device`."""


def memory_use(device: torch.device) -> MemoryUse:
    """What is in use now."""
    if device.type == "cpu":
        return MemoryUse(_resident_nbytes(), 0, 0)
    return MemoryUse(
        _resident_nbytes(),
        torch.accelerator.memory_allocated(device),
        torch.accelerator.max_memory_allocated(device),
    )


class MemoryThere(NamedTuple):
    """Bytes that a device has, and those of them that are free."""

    total: int
    free: int


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now where tensors of `device` lie."""
    use = memory_use(device)
    return use.host if device.type == "cpu" else use.device


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use there: of a device since its peak was last reset."""
    return _most_resident_nbytes() if device.type == "cpu" else memory_use(device).device_peak


def total_memory(device: torch.device) -> MemoryThere:
    """How much memory there is, on the device or on the host of a CPU."""
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        return MemoryThere(total, free)
    page = resource.getpagesize()
    total, free = (os.sysconf(f"SC_{name}_PAGES") * page for name in ("PHYS", "AVPHYS"))
    return MemoryThere(total, free)


def reset_peak_memory(device: torch.device) -> None:
    """Count the device's peak from here; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


_unforked: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_the_parent: list[mmap.mmap] = []


def unforked_memory(nbytes: int, *, on_huge_pages: bool = False) -> mmap.mmap:
    """Zeroed memory that begins on a page, for devices and disks to copy into by themselves.

    A forked process does not get it, and must not touch it: the kernel ends a process that does.
    A fork would otherwise copy all pages that a device has locked, and could move a page away from
    under a transfer (open(2) on O_DIRECT). Where the system knows no MADV_DONTFORK, forks share it.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), **_PRIVATE)
    for name in ("MADV_DONTFORK", *(["MADV_HUGEPAGE"] if on_huge_pages else [])):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, name))
    _unforked.add(memory)
    return memory


def _keep_the_parents() -> None:
    """In a forked process: never unmap the parent's memory, in whose place other memory may be."""
    _of_the_parent.extend(_unforked)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_the_parents)


def page_locked(nbytes: int) -> torch.Tensor:
    """Bytes of host memory that the accelerator copies by itself; they begin on a page.

    CUDA locks memory that is there already. torch's own pool rounds each piece up to a power of
    two, so that gradients of many gigabytes would take up to twice their bytes. A forked process
    must not touch them (`unforked_memory`).

    Raises:
        OffloadError: the system locks no more.
    """
    if not nbytes or torch.accelerator.current_accelerator() != torch.device("cuda"):
        page = resource.getpagesize()
        whole = torch.empty(nbytes + page, dtype=torch.uint8, pin_memory=True)
        return whole[-whole.data_ptr() % page :][:nbytes]
    memory = unforked_memory(nbytes)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), nbytes, _PORTABLE))
    if code:
        raise OffloadError(
            f"{nbytes} bytes of host memory cannot be page-locked (CUDA error {code}); give the"
            " process more memory that it may lock (`ulimit -l`, a container's limit), or set"
            " pin_memory false"
        )
    weakref.finalize(memory, _unlock, whole.data_ptr()).atexit = False
    return whole


def _unlock(address: int) -> None:
    torch.accelerator.synchronize()  # nothing copies there any more
    torch.cuda.cudart().cudaHostUnregister(address)


def is_host_memory(device: torch.device) -> bool:
    """Whether tensors of `device` lie in the memory of the host."""
    return device.type == "cpu"


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors in host memory, of equally many bytes, hold the same ones.

    By the C library, where that can be called: `torch.equal` takes four times as long.
    """
    compare = _memcmp()
    if compare is None:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return not compare(one.data_ptr(), other.data_ptr(), one.nbytes)


@cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    try:
        # Other threads stay out meanwhile: to hand them the interpreter's lock would take longer.
        function = ctypes.PyDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """A 1-D tensor in host memory, uninitialised; page-locked, if asked, for an accelerator.

    Page-locked memory does not exist in a forked process (`unforked_memory`).
    """
    if pinned and torch.accelerator.is_available():
        return page_locked(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype)


def free_host_nbytes() -> int:
    """Bytes of host memory that can still be taken, within a container's limit; 0: not known."""
    try:
        rows = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return 0
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # no such limit, or "max"
            free = min(free, int(limit.read_text("ascii")) - int(used.read_text("ascii")))
    return max(free, 0)


def keep_freed_memory(device: torch.device) -> bool:
    """Let this process keep host memory that it frees, where that is what it computes in.

    By default the C library gives large pieces back to the system at once and asks for them anew
    in the next step: every page is then cleared and mapped again, which takes longer than to gather
    or to add up what is in it. Nothing is done where the C library is not glibc.

    Returns:
        Whether it is kept.
    """
    library = _glibc() if device.type == "cpu" else None
    if library is None:
        return False
    # Either call keeps the library from moving both thresholds by itself.
    if not library.mallopt(_MMAP_THRESHOLD, _MMAP_NBYTES):
        library.mallopt(_MMAP_THRESHOLD, _OLDER_MMAP_NBYTES)
    library.mallopt(_TRIM_THRESHOLD, -1)
    library.malloc_trim(0)
    return True


def give_back_freed_memory() -> None:
    """Give the system all memory of the host that lies free."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    known = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if known else None


def _resident_nbytes() -> int:
    """Resident memory; where the system does not tell, the most there has been."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident_nbytes()


def _most_resident_nbytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
