"""Named random states of the device: Megatron's, so that the parts of a model draw differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.compat.accelerator import get_accelerator
from hadal.errors import UsageError

_MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # what Megatron adds, so that the parts' seeds are not the next programs' seeds


class CudaRNGStatesTracker:
    """Random states by name; `fork` draws from one of them for a while."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the table: name to state."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Go on from such a table."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state by its seed; the device's generator stays where it is.

        Raises:
            UsageError: there is such a name, or seed, already.
        """
        if seed in self.seeds_ or name in self.states_:
            raise UsageError(
                f"add({name!r}, {seed}): the name or the seed is taken by one of"
                f" {sorted(self.states_)}; call reset() before states are made anew"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside; afterwards the generator is where it was.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self.states_:
            raise UsageError(
                f"fork({name!r}): there is no such random state, only {sorted(self.states_)};"
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
    """The one table of this process."""
    return TRACKER


def seed_parts(seed: int, part: int) -> None:
    """Seed the generator alike on all parts of the model, and a named state for each part."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(_MODEL_PARALLEL, seed + _OFFSET + part)


@contextmanager
def recomputing_from(states: dict[str, Tensor]) -> Iterator[None]:
    """Draw inside what was drawn from these states on; afterwards they are where they were."""
    before = TRACKER.get_states()
    TRACKER.set_states(states)
    try:
        yield
    finally:
        TRACKER.set_states(before)
