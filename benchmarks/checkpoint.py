"""Seconds to save and load a checkpoint: Hadal, DeepSpeed and torch.save, in one run.

All contestants are started in turn, in rounds; ratios are those of medians over all saves of all
rounds. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from peers.install import DEFAULT_ENVIRONMENT, is_installed
from peers.launch import GroupFailure, Interpreter, deepspeed_interpreter, run_ranks
from peers.settings import Workload

_LIBRARIES = ("hadal", "hadal async", "hadal unverified", "deepspeed", "torch")
# The largest fraction of DeepSpeed's seconds.
_GOALS = {
    "save": ("hadal", "save", 0.6),
    "blocked by an asynchronous save": ("hadal async", "save", 0.15),
    "first load of a new job": ("hadal", "new", 0.8),
    "load in a running job": ("hadal", "load", 0.8),
    "load of files in the cache": ("hadal", "again", 0.8),
}


@dataclass
class Measured:
    """All rounds of one contestant: seconds of the slowest rank, and bytes."""

    save: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    nbytes: int = 0
    extra_mib: float = 0.0

    def add(
        self,
        ranks: Sequence[dict[str, list[float]]],
        jobs: Sequence[Sequence[dict[str, list[float]]]],
    ) -> None:
        """Add one start, and those of new jobs that load its checkpoint."""

        def slowest(key: str) -> list[float]:
            return [max(each) for each in zip(*(rank[key] for rank in ranks), strict=True)]

        for new in jobs:
            self.new.append(max(rank["new"][0] for rank in new))
            self.raw.append(max(rank["raw"][0] for rank in new))
        # The first save of a start creates directories, threads and memory that others reuse.
        self.first.append(slowest("save")[0])
        self.save += slowest("save")[1:]
        self.whole += slowest("whole")[1:]
        self.load += slowest("load")[1:]
        self.again += slowest("again")[1:]
        self.nbytes = int(ranks[0]["nbytes"])  # type: ignore[call-overload]
        extra = [rank["peak_saving"] - rank["before"] for rank in ranks]  # type: ignore[operator]
        self.extra_mib = max(self.extra_mib, *extra)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--stages", default="123", help="ZeRO stages, as 123")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--vocabulary", type=int, default=8192)
    add("--processes", type=int, default=2)
    add("--saves", type=int, default=4, help="saves and loads per start; the first is separate")
    add("--repeat", type=int, default=2, help="rounds over all contestants")
    add("--jobs", type=int, default=3, help="new jobs that load the checkpoint of a start")
    add("--only", metavar="A,B", help=f"some of the contestants: {', '.join(_LIBRARIES)}")
    add("--settle", type=float, default=3.0, help="seconds between eviction and a load, see README")
    add("--folder", type=Path, help="directory for checkpoints (temporary by default)")
    add("--timeout", type=float, default=600.0, help="seconds one start may take")
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--strict", action="store_true", help="exit with 1 if a goal is missed")
    add("--deepspeed", type=Path, metavar="DIR", default=DEFAULT_ENVIRONMENT)
    return parser.parse_args(arguments)


def _measure(
    options: argparse.Namespace, stage: int, libraries: Sequence[str]
) -> dict[str, Measured]:
    workload = Workload(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=options.vocabulary,
        world_size=options.processes,
    )
    deepspeed = deepspeed_interpreter(options.deepspeed)
    found = {library: Measured() for library in libraries}
    for number in range(options.repeat):
        # Every other round runs in reverse, so that a steady drift favours no contestant.
        for library in libraries if number % 2 == 0 else reversed(libraries):
            python = deepspeed if library == "deepspeed" else Interpreter(sys.executable)
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                job = {
                    "library": library,
                    "stage": stage,
                    "repeat": options.saves,
                    "settle": options.settle,
                    "folder": str(Path(folder, "saves")),
                }
                start = partial(run_ranks, "peers.saving", python, workload)
                try:
                    ranks, _ = start({**job, "new": False}, options.timeout)
                    jobs = [
                        start({**job, "new": True}, options.timeout)[0] for _ in range(options.jobs)
                    ]
                except GroupFailure as failure:
                    print(f"  stage {stage}, {library}: {failure}", flush=True)
                    continue
            found[library].add(ranks, jobs)
    return {library: measured for library, measured in found.items() if measured.save}


def _print_table(stage: int, found: dict[str, Measured]) -> None:
    print(f"\nstage {stage}")
    print(
        "| | save s | first s | until on disk s | new job s | disk alone s | load s | again s |"
        " GB | extra MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for library, one in found.items():
        print(
            f"| {library} | {median(one.save):.3f} | {median(one.first):.3f} |"
            f" {median(one.whole):.3f} | {median(one.new):.3f} | {median(one.raw):.3f} |"
            f" {median(one.load):.3f} |"
            f" {median(one.again):.3f} |"
            f" {one.nbytes / 1e9:.3f} |"
            f" {one.extra_mib:.0f} |"
        )


def _judge(stage: int, found: dict[str, Measured]) -> list[bool]:
    verdicts = []
    for name, (library, measure, goal) in _GOALS.items():
        if library in found and "deepspeed" in found:
            ratio = median(getattr(found[library], measure)) / median(
                getattr(found["deepspeed"], measure)
            )
            verdicts.append(ratio <= goal)
            word = "met" if ratio <= goal else "MISSED"
            print(f"stage {stage}, {name}: {ratio:.2f} of DeepSpeed's, goal {goal}: {word}")
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    wanted = (options.only or ",".join(_LIBRARIES)).split(",")
    libraries = [library for library in _LIBRARIES if library in wanted]
    if not is_installed(options.deepspeed):
        print(f"DeepSpeed is not installed in {options.deepspeed}; continuing without it.")
        libraries = [library for library in libraries if library != "deepspeed"]
    verdicts, kept = [], {}
    for stage in map(int, options.stages):
        found = _measure(options, stage, libraries)
        _print_table(stage, found)
        verdicts += _judge(stage, found)
        kept[stage] = {library: vars(one) for library, one in found.items()}
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))
    return 1 if options.strict and not all(verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
