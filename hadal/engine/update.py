"""Backwards and updates: the checks (norm, overflow), the step, and the loss scale after it.

If gradients overflowed, the device may skip an update by itself: the host would otherwise wait
until the device has computed all gradients, and then the device would idle until its next work.
Kernels read the flag on the device and leave masters and state unchanged; the host reads it before
the next update, or on request.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hadal.comm.collectives import gather_codes, gather_objects, sum_
from hadal.comm.works import in_step
from hadal.device import HostCopy, is_host_memory, read_on_host, start_reading
from hadal.engine.listeners import MeanGradients, options_of
from hadal.engine.mistakes import used_up_graph
from hadal.engine.state import GradientCheck, Parts, PendingUpdate, State, Training
from hadal.engine.training import expect_training
from hadal.errors import HadalError, LossError, NonFiniteError, UsageError
from hadal.listener import Options, Update
from hadal.optim.norm import (
    RowNorms,
    ScaleRule,
    ScaleState,
    clip_on_device,
    first_nonfinite_weight,
    first_overflow,
    first_row_overflow,
    global_norm,
    has_overflow,
    next_scale,
)
from hadal.optim.schedules import SAMPLES, needs_metric, required_arguments, restorer
from hadal.optim.step import FlatStepper
from hadal.plugins.sequence.cross_entropy import as_parts


class Backwards:
    """Runner of backward passes: checks a loss on all ranks and calls listeners."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, loss: Tensor, retain_graph: bool, *, divides: bool) -> None:
        """Compute gradients of a loss; `divides`: by the micro-steps of an update."""
        state, hooks = self._state, self._state.parts.hooks
        with state.listeners:
            boundary = self._expect(
                lambda: self._check_loss(loss),
                "engine.backward(loss) was refused or not called on another rank, whose error says"
                " why; no rank has computed gradients",
            )
            sequence = state.parts.topology.sequence_parallel
            if sequence is not None:
                loss = as_parts(loss, sequence.group)
            factor = state.scale.scale
            self._count_factor(factor)
            if divides:
                factor /= state.batches.accumulation
            factor *= self._weight()
            exact = torch.promote_types(loss.dtype, torch.float32)
            scaled = loss if factor == 1.0 else loss.to(exact) * factor
            with self._around(boundary, loss.detach()):
                hooks.backward(scaled, retain_graph)

    def _weight(self) -> float:
        return math.prod(listener.loss_weight() for listener in self._state.listeners)

    @contextmanager
    def direct(self) -> Iterator[None]:
        """Wrap a backward that the caller has started on a tensor."""
        state = self._state
        where = f"rank {state.parts.ranks.rank}: loss.backward()"
        scaled, state.scaled = state.scaled, None
        scale = state.scale.scale

        def check() -> None:
            if not state.backwards:
                state.parts.sharded.check_late(where)
            if scale != 1.0 and scaled is None:
                raise UsageError(
                    f"{where} leaves out the loss scale ({scale}), without which fp16 gradients"
                    " vanish; call engine.scale(loss).backward(), or engine.backward(loss)"
                )
            if self._weight() != 1.0:
                raise UsageError(
                    f"{where} leaves out the weight of this micro-batch; call"
                    " engine.backward(loss), or set data_efficiency.data_sampling.dynamic_batching"
                    '.loss_weighting to "none"'
                )
            # The update divides by the micro-steps; only `run` divides the loss itself.
            self._count_factor(scale * state.batches.accumulation)

        with state.listeners:
            elsewhere = f"{where} was refused on another rank, whose error says why"
            with self._around(self._expect(check, elsewhere), scaled):
                yield

    @contextmanager
    def _around(self, boundary: bool, loss: Tensor | None) -> Iterator[None]:
        """Wrap a backward of `loss` (detached; None if unknown), and count it at the end."""
        state = self._state
        if state.training is None:
            expect_training(state)
        for listener in state.listeners:
            listener.before_backward()
        try:
            with state.parts.runtime.backward(boundary=boundary):
                yield
        except BaseException as error:
            state.forget_backwards()  # their gradients are dropped
            used_up = used_up_graph(str(error)) if isinstance(error, RuntimeError) else None
            if used_up is None:
                raise
            raise UsageError(f"rank {state.parts.ranks.rank}: {used_up}") from error
        state.backwards += 1
        state.collected += 1
        if loss is not None:
            state.losses.append(loss)
        for listener in state.listeners:
            listener.after_backward(loss)

    def _expect(self, check: Callable[[], None], elsewhere: str) -> bool:
        """Raise on every rank if `check` raises on one, so that no rank waits for it.

        Returns whether the backward is the last of an update, as far as that is known.
        """
        boundary = self._state.is_boundary and not self._state.unsynchronized
        fault: HadalError | None = None
        try:
            check()
        except HadalError as error:
            fault = error
        gathering = self._state.parts.runtime.gathering
        if gathering.any_fault(fault is not None, boundary=boundary):
            raise fault or LossError(elsewhere)
        return boundary

    def _count_factor(self, factor: float) -> None:
        """Note the factor that this backward's gradients carry."""
        state = self._state
        known = state.factor
        if known is not None and known != factor:
            raise UsageError(
                f"rank {state.parts.ranks.rank}: gradients of one update came from"
                " engine.backward(loss), which divides by the micro-steps, and from"
                " loss.backward(), which does not; use one of the two for all of its micro-steps"
            )
        state.factor = factor

    def _check_loss(self, loss: object) -> None:
        state = self._state
        where = f"rank {state.parts.ranks.rank}: engine.backward(loss)"
        if not state.parts.runtime.gradients:
            raise UsageError(
                f"{where} has nothing to train: no parameter of the model in the optimizer requires"
                " a gradient"
            )
        if not state.backwards:
            state.parts.sharded.check_late(where)
        expect_loss(loss, where)


