"""Collectives with torch's signatures: with `pairs.py` the only raw calls; both count bytes.

They accept the arguments of torch's functions of the same names, in every supported release and
without warnings about renamed functions. The error of a call that fails or times out names the
collective, its message and its ranks.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from hadal.comm.comms_log import Record, numbers_of, opened
from hadal.comm.watchdog import watched
from hadal.comm.works import (
    Begun,
    NamedWork,
    Queued,
    Used,
    begin,
    failure,
    in_step,
    is_from_a_signal,
    keep_all,
)
from hadal.errors import UsageError

Group = dist.ProcessGroup | None
Given = Callable[[str], Any]
"""A function that finds an argument of a call by its name."""
P = ParamSpec("P")

# Not every rank of a group makes these calls, nor in one order.
_POINT_TO_POINT = ("send", "recv")


@dataclass(slots=True, eq=False)
class Call:
    """One call, as the log and errors name it."""

    operation: str
    tensors: Tensor | Sequence[Tensor]
    group: Group
    label: str
    times: int = 1

    def run(self, function: Callable[..., Any], *args: Any, is_async: bool, **rest: Any) -> Any:
        """Make the call, synchronously or as a work under way."""
        if torch.compiler.is_compiling():
            return function(*args, **rest)
        record = opened(self.operation, self.tensors, self.group, self.label, self.times)
        name = self.label or self.operation
        begun = None if self.operation in _POINT_TO_POINT else begin(self.group, name)
        try:
            if is_async:
                with in_step:
                    work = function(*args, **rest)
                    given = (*args, *rest.values())
                    used = [weakref.ref(one) for one in given if isinstance(one, Tensor)]
                    return self._handed(work, used, record, begun)
            with in_step, watched(name, () if begun is None else (begun,)):
                found = function(*args, **rest)
        except (RuntimeError, dist.DistError) as error:
            if is_from_a_signal(error):
                raise
            raise self.failed(error, record) from error
        if record is not None:
            record.end()
        return found

    def _handed(self, work: Any, used: Used, record: Record | None, begun: Begun | None) -> Any:
        """Return the work for the caller; it names its own fault, unless the caller does."""
        if work is None:
            return work
        if self.label and record is None:
            first = self.tensors if isinstance(self.tensors, Tensor) else self.tensors[0]
            return work if begun is None else Queued(work, begun, first.device, used)
        named = NamedWork(work, self.failed, None if record is None else record.parts(1)[0])
        if self.label:
            named.then(partial(keep_all, used))
        return named

    @contextmanager
    def named(self, record: Record | None) -> Iterator[None]:
        """Name the collective in errors raised inside."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if is_from_a_signal(error):
                raise
            raise self.failed(error, record) from error

    def failed(self, error: Exception, record: Record | None = None) -> Exception:
        """Return the exception to raise if the backend reports `error`."""
        if record is not None:
            record.give_up()
        found = [self.tensors] if isinstance(self.tensors, Tensor) else self.tensors
        nbytes = sum(one.nbytes for one in found) * self.times
        dtype = f" of {found[0].dtype}" if found else ""
        group = self.group if isinstance(self.group, dist.ProcessGroup) else dist.group.WORLD
        name = "" if group is None else f" of the group {group.group_name!r}"
        among = f"{self.operation} of {nbytes} bytes{dtype} among ranks {_shown(self.group)}{name}"
        return failure(self.label or among, error, what=among if self.label else "")


def _shown(group: Group) -> str:
    """Return the ranks as text; of many, the first and the last."""
    numbers = numbers_of(group)
    if len(numbers) > 8:
        return f"[{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}] ({len(numbers)} ranks)"
    return str(list(numbers))


def _reported(
    function: Callable[P, Any],
    operation: str,
    message: str = "tensor",
    *,
    is_for_each: bool = False,
    is_async: bool = False,
) -> Callable[P, Any]:
    """Return a torch function whose calls are logged, watched and named by errors.

    Args:
        function: torch's.
        operation: the kind of collective.
        message: the argument that is the message, as `hadal.comm.comms_log` counts it.
        is_for_each: the message is one such tensor for each rank.
        is_async: each call returns a work, not only one with `async_op`.
    """
    name = function.__name__
    found = _finder(function)

    @wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = partial(found, args, kwargs)
        group, label = given("group"), str(kwargs.pop("label", ""))
        times = len(numbers_of(group)) if is_for_each else 1
        call = Call(operation, given(message), group, label, times)
        returns_work = is_async or bool(given("async_op"))
        # By name: a program may have wrapped torch's own.
        return call.run(getattr(dist, name), *args, is_async=returns_work, **kwargs)

    reported.__module__ = __name__
    return reported


def _of_objects(
    function: Callable[P, Any], operation: str, objects: Callable[[Given], Sequence[object]]
) -> Callable[P, Any]:
    """Do the same for picklable objects; `objects` finds the message in a call's arguments."""
    name = function.__name__
    found = _finder(function)

    @wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = partial(found, args, kwargs)
        group, label = given("group"), str(kwargs.pop("label", ""))
        record = opened(operation, (), group, label)
        call = Call(operation, (), group, label)
        with in_step, call.named(record), watched(label or f"{operation} of objects"):
            getattr(dist, name)(*args, **kwargs)
        if record is not None:
            record.end()
            nbytes = [len(pickle.dumps(one)) for one in objects(given)]
            # Each travels as long as the longest, unless all of them go one way.
            is_one_way = operation == "broadcast"
            record.is_long(sum(nbytes) if is_one_way else len(numbers_of(group)) * max(nbytes))

    reported.__module__ = __name__
    return reported


