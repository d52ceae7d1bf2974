"""Guards on torch's clipping functions: they clip `.grad`, which is None under an engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hadal.errors import UsageError

if TYPE_CHECKING:
    from hadal.engine.session import Session

_log = logging.getLogger(__name__)

_NORM = (nn.utils.clip_grad_norm_, nn.utils.clip_grads_with_norm_)
_FUNCTIONS = (*_NORM, nn.utils.clip_grad_value_)

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_warned: weakref.WeakSet[Session] = weakref.WeakSet()


def watch_clipping(session: Session) -> None:
    """Make torch's clipping functions refuse parameters that an engine trains.

    Programs import these functions by name, so replacing torch's attributes would miss most calls.
    Each is a wrapper that holds the real function in a closure cell; the cell is set to a function
    that checks the parameters first.
    """
    if not _sessions:
        for wrapper in _FUNCTIONS:
            for cell in wrapper.__closure__ or ():
                if cell.cell_contents is vars(wrapper).get("__wrapped__", wrapper):
                    cell.cell_contents = _checked(cell.cell_contents)
    _sessions.add(session)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        elif isinstance(parameters, GeneratorType):
            # torch warns of an empty generator, so it gets one again.
            parameters = list(parameters) or (each for each in parameters)
        _refuse(function.__name__.removeprefix("_"), parameters, args, kwargs)
        return function(parameters, *args, **kwargs)

    return update_wrapper(check_and_clip, function)


def _refuse(
    function: str, parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise `UsageError` if an engine trains one of the parameters, or warn if it clips anyway."""
    for session, parameter in trained_by_engines(parameters):
        parts = session.parts
        names = (name for name, one in parts.model.named_parameters() if one is parameter)
        found = f"torch.nn.utils.{function} got the gradient of {next(names, 'a parameter')}"
        found += ", which the engine holds: .grad is None"
        where = f"rank {parts.ranks.rank}: {found}"
        if function == "clip_grad_value_":
            raise UsageError(
                f"{where}, so this call clips nothing. Clip the norm instead (the key"
                " gradient_clipping), or change gradients with hadal.utils.safe_set_full_grad"
            )
        if not parts.gradient_clipping:
            limit = args[0] if args else kwargs.get("max_norm", 1.0)
            raise UsageError(
                f"{where}, so this call clips nothing. Remove it and write"
                f' "gradient_clipping": {limit} in the configuration; after engine.step(),'
                " engine.get_global_grad_norm() returns the norm"
            )
        if session not in _warned:
            _warned.add(session)
            _log.warning(
                "%s, so this call clips nothing and returns no norm. Remove it: engine.step()"
                " already clips to gradient_clipping (%s), and engine.get_global_grad_norm()"
                " returns the norm afterwards",
                found,
                parts.gradient_clipping,
            )
        return


def trained_by_engines(parameters: Iterable[Tensor]) -> Iterator[tuple[Session, nn.Parameter]]:
    """Yield the parameters whose gradients an engine holds, and its session."""
    sessions = [session for session in _sessions if not session.cycle.destroyed]
    for parameter in parameters if sessions else ():
        if parameter.grad is None and parameter.requires_grad:
            for session in sessions:
                bucket = session.parts.runtime.bucket_of.get(parameter)  # type: ignore[call-overload]
                if bucket is not None and bucket.trainable:
                    yield session, parameter  # type: ignore[misc]
