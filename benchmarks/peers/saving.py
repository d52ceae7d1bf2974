"""One rank of one contestant that saves and loads: ``python -m peers.saving JOB``.

Writes its measurements as JSON to the job's ``output`` folder.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from peers.contestants import ADAMW, join_group
from peers.model import build_batches, build_model
from peers.settings import Contestant, Workload, ds_config

_BLOCK = 1 << 22


class Saver(Protocol):
    """A trained model under one library, ready to be saved."""

    def save(self, folder: Path, tag: str) -> None:
        """Save; return when training may continue."""

    def finish(self) -> None:
        """Wait until the checkpoint is complete."""

    def load(self, folder: Path, tag: str) -> None:
        """Load it again."""


class EngineSaver:
    """Hadal and DeepSpeed."""

    def __init__(self, engine: Any, finish: Callable[[], None]) -> None:
        self._engine = engine
        self.finish = finish

    def save(self, folder: Path, tag: str) -> None:
        self._engine.save_checkpoint(str(folder), tag)

    def load(self, folder: Path, tag: str) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag)
        if path is None:
            raise RuntimeError(f"nothing was loaded from {folder}")


class TorchSaver:
    """torch.save of the full state by rank 0: weights in bf16, fp32 masters, two moments."""

    def __init__(self, workload: Workload) -> None:
        self._master = build_model(workload)
        self._weights = build_model(workload).to(torch.bfloat16)
        self._optimizer = torch.optim.AdamW(self._master.parameters(), **ADAMW)
        for parameter in self._master.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()

    def save(self, folder: Path, tag: str) -> None:
        if dist.get_rank() == 0:
            (folder / tag).mkdir(parents=True)
            state = {
                "model": self._weights.state_dict(),
                "master": self._master.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }
            torch.save(state, folder / tag / "state.pt")

    def finish(self) -> None:
        """Do nothing: saves are synchronous."""

    def load(self, folder: Path, tag: str) -> None:
        state = torch.load(folder / tag / "state.pt", weights_only=True)
        self._weights.load_state_dict(state["model"])
        self._master.load_state_dict(state["master"])
        self._optimizer.load_state_dict(state["optimizer"])


def _start(library: str, stage: int, workload: Workload, *, trained: bool) -> Saver:
    if library == "torch":
        return TorchSaver(workload)
    name = "deepspeed" if library == "deepspeed" else "hadal"
    config = ds_config(workload, Contestant(name, stage, "bf16"))
    if library == "hadal async":
        config["checkpoint"] = {"async_save": True}
    if library == "hadal unverified":
        config["checkpoint"] = {"verify_checksums": False}
    if name == "hadal":
        from hadal import initialize
    else:
        from deepspeed import initialize
    model = build_model(workload)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in build_batches(workload, dist.get_rank()) if trained else ():
        engine.backward(engine(batch))
        engine.step()
    finish = engine.wait_for_checkpoint if name == "hadal" else lambda: None
    return EngineSaver(engine, finish)


def _timed(act: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _evict(folder: Path) -> None:
    """Evict the files from the system's cache, as a new job would find it."""
    for path in folder.rglob("*") if hasattr(os, "posix_fadvise") else ():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _bring_in(folder: Path) -> None:
    """Read files into the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def _settle(seconds: float) -> None:
    """Wait, so that a virtual machine's host can reclaim free memory.

    Otherwise a library that evicted much would find that memory at once, and others would not.
    """
    dist.barrier()
    time.sleep(seconds)


def _measure(saver: Saver, folder: Path, repeat: int, settle: float) -> dict[str, Any]:
    """Save and load in turns; seconds of each, and the bytes of one checkpoint."""
    found: dict[str, Any] = {"before": _peak()}
    found |= {name: [] for name in ("save", "whole", "load", "again")}
    for number in range(repeat):
        tag = f"tag{number}"
        seconds = _timed(lambda tag=tag: saver.save(folder, tag))
        found["save"].append(seconds)
        found["whole"].append(seconds + _timed(saver.finish))
        dist.barrier()
        # Pending writes must not count in a later measurement.
        os.sync()
    found["peak_saving"] = _peak()
    _evict(folder)
    _settle(settle)
    for number in range(repeat):
        load = partial(saver.load, folder, f"tag{number}")
        found["load"].append(_timed(load))
        _bring_in(folder / f"tag{number}")
        found["again"].append(_timed(load))
    files = [path for path in (folder / "tag0").rglob("*") if path.is_file()]
    found["nbytes"] = sum(path.stat().st_size for path in files)
    dist.barrier()
    return found


def _measure_new(saver: Saver, folder: Path, settle: float) -> dict[str, Any]:
    """Seconds of the first load of a new job.

    Also the seconds in which the disk alone delivers the same bytes, if every rank reads its part.
    """
    found = {}
    for name, act in (
        ("new", partial(saver.load, folder, "tag0")),
        ("raw", partial(_read_past_the_cache, folder / "tag0")),
    ):
        if dist.get_rank() == 0:
            _evict(folder)
        _settle(settle)
        found[name] = [_timed(act)]
    return found


def _read_past_the_cache(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # A huge page if available: a disk reads it in a few requests.
    memory = mmap.mmap(-1, 2 * _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _BLOCK
    block = memoryview(memory)[start : start + _BLOCK]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        size, ranks = path.stat().st_size, dist.get_world_size()
        share = -(-size // ranks // _BLOCK) * _BLOCK
        place = dist.get_rank() * share
        while place < min(size, (dist.get_rank() + 1) * share):
            place += os.preadv(descriptor, [block], place)
        os.close(descriptor)


def main() -> None:
    job = json.loads(sys.argv[1])
    workload = Workload(**job["workload"])
    folder, is_new, settle = Path(job["folder"]), bool(job["new"]), float(job["settle"])
    join_group(workload)
    saver = _start(job["library"], job["stage"], workload, trained=not is_new)
    if is_new:
        result = _measure_new(saver, folder, settle)
    else:
        result = _measure(saver, folder, job["repeat"], settle)
    path = Path(job["output"]) / f"rank{os.environ['RANK']}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").replace(path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
