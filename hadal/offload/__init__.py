"""Tiers beyond the device: host memory that a disk reads into, and the disk itself.

Words of this folder.

store     what one process has on a disk: one file in a folder of its own
region    a range of that file which holds one thing (a shard's masters, say)
tensor    a 1-D tensor in two regions: the last committed values, and the next
slice     consecutive elements of a tensor that is not in memory
request   one read or write of a part of a region; it goes on by itself until it is waited for
block     how many bytes are handled at a time
call      neighbouring blocks of a request that travel in one system call
queue     the threads that run calls, and how many blocks they have under way
buffer    whole pages of host memory; a pool lends a bounded number of them
sweep     remove what dead processes have left on a disk
"""

from hadal.offload.buffers import BufferPool, aligned
from hadal.offload.extents import ALIGNMENT
from hadal.offload.requests import Region, Request
from hadal.offload.settings import IoSettings, settings_of
from hadal.offload.store import DiskStore

__all__ = [
    "ALIGNMENT",
    "BufferPool",
    "DiskStore",
    "IoSettings",
    "Region",
    "Request",
    "aligned",
    "settings_of",
]
