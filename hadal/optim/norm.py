"""The gradient norm, its clipping, gradients that are not finite, and the loss scale after them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, slice_of, sum_
from hadal.device import read_on_host, widest_float
from hadal.errors import LossScaleError
from hadal.optim.workspace import growth
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts, Sharing

# Squares are summed in float32 along rows of this many elements; the rows' sums are added in
# float64 for precision.
ROW_NUMEL = 1 << 10
# The number of elements that a CPU casts together: few enough to stay in the cache.
_CPU_BLOCK_NUMEL = 1 << 18


RowNorms = dict[Gradients, tuple[int, Tensor]]
"""Each bucket's first element that this rank counts, and the norms of its rows."""


def global_norm(
    gradients: Sequence[Gradients],
    sharing: Sharing,
    parts: ModelParts | None = None,
    rows: RowNorms | None = None,
) -> Tensor:
    """Return the L2 norm of all mean gradients, each counted once, by one small sum over ranks.

    The norm is a float64 scalar on the accelerator, so that the host does not wait, if all
    gradients are there and it supports that dtype; otherwise on the host.

    If gradients stay on their ranks, no rank has the mean: the norm is the root of the mean square
    of all ranks' norms, which the norm of the mean does not exceed.

    The `parts` of the model on other ranks are counted too, each value once. `rows` is filled with
    the norms of rows of the buckets that this rank counts whole.
    """
    total = sum_of_squares(gradients, parts, rows)
    sharing.sum_(total, "the sum of the gradient norm")
    if parts is not None:
        sum_(total, parts.ranks, "the sum of the gradient norm over the model's parts")
    return total.sqrt_()


def sum_of_squares(
    gradients: Sequence[Gradients], parts: ModelParts | None = None, rows: RowNorms | None = None
) -> Tensor:
    """Return this rank's part of the squared norm, a float64 scalar (see `global_norm`).

    Each bucket is counted over the ranks that it is sharded over, whichever these are: together
    they are the ranks of one copy of the model states.
    """
    found: dict[Gradients, list[Tensor]] = {}
    # Backward ends with the first bucket: while its gradients are copied to the host, those of
    # the others are already there.
    for one in reversed(gradients):
        # If every rank has the full mean, each rank counts its even slice of it.
        cut, stays = one.bucket.partition.optimizer, one.reduction.stays
        ranks = one.bucket.sharing.shards
        mine = one.mean if cut or stays else slice_of(one.mean, ranks.rank, ranks)
        span = one.bucket.span if stays else one.bucket.layout.span(ranks.rank)
        if parts is None or all(map(parts.counts, one.bucket.parameters)):
            mine_of = list(_norms(mine))
            if rows is not None:
                rows[one] = span[0], torch.cat(mine_of)
        else:
            counted = (
                mine[part.offset : part.offset + part.numel]
                for part in one.bucket.layout.fragments(*span)
                if parts.counts(one.bucket.parameters[part.slot])
            )
            mine_of = [norm for values in counted for norm in _norms(values)]
        found[one] = [norm / ranks.size**0.5 for norm in mine_of] if stays else mine_of
    norms = [norm for one in gradients for norm in found[one]]
    total = torch.zeros((), dtype=torch.float64, device=device_of_sum(gradients))
    for device in dict.fromkeys(norm.device for norm in norms):
        # The host waits at most once for each device, which may not have float64.
        here = torch.cat([norm for norm in norms if norm.device == device])
        if total.device != device:
            here = read_on_host(here, "the norms of the gradients")
        total += here.double().square().sum()
    return total


def device_of_sum(gradients: Sequence[Gradients]) -> torch.device:
    """Return the device of the sum: of the same kind on all ranks, even those without gradients."""
    devices = {one.bucket.steps_on for one in gradients}
    if len(devices) == 1:
        (device,) = devices
        if widest_float(device) == torch.float64:
            return device
    return torch.device("cpu")


