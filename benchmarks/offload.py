"""The speed of offloading relative to its limits, in one run and in turns.

Disk requests are compared with fio. With ``--step``, updates are compared with a memory copy and
the updates of torch and DeepSpeed, and on a disk with its speed.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from peers.install import DEFAULT_ENVIRONMENT, is_installed
from peers.launch import deepspeed_interpreter

from hadal.config.offload import Aio
from hadal.offload import DiskStore
from hadal.offload.speed import SpeedTest

# The fraction of fio's bytes per second that reads and writes must reach.
GOAL = 0.85
ACTS = ("write", "read")


@dataclass(frozen=True)
class Load:
    """The size, depth and kind of requests."""

    folder: Path
    nbytes: int
    block_nbytes: int
    depth: int
    is_single: bool

    def __str__(self) -> str:
        single = ", single_submit" if self.is_single else ""
        return f"{self.block_nbytes >> 10} KiB x {self.depth}{single}"

    @property
    def settings(self) -> Aio:
        return Aio(
            block_size=self.block_nbytes, queue_depth=self.depth, single_submit=self.is_single
        )


def fio_speed(load: Load, file: Path, act: str, options: argparse.Namespace) -> float:
    """GB/s of one job of fio's own asynchronous engine, past the cache."""
    command = [
        *("fio", "--name=disk", f"--filename={file}", f"--size={load.nbytes}", "--direct=1"),
        *(f"--bs={load.block_nbytes}", f"--iodepth={load.depth}", f"--ioengine={options.engine}"),
        *(f"--rw={act}", "--time_based", f"--runtime={options.seconds}", "--output-format=json"),
    ]
    # glibc then requests huge pages from the kernel, as Hadal does.
    more = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if options.fio_huge_pages else {}
    done = subprocess.run(
        command, env={**os.environ, **more}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)["jobs"][0][act]
    return float(found["io_bytes"] / found["runtime"] / 1e6)


@dataclass
class Row:
    """The figures of each round, by read and write: GB/s, and the ratio of Hadal's to fio's."""

    hadal: dict[str, list[float]] = field(default_factory=lambda: {act: [] for act in ACTS})
    fio: dict[str, list[float]] = field(default_factory=lambda: {act: [] for act in ACTS})

    def shares(self, act: str) -> list[float]:
        return [a / b for a, b in zip(self.hadal[act], self.fio[act], strict=True)]


def measured(load: Load, options: argparse.Namespace) -> Row:
    """Measure both in alternating order on one file, as its position on the disk matters."""
    row = Row()
    store = DiskStore(load.folder, load.settings)
    track = SpeedTest(store, load.nbytes)
    ours: dict[str, Callable[[], float]] = {
        "write": lambda: track.written(options.seconds).gb_per_s,
        "read": lambda: track.read(options.seconds).gb_per_s,
    }
    for number in range(options.rounds):
        for act in ACTS:
            turns = [
                (row.hadal, ours[act]),
                (
                    row.fio,
                    partial(fio_speed, load, store.path, act, options),
                ),
            ]
            for found, turn in turns if number % 2 else reversed(turns):
                found[act].append(turn())
    store.close()
    return row


def print_row(load: Load, row: Row) -> None:
    cells = []
    for act in ACTS:
        shares = row.shares(act)
        cells += [
            f"{median(row.fio[act]):.2f}",
            f"{median(row.hadal[act]):.2f}",
            f"{median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
        ]
    print(f"| {load} | {' | '.join(cells)} |", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--disk", type=Path, metavar="PATH", help="a directory on the disk to measure")
    add("--loads", default="1024x8,1024x32,256x16", help="KiB of a block x depth, with commas")
    add("--gib", type=float, default=1.0, help="length of each contestant's file")
    add("--seconds", type=float, default=2, help="how long each one reads or writes in a round")
    add("--rounds", type=int, default=7)
    add("--engine", default="libaio", help="fio's (libaio, io_uring)")
    add(
        "--fio-huge-pages",
        action="store_true",
        help="use huge pages for fio's memory, as Hadal does",
    )
    add(
        "--step", action="store_true", help="measure updates, with --disk also those of state on it"
    )
    add("--numel", type=int, default=1 << 25, help="elements that are updated")
    add("--threads", type=int, default=1, help="threads of an update; 1 is bound to one core")
    add("--deepspeed", type=Path, metavar="DIR", default=DEFAULT_ENVIRONMENT)
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--strict", action="store_true", help="exit with 1 if the goal is missed")
    options = parser.parse_args(arguments)
    if options.disk is None and not options.step:
        parser.error("nothing to measure: pass a directory (--disk PATH) or --step")
    return options


def measure_requests(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Print the comparison with fio; return every measurement, and whether all goals are met."""
    heads = [f"{act}, {what}" for act in ACTS for what in ("fio GB/s", "Hadal GB/s", "share")]
    print(f"| blocks x depth | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    verdicts, kept = [], {}
    for text, is_single in product(options.loads.split(","), (False, True)):
        kib, depth = map(int, text.split("x"))
        load = Load(options.disk, int(options.gib * 2**30), kib << 10, depth, is_single)
        row = measured(load, options)
        print_row(load, row)
        verdicts += [(f"{load}, {act}", median(row.shares(act))) for act in ACTS]
        kept[str(load)] = vars(row)
    for name, share in verdicts:
        print(f"{name}: {share:.2f} of fio's, goal {GOAL}: {'met' if share >= GOAL else 'MISSED'}")
    return kept, all(share >= GOAL for _, share in verdicts)


def measure_updates(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Print the figures of updates; return every measurement, and whether all goals are met."""
    from peers import updating  # needs torch, unlike the comparison with fio

    update = updating.Update(options.numel, options.rounds, options.threads)
    deepspeed = deepspeed_interpreter(options.deepspeed)
    has_deepspeed = is_installed(options.deepspeed)
    if not has_deepspeed:
        print(f"DeepSpeed is not installed in {options.deepspeed}; continuing without it.")
    print(f"{options.numel} elements, {options.threads} thread(s)\n")
    with updating.prepared(options.threads):
        tables = {"in memory": updating.in_memory(update, deepspeed if has_deepspeed else None)}
        if options.disk is not None:
            tables["on the disk"] = updating.on_disk(update, options.disk, options.seconds)
    for name, rows in tables.items():
        print(f"State {name}:\n\n{updating.table(rows)}\n")
    verdicts = updating.verdicts(tables["in memory"])
    for text, _ in verdicts:
        print(text)
    kept = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    return kept, all(met for _, met in verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.step and shutil.which("fio") is None:
        print("fio is not installed, so there is nothing to compare with: apt install fio")
        return 1
    kept, is_met = measure_updates(options) if options.step else measure_requests(options)
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))
    return 1 if options.strict and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
