"""How far the ranks have come in the collectives of their groups: who keeps one from its end.

All ranks of a group begin its collectives in one order, so that a number names the same one on all
of them. Where a rank has waited too long for one, its watchdog asks the others' by way of the store
that the ranks met in. The host of an accelerator waits for no collective, only its stream does: an
event behind each tells which are over.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hadal.comm.comms_log import numbers_of
from hadal.device import Event

# Collectives under way that are remembered: far more than an accelerator has queued.
_MOST = 4096


class Begun(NamedTuple):
    """A collective that this rank has begun."""

    group: str
    number: int
    label: str
    ranks: tuple[int, ...]


_last: dict[str, Begun] = {}
_queued: deque[tuple[Begun, Event]] = deque(maxlen=_MOST)


def begin(group: dist.ProcessGroup | None, label: str) -> Begun:
    """Count a collective of a group (None: of the world)."""
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    name = "" if group is None else group.group_name
    before = _last.get(name)
    ranks = numbers_of(group) if before is None else before.ranks
    number = 1 if before is None else before.number + 1
    begun = _last[name] = Begun(name, number, label, ranks)
    return begun


class Queued:
    """A work, and which collective it is."""

    __slots__ = ("_device", "_work", "begun")

    def __init__(self, work: dist.Work, begun: Begun, device: torch.device) -> None:
        self._work = work
        self._device = device
        self.begun = begun

    def wait(self) -> Any:
        """Wait for its end: on an accelerator its stream does."""
        found = self._work.wait()
        if self._device.type != "cpu":
            while _queued and _queued[0][1].is_over:
                _queued.popleft()
            stream = torch.accelerator.current_stream(self._device)
            _queued.append((self.begun, Event(stream.record_event(), self._device)))
        return found


def unfinished() -> Begun | None:
    """The first collective that the device still waits for."""
    return next((begun for begun, event in tuple(_queued) if not event.is_over), None)


class Inquiry:
    """Asks how far the others have come, and answers them; for the thread of the watchdog."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._store = PrefixStore("hadal/progress", world.get_group_store())
        self._rank = dist.get_rank()
        self._answered = 0

    def answer(self) -> None:
        """Tell how far this rank has come, if somebody has asked since it last did."""
        asked = self._store.add("asked", 0)
        if asked != self._answered:
            self._answered = asked
            mine = {name: [begun.number, begun.label] for name, begun in _last.items()}
            self._store.set(str(self._rank), json.dumps([asked, mine]))

    def ask(self, begun: Begun, patience: float) -> str:
        """Which ranks have not begun a collective; waits so many seconds for their answers."""
        asked, deadline = self._store.add("asked", 1), time.monotonic() + patience
        found: dict[int, list[Any] | None] = {}
        others = [rank for rank in begun.ranks if rank != self._rank]
        while len(found) < len(others) and time.monotonic() < deadline:
            self.answer()
            time.sleep(patience / 20)
            for rank in others:
                if rank not in found and self._store.check([str(rank)]):
                    number, told = json.loads(self._store.get(str(rank)))
                    if number >= asked:
                        found[rank] = told.get(begun.group, [0, "none"])
        return _told(begun, {rank: found.get(rank) for rank in others})


def _told(begun: Begun, found: dict[int, list[Any] | None]) -> str:
    behind = [
        f"rank {rank} does not answer"
        if one is None
        else f"rank {rank} has begun {one[0]} (the last: {one[1]})"
        for rank, one in found.items()
        if one is None or one[0] < begun.number
    ]
    where = f"{begun.label} is collective {begun.number} of its group"
    if not behind:
        return (
            f"{where}, and all its ranks have begun it: a device or the network between them hangs"
        )
    return f"{where}: {'; '.join(behind[:8])}" + (f"; {len(behind)} in all" * (len(behind) > 8))