def _finder(function: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any], str], Any]:
    """Return a function that finds an argument of a call of `function`; None if not given."""
    places = {parameter: place for place, parameter in enumerate(signature(function).parameters)}

    def found(args: Sequence[Any], kwargs: Mapping[str, Any], parameter: str) -> Any:
        place = places.get(parameter, len(args))
        return args[place] if place < len(args) else kwargs.get(parameter)

    return found


def labelled(label: str, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call one of these functions under `label` in the log and in errors."""
    kwargs["label"] = label
    return function(*args, **kwargs)


# ---- tensors -------------------------------------------------------------------------------------

all_reduce = inference_all_reduce = _reported(dist.all_reduce, "all_reduce")
all_gather = _reported(dist.all_gather, "all_gather", "tensor_list")
# torch 2.13 renamed these two; the library supports 2.11 too.
all_gather_into_tensor = _reported(
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "all_gather",
    "output_tensor",
)
reduce_scatter_tensor = _reported(
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    "reduce_scatter",
    "input",
)
reduce_scatter = _reported(dist.reduce_scatter, "reduce_scatter", "input_list")
all_to_all = _reported(dist.all_to_all, "all_to_all", "input_tensor_list")
all_to_all_single = _reported(dist.all_to_all_single, "all_to_all", "input")
broadcast = _reported(dist.broadcast, "broadcast")
reduce = _reported(dist.reduce, "reduce")
gather = _reported(dist.gather, "gather", is_for_each=True)
scatter = _reported(dist.scatter, "scatter", is_for_each=True)
send = _reported(dist.send, "send")
recv = _reported(dist.recv, "recv")
isend = _reported(dist.isend, "send", is_async=True)
irecv = _reported(dist.irecv, "recv", is_async=True)


def P2POp(
    op: Callable[..., Any],
    tensor: Tensor,
    peer: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_peer: int | None = None,
) -> dist.P2POp:
    """Return one `isend` or `irecv` for `batch_isend_irecv`."""
    known: dict[Callable[..., Any], Any] = {isend: dist.isend, irecv: dist.irecv}
    return dist.P2POp(known.get(op, op), tensor, peer, group, tag, group_peer)


def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> list[Any]:
    """Start sends and receives together; return the works to wait for."""
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


all_gather_object = _of_objects(
    dist.all_gather_object, "all_gather", lambda given: given("object_list")
)
gather_object = _of_objects(
    dist.gather_object, "gather", lambda given: given("object_gather_list") or [given("obj")]
)
broadcast_object_list = _of_objects(
    dist.broadcast_object_list, "broadcast", lambda given: given("object_list")
)
scatter_object_list = _of_objects(
    dist.scatter_object_list,
    "scatter",
    lambda given: given("scatter_object_input_list") or given("scatter_object_output_list")[:1],
)


# ---- barriers ------------------------------------------------------------------------------------


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Any = None,
) -> Any:
    """Wait until every rank of a group has come here; return at once without a process group."""
    if not dist.is_initialized():
        return None
    call = Call("barrier", (), group, "" if async_op else "a barrier")
    rest = {} if timeout is None else {"timeout": timeout}
    return call.run(dist.barrier, group, async_op, device_ids, is_async=async_op, **rest)


def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """Wait as `barrier`, on a group of gloo's: rank 0 reports the missing ranks."""
    call = Call("barrier", (), group, "a monitored barrier")
    call.run(dist.monitored_barrier, group, timeout, wait_all_ranks, is_async=False)


# ---- several tensors in one message --------------------------------------------------------------


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce as `all_reduce` several tensors of one dtype, in one message."""
    joined = _joined(tensors, "all_reduce_coalesced")
    work = all_reduce(joined, op, group, async_op=True)
    return _ending(work, async_op, joined, tensors, tensors)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gather as `all_gather_into_tensor` several pairs of tensors of one dtype, in one message."""
    mine = _joined(input_tensors, "all_gather_coalesced")
    size = len(numbers_of(group))
    found = mine.new_empty(size * mine.numel())
    work = all_gather_into_tensor(found, mine, group, async_op=True)

    return _ending(work, async_op, found.view(size, -1), input_tensors, output_tensors)


def _joined(tensors: Sequence[Tensor], name: str) -> Tensor:
    kinds = {(one.dtype, one.device) for one in tensors}
    if len(kinds) != 1:
        raise UsageError(
            f"{name} takes tensors of one dtype on one device, found {sorted(map(str, kinds))};"
            " call it once for each kind"
        )
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def _ending(
    work: Any, is_async: bool, joined: Tensor, sent: Sequence[Tensor], targets: Sequence[Tensor]
) -> Any:
    """Divide what arrives in `joined`, or in its rows, as `sent` was joined."""

    def put() -> None:
        parts = joined.split([one.numel() for one in sent], dim=-1)
        for target, part in zip(targets, parts, strict=True):
            target.detach().copy_(part.reshape(target.shape))

    work.then(put)
    if is_async:
        return work
    work.wait()
    return None
