"""Saving: every rank writes its own file; once all are durable, the index commits them.

`begin` gathers everything into a `SaveJob`, which is independent of the running program.
`SaveJob.write` writes it, at once or in a thread (`background.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hadal.checkpoint import folders, randomness
from hadal.checkpoint.collecting import (
    Holders,
    PartRows,
    RankContents,
    collect,
    describe,
    find_own_values,
    head_of,
)
from hadal.checkpoint.contents import ModelPart, part_as_json
from hadal.checkpoint.deepspeed.folder import ORDER, has_rank_files, move_rank_files
from hadal.checkpoint.files import (
    Seal,
    check_file,
    copy_file,
    new_mark,
    replace_file,
    system_errors,
)
from hadal.checkpoint.folders import CLIENT, JOBS, prune, rank_file
from hadal.checkpoint.formats.deepspeed import expect_directory, write_rank_files
from hadal.checkpoint.index import write_index
from hadal.checkpoint.leases import Lease
from hadal.checkpoint.live import LISTENERS, Live
from hadal.checkpoint.plain import encoded, encoded_known
from hadal.checkpoint.rules import Rules
from hadal.checkpoint.shards import write_tensors
from hadal.checkpoint.source import OWN
from hadal.checkpoint.storage import Location, draft_of
from hadal.checkpoint.stored import StoredSource
from hadal.checkpoint.together import together
from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects, gather_objects_at_first
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)


class SaveRequest(NamedTuple):
    """The arguments of a save: the place, the tag and the options."""

    save_dir: Location
    tag: str
    client_state: Mapping[str, Any]
    save_latest: bool = True
    without_frozen: bool = False
    jobs: tuple[str, ...] = ()
    """The jobs of this run, the current one last; see `keep.JOBS`."""


class Plain(NamedTuple):
    """State as JSON, and the tensors that it refers to."""

    values: Any
    tensors: dict[str, Tensor]


class _Written(NamedTuple):
    """The seals of the files that a rank has written, and the seconds it took."""

    seals: dict[str, Seal]
    seconds: float


def _log_speed(path: Location, of_ranks: list[_Written]) -> None:
    nbytes = sum(seal.nbytes for one in of_ranks for seal in one.seals.values())
    seconds = max(one.seconds for one in of_ranks)
    _log.info(
        "%s: %d ranks wrote %.3f GB in %.3f s, %.2f GB/s",
        path,
        len(of_ranks),
        nbytes / 1e9,
        seconds,
        nbytes / 1e9 / max(seconds, 1e-9),
    )


class _RankReport(NamedTuple):
    """One rank's description of its share, for all other ranks."""

    part: int
    """The model-parallel part that it holds."""
    folder_ranks: tuple[int, ...]
    """The ranks that write into the same folder."""
    rows: dict[tuple[int, ...], PartRows]
    """As `RankContents.parts`."""
    heads: dict[tuple[int, ...], ModelPart]
    """The heads of the parts whose first rank it is."""


