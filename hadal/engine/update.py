"""Updates of the weights: the checks before (norm, overflow), the step, the loss scale after it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hadal.comm.collectives import gather_objects, sum_
from hadal.comm.interrupts import in_step
from hadal.device import HostCopy, is_host_memory, read_on_host, start_reading
from hadal.engine.listeners import MeanGradients, options_of
from hadal.engine.nonfinite import SkippedInARow, sources_of, warn_of_nonfinite
from hadal.engine.parts import Finding, Parts, Training
from hadal.engine.session import Session
from hadal.engine.undecided import Undecided, decides_on_device, step_schedule
from hadal.listener import Options, Update
from hadal.optim.loss_scale import ScaleRule, ScaleState, next_scale
from hadal.optim.norm import (
    RowNorms,
    clip_on_device,
    device_of_sum,
    first_overflow,
    first_row_overflow,
    global_norm,
    has_overflow,
    sum_of_squares,
)
from hadal.optim.step import FlatStepper

_log = logging.getLogger(__name__)

_NORM = "the norm of the gradients"


def part_of_norm(parts: Parts) -> Callable[[], Tensor] | None:
    """Return a maker of this rank's part of the squared norm, if the host sums it."""
    gradients, sharing = parts.runtime.gradients, parts.topology.sharing
    model = parts.topology.parts
    if not parts.computes_norm or not is_host_memory(device_of_sum(gradients)):
        return None
    if any(one.bucket.sharing.tied is not None for one in gradients):
        return None  # their sums over the stages come first

    def make() -> Tensor:
        part = sum_of_squares(gradients, model)
        # Copies are equal: the first one's parts make the sum, as in `Sharing.sum_`.
        return part if sharing.replicas is None or sharing.replicas.rank == 0 else part.zero_()

    return make


def measure(
    parts: Parts, scale: float, *, later: bool = False, total: Tensor | None = None
) -> Finding:
    """Compute norm and overflow of the mean gradients of a loss that was multiplied by `scale`.

    All ranks must call it together, and get the same. On an accelerator the host waits only to
    learn whether gradients overflowed, if an update may be skipped for that; with `later` not even
    then, because the device decides. `total`: the sum of all ranks' parts of the squared norm, if
    it is known.
    """
    gradients, model = parts.runtime.gradients, parts.topology.parts
    limit, norm, rows = parts.gradient_clipping, None, RowNorms()
    if parts.computes_norm:
        sharing = parts.topology.sharing
        norm = global_norm(gradients, sharing, model, rows, total) / scale
    overflowed = None
    # The norm counts parameters that several parts of the model hold only once.
    if parts.skip_overflow and (norm is None or model is not None):
        overflowed = has_overflow(gradients, parts.ranks, model)
    if parts.skip_overflow and norm is not None:
        is_infinite = norm.isfinite().logical_not()
        overflowed = is_infinite if overflowed is None else is_infinite.logical_or(overflowed)
    if overflowed is not None and not (later and not is_host_memory(overflowed.device)):
        if bool(read_on_host(overflowed, "whether gradients overflowed")):
            # NaN means the same as infinity here, and callers look for infinity.
            infinite = None if norm is None else math.inf
            return Finding(infinite, overflow=True, culprit=_culprit(parts))
        overflowed = None
    if norm is None:
        return Finding(overflowed=overflowed)
    if is_host_memory(norm.device):
        return Finding(float(norm), limit)
    clip = clip_on_device(norm, limit) if limit else None
    return Finding(start_reading(norm, _NORM), limit, clip, overflowed, rows)


def late_finding(found: Finding, parts: Parts) -> Finding:
    """Return the finding of an update that the device skipped. All ranks must call it together."""
    names = [name for name, _ in parts.model.named_parameters()]
    if found.rows is None:
        return Finding(overflow=True, culprit="a parameter")  # no norm is computed
    culprit = first_row_overflow(found.rows, names, parts.ranks)
    near = None if culprit is None else f"{culprit} (or of another parameter in its bucket)"
    return Finding(math.inf, overflow=True, culprit=near)


