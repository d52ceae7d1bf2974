"""`deepspeed.checkpointing`: recomputation of activations, as torch does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

from hadal.errors import NotBuiltYetError

_configured = [False]


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

    A section of the configuration is read by `initialize`, and not here.

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


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and call it again in backward in place of keeping its activations."""
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)
