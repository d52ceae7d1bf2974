"""The functions of `deepspeed.comm` whose arguments differ from those of `hadal.comm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import torch
from torch import Tensor, nn

from hadal import comm
from hadal.comm import Ranks, ReduceOp, Row
from hadal.comm.codecs import Blockwise, Sign
from hadal.comm.coded import CompressedMean, Messages, Owed, start_coded_reduce_scatter
from hadal.comm.comms_log import algorithm_bandwidth, bus_bandwidth, comms_log as _log
from hadal.comm.start import DEFAULT_PORT
from hadal.compat.accelerator import get_accelerator
from hadal.units import shown_binary


def init_distributed(  # noqa: PLR0913 - the signature is DeepSpeed's
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group, unless one exists: see `hadal.init_distributed`.

    MPI's variables are read if they are set; `config` is ignored.
    """
    if dist_init_required is False:
        return
    given = {} if timeout is None else {"timeout": timeout}
    comm.init_distributed(
        dist_backend,
        distributed_port,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        **given,
    )


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    """Call `hadal.comm.all_gather_into_tensor`."""
    return comm.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Call `hadal.comm.reduce_scatter_tensor`."""
    return comm.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's slice of the mean of each tensor over the ranks, in one message.

    A tensor is cut into slices of equal length, of which the last may be shorter or empty.
    """
    ranks, mine = comm.get_world_size(group), comm.get_rank(group)
    lengths = [-(-tensor.numel() // ranks) for tensor in tensors]
    padded = [
        nn.functional.pad(tensor.reshape(-1), (0, length * ranks - tensor.numel())).view(ranks, -1)
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    whole = torch.cat(padded, dim=1) / ranks
    found = torch.empty_like(whole[mine])
    comm.reduce_scatter_tensor(found, whole.view(-1), group=group)
    return [
        piece[: max(0, min(length, tensor.numel() - mine * length))]
        for piece, tensor, length in zip(found.split(lengths), tensors, lengths, strict=True)
    ]


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's slice of the mean of each tensor over the ranks, sent in 4 bits.

    Tensors that are 1-D, or no multiple of twice the ranks, are sent as they are.

    Args:
        tensors: the same shapes on all ranks.
        groups: the ranks of each host as `local_<host>`; those with the same place on all hosts as
            `global_<place>`.
    """
    ranks, own = comm.get_world_size(), get_accelerator().device_count()
    host, place = divmod(comm.get_rank(), own)
    hops = [Ranks.of(groups[name]) for name in (f"local_{host}", f"global_{place}")]
    hops = [hop for hop in hops if hop.size > 1] or hops[:1]
    found = []
    for each in tensors:
        if each.dim() == 1 or each.numel() % (2 * ranks):
            found += reduce_scatter_coalesced([each])
            continue
        mean, messages = each.new_empty(each.numel() // ranks), Messages(Blockwise(4, 128))
        start_coded_reduce_scatter(
            each.flatten(), mean, hops, messages, 1 / ranks, False, "all_to_all_quant_reduce"
        ).wait()
        found.append(mean)
    return found


class TorchBackend:
    """torch's process group, for programs that query its collectives."""

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        init_distributed(
            backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )

    is_initialized = staticmethod(comm.is_initialized)
    has_all_gather_into_tensor = staticmethod(comm.has_all_gather_into_tensor)
    has_reduce_scatter_tensor = staticmethod(comm.has_reduce_scatter_tensor)

    def get_all_gather_function(self) -> Callable[..., Any]:
        """Return the gather into one tensor."""
        return comm.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """Return the reduction of one tensor into shards."""
        return comm.reduce_scatter_tensor


# ---- the log of collectives ----------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Start or stop the log; arguments that are not given leave it unchanged.

    `initialize` reads an engine's own configuration, so `deepspeed_config` is not read here.
    """
    now = _log.choice
    is_on = comm.is_logging() if enabled is None else enabled
    comm.start_log(
        now.verbose if verbose is None else verbose,
        now.prof_all if prof_all is None else prof_all,
        now.prof_ops if prof_ops is None else prof_ops,
        now.debug if debug is None else debug,
    )
    if not is_on:
        comm.stop_log()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the log; with `return_dict` return its figures in DeepSpeed's structure."""
    rows = comm.log_summary(show_straggler)
    return _arranged(rows, show_straggler) if return_dict else None


def _arranged(rows: Sequence[Row], show_straggler: bool) -> dict[str, Any]:
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    for row in _by_size(rows):
        summary.setdefault(row.operation, {})[row.nbytes] = {
            "count": row.count,
            "total_latency_ms": row.seconds * 1e3,
            "avg_latency_ms": row.mean_s * 1e3,
            "tput_avg_gbps": row.algorithm_bandwidth * 8e-9,
            "busbw_avg_gbps": row.bus_bandwidth * 8e-9,
            "msg_size_bytes": row.nbytes,
            "msg_size_str": shown_binary(row.nbytes),
        }
    lost = [
        {"operation": row.operation, "msg_size_bytes": row.nbytes, "lost_s": row.lost_s}
        for row in rows
        if row.lost_s
    ]
    return {
        "summary": summary,
        "straggler_analysis": lost if show_straggler else None,
        "metadata": {
            "world_size": comm.get_world_size(),
            "rank": comm.get_rank(),
            "timestamp": datetime.now().isoformat(),
        },
    }


def _by_size(rows: Sequence[Row]) -> list[Row]:
    """Merge rows with the same operation and message size, regardless of group and call site."""
    joined: dict[tuple[str, int], Row] = {}
    for row in rows:
        known = joined.get((row.operation, row.nbytes))
        if known is not None:
            row = replace(
                known,
                count=known.count + row.count,
                total_nbytes=known.total_nbytes + row.total_nbytes,
                seconds=known.seconds + row.seconds,
            )
        joined[row.operation, row.nbytes] = row
    return list(joined.values())


class CommsLogger:
    """This process's log, as programs control it."""

    @property
    def enabled(self) -> bool:
        """True if collectives are recorded."""
        return comm.is_logging()

    @property
    def prof_all(self) -> bool:
        """True if collectives of all kinds are recorded."""
        return self.enabled and _log.choice.prof_all

    @property
    def prof_ops(self) -> list[str]:
        """The kinds that are recorded if not all are."""
        return list(_log.choice.prof_ops)

    def start_profiling_comms(self) -> None:
        """Record all kinds from now on."""
        configure(enabled=True, prof_all=True)

    stop_profiling_comms = staticmethod(comm.stop_log)

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Record these kinds too, and only the named ones."""
        names = dict.fromkeys([*_log.choice.prof_ops, *op_name_list])
        configure(enabled=True, prof_all=False, prof_ops=tuple(names))

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Stop recording these kinds."""
        left = tuple(name for name in _log.choice.prof_ops if name not in op_name_list)
        configure(prof_ops=left)

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Do as `log_summary`, or only return its figures."""
        if print_log or show_straggler:
            return log_summary(show_straggler, return_dict)
        return _arranged(_log.rows(), False) if return_dict else None

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Return the calls of each kind and size: their number, and of each of the latest calls
        the milliseconds and the two bandwidths in Gbit/s.
        """
        found: dict[str, dict[int, list[Any]]] = {}
        for row in _log.rows():
            one = found.setdefault(row.operation, {}).setdefault(row.nbytes, [0, [], [], []])
            one[0] += row.count
            for seconds in row.latencies_s:
                ranks = len(row.ranks)
                one[1].append(seconds * 1e3)
                one[2].append(algorithm_bandwidth(row.nbytes, seconds) * 8e-9)
                one[3].append(bus_bandwidth(row.operation, row.nbytes, seconds, ranks) * 8e-9)
        return found

    def has_data(self) -> bool:
        """Return whether anything was recorded."""
        return bool(_log.rows())

    def get_operation_names(self) -> list[str]:
        """Return the kinds that were recorded."""
        return list(dict.fromkeys(row.operation for row in _log.rows()))

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the figures of one kind by message size; None if it was not recorded."""
        found: dict[int, dict[str, Any]] | None
        found = _arranged(_log.rows(), False)["summary"].get(operation_name)
        return found

    def get_total_operations(self) -> int:
        """Return the number of recorded calls."""
        return sum(row.count for row in _log.rows())

    reset_data = staticmethod(comm.reset_log)


comms_logger = CommsLogger()


class CompressedBackend:
    """The mean over ranks with one bit for each value, as `OneBitAdam` sends its momentum."""

    def __init__(self, mpu: Any = None) -> None:
        find = getattr(mpu, "get_data_parallel_group", None)
        self._ranks = Ranks.of(find()) if find else Ranks.world()
        self.size, self.rank = self._ranks.size, self._ranks.rank

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int = 0
    ) -> Tensor:
        """Replace values by their mean; what one bit loses is kept in both errors for the next.

        `worker_error` has the values padded to a multiple of the ranks, `server_error` its share.
        """
        mean = CompressedMean(worker_error.numel(), self._ranks, Sign(), buffer_m.device)
        mean.owed = Owed(worker_error, server_error)
        worker_error[: buffer_m.numel()].add_(buffer_m.flatten())
        found = torch.empty_like(worker_error)

        def put(start: int, values: Tensor) -> None:
            found[start : start + values.numel()].copy_(values)

        mean.start(put, "compressed_allreduce").wait()
        return buffer_m.copy_(found[: buffer_m.numel()].view_as(buffer_m))
