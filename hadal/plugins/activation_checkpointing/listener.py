"""The section `activation_checkpointing` in an engine: recomputes the modules it names."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import is_host_memory
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Update
from hadal.plugins.activation_checkpointing.function import Recomputation
from hadal.plugins.activation_checkpointing.measuring import (
    CallMeter,
    MeasuredBackward,
    MeasuredStep,
    Meter,
    ModuleChoice,
    Verdict,
    choose,
    meter_of,
    table,
)
from hadal.plugins.activation_checkpointing.modules import Recomputed, recomputed_elsewhere

_log = logging.getLogger(__name__)

# The measured update; the first one creates optimizer state and records the order of uses.
_MEASURED = 1


class RecomputedModules(Listener):
    """Recomputes modules of a model as long as its engine lives."""

    name = "activation_checkpointing"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], recomputation: Recomputation
    ) -> None:
        """Choose the modules, by full name, and how they are recomputed."""
        self._model = model
        self._modules = dict(modules)
        self._recomputation = recomputation
        self._placed: list[Recomputed] = []
        self._is_checked = False
        self._caches = _takes_cache(model)

    def on_attach(self, engine: Any) -> None:
        """Wrap the modules' forwards in recomputation."""
        self._placed = [
            Recomputed(name, module, self._recomputation) for name, module in self._modules.items()
        ]

    def before_forward(self, forward: Forward) -> Forward | None:
        """Stop a transformer from caching keys and values, which a recomputation would add again.

        Raises:
            UsageError: transformers' own gradient checkpointing was turned on after `initialize`.
        """
        if not torch.is_grad_enabled():
            return None
        if not self._is_checked:
            self._is_checked = True
            message = recomputed_elsewhere(self._model, list(self._modules))
            if message is not None:
                raise UsageError(message)
        if not self._caches:
            return None
        return forward._replace(kwargs={**forward.kwargs, "use_cache": False})

    def on_error(self, error: BaseException) -> None:
        """Add the module and the remedy to torch's error about a recomputation."""
        if not isinstance(error, CheckpointError):
            return
        # Backward goes from the last module to the first.
        name = next((one.name for one in self._placed if one.is_again), "a module")
        error.args = (
            f"activation_checkpointing.modules: {name} computed something else when it was"
            " recomputed in backward (a cache, a counter, or a tensor that was changed in place);"
            " let its forward depend on its inputs alone, or leave it out of the patterns."
            f"\n{error}",
        )

    def close(self) -> None:
        """Restore the modules' own forwards."""
        for one in self._placed:
            one.remove()
        self._recomputation.reset()


class Surroundings(NamedTuple):
    """Device, ranks and size of a budget."""

    device: torch.device
    world: Ranks
    budget: int
    """The most bytes in use on each rank's device."""


