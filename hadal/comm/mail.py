"""Messages from one rank to another that only these two know of.

Tests: tests/pipeline/test_executor.py
"""

from __future__ import annotations

from torch import Tensor

from hadal.comm import functions
from hadal.comm.functions import labelled
from hadal.comm.pairs import exchange
from hadal.comm.pending import Pending
from hadal.comm.ranks import Ranks
from hadal.comm.works import Work


def start_send(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Pending:
    """Send a contiguous tensor to rank `other` of `ranks`; it must stay until the wait is over.

    On the host messages are matched by their order within a tag, on an accelerator by their order
    alone.
    """
    works: list[Work]
    if tensor.device.type == "cpu":
        works = exchange("send", tensor, [(tensor, other)], [], ranks, tag, label)
    else:
        works = [labelled(label, functions.isend, tensor, None, ranks.group, 0, other)]
    return Pending(label, works)


def start_receive(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Pending:
    """Fill a contiguous tensor with a message of rank `other` of `ranks`."""
    works: list[Work]
    if tensor.device.type == "cpu":
        works = exchange("recv", tensor, [], [(tensor, other)], ranks, tag, label)
    else:
        works = [labelled(label, functions.irecv, tensor, None, ranks.group, 0, other)]
    return Pending(label, works)
