"""An optimizer that exchanges what it makes of gradients by itself, as the mechanism sees it."""

from __future__ import annotations

from typing import Any, Protocol


class OwnExchange(Protocol):
    """Whoever lets gradients stay on their ranks (`Reduction.stays`) and sends something else.

    Between two of its exchanges the ranks' weights may differ.
    """

    def bring_together(self) -> None:
        """Make weights and optimizer state the same on all ranks, which all call it."""

    def begin_anew(self) -> None:
        """Weights and optimizer state have been replaced: what was to be sent is forgotten."""

    def memory(self) -> Any:
        """What this rank alone has still to send: dicts and lists of tensors; None: nothing."""

    def fits(self, memory: Any) -> bool:
        """Whether a `memory` is one of parameters that lie as they do here."""

    def remember(self, memory: Any) -> None:
        """Take over a `memory` that fits."""