class BudgetedModules(RecomputedModules):
    """Recomputes as few modules as a memory budget allows, from one measured update.

    Every module is recomputed in the first two updates. The second is measured, as the first
    creates optimizer state and plans. All ranks make the same choice. A later update checks the
    predicted peak; if it exceeds the budget, more modules are recomputed.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        options: ActivationCheckpointing,
        ranks: Ranks | None,
        around: Surroundings,
    ) -> None:
        """Set the modules, the section and the tensor-parallel ranks."""
        super().__init__(model, modules, Recomputation(options, ranks))
        self._around = around
        self._offloading: Recomputation | None = None
        if not options.cpu_checkpointing and not is_host_memory(around.device):
            on_host = options.model_copy(update={"cpu_checkpointing": True})
            self._offloading = Recomputation(on_host, ranks)
        self._meter: Meter | None = None
        self._calls: CallMeter | None = None
        self._backwards: list[MeasuredBackward] = []
        self._steps: list[MeasuredStep] = []
        self._checked = -1
        self._budget = around.budget
        self.verdict: Verdict | None = None
        """The choice, once it is made; None before."""

    @property
    def _measures(self) -> bool:
        """True in the update that is measured to choose; False in one that checks the choice."""
        return self.verdict is None

    def on_attach(self, engine: Any) -> None:
        """Wrap the modules' forwards in recomputation."""
        super().on_attach(engine)
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> Forward | None:
        """Measure a forward of the updates that are measured."""
        engine = self._engine()
        is_eager = engine is not None and not engine.is_compiled
        if is_eager and forward.is_training and torch.is_grad_enabled():
            if forward.updates in (_MEASURED, self._checked) and self._meter is None:
                self._meter = meter_of(self._around.device)
                self._meter.take_peak()
            if self._meter is not None:
                self._meter.start()
                if self._measures and self._calls is None:
                    self._calls = CallMeter(self._meter, self._around.device)
                    for one in self._placed:
                        one.around = self._calls.around
        return super().before_forward(forward)

    def after_forward(self, output: Any) -> None:
        """End the measurement of a forward."""
        self._stop()

    def before_backward(self) -> None:
        """Measure a backward."""
        if self._meter is not None:
            self._meter.start()

    def after_backward(self, loss: Tensor | None) -> None:
        """End the measurement of a backward."""
        self._stop()
        if self._calls is not None:
            self._backwards.append(self._calls.result())
            self._calls = None
            for one in self._placed:
                one.around = None

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Measure the update of the weights."""
        self.before_backward()

    def after_update(self, update: Update) -> None:
        """Choose after the measured update; compare with the prediction after the checked one."""
        if self._meter is None:
            if update.number == _MEASURED + 1:
                self._tell("a compiled model is not measured; every module is recomputed")
            return
        self._stop()
        peak, self._meter = self._meter.take_peak(), None
        if self._measures:
            mine = MeasuredStep(tuple(self._backwards), peak)
            self._steps = gather_objects(mine, self._around.world)
            self._backwards = []
            self._checked = update.number + 1
            self._choose()
        else:
            self._check(max(gather_objects(peak, self._around.world)))

    def _choose(self) -> None:
        if not any(one.calls for step in self._steps for one in step.backwards):
            self._tell("no module was recomputed in eager mode; memory_budget has no effect")
            self._checked = -1
            return
        names, offloads = list(self._modules), self._offloading is not None
        self.verdict = choose(self._steps, names, self._budget, offloads=offloads)
        ways = {
            ModuleChoice.RECOMPUTED: self._recomputation,
            ModuleChoice.OFFLOADED: self._offloading,
        }
        for one in self._placed:
            one.recomputation = ways.get(self.verdict.choices[one.name])
        level = logging.INFO if self.verdict.fits else logging.WARNING
        self._tell("\n".join(table(self._steps, self.verdict)), level)

    def _check(self, peak: int) -> None:
        assert self.verdict is not None  # it was chosen
        promised, self._checked = self.verdict.peak, -1
        self._tell(
            f"peak measured: {peak / 2**20:,.1f} MiB, {peak / promised - 1:+.1%} of the table's"
        )
        if peak > self._around.budget >= promised:
            self._budget -= peak - self._around.budget
            self._choose()

    def _tell(self, message: str, level: int = logging.INFO) -> None:
        if self._around.world.rank == 0:
            _log.log(level, "activation_checkpointing.memory_budget: %s", message)

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()

    def on_error(self, error: BaseException) -> None:
        """End a measurement; the next update is measured instead."""
        super().on_error(error)
        self._stop()
        self._meter = self._calls = None
        self._backwards = []
        for one in self._placed:
            one.around = None


def _takes_cache(model: nn.Module) -> bool:
    """Return whether a model of transformers, or a part of it, may keep keys and values."""
    config = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    if not any(hasattr(one, "use_cache") for one in (config, *parts)):
        return False
    names = inspect.signature(model.forward).parameters.values()
    return any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in names)
