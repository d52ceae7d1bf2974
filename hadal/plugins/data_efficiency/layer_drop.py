"""Progressive layer drop: training skips layers more and more often.

Layers' calls are changed in place: their class is replaced by a subclass, so names in state dicts,
attributes and `isinstance` are unaffected.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor, nn

from hadal.config.data_efficiency import ProgressiveLayerDrop
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.data_efficiency.seqlen import listens

_log = logging.getLogger("hadal.plugins.data_efficiency")

_Made: TypeAlias = "tuple[type[ChangedLayer], type[nn.Module]]"


class ChangedLayer:
    """Base of the mixins that are put in front of a layer's class."""

    made_of: ClassVar[_Made]
    """The change, and the layer's own class."""
    caller: ClassVar[str]
    """The program's call that makes the change."""
    section: ClassVar[str]
    """The JSON path of the section that it is for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes, as no module defines the combined one."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (_empty, self.made_of, *state)


_made: dict[_Made, type[nn.Module]] = {}


def _changed(change: type[ChangedLayer], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass; one for each pair."""
    if (change, kind) not in _made:
        _made[change, kind] = _subclass(change, kind)
    return _made[change, kind]


def _subclass(change: type[ChangedLayer], kind: type[nn.Module]) -> type[nn.Module]:
    names = ("__module__", "__qualname__", "__doc__")
    said = {name: getattr(kind, name) for name in names}
    made: type[nn.Module] = type(kind.__name__, (change, kind), {**said, "made_of": (change, kind)})
    return made


def _empty(change: type[ChangedLayer], kind: type[nn.Module]) -> nn.Module:
    made = _changed(change, kind)
    return made.__new__(made)


def change_layers(
    model: nn.Module, layers: type[nn.Module], change: type[ChangedLayer], caller: str
) -> None:
    """Change all layers of a class in place, except those that are changed already.

    Raises:
        UsageError: the model has no such layer, or `layers` is not a class.
    """
    if not (isinstance(layers, type) and issubclass(layers, nn.Module)):
        raise UsageError(f"{caller}: expected the class of the layers, got {layers!r}")
    found = [module for module in model.modules() if isinstance(module, layers)]
    if not found:
        raise UsageError(
            f"{caller}: {type(model).__name__} has no {layers.__name__}; pass the class of its"
            " layers, such as type(model.layers[0])"
        )
    for module in found:
        if not isinstance(module, change):
            module.__class__ = _changed(change, type(module))


def changed_layers(model: nn.Module, change: type[ChangedLayer]) -> Iterator[tuple[str, Any]]:
    """Yield the full names of a model's layers with this change, and the layers."""
    for name, module in model.named_modules():
        if isinstance(module, change):
            yield name, module


def warn_of_idle_layers(setting: Setting) -> None:
    """Log that a program has changed layers for a section that is off."""
    idle: dict[tuple[str, str], set[str]] = {}
    for _, layer in changed_layers(setting.model, ChangedLayer):
        section = attrgetter(layer.section)(setting.config)
        if section is None or not section.enabled:
            idle.setdefault((layer.caller, layer.section), set()).add(type(layer).__name__)
    for (caller, path), kinds in idle.items() if setting.world.rank == 0 else ():
        _log.warning(
            "%s changed the layers %s, but %s.enabled is not true: all layers run on all tokens;"
            " set it, or leave the call out",
            caller,
            ", ".join(sorted(kinds)),
            path,
        )


def theta_at(theta: float, gamma: float, updates: int) -> float:
    """Return the keep probability after `updates` updates: 1 at first, then falling to `theta`.

    The second update still has 1, as in DeepSpeed. NumPy's exponential has the same last bit, too.
    """
    return (1.0 - theta) * float(np.exp(-gamma * max(0, updates - 1))) + theta


def keeps_of(count: int, theta: float) -> list[float]:
    """Return the keep probability of each of `count` layers: the first is always kept."""
    return [1.0 - number / count * (1.0 - theta) for number in range(count)]


