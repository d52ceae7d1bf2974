"""`deepspeed...offload_activations`: inputs of transformers' recomputed layers in host memory.

The layers recompute themselves (`gradient_checkpointing=True`). The hidden states that they store
until backward are offloaded as by `activation_checkpointing.cpu_checkpointing`. And the devices of
an engine's states, which `offload_states` moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.engine.engine import Engine
from hadal.engine.state_offload import MovableState, tensors_of
from hadal.errors import UsageError, needed
from hadal.plugins.activation_checkpointing.keeping import HostLimits, InputKeeper


class CheckpointHiddenStatesOffload:
    """A context in which recomputed layers of transformers store their hidden states on the host.

    Copies go to pinned memory on a side stream. Backward, inside the context or after it, fetches
    the next layer's hidden states while one layer is recomputed.

    Args:
        use_pin_memory: ignored; memory is pinned if the device needs it.
        use_streams: ignored; copies overlap with computation if the device supports it.
        min_offload_bytes: smaller hidden states stay on the device.
        max_fwd_stash_count: maximum copies to the host in flight; the next waits for the oldest.
        max_cpu_buffer_pool_count: maximum free host buffers to keep for reuse.
        keep_last_count: number of newest hidden states that stay on the device.

    Raises:
        ValueError: a count or size is negative.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        given = {
            "min_offload_bytes": min_offload_bytes,
            "max_fwd_stash_count": max_fwd_stash_count,
            "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
            "keep_last_count": keep_last_count,
        }
        for name, value in given.items():
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        self.min_offload_bytes = min_offload_bytes
        limits = HostLimits(max_fwd_stash_count, max_cpu_buffer_pool_count, keep_last_count)
        self._keeper = InputKeeper(ActivationCheckpointing(cpu_checkpointing=True), None, limits)
        self._replaced: tuple[Any, Callable[..., Any] | None] | None = None

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        if self._replaced is not None:
            raise UsageError(
                "this context of offloaded hidden states is open already; leave it first, or make"
                " another by get_checkpoint_hidden_states_offloading_ctx_manager()"
            )
        layers = needed(
            "transformers.modeling_layers", "offloading hidden states", "'transformers>=5'"
        )
        layer = layers.GradientCheckpointingLayer
        self._replaced = layer, layer.__dict__.get("__call__")
        call = layer.__call__
        layer.__call__ = lambda module, *args, **kwargs: self._around(call, module, args, kwargs)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._replaced is not None
        layer, own = self._replaced
        self._replaced = None
        if own is None:
            del layer.__call__
        else:
            layer.__call__ = own

    def reset(self) -> None:
        """Free the host memory that no hidden states are stored in."""
        self._keeper.reset()

    def _around(
        self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden = args[0] if args else None  # a keyword argument is not stored by its layer alone
        recomputes = getattr(module, "gradient_checkpointing", False) and module.training
        if not (recomputes and torch.is_grad_enabled() and isinstance(hidden, Tensor)):
            return call(module, *args, **kwargs)
        if hidden.nbytes < self.min_offload_bytes:
            return call(module, *args, **kwargs)
        with self._keeper.around([hidden]):
            return call(module, *args, **kwargs)


get_checkpoint_hidden_states_offloading_ctx_manager = CheckpointHiddenStatesOffload


def get_state_devices(model: Engine, state: str) -> set[torch.device]:
    """Return the devices that have a kind of an engine's states, now."""
    kind = MovableState(getattr(state, "value", state))
    if kind.value in model._state.parts.runtime.away:
        return {torch.device("cpu")}
    return {tensor.device for tensor in tensors_of({kind}, model._state)}
