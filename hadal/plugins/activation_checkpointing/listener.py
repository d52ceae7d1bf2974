"""The section `activation_checkpointing` in an engine: the modules it selects are recomputed."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import is_host_memory, is_in_node, saved_tensors_hooks_here
from hadal.errors import Fault, UsageError
from hadal.listener import Forward, Listener, Update
from hadal.plugins.activation_checkpointing.function import Contexts, Recomputation, call_compiled
from hadal.plugins.activation_checkpointing.measuring import (
    CallMeter,
    MeasuredBackward,
    MeasuredStep,
    Meter,
    ModuleChoice,
    Verdict,
    choose,
    meter_of,
    table,
)

_log = logging.getLogger(__name__)

PATH = "activation_checkpointing.modules"
# Containers of other modules that are never called themselves.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_SWITCH = "gradient_checkpointing"
# The name of torch's own hooks around a call that it will recompute.
_TORCHS_HOOKS = "_checkpoint_hook."


def chosen(
    model: nn.Module, wish: str | Sequence[str], blocks: Sequence[str]
) -> tuple[dict[str, nn.Module], list[Fault]]:
    """Return the modules that a value of `activation_checkpointing.modules` names.

    Args:
        model: the whole model.
        wish: "units" for `blocks`; else patterns. A pattern matches a class's name, or a module's
            full name, in which `*` matches any part between two dots.
        blocks: the full names of the model's repeated blocks.

    Returns:
        The modules by full name, and the faults of the value.
    """
    modules = dict(model.named_modules())
    if isinstance(wish, str):
        if blocks:
            return {name: modules[name] for name in blocks}, []
        message = (
            '"units" finds no repeated blocks (a ModuleList or Sequential of modules of one class);'
            f" give patterns, such as {_examples(modules)}"
        )
        return {}, [Fault(PATH, message)]
    if not wish:
        message = 'an empty list recomputes nothing; give "units" or patterns, or leave the key out'
        return {}, [Fault(PATH, message)]
    found: dict[str, nn.Module] = {}
    faults: list[Fault] = []
    for pattern in wish:
        mine = {name: one for name, one in modules.items() if _matches(pattern, name, one)}
        if not mine:
            faults.append(Fault(PATH, _unmatched(pattern, modules, blocks)))
        found |= mine
    faults += _misfits({name: found[name] for name in modules if name in found})
    return {name: found[name] for name in modules if name in found}, faults


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    if type(module).__name__ == pattern:
        return True
    if not name:
        return False  # the whole model; its class names it
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _unmatched(pattern: str, modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> str:
    names = [*modules, *{type(module).__name__ for module in modules.values()}]
    near = get_close_matches(pattern, filter(None, names), n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"names here are {_examples(modules)};"
    units = ' "units" selects the repeated blocks' if blocks else ""
    return f"{pattern!r} matches no module's name or class; {meant}{units}"


def _examples(modules: Mapping[str, nn.Module]) -> str:
    composite = [name for name, one in modules.items() if name and [*one.children()]]
    return ", ".join(map(repr, (composite or [name for name in modules if name])[:3]))


def _misfits(found: Mapping[str, nn.Module]) -> Iterator[Fault]:
    for name, module in found.items():
        if isinstance(module, _NEVER_CALLED):
            kind = type(module).__name__
            yield Fault(PATH, f"{name} is a {kind}, which is never called; give '{name}.*'")
            continue
        called = [other for other, one in found.items() if not isinstance(one, _NEVER_CALLED)]
        above = next((other for other in called if _is_below(name, other)), None)
        if above is not None:
            yield Fault(
                PATH,
                f"{name} would be recomputed twice: {above or 'the model'}, which contains it, is"
                " selected too; narrow the patterns to one of them",
            )


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def recomputed_elsewhere(model: nn.Module, names: Sequence[str]) -> str | None:
    """Return a message if transformers' gradient checkpointing already recomputes one of these."""
    for place, module in model.named_modules():
        if getattr(module, _SWITCH, False) is not True:
            continue
        for name in names:
            if place == name or _is_below(place, name) or _is_below(name, place):
                return (
                    f"{name} would be recomputed twice: {_SWITCH} of transformers is on"
                    f" ({place or 'the model'}). Leave activation_checkpointing.modules out, or"
                    " switch it off (gradient_checkpointing=False in TrainingArguments,"
                    " model.gradient_checkpointing_disable())"
                )
    return None


