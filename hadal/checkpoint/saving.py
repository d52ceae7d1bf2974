"""Saving: every rank writes its own file, and when all are on disk the checkpoint gets its name.

All that is done to files needs nothing of the running program: `begin` gathers it into a `Job`,
which `Job.write` brings to disk, at once or in a thread (`background.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hadal.checkpoint import folders, randomness
from hadal.checkpoint.collecting import (
    Head,
    Holders,
    Rows,
    Share,
    collect,
    describe,
    find_own_values,
    head_of,
)
from hadal.checkpoint.contents import part_as_json
from hadal.checkpoint.files import Seal, check_file, naming, new_mark
from hadal.checkpoint.folders import CLIENT, rank_file
from hadal.checkpoint.index import write_index
from hadal.checkpoint.keep import prune
from hadal.checkpoint.live import LISTENERS, Live, Rules
from hadal.checkpoint.plain import encoded
from hadal.checkpoint.script import place_scripts
from hadal.checkpoint.shards import write_tensors
from hadal.checkpoint.source import OWN
from hadal.checkpoint.together import together
from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects, gather_objects_at_first
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)


class Order(NamedTuple):
    """What is to be saved, and where."""

    save_dir: Path
    tag: str
    client_state: Mapping[str, Any]
    save_latest: bool = True
    without_frozen: bool = False


class Plain(NamedTuple):
    """State as JSON, and the tensors that stand beside it."""

    values: Any
    tensors: dict[str, Tensor]


class _Written(NamedTuple):
    """What a rank has brought to disk, and in how many seconds."""

    seals: dict[str, Seal]
    seconds: float


def _tell_speed(path: Path, of_ranks: list[_Written]) -> None:
    nbytes = sum(seal.nbytes for one in of_ranks for seal in one.seals.values())
    seconds = max(one.seconds for one in of_ranks)
    _log.info(
        "%s: %d ranks have written %.3f GB in %.3f s, %.2f GB/s",
        path,
        len(of_ranks),
        nbytes / 1e9,
        seconds,
        nbytes / 1e9 / max(seconds, 1e-9),
    )


class _Told(NamedTuple):
    """What one rank tells all others of its share."""

    part: int
    place: int
    """Its number among the ranks of the part."""
    mates: tuple[int, ...]
    """The ranks that see the same folder."""
    mine: Rows
    replicated: Rows
    head: Head | None


@dataclass(slots=True)
class Job:
    """All that is to be written, apart from the running program."""

    order: Order
    mark: str
    mates: tuple[int, ...]
    """The ranks whose files lie in the folder that this one sees; the first one names it."""
    rules: Rules
    share: Share
    own: Plain
    client: Plain
    index: dict[str, Any]
    told: list[_Told]
    """What all ranks tell; for the one that writes the index."""

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.order.save_dir / self.order.tag

    @property
    def _what(self) -> str:
        return f"checkpoint {self.path} was not saved"

    def write(self, ranks: Ranks) -> None:
        """Bring everything to disk. All ranks must call it; `ranks` are all of them.

        Then `latest` moves, and old checkpoints go. Whatever fails before the new checkpoint is
        complete leaves the one that was there under this tag, and `latest`, as they are; where
        `latest` itself cannot be written, the new one stands and `latest` names what it named.

        Raises:
            CheckpointError: on every rank, with the file and the reason.
        """
        save_dir, tag = self.order.save_dir, self.order.tag
        draft = folders.draft_of(save_dir, tag, self.mark)
        leads = ranks.rank == self.mates[0]
        with together(ranks, self._what):
            if leads:
                folders.begin(save_dir, tag, self.mark)
        try:
            mine = _Written({}, 0.0)
            with together(ranks, self._what):
                mine = self._write_files(draft, ranks.rank, leads)
            of_ranks = gather_objects(mine, ranks)
            with together(ranks, self._what):
                if leads:
                    self._complete(draft, [one.seals for one in of_ranks], mine.seals)
                    folders.commit(draft, save_dir / tag)
        except CheckpointError:
            if leads:
                folders.discard(draft)
            raise
        # Nobody returns before `latest` says so.
        with together(ranks, f"{save_dir / folders.LATEST} was not moved to {tag!r}"):
            if leads:
                if self.order.save_latest:
                    folders.set_latest(save_dir, tag)
                place_scripts(save_dir)
                prune(save_dir, tag, self.rules.keep)
        if ranks.rank == 0 and self.rules.writing.tells_speed:
            _tell_speed(self.path, of_ranks)

    def _write_files(self, draft: Path, rank: int, leads: bool) -> _Written:
        """Write this rank's files, and tell what they must be from now on."""
        name = rank_file(rank)
        # The mark is that of this save: a file of another one is told at once.
        text = json.dumps({"rank": rank, "save": self.mark, **self.own.values}, allow_nan=False)
        tensors = {**self.share.tensors, **self.own.tensors}
        began = time.monotonic()
        seals = {name: write_tensors(draft / name, tensors, {OWN: text}, self.rules.writing)}
        seconds = time.monotonic() - began
        if leads and self.client.tensors:
            path = draft / CLIENT
            seals[CLIENT] = write_tensors(path, self.client.tensors, {OWN: self.mark})
        return _Written(seals, seconds)

    def _complete(
        self, draft: Path, of_ranks: list[dict[str, Seal]], mine: dict[str, Seal]
    ) -> None:
        """See that the others have written into the folder that this rank sees; write the index."""
        seals = {rank_file(rank): found[rank_file(rank)] for rank, found in enumerate(of_ranks)}
        seals |= mine
        here = [rank_file(rank) for rank in self.mates] + [CLIENT] * (CLIENT in mine)
        for name in here:
            check_file(draft / name, seals[name], whole=False)
        parts = [part_as_json(part) for part in self._parts()]
        files = {name: seal.numbers for name, seal in seals.items()}
        write_index(draft, {**self.index, "files": files, "here": here, "parts": parts})

    def _parts(self) -> list[Any]:
        """Each part of the model, as this folder's index tells of it."""
        parts = []
        for number in range(1 + max(told.part for told in self.told)):
            of_part = [(rank, one) for rank, one in enumerate(self.told) if one.part == number]
            of_part.sort(key=lambda pair: pair[1].place)
            head = of_part[0][1].head
            assert head is not None  # the first rank of each part tells it
            # What several folders hold is read from this one, if it is here.
            mates = [one for _, one in of_part if one.mates == self.mates] or [
                one for _, one in of_part if one.mates == of_part[0][1].mates
            ]
            rows = [one.mine for _, one in of_part] + [one.replicated for one in mates]
            parts.append(describe(head, rows, [rank for rank, _ in of_part]))
        return parts


