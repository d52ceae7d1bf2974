"""Profile of one update: a tree of modules, the figures of the whole model, and both as text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Branches
from torch import nn

from hadal.plugins.profiling.counting import Count


@dataclass(frozen=True, slots=True)
class Tree:
    """Module with its children, whose parameters, operations and time it includes."""

    name: str
    """Its name in its parent; for the root, its class."""
    kind: str
    """The name of its class."""
    parameters: int
    """Elements of its parameters, whole even if they are sharded; shared ones count once."""
    forward: Count
    """Operations of one micro-step's forward."""
    seconds: float | None
    """Seconds of one micro-step's forward; None if it was not timed."""
    arguments: str
    """The arguments that `repr` shows."""
    children: tuple[Tree, ...] = ()

    def levels(self) -> list[list[Tree]]:
        """Return the modules at each depth, the root alone first."""
        levels, level = [], [self]
        while level:
            levels.append(level)
            level = [child for tree in level for child in tree.children]
        return levels

    def as_dict(self) -> dict[str, Any]:
        """Return the tree as plain values."""
        return {
            "name": self.name,
            "class": self.kind,
            "parameters": self.parameters,
            "forward_flops": self.forward.flops,
            "forward_macs": self.forward.macs,
            "forward_seconds": self.seconds,
            "children": [child.as_dict() for child in self.children],
        }


def tree_of(
    model: nn.Module,
    counts: Mapping[str, Count],
    seconds: Mapping[str, float],
    micro_steps: int = 1,
) -> Tree:
    """Return a model's tree from totals of `micro_steps` by module name ('' is the root)."""

    def grow(module: nn.Module, path: str, name: str) -> Tree:
        below = f"{path}." if path else ""
        named = module.named_children()
        children = tuple(grow(child, below + key, key) for key, child in named)
        count, spent = counts.get(path), seconds.get(path)
        if count is None:  # a container is never called
            count = sum((child.forward for child in children), Count())
        else:
            count = Count(count.products // micro_steps, count.others // micro_steps)
        if spent is None:
            timed = [child.seconds for child in children if child.seconds is not None]
            spent = sum(timed) if timed else None
        else:
            spent /= micro_steps
        numel = sum(parameter.numel() for parameter in module.parameters())
        kind, arguments = type(module).__name__, module.extra_repr()
        return Tree(name, kind, numel, count, spent, arguments, children)

    return grow(model, "", type(model).__name__)


@dataclass(frozen=True, slots=True)
class Trained:
    """Numbers of ranks that trained, and the micro-batch of each."""

    world: int
    data_parallel: int
    model_parallel: int
    micro_batch: int
    """Samples of a micro-step on each data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of one update on this rank."""

    step: int
    """Updates before it."""
    tree: Tree
    forward: Count
    """Operations of all its forwards."""
    backward: Count
    """Operations of all its backwards, recomputation included."""
    recomputed: Count
    """Operations of the forward that backward repeated."""
    micro_steps: int
    forward_s: float
    """Seconds of all its forwards."""
    backward_s: float
    """Seconds of all its backwards."""
    step_s: float
    """Seconds from the last backward's end to the update's."""
    whole_s: float | None
    """Seconds from the previous update to this one, with data loading; None if not known."""
    is_slowed: bool
    """True if the times are those of an update whose operations were counted."""
    ranks: Trained
    peak_flops: float | None
    """The device's peak operations per second; None if not known."""
    recompute_fwd_factor: float = 0.0

    @property
    def flops(self) -> int:
        """Operations of the update on this rank."""
        return self.forward.flops + self.backward.flops

    @property
    def update_s(self) -> float:
        """Seconds of the update, without the time between the phases."""
        return self.forward_s + self.backward_s + self.step_s

    @property
    def flops_per_second(self) -> float:
        """Operations per second, over the phases of the update."""
        return self.flops / self.update_s if self.update_s else 0.0

    @property
    def mfu(self) -> float | None:
        """The fraction of the device's peak that was reached; None if the peak is unknown."""
        return self.flops_per_second / self.peak_flops if self.peak_flops else None

    @property
    def samples(self) -> int:
        """Samples of the update on all ranks."""
        return self.ranks.micro_batch * self.ranks.data_parallel * self.micro_steps

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second, over the phases of the update."""
        return self.samples / self.update_s if self.update_s else 0.0

    def mfu_at(self, samples_per_second: float) -> float | None:
        """Return the MFU of updates like this one at another speed; None if no peak is known."""
        if not self.peak_flops:
            return None
        return self.flops / self.samples * samples_per_second / self.peak_flops

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain values, for a JSON file."""
        return {
            "step": self.step,
            "micro_steps": self.micro_steps,
            "world_size": self.ranks.world,
            "data_parallel_size": self.ranks.data_parallel,
            "model_parallel_size": self.ranks.model_parallel,
            "micro_batch": self.ranks.micro_batch,
            "parameters": self.tree.parameters,
            "forward_flops": self.forward.flops,
            "forward_macs": self.forward.macs,
            "backward_flops": self.backward.flops,
            "recomputed_flops": self.recomputed.flops,
            "flops": self.flops,
            "forward_seconds": self.forward_s,
            "backward_seconds": self.backward_s,
            "step_seconds": self.step_s,
            "whole_seconds": self.whole_s,
            "times_include_counting": self.is_slowed,
            "flops_per_second": self.flops_per_second,
            "samples_per_second": self.samples_per_second,
            "peak_flops_per_second": self.peak_flops,
            "mfu": self.mfu,
            "modules": self.tree.as_dict(),
        }


# ---- units ---------------------------------------------------------------------------------------

_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `1083328` as `1.08 M`. The default unit is the largest that leaves at least 1."""
    if units is None:
        size = abs(num)
        fitting = (unit for unit, scale in _SCALES.items() if size >= scale)
        units = next(fitting, "u") if size else ""
    scale = _SCALES.get(units, 1.0)
    return f"{round(num / scale, precision):g} {units}"


def flops_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `1083328` as `1.08 MFLOPS`."""
    return f"{number_to_string(num, units, precision)}FLOPS"


def macs_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `499136` as `499.14 KMACs`."""
    return f"{number_to_string(num, units, precision)}MACs"


def bytes_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `7.25e9` as `7.25 GB`; a unit has 1,000 of the next."""
    return f"{number_to_string(num, units, precision)}B"


def duration_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `0.0123` seconds as `12.3 ms`."""
    return f"{number_to_string(num, units, precision)}s"


def params_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `7.25e9` as `7.25 B`."""
    given = "G" if units == "B" else units
    return number_to_string(num, given, precision).replace("G", "B").strip()


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
    return _report(profile.step, _figures(profile), profile.tree, layout, stream)


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
    return _report(step, figures, tree, layout)


def _report(
    step: int,
    figures: Iterable[tuple[str, str]],
    tree: Tree,
    layout: ReportLayout,
    stream: TextIO | None = None,
) -> str:
    lines = [
        _title("Hadal Flops Profiler"),
        f"Profile Summary at step {step}:",
        _NOTES,
        *(f"{label + ':':<56}{value}" for label, value in figures),
        "",
        aggregated(tree, layout),
    ]
    if layout.detailed:
        lines += ["", _title("Detailed Profile per GPU"), detailed(tree, stream)]
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
