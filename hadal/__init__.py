"""Hadal trains large PyTorch models from one `ds_config.json`.

The public API, and nothing else. Every name is resolved on first use (PEP 562), so that
`import hadal` costs nothing and the `hadal` command starts without importing torch.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hadal import comm, utils, zero
    from hadal.compat.install import install_as_deepspeed
    from hadal.data.loader import RepeatingLoader
    from hadal.engine.arguments import (
        add_config_arguments,
        add_tuning_arguments,
        schedule_from_args,
    )
    from hadal.engine.assemble import initialize
    from hadal.engine.engine import Engine
    from hadal.engine.foresight import plan
    from hadal.errors import (
        CheckpointError,
        ChoiceError,
        CommunicationError,
        ConfigError,
        HadalError,
        LaunchError,
        LossError,
        LossScaleError,
        MismatchError,
        MissingAttributeError,
        MissingPackageError,
        ModelError,
        MonitorError,
        NonFiniteError,
        NotBuiltYetError,
        OffloadError,
        OptimizerError,
        PipelineError,
        SequenceError,
        ShardedAccessError,
        TuningError,
        UnbuiltConfigError,
        UsageError,
    )
    from hadal.listener import Forward, Listener, Update
    from hadal.zero.leaves import set_z3_leaf_modules, unset_z3_leaf_modules

    from .comm import init_distributed

__version__ = "0.2.0"

_HOMES = {
    "Engine": "hadal.engine.engine",
    "Forward": "hadal.listener",
    "Listener": "hadal.listener",
    "RepeatingLoader": "hadal.data.loader",
    "Update": "hadal.listener",
    "add_config_arguments": "hadal.engine.arguments",
    "add_tuning_arguments": "hadal.engine.arguments",
    "schedule_from_args": "hadal.engine.arguments",
    "init_distributed": "hadal.comm",
    "initialize": "hadal.engine.assemble",
    "install_as_deepspeed": "hadal.compat.install",
    "plan": "hadal.engine.foresight",
    "set_z3_leaf_modules": "hadal.zero.leaves",
    "unset_z3_leaf_modules": "hadal.zero.leaves",
}
_SUBPACKAGES = ("comm", "utils", "zero")
_PLUGINS = (
    "activation_checkpointing",
    "autotuning",
    "compression",
    "data_efficiency",
    "moe",
    "monitor",
    "pipeline",
    "profiling",
    "sequence",
    "sparse_attention",
    "tensor_parallel",
)

__all__ = [
    "CheckpointError",
    "ChoiceError",
    "CommunicationError",
    "ConfigError",
    "Engine",
    "Forward",
    "HadalError",
    "LaunchError",
    "Listener",
    "LossError",
    "LossScaleError",
    "MismatchError",
    "MissingAttributeError",
    "MissingPackageError",
    "ModelError",
    "MonitorError",
    "NonFiniteError",
    "NotBuiltYetError",
    "OffloadError",
    "OptimizerError",
    "PipelineError",
    "RepeatingLoader",
    "SequenceError",
    "ShardedAccessError",
    "TuningError",
    "UnbuiltConfigError",
    "Update",
    "UsageError",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
    "plan",
    "schedule_from_args",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name in _SUBPACKAGES:
        return _imported(f"hadal.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'hadal' has no attribute {name!r}")
    value = getattr(_imported(_HOMES.get(name, "hadal.errors")), name)
    globals()[name] = value
    return value


def _imported(name: str) -> ModuleType:
    """Import a module without a garbage collection.

    An import leaves no garbage. A collection meanwhile only scans all of torch's objects: 65 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return __all__


class _PluginFinder(MetaPathFinder, Loader):
    """Finds `hadal.moe`, the public path, in `hadal/plugins/moe`: one module under both names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_plugin = name.startswith("hadal.") and name.split(".")[1] in _PLUGINS
        return ModuleSpec(name, self, is_package=True) if is_plugin else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(name.replace("hadal", "hadal.plugins", 1))


# First: a plugin's folder would lead the path finder to a second copy of its files.
sys.meta_path.insert(0, _PluginFinder())
