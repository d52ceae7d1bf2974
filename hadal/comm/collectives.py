"""The collectives of the mechanism: their sums, their transport, and what they do with tensors.

Reductions mostly compute the *mean* over the ranks, divided before it is rounded to a 16-bit dtype,
so that averaging cannot overflow unless the values themselves do; `Factors` describe the other
reductions. All differences between a host, which sends in pairs, and an accelerator are in two
transports. Messages that only two ranks know of are here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import functions
from hadal.comm.functions import labelled
from hadal.comm.local.pairs import as_bytes, exchange
from hadal.comm.pending import Pending, finished, relayed
from hadal.comm.ranks import Ranks
from hadal.comm.works import Work
from hadal.device import has_values

# Elements that are summed at a time: a block in float32 stays in the cache, and calls are few.
_BLOCK_NUMEL = 1 << 18


# ---- sums over ranks: factors and rounding -------------------------------------------------------


class Factors(NamedTuple):
    """The factors of a sum over ranks, before and after the addition."""

    before: float
    """Factor of the values on each rank, before they are rounded to the wire's dtype."""
    after: float
    """Factor of the sum, before it is rounded to its final dtype."""

    @classmethod
    def of_mean(cls, world_size: int) -> Factors:
        """Return the factors of the plain mean: nothing before, everything after."""
        return cls(1.0, 1.0 / world_size)

    def among(self, copies: int) -> Factors:
        """Return the factors of one of several groups, such that the mean over groups is these."""
        return Factors(self.before, self.after * copies)

    def divided_first(self, world_size: int) -> Factors:
        """Return factors for a sum in fp16, which overflows only if a value does."""
        before = min(self.before, 1.0 / world_size)
        return Factors(before, self.before * self.after / before)

    def at_owner_and_on_arrival(self, is_narrow: bool) -> tuple[float, float]:
        """Split `after` in two: for the owner's sum, and for after it has travelled on.

        A factor that shrinks the sum applies before a narrow dtype carries it, one above 1 after.
        """
        return (1.0, self.after) if is_narrow and self.after > 1.0 else (self.after, 1.0)


def for_the_wire(values: Tensor, before: float, wire: torch.dtype) -> Tensor:
    """Return `values` times `before`, rounded once to `wire`; `values` themselves if they fit."""
    if before == 1.0:
        return values if values.dtype == wire else values.to(wire)
    if values.dtype == wire:
        return values * before
    exact = torch.promote_types(values.dtype, torch.float32)
    return values.to(exact, copy=True).mul_(before).to(wire)


def sum_into(out: Tensor, pieces: Sequence[Tensor], after: float, accumulate: bool) -> None:
    """Put the sum of the 1-D `pieces`, times `after`, into `out`, or add it to what `out` holds.

    Computed in float32 (float64 for float64) and rounded once. `out` may be one of the pieces.
    """
    if len(pieces) == 1 and after == 1.0 and not accumulate:
        if out.data_ptr() != pieces[0].data_ptr():
            out.copy_(pieces[0])
        return
    is_mean = len(pieces) == 2 and after == 0.5 and not accumulate
    has_16_bits = out.dtype in (torch.bfloat16, torch.float16)
    if is_mean and has_16_bits and all(piece.dtype == out.dtype for piece in pieces):
        # One pass in the commonest case: torch computes 16-bit lerp in float32.
        torch.lerp(pieces[0], pieces[1], 0.5, out=out)
        return
    exact = torch.promote_types(torch.float32, out.dtype)
    block = min(_BLOCK_NUMEL, out.numel()) if out.device.type == "cpu" else out.numel()
    is_apart = all(piece.data_ptr() != out.data_ptr() for piece in pieces)
    adds_in_place = not accumulate and is_apart and out.dtype == exact
    # A power of two rounds nothing, so that scaling and adding may be one.
    scales_at_last = accumulate and out.dtype == exact and math.frexp(after)[0] == 0.5
    total = torch.empty(0 if adds_in_place else block, dtype=exact, device=out.device)
    for start in range(0, out.numel(), max(block, 1)):
        target = out[start : start + block]
        part = target if adds_in_place else total[: target.numel()]
        part.copy_(pieces[0][start : start + block])
        for piece in pieces[1:]:
            part.add_(piece[start : start + block])
        if scales_at_last:
            target.add_(part, alpha=after)
            continue
        if after != 1.0:
            part.mul_(after)
        if accumulate:
            part.add_(target)
        if not adds_in_place:
            target.copy_(part)


