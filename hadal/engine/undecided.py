"""Updates that the device itself skips if gradients overflowed; the host reads the flag later.

To decide itself, the host would wait until the device has computed all gradients, and then the
device would idle until its next work. Instead kernels read the flag on the device and leave masters
and state unchanged; the host reads the flag before the next update, or on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hadal.device import HostCopy
from hadal.engine.parts import Finding, Parts, Training
from hadal.optim.schedules import SAMPLES, needs_metric, required_arguments, restorer
from hadal.optim.step import FlatStepper


@dataclass(frozen=True, slots=True)
class Undecided:
    """Update that the device may have skipped; the host does not know yet."""

    number: int
    """The number of the update (from 0)."""
    found: Finding
    overflowed: HostCopy
    undo: Callable[[], None]
    """Undoes the step of the schedule."""
    losses: Sequence[Tensor]

    def was_skipped(self) -> bool:
        """Read the flag; all ranks find the same."""
        return bool(self.overflowed.values() > 0)


def decides_on_device(parts: Parts, training: Training) -> bool:
    """Return whether the device may decide about the next update, with the host's bits."""
    if not parts.skip_overflow or parts.scale_rule.dynamic:
        return False
    stepper, schedule = training.stepper, training.schedule
    if schedule is not None and not hasattr(schedule, "load_state_dict"):
        return False
    return isinstance(stepper, FlatStepper) and stepper.may_skip_on_device


def step_schedule(
    training: Training, samples: int, arguments: Mapping[str, Any]
) -> Callable[[], None]:
    """Step the schedule, if there is one without a metric; return its undo.

    Without `arguments`, a schedule that counts samples (`SAMPLES`) gets those of the update.
    """
    schedule = training.schedule
    if schedule is None or needs_metric(schedule):
        return lambda: None
    groups = training.optimizer.param_groups
    restore = restorer(schedule, schedule.state_dict())
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    if not arguments and required_arguments(schedule) == (SAMPLES,):
        arguments = {SAMPLES: samples}
    schedule.step(**arguments)

    def undo() -> None:
        restore()
        for group, before in zip(groups, options, strict=False):  # groups may have been added
            group.update(before)

    return undo
