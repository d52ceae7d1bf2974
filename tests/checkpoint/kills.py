"""Kills of jobs at any moment of their saves: nothing that was saved is lost, and jobs go on.

A job trains, saves and is killed; the next one loads what there is, checks it, and is killed in its
turn. A kill is at a drawn operation on files (or at a request to S3: before it, while it is under
way, or after it), of all ranks, or of one while the others lose it. The next job must find at least
the newest checkpoint whose save has returned, every complete checkpoint whole, and its own state
bit for bit that of a job which was never killed: weights, masters, moments and random generators.

Run as a program, it goes through the matrix of stages, ranks and storages:

    python tests/checkpoint/kills.py --kills 1000

Ranks are forked from this process, which has imported everything once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from engine.toys import engine_of, train

from checkpoint import s3
from hadal import utils
from hadal.checkpoint import folders
from hadal.checkpoint.deepspeed.pickles import read_pickle
from hadal.checkpoint.files import items_of, location_of, read_small
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.storage import Location
from hadal.checkpoint.stored import StoredSource

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
MARK = re.compile("[0-9a-f]{16}")
WAYS = ("at once", "in a thread", "staged on disk", "with DeepSpeed's files")
_LOST_S = 0.3
"""The time that the other ranks live on after one is lost."""


class Cell(NamedTuple):
    """One cell of the matrix."""

    stage: int
    ranks: int
    url: str
    """The place where jobs save: a directory, or a URL of S3."""
    scratch: str
    """A directory of this machine, for staging and meeting."""

    @property
    def is_remote(self) -> bool:
        """True behind a URL."""
        return "://" in self.url

    @property
    def ways(self) -> Sequence[str]:
        """The ways of saving that this place has."""
        return WAYS[:3] if self.is_remote else WAYS


class Line(NamedTuple):
    """A rank's message: it has (L)oaded, (S)aved, (E)nded, or was at a step of (R)eference."""

    kind: str
    rank: int
    number: int
    digest: int = 0


