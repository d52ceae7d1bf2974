"""Measurements of a training run that is an experiment, and its early exit."""

from __future__ import annotations

import json
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes
from hadal.comm.start import get_local_world_size
from hadal.config.autotuning import METRIC_PATH, MODEL_INFO_PATH, Autotuning
from hadal.device import (
    is_host_memory,
    memory_in_use,
    memory_use,
    peak_memory,
    reset_peak_memory,
    total_memory,
)
from hadal.device.memory import free_host_nbytes
from hadal.listener import Forward, Listener, Update
from hadal.plugins.autotuning.files import write_json

if TYPE_CHECKING:
    from hadal.plugins.profiling import Counter

_log = logging.getLogger(__name__)

PlansOf = Callable[[Any, Sequence[Mapping[str, Any]]], list[dict[str, Any]]]
"""Plans a batch under configurations, each given as the keys that differ from this one."""
MARGIN = 0.25
"""An experiment ends if its first measured update is worse than the best by this fraction."""


class Experiment(Listener):
    """A training run that measures some updates, writes its results and exits.

    With `model_info.profile` it exits after one forward. Rank 0 writes; all ranks exit together,
    by a `SystemExit` with code 0 from `engine.step()` (or from the forward).
    """

    def __init__(
        self,
        section: Autotuning,
        model: nn.Module,
        unit_numel: int,
        world: Ranks,
        device: torch.device,
        plans_of: PlansOf | None = None,
    ) -> None:
        self._plans_of = plans_of
        self._engine: Callable[[], Any] = lambda: None
        self._is_in_stages = False
        self._forward: Forward | None = None
        self._profiles = section.model_info is not None and section.model_info.profile
        self._operations: Counter | None = None
        if section.metric == "FLOPS_per_gpu":
            from hadal.plugins.profiling import Counter  # for this alone

            self._operations = Counter()
        self._section = section
        self._model = model
        self._unit_numel = unit_numel
        self._world = world
        self._device = device
        self._spent: dict[str, float] = {}
        self._samples = 0
        self._skipped_before = 0
        self._began_at: float | None = None
        self._in_use = self._held = 0
        # Counting is slow, so it gets its own update if there is one before the measured ones.
        self._counted_update = max(1, section.start_profile_step - 1)
        self._is_counting = self._counted_update == 1
        what = "one forward" if self._profiles else f"update {section.end_profile_step}"
        _log.warning(
            "autotuning.enabled: this run measures and exits after %s, with exit code 0; to train"
            " on, remove the section or set enabled to false",
            what,
        )

    # ---- forward and backward ------------------------------------------------------------------

    def on_attach(self, engine: Any) -> None:
        """Learn whether the engine trains a model in stages."""
        self._engine, self._is_in_stages = weakref.ref(engine), hasattr(engine, "train_batch")

    def before_forward(self, forward: Forward) -> None:
        """Record the memory in use before the first forward, which activations exclude."""
        if self._began_at is None and self._section.start_profile_step == 1:
            self._began_at = time.perf_counter()
        if self._profiles and torch.is_grad_enabled() and self._forward is None:
            reset_peak_memory(self._device)
            self._in_use = memory_in_use(self._device)
            self._forward = forward
        self._count()

    def after_forward(self, output: Any) -> None:
        """Exit after a forward, if nothing else is to be measured and no other stage waits."""
        self._stop_counting()
        if self._profiles and torch.is_grad_enabled():
            # The peak of a host process may precede this forward.
            on_host = is_host_memory(self._device)
            self._held = (memory_in_use if on_host else peak_memory)(self._device)
            if not self._is_in_stages:
                self._leave_with_model_info()

    def before_backward(self) -> None:
        """Count the operations of a backward too."""
        self._count()

    def after_backward(self, loss: Tensor | None) -> None:
        """Stop counting."""
        self._stop_counting()

    def on_error(self, error: BaseException) -> None:
        """Stop counting."""
        self._stop_counting()

    def _count(self) -> None:
        if self._operations is not None and self._is_counting:
            self._operations.start()

    def _stop_counting(self) -> None:
        if self._operations is not None:
            self._operations.stop()

    def _leave_with_model_info(self) -> None:
        parameters = list(self._model.parameters())
        info = self._section.model_info
        assert info is not None  # it requested this
        self._leave(
            self._section.model_info_path or MODEL_INFO_PATH,
            {
                "num_params": sum(p.numel() for p in parameters),
                "trainable_num_params": sum(p.numel() for p in parameters if p.requires_grad),
                "largest_unit_num_params": self._unit_numel,
                "activation_mem_per_gpu": max(0, self._held - self._in_use),
                "rank": self._world.rank,
                "memory_per_gpu": memory_of_a_rank(self._device),
                "hidden_size": info.hidden_size,
                "num_layers": info.num_layers,
                "plans": self._plans(info.candidates),
            },
        )

    def _plans(self, path: str | None) -> list[dict[str, Any]]:
        """Return the plan of each candidate; none if there is no planner. The others wait."""
        if path is None or self._plans_of is None or self._forward is None:
            return []
        try:
            batch = self._engine().loaded if self._is_in_stages else self._forward
            return self._plans_of(batch, json.loads(Path(path).read_text(encoding="utf-8")))
        except Exception as error:  # the search goes on without plans
            _log.warning("autotuning: no plans of this model: %r", error)
            return []

    # ---- some updates --------------------------------------------------------------------------

    def after_update(self, update: Update) -> None:
        """Add the times of an update, and exit after the last one."""
        if self._profiles:
            self._leave_with_model_info()
        times, number, skipped = update.times, update.number, update.skipped_updates
        first, last = self._section.start_profile_step, self._section.end_profile_step
        self._is_counting = number + 1 == self._counted_update
        if number < first:
            self._skipped_before = skipped
            if number == first - 1:
                self._began_at = time.perf_counter()
            return
        for name, spent in times.items():
            self._spent[name] = self._spent.get(name, 0.0) + spent
        self._samples += update.samples
        if number >= last or (number == first and self._has_lost()):
            found = self._metrics(number - first + 1, skipped - self._skipped_before)
            peaks = gather_codes(peak_memory(self._device), self._world)
            path = self._section.metric_path or METRIC_PATH
            self._leave(path, found | {"peak_memory_per_gpu": max(peaks)})

    def _has_lost(self) -> bool:
        """Return on all ranks whether rank 0's first measured update is far from the best."""
        best, metric = self._section.value_to_beat, self._section.metric
        if best is None:
            return False
        value = self._metrics(1, 0)[metric]
        is_latency = metric == "latency"
        has_lost = value > (1 + MARGIN) * best if is_latency else value < (1 - MARGIN) * best
        return gather_codes(int(has_lost), self._world)[0] == 1

    def _metrics(self, count: int, skipped: int) -> dict[str, Any]:
        means = {name: spent / count for name, spent in self._spent.items()}
        counted = self._operations
        whole_s = None if self._began_at is None else time.perf_counter() - self._began_at
        if self._is_in_stages and whole_s is not None:  # a stage waits between its phases
            latency = 1000.0 * whole_s / count
        else:
            latency = means["forward"] + means["backward"] + means["step"]
        return {
            "latency": latency,
            "throughput": self._samples / count * 1000.0 / latency,
            "FLOPS_per_gpu": None if counted is None else counted.flops * 1000.0 / latency,
            **means,
            "throughput_with_data": None if whole_s is None else self._samples / whole_s,
            "train_batch_size": self._samples / count,
            "measured_steps": count,
            "skipped_steps": skipped,
            "memory_per_gpu": memory_of_a_rank(self._device),
        }

    def _leave(self, path: str, content: Mapping[str, Any]) -> None:
        """Write on rank 0, then exit on all ranks together: none may exit while others need it."""
        fault = 0
        if self._world.rank == 0:
            try:
                write_json(Path(path), content)
            except OSError as error:
                _log.error("the results of this experiment cannot be written: %s", error)
                fault = 1
        code = max(gather_codes(fault, self._world))
        _log.info("autotuning: measured; the results are in %s", path)
        sys.exit(code)


def memory_of_a_rank(device: torch.device) -> int:
    """Return the bytes available to a rank: an accelerator's, or its part of free host memory."""
    if not is_host_memory(device):
        return total_memory(device).total
    return memory_use(device).host + free_host_nbytes() // (get_local_world_size() or 1)
