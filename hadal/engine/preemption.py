"""Preemption (`checkpoint.on_signal`): at a signal all ranks save at the same update, and leave."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from hadal.comm import Ranks
from hadal.comm.notice import Notice
from hadal.config.checkpoint import OnSignal
from hadal.errors import EXIT_PREEMPTED, UsageError

_log = logging.getLogger(__name__)
# Signals that a process which has no handler for them is meant to survive here.
_HARMLESS = ("SIGUSR1", "SIGUSR2")


class Preemption:
    """The signals that an engine obeys. One engine of a process may obey signals at a time.

    All ranks must make it. It replaces the program's handlers until `close`. `wait` is a method
    that waits for a save under way.

    Raises:
        UsageError: another engine obeys signals, or this is not the main thread.
    """

    _present: ClassVar[weakref.ref[Preemption] | None] = None
    _made: ClassVar[int] = 0

    def __init__(self, section: OnSignal, world: Ranks, wait: Callable[[], None]) -> None:
        # A weak reference: handlers must not keep an engine alive, nor it itself.
        self._wait = weakref.WeakMethod(wait)
        self._save_dir = section.save_dir
        self._is_speaker = world.rank == 0
        self.is_due = False
        """True once the ranks have agreed, and until they leave."""
        self._has_warned = False
        if Preemption.present() is not None:
            raise UsageError(
                "checkpoint.on_signal: another engine of this program obeys signals. Give the key"
                " to one of them, with save_dir null, and save all of them when its is_preempted"
                " becomes true"
            )
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "checkpoint.on_signal: only the main thread can receive signals; call initialize"
                " there, or leave the key out"
            )
        self._notice = Notice(f"preemption/{Preemption._made}", world)
        Preemption._present, Preemption._made = weakref.ref(self), Preemption._made + 1
        # Neither the handlers nor the table of handlers may keep the engine alive.
        give, process = weakref.WeakMethod(self._notice.give), os.getpid()
        self._before: dict[int, Any] = {}
        for name in section.signals:
            number = signal.Signals[name]
            before = signal.getsignal(number)
            if callable(before) and before is not signal.default_int_handler:
                _log.warning("checkpoint.on_signal replaces the program's handler of %s", name)
            self._before[number] = before
            signal.signal(number, _handler(give, process, before))

    @classmethod
    def present(cls) -> Preemption | None:
        """Return the preemption of the engine that obeys signals; None if there is none."""
        return None if cls._present is None else cls._present()

    def at_boundary(self, save: Callable[[str], object]) -> None:
        """Act at the end of an update if a notice is due; `save` saves into a directory.

        Raises:
            SystemExit: everything is saved; the code is 75.
        """
        if self.is_due:
            if not self._has_warned and self._is_speaker:
                self._has_warned = True
                _log.warning(
                    "engine.is_preempted is true (%s), but the program continues training: save and"
                    " exit, or set checkpoint.on_signal.save_dir",
                    self._notice.word,
                )
            return
        if not self._notice.is_due():
            return
        self.is_due = True
        if self._save_dir is None:
            return
        if self._is_speaker:
            _log.warning("%s: saving into %s", self._notice.word, self._save_dir)
        save(self._save_dir)
        self.leave()

    def leave(self) -> None:
        """End the program once saves are on disk, with the exit code of one that was preempted.

        Raises:
            SystemExit: always.
            CheckpointError: an asynchronous save failed.
        """
        wait = self._wait()
        if wait is not None:
            wait()
        if self._is_speaker:
            _log.warning("%s: saved; leaving with exit code %d", self._notice.word, EXIT_PREEMPTED)
        for number in self._before:
            # A launcher ends the others once a rank has left. The interpreter's end takes handlers
            # away, and a late signal would then be the exit code.
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(EXIT_PREEMPTED)

    def close(self) -> None:
        """Restore the program's handlers."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        self._notice.close()
        if Preemption.present() is self:
            Preemption._present = None


def _handler(give: Any, process: int, before: Any) -> Callable[[int, Any], None]:
    def heard(number: int, _: Any) -> None:
        name, call = signal.Signals(number).name, give()
        if os.getpid() == process and call is not None:
            call(name)
        elif os.getpid() == process or name not in _HARMLESS:
            # A forked child (of a data loader, say), or an engine that is gone.
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)

    return heard