def _culprit(parts: Parts) -> str | None:
    names = [name for name, _ in parts.model.named_parameters()]
    culprit = first_overflow(parts.runtime.gradients, names, parts.ranks)
    model_parallel = parts.topology.model_parallel
    if model_parallel is not None:
        culprit = next(filter(None, gather_objects(culprit, model_parallel)), None)
    return culprit


def moved_scale(before: ScaleState, found: Finding, number: int, parts: Parts) -> ScaleState:
    """Return the loss scale after update `number` (from 0). Log an overflow, at the floor too.

    Raises:
        LossScaleError: the gradients overflowed at the floor of the scale.
    """
    after = before
    try:
        after = next_scale(before, found.overflow, parts.scale_rule)
    finally:
        if found.overflow and parts.ranks.rank == 0:
            scales = _scales_of(before, after, parts.scale_rule)
            _log.warning("update %d skipped: %s%s", number, _reason_of(found), scales)
    return after


def _scales_of(before: ScaleState, after: ScaleState, rule: ScaleRule) -> str:
    if before.scale != after.scale:
        return f"; loss scale {before.scale:g} -> {after.scale:g}"
    if not rule.dynamic:
        return "" if before.scale == 1.0 else f"; loss scale {before.scale:g} (static)"
    tolerated = f", hysteresis {rule.hysteresis}" if after.spare != before.spare else ""
    return f"; loss scale stays {before.scale:g}{tolerated}"


def _sum_tied(parts: Parts) -> None:
    """Add up the mean gradients of copies on several stages, each rank its own slice of them."""
    found = [(one.bucket.sharing.tied, one) for one in parts.runtime.gradients]
    tied = [(tie, one) for tie, one in found if tie is not None]
    for tie, one in sorted(tied, key=lambda pair: pair[0].key):
        sum_(one.mean, tie.ranks, f"the sum of the gradients of {tie.key} over stages")


def _reason_of(found: Finding) -> str:
    if found.is_asked:
        return "the program asked for it"
    if found.culprit:
        return f"the gradient of {found.culprit} is not finite{found.sources}"
    return "all gradients are finite, but their norm is not"


