"""The builders of `deepspeed.ops.op_builder`: nothing is built when a program runs.

They report whether their functionality is available. It is found under the names of its classes
(`DeepSpeedCPUAdam`), not in a module that `load` returns.

Tests: tests/compat/test_names.py
"""

from __future__ import annotations

from typing import Any, ClassVar

from hadal.compat.placeholders import unbuilt

# class name -> (name of the operator, whether its functionality is available)
_KNOWN: dict[str, tuple[str, bool]] = {
    "AsyncIOBuilder": ("async_io", False),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPULionBuilder": ("cpu_lion", True),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "FusedAdamBuilder": ("fused_adam", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "FusedLionBuilder": ("fused_lion", True),
    "GDSBuilder": ("gds", False),
    "InferenceBuilder": ("transformer_inference", False),
    "PinMemoryBuilder": ("pin_memory", True),
    "QuantizerBuilder": ("quantizer", False),
    "RaggedUtilsBuilder": ("ragged_device_ops", False),
    "SparseAttnBuilder": ("sparse_attn", True),
    "SpatialInferenceBuilder": ("spatial_inference", False),
    "TransformerBuilder": ("transformer", False),
    "UtilsBuilder": ("utils", True),
}


class OpBuilder:
    """The methods of every builder."""

    NAME: ClassVar[str] = ""
    is_there: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name
        self.error_log: str | None = None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the functionality is available."""
        return self.is_there

    def load(self, verbose: bool = True) -> Any:
        """Raise, because there is no module to return.

        Raises:
            NotBuiltYetError: always.
        """
        raise unbuilt(f"deepspeed.ops.op_builder.{type(self).__name__}().load()")


_BUILDERS = {
    name: type(name, (OpBuilder,), {"NAME": operator, "is_there": is_there, "__doc__": operator})
    for name, (operator, is_there) in _KNOWN.items()
}
COMPATIBLE_OPS: dict[str, bool] = dict(_KNOWN.values())
"""Name of an operator -> whether Hadal has a replacement for it."""


def builder_of(class_name: str) -> type[OpBuilder] | None:
    """Return a builder's class by its name."""
    return _BUILDERS.get(class_name)


def __getattr__(name: str) -> type[OpBuilder]:
    if name not in _BUILDERS:
        raise AttributeError(f"module 'hadal.compat.builders' has no attribute {name!r}")
    return _BUILDERS[name]
