"""Checks Hadal on the GPU at hand in about ten minutes: whether it is right, fast, and offloads.

Prints a line `NAME value expected OK|FAIL` for each figure; one without an expectation is a
reading. Each check has its time, and one that fails or hangs ends alone. ``--dry`` runs everything
tiny on CPUs, to try the checks themselves. See ``docs/gpus.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT)]

import torch
from gpu_checks import jobs, table
from peers.report import describe_environment


def _load_checks() -> None:
    from gpu_checks import fast, offload, right  # noqa: F401 (they fill the table)


Result = tuple[str, list[table.Line], float]


def _results(names: Sequence[str], part: table.Part) -> Iterator[Result]:
    """Run the checks of a part, those of one job together; yield each one's lines and seconds."""
    deadline = time.monotonic() + (1e6 if table.is_dry() else part.limit_s)
    waiting: dict[table.Job, list[str]] = {}
    for name in names:
        waiting.setdefault(table.CHECKS[name].job, []).append(name)
    first, *others = waiting.items()  # the first measures rates, and so runs alone
    yield from _of_job(*first, deadline)
    results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()

    def run(job: table.Job, chosen: list[str]) -> None:
        for result in _of_job(job, chosen, deadline):
            results.put(result)
        results.put(None)

    with ThreadPoolExecutor(1 if table.is_dry() else part.lanes) as pool:
        running = [pool.submit(run, *one) for one in others]
        while running:
            result = results.get()
            if result is None:
                running.pop()
            else:
                yield result


def _of_job(job: table.Job, names: Sequence[str], deadline: float) -> Iterator[Result]:
    skipped = [name for name in names if table.is_dry() and table.CHECKS[name].skips_dry]
    for name in skipped:
        yield name, [table.Line("", "not on CPUs")], 0.0
    chosen = [name for name in names if name not in skipped]
    if job.ranks and chosen:
        yield from jobs.run_checks(job, chosen, deadline)
        return
    for name in chosen:
        yield jobs.run_here(name, deadline)


def _print(name: str, lines: Sequence[table.Line], spent: float) -> None:
    for line in lines:
        verdict = {True: "OK", False: "FAIL", None: "-"}[line.is_ok]
        shown = f"{name} {line.name}".strip()
        print(f"{shown:52} {line.value:28} {line.expected:26} {verdict}", flush=True)
    print(f"{name}: {spent:.1f} s", flush=True)


def _draw(rows: Sequence[tuple[str, table.Line]], title: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: there is no picture")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {True: "tab:green", False: "tab:red", None: "tab:gray"}
    figure = pyplot.figure(figsize=(12, 0.6 + 0.22 * len(rows)))
    for place, (name, line) in enumerate(rows):
        height = 1 - (place + 1.5) / (len(rows) + 2)
        texts = (f"{name}: {line.name}"[:60], line.value[:60], line.expected[:40])
        for left, text in zip((0.04, 0.42, 0.78), texts, strict=True):
            figure.text(left, height, text, fontsize=8, family="monospace")
        figure.text(0.015, height, "\N{BLACK CIRCLE}", color=colours[line.is_ok], fontsize=9)
    figure.suptitle(title, y=1 - 0.3 / (len(rows) + 2))
    figure.savefig(path, dpi=120)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--part", choices=tuple(table.PARTS), help="one part; by default all")
    add("--only", help="names of checks, as loop,stages")
    add("--dry", action="store_true", help="tiny, on CPUs, to try the checks themselves")
    add("--json", type=Path, metavar="FILE", help="write all lines as JSON")
    add("--output", type=Path, metavar="FILE", help="draw all lines (PNG)")
    add("--job", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _report(rows: Sequence[tuple[str, table.Line]], options: argparse.Namespace) -> None:
    if options.json:
        lines = [{"check": name, **asdict(line)} for name, line in rows]
        document = {"environment": describe_environment(), "lines": lines}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen checks; return 1 if a line fails."""
    options = _parse(arguments)
    if options.job:
        _load_checks()
        jobs.serve(options.job[0].split(","), Path(options.job[1]))
        return 0
    if options.dry:
        os.environ |= {table.DRY: "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        os.environ["OMP_NUM_THREADS"] = "1"
    elif not torch.cuda.is_available():
        print("There is no CUDA device here; --dry tries the checks on CPUs.")
        return 0
    _load_checks()
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    chosen = options.only.split(",") if options.only else list(table.CHECKS)
    rows: list[tuple[str, table.Line]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[table.FOLDER] = folder
        for part in [each for each in table.PARTS if options.part in (None, each)]:
            begun = time.monotonic()
            names = [name for name in chosen if table.CHECKS[name].part == part]
            for name, lines, spent in _results(names, table.PARTS[part]) if names else ():
                _print(name, lines, spent)
                rows += [(name, line) for line in lines]
                _report(rows, options)
            print(f"part {part}: {time.monotonic() - begun:.0f} s", flush=True)
    failed = sum(line.is_ok is False for _, line in rows)
    print(f"{failed} of {len(rows)} lines fail")
    if options.output:
        _draw(rows, f"{failed} of {len(rows)} lines fail", options.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
