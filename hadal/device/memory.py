"""Memory of the host and the device: usage, allocation, and whether freed memory is kept."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hadal.errors import OffloadError

_log = logging.getLogger(__name__)

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
# Limit and usage files of a container, for cgroups v2 and v1.
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)

# Parameters of glibc's mallopt(3): the size from which an allocation gets its own mapping, and how
# much may stay free at the end of the heap (-1: any amount).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MMAP_NBYTES = 1 << 30
# A flag of cudaHostRegister: locked for all devices.
_PORTABLE = 1
_OLDER_MMAP_NBYTES = 1 << 25
# Shared memory, the default, may be scarce, and cannot use huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class MemoryUse(NamedTuple):
    """Bytes in use by this process on the host, and by torch's tensors on the device."""

    host: int
    device: int
    device_peak: int
    """The maximum since the last reset of the peak; 0 on a CPU, like `device`."""


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory in use now."""
    if device.type == "cpu":
        return MemoryUse(_resident_nbytes(), 0, 0)
    return MemoryUse(
        _resident_nbytes(),
        torch.accelerator.memory_allocated(device),
        torch.accelerator.max_memory_allocated(device),
    )


def allocated_host_nbytes() -> int:
    """Return the bytes that this process has allocated and not freed.

    Without glibc it is the resident memory, which includes freed memory that is kept for reuse.
    """
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return _resident_nbytes()
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class _MallInfo(ctypes.Structure):
    """The result of mallinfo2(3)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


class MemoryThere(NamedTuple):
    """The total and the free bytes of a device."""

    total: int
    free: int


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now in the memory of `device`."""
    use = memory_use(device)
    return use.host if device.type == "cpu" else use.device


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes in use; for an accelerator, since the last reset of its peak."""
    return _most_resident_nbytes() if device.type == "cpu" else memory_use(device).device_peak


def total_memory(device: torch.device) -> MemoryThere:
    """Return the memory of a device, or of the host for a CPU."""
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        return MemoryThere(total, free)
    page = resource.getpagesize()
    total, free = (os.sysconf(f"SC_{name}_PAGES") * page for name in ("PHYS", "AVPHYS"))
    return MemoryThere(total, free)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the device's peak; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


_unforked: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_the_parent: list[mmap.mmap] = []


Mapping = TypeVar("Mapping", bound=mmap.mmap)


def unforked_memory(nbytes: int, *, on_huge_pages: bool = False) -> mmap.mmap:
    """Allocate zeroed, page-aligned memory for direct transfers by devices and disks.

    A forked process does not inherit it, and is killed by the kernel if it touches it. Otherwise a
    fork would copy all pages that a device has locked, and could move a page during a transfer (see
    O_DIRECT in open(2)). On systems without MADV_DONTFORK, forked processes share it.
    """
    return _unforked_memory(mmap.mmap, nbytes, on_huge_pages)


def _unforked_memory(kind: type[Mapping], nbytes: int, on_huge_pages: bool) -> Mapping:
    memory = kind(-1, max(nbytes, 1), **_PRIVATE)
    for name in ("MADV_DONTFORK", *(["MADV_HUGEPAGE"] if on_huge_pages else [])):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, name))
    _unforked.add(memory)
    return memory


if hasattr(os, "register_at_fork"):
    # Never unmap the parent's memory in a forked process, where its address may be reused.
    os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_unforked))


def page_locked(nbytes: int) -> torch.Tensor:
    """Allocate page-aligned pinned host memory, which the accelerator can copy by itself.

    For CUDA, existing memory is locked, because torch's own pool rounds each allocation up to a
    power of two: gradients of many gigabytes would take up to twice their size. A forked process
    must not touch this memory (`unforked_memory`).

    Raises:
        OffloadError: the system refuses to lock more memory.
    """
    if not nbytes or torch.accelerator.current_accelerator() != torch.device("cuda"):
        page = resource.getpagesize()
        whole = torch.empty(nbytes + page, dtype=torch.uint8, pin_memory=True)
        return whole[-whole.data_ptr() % page :][:nbytes]
    # Large pages, touched by all threads: each small one takes the system as long to lock.
    memory = _unforked_memory(_PageLocked, nbytes, True)
    whole = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    memory.lock(whole.data_ptr(), nbytes)
    return whole


class _PageLocked(mmap.mmap):
    """Host memory that CUDA has locked, until the last tensor that uses it is freed."""

    _address: int | None = None

    def lock(self, address: int, nbytes: int) -> None:
        """Lock all of it; `address` is its first byte's.

        Raises:
            OffloadError: the system refuses.
        """
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            _forget_cuda_error()
            raise OffloadError(
                f"{nbytes} bytes of host memory cannot be page-locked (CUDA error {code}); raise"
                " the limit of locked memory (`ulimit -l`, a container's limit), or set pin_memory"
                " to false"
            )
        self._address, self._process = address, os.getpid()
        self._device = torch.accelerator.current_device_index()

    def __del__(self) -> None:
        # Before the memory is unmapped: otherwise another thread could map the address meanwhile,
        # and CUDA would copy from pages that are gone. A forked process has no CUDA.
        if self._address is None or self._process != os.getpid() or sys.is_finalizing():
            return
        torch.accelerator.synchronize(self._device)  # no copy to it is under way any more
        code = int(torch.cuda.cudart().cudaHostUnregister(self._address))
        if code:
            _forget_cuda_error()
            _log.warning("page-locked host memory could not be unlocked (CUDA error %d)", code)


def _forget_cuda_error() -> None:
    """Take the error of a failed call out of CUDA's state, where the next kernel would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def is_host_memory(device: torch.device) -> bool:
    """Return True if tensors of `device` are in host memory."""
    return device.type == "cpu"


def has_values(tensor: torch.Tensor) -> bool:
    """Return False for a tensor with a shape only, as plans use them."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two contiguous host tensors of equal size hold the same bytes.

    It calls the C library if possible, because `torch.equal` takes four times as long.
    """
    compare = _memcmp()
    if compare is None:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return not compare(one.data_ptr(), other.data_ptr(), one.nbytes)


@cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    try:
        # PyDLL does not release the GIL, which would take longer than the call.
        function = ctypes.PyDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """Allocate an uninitialised 1-D tensor in host memory, pinned on request for an accelerator.

    A forked process does not inherit pinned memory (`unforked_memory`).
    """
    if pinned and torch.accelerator.is_available():
        return page_locked(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype)


def free_host_nbytes() -> int:
    """Return the free bytes of host memory, within a container's limit; 0 if unknown."""
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
    """Let this process keep host memory that it frees, if it computes on the CPU.

    By default the C library returns large blocks to the system at once and requests them again in
    the next step: each page is then cleared and mapped again, which takes longer than gathering or
    adding up its contents. Does nothing if the C library is not glibc.

    Returns:
        Whether freed memory is kept.
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
    """Return all freed host memory to the system."""
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
    """Return the resident memory, or its peak if the system does not report the current value."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident_nbytes()


def _most_resident_nbytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
