"""`deepspeed.checkpointing`: activation checkpointing, as torch implements it.

Tests: tests/compat/test_engine.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

from hadal.compat.groups import get_tensor_model_parallel_rank
from hadal.compat.random_states import get_cuda_rng_tracker, recomputing_from, seed_parts
from hadal.compat.tools import bwc_tensor_model_parallel_rank
from hadal.errors import NotBuiltYetError

_configured = [False]
_mpu: list[Any] = []


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
    """Set how activations are stored; only plain recomputation is built.

    `initialize` reads that section of the configuration, this function does not. `mpu_` says which
    part of the model this rank holds, for `model_parallel_cuda_manual_seed`.

    Raises:
        NotBuiltYetError: something other than plain recomputation is requested.
    """
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise NotBuiltYetError(
            f"deepspeed.checkpointing.configure({', '.join(wanted)}): only plain recomputation is"
            " built yet; leave it out"
        )
    _configured[0] = True
    if mpu_ is not None:
        _mpu[:] = [mpu_]


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _configured[0]


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set whether activations are sharded over the model-parallel ranks.

    Raises:
        NotBuiltYetError: the argument is true.
    """
    configure(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Accept the number of checkpointed layers, which has no effect."""


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`."""
    return checkpoint(function, *args)


def reset() -> None:
    """Discard leftovers of a forward pass; nothing is kept between calls here."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator with `seed` on all ranks, and a state to `fork` per part of the model.

    The object passed to `configure`, or else the engine, says which part this rank holds.
    """
    part = bwc_tensor_model_parallel_rank(_mpu[0]) if _mpu else get_tensor_model_parallel_rank()
    seed_parts(seed, part)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and recompute it in backward instead of storing its activations.

    The recomputation draws the same random numbers, also from the named states.
    """
    return _checkpoint(function, *args, use_reentrant=False, context_fn=_same_draws, **kwargs)


def _same_draws() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    states = get_cuda_rng_tracker().get_states()
    return nullcontext(), recomputing_from(states) if states else nullcontext()