def expect_loss(loss: object, where: str) -> None:
    """Raise LossError if a backward cannot begin at `loss`."""
    if not isinstance(loss, Tensor):
        raise LossError(
            f"{where} expects a tensor, got {type(loss).__name__}; pass the loss itself, for"
            " example outputs.loss or outputs[0]"
        )
    if loss.numel() != 1:
        raise LossError(
            f"{where} expects a scalar, got a tensor of shape {tuple(loss.shape)}; reduce it"
            " first, for example loss.mean()"
        )
    if not loss.requires_grad:
        raise LossError(
            f"{where}: the loss does not depend on any trainable parameter; was it computed"
            " under torch.no_grad(), or detached?"
        )


_log = logging.getLogger(__name__)

# ---- updates -------------------------------------------------------------------------------------

_NORM = "the norm of the gradients"


def measure(parts: Parts, scale: float, *, later: bool = False) -> GradientCheck:
    """Compute norm and overflow of the mean gradients of a loss that was multiplied by `scale`.

    All ranks must call it together, and get the same. On an accelerator the host waits only to
    learn whether gradients overflowed, if an update may be skipped for that; with `later` not even
    then, because the device decides.
    """
    gradients, model = parts.runtime.gradients, parts.topology.parts
    limit, norm, rows = parts.config.gradient_clipping, None, RowNorms()
    if parts.config.zero_optimization.compute_grad_norm:
        sharing = parts.topology.sharing
        norm = global_norm(gradients, sharing, model, rows) / scale
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
            return GradientCheck(infinite, overflow=True, culprit=_culprit(parts))
        overflowed = None
    if norm is None:
        return GradientCheck(overflowed=overflowed)
    if is_host_memory(norm.device):
        return GradientCheck(float(norm), limit)
    clip = clip_on_device(norm, limit) if limit else None
    return GradientCheck(start_reading(norm, _NORM), limit, clip, overflowed, rows)


def late_check(found: GradientCheck, parts: Parts) -> GradientCheck:
    """Return the check of an update that the device skipped. All ranks must call it together."""
    names = [name for name, _ in parts.model.named_parameters()]
    if found.rows is None:
        return GradientCheck(overflow=True, culprit="a parameter")  # no norm is computed
    culprit = first_row_overflow(found.rows, names, parts.ranks)
    near = None if culprit is None else f"{culprit} (or of another parameter in its bucket)"
    return GradientCheck(math.inf, overflow=True, culprit=near)


