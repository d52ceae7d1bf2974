"""Step time, peak memory, initialisation and import time of Hadal and its peers.

Everything is measured in one invocation, on one model, in rounds in which the contestants take
turns. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from peers import report
from peers.install import DEFAULT_ENVIRONMENT, install_deepspeed, is_installed
from peers.launch import (
    GroupFailure,
    Interpreter,
    Run,
    deepspeed_interpreter,
    imports_after_torch,
    run_contestant,
    run_ranks,
)
from peers.settings import (
    LIBRARIES,
    TRAFFIC,
    Contestant,
    Workload,
    select_contestants,
    select_offloaded,
)

_PEERS = LIBRARIES[1:]
_PLACES = ("cpu", "nvme")
_IMPORT_RUNS = 5
_IMPORTS = {"hadal": "from hadal import initialize", "deepspeed": "import deepspeed"}
_SMOKE = Workload(layers=1, width=64, heads=2, steps=1, warmup=0)


@dataclass(frozen=True)
class Machinery:
    """The interpreters, and the time limit of one start of a contestant."""

    own: Interpreter
    deepspeed: Interpreter
    timeout: float

    def of(self, library: str) -> Interpreter:
        return self.deepspeed if library == "deepspeed" else self.own


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of a comma-separated list of some of the names allowed."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = Workload()
    add = parser.add_argument
    add("--stages", type=_names("0123"), default=list("0123"), help="ZeRO stages, as 0,1,2,3")
    add("--peers", type=_names(_PEERS), default=list(_PEERS), help=f"of {','.join(_PEERS)}")
    add("--traffic", type=_names(TRAFFIC), default=list(TRAFFIC), help="gradient types")
    add("--repeat", type=int, default=3, help="rounds over all contestants")
    add("--steps", type=int, default=defaults.steps, help="measured steps per start")
    add("--warmup", type=int, default=defaults.warmup, help="unmeasured steps per start")
    add("--accumulation", type=int, default=1, help="micro-batches per step")
    add("--layers", type=int, default=defaults.layers)
    add("--width", type=int, default=defaults.width)
    add("--heads", type=int, default=defaults.heads)
    add("--vocabulary", type=int, default=defaults.vocabulary)
    add("--sequence", type=int, default=defaults.sequence)
    add("--processes", type=int, default=defaults.world_size)
    add("--offload", choices=_PLACES, help="tier of the optimizer")
    add("--offload-weights", choices=_PLACES, help="tier of the weights, at stage 3")
    add("--nvme", type=Path, metavar="PATH", help="a directory on the disk, for nvme")
    add("--turns", type=int, default=15, help="steps with and without offload in one process")
    add("--deepspeed-adam", choices=("torch", "own"), default=defaults.deepspeed_adam)
    add("--timeout", type=float, default=600.0, help="seconds one start may take")
    add("--parts", action="store_true", help="also measure the parts of a step separately")
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--output", type=Path, metavar="FILE", help="draw a bar chart (PNG)")
    add("--strict", action="store_true", help="exit with 1 if a goal is missed")
    add("--deepspeed", type=Path, metavar="DIR", default=DEFAULT_ENVIRONMENT)
    add(
        "--install-deepspeed",
        type=Path,
        nargs="?",
        const=DEFAULT_ENVIRONMENT,
        metavar="DIR",
        help="install DeepSpeed into its own virtual environment and exit",
    )
    options = parser.parse_args(arguments)
    if "nvme" in (options.offload, options.offload_weights) and options.nvme is None:
        parser.error("nvme needs a directory on the disk: --nvme PATH")
    return options


def _machinery(environment: Path, timeout: float) -> Machinery:
    return Machinery(Interpreter(sys.executable), deepspeed_interpreter(environment), timeout)


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=options.vocabulary,
        sequence=options.sequence,
        accumulation=options.accumulation,
        warmup=options.warmup,
        steps=options.steps,
        world_size=options.processes,
        deepspeed_adam=options.deepspeed_adam,
        nvme_path=str(options.nvme.absolute()) if options.nvme else "",
    )


def _install(environment: Path, timeout: float) -> None:
    """Install DeepSpeed and start it twice: the first start compiles its operators."""
    install_deepspeed(environment)
    machinery = _machinery(environment, timeout)
    for which in ("first", "second"):
        run = run_contestant(
            machinery.deepspeed, _SMOKE, Contestant("deepspeed", 2, "bf16"), timeout
        )
        print(f"deepspeed.initialize, {which} time: {run.init_s:.1f} s")


def _start(machinery: Machinery, results: report.Results, contestant: Contestant) -> Run | None:
    """One start of one contestant; a failure is printed, recorded, and not retried."""
    if contestant in results.failures:
        return None
    try:
        run = run_contestant(
            machinery.of(contestant.library), results.workload, contestant, machinery.timeout
        )
    except GroupFailure as failure:
        results.failures[contestant] = str(failure)
        print(f"  {contestant.label}: {failure}", flush=True)
        return None
    print(f"  {contestant.label}: {median(run.steps):.3f} s, {run.peak_mib:.0f} MiB", flush=True)
    if run.trouble:
        print(f"  {contestant.label}: {run.trouble}", flush=True)
    return run


def _measure_rounds(
    machinery: Machinery, results: report.Results, contestants: Sequence[Contestant], repeat: int
) -> None:
    results.runs = {contestant: [] for contestant in contestants}
    for number in range(repeat):
        print(f"round {number + 1} of {repeat}", flush=True)
        # Every other round runs in reverse, so that a steady drift favours no contestant.
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            results.runs[contestant].append(_start(machinery, results, contestant))


def _measure_imports(machinery: Machinery, libraries: Sequence[str]) -> dict[str, float | None]:
    return {
        library: imports_after_torch(machinery.of(library), statement, _IMPORT_RUNS)
        for library, statement in _IMPORTS.items()
        if library in libraries
    }


def _measure_parts(machinery: Machinery, workload: Workload) -> dict[str, report.Part]:
    try:
        ranks, _ = run_ranks("peers.parts", machinery.own, workload, {}, machinery.timeout)
    except GroupFailure as failure:
        print(f"  parts: {failure}", flush=True)
        return {}
    parts = {}
    for name, first in ranks[0].items():
        medians = [median(rank[name]["seconds"]) for rank in ranks if rank[name]["seconds"]]
        parts[name] = report.Part(max(medians, default=None), first["bytes"])
    return parts


def _measure_turns(
    machinery: Machinery, workload: Workload, contestants: Sequence[Contestant], turns: int
) -> dict[Contestant, report.Turns]:
    found = {}
    for one in contestants:
        if one.library != "hadal" or not one.offload:
            continue
        plain = one.offloading("none", "none")
        job = {"with": asdict(one), "without": asdict(plain), "turns": turns}
        try:
            ranks, _ = run_ranks("peers.turns", machinery.own, workload, job, machinery.timeout)
        except GroupFailure as failure:
            print(f"  {one.label}, in turns: {failure}", flush=True)
            continue
        found[one] = report.Turns.of(ranks)
        print(f"  {one.label}, in turns: {found[one]}", flush=True)
    return found


def _present_peers(options: argparse.Namespace) -> list[str]:
    peers = list(options.peers)
    if "deepspeed" in peers and not is_installed(options.deepspeed):
        print(f"DeepSpeed is not installed in {options.deepspeed}; continuing without it.")
        print("Install it with: python benchmarks/step.py --install-deepspeed")
        peers.remove("deepspeed")
    return peers


def _print_results(results: report.Results) -> None:
    numel = {run.parameters for runs in results.runs.values() for run in runs if run}
    print("\n" + ", ".join(f"{k} {v}" for k, v in report.describe_environment().items()))
    print(f"parameters: {', '.join(f'{n:,}' for n in sorted(numel))}\n")
    print(report.step_table(results), end="\n\n")
    if results.imports:
        print(report.import_table(results), end="\n\n")
    if results.parts:
        print(report.parts_table(results), end="\n\n")
    for verdict in report.judge(results):
        print(verdict)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.install_deepspeed is not None:
        _install(options.install_deepspeed, options.timeout)
        return 0
    peers = _present_peers(options)
    machinery = _machinery(options.deepspeed, options.timeout)
    results = report.Results(_workload(options))
    stages = [int(stage) for stage in options.stages]
    places = (options.offload or "none", options.offload_weights or "none")
    offloads = places != ("none", "none")
    contestants = (
        select_offloaded(stages, peers, *places)
        if offloads
        else select_contestants(stages, peers, options.traffic)
    )
    if not offloads:
        results.imports = _measure_imports(machinery, ["hadal", *peers])
    if options.parts:
        results.parts = _measure_parts(machinery, results.workload)
    if offloads:
        results.turns = _measure_turns(machinery, results.workload, contestants, options.turns)
    _measure_rounds(machinery, results, contestants, options.repeat)
    _print_results(results)
    if options.json:
        report.write_json(results, options.json)
    if options.output:
        report.draw_chart(results, options.output)
    missed = any(verdict.passed is False for verdict in report.judge(results))
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
