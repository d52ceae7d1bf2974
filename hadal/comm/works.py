"""What is waited for: a work under way, by the name that its fault is told by."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hadal.errors import CommunicationError


def failure(label: str, error: Exception, what: str = "") -> CommunicationError:
    """What to raise where the backend reports `error` in the collective `label`."""
    told = f" ({what})" if what else ""
    return CommunicationError(
        f"{label} failed{told}: {error}. Another rank died or waits elsewhere; its own message"
        " tells more."
    )


class NamedWork(dist.Work):
    """A work of torch's, which names itself where it fails."""

    def __init__(
        self,
        work: dist.Work,
        failed: Callable[[Exception], Exception],
        ended: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._work = work
        self._failed = failed
        self._ended = ended
        self._acts: list[Callable[[], None]] = []
        if ended is not None:
            tell_end(work, ended)

    def then(self, act: Callable[[], None]) -> None:
        """Let `act` follow the first wait."""
        self._acts.append(act)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, an accelerator's stream in place of its host.

        Raises:
            CommunicationError: it failed, or came to no end in time.
        """
        try:
            is_over = self._work.wait() if timeout is None else self._work.wait(timeout)
        except (RuntimeError, dist.DistError) as error:
            raise self._failed(error) from error
        if self._ended is not None:
            self._ended()
        acts, self._acts = self._acts, []
        for act in acts:
            act()
        return bool(is_over)

    def synchronize(self) -> None:
        """Let the current stream wait for it."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._work.is_completed())

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        found: list[Tensor] = self._work.result()
        return found

    def source_rank(self) -> int:
        """Of a receive from any rank: who has sent."""
        return int(self._work.source_rank())

    def get_future(self) -> Future[Any]:
        """Its end as torch's future."""
        return self._work.get_future()


def tell_end(work: dist.Work, ended: Callable[[], None]) -> None:
    """Call `ended` when a work has ended, where torch tells it; on an accelerator at once, with a
    stream as the current one that waits for it.
    """
    try:
        future = work.get_future()
    except RuntimeError:
        return  # gloo's sends and reduce-scatters have none: whoever waits knows the end
    future.add_done_callback(lambda _: ended())