def _norms(values: Tensor) -> Iterator[Tensor]:
    """Yield the norms of slices of the 1-D `values`: of each row, then of the remainder."""
    exact = torch.promote_types(values.dtype, torch.float32)
    on_cpu = values.device.type == "cpu"
    step = min(_CPU_BLOCK_NUMEL * growth(), values.numel()) if on_cpu else values.numel()
    buffer = None
    if on_cpu and values.dtype != exact:
        # On a CPU casting first takes a tenth of the time of a norm of 16-bit values.
        buffer = torch.empty(step, dtype=exact)
    for part in values.split(step):
        block = part if buffer is None else buffer[: part.numel()].copy_(part)
        whole = block.numel() // ROW_NUMEL * ROW_NUMEL
        rows = block[:whole].view(-1, ROW_NUMEL)
        yield torch.linalg.vector_norm(rows, dim=1, dtype=exact)
        yield torch.linalg.vector_norm(block[whole:].view(1, -1), dim=1, dtype=exact)


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that scales gradients of this norm down to `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def clip_on_device(norm: Tensor, limit: float) -> Tensor:
    """Return `clip_coefficient` as a scalar on the norm's device; `limit` is above 0."""
    clip = limit / (norm + 1e-6)
    # A NaN does not clip, as on the host.
    return torch.where(clip < 1.0, clip, 1.0)


def has_overflow(
    gradients: Sequence[Gradients], ranks: Ranks, parts: ModelParts | None = None
) -> Tensor:
    """Return whether any mean gradient on any rank is non-finite, for updates without a norm.

    The ranks of the model's other parts take part. The flag is on the accelerator if all
    gradients are.
    """
    device = device_of_sum(gradients)
    found = torch.zeros((), device=device)
    for one in gradients:
        if one.mean.numel():
            # The extremes avoid a mask as long as the gradient; a NaN is both of them.
            extremes = torch.stack(torch.aminmax(one.mean))
            if one.mean.device != device:
                extremes = read_on_host(extremes, "the extremes of the gradients")
            found += extremes.isfinite().all().logical_not()
    sum_(found, ranks, "the search for overflowed gradients")
    if parts is not None:
        sum_(found, parts.ranks, "the search for overflowed gradients")
    return found > 0


def first_overflow(
    gradients: Sequence[Gradients], names: Sequence[str], ranks: Ranks
) -> str | None:
    """Return the first of `names` (full, in the model's order) with a non-finite mean gradient.

    Each rank checks its own slice of the gradients; all ranks must call it, and get the same name.
    None if every gradient is finite and only the square of their norm is too large.
    """
    found = (name for one in gradients for name in _not_finite(one.bucket, one.mean))
    return _first_of(found, names, ranks)


def first_nonfinite_weight(
    buckets: Iterable[Bucket], names: Sequence[str], ranks: Ranks
) -> str | None:
    """Search like `first_overflow` in the weights."""

    def found() -> Iterator[str]:
        for bucket in buckets:
            with bucket.present(writes=False):
                yield from _not_finite(bucket, bucket.shard)

    return _first_of(found(), names, ranks)


def _first_of(found: Iterable[str], names: Sequence[str], ranks: Ranks) -> str | None:
    """Return the first of `names` that any rank has found."""
    place = {name: number for number, name in enumerate(names)}
    mine = min((place[name] for name in found), default=len(names))
    first = min(gather_codes(mine, ranks))
    return names[first] if first < len(names) else None


def _not_finite(bucket: Bucket, held: Tensor) -> Iterator[str]:
    """Yield the names of the parameters with a non-finite value in my slice of them, `held`."""
    for part in bucket.layout.fragments(*bucket.span):
        values = held[part.offset : part.offset + part.numel]
        where = bucket.layout.slots[part.slot].name
        if not bool(read_on_host(torch.isfinite(values).all(), f"whether {where} overflowed")):
            yield where


def first_row_overflow(rows: RowNorms, names: Sequence[str], ranks: Ranks) -> str | None:
    """Search like `first_overflow`, by the norms of rows, if the gradients are already freed.

    It cannot distinguish parameters that share a row.
    """
    near = (_near(one, start, norms) for one, (start, norms) in rows.items())
    return _first_of(chain.from_iterable(near), names, ranks)


def _near(one: Gradients, start: int, norms: Tensor) -> Iterator[str]:
    layout = one.bucket.layout
    finite = read_on_host(norms, "the norms of the gradients' rows").isfinite()
    for row in finite.logical_not().nonzero().flatten().tolist():
        low = start + row * ROW_NUMEL
        for part in layout.fragments(low, min(low + ROW_NUMEL, layout.numel)):
            yield layout.slots[part.slot].name


_FACTOR = 2.0


class ScaleRule(NamedTuple):
    """The rule by which the scale changes (section `fp16`). A static scale never does.

    DeepSpeed has two variants. With ZeRO an overflow at the floor ends training and `hysteresis`
    tolerates overflows; without ZeRO the scale stays at its floor and every overflow halves it:
    `hysteresis` 1, `ends_at_floor` false.
    """

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    """Clean updates before the scale doubles."""
    minimum: float = 1.0
    hysteresis: int = 2
    """The number of the overflow, since the start or last doubling, that halves; 0 never halves."""
    consecutive_hysteresis: bool = False
    """Reset the tolerance at every clean update, not only when the scale doubles."""
    ends_at_floor: bool = True
    """True if an overflow at the floor is an error; otherwise the scale stays there."""
    maximum: float = math.inf
    """The ceiling: the scale does not double beyond it."""


class ScaleState(NamedTuple):
    """The state of the loss scale between updates."""

    scale: float
    spare: int
    """The remaining tolerance; at 1 the next overflow halves the scale."""
    iteration: int = 0
    last_overflow: int = -1


def first_scale(rule: ScaleRule) -> ScaleState:
    """Return the state before the first update."""
    return ScaleState(rule.initial, rule.hysteresis)


def next_scale(state: ScaleState, overflow: bool, rule: ScaleRule) -> ScaleState:
    """Return the state after an update that did or did not overflow.

    The first doubling after the start or an overflow needs `window` + 1 clean updates, later ones
    `window`. A halving does not reset the tolerance.

    Raises:
        LossScaleError: an overflow with the scale at its floor, if that ends training.
    """
    if not rule.dynamic:
        return state
    scale, spare, iteration, last = state
    if overflow:
        if rule.hysteresis == 1 or spare == 1:
            if rule.ends_at_floor and scale == rule.minimum:
                raise LossScaleError(
                    f"gradients overflow at the floor of the loss scale ({scale:g}, update"
                    f" {iteration}). The weights or the data have values beyond float16's range:"
                    " train in bf16, lower the learning rate or fp16.min_loss_scale, or look for"
                    " non-finite inputs. Weights trained in bf16 need bf16."
                )
            scale = max(scale / _FACTOR, rule.minimum)
        else:
            spare -= 1
        last = iteration
    else:
        if rule.consecutive_hysteresis:
            spare = rule.hysteresis
        clean = iteration - last - 1
        if clean > 0 and clean % rule.window == 0:
            scale = min(scale * _FACTOR, rule.maximum)
            if not rule.consecutive_hysteresis:
                spare = rule.hysteresis
    return ScaleState(scale, spare, iteration + 1, last)
