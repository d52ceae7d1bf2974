"""The only raw collective calls of the library.

On a CPU, tensors travel in pairs: each rank sends every other one just the slice it needs and does
the arithmetic itself, in float32 whatever the wire carries. On an accelerator the backend's own
collectives do the same work. Both give a *mean* over the ranks, divided before it is rounded to a
16-bit dtype, so that averaging cannot overflow where the values themselves do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.ranks import Ranks
from hadal.errors import CommunicationError

# torch 2.13 renamed these; the library supports 2.11 too.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Sends in pairs are matched by order within a tag: what is started in its own order has its own
# tag.
_REDUCE, _GATHER, _SPREAD, _CODE, _EXCHANGE = 11, 12, 13, 14, 15

# Elements that are summed at a time: two float32 blocks of this length stay in a core's L2 cache.
_BLOCK_NUMEL = 1 << 16


class _Work(Protocol):
    def wait(self) -> Any: ...


def _nothing() -> None:
    return None


@dataclass
class Pending:
    """A started collective, in one phase or several."""

    label: str
    works: Sequence[_Work] = ()
    then: Callable[[], Pending | None] = _nothing
    done: bool = field(default=False, init=False)
    _watch: _Watch | None = field(default=None, init=False)

    def advance(self) -> None:
        """Wait for the present phase, do its arithmetic, and start the next one if there is one."""
        if self.done:
            return
        try:
            if self._watch is None:
                _wait_for(self.works)
            else:
                self._watch.join()
            following = self.then()
        except (RuntimeError, dist.DistError) as error:
            raise _failure(self.label, error) from error
        self._watch = None
        if following is None:
            self.done = True
            self.works, self.then = (), _nothing
        else:
            self.works, self.then = following.works, following.then

    def arrives_within(self, seconds: float) -> bool:
        """Whether the present phase's values are here within `seconds`.

        For whoever must not wait for a rank that may be waiting for him.
        """
        if self._watch is None:
            self._watch = _Watch(self.works)
        return self._watch.ended.wait(seconds)

    def wait(self) -> None:
        """Wait for all phases."""
        while not self.done:
            self.advance()


class _Watch:
    """A thread that waits for works: gloo's cannot be asked, and can be waited for only once."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self.ended = threading.Event()
        self._works = works
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            _wait_for(self._works)
        except RuntimeError as error:
            self._error = error
        self.ended.set()

    def join(self) -> None:
        """Wait for the end, and raise what the works raised."""
        self.ended.wait()
        if self._error is not None:
            raise self._error


def _wait_for(works: Sequence[_Work]) -> None:
    for work in works:
        work.wait()


def slice_of(full: Tensor, rank: int, ranks: Ranks) -> Tensor:
    """The even cut of the 1-D `full` that belongs to `rank`."""
    numel = full.numel() // ranks.size
    return full[rank * numel : (rank + 1) * numel]


def start_all_gather(full: Tensor, ranks: Ranks, label: str, tag: int = _GATHER) -> Pending:
    """Fill the slices of 1-D `full` from their ranks; mine must already be in its place."""
    if ranks.size == 1:
        return _finished(label)
    mine = slice_of(full, ranks.rank, ranks)
    if not ranks.exchanges_in_pairs(full.device):
        return Pending(label, [_all_gather(full, mine, group=ranks.group, async_op=True)])
    works: list[_Work] = []
    for other in ranks.others:
        works.append(_send(mine, other, ranks, tag, label))
        works.append(_receive(slice_of(full, other, ranks), other, ranks, tag, label))
    return Pending(label, works)


def start_reduce_scatter(
    full: Tensor, out: Tensor, ranks: Ranks, wire: torch.dtype, accumulate: bool, label: str
) -> Pending:
    """Put the mean over all ranks of my slice of 1-D `full` into `out` (or add it to `out`).

    `out` may be my slice of `full` itself. `full` must not be touched until the wait is over. The
    values travel in dtype `wire`.
    """
    if ranks.size == 1:
        return Pending(label, then=lambda: mean_into(out, [full], accumulate))
    sent = full if full.dtype == wire else full.to(wire)
    if not ranks.exchanges_in_pairs(full.device):
        mean = torch.empty(out.numel(), dtype=wire, device=out.device)
        work = _reduce_scatter(mean, sent, op=dist.ReduceOp.AVG, group=ranks.group, async_op=True)
        return Pending(label, [work], lambda: mean_into(out, [mean], accumulate))
    works: list[_Work] = []
    pieces = [slice_of(sent, ranks.rank, ranks)]
    for other in ranks.others:
        works.append(_send(slice_of(sent, other, ranks), other, ranks, _REDUCE, label))
        pieces.append(torch.empty_like(pieces[0]))
        works.append(_receive(pieces[-1], other, ranks, _REDUCE, label))
    return Pending(label, works, lambda: mean_into(out, pieces, accumulate))


def start_all_reduce(full: Tensor, ranks: Ranks, wire: torch.dtype, label: str) -> Pending:
    """Replace 1-D `full` by its mean over all ranks, the same bits on each."""
    mine = slice_of(full, ranks.rank, ranks)
    if ranks.size == 1:
        return _finished(label)
    pending = start_reduce_scatter(full, mine, ranks, wire, accumulate=False, label=label)
    mean = pending.then

    def spread() -> Pending:
        mean()
        return start_all_gather(full, ranks, label, _SPREAD)

    pending.then = spread
    return pending


