"""The optimizer classes that programs test for by `isinstance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from hadal.compat.optimizer import DeepSpeedOptimizer
from hadal.compat.placeholders import placeholder, unbuilt
from hadal.compat.surface import NameKind
from hadal.errors import UsageError

if TYPE_CHECKING:
    from hadal.compat.engine import DeepSpeedEngine


OptimizerCallable = Callable[[Any], Optimizer]
"""Values `initialize(optimizer=)` takes besides an optimizer: it makes one of the parameters."""
SchedulerCallable = Callable[[Optimizer], Any]
"""Values `initialize(lr_scheduler=)` takes besides a schedule."""
_BY_PARAMETER = ("lamb", "onebitlamb")


def unbuilt_method(name: str) -> Any:
    """Return a method that exists, so that programs find it, and raises NotBuiltYetError."""
    return staticmethod(placeholder(f"deepspeed's {name}", NameKind.FUNCTION))


class _OptimizerClass(type):
    """A class without instances: an engine's optimizer counts as one if its training fits."""

    def __instancecheck__(cls, thing: Any) -> bool:
        """Return whether an engine's optimizer is of this kind."""
        return isinstance(thing, DeepSpeedOptimizer) and cls.fits(thing._engine)  # type: ignore[attr-defined]

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse a program's own method: nothing here would call it."""
        raise unbuilt(f"replacing {cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: the class cannot be instantiated."""
        raise UsageError(
            f"{cls.__name__} cannot be created by programs: deepspeed.initialize returns an"
            " optimizer that is an instance of it; pass it the optimizer and the configuration"
        )


class DeepSpeedZeroOptimizer(metaclass=_OptimizerClass):
    """The optimizer of stage 1 or 2."""

    copy_grads_in_partition = unbuilt_method("DeepSpeedZeroOptimizer.copy_grads_in_partition")
    get_all_grad_tensors = unbuilt_method("DeepSpeedZeroOptimizer.get_all_grad_tensors")
    setup_buckets = unbuilt_method("DeepSpeedZeroOptimizer.setup_buckets")

    @staticmethod
    def fits(engine: DeepSpeedEngine) -> bool:
        """Return whether optimizer states are sharded and weights are not."""
        return engine.zero_optimization_stage() in (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OptimizerClass):
    """The optimizer of stage 3."""

    __avg_scatter_grads = unbuilt_method("DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads")

    @staticmethod
    def fits(engine: DeepSpeedEngine) -> bool:
        """Return whether weights are sharded."""
        return engine.zero_optimization_partition_weights()


class ZeROOptimizer(metaclass=_OptimizerClass):
    """The optimizer of stage 1, 2 or 3."""

    @staticmethod
    def fits(engine: DeepSpeedEngine) -> bool:
        """Return whether anything is sharded."""
        return engine.zero_optimization()


class FP16_Optimizer(metaclass=_OptimizerClass):
    """The optimizer of a 16-bit model without ZeRO."""

    @staticmethod
    def fits(engine: DeepSpeedEngine) -> bool:
        """Return whether each rank keeps all masters of 16-bit weights."""
        return _is_16_bit_without_zero(engine) and engine.optimizer_name() not in _BY_PARAMETER


class FP16_UnfusedOptimizer(metaclass=_OptimizerClass):
    """The same with Lamb, which steps each parameter separately."""

    @staticmethod
    def fits(engine: DeepSpeedEngine) -> bool:
        """Return whether Lamb steps such masters."""
        return _is_16_bit_without_zero(engine) and engine.optimizer_name() in _BY_PARAMETER


def _is_16_bit_without_zero(engine: DeepSpeedEngine) -> bool:
    is_16_bit = engine.fp16_enabled() or engine.bfloat16_enabled()
    return is_16_bit and not engine.zero_optimization()
