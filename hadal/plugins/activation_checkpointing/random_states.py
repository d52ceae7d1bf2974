"""Named random states of the device (Megatron's), so that the parts of a model draw differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.device import current_device, random_state, set_random_state
from hadal.errors import UsageError

MODEL_PARALLEL = "model-parallel-rng"
"""The name of the state that differs between the parts of a model."""
_OFFSET = 2718  # Megatron's offset, so that seeds of parts differ from nearby seeds of programs


class CudaRNGStatesTracker:
    """Named random states; `fork` draws from one of them temporarily."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of the table from name to state."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Restore such a table."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create a state from a seed; the device's generator does not change.

        Raises:
            UsageError: the name or the seed is already in use.
        """
        if seed in self.seeds_ or name in self.states_:
            raise UsageError(
                f"add({name!r}, {seed}): the name or the seed is already used by one of"
                f" {sorted(self.states_)}; call reset() before creating states again"
            )
        before = _state()
        _seed(seed)
        self.states_[name] = _state()
        self.seeds_.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside the context; afterwards the generator is as before.

        Raises:
            UsageError: there is no state of that name.
        """
        if name not in self.states_:
            raise UsageError(
                f"fork({name!r}): no such random state, only {sorted(self.states_)};"
                " call model_parallel_cuda_manual_seed(seed) or add(name, seed) before"
            )
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


TRACKER = CudaRNGStatesTracker()
"""The one table of this process."""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return this process's tracker."""
    return TRACKER


def seed_parts(seed: int, part: int) -> None:
    """Seed the generator equally on all parts of the model, and one named state per part."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + part)


def reseed_parts(seed: int, part: int) -> None:
    """Recreate this part's named state from a seed; every other state is unchanged."""
    states, seeds = TRACKER.get_states(), set(TRACKER.seeds_)
    states.pop(MODEL_PARALLEL, None)
    TRACKER.reset()
    TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + part)
    TRACKER.set_states({**states, **TRACKER.get_states()})
    TRACKER.seeds_ |= seeds


@contextmanager
def recomputing_from(states: dict[str, Tensor]) -> Iterator[None]:
    """Draw the same numbers from these states again inside the context; then restore them."""
    before = TRACKER.get_states()
    TRACKER.set_states(states)
    try:
        yield
    finally:
        TRACKER.set_states(before)


def _state() -> Tensor:
    """Return the state of the device's generator; on a CPU, of the host's."""
    state = random_state(current_device())
    return torch.get_rng_state() if state is None else state


def _set_state(state: Tensor) -> None:
    if random_state(current_device()) is None:
        torch.set_rng_state(state)
    else:
        set_random_state(state, current_device())


def _seed(seed: int) -> None:
    """Seed the device's generator; on a CPU, the host's."""
    device = current_device()
    (torch if device.type == "cpu" else torch.get_device_module(device)).manual_seed(seed)
