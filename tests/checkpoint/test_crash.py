"""Kills of all ranks at any moment of a save: complete checkpoints survive, and load.

Run as a program, this file is the process that starts the ranks: it imports everything once, and
forks them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from cases import often
from engine.toys import engine_of, train

KILLS = {"a few": 6, "many": 20}
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
MARK = re.compile("[0-9a-f]{16}")


def digest(engine: Any) -> int:
    """Return a checksum of all weights."""
    crc32 = 0
    for value in engine.state_dict().values():
        crc32 = zlib.crc32(value.numpy().tobytes(), crc32)
    return crc32


class Moments:
    """A counter of file operations under a folder, which kills all ranks at one of them."""

    def __init__(self, folder: str, fatal: int) -> None:
        self.folder, self.fatal, self.count = folder, fatal, -1
        sys.addaudithook(self.heard)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.count < 0 or event not in EVENTS or not str(args[0]).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fatal:
            os.killpg(0, signal.SIGKILL)


def be_a_rank(rank: int, folder: str, meeting: str, killer: int, fatal: int, told: int) -> None:
    """Load the latest checkpoint, check it, and save until killed; report each finished step."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(meeting, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    moments = Moments(folder, fatal if rank == killer else -1)
    # Half of them are killed while a thread writes.
    engine = engine_of(3, checkpoint={"keep_last": 2, "async_save": fatal % 2 == 1})
    path, client_state = engine.load_checkpoint(folder)
    if path is not None:
        assert client_state["digest"] == digest(engine)
        assert client_state["step"] == engine.global_steps
    os.write(told, b"L%d\n" % engine.global_steps)
    for tag in ("best", None):
        train(engine, range(engine.global_steps, engine.global_steps + 1))
        state = {"digest": digest(engine), "step": engine.global_steps}
        moments.count = max(moments.count, 0)
        engine.save_checkpoint(folder, tag, client_state=state)
        engine.wait_for_checkpoint()
        os.write(told, b"S%d\n" % engine.global_steps)
    os.write(told, b"E%d\n" % moments.count)


def one_life(folder: str, killer: int, fatal: int) -> list[tuple[str, int]]:
    """Run two ranks in their own process group; return what they reported until killed."""
    listens, told = os.pipe()
    leader = 0
    children = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(2):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.setpgid(0, leader)
                    be_a_rank(rank, folder, f"{meeting}/store", killer, fatal, told)
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            leader = leader or child
            with suppress(OSError):
                os.setpgid(child, leader)
            children.append(child)
        os.close(told)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with os.fdopen(listens) as file:
        lines = [(line[0], int(line[1:])) for line in file]
    # A life may have fewer moments than the one that was counted: ranks share some of the work.
    is_whole = [kind for kind, _ in lines].count("E") == 2
    wanted = [0, 0] if is_whole else [-signal.SIGKILL] * 2
    assert statuses == wanted, (statuses, lines)
    return lines


def many_lives(folder: str, kills: int) -> list[str]:
    """Kill and resume, with ranks forked from one process that has everything imported."""
    found = random.Random(7)
    lines = one_life(folder, 0, -1)
    lines = one_life(folder, 0, -1)  # this one replaces, and prunes
    counts = sorted(count for kind, count in lines if kind == "E")
    assert counts[0] > 2, lines
    done = max(step for kind, step in lines if kind == "S")
    states = []
    moments = found.sample(range(1, counts[1] + 1), kills - kills // 5)
    moments = [(0, moment) for moment in moments]
    moments += [(1, moment) for moment in found.sample(range(1, counts[0] + 1), kills // 5)]
    for killer, moment in moments:
        lines = one_life(folder, killer, moment)
        loaded = [step for kind, step in lines if kind == "L"]
        assert len(loaded) == 2, lines  # both have loaded, and were killed while they saved
        # What a save has promised is there; a save that was cut short may have come through.
        assert loaded[0] == loaded[1] >= done, (loaded, done, lines)
        done = max([loaded[0], *(step for kind, step in lines if kind == "S")])
        states.append(" ".join(leftovers(Path(folder))))
    lines = one_life(folder, 0, -1)
    assert min(step for kind, step in lines if kind == "L") >= done
    assert leftovers(Path(folder)) == [], sorted(map(str, Path(folder).rglob("*")))
    return states


def leftovers(folder: Path) -> list[str]:
    """Return what no complete checkpoint has: its kinds of files, and folders that none names."""
    hidden = [*folder.glob(".*"), *folder.glob("*/.*")]
    # The draft of a lease is removed after an hour.
    found = {path.suffix for path in hidden if ".lease." not in path.name}
    found |= {path.suffix for path in folder.glob("*/*.lease")}
    for tag in folder.iterdir():
        if tag.is_dir():
            index = tag / "index.json"
            named = json.loads(index.read_text())["save"] if index.exists() else None
            homes = [path.name for path in tag.iterdir() if MARK.fullmatch(path.name)]
            found |= {"home"} if homes != [named] * (named is not None) else set()
    return sorted(found)


@pytest.mark.parametrize("kills", often(KILLS, "a few"))
def test_a_kill_at_any_moment_leaves_the_newest_checkpoint(kills: str, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), str(KILLS[kills])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-8000:]
    states = done.stdout.split("\n")[:-1]
    # The kills did fall into the middle of saves.
    assert len(states) == KILLS[kills]
    assert sum("home" in state for state in states) >= KILLS[kills] // 6, states


if __name__ == "__main__":
    print("\n".join(many_lives(sys.argv[1], int(sys.argv[2]))))
