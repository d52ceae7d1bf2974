"""The optimizer in training, and what a program does with it, or instead of it, past the engine.

Weights, masters and gradients are the engine's: `.grad` is None. So the optimizer's own methods are
followed by the weights, steps by hand and torch's clipping are refused, and another optimizer gets
the gradients, where that trains as in torch, or is refused.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, update_wrapper
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hadal.engine.state import State, Training
from hadal.errors import UsageError, few
from hadal.zero.agreement import Marker
from hadal.zero.state import safe_get_full_grad

_log = logging.getLogger(__name__)

_Method = Callable[..., Any]
_CLIPPING = (nn.utils.clip_grad_norm_, nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_)
_engines: weakref.WeakSet[State] = weakref.WeakSet()
_warned: weakref.WeakSet[State] = weakref.WeakSet()
_lent: dict[Optimizer, tuple[list[State], list[nn.Parameter]]] = {}
"""During a step: the engines that have lent their gradients, and the parameters that got one."""


def expect_training(state: State) -> Training:
    """Return the training, begun now if it was deferred until there is something to train."""
    return state.training or begin_training(state, state.parts.make_training())


def begin_training(state: State, training: Training) -> Training:
    """Set the optimizer; from now on only `engine.step` may step it."""
    state.training = training
    _guard(training.optimizer, state)
    _follow_methods(training.optimizer, state)
    _engines.add(state)
    _watch_torch()
    return training


def _guard(optimizer: Optimizer, state: State) -> None:
    """Refuse steps by hand, and bring state that is off the device back for `state_dict`."""
    engine, rank = weakref.ref(state), state.parts.ranks.rank

    def refuse(*_: Any) -> None:
        found = engine()
        if found is not None and not found.stepping:
            raise UsageError(
                f"rank {rank}: optimizer.step() was called by hand, which trains nothing: the"
                " gradients and the weights are the engine's. Call engine.backward(loss) and"
                " engine.step(), which steps the optimizer and the schedule"
            )

    def bring_back(_: Optimizer) -> None:
        found = engine()
        if found is not None and found.moved:
            found.parts.runtime.expect_here()

    optimizer.register_step_pre_hook(refuse)
    optimizer.register_state_dict_pre_hook(bring_back)


# ---- the optimizer's own methods -----------------------------------------------------------------


def _follow_methods(optimizer: Optimizer, state: State) -> None:
    """Make the weights follow the public methods that an optimizer's class adds to torch's.

    The tensors in its param groups are masters, or whole parameters on the ranks that own them.
    Writes to them cannot all be seen, so weights are refreshed after each such method, as after an
    update, and all ranks must call it. Only those called `get...` are taken to write nothing, and
    another `train` after `train`: the Trainer calls it before each forward. Assignments to
    properties cannot be followed, which is logged.
    """
    setters = []
    for name, own in _added(type(optimizer)):
        if isinstance(own, property):
            setters.append(name)
        elif not name.startswith("get"):
            setattr(optimizer, name, _followed(name, own, optimizer, state))
    if setters and state.parts.ranks.rank == 0:
        _log.warning(
            "%s has properties that can be assigned (%s): if that changes its parameters, the"
            " model's weights do not follow before the next update; call a method in place of it",
            type(optimizer).__name__,
            few(setters),
        )
    engine = weakref.ref(state)

    def forget(_: Optimizer) -> None:
        found = engine()
        if found is not None:
            found.optimizer_trains = False

    optimizer.register_load_state_dict_post_hook(forget)


def _added(kind: type[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield the public methods, and properties that can be assigned, of an optimizer's class."""
    for name in dir(kind):
        own = inspect.getattr_static(kind, name)
        function = own.fset if isinstance(own, property) else own
        if name.startswith("_") or hasattr(Optimizer, name) or not inspect.isfunction(function):
            continue
        if function.__module__.partition(".")[0] not in ("torch", "hadal"):
            yield name, own


def _followed(name: str, method: _Method, optimizer: Optimizer, state: State) -> _Method:
    # Neither outlives the program's references because of this.
    owner, engine = weakref.ref(optimizer), weakref.ref(state)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = engine()
        bound = partial(method, owner(), *args, **kwargs)
        if found is None or found.ended or found.destroyed or found.stepping:
            return bound()
        if name == "train" and found.optimizer_trains:
            return bound()
        return _call(name, bound, found)

    return update_wrapper(call, method)


@torch.no_grad()
def _call(name: str, method: Callable[[], Any], state: State) -> Any:
    state.expect_alive()
    training, runtime = expect_training(state), state.parts.runtime
    if not runtime.gathering.is_at_rest:
        raise UsageError(
            f"rank {state.parts.ranks.rank}: optimizer.{name}() was called inside a forward, a"
            " backward or GatheredParameters; call it between them, as weights may change"
        )
    runtime.gathering.meet(Marker.METHOD)
    runtime.reshard_all()
    state.stepping = True  # the method may call others, or `step`
    try:
        with runtime.holding_frozen():
            return training.stepper.change(method)
    finally:
        state.stepping = False
        state.optimizer_trains = name == "train"


