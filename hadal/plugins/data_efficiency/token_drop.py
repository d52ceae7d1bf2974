"""Random layer-wise token dropping: layers that see a random subset of the tokens."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from hadal.config.data_efficiency import RandomLtd
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.data_efficiency.hearing import positional_names
from hadal.plugins.data_efficiency.kept_tokens import Order, Subset, draw, put_back, take
from hadal.plugins.data_efficiency.layers import ChangedLayer, change_layers, changed_layers

_log = logging.getLogger(__name__)
_PATH = "data_efficiency.data_routing.random_ltd"
ModelType = TypeVar("ModelType", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class KeptRule:
    """Schedule of the tokens that dropping layers see."""

    first: int
    last: int
    steps: int
    """Updates until `last`."""
    multiple: int
    dropping: int
    """Layers that drop tokens."""
    layers: int
    """All layers of the model."""


def kept_at(rule: KeptRule, updates: int) -> int:
    """Return the tokens that dropping layers see after `updates` updates."""
    if rule.first >= rule.last:
        return rule.first
    value = math.floor(updates / rule.steps * (rule.last - rule.first) + rule.first)
    # A first value below the multiple would be rounded down to no tokens.
    return min(max(value - value % rule.multiple, rule.multiple), rule.last)


def layer_tokens_at(rule: KeptRule, updates: int) -> int:
    """Return the tokens of one sample, summed over all layers, after `updates` updates."""
    whole = rule.last * (rule.layers - rule.dropping)
    return kept_at(rule, updates) * rule.dropping + whole


def layer_number(name: str) -> int | None:
    """Return the number of a layer: the last one in its full name (`model.h.3`, `layer3`)."""
    for part in reversed(name.split(".")):
        found = re.search(r"\d+$", part)
        if found:
            return int(found[0])
    return None


@dataclass(slots=True)
class TokenKeeping:
    """State that the dropping layers of a model share."""

    order: Order
    mask_name: str | None
    is_causal: bool
    rank: int
    last: int = 1
    """Tokens at the end of the schedule."""
    kept: int | None = None
    """Tokens of each sequence in this forward; None keeps all."""
    is_told: bool = False
    """True if sequences that do not fit the schedule were logged."""

    def tell(self, name: str, length: int, rows: int) -> None:
        """Log once that a layer's sequences do not fit the schedule."""
        kept = self.kept
        if self.is_told or kept is None or (length <= self.last and kept < length):
            return
        if kept >= self.last:
            return  # the end of the schedule
        self.is_told = True
        schedule = f"{_PATH}.random_ltd_schedule"
        what = f"layer {name} sees {length} tokens of {rows} sequences"
        if kept >= length:
            _log.warning(
                "%s: %s, and keeps %d: none is dropped; lower min_value, or check that"
                " hidden_state_order matches the layers' hidden states",
                schedule,
                what,
                kept,
            )
        else:
            _log.warning(
                "%s: %s, more than max_value %d: tokens are dropped to the end; raise max_value to"
                " the length of sequences",
                schedule,
                what,
                self.last,
            )


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Layer in its model."""

    keeping: TokenKeeping
    name: str
    number: int
    arguments: list[str]


class TokenDroppingLayer(ChangedLayer):
    """Layer that sees a subset of the tokens in training; the others bypass it."""

    caller, section = "convert_to_random_ltd", _PATH
    dropping_place: LayerPlace | None = None
    """None if the layer sees all tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a subset of the tokens, and put the results back."""
        place = self.dropping_place if self.training else None  # type: ignore[attr-defined]
        kept = None if place is None else place.keeping.kept
        if place is None or kept is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        names, keeping = place.arguments, place.keeping
        hidden: Tensor = args[0] if args else kwargs[names[0]]
        rows, length = hidden.shape[:2]
        if keeping.order == "seq_batch_dim":
            rows, length = length, rows
        keeping.tell(place.name, length, rows)
        if kept >= length:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if keeping.mask_name is not None and keeping.mask_name not in given:
            raise UsageError(
                f"{_PATH}.model_mask_name is {keeping.mask_name!r}, but layer {place.name} was"
                f" called without it, with {', '.join(given)}; name its mask, or set null"
            )
        index = draw(rows, length, kept, keeping.rank, hidden.device)
        subset = Subset(
            index,
            length,
            keeping.order,
            keeping.mask_name,
            keeping.is_causal,
            place.name,
            place.number,
        )
        part = take(hidden, index, keeping.order)
        reduced = {name: subset.of(name, value) for name, value in given.items()}
        reduced[names[0]] = part
        by_place = [reduced.pop(name) for name in names[: len(args)]]
        found = super().__call__(*by_place, **reduced)  # type: ignore[misc]
        return _back(found, hidden, index, place)


def _back(found: Any, hidden: Tensor, index: Tensor, place: LayerPlace) -> Any:
    order = place.keeping.order
    if isinstance(found, Tensor):
        return put_back(hidden, found, index, order)
    if isinstance(found, list | tuple) and found and isinstance(found[0], Tensor):
        return type(found)((put_back(hidden, found[0], index, order), *found[1:]))
    raise UsageError(
        f"random_ltd: layer {place.name} returned {type(found).__name__}; expected the hidden"
        " states, or a tuple that begins with them"
    )


class TokenDrop(Listener):
    """Listener that updates the number of kept tokens, and counts the tokens of all layers."""

    name = "random_ltd"

    def __init__(self, section: RandomLtd, setting: Setting) -> None:
        if setting.sequence_parallel is not None:
            raise UsageError(
                f"{_PATH} drops tokens of whole sequences, and {setting.sequence_parallel.size}"
                " ranks share each one; switch one of the two off"
            )
        config, model, readers = setting.config, setting.model, setting.data_parallel
        schedule = section.random_ltd_schedule
        # The rules of the configuration check these.
        assert schedule is not None
        assert schedule.schedule_config is not None
        assert section.random_ltd_layer_id is not None
        assert section.hidden_state_order is not None
        self._ids = tuple(section.random_ltd_layer_id)
        self.rule = KeptRule(
            schedule.min_value or 1,
            schedule.max_value or 1,
            schedule.schedule_config.require_steps or 1,
            schedule.schedule_config.seq_per_step or 1,
            dropping=len(self._ids),
            layers=section.total_layer_num or len(self._ids),
        )
        self.kept = self.rule.first
        """Tokens of each sequence that dropping layers see."""
        self.layer_tokens = 0
        """Tokens of all samples that all layers have seen, summed over layers and ranks."""
        self._counted = -1
        self.samples = (
            config.train_micro_batch_size_per_gpu
            * config.gradient_accumulation_steps
            * readers.size
        )
        """Samples of one update, of all ranks."""
        self._write = setting.write
        self._keeping = TokenKeeping(
            section.hidden_state_order,
            section.model_mask_name,
            section.model_type == "decoder",
            readers.rank,
            self.rule.last,
        )
        self._knows_layers = section.total_layer_num is not None
        self._is_adopted = False
        if any(True for _ in changed_layers(model, TokenDroppingLayer)):
            self.adopt(model)

    def adopt(self, model: nn.Module) -> None:
        """Let the converted layers of `random_ltd_layer_id` drop tokens.

        Raises:
            UsageError: no converted layer has one of the numbers, two have it, or there are more
                layers than `total_layer_num`.
        """
        found: dict[int, list[tuple[str, Any]]] = {}
        for name, layer in changed_layers(model, TokenDroppingLayer):
            number = layer_number(name)
            if number is not None:
                found.setdefault(number, []).append((name, layer))
        missing = [number for number in self._ids if number not in found]
        if missing:
            raise UsageError(
                f"{_PATH}.random_ltd_layer_id: no converted layer has the numbers"
                f" {', '.join(map(str, missing))}; there are {_listed(found)}"
            )
        for number in self._ids:
            if len(found[number]) > 1:
                several = " and ".join(name for name, _ in found[number])
                raise UsageError(
                    f"{_PATH}.random_ltd_layer_id: {number} is the number of {several}; convert"
                    " one class of layers only, that of one stack"
                )
        for number in self._ids:
            ((name, layer),) = found[number]
            arguments = positional_names(layer)
            layer.dropping_place = LayerPlace(self._keeping, name, number, arguments)
        layers = sum(map(len, found.values()))
        if self.rule.layers < layers and self._knows_layers:
            raise UsageError(
                f"{_PATH}.total_layer_num is {self.rule.layers}, but {layers} layers were"
                " converted; set the number of all layers, or leave it out"
            )
        if not self._knows_layers:
            self.rule = replace(self.rule, layers=layers)
        self._is_adopted = True

    def before_forward(self, forward: Forward) -> None:
        """Set the number of kept tokens, and count an update's tokens in its first forward."""
        self._keeping.kept = None
        if not forward.is_training:
            return
        if not self._is_adopted:
            raise UsageError(
                f"{_PATH} is on, but no layer was converted; call hadal.data_efficiency.token_drop"
                ".convert_to_random_ltd(engine, LayerClass) after initialize"
            )
        # Updates before a resume are counted, too, if the checkpoint did not count them.
        for updates in range(self._counted + 1, forward.updates + 1):
            self.layer_tokens += self.samples * layer_tokens_at(self.rule, updates)
        self._counted = max(self._counted, forward.updates)
        self.kept = self._keeping.kept = kept_at(self.rule, forward.updates)

    def after_update(self, update: Update) -> None:
        """Write the numbers of tokens to the monitors."""
        self.samples = update.samples
        if self._write is not None:
            scalars = {"random_ltd_kept": self.kept, "random_ltd_layer_tokens": self.layer_tokens}
            events = [(f"Train/Samples/{name}", value) for name, value in scalars.items()]
            self._write([(*event, update.total_samples) for event in events])

    def close(self) -> None:
        """Let all layers see all tokens."""
        self._keeping.kept = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the tokens so far, by the names of DeepSpeed's checkpoints."""
        return {
            "consumed_layer_tokens": self.layer_tokens,
            "current_steps": self._counted,
            "current_value": self.kept,
            "min_value": self.rule.first,
            "max_value": self.rule.last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`. The schedule is the configuration's."""
        self.layer_tokens = int(state["consumed_layer_tokens"])
        self._counted = int(state["current_steps"])
        self.kept = int(state["current_value"])


def _listed(found: Mapping[int, Any]) -> str:
    numbers = sorted(found)
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "") or "none"


def convert_to_random_ltd(model: ModelType, convert_type: type[nn.Module]) -> ModelType:
    """Make a model's layers drop tokens as configured; return `model`.

    The layers' class is replaced by a subclass of it: names in the state dict stay, and checkpoints
    load before and after.

    Args:
        model: an engine, or a model that `initialize` is given later.
        convert_type: the class of the layers. Their first argument is the hidden states, and they
            return them, or a tuple that begins with them.

    Raises:
        UsageError: the model has no such layers, the engine's configuration does not enable
            `random_ltd`, or its `random_ltd_layer_id` does not fit the layers.
    """
    listeners = getattr(model, "listeners", None)
    if not isinstance(listeners, tuple):
        change_layers(model, convert_type, TokenDroppingLayer, "convert_to_random_ltd")
        return model
    drops = [one for one in listeners if isinstance(one, TokenDrop)]
    if not drops:
        raise UsageError(
            f"convert_to_random_ltd: {_PATH}.enabled is not true in the configuration; set it, or"
            " remove the call"
        )
    module: nn.Module = model.module  # type: ignore[assignment]
    change_layers(module, convert_type, TokenDroppingLayer, "convert_to_random_ltd")
    drops[0].adopt(module)
    return model