@dataclass(slots=True)
class SaveJob:
    """Everything that a save writes, independent of the running program."""

    request: SaveRequest
    mark: str
    folder_ranks: tuple[int, ...]
    """The ranks that write into this rank's folder; the first one writes the index."""
    rules: Rules
    contents: RankContents
    own: Plain
    client: Plain
    index: dict[str, Any]
    reports: list[_RankReport]
    """The descriptions of all ranks, for the rank that writes the index."""
    staged: dict[Path, Seal] = field(default_factory=dict)
    """This rank's files, if they are staged on a disk of this machine."""

    @property
    def path(self) -> Location:
        """The checkpoint's folder."""
        return self.request.save_dir / self.request.tag

    @property
    def _what(self) -> str:
        return f"checkpoint {self.path} was not saved"

    def write(self, ranks: Ranks) -> None:
        """Write everything to disk. All ranks must call it; `ranks` are all of them.

        Then `latest` is updated and old checkpoints are removed. A failure before the new
        checkpoint is complete leaves the previous one of this tag, and `latest`, unchanged; if
        `latest` itself cannot be written, the new checkpoint exists and `latest` is unchanged.

        Raises:
            CheckpointError: on every rank, with the file and the reason.
        """
        save_dir, tag = self.request.save_dir, self.request.tag
        is_leader = ranks.rank == self.folder_ranks[0]
        lease: Lease | None = None
        with ExitStack() as stack:
            with together(ranks, self._what):
                if is_leader:
                    lease = folders.begin(save_dir, tag, self.mark)
                    stack.callback(folders.end, self.path, lease)
            of_ranks = self._written(ranks, is_leader)
            with together(ranks, self._what):
                if lease is not None:
                    self._commit(lease, of_ranks, of_ranks[ranks.rank].seals)
            # No rank returns before `latest` is updated.
            with together(ranks, f"{save_dir / folders.LATEST} was not moved to {tag!r}"):
                if is_leader:
                    if self.rules.writes_deepspeed and isinstance(self.path, Path):
                        move_rank_files(self.path / self.mark, self.path)
                    if self.request.save_latest:
                        folders.set_latest(save_dir, tag, self.mark)
                    place_scripts(save_dir)
                    prune(save_dir, tag, self.rules.keep, self.index[JOBS])
        if ranks.rank == 0 and self.rules.writing.logs_speed:
            _log_speed(self.path, of_ranks)

    def _written(self, ranks: Ranks, is_leader: bool) -> list[_Written]:
        """Write all ranks' files; if one cannot, remove them and raise on every rank."""
        mine = _Written({}, 0.0)
        try:
            with together(ranks, self._what):
                home, began = self.path / self.mark, time.monotonic()
                seals = {
                    path.name: copy_file(path, home / path.name, seal)
                    for path, seal in self.staged.items()
                } or self._write_into(home, ranks.rank)
                mine = _Written(seals, time.monotonic() - began)
            of_ranks = gather_objects(mine, ranks)
            with together(ranks, self._what):
                if is_leader:
                    self._check([one.seals for one in of_ranks], mine.seals)
            if self.rules.writes_deepspeed:
                self._write_for_deepspeed(of_ranks, ranks)
        except BaseException:  # also if another rank is gone
            if is_leader:
                folders.discard(self.path, self.mark)
            raise
        return of_ranks

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that this rank writes."""
        kinds = (self.contents.tensors, self.own.tensors, self.client.tensors)
        return sum(one.numel() * one.element_size() for kind in kinds for one in kind.values())

    def staged_in(self, folder: Path, rank: int) -> SaveJob:
        """Write this rank's files into a directory; return the job of copying them to their place.

        Raises:
            CheckpointError: they cannot be written; the message names the file.
        """
        seals = self._write_into(folder, rank)
        contents, none = RankContents({}, self.contents.parts), Plain(None, {})
        staged = {folder / name: seal for name, seal in seals.items()}
        return replace(self, contents=contents, own=none, client=none, staged=staged)

    def _write_into(self, home: Location, rank: int) -> dict[str, Seal]:
        name = rank_file(rank)
        # The mark identifies this save, so a file of another save is detected at once.
        text = json.dumps({"rank": rank, "save": self.mark, **self.own.values}, allow_nan=False)
        tensors = {**self.contents.tensors, **self.own.tensors}
        seals = {name: write_tensors(home / name, tensors, {OWN: text}, self.rules.writing)}
        if rank == self.folder_ranks[0] and self.client.tensors:
            path = home / CLIENT
            seals[CLIENT] = write_tensors(path, self.client.tensors, {OWN: self.mark})
        return seals

    def _sealed(
        self, of_ranks: list[dict[str, Seal]], mine: dict[str, Seal]
    ) -> tuple[dict[str, Seal], list[str]]:
        """Return the seals of all files, and the names of those in this rank's folder."""
        seals = {rank_file(rank): found[rank_file(rank)] for rank, found in enumerate(of_ranks)}
        here = [rank_file(rank) for rank in self.folder_ranks] + [CLIENT] * (CLIENT in mine)
        return seals | mine, here

    def _check(self, of_ranks: list[dict[str, Seal]], mine: dict[str, Seal]) -> None:
        """Check that the other ranks' files are in this rank's folder."""
        seals, here = self._sealed(of_ranks, mine)
        for name in here:
            check_file(self.path / self.mark / name, seals[name], whole=False)

    def _write_for_deepspeed(self, of_ranks: list[_Written], ranks: Ranks) -> None:
        """Write this rank's files for DeepSpeed's tools, from what all ranks have written."""
        content: Any = None
        with together(ranks, self._what):
            if ranks.rank == self.folder_ranks[0]:
                content = self._content(of_ranks, of_ranks[ranks.rank].seals)
        content = json.loads(json.dumps(gather_objects(content, ranks)[self.folder_ranks[0]]))
        with together(ranks, self._what):
            source = StoredSource(self.path, content=content)
            write_rank_files(source, content[ORDER], self.path / self.mark, ranks.rank)
            source.close()

    def _content(self, of_ranks: list[_Written], mine: dict[str, Seal]) -> dict[str, Any]:
        """Return the content of this rank's index."""
        seals, here = self._sealed([one.seals for one in of_ranks], mine)
        parts = [part_as_json(part) for part in self._parts()]
        files = {name: list(seal) for name, seal in seals.items()}
        return {**self.index, "files": files, "here": here, "parts": parts}

    def _commit(self, lease: Lease, of_ranks: list[_Written], mine: dict[str, Seal]) -> None:
        """Write the index, and remove the files of the checkpoint that it replaces."""
        content = self._content(of_ranks, mine)
        replaced = folders.replaced_by(self.path)
        withdrawn = None if replaced is None else self.path / replaced
        try:
            lease.expect_held()
            if isinstance(withdrawn, Path) and has_rank_files(self.path):
                # Tools must not take them for files of the new checkpoint.
                move_rank_files(withdrawn.parent, withdrawn)
            write_index(self.path, content)
        except CheckpointError:
            if isinstance(withdrawn, Path) and folders.replaced_by(self.path) == replaced:
                with suppress(CheckpointError):
                    move_rank_files(withdrawn, withdrawn.parent)
            folders.discard_uncommitted(self.path, self.mark)
            raise
        folders.retire(self.path, replaced, self.mark)

    def _parts(self) -> list[ModelPart]:
        """Return each part of the model, as this folder's index describes it.

        The dense parameters of all model-parallel parts come first, then experts.
        """
        keys = {
            (place > 0, report.part, ranks)
            for report in self.reports
            for place, ranks in enumerate(report.rows)
        }
        parts = []
        for _, _, ranks in sorted(keys):
            of_part = [self.reports[rank] for rank in ranks]
            # Replicated values are read from this folder if it has them.
            in_folder = [one for one in of_part if one.folder_ranks == self.folder_ranks] or [
                one for one in of_part if one.folder_ranks == of_part[0].folder_ranks
            ]
            rows = [one.rows[ranks].mine for one in of_part]
            rows += [one.rows[ranks].replicated for one in in_folder]
            parts.append(describe(of_part[0].heads[ranks], rows))
        return parts


