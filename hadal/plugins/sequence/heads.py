"""Distribution of attention heads over the ranks of a sequence: arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hadal.errors import SequenceError


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that each rank computes, for whole sequences."""

    queries: tuple[range, ...]
    """Each query head is on one rank."""
    keys: tuple[range, ...]
    """Heads of keys and values that those query heads use; several ranks may use one."""
    group: int
    """Query heads for each head of keys and values."""

    def local_keys(self, rank: int) -> list[int]:
        """Return, for each query head of a rank, its head of keys among those of that rank."""
        first = self.keys[rank].start
        return [head // self.group - first for head in self.queries[rank]]

    def local_group(self, rank: int) -> int | None:
        """Return how many of a rank's query heads use each of its heads of keys.

        Return None if the number differs between heads.
        """
        places, keys = self.local_keys(rank), len(self.keys[rank])
        group = len(places) // keys
        is_even = places == [head // group for head in range(len(places))]
        return group if is_even and group * keys == len(places) else None


@lru_cache(maxsize=64)
def share_heads(heads: int, key_heads: int, ranks: int) -> Heads:
    """Distribute heads over ranks as evenly as possible.

    If there are as many heads of keys as ranks, each rank has whole groups. Otherwise a rank has as
    many query heads as the others, or one more, and the heads of keys that these need.

    Raises:
        SequenceError: there are fewer heads than ranks, or groups are uneven.
    """
    if key_heads < 1 or heads % key_heads:
        raise SequenceError(
            f"{heads} heads of queries cannot share {key_heads} heads of keys and values"
            " evenly; choose a number of key heads that divides the number of query heads"
        )
    if heads < ranks:
        raise SequenceError(
            f"{heads} attention heads cannot be distributed over the {ranks} ranks of a sequence:"
            f" each rank needs one; set sequence_parallel_size to {heads} or less, or attend with"
            " hadal.sequence.ring_attention"
        )
    group = heads // key_heads
    if key_heads >= ranks:
        keys = _even(key_heads, ranks)
        return Heads(tuple(range(k.start * group, k.stop * group) for k in keys), keys, group)
    queries = _even(heads, ranks)
    return Heads(
        queries, tuple(range(q.start // group, -(-q.stop // group)) for q in queries), group
    )


def _even(count: int, ranks: int) -> tuple[range, ...]:
    whole, over = divmod(count, ranks)
    starts = [rank * whole + min(rank, over) for rank in range(ranks + 1)]
    return tuple(range(*pair) for pair in pairwise(starts))