class Updates:
    """Maker of an engine's updates, which learns later which ones the device has skipped."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._skipped = SkippedInARow(session.parts.config.max_skipped_updates)
        self._has_warned = False

    @torch.no_grad()
    def make(self, samples: int, metric: float | None, arguments: Mapping[str, Any]) -> None:
        """Update the weights and the learning rate from `samples` samples of all ranks.

        `metric` is the schedule's, if it takes one; it counts if the update is skipped, too.
        `arguments` are for the step of other schedules.
        """
        options = self._update(samples, metric, arguments)
        if options is not None:
            update = self._record(samples, options)
            # A listener may end the program on all ranks: that cuts no exchange short.
            for listener in self._session.listeners:
                listener.after_update(update)

    @in_step
    def _update(
        self, samples: int, metric: float | None, arguments: Mapping[str, Any]
    ) -> Options | None:
        """Make the update. Return the options before the schedule's step, for listeners."""
        session, parts, cycle = self._session, self._session.parts, self._session.cycle
        training, counters = session.expect_training(), session.counters
        self._tell_skipped()
        self._look_back()
        total = parts.runtime.reduce_all(part_of_norm(parts))
        _sum_tied(parts)
        for listener in session.listeners:
            listener.before_update(MeanGradients(parts.model, parts.runtime))
        options = options_of(training.optimizer) if session.listeners else None
        parts.runtime.check_sanity(overflow_is_handled=parts.skip_overflow)
        stepper = training.stepper
        looks = isinstance(stepper, FlatStepper) and stepper.steps_in_blocks
        parts.runtime.reshard_all(update_looks=looks)
        factor, cycle.factor = session.gradient_factor, None
        cycle.last = found = self._measured(training, factor, total)
        if self._is_unwanted(found.measured):
            self._warn(counters.global_steps, _culprit(parts))
        if found.overflow:
            counters.skipped_steps += 1
        else:
            self._step_weights(training, found, factor)
            undo = step_schedule(training, samples, arguments)
            if found.overflowed is not None:
                flag = start_reading(found.overflowed, "whether the last gradients overflowed")
                session.undecided = Undecided(
                    counters.global_steps, found, flag, undo, cycle.losses
                )
        if metric is not None:
            training.schedule.step(fmean(gather_objects(metric, parts.world)))
            options = options and options_of(training.optimizer)  # that is not taken back
        parts.runtime.clear_gradients()
        counters.global_steps += 1
        counters.global_samples += samples
        self._move_scale(found)
        return options

    def _measured(self, training: Training, factor: float, total: Tensor | None) -> Finding:
        parts, cycle = self._session.parts, self._session.cycle
        is_unwanted, cycle.skips_next = cycle.skips_next, False
        later = not is_unwanted and decides_on_device(parts, training)
        found = measure(parts, factor, later=later, total=total)
        if found.overflow:
            return replace(found, sources=sources_of(cycle.losses, parts))
        return replace(found, overflow=True, is_asked=True) if is_unwanted else found

    def _tell_skipped(self) -> None:
        """Report that the device has skipped the last update. All ranks must call it together."""
        session = self._session
        session.learn_of_skip()
        skipped, session.skipped = session.skipped, None
        if not session.cycle.last.overflow:
            self._skipped.clear()
        if skipped is not None:
            found = late_finding(skipped.found, session.parts)
            found = replace(found, sources=sources_of(skipped.losses, session.parts))
            session.scale = moved_scale(session.scale, found, skipped.number, session.parts)
            self._skipped.add(skipped.number, _reason_of(found))

    def _is_unwanted(self, norm: float | HostCopy | None) -> bool:
        """Return whether a norm is not finite and no warning was logged yet."""
        if self._session.parts.skip_overflow or self._has_warned or norm is None:
            return False
        return isinstance(norm, float) and not math.isfinite(norm)

    def _look_back(self) -> None:
        """Warn of the last update, if its norm has arrived from the device since."""
        session, last = self._session, self._session.cycle.last
        if isinstance(last.measured, HostCopy) and self._is_unwanted(last.norm):
            self._warn(session.counters.global_steps - 1, late_finding(last, session.parts).culprit)

    def _warn(self, number: int, culprit: str | None) -> None:
        self._has_warned = True
        parts = self._session.parts
        sources = sources_of(self._session.cycle.losses, parts)
        if parts.ranks.rank == 0:
            warn_of_nonfinite(number, culprit, sources)

    def _step_weights(self, training: Training, found: Finding, factor: float) -> None:
        runtime = self._session.parts.runtime
        try:
            training.stepper.expect_same_groups()
            with runtime.holding_frozen():
                multiplier = found.multiplier(factor)
                if found.overflowed is None:
                    training.stepper.step(multiplier)
                else:
                    assert isinstance(training.stepper, FlatStepper)  # `decides_on_device`
                    training.stepper.step(multiplier, found.overflowed)
        except BaseException:
            # The next update must not start with gradients that this one could not use.
            runtime.clear_gradients()
            raise

    def _move_scale(self, found: Finding) -> None:
        session, before = self._session, self._session.scale.scale
        number = session.counters.global_steps - 1
        session.scale = moved_scale(session.scale, found, number, session.parts)
        if found.overflow and not found.is_asked and session.scale.scale == before:
            self._skipped.add(number, _reason_of(found))
        if session.scale.scale != before:
            session.parts.runtime.rescale_residuals(session.scale.scale / before)

    def _record(self, samples: int, before: Options) -> Update:
        """Return the finished update as listeners see it."""
        session, cycle, undecided = self._session, self._session.cycle, self._session.undecided
        options = options_of(session.optimizer)
        return Update(
            number=session.counters.global_steps,
            samples=samples,
            total_samples=session.counters.global_samples,
            micro_steps=cycle.collected,
            losses=tuple(cycle.losses),
            scale=session.scale.scale,
            measured=cycle.last.measured,
            overflowed=cycle.last.overflow if undecided is None else undecided.overflowed,
            options=options,
            options_if_skipped=options if undecided is None else before,
            skipped_before=session.counters.skipped_steps - cycle.last.overflow,
            clocked=session.parts.clocks.lap,
        )
