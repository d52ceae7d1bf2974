"""Splits tokens over tensor-parallel ranks, which have the same ones, and gathers them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.functions import all_gather_into_tensor, labelled
from hadal.errors import ModelError


def gathered(tokens: Tensor, ranks: Ranks | None, dim: int = 0) -> Tensor:
    """Return all ranks' tokens, one rank's after another; backward keeps this rank's slice."""
    if ranks is None or ranks.size == 1:
        return tokens
    found: Tensor = _Gathered.apply(tokens, ranks, dim)  # type: ignore[no-untyped-call]
    return found


def dropped(tokens: Tensor, ranks: Ranks | None, dim: int = 0) -> Tensor:
    """Return this rank's equal slice of tokens that all ranks have; backward gathers.

    Raises:
        ModelError: the ranks do not divide the tokens.
    """
    if ranks is None or ranks.size == 1:
        return tokens
    if tokens.shape[dim] % ranks.size:
        raise ModelError(
            f"drop_tokens: {ranks.size} tensor-parallel ranks do not divide {tokens.shape[dim]}"
            f" tokens (dimension {dim} of {tuple(tokens.shape)}); pad them"
        )
    found: Tensor = _Dropped.apply(tokens, ranks, dim)  # type: ignore[no-untyped-call]
    return found


def _all_gather(tokens: Tensor, ranks: Ranks, dim: int) -> Tensor:
    mine = tokens.contiguous()
    found = mine.new_empty(ranks.size * mine.numel())
    group = ranks.group_for(mine)
    labelled("the gather of tokens", all_gather_into_tensor, found, mine.view(-1), group=group)
    return torch.cat(found.view(ranks.size, *mine.shape).unbind(0), dim=dim)


def _slice(tokens: Tensor, ranks: Ranks, dim: int) -> Tensor:
    return tokens.chunk(ranks.size, dim=dim)[ranks.rank].contiguous()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.choices = (ranks, dim)
        return _all_gather(tokens, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return dropped(gradient, *ctx.choices), None, None


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.choices = (ranks, dim)
        return _slice(tokens, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, *ctx.choices), None, None
