"""BERT's self-attention over a pattern, and the conversion of a trained BERT or RoBERTa."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadal.errors import ModelError, NotBuiltYetError
from hadal.plugins.sparse_attention.huggingface import use_sparse_attention
from hadal.plugins.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig
from hadal.plugins.sparse_attention.modules import SparseSelfAttention

_LENGTH = 2048
Model = TypeVar("Model", bound=nn.Module)
Layers = TypeVar("Layers", bound=Iterable[Any])


class BertSparseSelfAttention(nn.Module):
    """The self-attention of a BERT layer over a pattern, without dropout of its probabilities.

    Args:
        config: has `hidden_size`, `num_attention_heads` and optionally `max_position_embeddings`.
        sparsity_config: the pattern; a FixedSparsityConfig by default.
        returns_tuple: whether forward returns (output, None), as layers of transformers expect.

    Raises:
        ModelError: the heads do not divide the hidden size.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: SparsityConfig | None = None,
        *,
        returns_tuple: bool = False,
    ) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            raise ModelError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; change"
                " one of the two in the model's config"
            )
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.all_head_size = hidden
        self.returns_tuple = returns_tuple
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.sparse_self_attention = SparseSelfAttention(
            FixedSparsityConfig(heads) if sparsity_config is None else sparsity_config,
            attn_mask_mode="add",
            max_seq_length=max(_LENGTH, getattr(config, "max_position_embeddings", 0)),
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, None]:
        """Return the attention of [batch, L, hidden].

        Args:
            hidden_states: [batch, L, hidden].
            attention_mask: of keys, [batch, L] or [batch, 1, 1, L]; or of pairs, [batch, 1, L, L].
                Booleans are true where tokens are seen; numbers are added to the scores.
            others: further arguments of transformers' layers; those for unsupported features
                (a cache, cross-attention) are refused.

        Raises:
            NotBuiltYetError: a cache or cross-attention is requested.
        """
        for name in ("past_key_values", "encoder_hidden_states"):
            if others.get(name) is not None:
                raise NotBuiltYetError(
                    f"BertSparseSelfAttention with {name} is not built yet; leave that out"
                )
        heads = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            layer(hidden_states).view(heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        masks = {}
        if attention_mask is not None:
            of_pairs = attention_mask.dim() == 4 and attention_mask.shape[2] > 1
            masks["attn_mask" if of_pairs else "key_padding_mask"] = attention_mask
        found = self.sparse_self_attention(query, key, value, **masks)
        found = found.transpose(1, 2).reshape(hidden_states.shape)
        return (found, None) if self.returns_tuple else found


class SparseAttentionUtils:
    """Functions that prepare a model, its tokenizer and its inputs; all are static."""

    @staticmethod
    @torch.no_grad()
    def extend_position_embedding(model: Model, max_position: int) -> Model:
        """Repeat the position embeddings of a BERT or RoBERTa up to `max_position` positions.

        The parameter stays the same object; call this before `initialize`.

        Raises:
            ModelError: the model is not supported, or already has as many positions.
        """
        inner, special = _inner(model, "extend_position_embedding")
        embeddings = inner.embeddings
        table: nn.Embedding = embeddings.position_embeddings
        old = table.weight
        rows = len(old) - special
        if max_position <= rows:
            raise ModelError(
                f"max_position is {max_position}, but the model has {rows} positions; use more"
            )
        repeats = -(-max_position // rows)
        longer = torch.cat([old[:special], old[special:].repeat(repeats, 1)])
        old.data = longer[: max_position + special].clone()
        table.num_embeddings = len(old)
        for name in ("position_ids", "token_type_ids"):
            buffer = getattr(embeddings, name, None)
            if isinstance(buffer, Tensor):
                count = torch.arange(len(old), device=buffer.device)[None]
                setattr(embeddings, name, count if name == "position_ids" else 0 * count)
        _set_positions(model, len(old))
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set a transformers tokenizer to sequences of up to `max_position` tokens; return it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Model, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Model:
        """Replace the self-attention of each layer of a BERT or RoBERTa, keeping its weights.

        Args:
            model: has `bert` or `roberta`.
            max_position: the longest sequence.
            sparsity_config: the pattern; a FixedSparsityConfig by default.

        Raises:
            ModelError: the model is not supported.
        """
        inner, special = _inner(model, "replace_model_self_attention_with_sparse_self_attention")
        _set_positions(model, max_position + special)
        if hasattr(model, "set_attn_implementation"):
            use_sparse_attention(model)  # so that masks come as [batch, L]
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            inner.config, inner.encoder.layer, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Layers, sparsity_config: SparsityConfig | None = None
    ) -> Layers:
        """Replace `attention.self` of each layer by a sparse one with the same weights."""
        for layer in layers:
            before = layer.attention.self
            after = BertSparseSelfAttention(config, sparsity_config, returns_tuple=True)
            after.query, after.key, after.value = before.query, before.key, before.value
            layer.attention.self = after.train(before.training)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pad_token_id: int = 0,
        model_embeddings: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad inputs on the right to a multiple of the block.

        Padded tokens are masked; if no mask is given but padding is added, one is created.
        Embeddings are padded with those of `pad_token_id`, from `model_embeddings`.

        Returns:
            The number of tokens added, and the five inputs.

        Raises:
            ModelError: neither ids nor embeddings are given, or only embeddings without
                `model_embeddings`.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ModelError("pad_to_block_size needs input_ids or inputs_embeds; pass one of them")
        if block_size < 1:
            raise ModelError(f"block_size is {block_size}; pass the block of the pattern")
        batch, length = given.shape[:2]
        more = -length % block_size
        if more:
            if attention_mask is None:
                attention_mask = torch.ones(batch, length, dtype=torch.long, device=given.device)
            if inputs_embeds is not None:
                if model_embeddings is None:
                    raise ModelError("padding inputs_embeds needs model_embeddings; pass it")
                pad = inputs_embeds.new_full((batch, more), pad_token_id, dtype=torch.long)
                inputs_embeds = torch.cat([inputs_embeds, model_embeddings(pad)], 1)
            input_ids = _padded(input_ids, more, pad_token_id)
            position_ids = _padded(position_ids, more, pad_token_id)
            attention_mask = _padded(attention_mask, more, 0)
            token_type_ids = _padded(token_type_ids, more, 0)
        return more, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return an output of [batch, L, ...] without its last `pad_len` tokens."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


def _padded(values: Tensor | None, more: int, value: int) -> Tensor | None:
    return None if values is None else functional.pad(values, (0, more), value=value)


def _inner(model: nn.Module, method: str) -> tuple[Any, int]:
    """Return the encoder of a model, and the number of its reserved positions."""
    for name, special in (("bert", 0), ("roberta", 2)):
        inner = getattr(model, name, None)
        if inner is not None:
            return inner, special
    raise ModelError(
        f"{type(model).__name__} has neither `bert` nor `roberta`, which SparseAttentionUtils."
        f"{method} changes; for other models of transformers use"
        " hadal.sparse_attention.use_sparse_attention(model, ...)"
    )


def _set_positions(model: nn.Module, count: int) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "max_position_embeddings"):
            config.max_position_embeddings = count
