"""Every exception that Hadal raises on purpose, in one tree.

A message says what was found, what was expected, where (JSON path, parameter's full name, rank,
file) and the remedy. Whoever wants to catch all of them catches `HadalError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class HadalError(Exception):
    """The root of the tree."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason to refuse a configuration: where (JSON path), and what with its remedy."""

    path: str
    message: str


class ConfigError(HadalError, ValueError):
    """The configuration has faults. All of them are told at once, each with its JSON path."""

    def __init__(self, message: str, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class NotBuiltYetError(HadalError, NotImplementedError):
    """A thing that is promised was asked for, and this version does not do it yet."""


class UnbuiltConfigError(ConfigError, NotBuiltYetError):
    """The configuration is sound, but asks for things that this version does not do yet."""


class LaunchError(HadalError, ValueError):
    """A job cannot be started as asked: its hosts, its slots or its flags."""


class TuningError(HadalError, RuntimeError):
    """A search for a configuration has found none that runs; the message says why for each."""


class ModelError(HadalError, ValueError):
    """The model, or one of its parameters, cannot be trained as it is."""


class UsageError(HadalError, RuntimeError):
    """The engine's methods were called in an order, or with an argument, that cannot work."""


class LossError(HadalError, ValueError):
    """What was given to `backward` is not a loss."""


class OptimizerError(HadalError, ValueError):
    """The optimizer or the learning-rate schedule cannot be used as asked."""


class LossScaleError(HadalError, ArithmeticError):
    """fp16 gradients overflow although the loss scale is at its floor."""


class ShardedAccessError(HadalError, RuntimeError):
    """A parameter was read or written while its values were spread over the ranks."""


class CommunicationError(HadalError, RuntimeError):
    """Ranks cannot reach each other, or a collective failed."""


class MismatchError(CommunicationError):
    """Ranks disagree on something that must be the same everywhere (model, config, path)."""


class CheckpointError(HadalError, OSError):
    """A checkpoint cannot be written or read."""


class OffloadError(HadalError, OSError):
    """Offloaded state cannot be written or read: a disk's fault, or no room."""


def few(names: Iterable[object], shown: int = 8, joint: str = ", ") -> str:
    """The first names, joined for a message, and how many more there are."""
    known = [str(name) for name in names]
    more = f" and {len(known) - shown} more" if len(known) > shown else ""
    return joint.join(known[:shown]) + more
