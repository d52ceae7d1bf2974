"""torch's compiler, and the avoidance of its cost for programs that do not compile."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer

from hadal.errors import UsageError

_numbers = itertools.count()
_SKIPPED = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
)


@contextmanager
def spared_import() -> Iterator[None]:
    """Create an optimizer in the block without importing torch's compiler, which takes a second.

    A wrapper excludes `Optimizer.add_param_group` from compiled graphs. It imports the compiler at
    its first call unless it finds the attribute set here. Nothing is compiled while an optimizer is
    created. With a version of torch that does it differently this has no effect.
    """
    plain = inspect.unwrap(Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(plain, "__dynamo_disable"):
        yield
        return
    plain.__dynamo_disable = plain
    try:
        yield
    finally:
        del plain.__dynamo_disable


def tells_of_compiling() -> bool:
    """Return True if torch's compiler is not imported, or has what the functions below ask for.

    There is no public way to learn when it starts, and what it has compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return True
    frames = sys.modules.get("torch._dynamo.convert_frame")
    handler = _callbacks()
    names = ("start_callbacks", "register_start_callback")
    return hasattr(frames, "FRAME_COUNTER") and all(hasattr(handler, name) for name in names)


def _callbacks() -> Any:
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def frames_compiled() -> int:
    """Return how many frames torch's compiler has compiled in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return int(getattr(frames, "FRAME_COUNTER", 0))


def captures_graphs(module: nn.Module) -> bool:
    """Return True if a module is compiled by `torch.compile` or its `compile` to use CUDA graphs.

    That is known of the backend `inductor` only, the default.
    """
    calls = (getattr(module, "_compiled_call_impl", None), getattr(module, "forward", None))
    asked: list[Callable[[], Any]] = [getattr(call, "get_compiler_config", dict) for call in calls]
    return any((config() or {}).get("triton.cudagraphs") for config in asked)


def compiled_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled as a whole for constant sizes, with its own compilation limit.

    torch counts the compilations of a code object, however many functions share it, and beyond the
    limit it would run all of them uncompiled.

    Raises:
        UsageError: a call would need more compilations than torch allows.
    """

    def whole(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    name = f"{function.__name__}_{next(_numbers)}"  # torch also remembers by name what has changed
    whole.__code__ = whole.__code__.replace(co_name=name)
    compiled = torch.compile(whole, fullgraph=True, dynamic=False)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return compiled(*args, **options)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise UsageError(
                f"{name} was compiled {torch._dynamo.config.recompile_limit} times for inputs of"
                " different kinds, which is torch's limit; raise torch._dynamo.config."
                "recompile_limit, or find what differs with TORCH_LOGS=recompiles"
            ) from error

    return call


def keep_eager(code: CodeType) -> None:
    """Let code run as it is between compiled functions; inside of one it is traced all the same."""
    eval_frame.set_code_exec_strategy(code, _SKIPPED)


def call_outside_graphs(act: Callable[[bool], None]) -> None:
    """Call `act` without the compiler; do nothing inside a compiled graph.

    `act` is told whether functions that are called next, behind it, are compiled.
    """
    if torch.compiler.is_compiling():
        return
    compiles = eval_frame.set_eval_frame(None)
    try:
        act(compiles is not None)
    finally:
        eval_frame.set_eval_frame(compiles)


keep_eager(call_outside_graphs.__code__)


def before_compiling(act: Callable[[], None]) -> None:
    """Call `act` each time torch's compiler starts; do nothing if it is not imported yet.

    Resetting the compiler removes the callback.
    """
    handler = _callbacks()
    if handler is not None and _as_callback(act) not in handler.start_callbacks:
        handler.register_start_callback(_as_callback(act))


@cache
def _as_callback(act: Callable[[], None]) -> Callable[[object], None]:
    return lambda _: act()
