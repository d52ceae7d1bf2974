"""Shuffles many numbers in numpy's order, in less time.

Saved runs rely on the order of `numpy.random.Generator.shuffle`, which is Fisher and Yates's: from
the last place down, the number at each place is swapped with the one at a place drawn at random.
With 100 million numbers nearly every swap waits for memory, and numpy makes one after another.
Here thousands of positions are drawn at once, and swapped together as long as none repeats.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

_FEW = 1 << 24
"""Below this size numpy is as fast, as positions within a block repeat too often."""
_BLOCK = 1 << 13
"""Draws at a time: their positions fit into a processor's own cache."""
_LIMIT = 1 << 32
"""Positions beyond it are drawn from 64 bits; no data set has them."""


def shuffle(numbers: npt.NDArray[Any], generator: np.random.Generator) -> None:
    """Shuffle in place, as `generator.shuffle` does: the same order, and the same state after it.

    Args:
        numbers: one dimension, any dtype of integers.
        generator: advanced as by its own `shuffle`.
    """
    if len(numbers) > _LIMIT:
        generator.shuffle(numbers)
        return
    last = len(numbers) - 1
    while last >= _FEW:
        last -= _swap_block(numbers[: last + 1], generator)
    # numpy swaps numbers of 8 bytes faster than any others.
    rest = numbers[: last + 1]
    wide = rest.astype(np.int64)
    generator.shuffle(wide)
    rest[:] = wide


def _swap_block(numbers: npt.NDArray[Any], generator: np.random.Generator) -> int:
    """Make the next swaps from the end of the numbers down; return how many."""
    last = len(numbers) - 1
    # A position is drawn from the fewest bits that hold the last one, and redrawn until it is not
    # beyond the position to swap with.
    bits = (1 << last.bit_length()) - 1
    draws = min(_BLOCK, last - (bits >> 1))
    drawn = _drawn(generator, draws)
    drawn &= np.uint32(bits)
    lowest = last - draws
    taken = drawn <= lowest
    # Numbers that are not beyond the lowest wrap around, and are large.
    near = np.flatnonzero(drawn - np.uint32(lowest + 1) < np.uint32(draws))
    for index in near.tolist():
        # Whether it is beyond depends on the swaps before it.
        taken[index] = int(drawn[index]) <= last - np.count_nonzero(taken[:index])
    small = drawn.take(np.flatnonzero(taken))
    places = small.astype(np.int64)
    start = 0
    for alone in [*_alone(small, lowest if len(near) else last), len(places)]:
        part = places[start:alone]
        top = numbers[last - alone + 1 : last - start + 1][::-1]
        found = numbers.take(part)
        numbers[part] = top
        top[:] = found
        if alone < len(places):
            pair = [last - alone, int(places[alone])]
            numbers[pair] = numbers[pair[::-1]]
        start = alone + 1
    return len(places)


def _drawn(generator: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Return `count` numbers of 32 bits, as the generator would draw them one by one."""
    source = generator.bit_generator
    is_whole = isinstance(source, np.random.PCG64) and count % 2 == 0 and sys.byteorder == "little"
    if is_whole and not source.state["has_uint32"]:
        # It draws 64 bits, and returns their lower half first.
        raw: npt.NDArray[np.uint64] = source.random_raw(count // 2)
        return raw.view(np.uint32)
    return generator.integers(0, _LIMIT, count, dtype=np.uint32)


def _alone(places: npt.NDArray[np.uint32], lowest: int) -> list[int]:
    """Return which swaps cannot be done together with those before them.

    These are the swaps with a position above `lowest`, which another swap of the block may change,
    and those with a repeated position.
    """
    ordered = np.sort(places)
    twice = ordered[1:][ordered[1:] == ordered[:-1]].tolist()
    found = set(np.flatnonzero(places > np.uint32(lowest)).tolist())
    for place in twice:
        found.update(np.flatnonzero(places == place)[1:].tolist())
    return sorted(found)
