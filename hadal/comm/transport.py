"""Transport of tensors between ranks: on the host in pairs, on an accelerator by its collectives.

All differences between the two are here. A table has a row for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import functions
from hadal.comm.factors import Factors, for_the_wire, sum_into
from hadal.comm.functions import labelled
from hadal.comm.local.pairs import exchange
from hadal.comm.pending import Pending
from hadal.comm.ranks import Ranks
from hadal.comm.works import Work

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
