"""`hadal bench`: `io PATH` tunes `aio` for a disk; `comm` and `cluster` measure a machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.parser import add_actions, add_command, add_flag, integer, number, positive, size
from hadal.cli.run import start
from hadal.cli.terminal import (
    COLOURS,
    FAINT,
    CommandError,
    heading,
    note,
    picture_path,
    progress,
    show,
    table,
    write_file,
    write_picture,
)
from hadal.errors import nearest
from hadal.units import shown_binary

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from hadal.comm import Ranks
    from hadal.offload.speed import MeasuredSettings, Search


def add_to(group: Any) -> None:
    """Add the subcommand and its own."""
    own = add_actions(
        group,
        "bench",
        help="Measure collectives, a disk or a whole machine",
        description="Measure how fast ranks send to each other, how fast a disk is, or all that a"
        " plan of a step's time needs.",
        examples=("hadal bench comm", "hadal bench cluster", "hadal bench io /nvme"),
    )
    _add_comm(own)
    _add_cluster(own)
    disk = add_command(
        own,
        "io",
        help="Find the `aio` section for a disk",
        description="Write and read a file in PATH with one setting of the `aio` section after the"
        " other. Print how fast each is, and the best as JSON for ds_config.json if it is faster"
        " than the defaults.",
        examples=("hadal bench io /nvme --seconds 30 --json aio.json",),
    )
    add_flag(disk, "path PATH", "An existing directory on the disk (nvme_path)", Path)
    add_flag(disk, "--size SIZE", "Size of the file", size, "1GB")
    add_flag(disk, "--seconds S", "How long all measurements take together", number(gt=0), "60")
    add_flag(disk, "--json FILE", "Write the JSON to a file too", Path)
    disk.set_defaults(run=run_io)


def run_io(parsed: argparse.Namespace) -> int:
    """Measure a disk.

    Raises:
        HadalError: that cannot be done.
    """
    from hadal.offload.speed import Search, keys_of, measurer

    if not parsed.path.is_dir():
        what = "is not a directory" if parsed.path.exists() else "does not exist"
        raise CommandError(f"{parsed.path} {what}; name an existing directory on the disk")
    search = Search(measurer(parsed.path, parsed.size, parsed.seconds, Search.turns))
    found = []
    with progress(Search.turns, "measuring") as advance:
        for one in search.run():
            found.append(one)
            advance(1)
    assert search.best is not None  # the defaults are always measured
    _show_disk(found, search)
    text = json.dumps({"aio": keys_of(search.best.settings)}, indent=2) + "\n"
    if search.best is found[0]:
        show(f"keep the defaults: no other setting is faster beyond the noise, {search.noise:.0%}")
    else:
        sys.stdout.write(text)
    if parsed.json is not None:
        write_file(parsed.json, text)
    return 0


def _show_disk(found: list[MeasuredSettings], search: Search) -> None:
    from hadal.offload.speed import keys_of

    # Long names in two lines, so that all fit side by side.
    names = keys_of(found[0].settings)
    titles = [*("_\n".join(name.rsplit("_", 1)) for name in names), "write\nGB/s", "read\nGB/s"]
    made = table(*titles, "", right=titles)
    for one in found:
        values = keys_of(one.settings)
        cells = [json.dumps(value) for value in values.values()]
        cells[list(values).index("block_size")] = shown_binary(one.settings.block_size)
        cells += [f"{speed.gb_per_s:.2f}" for speed in (one.write, one.read)]
        is_best = one is search.best
        remark = "best" if is_best else "within noise" if search.is_as_good(one) else ""
        made.add_row(*cells, remark, style="best" if is_best else None)
    show(made, "")


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
_USUAL = ("all_gather", "reduce_scatter")
"""The collectives of ZeRO: the default kinds to measure."""
_WAYS = {"hadal": "hadal.comm", "torch": "torch.distributed", "training": "as in training"}
_DEFAULT_RANKS_OF_CPUS = 2
_LOOK_S = 0.2
_ASKED, _FIGURES, _PROGRESS = "asked.json", "measured.json", "progress"


def _add_comm(group: Any) -> None:
    """Add the action."""
    parser = add_command(
        group,
        "comm",
        help="Measure collectives between ranks",
        description="Measure collectives over messages of several sizes: the median of some calls,"
        " on the slowest rank. By itself the command starts ranks on this machine; under `hadal run"
        " --module hadal bench comm`, torchrun, Slurm or MPI it is one of theirs.",
        examples=(
            "hadal bench comm",
            "hadal bench comm all_reduce --dtype bfloat16 --output all_reduce.svg",
            "hadal bench comm --all --factor 2",
        ),
    )
    kinds = parser.add_argument_group("Collectives")
    add_flag(
        parser,
        "kinds KIND",
        f"Some of {', '.join(_KINDS)} (default: {' and '.join(_USUAL)})",
        nargs="*",
    )
    add_flag(kinds, "--all", "Measure every kind")
    add_flag(kinds, "--minsize N", "The smallest message has 2^N elements", integer(ge=0, le=40), 6)
    add_flag(kinds, "--maxsize N", "The largest message has 2^N elements", integer(ge=0, le=40), 24)
    add_flag(
        kinds, "--factor F", "Each message is F times as large as the one before", integer(ge=2), 4
    )
    add_flag(
        kinds,
        "--mem-factor SHARE",
        "Measure one size only: the message that takes this share of the free memory",
        number(gt=0, lt=1),
    )
    add_flag(kinds, "--dtype DTYPE", "The elements' dtype, by torch's name", default="float32")
    how = parser.add_argument_group("How")
    add_flag(how, "--trials N", "Calls", positive, 20)
    add_flag(how, "--warmups N", "Calls before them that are not measured", integer(ge=0), 5)
    add_flag(
        how,
        "--dist",
        "Calls to measure: hadal.comm's (default), torch's own, or an engine's in training",
        default="hadal",
        choices=tuple(_WAYS),
    )
    add_flag(how, "--async-op", "Start each call, then wait for it")
    add_flag(how, "--backend NAME", "torch's backend (default: the device's own)")
    _add_ranks(how)
    output = parser.add_argument_group("Output")
    add_flag(
        output,
        "--bw-unit",
        "Bytes (default) or bits per second",
        default="GBps",
        choices=("GBps", "Gbps"),
    )
    add_flag(output, "--raw", "Print plain numbers, in columns separated by tabs")
    add_flag(output, "--json FILE", "Write the figures to a file", Path)
    add_flag(output, "--output FILE", "Draw them, in the format of the suffix", Path)
    parser.set_defaults(run=run_comm)


def run_comm(parsed: argparse.Namespace) -> int:
    """Measure.

    Raises:
        HadalError: that cannot be done; faults of the command line are found before ranks start.
    """
    from hadal.comm.start import env_world_size

    if parsed.hand_over is not None:
        return _take_part(_asked(parsed))
    _check(parsed)
    if env_world_size() is not None:
        return _take_part(parsed)
    parsed.ranks = _ranks_of(parsed)
    if parsed.ranks == 1:
        note("one rank sends nothing: the figures are the overhead of the calls")
    code, text = _found_by_ranks(parsed, _count(parsed, parsed.ranks))
    return code or _show(parsed, json.loads(text))


def _check(parsed: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, and select the kinds to measure."""
    import torch.distributed as dist

    if parsed.all and parsed.kinds:
        raise CommandError("--all measures every kind; leave out the names, or --all")
    for kind in parsed.kinds:
        if kind not in _KINDS:
            raise CommandError(f"no kind {kind!r}; {_meant(kind, _KINDS)}")
    if parsed.dist == "training" and "pt2pt" in parsed.kinds:
        raise CommandError("training has no pt2pt; measure it with --dist hadal or torch")
    every = [kind for kind in _KINDS if kind != "pt2pt" or parsed.dist != "training"]
    parsed.kinds = parsed.kinds or (every if parsed.all else list(_USUAL))
    if parsed.minsize > parsed.maxsize:
        raise CommandError(f"--minsize {parsed.minsize} is more than --maxsize {parsed.maxsize}")
    _dtype_of(parsed.dtype)
    for backend in (parsed.backend or "").split(","):  # or "cpu:gloo,cuda:nccl"
        name = backend.rpartition(":")[2].lower()
        if name and not dist.is_backend_available(name):
            raise CommandError(f"--backend {parsed.backend}: this torch has no {name}")
    if parsed.output is not None:
        parsed.output = picture_path(parsed.output)
    if parsed.json is not None and not parsed.json.parent.is_dir():
        raise CommandError(f"{parsed.json} cannot be written: there is no such directory")


