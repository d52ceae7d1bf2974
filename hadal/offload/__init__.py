"""Offload tiers: host memory that supports direct disk I/O, and the disk itself.

Words of this folder.

store     the storage of one process on a disk: one file in its own folder
region    a range of that file for one purpose, such as a shard's masters
tensor    a 1-D tensor in two regions: the last committed values and the next ones
slice     consecutive elements of a tensor that is not in memory
request   an asynchronous read or write of a part of a region
block     the unit of bytes in which requests are handled
call      consecutive blocks of a request that one system call transfers
queue     the threads that run calls, with a limit on the blocks under way
buffer    whole pages of host memory; a pool lends a limited number of them
sweep     remove files that dead processes left on a disk
"""

from hadal.lazy import public_names
from hadal.offload.buffers import BufferPool as BufferPool, aligned as aligned
from hadal.offload.direct import ALIGNMENT as ALIGNMENT
from hadal.offload.requests import IoRequest as IoRequest, Region as Region
from hadal.offload.store import DiskStore as DiskStore

__all__ = public_names(globals())
