"""Temporary offload of an engine's states while they are not used.

A program that generates, or runs another model, between updates may need the device's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hadal.device import Event, host_empty, is_host_memory
from hadal.engine.graph_passes import moves_states
from hadal.engine.state import MovedStorage, State
from hadal.errors import UsageError
from hadal.offload.crossing import crossing_of


class MovableState(str, Enum):
    """Kinds of state that can be moved; the names are DeepSpeed's."""

    OPTIMIZER = "optim_states"
    MASTERS = "hp_params"
    WEIGHTS = "lp_params"
    GRADIENTS = "lp_grads"
    GRADIENT_BUFFERS = "contiguous_grad_buffer"


class StateOffload:
    """Methods of an engine that move its states to host memory, and back."""

    _state: State

    @torch.no_grad()
    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory and release their memory on the device.

        Call it between two updates, and `reload_states` before the engine is used again. On a CPU,
        states are in host memory already and nothing moves.

        Args:
            include: the states to move: "optim_states" (the optimizer's state), "hp_params"
                (masters), "lp_params" (weights), "lp_grads" or "contiguous_grad_buffer" (both
                mean gradients with their buffers); all by default.
            device: "cpu".
            pin_memory: pin the host memory, and keep it for reuse until `destroy`.
            non_blocking: return while copies overlap with other work of the device; the device
                memory is freed when they end. `reload_states` waits for them. It requires
                `pin_memory`, and a device with streams (such as CUDA): other devices finish all
                copies before this returns.

        Raises:
            UsageError: no such state or device, states are moved already, or the model is running.
        """
        state = self._state
        state.expect_alive()
        wanted = _wanted(include)
        if str(getattr(device, "value", device)) != "cpu":
            raise UsageError(f'offload_states(device={str(device)!r}): expected "cpu"')
        runtime = state.parts.runtime
        if not runtime.gathering.is_at_rest:
            raise UsageError(
                "offload_states was called inside forward, backward or GatheredParameters; call it"
                " after an engine.step()"
            )
        runtime.away = tuple(sorted(kind.value for kind in wanted))
        _move_out(wanted, pin_memory, state)
        if MovableState.WEIGHTS in wanted:
            for bucket in runtime.buckets:
                bucket.hide()
        if not non_blocking:
            for away in state.moved:
                away.event.wait_on_host()

    @torch.no_grad()
    def _begin_pass(self) -> None:
        """Move the optimizer's state off the device for a forward and its backward, if asked to.

        Whatever needs it brings it back: the update, a checkpoint, a look at a parameter's state.
        """
        state, runtime = self._state, self._state.parts.runtime
        if runtime.bring_back is None and _moves(state):
            runtime.bring_back = self._end_pass
            _move_out({MovableState.OPTIMIZER}, True, state)

    def _end_pass(self) -> None:
        self.reload_states(non_blocking=True)
        self._state.parts.runtime.bring_back = None

    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back the states that `offload_states` has moved, if any.

        If the device has no room for them, those that are left come back with the next call.

        Args:
            non_blocking: return while copies are under way; the device's own work waits for them,
                as with `offload_states`.
        """
        state, runtime = self._state, self._state.parts.runtime
        arrivals = []
        while state.moved:  # what the device has no room for stays in it
            whole, contents, event, pinned = state.moved[-1]
            whole.untyped_storage().resize_(contents.numel())
            arrival = crossing_of(state.parts.device, pins=pinned).bring(
                contents, whole, after=event
            )
            arrival.wait()
            arrivals.append(arrival)
            state.moved.pop()
            if pinned:
                state.host_memory.append((contents, arrival.event))
        if not non_blocking:
            for arrival in arrivals:
                arrival.event.wait_on_host()
        if MovableState.WEIGHTS.value in runtime.away:
            for bucket in runtime.buckets:
                bucket.reveal()
        runtime.away = ()


def _moves(state: State) -> bool:
    section = state.parts.config.compile
    if state.moves is None:
        return section.deepcompile and section.offload_opt_states
    return moves_states(state.moves, state.global_steps)


def _move_out(wanted: Collection[MovableState], pins: bool, state: State) -> None:
    """Begin to move states to host memory, and release their memory once they are there."""
    crossing = crossing_of(state.parts.device, pins=pins)
    for whole in _memory_of(wanted, state):
        contents, free = _host_memory_for(whole.numel(), pins, state)
        event = crossing.move_out(whole, contents, after=free)
        state.moved.append(MovedStorage(whole, contents, event, pins))


def _host_memory_for(nbytes: int, pinned: bool, state: State) -> tuple[Tensor, Event | None]:
    """Return host memory of `nbytes`, and the event after which it is free."""
    # Pinning memory takes longer than filling it.
    for place, (memory, event) in enumerate(state.host_memory if pinned else []):
        if memory.numel() == nbytes:
            del state.host_memory[place]
            return memory, event
    return host_empty(nbytes, torch.uint8, pinned=pinned), None


def _wanted(include: Collection[str] | None) -> set[MovableState]:
    names = [str(getattr(one, "value", one)) for one in include or MovableState]
    unknown = [name for name in names if name not in [kind.value for kind in MovableState]]
    if unknown:
        raise UsageError(
            f"offload_states(include={unknown}): expected some of"
            f" {', '.join(kind.value for kind in MovableState)}"
        )
    return {MovableState(name) for name in names}


def _memory_of(wanted: Collection[MovableState], state: State) -> list[Tensor]:
    """Return each device storage that holds these states once, as bytes."""
    found: dict[int, Tensor] = {}
    for tensor in tensors_of(wanted, state):
        storage = tensor.untyped_storage()
        if storage.nbytes() and not is_host_memory(tensor.device):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found[storage.data_ptr()] = whole
    return list(found.values())


def tensors_of(wanted: Collection[MovableState], state: State) -> Iterator[Tensor]:
    """Return the tensors of these states."""
    runtime = state.parts.runtime
    for bucket in runtime.buckets:
        if MovableState.WEIGHTS in wanted:
            yield from bucket.tensors_of_weights()
        master = bucket.stored_master
        if MovableState.MASTERS in wanted and master is not None and bucket.has_own_master:
            yield from [master.values] if master.is_present else []
    if MovableState.GRADIENTS in wanted or MovableState.GRADIENT_BUFFERS in wanted:
        for gradients in runtime.gradients:
            yield from gradients.tensors()
    if state.training is None:
        return
    if MovableState.MASTERS in wanted:
        # Whole values, stored next to the masters that are slices of them.
        yield from (h.values for h in state.training.stepper.held() if h.slot is not None)
    if MovableState.OPTIMIZER in wanted:
        states = state.training.optimizer.state.values()
        values = chain.from_iterable(one.values() for one in states)
        yield from chain.from_iterable(map(_dense, values))


def _dense(value: Any) -> Iterator[Tensor]:
    """Yield a tensor with dimensions, or those that it is made of."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _dense(getattr(value, name))
    elif isinstance(value, Tensor) and value.dim() and value.layout is torch.strided:
        yield value
