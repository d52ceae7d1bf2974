"""Prediction of the gradients that the running backward will produce on this rank."""

from __future__ import annotations

from collections.abc import Sequence

from hadal.device import graph_task, will_collect
from hadal.zero.bucket import Bucket


class Expectation:
    """The gradients that each bucket still waits for in one backward.

    The autograd graph shows them in advance: an expert without tokens or an unused head is not in
    it. Recomputation with `use_reentrant=True` hides its parameters from the graph; they are
    expected as often as in the last backward.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._hidden: dict[Bucket, dict[int, int]] = {}
        self._last: dict[Bucket, list[int]] = {}
        # True if backwards are nested, which is assumed until the first one has ended.
        self._nests = True
        self.take_up(buckets)

    def take_up(self, buckets: Sequence[Bucket]) -> None:
        """Expect gradients for these buckets from now on."""
        self._hidden = {bucket: self._hidden.get(bucket, {}) for bucket in buckets}
        self._last = {b: self._last.get(b) or [1] * len(b.parameters) for b in buckets}
        self.begin()

    def begin(self) -> None:
        """Begin a backward."""
        self._is_surveyed = self._is_known = False
        self._tasks: set[int] = set()
        self._in_graph: dict[Bucket, list[bool]] = {}
        self._expected: dict[Bucket, list[int]] = {}
        self._came = {bucket: [0] * len(bucket.parameters) for bucket in self._hidden}
        self._missing: dict[Bucket, int] = {}

    def survey(self, *, is_root: bool = False) -> None:
        """Query the graph of the running backward, once.

        `is_root`: this is the outermost backward. A recomputation's own graph contains only its
        parameters; if that may be the running one, the same gradients as in the last backward are
        expected.
        """
        if self._is_surveyed:
            return
        self._is_surveyed = True
        self._is_known = is_root or not self._nests
        for bucket, hidden in self._hidden.items():
            if self._is_known:
                found = [p.requires_grad and will_collect(p) for p in bucket.parameters]
                expected = [is_in + hidden.get(index, 0) for index, is_in in enumerate(found)]
                self._in_graph[bucket] = found
            else:
                expected = self._last[bucket]
            self._expected[bucket] = expected
            self._missing[bucket] = sum(expected)

    def came(self, bucket: Bucket, index: int) -> bool:
        """Count a gradient of parameter number `index`; return True if it is the last expected."""
        self.survey()
        self._tasks.add(graph_task())
        counts = self._came[bucket]
        counts[index] += 1
        if counts[index] > self._expected[bucket][index]:
            return False
        self._missing[bucket] -= 1
        return not self._missing[bucket]

    def awaits(self, bucket: Bucket) -> bool:
        """Return True if gradients of a bucket are still expected, or may be before `survey`."""
        return bool(self._missing.get(bucket, not self._is_surveyed))

    def end(self) -> None:
        """End a backward: remember the gradients that arrived without being in the graph."""
        if self._tasks:
            self._nests, self._last = len(self._tasks) > 1, self._came
        for bucket, found in self._in_graph.items():
            for index, count in enumerate(self._came[bucket]):
                if count:
                    self._hidden[bucket][index] = count - found[index]
