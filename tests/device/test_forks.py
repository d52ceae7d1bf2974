"""Forks of processes with memory for direct transfers of devices and disks."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import forks
import pytest

NBYTES = 1 << 28

if sys.platform != "linux":
    pytest.skip("other systems have neither the flag nor /proc", allow_module_level=True)


def run(code: str) -> Any:
    """Return the output of a new process, whose forks have nothing of this one's memory."""
    done = forks.run(["-c", PRELUDE + textwrap.dedent(code)], env=dict(os.environ), timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# `pinned` locks memory as CUDA's driver does, with a long-term pin: io_uring's registered buffers.
PRELUDE = f"""
import ctypes, gc, json, mmap, os, sys, time
from hadal.offload import aligned
NBYTES = {NBYTES}
libc = ctypes.CDLL(None, use_errno=True)

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]

def pinned(address, nbytes):
    ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    vector = Vector(address, nbytes)
    return ring >= 0 and libc.syscall(427, ring, 0, ctypes.byref(vector), 1) >= 0

def in_child(work):
    ends, begins = os.pipe()
    began = time.process_time()  # a copy of page tables and pages is this process's work
    child = os.fork()
    if child == 0:
        os.write(begins, json.dumps(work()).encode())
        os._exit(0)
    seconds = time.process_time() - began
    _, status = os.waitpid(child, 0)
    os.close(begins)
    return seconds, status, json.loads(os.read(ends, 1 << 16) or b"null")

def owned():
    # Bytes that are this process's alone.
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(l.split()[1]) for l in lines if l.startswith("Private")) * 1024

def has_place(address):
    for line in open("/proc/self/maps"):
        start, stop = (int(border, 16) for border in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False
"""


@pytest.mark.fast_cells("268435456")
@pytest.mark.parametrize("nbytes", [4096, NBYTES])
def test_memory_for_disks_and_devices_is_not_forked(nbytes: int) -> None:
    found = run(f"""
        buffer = aligned({nbytes}).fill_(1)
        print(json.dumps([has_place(buffer.data_ptr()),
                          in_child(lambda: has_place(buffer.data_ptr()))[2]]))
    """)
    assert found == [True, False]


def test_a_fork_does_not_copy_locked_memory() -> None:
    found = run("""
        usual, _, least = in_child(owned)
        buffer = aligned(NBYTES).fill_(1)
        is_pinned = pinned(buffer.data_ptr(), NBYTES)
        best = min(in_child(owned) for _ in range(3))
        print(json.dumps([is_pinned, usual, best[0], best[2] - least]))
    """)
    is_pinned, usual, seconds, more = found
    if not is_pinned:
        pytest.skip("this kernel lets nobody pin memory through io_uring")
    assert more < NBYTES / 16
    # 256 MiB take 0.1 s to copy at least.
    assert seconds < usual + 0.05


def test_a_forked_process_does_not_unmap_the_parents_addresses() -> None:
    """Memory mapped there since then is not unmapped with the parent's tensors."""
    found = run("""
        buffer = aligned(NBYTES)
        place = buffer.data_ptr()

        def mapped_there():
            global buffer
            libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [
                ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
            own = libc.mmap(place, 1 << 20, 3, 0x100022, -1, 0)  # FIXED_NOREPLACE
            ctypes.memset(own, 7, 1 << 20)
            del buffer
            gc.collect()
            return ctypes.string_at(own, 2).hex()

        print(json.dumps(in_child(mapped_there)[1:]))
    """)
    assert found == [0, "0707"]


def test_a_forked_process_reads_checkpoints_into_blocks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    found = run(f"""
        from hadal.offload.direct import blocks_of
        with open({str(tmp_path / "file")!r}, "rb") as file:
            read = lambda: sum(map(len, blocks_of(file.fileno(), 0, 1 << 20)))
            print(json.dumps([read(), *in_child(read)[1:]]))
    """)
    assert found == [1 << 20, 0, 1 << 20]