# ---- transport: on the host in pairs, on an accelerator by its collectives -----------------------

Tensors = Sequence[Tensor]
Pieces = Mapping[int, Sequence[Tensor]]
"""Tensors by the rank that they go to, or come from."""

# Messages in pairs are matched by their order within a tag: collectives with an order of their own
# have a tag of their own.
REDUCE, GATHER, SPREAD, CODE, EXCHANGE, SMALL, HOP = range(11, 18)


class Summands(NamedTuple):
    """The ingredients of a sum: the works to wait for, the tensors to add, a last factor."""

    works: Sequence[Work]
    pieces: Tensors
    after: float


class Collectives:
    """The collectives of an accelerator's backend, which are matched by their order alone."""

    def gather(self, table: Tensor, ranks: Ranks, label: str, tag: int) -> Pending:
        """Fill the rows from their ranks. A wider table's columns are gathered through a copy."""
        whole = table if table.is_contiguous() else table.new_empty(table.shape)
        mine = whole[ranks.rank]
        if whole is not table:
            mine.copy_(table[ranks.rank])
        flat = whole.view(-1)
        work = labelled(label, functions.all_gather_into_tensor, flat, mine, ranks.group, True)
        return Pending(label, [work], None if whole is table else lambda: table.copy_(whole))

    def factors(self, factors: Factors, wire: torch.dtype, ranks: Ranks) -> Factors:
        """Return the factors of a sum whose values travel in `wire`; the backend sums in `wire`."""
        return factors.divided_first(ranks.size) if wire == torch.float16 else factors

    def reduce(self, table: Tensor, factors: Factors, ranks: Ranks, label: str) -> Summands:
        """Start to sum my row; the values have been multiplied with `before` already."""
        operation, after = _backend_operation(*factors, ranks)
        total, group = torch.empty_like(table[0]), ranks.group
        sent = table.view(-1)
        work = labelled(label, functions.reduce_scatter_tensor, total, sent, operation, group, True)
        return Summands([work], [total], after)

    def all_reduce(
        self, full: Tensor, wire: torch.dtype, factors: Factors, ranks: Ranks, label: str
    ) -> Pending:
        """Replace 1-D `full` by its sum, carried in `wire`: the same bits on all ranks."""
        factors = self.factors(factors, wire, ranks)
        operation, after = _backend_operation(*factors, ranks)
        sent = for_the_wire(full, factors.before, wire)
        work = labelled(label, functions.all_reduce, sent, operation, ranks.group, True)
        return Pending(label, [work], lambda: sum_into(full, [sent], after, False))

    def exchange(
        self, out: Pieces, found: Pieces, like: Tensor, ranks: Ranks, label: str, tag: int
    ) -> Pending:
        """Send the 1-D tensors `out[r]` to each rank r; receive r's into `found[r]`."""
        leaving, coming = _lengths(out, ranks.size), _lengths(found, ranks.size)
        sent = torch.cat([like.new_empty(0), *_in_order(out)])
        joined, into = like.new_empty(sum(coming)), _in_order(found)
        work = labelled(
            label, functions.all_to_all_single, joined, sent, coming, leaving, ranks.group, True
        )
        parts = list(joined.split([piece.numel() for piece in into]))
        return Pending(label, [work], lambda: torch._foreach_copy_(into, parts) if into else None)


