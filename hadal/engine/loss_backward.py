"""A backward that the caller starts, `loss.backward()`, instead of `engine.backward(loss)`.

It begins with the first gradient that reaches a trained parameter, and ends with torch's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from hadal.device import at_end_of_backward, is_in_backward, is_in_node
from hadal.zero.runtime import ZeroRuntime


class LossBackward:
    """Detector of such backwards; each runs inside the context `around`."""

    def __init__(
        self, around: Callable[[], AbstractContextManager[None]], runtime: ZeroRuntime
    ) -> None:
        self._around = around
        self._runtime = runtime
        self._stack: ExitStack | None = None
        self._is_through = False
        runtime.begins = self._begin

    def _begin(self) -> None:
        self.end_left()
        stack = ExitStack()
        self._runtime.is_direct = True
        try:
            stack.enter_context(self._around())
        except BaseException:
            self._runtime.is_direct = False
            raise
        self._stack, self._is_through = stack, False
        at_end_of_backward(self._end)

    def _end(self) -> None:
        # The inner backward of a reentrant recomputation ends before the outer one does.
        self._is_through = True
        if not is_in_node():
            self._close(None)

    def end_left(self) -> None:
        """End a backward that is over or has raised: torch does not report it."""
        if self._stack is not None and not is_in_backward():
            self._close(None if self._is_through else RuntimeError("the backward has raised"))

    def _close(self, error: BaseException | None) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        try:
            if error is None:
                stack.close()
            else:
                stack.__exit__(type(error), error, None)
        finally:
            self._runtime.is_direct = False
