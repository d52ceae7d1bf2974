"""The optimizer as programs see it: an object around torch's, which the engine steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.compat.accessors import warn_of_stores
from hadal.compat.kinds import recognized
from hadal.compat.optimizers import Scale
from hadal.compat.surface import NameKind, placeholder
from hadal.engine.engine import Engine
from hadal.engine.training import expect_training

if TYPE_CHECKING:
    from hadal.compat.engine import DeepSpeedEngine


_log = logging.getLogger(__name__)
_METHODS_OF_THE_ENGINE = ("offload_states", "reload_states", "empty_partition_cache")


class Coordinator:
    """Receives reports that weights were read outside the mechanism, which Hadal notices itself."""

    def is_invalid_trace(self) -> bool:
        """Return whether there is no trace to discard."""
        return True

    def _invalidate_trace(self) -> None:
        """Do nothing: ranks compare the order of uses each time, so no trace is stale."""


class ParameterOffload:
    """Lets programs remove hooks while they generate with gathered weights, and restore them.

    Hadal's hooks stay: they do nothing while weights are whole. So there are none to remove.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = Coordinator()

    def get_param_coordinator(self) -> Coordinator:
        """Return the coordinator."""
        return self.param_coordinator

    def setup_zero_stage3_hooks(self) -> None:
        """Hang all hooks on the model again; none were taken off."""

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Restore a module's hooks; none were removed."""


