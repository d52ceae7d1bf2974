"""Estimates of the memory that model states take, before anything is trained: pure arithmetic.

For Adam under bf16 or fp16, a parameter costs 2 bytes as a weight, 2 as a gradient and 12 for the
optimizer (fp32 master and two moments), each kind divided by the ranks where the stage cuts it
(Rajbhandari 2020). In fp32 weights are their own masters: 4, 4 and 8. Activations and the buckets
under way come on top; `additional_buffer_factor` leaves room for them. Host memory is what building
the model takes: at its peak, where every process of a node builds it whole, in fp32, before
`initialize` (with `zero.Init`: its shard, and the largest layer).

Nothing rests on the host or on disk: offload is not built yet, so no row of a table counts on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

_GB = 1e9
_FP32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one parameter as a weight, as a gradient and in the optimizer."""

    weight: int
    gradient: int
    optimizer: int


# fp32 master and two moments beside 16-bit weights and gradients; in fp32 weights are masters.
HALF = Cost(2, 2, 12)
FULL = Cost(4, 4, 8)


@dataclass(frozen=True, slots=True)
class Job:
    """How many devices share the model states."""

    devices_per_node: int = 1
    nodes: int = 1

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True, slots=True)
class Model:
    """Elements of a model's parameters, each counted once."""

    trained: int
    frozen: int = 0
    largest: int = 0
    """Of them, those that one module owns itself, at most."""

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.trained + self.frozen


def counted(model: nn.Module) -> Model:
    """Count a model's parameters; their values are not looked at."""
    numels = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    own = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return Model(
        trained=sum(numel for numel, is_trained in numels if is_trained),
        frozen=sum(numel for numel, is_trained in numels if not is_trained),
        largest=max(own, default=0),
    )


def device_nbytes(stage: int, model: Model, job: Job, cost: Cost = HALF) -> int:
    """Bytes of model states on one device at a stage, within 1 % (padding)."""
    n = job.devices
    parts = (
        (cost.weight, model.numel, n if stage >= 3 else 1),
        (cost.gradient, model.trained, n if stage >= 2 else 1),
        (cost.optimizer, model.trained, n if stage >= 1 else 1),
    )
    return sum(nbytes * math.ceil(numel / cut) for nbytes, numel, cut in parts)


def host_nbytes(model: Model, job: Job, *, born_sharded: bool) -> int:
    """Bytes on one node's host while the model is built, in fp32, by every process of the node."""
    if born_sharded:
        rest = math.ceil(model.numel / job.devices) + model.largest
        return _FP32_NBYTES * job.devices_per_node * rest
    return _FP32_NBYTES * job.devices_per_node * model.numel


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ZeRO-2 takes to train `model`, for each node and device.

    Args:
        model: its parameters are counted, and not touched; frozen ones cost their weights only.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero2(counted(model), job, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero2_model_states_mem_needs_all_live`, for a number of parameters alone."""
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero2(Model(total_params), job, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ZeRO-3 takes to train `model`, for each node and device.

    Args:
        model: its parameters are counted, and not touched; frozen ones cost their weights only.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero3(counted(model), job, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, for numbers of parameters alone."""
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero3(Model(total_params, 0, largest_layer_params), job, additional_buffer_factor)


def _print_zero2(model: Model, job: Job, factor: float) -> None:
    host = factor * host_nbytes(model, job, born_sharded=False)
    rows = [
        _Row(host, device_nbytes(2, model, job, cost), precision) for precision, cost in _PRECISIONS
    ]
    _print("ZeRO-2", model, job, rows)


def _print_zero3(model: Model, job: Job, factor: float) -> None:
    rows = []
    for precision, cost in _PRECISIONS:
        # In its turn the largest layer is whole, and so is its gradient.
        whole = (cost.weight + cost.gradient) * model.largest if job.devices > 1 else 0
        device = device_nbytes(3, model, job, cost) + whole
        for born_sharded in (True, False):
            host = factor * host_nbytes(model, job, born_sharded=born_sharded)
            options = f"{precision}, {'' if born_sharded else 'without '}zero.Init"
            rows.append(_Row(host, device, options))
    _print("ZeRO-3, with the largest layer whole,", model, job, rows)


_PRECISIONS: Sequence[tuple[str, Cost]] = (("bf16 or fp16", HALF), ("fp32", FULL))


@dataclass(frozen=True, slots=True)
class _Row:
    host_nbytes: float
    device_nbytes: float
    options: str


def _millions(numel: int) -> str:
    return f"{numel / 1e6:.1f} M"


def _print(title: str, model: Model, job: Job, rows: Iterable[_Row]) -> None:
    frozen = f" ({_millions(model.frozen)} of them frozen)" if model.frozen else ""
    lines = [
        f"Model states of {_millions(model.numel)} parameters{frozen} under {title}",
        f"with Adam, on {job.nodes} x {job.devices_per_node} devices; activations come on top.",
        "  host, per node | per device     | options",
    ]
    for row in rows:
        host, device = row.host_nbytes / _GB, row.device_nbytes / _GB
        lines.append(f"  {host:11.2f} GB | {device:11.2f} GB | {row.options}")
    print("\n".join(lines))  # noqa: T201 - a table for people is what was asked for
