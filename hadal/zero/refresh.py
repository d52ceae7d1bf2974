"""Refreshes: gathers of new weights that overlap with the device's work until they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hadal.comm.pending import Pending
from hadal.device import Event, SideStream, before_compiling, has_compiled, is_capturing
from hadal.zero.views import Views

_HOST = torch.device("cpu")


class Refresh:
    """The gather of one bucket's new weights, which ends when they are read.

    While it is under way, the bucket's parameters are watched: a read makes its stream wait for the
    refresh, and the host goes on. Every read does so until the device is known to have finished it,
    because each may be in another stream. A CPU receives only while it waits: there `leave` waits
    for the refresh.
    """

    def __init__(self, full: Tensor, views: Views) -> None:
        self._full = full
        self._views = views
        self._beside = _beside(_HOST)
        self._pending: Pending | None = None
        self._event: Event | None = None
        self._is_watched = False

    def start(self, gather: Callable[[], Pending], *, may_last: bool) -> None:
        """Begin it after all work that is queued on the device.

        `may_last`: it may overlap with the device's later work.
        """
        self.end()
        self._is_watched = may_last and not has_compiled()
        self._beside = _beside(self._full.device if self._is_watched else _HOST)
        self._beside.follow_device()
        with self._beside.current():
            self._pending = gather()

    def leave(self) -> None:
        """Let it overlap with the device's work if it may; otherwise make later work wait."""
        if self._pending is None:
            return
        with self._beside.current():
            self._pending.wait()
        self._pending = None
        if not self._is_watched:
            return
        self._event = self._beside.event()
        # Even if the bucket is freed, its memory is not reused before the gather is over.
        self._beside.keep(self._full)
        _left.add(self)
        before_compiling(end_all)
        self._views.expect_values(self.wait)

    def wait(self) -> None:
        """Make work that this thread queues from now on wait for the new weights."""
        self.leave()
        event = self._event
        if event is None or is_capturing(self._full.device):
            return
        event.wait_on_device()
        if event.is_over:
            self._forget()

    def end(self) -> None:
        """Wait like `wait`, and stop watching the parameters."""
        self.wait()
        if self._event is not None:
            self._forget()

    def _forget(self) -> None:
        self._event = None
        _left.discard(self)
        self._views.have_values()


# Compiled code distinguishes a watched class from the one it was compiled for, so no refresh is
# under way when code is compiled, or may last after that.
_left: weakref.WeakSet[Refresh] = weakref.WeakSet()


def is_any_under_way() -> bool:
    """Return True if the refresh of any bucket is under way."""
    return bool(_left)


def end_all() -> None:
    """End all refreshes that are under way."""
    for refresh in [*_left]:
        refresh.end()


@cache
def _beside(device: torch.device) -> SideStream:
    """Return the side stream that waits for refreshes; on the host all work is in one stream."""
    return SideStream(device)
