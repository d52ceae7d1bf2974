"""Collectives in torch's form: the only raw calls, beside `pairs.py`; both count what they send.

They take what torch's functions of the same names take, in every release that the library runs on
and without warnings about names that torch has changed. One that fails or times out says which it
was, with what, and among whom.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from hadal.comm.call import Call, Group
from hadal.comm.comms_log import Record, numbers_of, opened
from hadal.comm.watchdog import watched
from hadal.comm.works import NamedWork
from hadal.errors import UsageError

# torch 2.13 renamed these; the library supports 2.11 too.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- from all to all -----------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    label: str = "",
) -> Any:
    """Replace a tensor by its sum (or what `op` says) over all ranks."""
    call = Call("all_reduce", tensor, group, label)
    return call.run(dist.all_reduce, tensor, op, group, async_op, is_async=async_op)


def inference_all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """As `all_reduce`."""
    return all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """As `all_reduce` of several tensors of one dtype, in one message."""
    joined = _joined(tensors, "all_reduce_coalesced")
    work = all_reduce(joined, op, group, async_op=True)
    return _ending(work, async_op, lambda: _put(joined, tensors))


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Fill a list with the tensors of all ranks."""
    call = Call("all_gather", tensor_list, group, "")
    return call.run(dist.all_gather, tensor_list, tensor, group, async_op, is_async=async_op)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    label: str = "",
) -> Any:
    """Fill one tensor with those of all ranks, end to end."""
    call = Call("all_gather", output_tensor, group, label)
    return call.run(
        _all_gather, output_tensor, input_tensor, group=group, async_op=async_op, is_async=async_op
    )


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """As `all_gather_into_tensor` of several pairs of tensors of one dtype, in one message."""
    mine = _joined(input_tensors, "all_gather_coalesced")
    size = len(numbers_of(group))
    found = mine.new_empty(size * mine.numel())
    work = all_gather_into_tensor(found, mine, group, async_op=True)

    def put() -> None:
        lengths = [one.numel() for one in input_tensors]
        parts = found.view(size, -1).split(lengths, dim=1)
        for target, part in zip(output_tensors, parts, strict=True):
            target.copy_(part.reshape(target.shape))

    return _ending(work, async_op, put)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Give each rank the sum of the tensors that stand in its place of everybody's list."""
    call = Call("reduce_scatter", input_list, group, "")
    return call.run(dist.reduce_scatter, output, input_list, op, group, async_op, is_async=async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    label: str = "",
) -> Any:
    """Give each rank its even cut of the sum of everybody's tensor."""
    call = Call("reduce_scatter", input, group, label)
    return call.run(
        _reduce_scatter, output, input, op=op, group=group, async_op=async_op, is_async=async_op
    )


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send each rank its tensor of a list, and fill another list with what they send."""
    call = Call("all_to_all", input_tensor_list, group, "")
    return call.run(
        dist.all_to_all,
        output_tensor_list,
        input_tensor_list,
        group,
        async_op,
        is_async=async_op,
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    label: str = "",
) -> Any:
    """As `all_to_all`, of cuts of one tensor: even ones, or of so many rows."""
    call = Call("all_to_all", input, group, label)
    splits = output_split_sizes, input_split_sizes
    return call.run(
        dist.all_to_all_single, output, input, *splits, group, async_op, is_async=async_op
    )


# ---- from one, or to one -------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    label: str = "",
) -> Any:
    """Give all ranks the values of the one numbered `src` in the world, or `group_src` in the
    group.
    """
    call = Call("broadcast", tensor, group, label)
    return call.run(
        dist.broadcast, tensor, src, group, async_op, is_async=async_op, group_src=group_src
    )


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    label: str = "",
) -> Any:
    """Replace a tensor on one rank by its sum over all ranks; what others have is lost."""
    call = Call("reduce", tensor, group, label)
    return call.run(
        dist.reduce, tensor, dst, op, group, async_op, is_async=async_op, group_dst=group_dst
    )


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Fill a list on one rank with the tensors of all."""
    call = Call("gather", tensor, group, "", len(numbers_of(group)))
    return call.run(
        dist.gather, tensor, gather_list, dst, group, async_op, group_dst, is_async=async_op
    )


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Fill the tensor of each rank from a list that one rank has."""
    call = Call("scatter", tensor, group, "", len(numbers_of(group)))
    return call.run(
        dist.scatter, tensor, scatter_list, src, group, async_op, group_src, is_async=async_op
    )


# ---- from one to another -------------------------------------------------------------------------


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Give a tensor to another rank."""
    call = Call("send", tensor, group, "")
    call.run(dist.send, tensor, dst, group, tag, group_dst, is_async=False)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Fill a tensor with what another rank sends, or any; return that rank's number."""
    call = Call("recv", tensor, group, "")
    sender: int = call.run(dist.recv, tensor, src, group, tag, group_src, is_async=False)
    return sender


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """As `send`, of which the end is to be waited for."""
    call = Call("send", tensor, group, "")
    return call.run(dist.isend, tensor, dst, group, tag, group_dst, is_async=True)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """As `recv`, of which the end is to be waited for."""
    call = Call("recv", tensor, group, "")
    return call.run(dist.irecv, tensor, src, group, tag, group_src, is_async=True)


