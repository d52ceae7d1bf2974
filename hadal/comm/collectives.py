"""The collectives of the mechanism.

On a CPU, tensors travel in pairs: each rank sends every other one just the slice it needs and does
the arithmetic itself, in float32 whatever the wire carries. It adds up in the order of the ranks,
whichever slice is its own, so that an element's sum does not depend on how its buffer is cut. On an
accelerator the backend's own collectives do the same work. What is asked for is mostly the *mean*
over the ranks, divided before it is rounded to a 16-bit dtype, so that averaging cannot overflow
where the values themselves do not; `Factors` say what else it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import functions
from hadal.comm.factors import Factors, for_the_wire, sum_into
from hadal.comm.pairs import exchange
from hadal.comm.pending import Pending, Work, at_end, finished, followed_by, relayed
from hadal.comm.ranks import Ranks

# Sends in pairs are matched by order within a tag: what is started in its own order has its own
# tag.
_REDUCE, _GATHER, _SPREAD, _CODE, _EXCHANGE, _SMALL, _HOP = 11, 12, 13, 14, 15, 16, 17

# Ranks and bytes up to which each tells all others what it has, in place of a collective.
_FEW_RANKS, _FEW_BYTES = 8, 4096

_OF_OBJECTS = "an exchange of objects between ranks"


def slice_of(full: Tensor, rank: int, ranks: Ranks) -> Tensor:
    """The even cut of the 1-D `full` that belongs to `rank`."""
    numel = full.numel() // ranks.size
    return full[rank * numel : (rank + 1) * numel]


def start_all_gather(full: Tensor, ranks: Ranks, label: str, tag: int = _GATHER) -> Pending:
    """Fill the slices of 1-D `full` from their ranks; mine must already be in its place."""
    if ranks.size == 1:
        return finished(label)
    mine = slice_of(full, ranks.rank, ranks)
    if not ranks.exchanges_in_pairs(full.device):
        work = functions.all_gather_into_tensor(full, mine, ranks.group, True, label=label)
        return Pending(label, [work])
    slices = [slice_of(full, rank, ranks) for rank in range(ranks.size)]
    return Pending(label, _to_all(mine, slices, full, ranks, tag, label))


def _to_all(
    mine: Tensor,
    places: Sequence[Tensor],
    message: Tensor | Sequence[Tensor],
    ranks: Ranks,
    tag: int,
    label: str,
    operation: str = "all_gather",
) -> list[Work]:
    """Begin to give mine to all others, and to put what each of them has in its place."""
    leaving = [(mine, other) for other in ranks.others]
    coming = [(places[other], other) for other in ranks.others]
    return exchange(operation, message, leaving, coming, ranks, tag, label)


def start_gather_in_pieces(full: Tensor, ranks: Ranks, label: str, numel: int) -> Pending:
    """As `start_all_gather`, at most `numel` elements of `full` at a time, one after the other."""
    piece = max(1, numel // ranks.size)
    if ranks.size == 1 or piece * ranks.size >= full.numel():
        return start_all_gather(full, ranks, label)
    slices = [slice_of(full, rank, ranks) for rank in range(ranks.size)]
    return _start_piece(slices, 0, piece, ranks, label)


def _start_piece(
    slices: Sequence[Tensor], start: int, piece: int, ranks: Ranks, label: str
) -> Pending:
    pending = _start_exchange([one[start : start + piece] for one in slices], ranks, label)
    following = start + piece
    if following >= slices[0].numel():
        return pending
    return followed_by(pending, lambda: _start_piece(slices, following, piece, ranks, label))


def _start_exchange(cuts: Sequence[Tensor], ranks: Ranks, label: str) -> Pending:
    """Fill equally long 1-D tensors from their ranks, wherever they lie."""
    mine = cuts[ranks.rank]
    if not ranks.exchanges_in_pairs(mine.device):
        joined = torch.empty(mine.numel() * ranks.size, dtype=mine.dtype, device=mine.device)
        slice_of(joined, ranks.rank, ranks).copy_(mine)
        pending = start_all_gather(joined, ranks, label)
        return at_end(
            pending, lambda: torch._foreach_copy_(list(cuts), list(joined.split(mine.numel())))
        )
    return Pending(label, _to_all(mine, cuts, cuts, ranks, _GATHER, label))


def start_gather_in_hops(full: Tensor, across: Ranks, inside: Ranks, label: str) -> Pending:
    """As `start_all_gather` over the ranks of several nodes, each byte once into each node.

    First the shards of the ranks `across` nodes that stand where I do in theirs, then what the
    ranks `inside` my node have got. Slices lie by node, and by rank in each.
    """
    nodes = [slice_of(full, node, across) for node in range(across.size)]
    mine = [slice_of(one, inside.rank, inside) for one in nodes]
    if not inside.exchanges_in_pairs(full.device):
        return _start_hops_by_collectives(full, mine, across, inside, label)

    def spread() -> Pending:
        # In an order of its own: other gathers inside the node may have overtaken it.
        pendings = [start_all_gather(one, inside, label, _HOP) for one in nodes]
        return Pending(label, [work for pending in pendings for work in pending.works])

    return relayed(_start_exchange(mine, across, label), spread)


def _start_hops_by_collectives(
    full: Tensor, mine: Sequence[Tensor], across: Ranks, inside: Ranks, label: str
) -> Pending:
    # One call for each hop, however many nodes there are, for a copy at the end: what arrives lies
    # by rank, and by node in each.
    by_rank = torch.empty_like(full)
    row = slice_of(by_rank, inside.rank, inside)
    slice_of(row, across.rank, across).copy_(mine[across.rank])
    # An accelerator waits for the first hop in its own queue, and not the host.
    start_all_gather(row, across, label).wait()

    def put() -> None:
        table = by_rank.view(inside.size, across.size, -1)
        full.view(across.size, inside.size, -1).copy_(table.transpose(0, 1))

    return at_end(start_all_gather(by_rank, inside, label), put)


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
    values travel in dtype `wire`. `factors` make something else than the mean of the sum.
    """
    before, after = factors or Factors.of_mean(ranks.size)
    if ranks.size == 1:
        return Pending(label, then=lambda: sum_into(out, [full], before * after, accumulate))
    sent = for_the_wire(full, before, wire)
    if not ranks.exchanges_in_pairs(full.device):
        operation, after = _backend_operation(before, after, ranks)
        total = torch.empty(out.numel(), dtype=wire, device=out.device)
        work = functions.reduce_scatter_tensor(
            total, sent, operation, ranks.group, True, label=label
        )
        return Pending(label, [work], lambda: sum_into(out, [total], after, accumulate))
    mine = slice_of(sent, ranks.rank, ranks)
    leaving = [(slice_of(sent, other, ranks), other) for other in ranks.others]
    pieces = ranks.by_rank(mine, [torch.empty_like(mine) for _ in ranks.others])
    coming = [(pieces[other], other) for other in ranks.others]
    works = exchange("reduce_scatter", sent, leaving, coming, ranks, _REDUCE, label)
    return Pending(label, works, lambda: sum_into(out, pieces, after, accumulate))


