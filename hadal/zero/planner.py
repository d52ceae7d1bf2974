"""Pure planning: which gathered weights are worth keeping until they are used again."""

from __future__ import annotations

from collections.abc import Sequence

from hadal.zero.policy import Limits


def kept_until_backward(numels: Sequence[int], limits: Limits) -> tuple[bool, ...]:
    """Which buckets, given in forward order by their elements, stay gathered until backward.

    A bucket's next use lies as many elements away as those behind it in forward have, there and
    back. It stays if that is within `limits.reuse_numel`; those with the nearest next use are kept
    first, up to `limits.live_numel` elements in all.
    """
    kept = [False] * len(numels)
    behind = live = 0
    for index in range(len(numels) - 1, -1, -1):
        numel = numels[index]
        if 2 * behind <= limits.reuse_numel and live + numel <= limits.live_numel:
            kept[index] = True
            live += numel
        behind += numel
    return tuple(kept)
