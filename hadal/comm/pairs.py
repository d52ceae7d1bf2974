"""Sends between two ranks: tensors on the host, in pairs.

Tests: tests/comm/test_collectives.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.comms_log import opened
from hadal.comm.cross_memory import Ended
from hadal.comm.ranks import Ranks
from hadal.comm.start import collective_timeout_s
from hadal.comm.works import Letter, Work, failure


class _Start(Protocol):
    """A function that starts one send or receive between two ranks."""

    def __call__(self, tensor: Tensor, other: int, ranks: Ranks, *, tag: int) -> Work: ...


def exchange(
    operation: str,
    message: Tensor | Sequence[Tensor],
    leaving: Sequence[tuple[Tensor, int]],
    coming: Sequence[tuple[Tensor, int]],
    ranks: Ranks,
    tag: int,
    label: str,
) -> list[Work]:
    """Start the sends and receives, (tensor, rank) each, that make up one collective of all ranks.

    The log counts them as one call of `operation`, of a `message` as `hadal.comm.bandwidth` has it.
    """
    record = opened(operation, message, ranks.group, label)
    ends: Sequence[Callable[[], None] | None] = [None] * (len(leaving) + len(coming))
    if record is not None:
        record.sent = sum(tensor.nbytes for tensor, _ in leaving)
        ends = record.parts(len(ends))
    sent = [
        _begun(_start_send, tensor, other, ranks, tag, label, end)
        for (tensor, other), end in zip(leaving, ends, strict=False)
    ]
    received = [
        _begun(_start_receive, tensor, other, ranks, tag, label, end)
        for (tensor, other), end in zip(coming, ends[len(leaving) :], strict=True)
    ]
    return [*received, *sent]


def _begun(
    start: _Start,
    tensor: Tensor,
    other: int,
    ranks: Ranks,
    tag: int,
    label: str,
    ended: Callable[[], None] | None,
) -> Work:
    """Start a send or receive whose faults name the other rank."""
    number = ranks.numbers[other]
    try:
        work = start(_as_bytes(tensor), other, ranks, tag=tag)
    except RuntimeError as error:
        raise failure(label, error, f"with rank {number}") from error
    if ended is not None and isinstance(work, Ended):
        work.then(ended)
    return Letter(work, number, ended)


def _start_send(tensor: Tensor, other: int, ranks: Ranks, *, tag: int) -> Work:
    circle = ranks.circle
    neighbour = circle.neighbours.get(other)
    if neighbour is not None:
        return neighbour.send(tensor, circle.group, tag, collective_timeout_s())
    work = dist.isend(tensor, group=ranks.host_group, group_dst=other, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def _start_receive(tensor: Tensor, other: int, ranks: Ranks, *, tag: int) -> Work:
    circle = ranks.circle
    neighbour = circle.neighbours.get(other)
    if neighbour is not None:
        return neighbour.receive(tensor, circle.group, tag, collective_timeout_s())
    work = dist.irecv(tensor, group=ranks.host_group, group_src=other, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def _as_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()  # it is read from its first byte on
    # Values are copied, not added, so every dtype is sent in the same way.
    # 1-D, as a dimension of one element may have any stride.
    return tensor.detach().view(-1).view(torch.uint8)
