"""The interface of an optimizer that exchanges updates instead of gradients.

Tests: tests/optim/test_signs_in_training.py
"""

from __future__ import annotations

from typing import Any, Protocol


class OwnExchange(Protocol):
    """An optimizer that leaves gradients on their ranks (`Reduction.stays`) and sends its own data.

    Between two of its exchanges the ranks' weights may differ.
    """

    def bring_together(self) -> None:
        """Make weights and optimizer state the same on all ranks, which all call it."""

    def begin_anew(self) -> None:
        """Forget what was to be sent: weights and optimizer state have been replaced."""

    def memory(self) -> Any:
        """Return this rank's data still to send: dicts and lists of tensors; None: nothing."""

    def fits(self, memory: Any) -> bool:
        """Return True if a `memory` is of parameters laid out as they are here."""

    def remember(self, memory: Any) -> None:
        """Take over a `memory` that fits."""
