"""Requests between ranks that are answered while the program is busy with something else.

A thread polls the store of the rendezvous a few times a second while a rank may send requests, and
more often while one does. Answers travel between pairs of ranks on the host, so they never mix with
the program's collectives.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hadal.comm.local.pairs import exchange
from hadal.comm.pending import Pending
from hadal.comm.polling import start_polling
from hadal.comm.ranks import Ranks
from hadal.comm.transport import ANSWER

_log = logging.getLogger(__name__)

# Seconds between two polls, and while a rank sends requests; the time for which more are expected.
# The store answers a thousand polls a second at most, however many ranks there are.
_PAUSE_S, _SHORT_PAUSE_S, _ASKING_S, _LOOKS_PER_S = 0.2, 0.002, 2.0, 1000


class Desk(Protocol):
    """The answering side of a bell."""

    @property
    def is_asked(self) -> bool:
        """Return True if a rank may send requests now; otherwise the bell does not poll."""

    def answer(self, what: Sequence[int]) -> Tensor | None:
        """Return the requested values, 1-D on the host; None: not yet. For the bell's thread."""


def own_store(name: str) -> Store | None:
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


class Bell:
    """This rank's bell, which also sends requests to the other ranks."""

    _present: ClassVar[tuple[weakref.ref[dist.ProcessGroup], Bell] | None] = None

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._pause = max(_PAUSE_S, size / _LOOKS_PER_S)
        self._desks: dict[tuple[str, int], tuple[Ranks, weakref.ref[Desk]]] = {}
        self._count: Counter[str] = Counter()
        self._heard = 0
        self._is_over = threading.Event()
        start_polling("hadal-bell", self._is_over, self._listen)

    @classmethod
    def here(cls) -> Bell | None:
        """Return the bell of the running world; None without a store to clone."""
        world = dist.group.WORLD
        if world is None:
            return None
        if cls._present is None or cls._present[0]() is not world:
            store = own_store("bell")
            if store is None:
                return None
            made = cls(store, dist.get_rank(), dist.get_world_size())
            cls._present = weakref.ref(world), made
        return cls._present[1]

    def open(self, desk: Desk, ranks: Ranks) -> int:
        """Let `ranks` send requests to a desk while it lives; return the desk's number.

        The number is the same on all ranks if they open their desks in the same order.
        """
        group = _name_of(ranks)
        self._count[group] += 1
        number = self._count[group]
        self._desks[group, number] = ranks, weakref.ref(desk)
        return number

    def ask(
        self, desk: int, what: Sequence[int], full: Tensor, ranks: Ranks, label: str
    ) -> Pending:
        """Fill the other ranks' slices of 1-D `full` with the answers of their desks."""
        rows = full.view(ranks.size, -1)
        on_host = rows if full.device.type == "cpu" else torch.empty_like(rows, device="cpu")
        coming = [(on_host[other], other) for other in ranks.others]
        works = exchange("recv", on_host, [], coming, ranks, ANSWER, label, "")
        for other in ranks.others:
            number = ranks.numbers[other]
            place = self._store.add(f"{number}", 1)
            self._store.set(
                f"{number}/{place}", json.dumps([_name_of(ranks), desk, ranks.rank, *what])
            )

        def bring() -> None:
            for other in ranks.others:
                rows[other].copy_(on_host[other])

        return Pending(label, works, None if on_host is rows else bring)

    def all_come(self, where: Sequence[int], ranks: Ranks, patience: float) -> bool:
        """Wait for `ranks` at a place; return True if each came within `patience` s of another.

        All that come get the same answer. Each place is used once.
        """
        place = f"{_name_of(ranks)}/{json.dumps(where)}"
        first, verdict = f"{place}/first", f"{place}/verdict"
        deadline = time.monotonic() + patience
        decides = self._store.add(place, 1) == ranks.size
        while not decides and not self._store.check([verdict]):
            decides = time.monotonic() > deadline
            time.sleep(_SHORT_PAUSE_S)
        if decides and self._store.add(first, 1) == 1:
            self._store.set(verdict, str(self._store.add(place, 0) == ranks.size))
        return bool(self._store.get(verdict) == b"True")

    # ---- the thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        until, pause = 0.0, self._pause
        while not self._is_over.wait(pause):
            if not self._is_asked():
                continue
            try:
                while self._hear():
                    until = time.monotonic() + _ASKING_S
            except (RuntimeError, ValueError):
                return  # the store is gone with rank 0
            pause = _SHORT_PAUSE_S if time.monotonic() < until else self._pause

    def _is_asked(self) -> bool:
        found = [desk for _, known in tuple(self._desks.values()) if (desk := known()) is not None]
        return any(desk.is_asked for desk in found)

    def _hear(self) -> bool:
        """Answer the request that came first, if there is one."""
        key = f"{self._rank}/{self._heard + 1}"
        if not self._store.check([key]):
            return False
        self._heard += 1
        group, number, asker, *what = json.loads(self._store.get(key))
        self._store.delete_key(key)
        try:
            self._answer((group, number), asker, what)
        except Exception:
            _log.exception("rank %d could not answer rank %d of %s", self._rank, asker, group)
        return True

    def _answer(self, place: tuple[str, int], asker: int, what: Sequence[int]) -> None:
        while not self._is_over.is_set():
            ranks, known = self._desks.get(place, (None, None))
            if ranks is not None and known is not None:
                desk = known()
                if desk is None:
                    return  # here it is gone
                values = desk.answer(what)
                if values is not None:
                    label = f"the answer to rank {ranks.numbers[asker]}"
                    leaving = [(values, asker)]
                    works = exchange("send", values, leaving, [], ranks, ANSWER, label, "")
                    Pending(label, works).wait()
                    return
                del desk
            self._is_over.wait(_SHORT_PAUSE_S)


def _name_of(ranks: Ranks) -> str:
    return str(ranks.host_group.group_name)
