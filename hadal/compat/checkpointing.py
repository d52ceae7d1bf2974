"""`deepspeed.checkpointing`: recomputed calls, and the options that programs set for them.

DeepSpeed keeps one set of options for a process, and so does this module. `initialize` sets them
from the section `activation_checkpointing`, unless the program has called `configure`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hadal.comm import Ranks, get_world_size, is_initialized
from hadal.comm.mpu import cuts_the_model, tensor_group_of
from hadal.compat.groups import get_tensor_model_parallel_group, get_tensor_model_parallel_rank
from hadal.compat.tools import bwc_tensor_model_parallel_rank
from hadal.config import load_config
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import current_device, random_state, set_random_state
from hadal.errors import UsageError
from hadal.plugins.activation_checkpointing import Recomputation, tell_unshared
from hadal.plugins.activation_checkpointing.function import reseed_parts, seed_parts

_log = logging.getLogger(__name__)


class _State:
    """The options of this process, and the ranks that programs have configured."""

    def __init__(self) -> None:
        self.mpu: Any = None
        self.is_configured = False
        self.recomputation = Recomputation()

    def use(self, options: ActivationCheckpointing) -> None:
        """Set the options for later calls; inputs already stored are unaffected."""
        ranks = None
        if options.partition_activations:
            found = get_tensor_model_parallel_group()
            group = found if self.mpu is None else tensor_group_of(self.mpu)
            ranks = None if group is None else Ranks.of(group)
        tell_unshared(options, ranks)
        self.recomputation = Recomputation(options, ranks)


_state = _State()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how later calls of `checkpoint` store their inputs; all ranks must call it.

    Every call begins with the defaults. A configuration's section `activation_checkpointing` comes
    next, then each argument that is not None.

    Args:
        mpu_: an object that knows this rank's part of the model (Megatron's `parallel_state`);
            None keeps that of an earlier call, or else the engine's.
        deepspeed_config: a dict, the path of a JSON file, or its text.
        partition_activations: shard inputs over the tensor-parallel ranks.
        contiguous_checkpointing: store them in preallocated buffers.
        num_checkpoints: the number of recomputed calls that these have room for.
        checkpoint_in_cpu: store inputs in host memory.
        synchronize: synchronize with the device at the boundaries of each call.
        profile: log the times of each call.

    Raises:
        ConfigError: the configuration has faults.
        UsageError: `contiguous_checkpointing` without `partition_activations` or `num_checkpoints`.
    """
    if mpu_ is not None:
        _state.mpu = mpu_
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    options = ActivationCheckpointing()
    if deepspeed_config is not None:
        options = _section_of(deepspeed_config)
    options = options.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    if options.contiguous_memory_optimization:
        _expect(options.partition_activations, "partition_activations=True")
        _expect(options.number_checkpoints, "num_checkpoints=, the number of recomputed blocks")
    _state.use(options)
    _state.is_configured = True


def _section_of(source: Any) -> ActivationCheckpointing:
    mpu = _state.mpu
    size = int(mpu.get_data_parallel_world_size()) if cuts_the_model(mpu) else None
    world_size = get_world_size() if is_initialized() else 1
    config = load_config(source, world_size=world_size, data_parallel_size=size, allow_unbuilt=True)
    return config.activation_checkpointing


def _expect(value: object, wanted: str) -> None:
    if not value:
        raise UsageError(
            f"deepspeed.checkpointing.configure(contiguous_checkpointing=True) needs {wanted}"
            " too, as arguments or in the section activation_checkpointing; give both, or leave"
            " contiguous_checkpointing out"
        )


def use_section(options: ActivationCheckpointing) -> None:
    """Set the options of an engine's section, unless the program has set its own."""
    if not _state.is_configured:
        _state.use(options)


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _state.is_configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set whether inputs are sharded over the tensor-parallel ranks. All ranks must call it."""
    _change("partition_activations", partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Set the number of recomputed calls that preallocated buffers have room for."""
    _change("number_checkpoints", nlayers)


def _change(name: str, value: Any) -> None:
    _state.use(_state.recomputation.options.model_copy(update={name: value}))


def reset() -> None:
    """Free buffers and host memory; call it between forwards that have no backward."""
    _state.recomputation.reset()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator with `seed` on all ranks, and a state to `fork` per part of the model.

    The mpu passed to `configure`, or else the engine, determines the part that this rank holds.
    """
    seed_parts(seed, _part())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed only the state to `fork`, differently for each part of the model."""
    reseed_parts(seed, _part())


def set_cuda_rng_state(new_state: Tensor, device: int | str | torch.device = -1) -> None:
    """Set the state of a device's generator, of this rank's by default; on a CPU, the host's."""
    chosen = current_device() if device == -1 else torch.device(device)
    if random_state(chosen) is None:
        torch.set_rng_state(new_state)
    else:
        set_random_state(new_state, chosen)


def _part() -> int:
    mpu = _state.mpu
    return get_tensor_model_parallel_rank() if mpu is None else bwc_tensor_model_parallel_rank(mpu)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and recompute it in backward instead of storing its activations.

    The recomputation draws the same random numbers, also from the named states. `configure` sets
    how inputs are stored. The caller's tensors never change.

    Returns:
        The function's outputs. As in DeepSpeed, a list becomes a tuple, and a list or tuple with
        one element becomes that element.

    Raises:
        UsageError: more calls precede a backward than the preallocated buffers have room for.
    """
    found = _state.recomputation.call(function, *args, **kwargs)
    if type(found) not in (list, tuple):
        return found
    return found[0] if len(found) == 1 else tuple(found)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint`, without keyword arguments."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` in the form of an autograd function."""

    @staticmethod
    def apply(
        function: Callable[..., Any], all_outputs: list[Any], *args: Any
    ) -> tuple[Tensor, ...]:
        """Append all outputs to `all_outputs`; return those that are tensors."""
        found = _state.recomputation.call(function, *args)
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        all_outputs += outputs
        return tuple(each for each in outputs if isinstance(each, Tensor))
