"""DeepSpeed's layer of a BERT: its parameters and its arithmetic, in torch's operations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hadal.errors import ModelError, NotBuiltYetError


@dataclass
class DeepSpeedTransformerConfig:
    """Settings of a `DeepSpeedTransformerLayer`."""

    batch_size: int = -1
    """Without effect, as `local_rank`, `seed`, `fp16`, `stochastic_mode`, and `training`: batches
    may have any size, tensors have a device and a dtype, dropout draws from torch's generator."""
    hidden_size: int = -1
    intermediate_size: int = -1
    """The width of the feed-forward part; if it is not positive, four times `hidden_size`."""
    heads: int = -1
    attn_dropout_ratio: float = -1
    """The dropout of attention probabilities."""
    hidden_dropout_ratio: float = -1
    """The dropout of what is added to the residual stream."""
    num_hidden_layers: int = -1
    initializer_range: float = -1
    """The standard deviation of new weights; see `adjust_init_range`."""
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    """Normalize the inputs of attention and feed-forward part, and not the sums."""
    normalize_invertible: bool = False
    """Without effect: inputs of norms are kept."""
    gelu_checkpoint: bool = False
    """Recompute the output of GELU in backward."""
    adjust_init_range: bool = True
    """Divide the deviation of weights that write to the residual stream by the root of twice
    `num_hidden_layers`."""
    attn_dropout_checkpoint: bool = False
    """Without effect: fused attention keeps no probabilities."""
    stochastic_mode: bool = False
    return_tuple: bool = False
    """Return the output in a tuple."""
    training: bool = True
    layer_id: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """Return the settings of a mapping; any other keys become attributes."""
        config = cls()
        vars(config).update(json_object)
        config.__post_init__()
        return config

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Return the settings of a JSON file, in UTF-8 or in UTF-16."""
        return cls.from_dict(json.loads(Path(json_file).read_bytes()))


class DeepSpeedTransformerLayer(nn.Module):
    """Encoder layer of a BERT: attention and a feed-forward part with GELU (its tanh form).

    Args:
        config: the settings.
        initial_weights: the weights of query, key, value, attention's output, its norm, and of the
            feed-forward part's input, output and norm, to be used instead of new ones.
        initial_biases: the biases of the same; those of query, key and value are 0 nevertheless.

    Raises:
        ModelError: the heads do not divide the hidden size, or new weights have no deviation.
    """

    layer_id = 0
    """The layers made so far; each has the number before it in its settings."""

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[nn.Parameter] | None = None,
        initial_biases: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__()
        if config.heads < 1 or config.hidden_size % config.heads:
            raise ModelError(
                f"DeepSpeedTransformerConfig: hidden_size {config.hidden_size} is not a multiple of"
                f" heads {config.heads}; change one of them"
            )
        self.config = config
        config.layer_id, DeepSpeedTransformerLayer.layer_id = self.layer_id, self.layer_id + 1
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attn_qkvw = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.attn_qkvb = nn.Parameter(torch.zeros(3 * hidden))
        self.attn_ow = nn.Parameter(torch.empty(hidden, hidden))
        self.attn_ob = nn.Parameter(torch.empty(hidden))
        self.attn_nw = nn.Parameter(torch.empty(hidden))
        self.attn_nb = nn.Parameter(torch.empty(hidden))
        self.inter_w = nn.Parameter(torch.empty(inner, hidden))
        self.inter_b = nn.Parameter(torch.empty(inner))
        self.output_w = nn.Parameter(torch.empty(hidden, inner))
        self.output_b = nn.Parameter(torch.empty(hidden))
        self.norm_w = nn.Parameter(torch.empty(hidden))
        self.norm_b = nn.Parameter(torch.empty(hidden))
        if initial_weights is None or initial_biases is None:
            self.init_transformer_weights(config.adjust_init_range)
        if initial_weights is not None:
            query, key, value, *others = initial_weights
            self.attn_qkvw = nn.Parameter(torch.cat([query.data, key.data, value.data]))
            self.attn_ow, self.attn_nw, self.inter_w, self.output_w, self.norm_w = others
        if initial_biases is not None:
            *_, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b = (
                initial_biases
            )

    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draw new weights.

        Raises:
            ModelError: the settings have no deviation.
        """
        config = self.config
        std = to_stream = config.initializer_range
        if std < 0:
            raise ModelError(
                f"DeepSpeedTransformerConfig: initializer_range {std} is no standard deviation of"
                " new weights; set one, such as 0.02"
            )
        if adjust_init_range:
            to_stream = std / math.sqrt(2.0 * max(config.num_hidden_layers, 1))
        for weight, deviation in (
            (self.attn_qkvw, std),
            (self.attn_ow, to_stream),
            (self.inter_w, std),
            (self.output_w, to_stream),
        ):
            weight.normal_(std=deviation)
        for norm in (self.attn_nw, self.norm_w):
            norm.fill_(1.0)
        for name, bias in self.named_parameters():
            if name.endswith("b"):
                bias.zero_()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *others: Any,
        **named: Any,
    ) -> Tensor | tuple[Tensor]:
        """Return the layer's output, [batch, L, hidden].

        Args:
            hidden_states: [batch, L, hidden].
            attention_mask: [batch, 1, 1, L], or of pairs: added to the scores (0 for tokens that
                are seen, a large negative number for others), or true for tokens that are seen.
            others, named: further arguments of transformers' layers; only None or false.

        Raises:
            ModelError: the mask is neither.
            NotBuiltYetError: another argument is given.
        """
        named |= {f"argument {number}": value for number, value in enumerate(others, 3)}
        for name, value in named.items():
            if value is not None and value is not False:
                raise NotBuiltYetError(
                    f"DeepSpeedTransformerLayer.forward: {name} is not built yet; leave it out"
                )
        if attention_mask is not None:
            _check(attention_mask)
        config = self.config
        norm: Callable[..., Any] = partial(
            functional.layer_norm,
            normalized_shape=(config.hidden_size,),
            eps=config.layer_norm_eps,
        )
        first = partial(norm, weight=self.norm_w, bias=self.norm_b)
        middle = partial(norm, weight=self.attn_nw, bias=self.attn_nb)
        if config.pre_layer_norm:
            summed = hidden_states + self._attention(first(hidden_states), attention_mask)
            output = summed + self._feed_forward(middle(summed))
        else:
            summed = middle(hidden_states + self._attention(hidden_states, attention_mask))
            output = first(summed + self._feed_forward(summed))
        return (output,) if config.return_tuple else output

    def _attention(self, values: Tensor, mask: Tensor | None) -> Tensor:
        config = self.config
        batch, length, hidden = values.shape
        projected = functional.linear(values, self.attn_qkvw, self.attn_qkvb)
        heads = projected.view(batch, length, 3, config.heads, hidden // config.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None or mask.dtype is torch.bool else mask.to(query.dtype),
            dropout_p=max(config.attn_dropout_ratio, 0.0) if self.training else 0.0,
        )
        joined = found.transpose(1, 2).reshape(batch, length, hidden)
        return self._dropped(functional.linear(joined, self.attn_ow, self.attn_ob))

    def _feed_forward(self, values: Tensor) -> Tensor:
        inner = functional.linear(values, self.inter_w, self.inter_b)
        outer: Callable[..., Any] = self._outer
        if self.config.gelu_checkpoint and torch.is_grad_enabled():
            outer = partial(checkpoint, outer, use_reentrant=False)
        return self._dropped(outer(inner))

    def _outer(self, inner: Tensor) -> Tensor:
        activated = functional.gelu(inner, approximate="tanh")
        return functional.linear(activated, self.output_w, self.output_b)

    def _dropped(self, values: Tensor) -> Tensor:
        ratio = max(self.config.hidden_dropout_ratio, 0.0)
        return functional.dropout(values, ratio, self.training)


def _check(mask: Tensor) -> None:
    if mask.dim() != 4 or not (mask.is_floating_point() or mask.dtype is torch.bool):
        raise ModelError(
            f"DeepSpeedTransformerLayer.forward: attention_mask has the dtype {mask.dtype} and the"
            f" shape {tuple(mask.shape)}; expected [batch, 1, 1 or L, L], either floats that are"
            " added to the scores (0 for tokens that are seen, such as -10000 for others) or"
            " booleans (true for tokens that are seen)"
        )
