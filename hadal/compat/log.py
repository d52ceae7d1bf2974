"""The logger whose level programs set, and the names of modules and parameters for messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import get_rank

logger = logging.getLogger("DeepSpeed")


def _open(opened: logging.Logger, level: int) -> None:
    """Let a logger write to standard output, as programs expect."""
    if not opened.handlers:
        opened.addHandler(logging.StreamHandler(sys.stdout))
        opened.propagate = False
        opened.setLevel(level)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks only: rank 0 by default, all ranks if -1 is given."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """Do as `log_dist`, but only the first time in this process."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@cache
def warning_once(message: str, *args: object) -> None:
    """Log a warning, but only the first time in this process."""
    logger.warning(message, *args)


def get_current_level() -> int:
    """Return the logger's level."""
    return logger.getEffectiveLevel()


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level from its name, in any case.

    Raises:
        ValueError: there is no such level.
    """
    number = logging.getLevelName(log_level_str.upper())
    if not isinstance(number, int):
        raise ValueError(f"{log_level_str!r} is not a log level; expected debug, info, warning")
    return number


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the logger logs at this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


class LoggerFactory:
    """Makes loggers with DeepSpeed's format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return a logger that writes to standard output from `level` up.

        Raises:
            ValueError: no name is given.
        """
        if name is None:
            raise ValueError("create_logger(name=None): pass the logger's name")
        made = logging.getLogger(name)
        _open(made, level)
        return made


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set a logger's level from its name, in upper or lower case.

    Raises:
        ValueError: there is no such level.
    """
    (custom_logger or logger).setLevel(log_level_str.upper())


_open(logger, logging.WARNING)


# ---- names of modules and parameters, as programs look them up to log them -----------------------


_UNKNOWN = "unknown"
module_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The full name of each module of the newest engine's model."""
param_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The full name of each of its parameters."""


def debug_clear_module_and_param_names() -> None:
    """Forget all names."""
    module_names.clear()
    param_names.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Look up the names in a model; an engine does so when it is made."""
    debug_clear_module_and_param_names()
    module_names.update({module: name for name, module in model.named_modules()})
    param_names.update({parameter: name for name, parameter in model.named_parameters()})


def debug_module2name(module: nn.Module) -> str:
    """Return a module's full name, or "unknown"."""
    return str(module_names.get(module, _UNKNOWN))


def debug_module2name_class(module: nn.Module) -> str:
    """Return a module's full name and its class."""
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """Return a parameter's full name, or "unknown"."""
    return str(param_names.get(param, _UNKNOWN))