class EngineScale(Scale):
    """An engine's loss scale, which programs read from its optimizer."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine._parts.scale_rule)
        self._engine = engine

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self._engine.loss_scale


class DeepSpeedOptimizer:
    """The optimizer that `deepspeed.initialize` returns; its `optimizer` is torch's own.

    Attributes that it does not have are the inner optimizer's.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine, *, stage: int) -> None:
        self.optimizer = optimizer
        self.loss_scaler = EngineScale(engine)
        self._engine = engine
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        """Return the inner optimizer's attribute, or a method that the engine has in its place."""
        if name == "optimizer":
            raise AttributeError(name)
        if name in _METHODS_OF_THE_ENGINE:
            return getattr(self._engine, name)
        if hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        raise AttributeError(
            f"neither the engine's optimizer nor torch's ({type(self.optimizer).__name__}) has an"
            f" attribute {name!r}: gradients, masters and optimizer state are in buckets, which"
            " deepspeed.utils.safe_get_full_grad and its kin access; the norm is"
            " engine.get_global_grad_norm(), and fp16.loss_scale sets the loss scale"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own list: rates written here take effect."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups[:] = groups

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The inner optimizer's state, on the device."""
        if self._engine._state.moved:
            self._engine._parts.runtime.expect_here()
        return self.optimizer.state

    # ---- present at some stages only -------------------------------------------------------------

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The `ParameterOffload`, at stage 3."""
        self._expect_stage("parameter_offload", 3)
        return ParameterOffload(self._engine.module)

    @property
    def param_coordinator(self) -> Coordinator:
        """The `Coordinator`, at stage 3."""
        self._expect_stage("param_coordinator", 3)
        return Coordinator()

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's flat shards of the masters, at stage 3."""
        self._expect_stage("fp32_partitioned_groups_flat", 3)
        return self._masters

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's flat shards of the masters, at stages 1 and 2."""
        self._expect_stage("single_partition_of_fp32_groups", 1, 2)
        return self._masters

    @property
    def _masters(self) -> list[Tensor]:
        return [piece for group in self.param_groups for piece in group["params"]]

    def _expect_stage(self, name: str, *stages: int) -> None:
        if self._stage not in stages:
            raise AttributeError(f"there is no {name} at stage {self._stage}")

    dp_process_group = property(lambda self: self._engine.topology.sharding.group)
    """The ranks that average gradients."""
    _global_grad_norm = property(lambda self: self._engine.get_global_grad_norm())
    """The result of `engine.get_global_grad_norm()`."""

    def refresh_fp32_params(self) -> None:
        """Do nothing: weights that programs write reach the masters before the next update."""

    # ---- overflows -------------------------------------------------------------------------------

    overflow = property(lambda self: self._engine.overflow)
    """True if the last update was skipped."""

    def check_overflow(self, external: bool = False) -> bool:
        """Return whether the next update would be skipped. All ranks must call it.

        Programs that train two models use it to skip the update of one with the other's.
        """
        return self._engine.find_overflow()

    @property
    def skip_step(self) -> bool:
        """True if the next update is skipped; programs set it, on all ranks."""
        return self._engine.skips_next_update

    @skip_step.setter
    def skip_step(self, skips: bool) -> None:
        self._engine.skips_next_update = skips

    loss_scale = cur_scale = property(lambda self: self.loss_scaler.loss_scale)
    """The factor of the loss; the second name is an older one."""

    dynamic_loss_scale = property(lambda self: bool(self.loss_scaler.dynamic))
    """True if overflows change the loss scale."""

    def needs_scaler(self) -> bool:
        """Return whether a backward of the program's own needs `engine.scale(loss)`."""
        return bool(self.dynamic_loss_scale or self.loss_scale != 1.0)

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: `initialize` has quantized them if the configuration requests it."""
        self._expect_stage("quantize_nontrainable_params", 3)
        zero = self._engine._parts.config.zero_optimization
        if not zero.zero_quantized_nontrainable_weights:
            _log.warning(
                "optimizer.quantize_nontrainable_params() does nothing: it is for"
                " zero_optimization.zero_quantized_nontrainable_weights true"
            )

    # ---- stepping --------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Do as `engine.step` does, but leave the schedule to the program, as DeepSpeed does."""
        training = expect_training(self._engine._state)
        schedule, training.schedule = training.schedule, None
        try:
            self._engine.step()
        finally:
            training.schedule = schedule

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients collected since the last update."""
        self._engine.zero_grad(set_to_none)


warn_of_stores(DeepSpeedOptimizer, "optimizer")


class PlainOptimizer(DeepSpeedOptimizer, Optimizer):  # type: ignore[misc]
    """An optimizer that is torch's to `isinstance`: programs attach their own schedules to it.

    All attributes of torch's class are the inner optimizer's.
    """

    # torch's schedules set it to detect that they were stepped before the first update.
    _opt_called = False

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        """Return the inner optimizer's representation."""
        return repr(self.optimizer)


# ---- the classes that programs test for by `isinstance` ------------------------------------------


OptimizerCallable = Callable[[Any], Optimizer]
"""Values `initialize(optimizer=)` takes besides an optimizer: it makes one of the parameters."""
SchedulerCallable = Callable[[Optimizer], Any]
"""Values `initialize(lr_scheduler=)` takes besides a schedule."""


def _kind(name: str, doc: str, fits: Callable[[DeepSpeedEngine], bool], *unbuilt: str) -> Any:
    """Return the class of the optimizers of engines that fit; some methods are not built."""
    methods = {
        each: staticmethod(placeholder(f"deepspeed's {name}.{each}", NameKind.FUNCTION))
        for each in unbuilt
    }
    return recognized(
        name,
        doc,
        lambda thing: isinstance(thing, DeepSpeedOptimizer) and fits(cast(Any, thing._engine)),
        "deepspeed.initialize returns an optimizer that is an instance of it; pass it the optimizer"
        " and the configuration",
        **methods,
    )


def _is_bf16_with_fp32_gradients(engine: DeepSpeedEngine) -> bool:
    """Return whether DeepSpeed trains such an engine with its BF16_Optimizer."""
    if not engine.bfloat16_enabled():
        return False
    keeps_fp32 = engine._parts.config.data_types.grad_accum_dtype == "fp32"
    is_stage_1 = engine.zero_optimization_stage() == 1 and not engine.zero_cpu_offload()
    return (is_stage_1 and keeps_fp32) or (
        engine.pipeline_parallelism and not engine.zero_optimization()
    )


def _is_16_bit_without_zero(engine: DeepSpeedEngine) -> bool:
    is_16_bit = engine.fp16_enabled() or engine.bfloat16_enabled()
    return is_16_bit and not engine.zero_optimization()


def _is_by_parameter(engine: DeepSpeedEngine) -> bool:
    return engine.optimizer_name() in ("lamb", "onebitlamb")


DeepSpeedZeroOptimizer = _kind(
    "DeepSpeedZeroOptimizer",
    "The optimizer of stage 1 or 2.",
    lambda engine: engine.zero_optimization_stage() in (1, 2),
    *("copy_grads_in_partition", "get_all_grad_tensors", "setup_buckets"),
)
DeepSpeedZeroOptimizer_Stage3 = _kind(
    "DeepSpeedZeroOptimizer_Stage3",
    "The optimizer of stage 3.",
    lambda engine: engine.zero_optimization_partition_weights(),
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
)
ZeROOptimizer = _kind(
    "ZeROOptimizer",
    "The optimizer of stage 1, 2 or 3.",
    lambda engine: engine.zero_optimization(),
)
BF16_Optimizer = _kind(
    "BF16_Optimizer",
    "The optimizer of a bf16 model at stage 1 that keeps fp32 gradients, or in pipeline stages.",
    _is_bf16_with_fp32_gradients,
)
FP16_Optimizer = _kind(
    "FP16_Optimizer",
    "The optimizer of a 16-bit model without ZeRO: each rank keeps all masters.",
    lambda engine: _is_16_bit_without_zero(engine) and not _is_by_parameter(engine),
)
FP16_UnfusedOptimizer = _kind(
    "FP16_UnfusedOptimizer",
    "The same with Lamb, which steps each parameter separately.",
    lambda engine: _is_16_bit_without_zero(engine) and _is_by_parameter(engine),
)
