"""What the message of a collective is, and how fast it went, as NCCL's tests count it.

algorithm bandwidth  the message's bytes by the seconds that they took
bus bandwidth        the same times `bus_factor`: what any algorithm must move at least through the
                     link of each rank, so that it can be compared with the link's own speed, and
                     between collectives and numbers of ranks

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md derives the factors. The message
of a gather (or all-gather) is what all ranks have together, that of a reduce-scatter, scatter or
all-to-all what one rank gives to all: the longer side.
"""

from __future__ import annotations

_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, ranks: int) -> float:
    """What a message's bytes are multiplied with to get those on the link of each rank."""
    if ranks < 2 or operation == "barrier":
        return 0.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in _SHARED else 1.0


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes of the message in a second; 0 where nothing took any time."""
    return nbytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Bytes in a second on the link of each rank."""
    return bus_factor(operation, ranks) * algorithm_bandwidth(nbytes, seconds)