def begin(request: SaveRequest, live: Live) -> SaveJob:
    """Gather everything to write; tensors are views of the state under training.

    All ranks must call it.

    Raises:
        CheckpointError: on every rank: the tag is not a folder name, or some state cannot be
            saved.
    """
    world, ranks = live.world, live.ranks
    if live.rules.writes_deepspeed:
        expect_directory(request.save_dir)
    compared = live.runtime.reshard_all()
    for bucket in live.runtime.buckets:
        bucket.settle()
    own_values = find_own_values(live)
    mark, tag, jobs = gather_objects((new_mark(), request.tag, request.jobs), world)[0]
    request = request._replace(tag=tag, jobs=jobs)
    what = f"checkpoint {tag!r} was not saved"
    with together(world, what):
        folders.check_tag(tag)
        folders.check_save_dir(request.save_dir)
    what = f"checkpoint {request.save_dir / tag} was not saved"
    folder_ranks = tuple(range(world.size))
    has_several = False
    if live.rules.is_node_local and isinstance(request.save_dir, Path):
        has_several = True
        folder_ranks = _ranks_of_folder(request.save_dir, mark, world, what)
    # The ranks of this part that write into the same folder.
    holders = Holders(tuple(rank for rank in ranks.numbers if rank in folder_ranks), world.rank)
    with together(world, what):
        own, client = _own(live), _client(request.client_state)
        index = _index(live, request, mark, client)
        contents = collect(live, own_values, holders, compared, request.without_frozen)
    heads = {some: head_of(live, some) for some in contents.parts if some[0] == world.rank}
    report = _RankReport(live.part, folder_ranks, contents.parts, heads)
    # A rank that writes an index needs all reports; with one folder that is the first rank.
    gather = gather_objects if has_several else gather_objects_at_first
    reports = gather(report, world)
    return SaveJob(request, mark, folder_ranks, live.rules, contents, own, client, index, reports)


