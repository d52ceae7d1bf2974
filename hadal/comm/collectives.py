"""The collectives of the mechanism.

Reductions mostly compute the *mean* over the ranks, divided before it is rounded to a 16-bit dtype,
so that averaging cannot overflow unless the values themselves do; `Factors` describe the other
reductions. `hadal.comm.transport` sends and receives. Messages that only two ranks know of are here
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import functions
from hadal.comm.factors import Factors, for_the_wire, sum_into
from hadal.comm.functions import labelled
from hadal.comm.local.pairs import as_bytes, exchange
from hadal.comm.pending import Pending, finished, relayed
from hadal.comm.ranks import Ranks
from hadal.comm.transport import (
    CODE,
    EXCHANGE,
    GATHER,
    HOP,
    SMALL,
    SPREAD,
    Pieces,
    transport_of,
)

# Limits on ranks and bytes for sending to every rank directly, in place of a collective.
_FEW_RANKS, _FEW_BYTES = 8, 4096

_OBJECTS = "an exchange of objects between ranks"
# The purpose of codes: ranks with different ones may announce them for different reasons.
_CODES = "an agreement between ranks"


def slice_of(full: Tensor, rank: int, ranks: Ranks) -> Tensor:
    """Return the even slice of 1-D `full` that belongs to `rank`."""
    numel = full.numel() // ranks.size
    return full[rank * numel : (rank + 1) * numel]


def _table(full: Tensor, ranks: Ranks) -> Tensor:
    """Return the slices of all ranks as rows."""
    return full.view(ranks.size, full.numel() // ranks.size)


def start_all_gather(full: Tensor, ranks: Ranks, label: str, tag: int = GATHER) -> Pending:
    """Fill the slices of 1-D `full` from their ranks; mine must already be in its place."""
    if ranks.size == 1:
        return finished(label)
    return transport_of(full, ranks).gather(_table(full, ranks), ranks, label, tag)


def start_gather_in_pieces(full: Tensor, ranks: Ranks, label: str, numel: int) -> Pending:
    """Gather as `start_all_gather`, at most `numel` elements of `full` at a time, in order."""
    if ranks.size == 1:
        return finished(label)
    gather = partial(transport_of(full, ranks).gather, ranks=ranks, label=label, tag=GATHER)
    first, *others = _table(full, ranks).split(max(1, numel // ranks.size), dim=1)
    pending = gather(first)
    for piece in others:
        pending.then(partial(gather, piece))
    return pending


def start_gather_in_hops(full: Tensor, across: Ranks, inside: Ranks, label: str) -> Pending:
    """Gather as `start_all_gather` over several nodes; each byte enters each node once.

    The first step gathers the shards of the ranks `across` nodes that have the same place in their
    node; the second exchanges these between the ranks `inside` this node. Slices of `full` are
    ordered by node, then by rank.
    """
    shape = across.size, inside.size, full.numel() // (across.size * inside.size)
    by_node = full.view(shape)
    by_rank = full.new_empty(full.numel())
    mine = slice_of(by_rank, inside.rank, inside)
    slice_of(mine, across.rank, across).copy_(by_node[across.rank, inside.rank])
    pending = relayed(
        start_all_gather(mine, across, label),
        # With its own tag: other gathers inside the node may have overtaken it.
        lambda: start_all_gather(by_rank, inside, label, HOP),
        full.device,
    )
    table = by_rank.view(inside.size, across.size, -1).transpose(0, 1)
    return pending.then(lambda: by_node.copy_(table))


def start_reduce_scatter(
    full: Tensor,
    out: Tensor,
    ranks: Ranks,
    wire: torch.dtype,
    accumulate: bool,
    label: str,
    factors: Factors | None = None,
) -> Pending:
    """Put the mean over all ranks of my slice of 1-D `full` into `out` (or add it to `out`).

    `out` may be my slice of `full` itself. `full` must not be touched until the wait is over. The
    values travel in dtype `wire`. `factors` replace those of the mean.
    """
    factors = factors or Factors.of_mean(ranks.size)
    if ranks.size == 1:
        factor = factors.before * factors.after
        return Pending(label, act=lambda: sum_into(out, [full], factor, accumulate))
    transport = transport_of(full, ranks)
    factors = transport.factors(factors, wire, ranks)
    sent = _table(for_the_wire(full, factors.before, wire), ranks)
    works, pieces, after = transport.reduce(sent, factors, ranks, label)
    return Pending(label, works, lambda: sum_into(out, pieces, after, accumulate))


def start_all_reduce(
    full: Tensor,
    ranks: Ranks,
    wire: torch.dtype,
    label: str,
    factors: Factors | None = None,
) -> Pending:
    """Replace 1-D `full` by its mean over all ranks (or as `factors` say), the same bits on each.

    It travels in dtype `wire`. On the host the rank that sums a slice also sends the sum in `wire`,
    but no wider than `full`.
    """
    factors = factors or Factors.of_mean(ranks.size)
    if ranks.size == 1:
        factor = factors.before * factors.after
        return Pending(label, act=lambda: sum_into(full, [full], factor, False))
    return transport_of(full, ranks).all_reduce(full, wire, factors, ranks, label)


def start_exchange(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    ranks: Ranks,
    label: str,
    tag: int = EXCHANGE,
) -> Pending:
    """Send 1-D `outgoing[r]` to each rank r; receive r's tensor into 1-D `incoming[r]`.

    As `start_exchange_in_pieces`.
    """
    leaving, coming = ({r: [one] for r, one in enumerate(side)} for side in (outgoing, incoming))
    return start_exchange_in_pieces(leaving, coming, outgoing[0], ranks, label, tag)


def start_exchange_in_pieces(
    outgoing: Pieces,
    incoming: Pieces,
    like: Tensor,
    ranks: Ranks,
    label: str,
    tag: int = EXCHANGE,
) -> Pending:
    """Send the 1-D tensors `outgoing[r]` to each rank r; receive r's into those of `incoming[r]`.

    All have the dtype and device of `like`. Both ranks of a pair know their number, order and
    lengths; empty tensors are not sent, and a rank may be left out if it gets, or sends, none. No
    tensor may be read or written until the wait has returned.
    """
    if ranks.size == 1:
        for place, piece in zip(incoming.get(0, ()), outgoing.get(0, ()), strict=True):
            place.copy_(piece)
        return finished(label)
    return transport_of(like, ranks).exchange(outgoing, incoming, like, ranks, label, tag)


def start_scatter(full: Tensor, source: int, ranks: Ranks, label: str) -> Pending:
    """Fill this rank's even slice of 1-D `full` from `source`; other slices may be filled, too.

    On an accelerator a broadcast takes `source` no longer, and needs no call for each rank.
    """
    if not ranks.exchanges_in_pairs(full.device):
        broadcast_(full, source, ranks, label)
        return finished(label)
    outgoing: Pieces = {}
    incoming: Pieces = {source: [slice_of(full, ranks.rank, ranks)]}
    if ranks.rank == source:
        outgoing, incoming = {other: [slice_of(full, other, ranks)] for other in ranks.others}, {}
    return start_exchange_in_pieces(outgoing, incoming, full, ranks, label, SPREAD)


def start_send(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Pending:
    """Send a contiguous tensor to rank `other` of `ranks`; it must stay until the wait is over.

    On the host messages are matched by their order within a tag, on an accelerator by their order
    alone: the caller must know by their contents which ones they are.
    """
    if tensor.device.type == "cpu":
        works = exchange("send", tensor, [(tensor, other)], [], ranks, tag, label, "")
    else:
        works = [labelled(label, functions.isend, as_bytes(tensor), None, ranks.group, 0, other)]
    return Pending(label, works)


def start_receive(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Pending:
    """Fill a contiguous tensor with a message of rank `other` of `ranks`."""
    if tensor.device.type == "cpu":
        works = exchange("recv", tensor, [], [(tensor, other)], ranks, tag, label, "")
    else:
        works = [labelled(label, functions.irecv, as_bytes(tensor), None, ranks.group, 0, other)]
    return Pending(label, works)


def broadcast_(tensor: Tensor, source: int, ranks: Ranks, label: str) -> None:
    """Give every rank `source`'s values of `tensor`, in place."""
    if tensor.is_contiguous():
        start_broadcast(tensor, source, ranks, label).wait()
        return
    packed = tensor.contiguous()
    start_broadcast(packed, source, ranks, label).wait()
    tensor.copy_(packed)