def _backend_operation(
    before: float, after: float, ranks: Ranks
) -> tuple[dist.ReduceOp.RedOpType, float]:
    """What an accelerator's backend does itself, and what is left to multiply with afterwards."""
    if (before, after) == Factors.of_mean(ranks.size):
        return dist.ReduceOp.AVG, 1.0
    return dist.ReduceOp.SUM, after


def start_all_reduce(
    full: Tensor,
    ranks: Ranks,
    wire: torch.dtype,
    label: str,
    factors: Factors | None = None,
) -> Pending:
    """Replace 1-D `full` by its mean over all ranks (or what `factors` say), the same bits on each.

    It travels in dtype `wire` to the rank that adds it up, and from there in `wire` too, but no
    wider than `full` is.
    """
    if ranks.size == 1:
        return finished(label)
    factors = factors or Factors.of_mean(ranks.size)
    is_narrow = wire.itemsize < full.dtype.itemsize
    at_owner, on_arrival = factors.at_owner_and_on_arrival(is_narrow)
    carried = torch.empty_like(full, dtype=wire) if is_narrow else full
    mine = slice_of(carried, ranks.rank, ranks)
    scaled = Factors(factors.before, at_owner)
    pending = start_reduce_scatter(full, mine, ranks, wire, False, label, scaled)

    def spread() -> Pending:
        gather = start_all_gather(carried, ranks, label, _SPREAD)
        if not is_narrow:
            return gather
        return at_end(gather, lambda: sum_into(full, [carried], on_arrival, False))

    return followed_by(pending, spread)


def start_exchange(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    ranks: Ranks,
    label: str,
    tag: int = _EXCHANGE,
) -> Pending:
    """Send 1-D `outgoing[r]` to each rank r, and put what r sends here into 1-D `incoming[r]`.

    All are of one dtype, on one device. Both sides know the lengths; what is empty does not travel.
    None of them may be touched until the wait is over.
    """
    if ranks.size == 1:
        incoming[0].copy_(outgoing[0])
        return finished(label)
    if not ranks.exchanges_in_pairs(outgoing[0].device):
        return _start_all_to_all(outgoing, incoming, ranks, label)
    incoming[ranks.rank].copy_(outgoing[ranks.rank])
    leaving = [(outgoing[other], other) for other in ranks.others if outgoing[other].numel()]
    coming = [(incoming[other], other) for other in ranks.others if incoming[other].numel()]
    return Pending(label, exchange("all_to_all", outgoing, leaving, coming, ranks, tag, label))