class Moments:
    """A counter of operations on storage, which kills at one of them.

    It counts from the first call of `begin`. Under a directory these are the events that Python
    reports, and writes, of which a fatal one writes a half.
    """

    def __init__(self, cell: Cell, fatal: int, kills_all: bool) -> None:
        self.fatal, self.count, self.kills_all = fatal, -1, kills_all
        self.roots = (cell.url, f"{cell.scratch}/staging")
        sys.addaudithook(self._heard)
        self._write, os.write = os.write, self._written  # type: ignore[assignment]
        if cell.is_remote:
            self._count_requests()

    def begin(self) -> None:
        """Count from now on."""
        self.count = max(self.count, 0)

    def is_fatal(self) -> bool:
        """Count one more; return whether it is the fatal one."""
        if self.count < 0:
            return False
        self.count += 1
        return self.count == self.fatal

    def _die(self) -> None:
        if self.kills_all:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        is_ours = self.count >= 0 and event in EVENTS and str(args[0]).startswith(self.roots)
        if is_ours and self.is_fatal():
            self._die()

    def _written(self, descriptor: int, given: Any) -> int:
        if self.count >= 0:
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                if path.startswith(self.roots) and self.is_fatal():
                    self._write(descriptor, memoryview(given)[: len(given) // 2])
                    self._die()
        return self._write(descriptor, given)

    def _count_requests(self) -> None:
        import s3fs

        real = s3fs.S3FileSystem._call_s3

        async def call(filesystem: Any, *args: Any, **options: Any) -> Any:
            if self.is_fatal():
                self._die()
            under_way = asyncio.ensure_future(real(filesystem, *args, **options))
            if self.is_fatal():
                await asyncio.sleep(0.001)
                self._die()
            found = await under_way
            if self.is_fatal():
                self._die()
            return found

        s3fs.S3FileSystem._call_s3 = call


def digest(engine: Any) -> int:
    """Return a checksum of all that training depends on, bit for bit. A collective."""
    crc32 = zlib.crc32(torch.get_rng_state().numpy().tobytes(), engine.global_steps)
    values = list(engine.state_dict().values())
    for parameter in engine.module.parameters():
        values.append(utils.safe_get_full_fp32_param(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            values.append(utils.safe_get_full_optimizer_state(parameter, key))
    for value in values:
        if value is not None:
            crc32 = zlib.crc32(value.contiguous().view(torch.uint8).numpy().tobytes(), crc32)
    return crc32


def one_update(engine: Any) -> None:
    """Train by a batch and a random number that depend on the step and on what was drawn before."""
    torch.rand(3)
    train(engine, range(engine.global_steps, engine.global_steps + 1))


def settings_of(cell: Cell, way: str) -> dict[str, Any]:
    """Return the configuration of a job that saves in this way."""
    section: dict[str, Any] = {"keep_last": 2, "async_save": way in WAYS[1:3]}
    section["deepspeed_files"] = way == WAYS[3]
    if way == "staged on disk":
        section["staging"] = {"folder": f"{cell.scratch}/staging"}
    return {"checkpoint": section, "bf16": {"enabled": True}}


def be_a_rank(cell: Cell, way: str, moments: Moments, tell: Callable[..., None]) -> None:
    """Load the latest checkpoint and save twice; tell each finished step."""
    engine = engine_of(cell.stage, **settings_of(cell, way))
    rank = torch.distributed.get_rank()
    path, client_state = engine.load_checkpoint(cell.url)
    if path is not None:
        assert client_state["step"] == engine.global_steps
        if rank == 0:
            check_deepspeed_files(location_of(cell.url))
            faults = [(one.tag, one.faults) for one in inspected(cell.url) if one.faults]
            assert not faults, faults
    tell("L", rank, engine.global_steps, digest(engine) if path is not None else 0)
    for tag in ("best", None):
        one_update(engine)
        after = digest(engine)
        moments.begin()
        engine.save_checkpoint(cell.url, tag, client_state={"step": engine.global_steps})
        engine.wait_for_checkpoint()
        tell("S", rank, engine.global_steps, after)
    tell("E", rank, moments.count)


def check_deepspeed_files(place: Location) -> None:
    """Check that tools of DeepSpeed's find the state of the index or none; then finish moves."""
    for folder in folders.all_of(place) if isinstance(place, Path) else ():
        for file in folder.glob("*model_states.pt"):
            steps = StoredSource(folder).scalars["counters"]["global_steps"]
            assert read_pickle(file)["global_steps"] == steps, file
    folders.put_beside(place)
    assert folders.put_beside(place) == []


def be_never_killed(cell: Cell, updates: int, tell: Callable[..., None]) -> None:
    """Train on, and tell each state: what jobs that were killed must come to."""
    engine = engine_of(cell.stage, **settings_of(cell, "at once"))
    for _ in range(updates):
        one_update(engine)
        tell("R", torch.distributed.get_rank(), engine.global_steps, digest(engine))


def job(cell: Cell, work: Callable[[Any], None]) -> tuple[list[int], list[Line]]:
    """Run `work(tell)` on all ranks, in a process group of their own; return how they ended.

    Once one was killed, the others are after a moment.
    """
    listens, told = os.pipe()
    os.set_blocking(listens, True)
    leader, children = 0, []
    with tempfile.TemporaryDirectory(dir=cell.scratch) as meeting:
        for rank in range(cell.ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.setpgid(0, leader)
                    os.close(listens)
                    torch.set_num_threads(1)
                    store = torch.distributed.FileStore(f"{meeting}/store", cell.ranks)
                    torch.distributed.init_process_group(
                        "gloo", store=store, rank=rank, world_size=cell.ranks
                    )
                    work(partial(_tell, os.write, told))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            leader = leader or child
            with suppress(OSError):
                os.setpgid(child, leader)
            children.append(child)
        os.close(told)
        statuses = _ended(children, leader)
    with os.fdopen(listens) as file:
        rows = [line.split() for line in file]
    return statuses, [Line(row[0], *map(int, row[1:])) for row in rows]


def _tell(write: Callable[[int, bytes], int], told: int, *line: Any) -> None:
    write(told, (" ".join(map(str, line)) + "\n").encode())


def _ended(children: Sequence[int], leader: int) -> list[int]:
    """Wait for all; a moment after one was killed, kill the others."""
    found: dict[int, int] = {}
    deadline = float("inf")
    while len(found) < len(children):
        for child in children:
            if child not in found:
                number, status = os.waitpid(child, os.WNOHANG)
                if number:
                    found[child] = os.waitstatus_to_exitcode(status)
                    if found[child] != 0:
                        deadline = min(deadline, time.monotonic() + _LOST_S)
        if time.monotonic() > deadline:
            deadline = float("inf")
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        time.sleep(0.002)
    return [found[child] for child in children]


class Series:
    """The jobs of one cell, each going on where the one before it was killed."""

    def __init__(self, cell: Cell, kills: int, seed: int = 7) -> None:
        self.cell, self.kills = cell, kills
        self.drawn = random.Random(seed)
        self.done = 0
        """The newest step whose save has returned."""
        self.states: list[list[str]] = []
        """The files left over after each kill."""
        self.resumed = 0
        """The number of times that a rank's state was compared after a load."""

    def run(self) -> None:
        """Kill and go on, then end in order.

        Raises:
            AssertionError: something was lost, damaged, or is not bit for bit what it must be.
        """
        Path(self.cell.scratch, "staging").mkdir(parents=True, exist_ok=True)
        statuses, lines = job(self.cell, lambda tell: be_never_killed(self.cell, self._last, tell))
        assert set(statuses) == {0}, statuses
        self.reference = {(one.rank, one.number): one.digest for one in lines}
        counts: dict[str, dict[int, int]] = {}
        self._live("at once", 0, -1, True)
        for way in self.cell.ways:
            lines = self._live(way, 0, -1, True)  # it replaces, and prunes
            counts[way] = {one.rank: one.number for one in lines if one.kind == "E"}
            assert min(counts[way].values()) > 2, counts
        for number in range(self.kills):
            way = self.cell.ways[number % len(self.cell.ways)]
            # The first rank, which commits, more often than the others.
            killer = self.drawn.choice([0, *range(self.cell.ranks)])
            fatal = self.drawn.randint(1, counts[way][killer])
            self._live(way, killer, fatal, self.drawn.random() < 0.5)
            self.states.append(leftovers(self.cell))
        self._live("at once", 0, -1, True)
        assert set(leftovers(self.cell)) <= {"home", "lease", "partial"}
        in_child(lambda: folders.clean(location_of(self.cell.url), 0))
        left = leftovers(self.cell)
        assert left == [], left

    @property
    def _last(self) -> int:
        return 2 * (self.kills + len(WAYS) + 2)

    def _live(self, way: str, killer: int, fatal: int, kills_all: bool) -> list[Line]:
        def work(tell: Callable[..., None]) -> None:
            rank = torch.distributed.get_rank()
            moments = Moments(self.cell, fatal if rank == killer else -1, kills_all)
            be_a_rank(self.cell, way, moments, tell)

        statuses, lines = job(self.cell, work)
        what = (self.cell, way, killer, fatal, kills_all, statuses, lines)
        # A job may have fewer moments than the one that was counted: ranks share some of the work.
        is_whole = [one.kind for one in lines].count("E") == self.cell.ranks
        if fatal < 0:
            assert is_whole and set(statuses) == {0}, what
        elif not is_whole:
            assert statuses[killer] == -signal.SIGKILL, what
        loaded = [one for one in lines if one.kind == "L"]
        assert len(loaded) == self.cell.ranks, what  # killed only while they saved
        # What a save has promised is there; a save that was cut short may have come through.
        assert {one.number for one in loaded} == {loaded[0].number}, what
        assert loaded[0].number >= self.done, (self.done, what)
        for one in lines:
            if one.kind in "LS" and one.number:
                assert self.reference[one.rank, one.number] == one.digest, (one, what)
        self.resumed += len(loaded) if loaded[0].number else 0
        self.done = max([loaded[0].number, *(one.number for one in lines if one.kind == "S")])
        return lines


def leftovers(cell: Cell) -> list[str]:
    """Return what no complete checkpoint has: kinds of files, and folders that no index names.

    For URLs in a process of its own, as those that are forked next must not share its connections.
    """
    if not cell.is_remote:
        return _leftovers(location_of(cell.url))
    listens, told = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(told, json.dumps(_leftovers(location_of(cell.url))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    with os.fdopen(listens) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    found: list[str] = json.loads(text)
    return found


def _leftovers(place: Location) -> list[str]:
    found = set()
    for tag in items_of(place):
        # The draft of a lease is removed after an hour.
        if tag.name.startswith(".") and ".lease." not in tag.name:
            found.add(tag.name.rpartition(".")[2])
        if not tag.is_folder:
            continue
        names = {item.name for item in items_of(place / tag.name)}
        found |= {"lease" for name in names if name.endswith(".lease")}
        found |= {"partial" for name in names if name[0] == "." and ".lease." not in name}
        named = None
        if "index.json" in names:
            named = json.loads(read_small(place / tag.name / "index.json", 1 << 30))["save"]
        homes = [name for name in names if MARK.fullmatch(name)]
        found |= {"home"} if homes != [named] * (named is not None) else set()
    return sorted(found)


def in_child(act: Callable[[], object]) -> None:
    """Run something in a forked process, whose threads and connections end with it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def matrix(
    kills: int, stages: Sequence[int], ranks: Sequence[int], storages: Sequence[str]
) -> list[Series]:
    """Run as many kills as asked for, spread evenly over the cells; print a line for each."""
    cells = list(product(storages, stages, ranks))
    shares = [kills // len(cells) + (number < kills % len(cells)) for number in range(len(cells))]
    found = []
    with ExitStack() as stack:
        if "s3" in storages:
            address = stack.enter_context(s3.server("none"))
            s3.point_at(address, read_timeout_s=20)
            in_child(lambda: s3.make_bucket("kills"))
        for (storage, stage, count), share in zip(cells, shares, strict=True):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            name = f"{scratch}/run"
            if storage == "s3":
                name = f"s3://kills/{stage}-{count}-{os.urandom(4).hex()}"
            began = time.monotonic()
            series = Series(Cell(stage, count, name, scratch), share, seed=stage * 10 + count)
            series.run()
            found.append(series)
            cut = sum(bool(state) for state in series.states)
            print(
                f"{storage}, stage {stage}, {count} ranks: {share} kills, {cut} left files of an"
                f" unfinished save; {series.resumed} states resumed bit for bit, to step"
                f" {series.done}; nothing lost ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through the matrix; an AssertionError tells what was lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="kills, over all cells")
    parser.add_argument("--stages", default="0123", help="ZeRO stages, as 0123")
    parser.add_argument("--ranks", default="12", help="numbers of ranks, as 12")
    parser.add_argument("--storages", default="local,s3", help="local, s3, or both")
    parsed = parser.parse_args(arguments)
    stages, ranks = [*map(int, parsed.stages)], [*map(int, parsed.ranks)]
    found = matrix(parsed.kills, stages, ranks, parsed.storages.split(","))
    # The kills did fall into the middle of saves.
    cut = sum("home" in state for series in found for state in series.states)
    assert cut >= parsed.kills // 6, cut
    print(f"{sum(series.kills for series in found)} kills: nothing lost", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