def start_broadcast(tensor: Tensor, source: int, ranks: Ranks, label: str) -> Pending:
    """Begin to give every rank `source`'s values of a contiguous tensor, in place.

    `source` must not change them until the wait is over.
    """
    if ranks.size == 1 or tensor.numel() == 0:
        return finished(label)
    if ranks.size == 2 and ranks.exchanges_in_pairs(tensor.device):
        way = [(tensor, 1 - ranks.rank)]
        leaving, coming = (way, []) if ranks.rank == source else ([], way)
        works = exchange("broadcast", tensor, leaving, coming, ranks, SPREAD, label)
    else:
        group = ranks.group_for(tensor)
        works = [labelled(label, functions.broadcast, as_bytes(tensor), None, group, True, source)]
    return Pending(label, works)


def sum_(tensor: Tensor, ranks: Ranks, label: str) -> None:
    """Replace a small tensor by its sum over all ranks."""
    _small_reduction(tensor, dist.ReduceOp.SUM, ranks, label)


def max_(tensor: Tensor, ranks: Ranks, label: str) -> None:
    """Replace a small tensor by its element-wise maximum over all ranks."""
    _small_reduction(tensor, dist.ReduceOp.MAX, ranks, label)


def gather_objects(value: object, ranks: Ranks) -> list[Any]:
    """Return every rank's picklable `value`, by rank. For start-up and errors: it is slow."""
    if ranks.size == 1:
        return [value]
    values: list[Any] = [None] * ranks.size
    labelled(_OBJECTS, functions.all_gather_object, values, value, ranks.host_group)
    return values


