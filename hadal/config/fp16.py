"""`fp16`: training with half-precision weights and a scaled loss."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Number


class Fp16(Section):
    """Weights and gradients in fp16; the loss is scaled so that small gradients survive."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Train in fp16. Excludes `bf16.enabled` and `amp.enabled`.")
    auto_cast: Boolean = key(False, "Cast floating-point inputs to fp16.", mark=UNBUILT)
    loss_scale: Number = key(0, "Scale of the loss; 0 finds it while training (dynamic).", ge=0)
    initial_scale_power: Integer = key(
        16, "A dynamic scale starts at 2 to this power.", ge=0, le=127
    )
    loss_scale_window: Integer = key(
        1000, "Updates without overflow after which a dynamic scale doubles."
    )
    hysteresis: Integer = key(2, "Overflows forgiven before a dynamic scale is halved.", ge=1)
    consecutive_hysteresis: Boolean = key(
        False, "Forgive anew after each clean update, not only after the scale has grown."
    )
    min_loss_scale: Integer = key(1, "Floor of a dynamic scale; an overflow at it ends training.")
    fp16_master_weights_and_grads: Boolean = key(
        False,
        "Keep the optimizer's copies in fp16 too. Needs stage 1-3 and Adam offloaded to the CPU.",
        mark=UNBUILT,
    )
