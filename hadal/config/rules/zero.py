"""Contradictions of sharding, offloading and the averaging of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from hadal.config.rules.precision import offloads_optimizer
from hadal.config.rules.rule import reading
from hadal.config.top_level import Config
from hadal.errors import Fault

_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"
_SCATTER = f"{_ZERO}.reduce_scatter"
_OP = "gradient_allreduce_op"
_DEVICE = f"{_ZERO}.offload_optimizer.device"


@reading(_STAGE, f"{_ZERO}.offload_optimizer.ratio")
def _partial_offload(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    if offload is not None and offload.ratio < 1 and zero.stage != 3:
        yield Fault(
            f"{_ZERO}.offload_optimizer.ratio",
            f"{offload.ratio} needs {_STAGE} 3, got {zero.stage}; set 1 or raise the stage",
        )


@reading(_STAGE, f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer")
def _disk_without_path(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    sections = (
        ("offload_param", zero.offload_param, zero.stage == 3),
        ("offload_optimizer", zero.offload_optimizer, zero.stage > 0),
    )
    for name, offload, acts in sections:
        if acts and offload and offload.device == "nvme" and not offload.nvme_path:
            yield Fault(f"{_ZERO}.{name}.nvme_path", 'required for device "nvme"; add it')


@reading(_STAGE, _DEVICE)
def _disk_at_stage_0(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    if offload is not None and offload.device == "nvme" and zero.stage == 0:
        yield Fault(
            _DEVICE,
            f'"nvme" needs {_STAGE} 1, 2 or 3: at 0 every rank would write all of the state; raise'
            ' the stage, or set "cpu"',
        )


@reading(_STAGE, _SCATTER, _OP, "prescale_gradients", "gradient_predivide_factor")
def _scaling_before_scatter(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    is_mean = config.gradient_allreduce_op == "mean"
    scatters = zero.reduce_scatter and (zero.stage == 3 or (zero.stage == 2 and is_mean))
    if not scatters:
        return
    remedy = f"with {_SCATTER} at stage {zero.stage}; remove it or disable {_SCATTER}"
    if config.prescale_gradients:
        yield Fault("prescale_gradients", f"true cannot be combined {remedy}")
    if config.gradient_predivide_factor != 1.0:
        factor = config.gradient_predivide_factor
        yield Fault("gradient_predivide_factor", f"{factor} cannot be combined {remedy}")


_CODED = f"{_ZERO}.zero_quantized_gradients"


@reading(_STAGE, _SCATTER, _CODED)
def _quantized_gradients(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    if zero.stage >= 2 and zero.zero_quantized_gradients and not zero.reduce_scatter:
        yield Fault(_CODED, f"needs {_SCATTER}; enable that")


@reading(_STAGE, _CODED, f"{_ZERO}.zeropp_loco_param")
def _feedback_of_nothing(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    is_asked = zero.stage >= 2 and zero.zeropp_loco_param is not None
    if is_asked and not zero.zero_quantized_gradients:
        yield Fault(
            f"{_ZERO}.zeropp_loco_param",
            f"needs {_CODED}: otherwise there is no error to feed back; enable it or remove this",
        )


@reading(_OP, _STAGE, f"{_ZERO}.zenflow", "compile.deepcompile")
def _sum(config: Config) -> Iterator[Fault]:
    if config.gradient_allreduce_op != "sum":
        return
    zero = config.zero_optimization
    clashes = (
        (zero.stage == 3, f"{_STAGE} 3"),
        (zero.zenflow is not None, f"{_ZERO}.zenflow"),
        (config.compile.deepcompile, "compile.deepcompile"),
    )
    for is_on, what in clashes:
        if is_on:
            yield Fault(_OP, f'"sum" cannot be combined with {what}; use "mean"')


@reading(_STAGE, "gradient_clipping", f"{_ZERO}.compute_grad_norm", f"{_ZERO}.zenflow", _DEVICE)
def _no_norm(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    if zero.compute_grad_norm:
        return
    clashes = (
        (zero.stage not in (1, 2), f"needs {_STAGE} 1 or 2, got {zero.stage}"),
        (config.gradient_clipping > 0, "needs gradient_clipping 0"),
        (zero.zenflow is not None, f"cannot be combined with {_ZERO}.zenflow"),
        (offloads_optimizer(config), f"cannot be combined with {_ZERO}.offload_optimizer"),
    )
    for is_on, what in clashes:
        if is_on:
            yield Fault(f"{_ZERO}.compute_grad_norm", f"false {what}; change that or leave it out")


@reading(_DEVICE, f"{_ZERO}.zenflow")
def _zenflow_without_offload(config: Config) -> Iterator[Fault]:
    if config.zero_optimization.zenflow is not None and not offloads_optimizer(config):
        yield Fault(f"{_ZERO}.zenflow", f'needs {_DEVICE} "cpu"; add it or leave zenflow out')


_HPZ = f"{_ZERO}.zero_hpz_partition_size"
_MICS = f"{_ZERO}.mics_shard_size"


@reading(_STAGE, _HPZ, _MICS)
def _second_copy_in_block(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    second, block = zero.zero_hpz_partition_size, zero.mics_shard_size
    if zero.stage != 3 or second <= 1 or block <= 0:
        return
    if second >= block:
        yield Fault(
            _HPZ,
            f"{second} saves nothing when weights are gathered over the {block} ranks of"
            f" {_MICS}; remove it, or use a smaller divisor of {block}",
        )
    elif block % second:
        yield Fault(
            _HPZ, f"{second} does not divide {_MICS}, {block}; use a divisor or remove one of them"
        )


_GROUPS = f"{_ZERO}.groups"


@reading(_STAGE, _GROUPS, _MICS)
def _groups_above_the_stage(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    for number, group in enumerate(zero.groups):
        path = f"{_GROUPS}[{number}]"
        if group.stage > zero.stage:
            yield Fault(
                f"{path}.stage",
                f"{group.stage} is above {_STAGE}, {zero.stage}: groups lower the stage of some"
                f" modules; raise {_STAGE}, and lower it for the other modules",
            )
        if not group.modules:
            yield Fault(f"{path}.modules", "names no modules; set patterns, or remove the group")
        if zero.stage == 3 and group.stage < 2 and zero.mics_shard_size > 0:
            yield Fault(
                f"{path}.stage",
                f"{group.stage} is not built yet with {_MICS}; use 2, or remove {_MICS}",
            )


def blocks_that_do_not_fit(config: Config, ranks: int) -> Iterator[Fault]:
    """Yield a fault for each block size that does not divide the ranks that share model states."""
    zero = config.zero_optimization
    sizes = ((_HPZ, zero.zero_hpz_partition_size), (_MICS, zero.mics_shard_size))
    for path, size in sizes:
        if zero.stage == 3 and size > 1 and ranks % size:
            yield Fault(
                path,
                f"{size} does not divide the {ranks} ranks that share the weights; use a divisor"
                " or remove it",
            )


RULES = (
    _partial_offload,
    _disk_at_stage_0,
    _disk_without_path,
    _scaling_before_scatter,
    _quantized_gradients,
    _feedback_of_nothing,
    _sum,
    _no_norm,
    _zenflow_without_offload,
    _second_copy_in_block,
    _groups_above_the_stage,
)