# ---- parameters of an engine in torch's functions ------------------------------------------------


@cache
def _watch_torch() -> None:
    """Check what torch's clipping functions and its optimizers are given, from now on.

    Programs import these functions by name, so replacing torch's attributes would miss most calls.
    Each is a wrapper that holds the real function in a closure cell; the cell is set to a function
    that checks the parameters first.
    """
    for wrapper in _CLIPPING:
        for cell in wrapper.__closure__ or ():
            if cell.cell_contents is vars(wrapper).get("__wrapped__", wrapper):
                cell.cell_contents = _checked(cell.cell_contents)
    register_optimizer_step_pre_hook(_lend)
    register_optimizer_step_post_hook(_take_back)


def _trained(parameters: Iterable[Tensor]) -> Iterator[tuple[State, nn.Parameter]]:
    """Yield the parameters whose gradients an engine holds, and its state."""
    engines = [state for state in _engines if not state.destroyed]
    for parameter in parameters if engines else ():
        if parameter.grad is None and parameter.requires_grad:
            for state in engines:
                bucket = state.parts.runtime.bucket_of.get(parameter)  # type: ignore[call-overload]
                if bucket is not None and bucket.trainable:
                    yield state, parameter  # type: ignore[misc]


def _name_of(parameter: nn.Parameter, state: State) -> str:
    names = (name for name, one in state.parts.model.named_parameters() if one is parameter)
    return next(names, "a parameter")


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        elif isinstance(parameters, GeneratorType):
            # torch warns of an empty generator, so it gets one again.
            parameters = list(parameters) or (each for each in parameters)
        for state, parameter in _trained(parameters):
            limit = args[0] if args else kwargs.get("max_norm", 1.0)
            _refuse_clipping(function.__name__.removeprefix("_"), limit, parameter, state)
            break
        return function(parameters, *args, **kwargs)

    return update_wrapper(check_and_clip, function)


def _refuse_clipping(function: str, limit: Any, parameter: nn.Parameter, state: State) -> None:
    """Raise `UsageError`, or warn once if the engine clips anyway."""
    found = f"torch.nn.utils.{function} got the gradient of {_name_of(parameter, state)}"
    found += ", which the engine holds: .grad is None, so this call clips nothing"
    where = f"rank {state.parts.ranks.rank}: {found}"
    clipping = state.parts.config.gradient_clipping
    if function == "clip_grad_value_":
        raise UsageError(
            f"{where}. Clip the norm instead (the key gradient_clipping), or change gradients with"
            " hadal.utils.safe_set_full_grad"
        )
    if not clipping:
        raise UsageError(
            f'{where}. Remove it and write "gradient_clipping": {limit} in the configuration; after'
            " engine.step(), engine.get_global_grad_norm() returns the norm"
        )
    if state not in _warned:
        _warned.add(state)
        _log.warning(
            "%s and returns no norm. Remove it: engine.step() already clips to gradient_clipping"
            " (%s), and engine.get_global_grad_norm() returns the norm afterwards",
            found,
            clipping,
        )


def _lend(optimizer: Optimizer, *_: Any) -> None:
    """Lend gradients to another optimizer, as programs that train layer by layer expect.

    Only one process in fp32 whose weights are plain does; its gradients are dropped afterwards.
    """
    engines: list[State] = []
    lent: list[nn.Parameter] = []
    for state, parameter in _trained(
        p for group in optimizer.param_groups for p in group["params"]
    ):
        if state.stepping or not state.parts.runtime.holds_gradients:
            continue
        bucket = state.parts.runtime.bucket_of[parameter]
        is_alone = state.parts.world.size == 1 and state.batches.accumulation == 1
        if not is_alone or bucket.partition.weights or bucket.has_own_master:
            raise UsageError(
                f"rank {state.parts.ranks.rank}: {type(optimizer).__name__}.step() was called for"
                f" {_name_of(parameter, state)}, whose gradient an engine holds: .grad is None, so"
                " the step changes nothing. Call engine.step(), or pass this optimizer to"
                " initialize (optimizer=...); another optimizer can train these parameters only"
                " before initialize, after engine.destroy(), or in one process in fp32 without"
                " accumulation"
            )
        if state not in engines:
            state.expect_alive()  # ends a backward that the program has started
            engines.append(state)
        gradient = safe_get_full_grad(parameter)
        if gradient is not None and bool(gradient.any()):  # torch leaves out what was not used
            parameter.grad = gradient
            lent.append(parameter)
    if engines:
        _lent[optimizer] = engines, lent


@torch.no_grad()
def _take_back(optimizer: Optimizer, *_: Any) -> None:
    engines, lent = _lent.pop(optimizer, ((), ()))
    for parameter in lent:
        parameter.grad = None
    for state in engines:
        state.parts.runtime.clear_gradients()
        state.forget_backwards()