def _culprit(parts: Parts) -> str | None:
    names = [name for name, _ in parts.model.named_parameters()]
    culprit = first_overflow(parts.runtime.gradients, names, parts.ranks)
    model_parallel = parts.topology.model_parallel
    if model_parallel is not None:
        culprit = next(filter(None, gather_objects(culprit, model_parallel)), None)
    return culprit


def moved_scale(before: ScaleState, found: GradientCheck, number: int, parts: Parts) -> ScaleState:
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


def _reason_of(found: GradientCheck) -> str:
    if found.is_asked:
        return "the program asked for it"
    if found.culprit:
        return f"the gradient of {found.culprit} is not finite{found.sources}"
    return "all gradients are finite, but their norm is not"


def _decides_on_device(parts: Parts, training: Training) -> bool:
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


def _sources_of(losses: Sequence[Tensor], parts: Parts) -> str:
    """Return which losses and which weight are not finite either, as the end of a sentence.

    All ranks must call it together. Weights are searched unless all losses are known to be finite.
    """
    ranks = parts.ranks
    values = [float(read_on_host(loss.reshape(()), "the loss")) for loss in losses]
    codes = gather_codes(-1 if not values else int(not all(map(math.isfinite, values))), ranks)
    found = [str(rank) for rank, code in enumerate(codes) if code > 0]
    sources = [f"the loss on rank {', '.join(found)}"] if found else []
    if any(codes):
        names = [name for name, _ in parts.model.named_parameters()]
        weight = first_nonfinite_weight(parts.runtime.buckets, names, ranks)
        sources += [] if weight is None else [f"the weight {weight}"]
    return "".join(f", nor is {source}" for source in sources)


class SkippedInARow:
    """Count of updates skipped in a row; too many are an error.

    An overflow that lowers the loss scale does not count: fp16 training begins with some of them.
    """

    def __init__(self, limit: int) -> None:
        """Set the number that is an error; 0 allows any number."""
        self._limit = limit
        self._reasons: list[str] = []

    def clear(self) -> None:
        """Restart: an update was not skipped."""
        self._reasons.clear()

    def add(self, number: int, reason: str) -> None:
        """Count a skipped update `number`.

        Raises:
            NonFiniteError: it is one too many.
        """
        self._reasons.append(reason)
        count = len(self._reasons)
        if not self._limit or count < self._limit:
            return
        seen = Counter(self._reasons).most_common()
        self.clear()
        listed = "".join(f"\n  {many} times: {why}" for why, many in seen)
        raise NonFiniteError(
            f"the last {count} updates were skipped, the last one is update {number}; nothing is"
            f" being trained.{listed}\nLook for NaN in the data and in the weights, or lower the"
            " learning rate. max_skipped_updates changes how many are allowed (0: any number)"
        )


