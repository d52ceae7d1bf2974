"""What one rank sends to another: tensors on the host, in pairs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.pending import Work, failure
from hadal.comm.ranks import Ranks
from hadal.comm.start import collective_timeout_s
from hadal.comm.watchdog import Letter


def send(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Work:
    """Begin to give another rank a contiguous tensor; what has one tag arrives in its order."""
    try:
        return Letter(_start_send(_as_bytes(tensor), other, ranks, tag=tag), other)
    except RuntimeError as error:
        raise failure(label, error) from error


def receive(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Work:
    """Begin to fill a contiguous tensor with what another rank sends."""
    try:
        return Letter(_start_receive(_as_bytes(tensor), other, ranks, tag=tag), other)
    except RuntimeError as error:
        raise failure(label, error) from error


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
    # Values are carried, not added, so every dtype travels alike.
    return tensor.detach().view(torch.uint8) if tensor.dim() else tensor.detach()
