"""The message of a collective, and its bandwidth, as NCCL's tests count them.

algorithm bandwidth  the message's bytes divided by the transfer's seconds
bus bandwidth        the same times `bus_factor`: the traffic that any algorithm needs on a
                     rank's link, so it can be compared with the link's speed, and between
                     collectives and numbers of ranks

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md derives the factors. The message
of a gather (or all-gather) is all ranks' data together, that of a reduce-scatter, scatter or
all-to-all the data that one rank sends to all: the longer side.
"""

from __future__ import annotations

_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from a message's bytes to those on each rank's link."""
    if ranks < 2 or operation == "barrier":
        return 0.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in _SHARED else 1.0


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return the message's bytes per second; 0 if it took no time."""
    return nbytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return the bytes per second on each rank's link."""
    return bus_factor(operation, ranks) * algorithm_bandwidth(nbytes, seconds)
