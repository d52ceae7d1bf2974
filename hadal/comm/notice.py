"""A notice from one rank to all, which all ranks act on at the same boundary of their work.

No rank waits and no collective runs until there is a notice. A thread polls the rendezvous' store
over its own connection. Once it finds a notice, its rank stops at its next boundary until all ranks
agree on one: each publishes the next boundary that it has not passed, and the last one is chosen.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hadal.comm.ranks import Ranks
from hadal.comm.watchdog import LAST_LOOK_S, start_polling
from hadal.errors import CommunicationError

# Seconds between two looks, and while ranks agree. The store answers a thousand looks a second at
# most, however many ranks there are.
_PAUSE_S, _SHORT_PAUSE_S, _LOOKS_PER_S = 0.2, 0.005, 1000
_PATIENCE_S = 120.0
_WORD, _COUNT, _DUE, _LEFT = "word", "count", "due", "left"


def _own_store(name: str) -> Store | None:
    """Return a connection of one's own to the world's store, for keys below `name`.

    None if there is no store to clone.
    """
    world = dist.group.WORLD
    if world is None or not hasattr(world, "get_group_store"):
        return None
    # A wait on a store locks it, and the program may be waiting on the world's.
    store: Any = PrefixStore(f"hadal/{name}", world.get_group_store())
    try:
        cloned: Store = store.clone()
    except RuntimeError:
        return None  # torch's fake store, whose ranks are one process
    return cloned


class Notice:
    """This rank's end of a notice, which is given at most once. All ranks must make it.

    Args:
        name: the same on all ranks; each is used once.
        world: the ranks that agree.
    """

    def __init__(self, name: str, world: Ranks) -> None:
        self._world = world
        self._store: Store | None = _own_store(name) if world.size > 1 else None
        pause = max(_PAUSE_S, world.size / _LOOKS_PER_S)
        self._given: str | None = None
        self._has_announced = False
        self._lock = threading.Lock()
        self._passed = 0
        self._is_held = False
        """True: this rank waits at its next boundary until it is known which one is due."""
        self._due = 0
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self.word = ""
        """The notice, once it is due."""
        # The thread must not keep its owner alive.
        hear = weakref.WeakMethod(self._hear)
        self.close = start_polling(
            "hadal-notice", self._is_over, _listen, hear, self._is_over, pause, self._store, world
        )
        """A function that ends the thread."""

    def give(self, word: str) -> None:
        """Give all ranks a notice. It takes no lock, so a signal handler may call it."""
        self._given = word

    def is_due(self) -> bool:
        """Pass a boundary; return True if it is the one at which all ranks act on a notice.

        It is called once for each boundary, equally often on all ranks.

        Raises:
            CommunicationError: there is a notice, and a rank does not answer it.
        """
        with self._lock:
            self._passed += 1
            passed, is_held = self._passed, self._is_held
        if not is_held:
            return False
        if not self._is_known.wait(_PATIENCE_S):
            raise CommunicationError(
                f"rank {self._world.rank}: {self.word} was noticed, but within {_PATIENCE_S:g} s"
                " not all ranks have answered; see the output of the others"
            )
        return passed == self._due

    # ---- the thread ------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Look for a notice, and agree on a boundary if there is one; return True at the end."""
        store, rank, size = self._store, self._world.rank, self._world.size
        if self._given is not None and store is not None and not self._has_announced:
            self._has_announced = True
            store.set(_WORD, f"{self._given} on rank {rank}")
        if store is None:
            if self._given is None:
                return False
            self.word = self._given
            self._know(self._hold())
            return True
        if not store.check([_WORD]):
            return False
        self.word = store.get(_WORD).decode()
        if not self.word:
            return True  # rank 0 ends
        store.set(f"{rank}", f"{self._hold()}")
        if store.add(_COUNT, 1) == size:
            store.set(_DUE, f"{max(int(store.get(f'{each}')) for each in range(size))}")
        while not store.check([_DUE]):
            if self._is_over.wait(max(_SHORT_PAUSE_S, size / _LOOKS_PER_S)):
                return True
        self._know(int(store.get(_DUE)))
        return True

    def _hold(self) -> int:
        """Hold this rank at its next boundary, and return that boundary's number."""
        with self._lock:
            self._is_held = True
            return self._passed + 1

    def _know(self, due: int) -> None:
        self._due = due
        self._is_known.set()


def _listen(
    hear: Any, is_over: threading.Event, pause: float, store: Store | None, world: Ranks
) -> None:
    try:
        while not is_over.wait(pause):
            call = hear()
            if call is None or call():  # its engine is gone, or nothing is left to hear
                break
            del call
        if store is None:
            return
        # The store ends with rank 0's process, and torch prints a stack where a request meets that:
        # rank 0 leaves last.
        left = store.add(_LEFT, 1)
        if world.rank == 0:
            store.compare_set(_WORD, "", "")
            end = time.monotonic() + LAST_LOOK_S / 2
            while left < world.size and time.monotonic() < end:
                time.sleep(_SHORT_PAUSE_S)
                left = store.add(_LEFT, 0)
    except (RuntimeError, ValueError):
        return  # the store is gone with rank 0
