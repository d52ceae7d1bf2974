"""The optimizer as programs see it: an object around torch's, which the engine steps."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.engine.engine import Engine

_log = logging.getLogger(__name__)


class Coordinator:
    """What programs tell that weights were read past the mechanism; here it sees that itself."""

    def is_invalid_trace(self) -> bool:
        """Whether there is nothing to forget."""
        return True

    def _invalidate_trace(self) -> None:
        """Forget the order of uses: ranks compare it each time, so none is trusted too long."""


class ParameterOffload:
    """What programs take hooks off by while they generate with gathered weights, and on again.

    Hadal's own stay: they do nothing where weights are whole. So there are none to take off.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = Coordinator()

    def get_param_coordinator(self) -> Coordinator:
        """The same object, asked for in another way."""
        return self.param_coordinator

    def setup_zero_stage3_hooks(self) -> None:
        """Hang all hooks on the model again; none were taken off."""

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Hang hooks on a module again; none were taken off."""


class EngineScale:
    """The loss scale of an engine, as programs read it beside its optimizer."""

    def __init__(self, engine: Engine, *, dynamic: bool) -> None:
        self._engine = engine
        self.dynamic = dynamic
        """Whether overflows move it."""

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with."""
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        """The same, under an older name."""
        return self._engine.loss_scale


class DeepSpeedOptimizer:
    """What `deepspeed.initialize` returns beside the engine; `optimizer` is torch's own inside it.

    Attributes that it does not have are the inner optimizer's.
    """

    def __init__(
        self, optimizer: Optimizer, engine: Engine, *, stage: int, moves_scale: bool
    ) -> None:
        self.optimizer = optimizer
        self.loss_scaler = EngineScale(engine, dynamic=moves_scale)
        self._engine = engine
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        """Fall through to the inner optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own list: rates written here count."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """What the inner optimizer remembers."""
        return self.optimizer.state

    # ---- what there is at some stages ------------------------------------------------------------

    @property
    def parameter_offload(self) -> ParameterOffload:
        """At stage 3: see `ParameterOffload`."""
        self._expect_stage("parameter_offload", 3)
        return ParameterOffload(self._engine.module)

    @property
    def param_coordinator(self) -> Coordinator:
        """At stage 3: see `Coordinator`."""
        self._expect_stage("param_coordinator", 3)
        return Coordinator()

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """At stage 3: this rank's flat cuts of the masters."""
        self._expect_stage("fp32_partitioned_groups_flat", 3)
        return self._masters

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """At stages 1 and 2: this rank's flat cuts of the masters."""
        self._expect_stage("single_partition_of_fp32_groups", 1, 2)
        return self._masters

    @property
    def _masters(self) -> list[Tensor]:
        return [piece for group in self.param_groups for piece in group["params"]]

    def _expect_stage(self, name: str, *stages: int) -> None:
        if self._stage not in stages:
            raise AttributeError(f"there is no {name} at stage {self._stage}")

    @property
    def dp_process_group(self) -> dist.ProcessGroup:
        """The ranks that average gradients."""
        return self._engine.topology.sharding.group

    @property
    def _global_grad_norm(self) -> float | None:
        """What `engine.get_global_grad_norm()` tells."""
        return self._engine.get_global_grad_norm()

    def refresh_fp32_params(self) -> None:
        """Nothing: what programs write into weights reaches the masters before the next update."""

    # ---- overflows -------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped."""
        return self._engine.overflow

    def check_overflow(self, external: bool = False) -> bool:
        """Whether the next update would be skipped. All ranks must call it.

        Programs that train two models ask it, to skip the update of one with the other's.
        """
        return self._engine.find_overflow()

    @property
    def skip_step(self) -> bool:
        """Whether the next update is left out; programs set it, on all ranks."""
        return self._engine.skips_next_update

    @skip_step.setter
    def skip_step(self, skips: bool) -> None:
        self._engine.skips_next_update = skips

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with."""
        return self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """The same, under an older name."""
        return self.loss_scaler.cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows move the loss scale."""
        return self.loss_scaler.dynamic

    def quantize_nontrainable_params(self) -> None:
        """Programs call it behind `initialize`, which has done so where the configuration asks."""
        self._expect_stage("quantize_nontrainable_params", 3)
        zero = self._engine._parts.config.zero_optimization
        if not zero.zero_quantized_nontrainable_weights:
            _log.warning(
                "optimizer.quantize_nontrainable_params() does nothing: it is for"
                " zero_optimization.zero_quantized_nontrainable_weights true"
            )

    # ---- stepping --------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Do as `engine.step` does."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last update."""
        self._engine.zero_grad(set_to_none)


class PlainOptimizer(DeepSpeedOptimizer, Optimizer):  # type: ignore[misc, override]
    """One that is torch's to `isinstance`: programs hang their own schedules on it.

    All that torch's has is the inner optimizer's.
    """

    # Torch's schedules set it, to tell that they were stepped before the first update.
    _opt_called = False

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Into the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        """The inner optimizer's."""
        return repr(self.optimizer)