class Pairs(Collectives):
    """Sends of each slice to the rank that needs it, which does the arithmetic itself.

    It sums in float32 for every wire dtype, and in rank order for every slice: an element's sum
    does not depend on how its buffer is sliced. gloo's own reduce-scatter takes ten times as long.
    """

    def gather(self, table: Tensor, ranks: Ranks, label: str, tag: int) -> Pending:
        """Send my row to all others, and receive theirs."""
        leaving = [(table[ranks.rank], other) for other in ranks.others]
        coming = [(table[other], other) for other in ranks.others]
        return Pending(label, exchange("all_gather", table, leaving, coming, ranks, tag, label))

    def factors(self, factors: Factors, wire: torch.dtype, ranks: Ranks) -> Factors:
        """Return `factors` unchanged: sums are made in float32."""
        return factors

    def reduce(self, table: Tensor, factors: Factors, ranks: Ranks, label: str) -> Summands:
        """Send the others their rows, and receive theirs of mine."""
        mine = table[ranks.rank]
        owns = [rank == ranks.rank for rank in range(ranks.size)]
        pieces = [mine if is_mine else torch.empty_like(mine) for is_mine in owns]
        leaving = [(table[other], other) for other in ranks.others]
        coming = [(pieces[other], other) for other in ranks.others]
        works = exchange("reduce_scatter", table, leaving, coming, ranks, REDUCE, label)
        return Summands(works, pieces, factors.after)

    def all_reduce(
        self, full: Tensor, wire: torch.dtype, factors: Factors, ranks: Ranks, label: str
    ) -> Pending:
        """Sum each slice on its owner, and gather the sums: in `wire`, but no wider than `full`."""
        is_narrow = wire.itemsize < full.dtype.itemsize
        at_owner, on_arrival = factors.at_owner_and_on_arrival(is_narrow)
        carried = torch.empty_like(full, dtype=wire) if is_narrow else full
        table = carried.view(ranks.size, -1)
        sent = for_the_wire(full, factors.before, wire).view(ranks.size, -1)
        works, pieces, _ = self.reduce(sent, factors, ranks, label)

        def spread() -> Pending:
            sum_into(table[ranks.rank], pieces, at_owner, False)
            return self.gather(table, ranks, label, SPREAD)

        pending = Pending(label, works, spread)
        return pending.then(lambda: sum_into(full, [carried], on_arrival, False))

    def exchange(
        self, out: Pieces, found: Pieces, like: Tensor, ranks: Ranks, label: str, tag: int
    ) -> Pending:
        """Send and fill as in `Collectives`; empty tensors are not sent."""
        own = zip(found.get(ranks.rank, ()), out.get(ranks.rank, ()), strict=True)
        for place, piece in own:
            place.copy_(piece)
        leaving, coming = _to_others(out, ranks), _to_others(found, ranks)
        sent = _in_order(out)
        return Pending(label, exchange("all_to_all", sent, leaving, coming, ranks, tag, label))


def _in_order(pieces: Pieces) -> list[Tensor]:
    return [piece for rank in sorted(pieces) for piece in pieces[rank]]


def _lengths(pieces: Pieces, size: int) -> list[int]:
    return [sum(piece.numel() for piece in pieces.get(rank, ())) for rank in range(size)]


def _to_others(pieces: Pieces, ranks: Ranks) -> list[tuple[Tensor, int]]:
    found = [(piece, other) for other in ranks.others for piece in pieces.get(other, ())]
    return [(piece, other) for piece, other in found if piece.numel()]


def _backend_operation(
    before: float, after: float, ranks: Ranks
) -> tuple[dist.ReduceOp.RedOpType, float]:
    """Return the operation for an accelerator's backend, and the factor left for afterwards."""
    if (before, after) == Factors.of_mean(ranks.size):
        return dist.ReduceOp.AVG, 1.0
    return dist.ReduceOp.SUM, after


_PAIRS, _COLLECTIVES = Pairs(), Collectives()


def transport_of(tensor: Tensor, ranks: Ranks) -> Collectives:
    """Return the transport that carries `tensor` from its device."""
    return _PAIRS if ranks.exchanges_in_pairs(tensor.device) else _COLLECTIVES


# ---- the collectives -----------------------------------------------------------------------------

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
    full: Tensor, ranks: Ranks, wire: torch.dtype, label: str, factors: Factors | None = None
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
    outgoing: Pieces, incoming: Pieces, like: Tensor, ranks: Ranks, label: str, tag: int = EXCHANGE
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
    if ranks.size == 1 or tensor.numel() == 0 or not has_values(tensor):
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
        bounds = torch.tensor([code, -code, -count], device="cpu")
        _small_reduction(bounds, dist.ReduceOp.MAX, ranks, label, _CODES)
        largest, smallest, least = int(bounds[0]), -int(bounds[1]), -int(bounds[2])
        if largest == smallest:
            return [code] * ranks.size, least
    answers = torch.empty(ranks.size, 2, dtype=torch.int64, device="cpu")
    answers[ranks.rank] = torch.tensor([code, count], device="cpu")
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