def P2POp(
    op: Callable[..., Any],
    tensor: Tensor,
    peer: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_peer: int | None = None,
) -> dist.P2POp:
    """One `isend` or `irecv` for `batch_isend_irecv`."""
    known: dict[Callable[..., Any], Any] = {isend: dist.isend, irecv: dist.irecv}
    return dist.P2POp(known.get(op, op), tensor, peer, group, tag, group_peer)


def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> list[Any]:
    """Start sends and receives together; return what is to be waited for."""
    records: list[Record | None] = []
    for one in p2p_op_list:
        operation = "send" if one.op is dist.isend else "recv"
        records.append(opened(operation, one.tensor, one.group, ""))
    tensors = [one.tensor for one in p2p_op_list]
    call = Call("send", tensors, p2p_op_list[0].group if p2p_op_list else None, "")
    with call.named(None):
        works = dist.batch_isend_irecv(list(p2p_op_list))
    parts = [record.parts(len(works)) for record in records if record is not None]

    def ended(number: int) -> None:
        for ends in parts:
            ends[number]()

    return [
        NamedWork(work, call.failed, partial(ended, number)) for number, work in enumerate(works)
    ]


# ---- objects -------------------------------------------------------------------------------------


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, *, label: str = ""
) -> None:
    """Fill a list with every rank's picklable object."""
    with _of_objects("all_gather", group, label) as record:
        dist.all_gather_object(object_list, obj, group)
    if record is not None:
        # Each travels as long as the longest.
        record.is_long(len(object_list) * max(map(_pickled, object_list)))


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    *,
    label: str = "",
) -> None:
    """Fill a list on one rank with every rank's picklable object."""
    with _of_objects("gather", group, label) as record:
        dist.gather_object(obj, object_gather_list, dst, group, group_dst)
    if record is not None:
        longest = max(map(_pickled, object_gather_list or [obj]))
        record.is_long(len(numbers_of(group)) * longest)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Give all ranks the picklable objects of one."""
    with _of_objects("broadcast", group, "") as record:
        dist.broadcast_object_list(object_list, src, group, device, group_src)
    if record is not None:
        record.is_long(sum(map(_pickled, object_list)))


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Give each rank its picklable object of a list that one rank has."""
    with _of_objects("scatter", group, "") as record:
        dist.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, group, group_src
        )
    if record is not None:
        known = scatter_object_input_list or scatter_object_output_list[:1]
        record.is_long(len(numbers_of(group)) * max(map(_pickled, known)))


@contextmanager
def _of_objects(operation: str, group: Group, label: str) -> Iterator[Record | None]:
    call = Call(operation, (), group, label)
    record = opened(operation, (), group, label)
    with call.named(record), watched(label or f"{operation} of objects"):
        yield record
    if record is not None:
        record.end()


def _pickled(value: object) -> int:
    return len(pickle.dumps(value))


# ---- nothing but waiting -------------------------------------------------------------------------


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Any = None,
) -> Any:
    """Wait until every rank of a group has come here; without a process group, for nobody."""
    if not dist.is_initialized():
        return None
    call = Call("barrier", (), group, "" if async_op else "a barrier")
    rest = {} if timeout is None else {"timeout": timeout}
    return call.run(dist.barrier, group, async_op, device_ids, is_async=async_op, **rest)


def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """As `barrier`, on a group of gloo's: rank 0 tells who has not come."""
    call = Call("barrier", (), group, "a monitored barrier")
    call.run(dist.monitored_barrier, group, timeout, wait_all_ranks, is_async=False)


# ---- several tensors in one message --------------------------------------------------------------


def _joined(tensors: Sequence[Tensor], name: str) -> Tensor:
    kinds = {(one.dtype, one.device) for one in tensors}
    if len(kinds) != 1:
        raise UsageError(
            f"{name} takes tensors of one dtype on one device, found {sorted(map(str, kinds))};"
            " call it once for each kind"
        )
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def _put(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = joined.split([one.numel() for one in tensors])
    for target, part in zip(tensors, parts, strict=True):
        target.detach().copy_(part.view(target.shape))


def _ending(work: Any, is_async: bool, act: Callable[[], None]) -> Any:
    work.then(act)
    if is_async:
        return work
    work.wait()
    return None
