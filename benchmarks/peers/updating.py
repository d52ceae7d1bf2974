"""The update of offloaded state, in host memory and on a disk, against its limits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

import torch
from optimizer import (
    KINDS,
    PRECISIONS,
    Stopwatch,
    clocked,
    gradients_of,
    hadal_step,
    in_turns,
    kept_to_threads,
    torch_step,
)

import hadal
from hadal.offload import BufferPool, DiskStore
from hadal.offload.speed import SpeedTest
from hadal.offload.tensors import DiskTensor, Stop, one_update, walk
from hadal.optim.on_disk import DiskSteps
from hadal.optim.workspace import block_numel
from hadal.zero.offload import Offload
from hadal.zero.policy import Tier
from peers.launch import Interpreter, environment

_HOST = torch.device("cpu")
_KIND = KINDS["AdamW"]
_PRECISIONS = PRECISIONS["bf16, fp32 master"]
_TORCH = "torch.optim.AdamW(fused=True) and its casts"
_TORCH_KEPT = "the same, the cast gradient's memory kept"
_DEEPSPEED = "DeepSpeedCPUAdam"
# The required ratio of Hadal's bytes per second to each peer's.
GOALS = {_TORCH: 1.3, _DEEPSPEED: 1.0}


@dataclass(frozen=True)
class Update:
    """The settings: elements, rounds and threads."""

    numel: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Row:
    """One contestant's seconds in each round, and their ratio to another's."""

    who: str
    nbytes: int
    """Bytes that an update moves, for all contestants."""
    seconds: list[float]
    ratio: float
    """Its seconds divided by those of Hadal's update: the median over the rounds."""

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / median(self.seconds) / 1e9


class DeepSpeedAdam:
    """DeepSpeed's update in its own environment, in a process that steps on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self) -> float:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None  # both pipes were requested
        asked.write("\n")
        asked.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"peers.cpu_adam ended with code {self._process.wait()}")
        return float(answer)


@contextmanager
def _deepspeed(interpreter: Interpreter, update: Update, log: IO[str]) -> Iterator[DeepSpeedAdam]:
    variables = {**environment(interpreter), "OMP_NUM_THREADS": str(update.threads)}
    process = subprocess.Popen(
        [interpreter.python, "-m", "peers.cpu_adam", str(update.numel), str(update.threads)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        yield DeepSpeedAdam(process)
    finally:
        process.communicate()


@contextmanager
def prepared(threads: int) -> Iterator[None]:
    """Set up the process like an engine, with this many threads."""
    torch.set_num_threads(threads)
    hadal.init_distributed()
    yield
    torch.distributed.destroy_process_group()


def in_memory(update: Update, deepspeed: Interpreter | None) -> list[Row]:
    """Hadal's update in host memory, a copy of the same bytes, and the peers' updates, in turns."""
    nbytes = _PRECISIONS.nbytes(_KIND.kept) * update.numel
    source = torch.randn(nbytes // 8)  # a copy reads and writes each byte
    target = torch.empty_like(source)
    offload = Offload(optimizer=Tier.HOST)
    ours, theirs = (gradients_of(update.numel, _PRECISIONS, _HOST, offload) for _ in range(2))
    fused = {"fused": True}
    actions = {
        "Hadal": hadal_step(_KIND, ours, 1.0),
        "copy": lambda: target.copy_(source),
        _TORCH: torch_step(theirs, fused),
        _TORCH_KEPT: torch_step(theirs, fused, keeps_cast=True),
    }
    watches: dict[str, Stopwatch] = {who: clocked(act, _HOST) for who, act in actions.items()}
    with ExitStack() as stack:
        stack.enter_context(kept_to_threads(update.threads))
        if deepspeed is not None:
            watches[_DEEPSPEED] = stack.enter_context(_deepspeed(deepspeed, update, sys.stderr))
        seconds = in_turns(watches, update.rounds)
    return _rows(seconds, nbytes)


def on_disk(update: Update, folder: Path, seconds: float) -> list[Row]:
    """Hadal's update of state on a disk, only its requests, and the disk's speed, in turns."""
    with ExitStack() as stack:
        store = DiskStore(folder)
        stack.callback(store.close)
        offload = Offload(optimizer=Tier.DISK, optimizer_disk=store)
        gradients = gradients_of(update.numel, _PRECISIONS, _HOST, offload)
        kinds = 1 + _KIND.kept
        nbytes = kinds * update.numel * _PRECISIONS.master.itemsize
        track = SpeedTest(store, nbytes // kinds)

        def disk() -> float:
            return (
                nbytes
                / 1e9
                * sum(1 / speed.gb_per_s for speed in (track.read(seconds), track.written(seconds)))
            )

        watches: dict[str, Stopwatch] = {
            "Hadal": clocked(hadal_step(_KIND, gradients, 1.0), _HOST),
            "the same requests, and nothing else": clocked(_Requests(store, update.numel), _HOST),
            "as many bytes read, then written": disk,
        }
        return _rows(in_turns(watches, update.rounds), 2 * nbytes)


class _Requests:
    """The reads and writes of an update, without the update."""

    def __init__(self, store: DiskStore, numel: int) -> None:
        steps = DiskSteps()
        kinds = 1 + _KIND.kept
        part = steps.part_numel(kinds, block_numel(_HOST))
        dtype = _PRECISIONS.master
        self._runs = tuple(DiskTensor(store, str(kind), numel, dtype) for kind in range(kinds))
        self._stops = [
            Stop(self._runs, at, min(part, numel - at), self._runs) for at in range(0, numel, part)
        ]
        self._overlap = steps.overlap
        self._pool = BufferPool(kinds * steps.overlap.parts, min(part, numel) * dtype.itemsize)

    def __call__(self) -> None:
        with one_update(lambda: self._runs):
            for _ in walk(self._stops, self._pool, self._overlap):
                pass


def _rows(seconds: Mapping[str, Sequence[float]], nbytes: int) -> list[Row]:
    ours = seconds["Hadal"]
    return [
        Row(who, nbytes, list(times), median(a / b for a, b in zip(times, ours, strict=True)))
        for who, times in seconds.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows, with the ratio of Hadal's bytes per second to theirs."""
    lines = ["| | ms | GB/s | Hadal's GB/s over it |", "|---|---|---|---|"]
    lines += [
        f"| {row.who} | {median(row.seconds) * 1e3:.1f} | {row.gb_per_s:.2f} | {row.ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def verdicts(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """For each row with a goal: the text, and whether it is met."""
    found = []
    for row in rows:
        if row.who in GOALS:
            met = row.ratio >= GOALS[row.who]
            word = "met" if met else "MISSED"
            times = f"{row.ratio:.2f} times the bytes per second"
            text = f"Hadal against {row.who}: {times}, goal {GOALS[row.who]}: {word}"
            found.append((text, met))
    return found
