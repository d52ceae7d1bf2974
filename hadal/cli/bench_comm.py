"""`hadal bench comm`: how fast ranks send to each other, as a table and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.arguments import positive
from hadal.cli.run import start
from hadal.errors import HadalError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hadal.comm.bench import Trial

_FAULTY = 1
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
_WAYS = {"hadal": "hadal.comm", "torch": "torch.distributed", "training": "as in training"}
_COLOURS = ("#1f5fa8", "#d1682b", "#3c8d5a", "#8a4fa3", "#a8842c", "#5f6b76")
_FAINT = "#c9d1d9"
_DEFAULT_RANKS_OF_CPUS = 2


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action."""
    parser = subparsers.add_parser(
        "comm",
        help="measure collectives between ranks",
        description="Measure collectives over messages of many sizes; print a table, and draw a"
        " picture. Run by itself it starts ranks on this machine; under `hadal run --module"
        " hadal.cli bench comm`, torchrun, Slurm or MPI it takes part as one of theirs.",
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"{', '.join(_KINDS)} (default: all)"
    )
    parser.add_argument(
        "--maxsize",
        type=positive,
        default=24,
        metavar="N",
        help="the largest message has 2^N elements (default %(default)s)",
    )
    parser.add_argument(
        "--mem_factor",
        type=_share,
        metavar="SHARE",
        help="measure one size alone: the message that takes this share of the free memory",
    )
    parser.add_argument("--trials", type=positive, default=20, metavar="N", help="calls (20)")
    parser.add_argument("--warmups", type=int, default=5, metavar="N", help="before them (5)")
    parser.add_argument("--dtype", default="float32", help="torch's name (default float32)")
    parser.add_argument(
        "--async_op", "--async-op", action="store_true", help="start calls, then wait for them"
    )
    parser.add_argument(
        "--dist",
        choices=tuple(_WAYS),
        default="hadal",
        help="whose calls: hadal.comm's, torch's own, or what an engine does in training",
    )
    parser.add_argument(
        "--bw_unit", choices=("GBps", "Gbps"), default="GBps", help="bytes or bits in a second"
    )
    parser.add_argument("--raw", action="store_true", help="plain numbers, in columns by tabs")
    parser.add_argument(
        "--backend", metavar="NAME", help="torch's backend (default: the device's own)"
    )
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="how many ranks to start on this machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw a PNG")
    parser.add_argument("--hand-over", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text}")
    return value


def run(parsed: argparse.Namespace) -> int:
    """Measure; return 1 where that cannot be done."""
    if parsed.output is not None and not _can_draw():
        return _FAULTY
    from hadal.comm.start import told_world_size

    unknown = [kind for kind in parsed.kinds if kind not in _KINDS]
    if unknown:
        print(
            f"hadal bench comm: no kind {unknown[0]!r}: expected some of {', '.join(_KINDS)}",
            file=sys.stderr,
        )
        return _FAULTY
    if told_world_size() is None:
        return _start_ranks(parsed)
    try:
        return _take_part(parsed)
    except (HadalError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY


def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401 - to tell before anything is measured
    except ImportError:
        print(
            "hadal bench comm draws with matplotlib, which is not installed:"
            " pip install matplotlib",
            file=sys.stderr,
        )
        return False
    return True


def _start_ranks(parsed: argparse.Namespace) -> int:
    """Run this command again in ranks of its own, and show what they hand over."""
    from hadal.device.inventory import devices

    ranks = parsed.ranks or len(devices()) or _DEFAULT_RANKS_OF_CPUS
    started = ["--quiet", "--num_accelerators", str(ranks), "--no_local_rank", "--module"]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "measured.json")
        words = [*_words(parsed), "--hand-over", str(found)]
        code = start([*started, "hadal.cli", "bench", "comm", *words])
        return code or _show(parsed, json.loads(found.read_text()))