def gather_objects_at_first(value: object, ranks: Ranks) -> list[Any]:
    """Gather objects on the first rank alone; the others get an empty list."""
    if ranks.size == 1:
        return [value]
    values: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
    labelled(_OBJECTS, functions.gather_object, value, values, None, ranks.host_group, 0)
    return values or []


def gather_codes(code: int, ranks: Ranks, label: str = _CODES) -> list[int]:
    """Return every rank's integer, by rank: one small exchange on the host, two if they differ."""
    return gather_codes_and_least(code, 0, ranks, label)[0]


def gather_codes_and_least(
    code: int, count: int, ranks: Ranks, label: str
) -> tuple[list[int], int]:
    """Gather codes as `gather_codes`, and the least of every rank's `count`."""
    if ranks.size == 1:
        return [code], count
    least = None
    if ranks.size > 2:
        # Usually all are equal, which the largest and the smallest show in log(size) messages.
        bounds = torch.tensor([code, -code, -count])
        _small_reduction(bounds, dist.ReduceOp.MAX, ranks, label, _CODES)
        largest, smallest, least = int(bounds[0]), -int(bounds[1]), -int(bounds[2])
        if largest == smallest:
            return [code] * ranks.size, least
    answers = torch.empty(ranks.size, 2, dtype=torch.int64)
    answers[ranks.rank] = torch.tensor([code, count])
    pending = start_all_gather(answers.view(-1), ranks, _CODES, CODE)
    pending.label = label
    pending.wait()
    return answers[:, 0].tolist(), int(answers[:, 1].min()) if least is None else least


def _small_reduction(
    tensor: Tensor,
    operation: dist.ReduceOp.RedOpType,
    ranks: Ranks,
    label: str,
    purpose: str | None = None,
) -> None:
    if ranks.size == 1:
        return
    few = ranks.size <= _FEW_RANKS and tensor.nbytes <= _FEW_BYTES
    if not (few and tensor.device.type == "cpu"):
        labelled(label, functions.all_reduce, tensor, operation, ranks.group_for(tensor))
        return
    # Every rank receives each value, and reduces in rank order: the same bits on all.
    values = torch.stack([tensor] * ranks.size)
    leaving = [(values[ranks.rank], other) for other in ranks.others]
    coming = [(values[other], other) for other in ranks.others]
    works = exchange("all_reduce", tensor, leaving, coming, ranks, SMALL, label, purpose)
    Pending(label, works).wait()
    tensor.copy_(values.sum(0) if operation == dist.ReduceOp.SUM else values.amax(0))
