"""Names of modules and parameters by the object, as programs look them up to log them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

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