class Recomputed:
    """A module's `forward`, recomputed in backward. Copies of the module do not inherit it."""

    def __init__(self, name: str, module: nn.Module, recomputation: Recomputation) -> None:
        """Wrap the `forward` of `module`, whose hooks run once, outside the wrapper."""
        self.name = name
        self.recomputation: Recomputation | None = recomputation
        """The recomputation of the module; None if it is not recomputed."""
        self.around: Callable[[str, list[Tensor]], Contexts] | None = None
        """Makes the contexts of each call, from the module's name and its inputs."""
        self.is_again = False
        """True if its latest call was a recomputation."""
        self._is_told = False
        self._module = module
        self._before = module.__dict__.get("forward")
        self._forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self._forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, recomputed in backward.

        Raises:
            UsageError: the model recomputes the module too, or `number_checkpoints` is too small.
        """
        if self.recomputation is None:
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return call_compiled(self._forward, *args, **kwargs)
        if is_in_node():
            self._tell_inside()
            return self._forward(*args, **kwargs)
        hooks = saved_tensors_hooks_here()
        if hooks is not None and hooks[0].__qualname__.startswith(_TORCHS_HOOKS):
            raise UsageError(
                f"{self.name} is recomputed twice: {PATH} selects it, and the model calls it inside"
                " torch.utils.checkpoint; leave it out of the patterns, or remove that call"
            )
        around = None if self.around is None else functools.partial(self.around, self.name)
        return self.recomputation.run(self._noting, args, kwargs, around)

    def _noting(self, *args: Any, **kwargs: Any) -> Any:
        self.is_again = is_in_node()
        return self._forward(*args, **kwargs)

    def _tell_inside(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        _log.warning(
            "%s is called during a backward, by a recomputation of the model's own: %s has no"
            " effect on it; leave it out of the patterns",
            self.name,
            PATH,
        )

    def remove(self) -> None:
        """Restore the module's own `forward`."""
        if self._module.__dict__.get("forward") is not self:
            return
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _own_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return _own_forward, (self._module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


# The measured update; the first one creates optimizer state and records the order of uses.
_MEASURED = 1


class RecomputedModules(Listener):
    """Recomputes modules of a model as long as its engine lives."""

    name = "activation_checkpointing"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], recomputation: Recomputation
    ) -> None:
        """Choose the modules, by full name, and how they are recomputed."""
        self._model = model
        self._modules = dict(modules)
        self._recomputation = recomputation
        self._placed: list[Recomputed] = []
        self._is_checked = False
        self._caches = _takes_cache(model)

    def on_attach(self, engine: Any) -> None:
        """Wrap the modules' forwards in recomputation."""
        self._placed = [
            Recomputed(name, module, self._recomputation) for name, module in self._modules.items()
        ]

    def before_forward(self, forward: Forward) -> Forward | None:
        """Stop a transformer from caching keys and values, which a recomputation would add again.

        Raises:
            UsageError: transformers' own gradient checkpointing was turned on after `initialize`.
        """
        if not torch.is_grad_enabled():
            return None
        if not self._is_checked:
            self._is_checked = True
            message = recomputed_elsewhere(self._model, list(self._modules))
            if message is not None:
                raise UsageError(message)
        if not self._caches:
            return None
        return forward._replace(kwargs={**forward.kwargs, "use_cache": False})

    def on_error(self, error: BaseException) -> None:
        """Add the module and the remedy to torch's error about a recomputation."""
        if not isinstance(error, CheckpointError):
            return
        # Backward goes from the last module to the first.
        name = next((one.name for one in self._placed if one.is_again), "a module")
        error.args = (
            f"activation_checkpointing.modules: {name} computed something else when it was"
            " recomputed in backward (a cache, a counter, or a tensor that was changed in place);"
            " let its forward depend on its inputs alone, or leave it out of the patterns."
            f"\n{error}",
        )

    def close(self) -> None:
        """Restore the modules' own forwards."""
        for one in self._placed:
            one.remove()
        self._recomputation.reset()


class Surroundings(NamedTuple):
    """Device, ranks and size of a budget."""

    device: torch.device
    world: Ranks
    budget: int
    """The most bytes in use on each rank's device."""