def _words(parsed: argparse.Namespace) -> list[str]:
    """The command line again."""
    words = list(parsed.kinds)
    for name in ("maxsize", "mem_factor", "trials", "warmups", "dtype", "dist", "bw_unit"):
        value = getattr(parsed, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--backend", parsed.backend] if parsed.backend else []
    return words + [f"--{name}" for name in ("async_op", "raw") if getattr(parsed, name)]


def _take_part(parsed: argparse.Namespace) -> int:
    from hadal import comm
    from hadal.comm.bench import numel_of_memory, numels_up_to, sweep
    from hadal.device import current_device

    comm.init_distributed(parsed.backend)
    trial, ranks = _trial(parsed), comm.Ranks.world()
    numels = numels_up_to(1 << parsed.maxsize, ranks.size)
    if parsed.mem_factor is not None:
        numels = [numel_of_memory(parsed.mem_factor, trial.dtype, ranks)]
    kinds = parsed.kinds or [k for k in _KINDS if not (k == "pt2pt" and trial.way == "training")]
    found = [dataclasses.asdict(one) for one in sweep(kinds, numels, trial)]
    told = {"ranks": ranks.size, "device": current_device().type, "measured": found}
    comm.destroy_process_group()
    if ranks.rank > 0:
        return 0
    if parsed.hand_over is not None:
        parsed.hand_over.write_text(json.dumps(told))
        return 0
    return _show(parsed, told)


def _trial(parsed: argparse.Namespace) -> Trial:
    import torch

    from hadal.comm.bench import Trial

    dtype = getattr(torch, parsed.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {parsed.dtype}: expected a dtype of torch's, such as bfloat16")
    return Trial(dtype, parsed.trials, max(0, parsed.warmups), parsed.async_op, parsed.dist)


def _show(parsed: argparse.Namespace, told: dict[str, Any]) -> int:
    found = told["measured"]
    what = f"{told['ranks']} ranks on {told['device']}, {parsed.dtype}, {_WAYS[parsed.dist]}"
    factor = 8e-9 if parsed.bw_unit == "Gbps" else 1e-9
    if parsed.raw:
        for one in found:
            speeds = [one[name] * factor for name in ("algorithm_bandwidth", "bus_bandwidth")]
            figures = [f"{value:.6g}" for value in (one["seconds"] * 1e6, *speeds)]
            print(one["kind"], one["nbytes"], one["numel"], *figures, sep="\t")
    else:
        _print_table(found, what, parsed.bw_unit, factor)
    try:
        if parsed.json is not None:
            choice = {"dtype": parsed.dtype, "way": parsed.dist}
            parsed.json.write_text(json.dumps({**choice, **told}, indent=1) + "\n")
        if parsed.output is not None:
            picture = figure_of(found, what, parsed.bw_unit, factor)
            picture.savefig(parsed.output, format="png", dpi=150)
            print(parsed.output)
    except OSError as error:
        print(f"{error.filename} cannot be written: {error}", file=sys.stderr)
        return _FAULTY
    return 0


def _print_table(found: Sequence[dict[str, Any]], what: str, unit: str, factor: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from hadal.comm.summary import shown_nbytes

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=what, title_justify="left")
    table.add_column("operation")
    for title in ("message", "elements", "μs", f"algorithm\n{unit}", f"bus\n{unit}"):
        table.add_column(title, justify="right")
    before = ""
    for one in found:
        name, before = "" if one["kind"] == before else one["kind"], one["kind"]
        speeds = (one["algorithm_bandwidth"] * factor, one["bus_bandwidth"] * factor)
        table.add_row(
            name,
            shown_nbytes(one["nbytes"]),
            f"{one['numel']:,}",
            f"{one['seconds'] * 1e6:.1f}",
            *(f"{speed:.3f}" for speed in speeds),
        )
    Console(width=max(Console().width, 90)).print(table)


def figure_of(found: Sequence[dict[str, Any]], what: str, unit: str, factor: float) -> Figure:
    """Draw bus bandwidth, and time below it, over the message."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    speed, time = figure.subplots(2, sharex=True)
    kinds = list(dict.fromkeys(one["kind"] for one in found))
    for kind, colour in zip(kinds, _COLOURS, strict=False):
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
        axis.grid(color=_FAINT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False, fontsize=9)
    figure.suptitle(what, fontsize=12)
    return figure
