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
    from hadal import comm as comm, utils as utils, zero as zero
    from hadal.compat.install import install_as_deepspeed as install_as_deepspeed
    from hadal.data.loader import RepeatingLoader as RepeatingLoader
    from hadal.engine.arguments import (
        add_config_arguments as add_config_arguments,
        add_tuning_arguments as add_tuning_arguments,
        schedule_from_args as schedule_from_args,
    )
    from hadal.engine.assemble import initialize as initialize
    from hadal.engine.engine import Engine as Engine
    from hadal.engine.foresight import plan as plan
    from hadal.errors import (
        CheckpointError as CheckpointError,
        ChoiceError as ChoiceError,
        CommunicationError as CommunicationError,
        ConfigError as ConfigError,
        HadalError as HadalError,
        LaunchError as LaunchError,
        LossError as LossError,
        LossScaleError as LossScaleError,
        MismatchError as MismatchError,
        MissingAttributeError as MissingAttributeError,
        MissingPackageError as MissingPackageError,
        ModelError as ModelError,
        MonitorError as MonitorError,
        NonFiniteError as NonFiniteError,
        NotBuiltYetError as NotBuiltYetError,
        OffloadError as OffloadError,
        OptimizerError as OptimizerError,
        PipelineError as PipelineError,
        SequenceError as SequenceError,
        ShardedAccessError as ShardedAccessError,
        TuningError as TuningError,
        UnbuiltConfigError as UnbuiltConfigError,
        UsageError as UsageError,
    )
    from hadal.listener import Forward as Forward, Listener as Listener, Update as Update
    from hadal.zero.leaves import (
        set_z3_leaf_modules as set_z3_leaf_modules,
        unset_z3_leaf_modules as unset_z3_leaf_modules,
    )

    from .comm import init_distributed as init_distributed

__version__ = "0.2.0"

_HOMES = {
    "hadal.comm": "init_distributed",
    "hadal.compat.install": "install_as_deepspeed",
    "hadal.data.loader": "RepeatingLoader",
    "hadal.engine.arguments": "add_config_arguments add_tuning_arguments schedule_from_args",
    "hadal.engine.assemble": "initialize",
    "hadal.engine.engine": "Engine",
    "hadal.engine.foresight": "plan",
    "hadal.errors": (
        "CheckpointError ChoiceError CommunicationError ConfigError HadalError "
        "LaunchError LossError LossScaleError MismatchError MissingAttributeError "
        "MissingPackageError ModelError MonitorError NonFiniteError NotBuiltYetError "
        "OffloadError OptimizerError PipelineError SequenceError ShardedAccessError "
        "TuningError UnbuiltConfigError UsageError"
    ),
    "hadal.listener": "Forward Listener Update",
    "hadal.zero.leaves": "set_z3_leaf_modules unset_z3_leaf_modules",
}
"""The public names that each module defines."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
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

__all__ = sorted([*_HOME_OF, *_SUBPACKAGES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name in _SUBPACKAGES:
        return _imported(f"hadal.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'hadal' has no attribute {name!r}")
    value = getattr(_imported(_HOME_OF[name]), name)
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