class BudgetedModules(RecomputedModules):
    """Recomputes as few modules as a memory budget allows, from one measured update.

    Every module is recomputed in the first two updates. The second is measured, as the first
    creates optimizer state and plans. All ranks make the same choice. A later update checks the
    predicted peak; if it exceeds the budget, more modules are recomputed.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        options: ActivationCheckpointing,
        ranks: Ranks | None,
        around: Surroundings,
    ) -> None:
        """Set the modules, the section and the tensor-parallel ranks."""
        super().__init__(model, modules, Recomputation(options, ranks))
        self._around = around
        self._offloading: Recomputation | None = None
        if not options.cpu_checkpointing and not is_host_memory(around.device):
            on_host = options.model_copy(update={"cpu_checkpointing": True})
            self._offloading = Recomputation(on_host, ranks)
        self._meter: Meter | None = None
        self._calls: CallMeter | None = None
        self._backwards: list[MeasuredBackward] = []
        self._steps: list[MeasuredStep] = []
        self._checked = -1
        self._budget = around.budget
        self.verdict: Verdict | None = None
        """The choice, once it is made; None before."""

    @property
    def _measures(self) -> bool:
        """True in the update that is measured to choose; False in one that checks the choice."""
        return self.verdict is None

    def on_attach(self, engine: Any) -> None:
        """Wrap the modules' forwards in recomputation."""
        super().on_attach(engine)
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> Forward | None:
        """Measure a forward of the updates that are measured."""
        engine = self._engine()
        is_eager = engine is not None and not engine.is_compiled
        if is_eager and forward.is_training and torch.is_grad_enabled():
            if forward.updates in (_MEASURED, self._checked) and self._meter is None:
                self._meter = meter_of(self._around.device)
                self._meter.take_peak()
            if self._meter is not None:
                self._meter.start()
                if self._measures and self._calls is None:
                    self._calls = CallMeter(self._meter, self._around.device)
                    for one in self._placed:
                        one.around = self._calls.around
        return super().before_forward(forward)

    def after_forward(self, output: Any) -> None:
        """End the measurement of a forward."""
        self._stop()

    def before_backward(self) -> None:
        """Measure a backward."""
        if self._meter is not None:
            self._meter.start()

    def after_backward(self, loss: Tensor | None) -> None:
        """End the measurement of a backward."""
        self._stop()
        if self._calls is not None:
            self._backwards.append(self._calls.result())
            self._calls = None
            for one in self._placed:
                one.around = None

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Measure the update of the weights."""
        self.before_backward()

    def after_update(self, update: Update) -> None:
        """Choose after the measured update; compare with the prediction after the checked one."""
        if self._meter is None:
            if update.number == _MEASURED + 1:
                self._tell("a compiled model is not measured; every module is recomputed")
            return
        self._stop()
        peak, self._meter = self._meter.take_peak(), None
        if self._measures:
            mine = MeasuredStep(tuple(self._backwards), peak)
            self._steps = gather_objects(mine, self._around.world)
            self._backwards = []
            self._checked = update.number + 1
            self._choose()
        else:
            self._check(max(gather_objects(peak, self._around.world)))

    def _choose(self) -> None:
        if not any(one.calls for step in self._steps for one in step.backwards):
            self._tell("no module was recomputed in eager mode; memory_budget has no effect")
            self._checked = -1
            return
        names, offloads = list(self._modules), self._offloading is not None
        self.verdict = choose(self._steps, names, self._budget, offloads=offloads)
        ways = {
            ModuleChoice.RECOMPUTED: self._recomputation,
            ModuleChoice.OFFLOADED: self._offloading,
        }
        for one in self._placed:
            one.recomputation = ways.get(self.verdict.choices[one.name])
        level = logging.INFO if self.verdict.fits else logging.WARNING
        self._tell("\n".join(table(self._steps, self.verdict)), level)

    def _check(self, peak: int) -> None:
        assert self.verdict is not None  # it was chosen
        promised, self._checked = self.verdict.peak, -1
        self._tell(
            f"peak measured: {peak / 2**20:,.1f} MiB, {peak / promised - 1:+.1%} of the table's"
        )
        if peak > self._around.budget >= promised:
            self._budget -= peak - self._around.budget
            self._choose()

    def _tell(self, message: str, level: int = logging.INFO) -> None:
        if self._around.world.rank == 0:
            _log.log(level, "activation_checkpointing.memory_budget: %s", message)

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()

    def on_error(self, error: BaseException) -> None:
        """End a measurement; the next update is measured instead."""
        super().on_error(error)
        self._stop()
        self._meter = self._calls = None
        self._backwards = []
        for one in self._placed:
            one.around = None


def _takes_cache(model: nn.Module) -> bool:
    """Return whether a model of transformers, or a part of it, may keep keys and values."""
    config = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    if not any(hasattr(one, "use_cache") for one in (config, *parts)):
        return False
    names = inspect.signature(model.forward).parameters.values()
    return any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in names)
