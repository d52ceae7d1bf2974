"""`deepspeed.checkpointing`: recomputation of activations, as torch does it."""

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
    """Say how activations are kept; what is not the plain way is not built yet.

    A section of the configuration is read by `initialize`, and not here. `mpu_` tells which part of
    the model this rank holds, for `model_parallel_cuda_manual_seed`.

    Raises:
        NotBuiltYetError: something else than plain recomputation is asked for.
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
    """Whether `configure` was called."""
    return _configured[0]


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Say whether activations are cut over the ranks that hold the model's parts.

    Raises:
        NotBuiltYetError: they shall be.
    """
    configure(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """How many layers keep activations: nothing is laid out for them beforehand here."""


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`."""
    return checkpoint(function, *args)


def reset() -> None:
    """Forget what a forward has left; nothing is kept between calls here."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator with `seed` on all ranks, and a state to `fork` on each part of the model.

    Which part this rank holds is told by the object that `configure` got, or else by the engine.
    """
    part = bwc_tensor_model_parallel_rank(_mpu[0]) if _mpu else get_tensor_model_parallel_rank()
    seed_parts(seed, part)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and call it again in backward in place of keeping its activations.

    It draws the same random numbers again, from the named states too.
    """
    return _checkpoint(function, *args, use_reentrant=False, context_fn=_same_draws, **kwargs)


def _same_draws() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    states = get_cuda_rng_tracker().get_states()
    return nullcontext(), recomputing_from(states) if states else nullcontext()
