"""All exceptions that Hadal raises deliberately, in one hierarchy.

A message says what was found, what was expected, where (JSON path, parameter's full name, rank,
file) and the remedy. `HadalError` catches all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# The similarity required to suggest one word for another.
_ALIKE, _ALIKE_SHORT, _SHORT = 0.75, 0.6, 5
# Other libraries' names of the same thing, which are spelled differently.
_ELSEWHERE = {"learning_rate": "lr", "epsilon": "eps", "decay": "weight_decay"}


class HadalError(Exception):
    """The base class of all of Hadal's exceptions."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a configuration: its JSON path, and a message with the remedy."""

    path: str
    message: str


class ConfigError(HadalError, ValueError):
    """The configuration has faults; the message lists them all, each with its JSON path."""

    def __init__(self, message: str, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class NotBuiltYetError(HadalError, NotImplementedError):
    """A documented feature was requested that this version does not implement yet."""


class UnbuiltConfigError(ConfigError, NotBuiltYetError):
    """The configuration is valid, but needs features that this version does not implement yet."""


class ChoiceError(HadalError, ValueError, NotImplementedError):
    """An argument is none of the values that it may have (DeepSpeed: NotImplementedError)."""


class LaunchError(HadalError, ValueError):
    """A job cannot be started with these hosts, slots or flags."""


class TuningError(HadalError, RuntimeError):
    """A search found no configuration that runs; the message gives the reason for each."""


class ModelError(HadalError, ValueError):
    """The model, or one of its parameters, cannot be trained as it is."""


class SequenceError(HadalError, ValueError):
    """A sequence cannot be split as requested: its length, heads, targets or ranks do not fit."""


class UsageError(HadalError, RuntimeError):
    """The engine's methods were called in an invalid order, or with an invalid argument."""


class MissingAttributeError(UsageError, AttributeError):
    """An engine was asked for a method that only another kind of engine has."""


class LossError(HadalError, ValueError):
    """The argument of `backward` is not a loss."""


class OptimizerError(HadalError, ValueError, TypeError):
    """The optimizer or the learning-rate schedule cannot be used (DeepSpeed: also TypeError)."""


class LossScaleError(HadalError, ArithmeticError):
    """fp16 gradients overflow although the loss scale is at its floor."""


class NonFiniteError(HadalError, ArithmeticError):
    """Too many consecutive updates had non-finite gradients."""


class ShardedAccessError(HadalError, RuntimeError):
    """A parameter was read or written while its values were sharded over the ranks."""


class CommunicationError(HadalError, RuntimeError):
    """Ranks cannot reach each other, or a collective failed."""


class MonitorError(HadalError, RuntimeError):
    """A monitor (TensorBoard, CSV files, ...) cannot be started."""


class MissingPackageError(MonitorError, UsageError, ImportError):
    """A package that a feature requires is not installed."""


class PipelineError(HadalError, RuntimeError):
    """A stage of a pipeline has failed, or its engine was used like one without stages."""


class MismatchError(CommunicationError):
    """Ranks disagree on something that must be the same on all of them (model, config, path)."""


class CheckpointError(HadalError, OSError):
    """A checkpoint cannot be written or read."""


class OffloadError(HadalError, OSError):
    """Offloaded state cannot be written or read: the disk has a fault or is full."""


def expect_one_of(
    known: Collection[object], what: str, value: object, error: type[HadalError] = UsageError
) -> None:
    """Raise `error` if a value, which `what` names, is none of the known ones."""
    if value not in known:
        raise error(f"{what} is {value!r}; expected one of {', '.join(map(repr, known))}")


def needed(module: str, user: str, install: str = "", *, instead: str = "") -> Any:
    """Import a module of a package that only some features require.

    Args:
        module: the name of the module.
        user: the feature, for the message.
        install: the name by which pip installs the package, if it is another one.
        instead: another remedy.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        other = f", or {instead}" if instead else ""
        raise MissingPackageError(
            f"{user} needs the package {package}, which cannot be imported ({error}): pip install"
            f" {install or package}{other}"
        ) from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to a misspelled one, or None."""
    from difflib import get_close_matches

    plain, written = {_plain(word): word for word in known}, _plain(name)
    if _ELSEWHERE.get(written) in plain:
        return plain[_ELSEWHERE[written]]
    cutoff = _ALIKE_SHORT if len(name) <= _SHORT else _ALIKE
    found = get_close_matches(written, plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


EXIT_PREEMPTED = 75
"""The exit code of a program that saved at a signal and left: EX_TEMPFAIL, "try again later"."""


def few(names: Iterable[object], shown: int = 8, joint: str = ", ") -> str:
    """Join the first `shown` names for a message, and count the rest."""
    known = [str(name) for name in names]
    more = f" and {len(known) - shown} more" if len(known) > shown else ""
    return joint.join(known[:shown]) + more


def written(name: str, faults: tuple[Fault, ...]) -> str:
    """Format faults one per line, with paths and messages in columns."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    width = max(len(fault.path) for fault in faults)
    lines = [f"  {fault.path:<{width}}  {fault.message}" for fault in faults]
    return "\n".join([f"{count} in {name}", *lines])


def raise_faults(faults: Iterable[Fault], name: str = "the configuration") -> None:
    """Raise a ConfigError that lists the faults of `name`, if there are any."""
    found = tuple(faults)
    if found:
        raise ConfigError(written(name, found), found)