def _ranks_of_folder(save_dir: Path, mark: str, world: Ranks, what: str) -> tuple[int, ...]:
    """Return the ranks that see the same folder; each writes a file and looks for the others'."""

    def trace(rank: int) -> Path:
        return draft_of(save_dir / f"rank_{rank:05d}", mark)

    folder_ranks: list[int] = []
    try:
        with together(world, what), system_errors(save_dir, "written"):
            save_dir.mkdir(parents=True, exist_ok=True)
            trace(world.rank).touch()
        with together(world, what), system_errors(save_dir, "read"):
            found = {path.name for path in save_dir.iterdir()}
            folder_ranks = [rank for rank in range(world.size) if trace(rank).name in found]
    finally:
        with suppress(OSError):
            trace(world.rank).unlink(missing_ok=True)
    return tuple(folder_ranks)


def _client(client_state: Mapping[str, Any]) -> Plain:
    tensors: dict[str, Tensor] = {}
    return Plain(encoded(dict(client_state), "client_state", tensors), tensors)


def _own(live: Live) -> Plain:
    """Return this rank's own state: random generators, loader position, modules' extra state."""
    tensors: dict[str, Tensor] = {}
    place = None
    if live.loader is not None:
        try:
            place = live.loader.state_dict()
        except Exception as error:  # the data set's own code
            raise CheckpointError(
                f"the training loader's state_dict() failed: {error!r}"
            ) from error
    extra = {path: module.get_extra_state() for path, module in live.with_extra_state()}
    exchange = live.runtime.exchange
    memory = None if exchange is None else exchange.memory()
    values = {
        "exchange": encoded(memory, "the optimizer's unsent updates", tensors),
        "extra": encoded(extra, "the extra state of modules", tensors),
        "loader": encoded(place, "the state of the training loader", tensors),
        "random": encoded(randomness.states(), "the random generators", tensors),
    }
    return Plain(values, tensors)


def _index(live: Live, request: SaveRequest, mark: str, client: Plain) -> dict[str, Any]:
    optimizer = live.optimizer
    order = [names[0] for names in live.names().values()]
    return {
        **({ORDER: order} if live.rules.writes_deepspeed else {}),
        "save": mark,
        "saved_at": time.time(),
        JOBS: list(request.jobs),
        "was_latest": request.save_latest,
        "world_size": live.world.size,
        "stage": live.rules.stage,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "scalars": encoded(_scalars(live), "the state of the engine"),
        "client_state": client.values,
        "schedule": _schedule_state(live.schedule),
    }


def _scalars(live: Live) -> dict[str, Any]:
    """Return the engine's numbers, and the state of listeners that have any."""
    states = {name: listener.state_dict() for name, listener in live.listeners.items()}
    kept = {name: dict(state) for name, state in states.items() if state is not None}
    return {**live.scalars, LISTENERS: kept} if kept else live.scalars


def _schedule_state(schedule: Any) -> Any:
    """Return the part of a schedule's state that JSON can hold; log what is left out."""
    if not hasattr(schedule, "state_dict"):
        return None
    name = type(schedule).__name__
    tell = partial(_log.warning, "%s is saved without %s", name)
    return encoded_known(schedule.state_dict(), name, tell)


# ---- scripts beside a checkpoint -----------------------------------------------------------------

_TEXT = '''\
#!/usr/bin/env python
"""Write the {what} of a checkpoint in this folder: ./{name} . OUTPUT_FOLDER{more}"""

import sys

from hadal.cli.deepspeed import {main}

sys.exit({main}())
'''
SCRIPTS = {
    "zero_to_fp32.py": _TEXT.format(
        what="fp32 weights", name="zero_to_fp32.py", more="", main="zero_to_fp32"
    ),
    "zero_to_torch.py": _TEXT.format(
        what="weights", name="zero_to_torch.py", more=" --dtype bf16", main="zero_to_torch"
    ),
}


def place_scripts(save_dir: Location) -> None:
    """Write the scripts that are missing from a directory of checkpoints; log a warning on failure.

    None are written to a URL, where they cannot run. They are not part of a checkpoint: nothing is
    read from them, and no checksum covers them.
    """
    if not isinstance(save_dir, Path):
        return
    for name, text in SCRIPTS.items():
        path = save_dir / name
        try:
            if not path.exists():
                replace_file(path, text)
                path.chmod(path.stat().st_mode | 0o100)
        except (CheckpointError, OSError) as error:
            _log.warning("%s was not written: %s", path, error)
