"""Profile of one update: a tree of modules, and the figures of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
