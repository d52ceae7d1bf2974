"""The optimizer as programs see it: an object around torch's, which the engine steps."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hadal.compat.engine import DeepSpeedEngine


class ParameterOffload:
    """What programs take hooks off by while they generate with gathered weights, and on again.

    Hadal's own stay: they do nothing where weights are whole. So there are none to take off.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Hang hooks on a module again; none were taken off."""


class DeepSpeedOptimizer:
    """What `deepspeed.initialize` returns beside the engine; `optimizer` is torch's own inside it.

    Attributes that it does not have are the inner optimizer's.
    """

    def __init__(self, optimizer: Optimizer, engine: DeepSpeedEngine) -> None:
        self.optimizer = optimizer
        self._engine = engine

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

    @property
    def parameter_offload(self) -> ParameterOffload:
        """At stage 3: see `ParameterOffload`."""
        if not self._engine.zero_optimization_partition_weights():
            raise AttributeError("there is a parameter_offload at stage 3 only")
        return ParameterOffload(self._engine.module)

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped."""
        return self._engine.overflow

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with."""
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        """The same, under an older name."""
        return self._engine.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows move the loss scale."""
        return self._engine.moves_loss_scale

    def step(self, closure: Any = None) -> None:
        """Do as `engine.step` does."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last update."""
        self._engine.zero_grad(set_to_none)
