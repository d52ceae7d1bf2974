"""Sends between two ranks: tensors on the host, in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.comms_log import opened
from hadal.comm.local.cross_memory import Ended, number_of
from hadal.comm.ranks import Ranks
from hadal.comm.start import collective_timeout_s
from hadal.comm.works import PairMessage, Work, failure, in_step, is_from_a_signal

# Tags of messages with a purpose are short. The others are below `_WITH_PURPOSE`.
_TAG_BITS, _PURPOSES, _WITH_PURPOSE = 8, 1 << 22, 1 << 30


@in_step
def exchange(
    operation: str,
    message: Tensor | Sequence[Tensor],
    leaving: Sequence[tuple[Tensor, int]],
    coming: Sequence[tuple[Tensor, int]],
    ranks: Ranks,
    tag: int,
    label: str,
    purpose: str | None = None,
) -> list[Work]:
    """Start the sends and receives, (tensor, rank) each, that make up one collective of all ranks.

    The log counts them as one call of `operation`, of a `message` as `hadal.comm.comms_log` has it.
    Messages meet those of the same `purpose` (None: the label), so a rank that has left one out, in
    an interrupt, gets an error and not the next one's values. Where the label differs between ranks
    the purpose must not.
    """
    number = number_of(label if purpose is None else purpose)
    record = opened(operation, message, ranks.group, label)
    ends: Sequence[Callable[[], None] | None] = [None] * (len(leaving) + len(coming))
    if record is not None:
        record.sent = sum(tensor.nbytes for tensor, _ in leaving)
        ends = record.parts(len(ends))
    moves = [(True, *one) for one in leaving] + [(False, *one) for one in coming]
    works = [
        _begun(sends, tensor, other, ranks, (tag, number), label, end)
        for (sends, tensor, other), end in zip(moves, ends, strict=True)
    ]
    return [*works[len(leaving) :], *works[: len(leaving)]]


def _begun(
    sends: bool,
    tensor: Tensor,
    other: int,
    ranks: Ranks,
    matched: tuple[int, int],
    label: str,
    ended: Callable[[], None] | None,
) -> Work:
    """Start a send or receive whose faults name the other rank."""
    number = ranks.numbers[other]
    try:
        work = _start(sends, as_bytes(tensor), other, ranks, tag=matched[0], purpose=matched[1])
    except RuntimeError as error:
        if is_from_a_signal(error):
            raise
        raise failure(label, error, number) from error
    if ended is not None and isinstance(work, Ended):
        work.then(ended)
    return PairMessage(work, number, ended)


def _start(
    sends: bool, tensor: Tensor, other: int, ranks: Ranks, *, tag: int, purpose: int
) -> Work:
    local_peers = ranks.local_peers
    neighbour = local_peers.neighbours.get(other)
    if neighbour is not None:
        move = neighbour.send if sends else neighbour.receive
        return move(tensor, local_peers.group, tag, purpose, collective_timeout_s())
    group = ranks.host_group
    if purpose:
        # gloo compares nothing but the tag: only part of the purpose has room beside it.
        tag |= _WITH_PURPOSE | purpose % _PURPOSES << _TAG_BITS
    if sends:
        work = dist.isend(tensor, group=group, group_dst=other, tag=tag)
    else:
        work = dist.irecv(tensor, group=group, group_src=other, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a contiguous tensor's bytes, which backends carry for every dtype."""
    assert tensor.is_contiguous()  # it is read from its first byte on
    # 1-D, as a dimension of one element may have any stride.
    return tensor.detach().view(-1).view(torch.uint8)
