"""Arithmetic of the batch: the samples of one update, per rank and micro-step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hadal.errors import UsageError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples of one update. All numbers are integers: a batch that does not divide is refused."""

    micro: int
    """Samples of one rank's forward and backward."""
    accumulation: int
    """Micro-steps of one update."""
    data_parallel_size: int
    """Ranks that see different samples."""
    managed: bool = True
    """True if the engine counts micro-steps; else every `engine.step()` is an update."""

    @property
    def micro_step(self) -> int:
        """Samples of all ranks in one micro-step."""
        return self.micro * self.data_parallel_size

    @property
    def train(self) -> int:
        """Samples of all ranks in one update."""
        return self.micro_step * self.accumulation

    def ends_update(self, micro_steps: int) -> bool:
        """Return whether the micro-step that follows `micro_steps` others ends in an update."""
        return (micro_steps + 1) % self.accumulation == 0

    def consumed(self, backwards: int) -> int:
        """Return the samples of all ranks in one update of that many backwards.

        If the engine counts micro-steps, that is always the whole batch.
        """
        return self.train if self.managed else self.micro_step * backwards

    def with_train(self, train: object) -> BatchSizes:
        """Return a copy for another number of samples: only the accumulation changes.

        Raises:
            UsageError: not a multiple of the samples of one micro-step.
        """
        whole = isinstance(train, int) and not isinstance(train, bool)
        if not whole or train <= 0 or train % self.micro_step:  # type: ignore[operator]
            raise UsageError(
                f"set_train_batch_size({train!r}): expected a multiple of {self.micro_step}, which"
                f" is {self.micro} per device x {self.data_parallel_size} ranks;"
                " to change the samples of one device, initialize again"
            )
        return replace(self, accumulation=train // self.micro_step)  # type: ignore[operator]