def _dtype_of(name: str) -> torch.dtype:
    import torch

    bare = name.removeprefix("torch.")
    dtype = getattr(torch, bare, None)
    if not isinstance(dtype, torch.dtype):
        known = [each for each, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise CommandError(f"--dtype {name}: torch has no such dtype; {_meant(bare, known)}")
    return dtype


def _meant(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"use one of {', '.join(known)}"


# ---- ranks ---------------------------------------------------------------------------------------


def _add_ranks(to: argparse._ActionsContainer) -> None:
    """Add the flags of commands that start ranks."""
    add_flag(
        to,
        "--ranks N",
        "How many ranks to start on this machine (default: one for each accelerator; else 2)",
        positive,
    )
    to.add_argument("--hand-over", type=Path, help=argparse.SUPPRESS)


def _ranks_of(parsed: argparse.Namespace) -> int:
    """Return how many ranks to start."""
    from hadal.device.inventory import devices

    found = len(devices())
    ranks: int = parsed.ranks or found or _DEFAULT_RANKS_OF_CPUS
    if ranks > found > 0:
        raise CommandError(f"--ranks {ranks}, but this machine has {found} accelerators")
    return ranks


def _found_by_ranks(parsed: argparse.Namespace, total: int = 0) -> tuple[int, str]:
    """Run this command again on several ranks; return their exit code and what they hand over."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _ASKED).write_text(json.dumps(vars(parsed), default=str))
        started = ["--quiet", "--num_accelerators", str(parsed.ranks), "--module", "hadal"]
        with _followed(Path(folder, _PROGRESS), total):
            code = start([*started, "bench", parsed.action, "--hand-over", folder])
        return code, "" if code else Path(folder, _FIGURES).read_text()


def _asked(parsed: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of the command that started this rank."""
    raw = json.loads(Path(parsed.hand_over, _ASKED).read_text())
    return argparse.Namespace(**raw | {"hand_over": parsed.hand_over})


@contextmanager
def _followed(path: Path, total: int) -> Iterator[None]:
    """Show how far ranks are: they write a byte to a file with each measurement."""
    is_over = threading.Event()

    def follow() -> None:
        seen = 0
        while total and not is_over.wait(_LOOK_S):
            before, seen = seen, path.stat().st_size if path.exists() else 0
            advance(seen - before)

    with progress(total, "measuring") as advance:
        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            is_over.set()
            follower.join()


def _numels(parsed: argparse.Namespace, ranks: int) -> list[int]:
    from hadal.comm.benchmark import numels_between

    return numels_between(1 << parsed.minsize, 1 << parsed.maxsize, parsed.factor, ranks)


def _count(parsed: argparse.Namespace, ranks: int) -> int:
    """Return the number of measurements."""
    sizes = 1 if parsed.mem_factor is not None else len(_numels(parsed, ranks))
    return len(parsed.kinds) * sizes


@contextmanager
def _steps(parsed: argparse.Namespace, ranks: Ranks) -> Iterator[Callable[[int], object]]:
    """Return the receiver of a rank's measurements: the starting command, or people."""
    if ranks.rank > 0:
        yield lambda count: None
    elif parsed.hand_over is not None:
        with Path(parsed.hand_over, _PROGRESS).open("wb", buffering=0) as file:
            yield lambda count: file.write(b"." * count)
    else:
        with progress(_count(parsed, ranks.size), "measuring") as advance:
            yield advance


def _take_part(parsed: argparse.Namespace) -> int:
    from hadal import comm
    from hadal.comm.benchmark import Trial, numel_of_memory, sweep
    from hadal.device import current_device

    comm.init_distributed(parsed.backend)
    dtype, ranks = _dtype_of(parsed.dtype), comm.Ranks.world()
    trial = Trial(dtype, parsed.trials, parsed.warmups, parsed.async_op, parsed.dist)
    numels = _numels(parsed, ranks.size)
    if parsed.mem_factor is not None:
        numels = [numel_of_memory(parsed.mem_factor, trial.dtype, ranks)]
    found = []
    with _steps(parsed, ranks) as advance:
        for one in sweep(parsed.kinds, numels, trial):
            found.append(dataclasses.asdict(one))
            advance(1)
    results = {"ranks": ranks.size, "device": current_device().type, "measured": found}
    comm.destroy_process_group()
    if ranks.rank > 0:
        return 0
    if parsed.hand_over is not None:
        Path(parsed.hand_over, _FIGURES).write_text(json.dumps(results))
        return 0
    return _show(parsed, results)


# ---- a whole machine -----------------------------------------------------------------------------


def _add_cluster(group: Any) -> None:
    """Add the action."""
    parser = add_command(
        group,
        "cluster",
        help="Measure a machine for plans of a step's time",
        description="Measure what the ranks of this machine reach together: computation by dtype,"
        " updates, collectives, and copies between devices and host. The file that is written is"
        " what plans of a step's time read.",
        examples=("hadal bench cluster --output cluster.json", "hadal bench cluster --ranks 1"),
    )
    add_flag(parser, "--output FILE", "Write the figures to a file, as JSON", Path)
    add_flag(parser, "--name NAME", "The cluster's name (default: the host's)")
    add_flag(
        parser,
        "--folder PATH",
        "An existing directory on a disk, which is measured too (default: the disk is assumed)",
        Path,
    )
    _add_ranks(parser)
    parser.set_defaults(run=run_cluster)


def run_cluster(parsed: argparse.Namespace) -> int:
    """Measure this machine.

    Raises:
        HadalError: that cannot be done.
    """
    if parsed.hand_over is not None:
        return _measure_machine(_asked(parsed))
    if parsed.folder is not None:
        if not parsed.folder.is_dir():
            raise CommandError(f"{parsed.folder} is no directory; name an existing one on the disk")
        parsed.folder = parsed.folder.absolute()
    parsed.ranks, parsed.name = _ranks_of(parsed), parsed.name or platform.node()
    code, text = _found_by_ranks(parsed)
    if code == 0:
        _show_cluster(json.loads(text))
        if parsed.output is not None:
            write_file(parsed.output, text)
    return code


def _measure_machine(parsed: argparse.Namespace) -> int:
    from hadal import comm
    from hadal.engine.calibration import measure_cluster

    comm.init_distributed()
    text = measure_cluster(parsed.name, parsed.folder and Path(parsed.folder))
    if comm.Ranks.world().rank == 0:
        Path(parsed.hand_over, _FIGURES).write_text(text)
    comm.destroy_process_group()
    return 0


def _show_cluster(found: dict[str, Any]) -> None:
    made = table("", "", right=("",))
    for dtype, one in found["speeds"].items():
        for kind in ("matrices", "convolution", "attention"):
            made.add_row(f"{kind} in {dtype}", f"{one[kind]['flops'] * 1e-12:,.3g} TFLOP/s")
        made.add_row(f"other operations in {dtype}", f"{one['bandwidth'] * 1e-9:,.2f} GB/s")
        made.add_row(f"updates of {dtype}", f"{one['update'] * 1e-6:,.0f} M elements/s")
    for dtype, links in found["inside"].items():
        for kind, link in links.items():
            figures = f"{link['bandwidth'] * 1e-9:,.2f} GB/s, {link['latency'] * 1e6:,.0f} μs"
            made.add_row(f"{kind} in {dtype}", figures)
    show(heading(f"{found['name']}, {found['sources']['speeds']}"), "", made)


# ---- output --------------------------------------------------------------------------------------


def _show(parsed: argparse.Namespace, results: dict[str, Any]) -> int:
    found = results["measured"]
    what = f"{results['ranks']} ranks on {results['device']}, {parsed.dtype}, {_WAYS[parsed.dist]}"
    factor = 8e-9 if parsed.bw_unit == "Gbps" else 1e-9
    if parsed.raw:
        for one in found:
            speeds = [one[name] * factor for name in ("algorithm_bandwidth", "bus_bandwidth")]
            figures = [f"{value:.6g}" for value in (one["seconds"] * 1e6, *speeds)]
            print(one["kind"], one["nbytes"], one["numel"], *figures, sep="\t")
    else:
        _print_table(found, what, parsed.bw_unit, factor)
    if parsed.json is not None:
        choice = {"dtype": parsed.dtype, "way": parsed.dist}
        write_file(parsed.json, json.dumps({**choice, **results}, indent=1) + "\n")
    if parsed.output is not None:
        write_picture(figure_of(found, what, parsed.bw_unit, factor), parsed.output)
    return 0


def _print_table(found: Sequence[dict[str, Any]], what: str, unit: str, factor: float) -> None:
    numbers = ("message", "elements", "μs", f"algorithm\n{unit}", f"bus\n{unit}")
    made = table("operation", *numbers, right=numbers)
    best = {
        kind: max(one["bus_bandwidth"] for one in found if one["kind"] == kind)
        for kind in {one["kind"] for one in found}
    }
    before = ""
    for one in found:
        name, before = "" if one["kind"] == before else one["kind"], one["kind"]
        made.add_row(
            name,
            shown_binary(one["nbytes"]),
            f"{one['numel']:,}",
            f"{one['seconds'] * 1e6:,.1f}",
            *(_speed(one[key] * factor) for key in ("algorithm_bandwidth", "bus_bandwidth")),
            style="best" if one["bus_bandwidth"] == best[one["kind"]] else None,
        )
    show(heading(what), "", made)


def _speed(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def figure_of(found: Sequence[dict[str, Any]], what: str, unit: str, factor: float) -> Figure:
    """Draw bus bandwidth, and time below it, over the message."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    speed, time = figure.subplots(2, sharex=True)
    kinds = list(dict.fromkeys(one["kind"] for one in found))
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [one for one in found if one["kind"] == kind]
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3.5, "label": kind}
        sizes = [one["nbytes"] for one in own]
        speed.plot(sizes, [one["bus_bandwidth"] * factor for one in own], **style)
        time.plot(sizes, [one["seconds"] * 1e6 for one in own], **style)
    speed.set_ylabel(f"bus bandwidth, {unit}")
    time.set_ylabel("time, μs")
    time.set_xlabel("message, bytes")
    time.set_yscale("log")
    for axis in (speed, time):
        axis.set_xscale("log", base=2)
        axis.grid(color=FAINT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False, fontsize=9)
    figure.suptitle(what, fontsize=12)
    return figure
