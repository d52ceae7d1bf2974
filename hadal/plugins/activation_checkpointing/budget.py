"""The choice of modules to recompute within a memory budget: arithmetic on measurements.

A step is measured while every module is recomputed. Each recomputed call begins a part of backward.
The peak of each part, and the bytes of its activations, determine the peak of any choice: stored
activations add to all parts before their own backward, and inputs offloaded to the host no longer
count there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

_MIB = 2**20


class ModuleChoice(Enum):
    """The treatment of a module's activations."""

    STORED = "stored"
    RECOMPUTED = "recomputed"
    OFFLOADED = "recomputed, input on the host"


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One recomputed call of a measured step."""

    module: str
    stored_nbytes: int
    """Bytes that its activations would take until its backward, in addition to its input."""
    input_nbytes: int
    """Bytes of its inputs that could be on the host."""
    seconds: float
    """Duration of the recomputation."""
    peak: int
    """Peak bytes from its recomputation to the next one, or to the end of backward."""
    place: int = 0
    """Its position in forward."""
    before: int = 0
    """Peak bytes from the end of the call before it in forward to its own beginning."""
    forward: int = 0
    """Peak bytes in its forward."""
    forward_storing: int = 0
    """The same if it had stored its activations, as its recomputation does."""


@dataclass(frozen=True, slots=True)
class MeasuredBackward:
    """One forward and backward, with every module recomputed."""

    forward_peak: int
    """Peak bytes from the end of the last call's forward to the first recomputation."""
    calls: tuple[MeasuredCall, ...]
    """In the order of their recomputation."""

    def peak(self, choices: Mapping[str, ModuleChoice]) -> int:
        """Return the peak bytes with these choices."""
        stored = [c.stored_nbytes * (choices[c.module] is ModuleChoice.STORED) for c in self.calls]
        absent = [
            c.input_nbytes * (choices[c.module] is ModuleChoice.OFFLOADED) for c in self.calls
        ]
        # Calls that wait for their own backward; the next input to be used is back already.
        peaks = [self.forward_peak + sum(stored) - sum(absent)]
        earlier = 0
        for call in sorted(self.calls, key=lambda one: one.place):
            is_stored = choices[call.module] is ModuleChoice.STORED
            forward = call.forward_storing if is_stored else call.forward
            peaks.append(earlier + max(call.before, forward))
            earlier += call.stored_nbytes if is_stored else 0
            earlier -= call.input_nbytes * (choices[call.module] is ModuleChoice.OFFLOADED)
        for place, call in enumerate(self.calls):
            waiting = sum(stored[place + 1 :]) - sum(absent[place + 2 :])
            peaks.append(call.peak + waiting)
        return max(peaks)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One update on one rank, with every module recomputed."""

    backwards: tuple[MeasuredBackward, ...]
    update_peak: int
    """Peak bytes from the end of the last backward to the end of the update."""

    def peak(self, choices: Mapping[str, ModuleChoice]) -> int:
        """Return the peak bytes of an update with these choices."""
        return max(self.update_peak, *(one.peak(choices) for one in self.backwards))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice for each module, by full name, and the resulting peak bytes."""

    choices: Mapping[str, ModuleChoice]
    peak: int
    budget: int
    least: int
    """Peak bytes if every module is recomputed, its input on the device."""
    most: int
    """Peak bytes if none is."""

    @property
    def fits(self) -> bool:
        """True if the peak is within the budget."""
        return self.peak <= self.budget


def choose(
    steps: Sequence[MeasuredStep], modules: Sequence[str], budget: int, *, offloads: bool
) -> Verdict:
    """Return the choice that recomputes least within a budget.

    Modules whose recomputation takes the most time per byte saved are stored first; among equals,
    the last module is, as its activations live the shortest. If recomputing all modules does not
    suffice, inputs are offloaded to the host, starting with the first module, which waits longest.

    Args:
        steps: the measured step of each rank; the largest peak counts.
        modules: full names, in the order of forward.
        budget: bytes.
        offloads: True if inputs may be moved to the host.
    """

    def peak(choices: Mapping[str, ModuleChoice]) -> int:
        return max(step.peak(choices) for step in steps)

    choices = dict.fromkeys(modules, ModuleChoice.RECOMPUTED)
    least, most = peak(choices), peak(dict.fromkeys(modules, ModuleChoice.STORED))
    if least > budget:
        for name in modules if offloads else ():
            if peak(choices) <= budget:
                break
            choices[name] = ModuleChoice.OFFLOADED
        return Verdict(choices, peak(choices), budget, least, most)
    costs = costs_of(steps)
    alike: dict[int, list[float]] = {}
    for seconds, nbytes, _ in costs.values():
        alike.setdefault(nbytes, []).append(seconds)

    def worth(name: str) -> tuple[float, int]:
        _, nbytes, _ = costs.get(name, (0.0, 0, 0))
        # Blocks of the same size take the same time: differences are measurement noise.
        return fmean(alike.get(nbytes, [0.0])) / max(nbytes, 1), modules.index(name)

    for name in sorted(modules, key=worth, reverse=True):
        wider = {**choices, name: ModuleChoice.STORED}
        if peak(wider) <= budget:
            choices = wider
    return Verdict(choices, peak(choices), budget, least, most)


def costs_of(steps: Iterable[MeasuredStep]) -> dict[str, tuple[float, int, int]]:
    """Return each module's seconds, activation bytes and input bytes: the maximum over ranks."""
    found: dict[str, tuple[float, int, int]] = {}
    for step in steps:
        for backward in step.backwards:
            mine: dict[str, tuple[float, int, int]] = {}
            for call in backward.calls:
                seconds, stored, inputs = mine.get(call.module, (0.0, 0, 0))
                mine[call.module] = (
                    seconds + call.seconds,
                    stored + call.stored_nbytes,
                    inputs + call.input_nbytes,
                )
            for name, cost in mine.items():
                before = found.get(name, (0.0, 0, 0))
                found[name] = (
                    max(before[0], cost[0]),
                    max(before[1], cost[1]),
                    max(before[2], cost[2]),
                )
    return found


def table(steps: Sequence[MeasuredStep], verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a table: the cost of each module, and the choice."""
    costs = costs_of(steps)
    width = max(len(name) for name in verdict.choices)
    yield f"{'module':<{width}}  activations MiB  input MiB  recomputation ms  choice"
    for name, choice in verdict.choices.items():
        seconds, stored, inputs = costs.get(name, (0.0, 0, 0))
        yield (
            f"{name:<{width}}  {stored / _MIB:15.1f}  {inputs / _MIB:9.1f}"
            f"  {seconds * 1000:16.2f}  {choice.value}"
        )
    yield (
        f"peak: {verdict.peak / _MIB:,.1f} MiB of {verdict.budget / _MIB:,.1f} MiB"
        f" (all recomputed {verdict.least / _MIB:,.1f}, all stored {verdict.most / _MIB:,.1f})"
    )
    if not verdict.fits:
        yield (
            "no choice fits into activation_checkpointing.memory_budget: raise it to at least"
            f" {verdict.peak}, or reduce the micro-batch"
        )
