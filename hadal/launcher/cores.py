"""Assignment of a host's cores to its ranks (arithmetic)."""

from __future__ import annotations

from collections.abc import Iterable

from hadal.errors import LaunchError


def read_cores(text: str) -> tuple[int, ...]:
    """Read a list of cores: `0-3,8` is 0, 1, 2, 3, 8.

    Raises:
        LaunchError: the text is not such a list, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LaunchError(
                f"--bind_core_list {text!r}: cannot read {part!r}; expected numbers and ranges,"
                " such as 0-3,8"
            )
        cores.extend(range(int(first), int(last if dash else first) + 1))
    if not cores or len(set(cores)) < len(cores):
        raise LaunchError(f"--bind_core_list {text!r}: expected each core once, in rising ranges")
    return tuple(cores)


def cores_of(local_rank: int, local_size: int, cores: Iterable[int]) -> tuple[int, ...]:
    """Return one rank's cores: equal consecutive ranges; the remainder stays unused.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    own = sorted(cores)
    share = len(own) // local_size
    if share == 0:
        raise LaunchError(
            f"{local_size} ranks cannot be bound to {len(own)} cores ({own}); start fewer ranks, or"
            " leave out --bind_cores_to_rank"
        )
    return tuple(own[local_rank * share : (local_rank + 1) * share])
