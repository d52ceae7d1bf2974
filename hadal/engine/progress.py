"""Progress line of training, in the log at intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hadal.config import Config

_SECONDS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Progress:
    """Values of one line. Values that are None are left out."""

    number: int
    """Updates so far."""
    total: int | None
    """Updates until the schedule ends."""
    loss: float | None
    """The mean of this rank's losses since the line before."""
    rates: Sequence[float]
    momenta: Sequence[Any]
    """Momentum or betas of each param group; 0.0 if it has neither."""
    norm: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    update_s: float | None
    """Seconds of an update, since the line before."""
    nbytes: int
    """Memory of this rank: the accelerator's peak, or on a CPU the process's resident memory."""
    skipped: int
    """Updates skipped so far."""

    @property
    def left_s(self) -> float | None:
        """The seconds until the schedule ends, at the present speed."""
        if self.total is None or self.update_s is None or self.total <= self.number:
            return None
        return (self.total - self.number) * self.update_s

    def __str__(self) -> str:
        step = f"step {self.number}" if self.total is None else f"step {self.number}/{self.total}"
        parts = [step]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.rates:
            parts.append(f"lr {_each(self.rates)}")
        momenta = [one[0] if isinstance(one, (tuple, list)) else one for one in self.momenta]
        if any(momenta):
            parts.append(f"mom {_each(momenta)}")
        if self.norm is not None:
            parts.append(f"norm {self.norm:.4g}")
        if self.tokens_per_s is not None:
            parts.append(f"{number_of(self.tokens_per_s)} tokens/s")
        elif self.samples_per_s is not None:
            parts.append(f"{number_of(self.samples_per_s)} samples/s")
        if self.update_s is not None:
            parts.append(f"{duration(self.update_s)}/step")
        parts.append(f"{self.nbytes / (1 << 30):.2f} GiB")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        return ", ".join(parts)


def _each(values: Sequence[float]) -> str:
    """Format the different values of param groups."""
    return ", ".join(dict.fromkeys(f"{float(value):.4g}" for value in values))


def number_of(value: float) -> str:
    """Format `12345.6` as `12.3k`: three digits."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format `3720` seconds as `1 h 2 min`: the two largest units; below a minute three digits."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    left = round(seconds)
    shown: list[tuple[int, str]] = []
    for length, unit in _SECONDS:
        count, left = divmod(left, length)
        if count or shown:
            shown.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in shown[:2] if count)


def updates_of(config: Config) -> int | None:
    """Return the updates after which the configured schedule ends; None if it has no end."""
    scheduler = config.scheduler
    params: Mapping[str, Any] = scheduler.params if scheduler is not None else {}
    total = params.get("total_num_steps")
    return total if isinstance(total, int) else None
