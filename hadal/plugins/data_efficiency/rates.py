"""Learning rates that follow the size of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_KEY = "batch_scaling"


class ScaledRates:
    """Schedule whose learning rates are multiplied by a factor that changes with each batch.

    The inner schedule sees only its own rates. Attributes that this one lacks are looked up there.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any = None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        """The schedule of the rates before the factor; None if they are constant."""
        self.factor = 1.0
        self.plain: list[float] = []
        """The rate of each param group before the factor."""
        self._read()

    def scale(self, factor: float) -> None:
        """Multiply the rates by `factor`, which replaces the last one."""
        self.factor = factor
        groups = self.optimizer.param_groups
        # Groups added since then have their own rates.
        self.plain += [float(group["lr"]) for group in groups[len(self.plain) :]]
        self._write(factor)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner schedule; the factor stays."""
        if self.schedule is not None:
            self._write(1.0)
            self.schedule.step(*args, **kwargs)
            self._read()
        self.scale(self.factor)

    def _read(self) -> None:
        self.plain = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _write(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.plain, strict=False):
            # A rate in a tensor is updated in place, as captured steps read it there.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def get_last_lr(self) -> list[float]:
        """Return the last rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner schedule's state, the rates and the factor."""
        inner = {} if self.schedule is None else self.schedule.state_dict()
        return {**inner, _KEY: {"plain": list(self.plain), "factor": self.factor}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of this schedule, or of only the inner one."""
        inner = {name: value for name, value in state.items() if name != _KEY}
        if self.schedule is not None:
            self.schedule.load_state_dict(inner)
        if _KEY in state:
            self.plain = [float(rate) for rate in state[_KEY]["plain"]]
            self.scale(float(state[_KEY]["factor"]))
        else:
            self._read()

    def __getattr__(self, name: str) -> Any:
        """Look the attribute up in the inner schedule."""
        if name in ("schedule", "optimizer") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.schedule, name)