def _start_all_to_all(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], ranks: Ranks, label: str
) -> Pending:
    sent = torch.cat(list(outgoing))
    lengths = [one.numel() for one in incoming]
    found = sent.new_empty(sum(lengths))
    leaving = [one.numel() for one in outgoing]
    work = functions.all_to_all_single(
        found, sent, lengths, leaving, ranks.group, True, label=label
    )

    def put() -> None:
        for target, part in zip(incoming, found.split(lengths), strict=True):
            target.copy_(part)

    return Pending(label, [work], put)


def broadcast_(tensor: Tensor, source: int, ranks: Ranks, label: str) -> None:
    """Give every rank `source`'s values of `tensor`, in place."""
    if ranks.size == 1 or tensor.numel() == 0:
        return
    if not tensor.is_contiguous():
        packed = tensor.contiguous()
        broadcast_(packed, source, ranks, label)
        tensor.copy_(packed)
        return
    works: list[Work] = []
    if not ranks.exchanges_in_pairs(tensor.device) or ranks.size > 2:
        group = ranks.group_for(tensor)
        works.append(functions.broadcast(tensor, None, group, True, source, label=label))
    else:
        way = [(tensor, 1 - ranks.rank)]
        leaving, coming = (way, []) if ranks.rank == source else ([], way)
        works += exchange("broadcast", tensor, leaving, coming, ranks, _SPREAD, label)
    Pending(label, works).wait()


def sum_(tensor: Tensor, ranks: Ranks, label: str) -> None:
    """Replace a small tensor by its sum over all ranks."""
    _small_reduction(tensor, dist.ReduceOp.SUM, ranks, label)


def max_(tensor: Tensor, ranks: Ranks, label: str) -> None:
    """Replace a small tensor by its element-wise maximum over all ranks."""
    _small_reduction(tensor, dist.ReduceOp.MAX, ranks, label)


def gather_objects(value: object, ranks: Ranks) -> list[Any]:
    """Every rank's picklable `value`, by rank. For start-up and errors: it is slow."""
    if ranks.size == 1:
        return [value]
    values: list[Any] = [None] * ranks.size
    functions.all_gather_object(values, value, ranks.host_group, label=_OF_OBJECTS)
    return values


def gather_objects_at_first(value: object, ranks: Ranks) -> list[Any]:
    """The same for the first rank alone; the others are given nothing."""
    if ranks.size == 1:
        return [value]
    values: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
    functions.gather_object(value, values, None, ranks.host_group, 0, label=_OF_OBJECTS)
    return values or []


def gather_codes(code: int, ranks: Ranks, label: str = "an agreement between ranks") -> list[int]:
    """Every rank's whole number, by rank: one small exchange on the host, two where they differ."""
    if ranks.size == 1:
        return [code]
    codes = torch.empty(ranks.size, dtype=torch.int64)
    codes[ranks.rank] = code
    if ranks.size > 2:
        # Mostly all are equal, which the largest and the smallest tell in log(size) messages.
        bounds = torch.tensor([code, -code])
        max_(bounds, ranks, label)
        if int(bounds[0]) == -int(bounds[1]):
            return [code] * ranks.size
    places = codes.split(1)
    Pending(label, _to_all(places[ranks.rank], places, codes, ranks, _CODE, label)).wait()
    return [int(found) for found in codes]


def _small_reduction(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, ranks: Ranks, label: str
) -> None:
    if ranks.size == 1:
        return
    few = ranks.size <= _FEW_RANKS and tensor.nbytes <= _FEW_BYTES
    if few and tensor.device.type == "cpu" and ranks.are_neighbours:
        _reduce_among_neighbours(tensor, operation, ranks, label)
        return
    functions.all_reduce(tensor, operation, ranks.group_for(tensor), label=label)


def _reduce_among_neighbours(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, ranks: Ranks, label: str
) -> None:
    """Every rank sees what each has and takes it in the order of ranks: the same bits on all."""
    values = [torch.empty_like(tensor) for _ in range(ranks.size)]
    values[ranks.rank].copy_(tensor)
    mine = values[ranks.rank]
    Pending(label, _to_all(mine, values, tensor, ranks, _SMALL, label, "all_reduce")).wait()
    stacked = torch.stack(values)
    is_sum = operation == dist.ReduceOp.SUM
    tensor.copy_(stacked.sum(0) if is_sum else stacked.amax(0))
