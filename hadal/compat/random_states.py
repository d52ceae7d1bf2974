"""Named random states of the device (Megatron's), so that the parts of a model draw differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.compat.accelerator import get_accelerator
from hadal.errors import UsageError

_MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # Megatron's offset, so that seeds of parts differ from nearby seeds of programs


class CudaRNGStatesTracker:
    """Random states by name; `fork` draws from one of them temporarily."""

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
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside the context; afterwards the generator is as before.

        Raises:
            UsageError: there is no state of that name.
        """
        if name not in self.states_:
            raise UsageError(
                f"fork({name!r}): no such random state, only {sorted(self.states_)};"
                " call model_parallel_cuda_manual_seed(seed) or add(name, seed) before"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


TRACKER = CudaRNGStatesTracker()
"""The one table of this process."""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return this process's tracker."""
    return TRACKER


def seed_parts(seed: int, part: int) -> None:
    """Seed the generator equally on all parts of the model, and one named state per part."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(_MODEL_PARALLEL, seed + _OFFSET + part)


@contextmanager
def recomputing_from(states: dict[str, Tensor]) -> Iterator[None]:
    """Redraw inside the context what was drawn from these states; restore them afterwards."""
    before = TRACKER.get_states()
    TRACKER.set_states(states)
    try:
        yield
    finally:
        TRACKER.set_states(before)
