"""Profiler of the update that `flops_profiler.profile_step` names."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hadal.config.monitors import FlopsProfile as Section
from hadal.device import synchronize
from hadal.device.inventory import peak_flops
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.profiling.counting import Counter, prepare_counting
from hadal.plugins.profiling.profile import Profile, ReportLayout, Trained, tree_of, write_report
from hadal.plugins.profiling.profiler import FlopsProfiler, ModuleTimes

_log = logging.getLogger(__name__)


class Pass(Enum):
    """The measurements of the current update."""

    WAIT = auto()
    COUNT = auto()
    """Operations are counted, which slows them down."""
    TIME = auto()
    """Phases and modules are timed."""
    TRACE = auto()
    """torch's profiler writes a trace."""
    OVER = auto()


@dataclass(slots=True)
class _Counted:
    """Update whose operations were counted."""

    step: int
    counter: Counter
    micro_steps: int = 0


class ProfilerListener(Listener):
    """Listener that counts one update, times the next one, and reports; on rank 0 only.

    Counting slows each operation, so the times are those of the following update. If training ends
    before that, the report has the counted update's own times, with a note. With `trace_file`,
    the update after that is traced. Outside these updates the listener does nothing.
    """

    name = "flops_profiler"

    def __init__(self, section: Section, setting: Setting) -> None:
        model, parts = setting.model, setting.model_parallel
        self.profiler = FlopsProfiler(model, None, section.recompute_fwd_factor)
        """The profiler, with the profile once there is one."""
        self._section = section
        self._model = model
        self._device = setting.device
        self._ranks = Trained(
            setting.world.size,
            setting.data_parallel.size,
            parts.size if parts else 1,
            setting.config.train_micro_batch_size_per_gpu,
        )
        self._pass = Pass.WAIT
        self._counted: _Counted | None = None
        self._times: ModuleTimes | None = None
        self._own_times: tuple[ModuleTimes, Mapping[str, float]] | None = None
        self._ended_at: float | None = None
        self._trace: Any = None
        # A program may end without closing its engine, before the timed update.
        self._at_exit: Callable[[], None] | None = None
        prepare_counting()

    # ---- around phases -------------------------------------------------------------------------

    def before_forward(self, forward: Forward) -> None:
        """Count or time the forward, if it is one of the update's."""
        if not forward.is_training or not torch.is_grad_enabled():
            return
        if self._pass is Pass.WAIT and forward.updates == self._section.profile_step:
            self._begin(Pass.COUNT)
            self._counted = _Counted(forward.updates, Counter())
        if self._times is not None:
            self._times.start()
        self._count()

    def after_forward(self, output: Any) -> None:
        """Stop counting and timing the forward."""
        self._pause()

    def before_backward(self) -> None:
        """Count the backward."""
        self._count()

    def after_backward(self, loss: Tensor | None) -> None:
        """Stop counting the backward."""
        self._pause()
        if self._pass is Pass.COUNT and self._counted is not None:
            self._counted.micro_steps += 1

    def on_error(self, error: BaseException) -> None:
        """Stop counting and timing."""
        self._pause()

    def after_update(self, update: Update) -> None:
        """Move to the next pass."""
        before = self._ended_at
        whole_s = None if before is None else time.perf_counter() - before
        if self._pass is Pass.COUNT:
            self._end_count(update)
        elif self._pass is Pass.TIME:
            self._end_times(update.times, whole_s)
        elif self._pass is Pass.TRACE:
            self._end_trace()
        elif self._pass is Pass.WAIT and update.number > self._section.profile_step:
            self._pass = Pass.OVER
            _log.warning(
                "flops_profiler.profile_step is %d, but training continues from update %d:"
                " nothing is profiled",
                self._section.profile_step,
                update.number,
            )
        self._ended_at = time.perf_counter()

    def close(self) -> None:
        """Report what was counted, if the update to be timed did not run."""
        self._pause()
        if self._pass is Pass.TIME and self._own_times is not None:
            self._times, times = self._own_times
            self._end_times(times, None, is_slowed=True)
        if self._trace is not None:
            self._end_trace()
        self._pass = Pass.OVER
        self._forget_exit()

    # ---- passes --------------------------------------------------------------------------------

    def _begin(self, which: Pass) -> None:
        self._pass = which
        self._times = ModuleTimes(self._model, self._device, records=which is Pass.TRACE)

    def _count(self) -> None:
        if self._pass is Pass.COUNT and self._counted is not None:
            self._counted.counter.start()

    def _pause(self) -> None:
        if self._counted is not None:
            self._counted.counter.stop()
        if self._times is not None:
            self._times.stop()

    def _end_count(self, update: Update) -> None:
        assert self._counted is not None and self._times is not None  # since the pass began
        self._own_times = self._times, update.times
        # For readers of `engine.flops_profiler` until the report, which has better times.
        self.profiler.profile = self._profile(self._times, update.times, None, is_slowed=True)
        self._begin(Pass.TIME)
        mine = weakref.ref(self)

        def report_at_exit() -> None:
            listener = mine()
            if listener is not None:
                listener.close()

        self._at_exit = report_at_exit
        atexit.register(report_at_exit)

    def _end_times(
        self, times: Mapping[str, float], whole_s: float | None, *, is_slowed: bool = False
    ) -> None:
        assert self._times is not None  # since the pass began
        profile = self._profile(self._times, times, whole_s, is_slowed=is_slowed)
        self.profiler.profile = profile
        self._own_times = None
        self._forget_exit()
        section = self._section
        layout = ReportLayout(section.module_depth, section.top_modules, section.detailed)
        try:
            write_report(profile, layout, section.output_file)
        except OSError as error:
            _log.error("flops_profiler.output_file cannot be written: %s", error)
        if section.trace_file is None or is_slowed:
            self._pass, self._times = Pass.OVER, None
            return
        self._begin(Pass.TRACE)
        self._trace = torch.profiler.profile(record_shapes=False)
        self._trace.__enter__()

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        self._pass, self._times = Pass.OVER, None
        trace.__exit__(None, None, None)
        path = Path(str(self._section.trace_file))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            _log.error("flops_profiler.trace_file cannot be written: %s", error)

    def _forget_exit(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None

    def _profile(
        self,
        modules: ModuleTimes,
        times: Mapping[str, float],
        whole_s: float | None,
        *,
        is_slowed: bool,
    ) -> Profile:
        counted = self._counted
        assert counted is not None  # an update was counted before one is reported
        if self._device.type != "cpu":
            synchronize(self._device)
        counter, micro_steps = counted.counter, max(1, counted.micro_steps)
        counts = counter.forward_of(self._model)
        return Profile(
            step=counted.step,
            tree=tree_of(self._model, counts, modules.seconds(), micro_steps),
            forward=counter.forward,
            backward=counter.backward,
            recomputed=counter.recomputed,
            micro_steps=micro_steps,
            forward_s=times["forward"] / 1000.0,
            backward_s=times["backward"] / 1000.0,
            step_s=times["step"] / 1000.0,
            whole_s=whole_s,
            is_slowed=is_slowed,
            ranks=self._ranks,
            peak_flops=self._peak(),
            recompute_fwd_factor=self._section.recompute_fwd_factor,
        )

    def _peak(self) -> float | None:
        if self._section.peak_tflops is not None:
            return self._section.peak_tflops * 1e12
        with suppress(StopIteration, RuntimeError):
            dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
            return peak_flops(self._device, dtype)
        return None