class Updates:
    """Maker of an engine's updates, which learns later which ones the device has skipped."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._skipped = SkippedInARow(state.parts.config.max_skipped_updates)
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
            for listener in self._state.listeners:
                listener.after_update(update)

    @in_step
    def _update(
        self, samples: int, metric: float | None, arguments: Mapping[str, Any]
    ) -> Options | None:
        """Make the update. Return the options before the schedule's step, for listeners."""
        state, parts = self._state, self._state.parts
        training = state.training or expect_training(state)
        parts.runtime.expect_here()
        self._tell_skipped()
        self._look_back()
        parts.runtime.reduce_all()
        _sum_tied(parts)
        for listener in state.listeners:
            listener.before_update(MeanGradients(parts.model, parts.runtime))
        options = options_of(training.optimizer) if state.listeners else None
        parts.runtime.check_sanity(overflow_is_handled=parts.skip_overflow)
        stepper = training.stepper
        looks = isinstance(stepper, FlatStepper) and stepper.steps_in_blocks
        parts.runtime.reshard_all(update_looks=looks)
        factor, state.factor = state.gradient_factor, None
        state.last = found = self._measured(training, factor)
        if self._is_unwanted(found.measured):
            self._warn(state.global_steps, _culprit(parts))
        if found.overflow:
            state.skipped_steps += 1
        else:
            self._step_weights(training, found, factor)
            undo = step_schedule(training, samples, arguments)
            if found.overflowed is not None:
                flag = start_reading(found.overflowed, "whether the last gradients overflowed")
                state.pending = PendingUpdate(state.global_steps, found, flag, undo, state.losses)
        if metric is not None:
            training.schedule.step(fmean(gather_objects(metric, parts.world)))
            options = options and options_of(training.optimizer)  # that is not taken back
        parts.runtime.clear_gradients()
        state.global_steps += 1
        state.global_samples += samples
        self._move_scale(found)
        return options

    def _measured(self, training: Training, factor: float) -> GradientCheck:
        state, parts = self._state, self._state.parts
        is_unwanted, state.skips_next = state.skips_next, False
        later = not is_unwanted and _decides_on_device(parts, training)
        found = measure(parts, factor, later=later)
        if found.overflow:
            return found._replace(sources=_sources_of(state.losses, parts))
        return found._replace(overflow=True, is_asked=True) if is_unwanted else found

    def _tell_skipped(self) -> None:
        """Report that the device has skipped the last update. All ranks must call it together."""
        state = self._state
        state.learn_of_skip()
        skipped, state.skipped = state.skipped, None
        if not state.last.overflow:
            self._skipped.clear()
        if skipped is not None:
            found = late_check(skipped.check, state.parts)
            found = found._replace(sources=_sources_of(skipped.losses, state.parts))
            state.scale = moved_scale(state.scale, found, skipped.number, state.parts)
            self._skipped.add(skipped.number, _reason_of(found))

    def _is_unwanted(self, norm: float | HostCopy | None) -> bool:
        """Return whether a norm is not finite and no warning was logged yet."""
        if self._state.parts.skip_overflow or self._has_warned or norm is None:
            return False
        return isinstance(norm, float) and not math.isfinite(norm)

    def _look_back(self) -> None:
        """Warn of the last update, if its norm has arrived from the device since."""
        state, last = self._state, self._state.last
        if isinstance(last.measured, HostCopy) and self._is_unwanted(last.norm):
            self._warn(state.global_steps - 1, late_check(last, state.parts).culprit)

    def _warn(self, number: int, culprit: str | None) -> None:
        self._has_warned = True
        parts = self._state.parts
        sources = _sources_of(self._state.losses, parts)
        if parts.ranks.rank == 0:
            _log.warning(
                "update %d: %s is not finite%s. This training does not skip such updates, so"
                " weights become NaN; this is logged once",
                number,
                "their norm" if culprit is None else f"the gradient of {culprit}",
                sources,
            )

    def _step_weights(self, training: Training, found: GradientCheck, factor: float) -> None:
        runtime = self._state.parts.runtime
        try:
            training.stepper.expect_same_groups()
            with runtime.holding_frozen():
                multiplier = found.multiplier(factor)
                if found.overflowed is None:
                    training.stepper.step(multiplier)
                else:
                    assert isinstance(training.stepper, FlatStepper)  # `_decides_on_device`
                    training.stepper.step(multiplier, found.overflowed)
        except BaseException:
            # The next update must not start with gradients that this one could not use.
            runtime.clear_gradients()
            raise

    def _move_scale(self, found: GradientCheck) -> None:
        state, before = self._state, self._state.scale.scale
        number = state.global_steps - 1
        state.scale = moved_scale(state.scale, found, number, state.parts)
        if found.overflow and not found.is_asked and state.scale.scale == before:
            self._skipped.add(number, _reason_of(found))
        if state.scale.scale != before:
            state.parts.runtime.rescale_residuals(state.scale.scale / before)

    def _record(self, samples: int, before: Options) -> Update:
        """Return the finished update as listeners see it."""
        state, pending = self._state, self._state.pending
        options = options_of(state.optimizer)
        return Update(
            number=state.global_steps,
            samples=samples,
            total_samples=state.global_samples,
            micro_steps=state.collected,
            losses=tuple(state.losses),
            scale=state.scale.scale,
            measured=state.last.measured,
            overflowed=state.last.overflow if pending is None else pending.overflowed,
            options=options,
            options_if_skipped=options if pending is None else before,
            skipped_before=state.skipped_steps - state.last.overflow,
            clocked=state.parts.clocks.lap,
        )
