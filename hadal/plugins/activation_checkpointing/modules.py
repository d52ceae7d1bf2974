"""The modules that a configuration recomputes: their selection, and the wrapper of `forward`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hadal.device import is_in_node, saved_tensors_hooks_here
from hadal.errors import Fault, UsageError
from hadal.plugins.activation_checkpointing.function import Contexts, Recomputation, call_compiled

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
