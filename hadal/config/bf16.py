"""`bf16`: training with bfloat16 weights."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.optimizer_kinds import in_blocks
from hadal.config.section import Section, key
from hadal.config.values import Boolean

_NEVER_SCALED = "ignored: bf16 has the range of fp32, its loss is never scaled"


class Bf16(Section):
    """Weights and gradients in bfloat16, without loss scaling; masters in fp32."""

    switch: ClassVar[str | None] = "enabled"
    leftovers: ClassVar[Mapping[str, str]] = {
        "loss_scale": _NEVER_SCALED,
        "loss_scale_window": _NEVER_SCALED,
        "initial_scale_power": _NEVER_SCALED,
        "hysteresis": _NEVER_SCALED,
        "min_loss_scale": _NEVER_SCALED,
        "check_overflow": "ignored: this name was never read; `check_grad_overflow` is the key",
    }

    enabled: Boolean = key(False, "Train in bfloat16. Excludes `fp16.enabled`.")
    immediate_grad_update: Boolean = key(
        False,
        "Accumulate gradients in fp32. Each gradient is added to its sum as soon as backward "
        "produces it in any case; true makes the dtype of the sums fp32, as "
        '`data_types.grad_accum_dtype` "fp32" does.',
    )
    check_grad_overflow: Boolean = key(
        True,
        "Skip an update whose gradients contain an infinity or a NaN; false applies it.",
    )
    bf16_master_weights_and_grads: Boolean = key(
        False,
        "Keep no fp32 masters: the optimizer updates the bfloat16 weights directly (computing "
        "in fp32), and its moments stay fp32. Requires stage 1-3. DeepSpeed also requires Adam "
        f"offloaded to the CPU, for lack of another kernel; here {in_blocks('and')} support it in "
        "every tier.",
    )
    bf16_optimizer_states: Boolean = key(
        False,
        "Keep optimizer state (Adam's moments) in bfloat16 too. Requires stage 1-3 and "
        "`bf16_master_weights_and_grads`.",
    )
