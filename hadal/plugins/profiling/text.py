"""Profiles as text: the figures, the largest modules at each depth, the tree."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Branches

from hadal.plugins.profiling.profile import (
    Profile,
    Tree,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

_WIDTH = 100
_NOTES = """\
params: parameters; MACs: multiply-accumulates; flops: floating-point operations
FLOPS: flops a second; fwd, bwd: one micro-batch's forward and backward; step: the update
iter: all forwards, all backwards and the update
"""


@dataclass(frozen=True, slots=True)
class ReportLayout:
    """Parts of a report that are written."""

    module_depth: int = -1
    """Depths listed by largest modules; -1 lists all."""
    top_modules: int = 1
    """Classes listed at each depth."""
    detailed: bool = True
    """True writes the tree of all modules."""


def write_report(profile: Profile, layout: ReportLayout, path: str | None) -> None:
    """Write a report to a file, as JSON if it is named `.json`, or print it.

    Raises:
        OSError: the file cannot be written.
    """
    if path is None:
        sys.stdout.write(report(profile, layout, sys.stdout) + "\n")
        sys.stdout.flush()
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(profile.as_dict(), indent=1) + "\n", encoding="utf-8")
    else:
        file.write_text(report(profile, layout) + "\n", encoding="utf-8")


def report(profile: Profile, layout: ReportLayout, stream: TextIO | None = None) -> str:
    """Return the report of an update, in colour if `stream` is a terminal."""
    lines = [
        _title("Hadal Flops Profiler"),
        f"Profile Summary at step {profile.step}:",
        _NOTES,
        *(f"{label + ':':<56}{value}" for label, value in _figures(profile)),
        "",
        aggregated(profile.tree, layout),
    ]
    if layout.detailed:
        lines += ["", _title("Detailed Profile per GPU"), detailed(profile.tree, stream)]
    return "\n".join([*lines, "-" * _WIDTH])


def standalone_report(tree: Tree, layout: ReportLayout, step: int) -> str:
    """Return the report of forwards outside an engine."""
    count, seconds = tree.forward, tree.seconds or 0.0
    figures = [
        ("params per GPU", params_to_string(tree.parameters)),
        ("fwd MACs per GPU", macs_to_string(count.macs)),
        ("fwd flops per GPU", number_to_string(count.flops)),
        ("fwd latency", duration_to_string(seconds)),
        ("fwd FLOPS per GPU", flops_to_string(count.flops / seconds if seconds else 0.0)),
    ]
    lines = [
        _title("Hadal Flops Profiler"),
        f"Profile Summary at step {step}:",
        _NOTES,
        *(f"{label + ':':<56}{value}" for label, value in figures),
        "",
        aggregated(tree, layout),
    ]
    if layout.detailed:
        lines += ["", _title("Detailed Profile per GPU"), detailed(tree)]
    return "\n".join([*lines, "-" * _WIDTH])


def _figures(profile: Profile) -> Iterator[tuple[str, str]]:
    ranks, micro = profile.ranks, profile.micro_steps
    forward, forward_s = profile.forward.flops / micro, profile.forward_s / micro
    backward, backward_s = profile.backward.flops / micro, profile.backward_s / micro
    factor = 3 + profile.recompute_fwd_factor
    yield "world size", str(ranks.world)
    yield "data parallel size", str(ranks.data_parallel)
    yield "model parallel size", str(ranks.model_parallel)
    yield "batch size per GPU", str(ranks.micro_batch)
    yield "micro-batches per update", str(micro)
    yield "params per GPU", params_to_string(profile.tree.parameters)
    yield "params of model", params_to_string(profile.tree.parameters * ranks.model_parallel)
    yield "fwd MACs per GPU", macs_to_string(profile.forward.macs // micro)
    yield "fwd flops per GPU", number_to_string(forward)
    yield "fwd flops of model", number_to_string(forward * ranks.model_parallel)
    yield "bwd flops per GPU (counted)", number_to_string(backward)
    yield "  of them recomputed", number_to_string(profile.recomputed.flops / micro)
    yield "fwd latency", duration_to_string(forward_s)
    yield "fwd FLOPS per GPU", _rate(forward, forward_s)
    yield "bwd latency", duration_to_string(backward_s)
    yield (
        f"bwd FLOPS per GPU = {factor - 1:g} * fwd flops / bwd latency",
        _rate((factor - 1) * forward, backward_s),
    )
    yield (
        f"fwd+bwd FLOPS per GPU = {factor:g} * fwd flops / latency",
        _rate(factor * forward, forward_s + backward_s),
    )
    yield "step latency", duration_to_string(profile.step_s)
    yield "iter latency", duration_to_string(profile.update_s)
    if profile.whole_s is not None:
        yield "iter latency with data", duration_to_string(profile.whole_s)
    yield "FLOPS per GPU = counted flops / iter latency", _rate(profile.flops, profile.update_s)
    yield "samples/second", f"{profile.samples_per_second:.2f}"
    if profile.peak_flops is not None and profile.mfu is not None:
        yield f"MFU, of {flops_to_string(profile.peak_flops)}", f"{100 * profile.mfu:.1f} %"
    if profile.is_slowed:
        yield "note", "latencies are those of the counted update, which counting slows"


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0.0)


def aggregated(tree: Tree, layout: ReportLayout) -> str:
    """Return the module classes with most parameters, operations and time at each depth."""
    levels = tree.levels()
    is_all = layout.module_depth == -1
    depth = max(1, len(levels) - 1) if is_all else layout.module_depth
    kinds: list[tuple[str, Callable[[Tree], float], Callable[[float], str]]] = [
        ("params", lambda each: each.parameters, params_to_string),
        ("MACs", lambda each: each.forward.macs, macs_to_string),
        ("fwd latency", lambda each: each.seconds or 0.0, duration_to_string),
    ]
    lines = [
        _title("Aggregated Profile per GPU"),
        f"Top {layout.top_modules} modules in terms of params, MACs or fwd latency at different"
        " model depths:",
    ]
    for number, level in enumerate(levels[:depth]):
        lines.append(f"depth {number}:")
        for label, value, shown in kinds:
            totals: dict[str, float] = {}
            for each in level:
                totals[each.kind] = totals.get(each.kind, 0) + value(each)
            largest = sorted(totals.items(), key=lambda item: -item[1])[: layout.top_modules]
            named = {kind: shown(total) for kind, total in largest}
            lines.append(f"    {label:<11} - {named}")
    return "\n".join(lines)


def detailed(tree: Tree, stream: TextIO | None = None) -> str:
    """Return the tree of modules, each with its figures and their fractions of the whole."""
    whole = tree

    def label(each: Tree) -> Text:
        seconds = each.seconds or 0.0
        shares = [
            f"{params_to_string(each.parameters)} = {_share(each.parameters, whole.parameters)}"
            " Params",
            f"{macs_to_string(each.forward.macs)} ="
            f" {_share(each.forward.macs, whole.forward.macs)} MACs",
            f"{duration_to_string(seconds)} = {_share(seconds, whole.seconds or 0.0)} latency",
            _rate(each.forward.flops, seconds),
        ]
        text = Text(f"({each.name}) " if each is not whole else "", style="bold")
        text.append(each.kind, style="cyan")
        text.append(f": {', '.join(shares)}", style="not bold")
        if each.arguments:
            text.append(f", {each.arguments}", style="dim")
        return text

    def grow(branch: Branches, each: Tree) -> None:
        for child in each.children:
            grow(branch.add(label(child)), child)

    root = Branches(label(tree))
    grow(root, tree)
    is_terminal = stream is not None and stream.isatty()
    out = io.StringIO()
    # One line for each module: parsers read lines.
    Console(file=out, width=100_000, force_terminal=is_terminal, soft_wrap=True).print(root)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _share(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 2) if whole else 0.0:g}%"


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")
