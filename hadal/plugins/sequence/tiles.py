"""Computation in tiles along the sequence: the memory of one tile at a time, the same results.

Each tile is recomputed in backward by torch's non-reentrant checkpoint. The tiles are ordinary
nodes of one autograd graph, so a weight's gradient is the sum over tiles, scaled like any other,
and reaches the weight once: no other mechanism needs to handle tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hadal.device import on_device
from hadal.errors import SequenceError, expect_one_of

IGNORED = -100
"""The target of a position that has none, as in torch's cross entropy."""


def lengths_of(length: int, tiles: int) -> list[int]:
    """Return the lengths of at most `tiles` tiles that differ by at most one, longer ones first.

    Raises:
        SequenceError: `tiles` is not a positive integer.
    """
    if not isinstance(tiles, int) or tiles < 1:
        raise SequenceError(f"shards is {tiles!r}; expected the number of tiles, 1 or more")
    tiles = max(1, min(tiles, length))
    whole, over = divmod(length, tiles)
    return [whole + (place < over) for place in range(tiles)]


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, and again in backward instead of keeping its intermediate tensors."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def sequence_tiled_compute(  # noqa: PLR0913 - the signature is DeepSpeed's
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Call `fn` on tiles of the sequence and join its outputs.

    Args:
        fn: takes both kinds of keyword arguments; returns a tensor with the tile's positions in
            `output_unshard_dimension`, or a loss without dimensions.
        seqlen: size of dimension 1 of every tensor in `kwargs_to_shard`.
        shards: number of tiles; a shorter sequence has one for each position.
        kwargs_to_shard: tensors [batch, seqlen, ...]; None is passed on.
        kwargs_to_pass: arguments that every tile receives whole.
        grad_requiring_tensor_key: one of the arguments' names; not needed, as autograd finds what
            requires gradients.
        compute_params: also not needed.
        output_unshard_dimension: dimension along which outputs are joined.
        output_reduction: None joins the outputs; "sum" sums them; "mean" averages them, weighted
            by the number of positions of each tile.

    Raises:
        SequenceError: a tensor has another length, or `shards` or the reduction is invalid.
    """
    expect_one_of((None, "mean", "sum"), "output_reduction", output_reduction, SequenceError)
    names, what = (None, *kwargs_to_shard, *kwargs_to_pass), "grad_requiring_tensor_key"
    expect_one_of(names, what, grad_requiring_tensor_key, SequenceError)
    lengths = lengths_of(seqlen, shards)
    pieces = [dict[str, Any]() for _ in lengths]
    for name, value in kwargs_to_shard.items():
        if value is not None and (value.dim() < 2 or value.shape[1] != seqlen):
            raise SequenceError(
                f"{name} has the shape {tuple(value.shape)}; expected [batch, {seqlen}, ...], as"
                " seqlen says; pass it in kwargs_to_pass if every tile needs all of it"
            )
        parts = [None] * len(lengths) if value is None else value.split(lengths, dim=1)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    outputs = [recomputed(fn, **piece, **kwargs_to_pass) for piece in pieces]
    return _put_together(outputs, lengths, output_unshard_dimension, output_reduction)


def _put_together(
    outputs: Sequence[Tensor], lengths: Sequence[int], dim: int, reduction: str | None
) -> Tensor:
    if outputs[0].dim() and reduction is None:
        return torch.cat(list(outputs), dim=dim)
    if reduction is None:
        return torch.stack(list(outputs))
    if reduction == "sum":
        return torch.stack([output.sum() for output in outputs]).sum()
    counts = on_device(torch.tensor(lengths, device="cpu"), outputs[0].device)
    return _weighted_mean([output.mean() for output in outputs], counts)


class SequenceTiledCompute:
    """`sequence_tiled_compute` in the form of an autograd function."""

    @staticmethod
    def apply(  # noqa: PLR0913 - the signature is DeepSpeed's
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of the two lists of names."""
        named = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            {name: named[name] for name in keys_to_shard},
            {name: named[name] for name in keys_to_pass},
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class AutogradComputeMLP:
    """A function that is recomputed in backward, in one tile."""

    @staticmethod
    def apply(fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
        """Return `fn(self, x)`."""
        output: Tensor = recomputed(fn, self, x)
        return output


class TiledMLP:
    """A function of each position alone, such as an MLP, computed in tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Any = None,
    ) -> Tensor:
        """Return `fn(self, x)`, with the intermediate tensors of one tile at a time.

        Args:
            fn: takes `self` and positions [..., length, hidden]; returns as many.
            self: passed on to `fn`; usually the module whose forward this replaces.
            x: [batch, length, hidden] or [length, hidden].
            shards: number of tiles; a shorter sequence has one for each position.
            compute_params: accepted but not needed; autograd finds the weights.

        Raises:
            SequenceError: `x` has fewer than two dimensions, or `shards` is not a positive integer.
        """
        if x.dim() < 2:
            raise SequenceError(
                f"TiledMLP got a tensor of shape {tuple(x.shape)}; expected [batch, length, hidden]"
                " or [length, hidden]"
            )
        tiles = x.split(lengths_of(x.shape[-2], shards), dim=-2)
        found = [recomputed(fn, self, tile) for tile in tiles]
        for output, tile in zip(found, tiles, strict=True):
            if output.shape[:-1] != tile.shape[:-1]:
                raise SequenceError(
                    f"the function of TiledMLP returned the shape {tuple(output.shape)} for a tile"
                    f" of shape {tuple(tile.shape)}; expected a row for each position"
                )
        return torch.cat(found, dim=-2)


class TiledFusedLogitsLoss:
    """Logits and loss in tiles of the sequence: the logits of one tile at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        shards: int = 1,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Return the loss of all positions, as `fn` would compute it on the whole sequence.

        Args:
            fn: `fn(self, x, y)`, with a mask `fn(self, x, y, mask)`; returns a loss without
                dimensions, the mean or the sum over the targets that count. It must not shift
                targets, as a tile does not contain its successor's.
            self: passed on to `fn`; usually the model.
            x: hidden states [batch, length, ...].
            y: targets [batch, length, ...]. Integer targets of -100 do not count.
            mask: [batch, length]; True or nonzero if a target counts. None: all targets count.
            shards: number of tiles; a shorter sequence has one for each position.
            compute_params: accepted but not needed; autograd finds the weights.
            output_reduction: the reduction in `fn`. "mean" weights each tile by its targets that
                count, so the result is the mean over all of them; 0 if there are none.

        Raises:
            SequenceError: shapes do not fit, or `shards` or the reduction is invalid.
        """
        expect_one_of(("mean", "sum"), "output_reduction", output_reduction, SequenceError)
        _check_shapes(x, y, mask)
        lengths = lengths_of(x.shape[1], shards)
        tiles = list(_tiles_of(x, y, mask, lengths))
        if output_reduction == "sum":
            sums = [recomputed(fn, self, *tile) for tile in tiles]
            _check_losses(sums)
            return torch.stack(sums).sum()
        counts = [_targets_in(*tile[1:]) for tile in tiles]
        losses = [
            recomputed(fn, self, tile[0], *_never_empty(count, *tile[1:]))
            for tile, count in zip(tiles, counts, strict=True)
        ]
        _check_losses(losses)
        return _weighted_mean(losses, torch.stack(counts))


def _check_losses(losses: Sequence[Tensor]) -> None:
    if losses[0].dim():
        raise SequenceError(
            "the function of TiledFusedLogitsLoss returned the shape"
            f" {tuple(losses[0].shape)}; expected a loss without dimensions"
        )


def _weighted_mean(losses: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return the mean of losses, weighted by counts, in their dtype; 0 if all counts are 0."""
    dtype = losses[0].dtype
    weights = counts.to(torch.promote_types(dtype, torch.float32))
    return (torch.stack(list(losses)) * weights / weights.sum().clamp(min=1)).sum().to(dtype)


def _check_shapes(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
    if x.dim() < 2:
        raise SequenceError(f"x has the shape {tuple(x.shape)}; expected [batch, length, ...]")
    for name, value in (("y", y), ("mask", mask)):
        if value is not None and tuple(value.shape[:2]) != tuple(x.shape[:2]):
            raise SequenceError(
                f"{name} has the shape {tuple(value.shape)}, but x {tuple(x.shape)}; expected the"
                " same first two dimensions, [batch, length, ...]"
            )


def _tiles_of(
    x: Tensor, y: Tensor, mask: Tensor | None, lengths: Sequence[int]
) -> Iterator[tuple[Tensor, ...]]:
    whole = [x, y] if mask is None else [x, y, mask]
    yield from zip(*(one.split(list(lengths), dim=1) for one in whole), strict=True)


def _targets_in(y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return how many targets of a tile count, on its device."""
    counts = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.bool()
    if not y.is_floating_point() and y.shape == counts.shape:
        counts = counts & (y != IGNORED)
    return counts.sum()


def _never_empty(
    count: Tensor, y: Tensor, mask: Tensor | None = None
) -> tuple[Tensor] | tuple[Tensor, Tensor]:
    """Add targets to a tile without any: its mean would be 0/0; its weight is zero anyway.

    The decision is made on the device: skipping a tile on one rank would hang others' collectives.
    """
    if not y.is_floating_point():
        y = torch.where(count > 0, y, y.clamp(min=0))
    if mask is None:
        return (y,)
    return y, torch.where(count > 0, mask, torch.ones_like(mask))
