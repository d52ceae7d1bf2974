"""Random layer-wise token dropping: layers that see a random subset of the tokens."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from hadal.config.data_efficiency import RandomLtd
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.data_efficiency.layer_drop import ChangedLayer, change_layers, changed_layers
from hadal.plugins.data_efficiency.seqlen import positional_names

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


# ---- subsets of tokens ---------------------------------------------------------------------------

# Indices are [batch, kept] and ascending, which preserves causal order. Masks and position
# embeddings are gathered at the same indices as the hidden states.

Order = Literal["batch_seq_dim", "seq_batch_dim"]
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
# The golden ratio shifts the draws of ranks against each other, evenly for any number of ranks.
_SHIFT = 0.6180339887498949


def draw(batch: int, length: int, kept: int, rank: int, device: torch.device) -> Tensor:
    """Return `kept` ascending indices for each sequence, [batch, kept], uniform without repeats.

    They come from torch's generator of the device, whose state a recomputation restores. Ranks
    with the same seed draw different indices.
    """
    scores = (torch.rand(batch, length, device=device) + rank * _SHIFT % 1.0) % 1.0
    index: Tensor = scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    return index


def take(hidden: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return the hidden states at the indices: [batch, kept, ...], or [kept, batch, ...]."""
    flat = hidden.flatten(0, 1).index_select(0, _rows(hidden, index, order))
    shape = index.shape if order == "batch_seq_dim" else index.T.shape
    return flat.view(*shape, *flat.shape[1:])


def put_back(hidden: Tensor, part: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return hidden states with `part` at the indices; the others are unchanged."""
    part = part.flatten(0, 1).to(hidden.dtype)
    whole = hidden.flatten(0, 1).index_copy(0, _rows(hidden, index, order), part)
    return whole.view(hidden.shape)


def _rows(hidden: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return the indices into hidden states whose first two dimensions are flattened."""
    sequences = torch.arange(index.shape[0], device=index.device)[:, None]
    if order == "batch_seq_dim":
        return (index + sequences * hidden.shape[1]).flatten()
    return (index * hidden.shape[1] + sequences).T.flatten()


@dataclass(frozen=True, slots=True)
class Subset:
    """Tokens that one call of a layer sees."""

    index: Tensor
    length: int
    """Tokens of the whole sequence."""
    order: Order
    mask_name: str | None
    is_causal: bool
    """True for decoders, whose masks may be shared by all sequences."""
    layer: str
    """The layer's full name, for messages."""
    number: int
    """The layer's number, which is its index in a cache."""

    def of(self, name: str, value: Any) -> Any:
        """Return an argument of the layer for only these tokens.

        Raises:
            UsageError: the argument has a sequence dimension but cannot be reduced.
        """
        if value is None or name.startswith("encoder_"):
            return value
        if name in _PACKED:
            raise self._refusal(name, value, "pad sequences to one length instead of packing them")
        if name in _CACHES:
            return self._without_cache(name, value)
        if name == self.mask_name or "mask" in name:
            return self._mask(name, value)
        if isinstance(value, list | tuple):
            taken = [self.of(name, each) for each in value]
            return type(value)(*taken) if hasattr(value, "_fields") else type(value)(taken)
        return self._positions(name, value) if isinstance(value, Tensor) else value

    def _without_cache(self, name: str, value: Any) -> None:
        """Leave out a cache that is empty for this layer: programs create one in training, too."""
        length = getattr(value, "get_seq_length", None)
        if length is None or length(self.number):
            raise self._refusal(name, value, "train without a cache (use_cache=False)")

    def _mask(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise self._refusal(name, value, "pass the mask as a tensor (attn_implementation=sdpa)")
        shape, length = value.shape, self.length
        kept = self.index.shape[1]
        if value.dim() == 2 and shape == (length, length) and not self._is_by_row(value):
            if self.is_causal:
                shared: Tensor = value[:kept, :kept]
                return shared
            raise self._refusal(name, value, "give it a batch dimension: mask[None, None]")
        taken: Tensor = value
        dims = (1,) if value.dim() == 2 else (value.dim() - 2, value.dim() - 1)
        for dim in dims:
            if shape[dim] == length:
                taken = self._along(taken, dim)
        return taken

    def _is_by_row(self, value: Tensor) -> bool:
        """Return whether a square mask has a row for each sequence of the batch."""
        is_integer = not value.is_floating_point() and value.dtype != torch.bool
        return len(value) == len(self.index) and is_integer

    def _positions(self, name: str, value: Tensor) -> Tensor:
        shape, sequences = value.shape, (1, len(self.index))
        if name == "cache_position":
            return value.narrow(0, 0, self.index.shape[1])
        by_order = self.order == "seq_batch_dim" and value.dim() >= 2
        if by_order and shape[0] == self.length and shape[1] in sequences:
            return self._along(value.transpose(0, 1), 1).transpose(0, 1)
        if value.dim() >= 2 and shape[0] in sequences and self.length in shape[1:]:
            return self._along(value, list(shape).index(self.length, 1))
        if self.length in shape and self.length not in sequences:
            raise self._refusal(
                name, value, "give it a batch dimension, since sequences keep different tokens"
            )
        return value

    def _along(self, value: Tensor, dim: int) -> Tensor:
        shape = [1] * value.dim()
        shape[0], shape[dim] = self.index.shape
        taken: Tensor = torch.take_along_dim(value, self.index.view(shape), dim)
        return taken

    def _refusal(self, name: str, value: Any, remedy: str) -> UsageError:
        kind = f"{type(value).__name__} {list(getattr(value, 'shape', ()))}".removesuffix(" []")
        return UsageError(
            f"random_ltd: layer {self.layer} drops tokens, but its argument {name} ({kind}) cannot"
            f" be reduced to the kept tokens; {remedy}"
        )