def mean_into(out: Tensor, pieces: Sequence[Tensor], accumulate: bool) -> None:
    """Put the mean of the 1-D `pieces` into `out`, or add it to what `out` holds.

    Summed in float32 (float64 for float64) and rounded once. `out` may be one of the pieces.
    """
    if len(pieces) == 1 and not accumulate:
        if out.data_ptr() != pieces[0].data_ptr():
            out.copy_(pieces[0])
        return
    if _is_pair(out, pieces) and not accumulate:
        # One pass where it is most often asked for: torch computes 16-bit lerp in float32.
        torch.lerp(pieces[0], pieces[1], 0.5, out=out)
        return
    exact = torch.promote_types(torch.float32, out.dtype)
    block = min(_BLOCK_NUMEL, out.numel()) if out.device.type == "cpu" else out.numel()
    total = torch.empty(block, dtype=exact, device=out.device)
    for start in range(0, out.numel(), max(block, 1)):
        target = out[start : start + block]
        part = total[: target.numel()]
        part.copy_(pieces[0][start : start + block])
        for piece in pieces[1:]:
            part.add_(piece[start : start + block])
        if len(pieces) > 1:
            part.mul_(1.0 / len(pieces))
        if accumulate:
            part.add_(target)
        target.copy_(part)


def _is_pair(out: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Whether the mean is that of two 16-bit tensors in their own dtype."""
    alike = all(piece.dtype == out.dtype for piece in pieces)
    return len(pieces) == 2 and alike and out.dtype in (torch.bfloat16, torch.float16)


def start_exchange(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], ranks: Ranks, label: str
) -> Pending:
    """Send 1-D `outgoing[r]` to each rank r, and put what r sends here into 1-D `incoming[r]`.

    All are of one dtype, on one device. Both sides know the lengths; what is empty does not travel.
    None of them may be touched until the wait is over.
    """
    if ranks.size == 1:
        incoming[0].copy_(outgoing[0])
        return _finished(label)
    if not ranks.exchanges_in_pairs(outgoing[0].device):
        return _start_all_to_all(outgoing, incoming, ranks, label)
    incoming[ranks.rank].copy_(outgoing[ranks.rank])
    works: list[_Work] = []
    for other in ranks.others:
        if outgoing[other].numel():
            works.append(_send(outgoing[other], other, ranks, _EXCHANGE, label))
        if incoming[other].numel():
            works.append(_receive(incoming[other], other, ranks, _EXCHANGE, label))
    return Pending(label, works)


def _start_all_to_all(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], ranks: Ranks, label: str
) -> Pending:
    sent = torch.cat(list(outgoing))
    lengths = [one.numel() for one in incoming]
    found = sent.new_empty(sum(lengths))
    work = dist.all_to_all_single(
        found, sent, lengths, [one.numel() for one in outgoing], ranks.group, async_op=True
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
    works: list[_Work] = []
    if not ranks.exchanges_in_pairs(tensor.device) or ranks.size > 2:
        group = ranks.group_for(tensor)
        works.append(dist.broadcast(tensor, group=group, group_src=source, async_op=True))
    elif ranks.rank == source:
        works.append(_send(tensor, 1 - source, ranks, _SPREAD, label))
    else:
        works.append(_receive(tensor, source, ranks, _SPREAD, label))
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
    dist.all_gather_object(values, value, group=ranks.host_group)
    return values


def gather_codes(code: int, ranks: Ranks) -> list[int]:
    """Every rank's whole number, by rank: one small exchange on the host, two where they differ."""
    label = "an agreement between ranks"
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
    works: list[_Work] = []
    for other in ranks.others:
        works.append(_send(codes[ranks.rank : ranks.rank + 1], other, ranks, _CODE, label))
        works.append(_receive(codes[other : other + 1], other, ranks, _CODE, label))
    Pending(label, works).wait()
    return [int(found) for found in codes]


def barrier() -> None:
    """Wait until every rank of the world has come here."""
    if dist.is_initialized():
        dist.barrier()


def _finished(label: str) -> Pending:
    pending = Pending(label)
    pending.done = True
    return pending


def _send(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> _Work:
    try:
        work = dist.isend(_as_bytes(tensor), group=ranks.host_group, group_dst=other, tag=tag)
    except RuntimeError as error:
        raise _failure(label, error) from error
    assert work is not None  # this rank is in the group
    return work


def _receive(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> _Work:
    try:
        work = dist.irecv(_as_bytes(tensor), group=ranks.host_group, group_src=other, tag=tag)
    except RuntimeError as error:
        raise _failure(label, error) from error
    assert work is not None  # this rank is in the group
    return work


def _failure(label: str, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"{label} failed: {error}. Another rank died or waits elsewhere; its own message tells"
        " more."
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    # Values are carried, not added, so every dtype travels alike.
    return tensor.detach().view(torch.uint8) if tensor.dim() else tensor.detach()


def _small_reduction(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, ranks: Ranks, label: str
) -> None:
    if ranks.size == 1:
        return
    try:
        dist.all_reduce(tensor, op=operation, group=ranks.group_for(tensor))
    except (RuntimeError, dist.DistError) as error:
        raise _failure(label, error) from error