def begin(order: Order, live: Live) -> Job:
    """Gather what is to be written; tensors are views of what is being trained.

    All ranks must call it.

    Raises:
        CheckpointError: on every rank: the tag is no name of a folder, or something cannot be
            saved.
    """
    world, ranks = live.world, live.ranks
    live.runtime.reshard_all()
    for bucket in live.runtime.buckets:
        bucket.settle()
    own_values = find_own_values(live)
    orders = gather_objects((new_mark(), order.tag, str(order.save_dir)), world)
    mark, tag, _ = orders[0]
    order = order._replace(tag=tag)
    what = f"checkpoint {order.save_dir / tag} was not saved"
    mates = tuple(range(world.size))
    # Some programs give each rank a folder of its own, and bring the files together afterwards.
    has_several = live.rules.is_node_local or len({folder for _, _, folder in orders}) > 1
    if has_several:
        mates = _mates(order.save_dir, mark, world, what)
    # Of this part's ranks, those that write into the same folder.
    holders = Holders(tuple(rank for rank in ranks.numbers if rank in mates), world.rank)
    with together(world, what):
        folders.check_tag(order.tag)
        own, client = _own(live), _client(order.client_state)
        index = _index(live, order, mark, client)
        share = collect(live, own_values, holders, without_frozen=order.without_frozen)
    head = head_of(live) if ranks.rank == 0 else None
    told = _Told(live.part, ranks.rank, mates, share.mine, share.replicated, head)
    # Whoever writes an index needs all of it: in one folder for all, the first rank.
    gather = gather_objects if has_several else gather_objects_at_first
    everybody = gather(told, world)
    return Job(order, mark, mates, live.rules, share, own, client, index, everybody)


def _mates(save_dir: Path, mark: str, world: Ranks, what: str) -> tuple[int, ...]:
    """The ranks that see the same folder: each leaves a file there, and looks for the others'."""

    def trace(rank: int) -> Path:
        return folders.draft_of(save_dir, f"rank_{rank:05d}", mark)

    mates: list[int] = []
    try:
        with together(world, what), naming(save_dir, "written"):
            save_dir.mkdir(parents=True, exist_ok=True)
            trace(world.rank).touch()
        with together(world, what), naming(save_dir, "read"):
            found = {path.name for path in save_dir.iterdir()}
            mates = [rank for rank in range(world.size) if trace(rank).name in found]
    finally:
        with suppress(OSError):
            trace(world.rank).unlink(missing_ok=True)
    return tuple(mates)


def _client(client_state: Mapping[str, Any]) -> Plain:
    tensors: dict[str, Tensor] = {}
    return Plain(encoded(dict(client_state), "client_state", tensors), tensors)


def _own(live: Live) -> Plain:
    """What each rank has for itself: random generators, its place in the data, and what modules
    keep beside tensors.
    """
    tensors: dict[str, Tensor] = {}
    place = None
    if live.loader is not None:
        try:
            place = live.loader.state_dict()
        except Exception as error:  # the data set's own code
            raise CheckpointError(
                f"the training loader cannot tell its place: {error!r}"
            ) from error
    extra = {path: module.get_extra_state() for path, module in live.with_extra_state()}
    exchange = live.runtime.exchange
    memory = None if exchange is None else exchange.memory()
    values = {
        "exchange": encoded(memory, "what the optimizer has still to send", tensors),
        "extra": encoded(extra, "the extra state of modules", tensors),
        "loader": encoded(place, "the state of the training loader", tensors),
        "random": encoded(randomness.states(), "the random generators", tensors),
    }
    return Plain(values, tensors)


def _index(live: Live, order: Order, mark: str, client: Plain) -> dict[str, Any]:
    optimizer = live.optimizer
    return {
        "save": mark,
        "saved_at": time.time(),
        "was_latest": order.save_latest,
        "world_size": live.world.size,
        "stage": live.rules.stage,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "scalars": encoded(_scalars(live), "the state of the engine"),
        "client_state": client.values,
        "schedule": _schedule_state(live.schedule),
    }


def _scalars(live: Live) -> dict[str, Any]:
    """The engine's numbers, and the state of its listeners, if any has some."""
    states = {name: listener.state_dict() for name, listener in live.listeners.items()}
    kept = {name: dict(state) for name, state in states.items() if state is not None}
    return {**live.scalars, LISTENERS: kept} if kept else live.scalars


def _schedule_state(schedule: Any) -> Any:
    """What JSON can hold of a schedule's state; what it cannot is left out, and told."""
    if not hasattr(schedule, "state_dict"):
        return None
    kept = {}
    for key, value in schedule.state_dict().items():
        try:
            encoded(value, key)
        except CheckpointError as error:
            _log.warning("%s is saved without %s", type(schedule).__name__, error)
        else:
            kept[key] = value
    return encoded(kept, type(schedule).__name__)