class DroppableLayer(ChangedLayer):
    """Layer with a residual connection that may be skipped in training."""

    caller, section = "drop_layers", "progressive_layer_drop"
    gives_tuple: ClassVar[bool] = False
    drop_turn: tuple[bool, float] | None = None
    """True if it runs in this forward, and its keep probability; None runs it unchanged."""

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `hidden` if skipped, else `hidden` plus the residual over the probability."""
        turn = self.drop_turn if self.training else None  # type: ignore[attr-defined]
        if turn is not None and not turn[0]:
            return (hidden,) if self.gives_tuple else hidden
        given = super().__call__(hidden, *args, **kwargs)  # type: ignore[misc]
        type(self).gives_tuple = isinstance(given, tuple)
        if turn is None or turn[1] == 1.0:
            return given
        if isinstance(given, tuple):
            return (hidden + (given[0] - hidden) / turn[1], *given[1:])
        return hidden + (given - hidden) / turn[1]


def drop_layers(model: nn.Module, layers: type[nn.Module]) -> nn.Module:
    """Let `progressive_layer_drop` skip a model's layers, and return the model.

    Call it before `initialize`, for a model whose forward does not take `pld_theta`. Layer i of L
    is kept with probability 1 - i/L (1 - theta), the same layers on all ranks. A layer's first
    argument is the hidden states; it returns them, or a tuple that begins with them.

    Args:
        model: the model, changed in place; names in its state dict stay.
        layers: the class of its layers.

    Raises:
        UsageError: the model has no such layer.
    """
    change_layers(model, layers, DroppableLayer, "drop_layers")
    return model


class LayerDrop(Listener):
    """Passes the keep probability of its layers to the model, or skips layers itself."""

    name = "progressive_layer_drop"

    def __init__(self, section: ProgressiveLayerDrop, setting: Setting) -> None:
        assert section.theta is not None  # the rules of the configuration check it
        assert section.gamma is not None
        self._limit = section.theta
        self._gamma = section.gamma
        self._model = model = setting.model
        self._write = setting.write
        self.theta = 1.0
        """The keep probability after the last update."""
        self._layers = [layer for _, layer in changed_layers(model, DroppableLayer)]
        if not self._layers:
            _expect_keywords(model)

    def before_forward(self, forward: Forward) -> Forward | None:
        """Draw the layers to skip, or pass the probability to the model."""
        if not forward.is_training:
            return None
        theta = theta_at(self._limit, self._gamma, forward.updates)
        if not self._layers:
            told = {"progressive_layer_drop": True, "pld_theta": theta}
            return forward._replace(kwargs={**forward.kwargs, **told})
        # Seeded by only the update and micro-step, so ranks, resumed runs and recomputations agree.
        drawn = random.Random(f"layer drop {forward.updates} {forward.micro_step}")
        for layer, keep in zip(self._layers, keeps_of(len(self._layers), theta), strict=True):
            layer.drop_turn = (drawn.random() < keep, keep)
        return None

    def after_update(self, update: Update) -> None:
        """Update the probability, and write it to the monitors."""
        self.theta = theta_at(self._limit, self._gamma, update.number)
        if self._write is not None:
            self._write([("Train/Samples/pld_theta", self.theta, update.total_samples)])

    def close(self) -> None:
        """Let all layers run."""
        for layer in self._layers:
            layer.drop_turn = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the probability."""
        return {"theta": self.theta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Show the probability of the checkpoint; forwards compute it from the updates."""
        self.theta = float(state["theta"])


def _expect_keywords(model: nn.Module) -> None:
    lacking = [name for name in ("progressive_layer_drop", "pld_theta") if not listens(model, name)]
    if lacking:
        raise UsageError(
            f"progressive_layer_drop is on, but {type(model).__name__}.forward takes no"
            f" {' and no '.join(lacking)}; add these parameters, or let Hadal skip the layers:"
            " hadal.data_efficiency.layer_drop.drop_layers(model, LayerClass) before initialize"
        )
