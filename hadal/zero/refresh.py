"""Refreshes: gathers of new weights that overlap with the device's work until they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hadal.comm.pending import Pending
from hadal.device import (
    Event,
    StreamPurpose,
    before_compiling,
    has_compiled,
    is_capturing,
    modules_running,
    side_stream,
)
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
        self._beside = side_stream(StreamPurpose.REFRESH, _HOST)
        self._pending: Pending | None = None
        self._event: Event | None = None
        self._is_watched = False

    def start(self, gather: Callable[[], Pending], *, may_last: bool) -> None:
        """Begin it after all work that is queued on the device.

        `may_last`: it may overlap with the device's later work.
        """
        self.end()
        self._is_watched = may_last and not _is_read_unseen
        device = self._full.device if self._is_watched else _HOST
        self._beside = side_stream(StreamPurpose.REFRESH, device)
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
        before_compiling(_end_before_compiling)
        self._views.expect_values(self.wait)

    def enter(self) -> None:
        """Wait like `wait`, before a unit's forward, which may be compiled or call such code."""
        self.wait()
        if has_compiled() and self._event is not None:
            self._forget()

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


_left: weakref.WeakSet[Refresh] = weakref.WeakSet()
# True if code that is compiled, and that no unit's hook precedes, may read weights.
_is_read_unseen = False


def is_any_under_way() -> bool:
    """Return True if the refresh of any bucket is under way."""
    return bool(_left)


def end_all() -> None:
    """End all refreshes that are under way."""
    for refresh in [*_left]:
        refresh.end()


def _end_before_compiling() -> None:
    # Compiled code distinguishes a watched class from the one it was compiled for, so a refresh is
    # over before. In a module, hooks have seen to that; a function around the model, as a whole
    # compiled step, has none, and would be compiled anew after each update.
    global _is_read_unseen
    _is_read_unseen |= bool(_left) and not modules_running()
    end_all()
