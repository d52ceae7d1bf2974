"""`fp16`: training with half-precision weights and a scaled loss."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number


class Fp16(Section):
    """Weights and gradients in fp16; the loss is scaled so that small gradients survive."""

    switch: ClassVar[str | None] = "enabled"
    leftovers: ClassVar[Mapping[str, str]] = {"fp16": "left alone: another program reads it"}

    enabled: Boolean = key(False, "Train in fp16. Excludes `bf16.enabled` and `amp.enabled`.")
    auto_cast: Boolean = key(
        False, "Cast the floating-point tensors among the model's inputs to fp16, nested ones too."
    )
    loss_scale: Number = key(
        0,
        "Scale of the loss; 0 finds it while training (dynamic). An update whose gradients "
        "overflow is skipped either way.",
        ge=0,
    )
    initial_scale_power: Integer = key(
        16, "A dynamic scale starts at 2 to this power.", ge=0, le=127
    )
    loss_scale_window: Integer = key(
        1000,
        "Updates without overflow after which a dynamic scale doubles (one more is needed after "
        "the start and after an overflow).",
    )
    hysteresis: Integer = key(
        2,
        "The overflow, counted from the start or the last doubling, from which on each one halves "
        "a dynamic scale: 1 halves at once, 2 forgives one. Acts at stage 1-3; at stage 0 every "
        "overflow halves.",
        ge=1,
    )
    consecutive_hysteresis: Boolean = key(
        False,
        "Forgive anew after each clean update, not only after the scale has grown. Acts at stage "
        "1-3.",
    )
    min_loss_scale: Integer = key(
        1,
        "Floor of a dynamic scale. An overflow at it ends training at stage 1-3; at stage 0 the "
        "scale stays there.",
    )
    fp16_master_weights_and_grads: Boolean = key(
        False,
        "Keep no fp32 master: the optimizer updates the fp16 weights themselves (computing in "
        "fp32), its moments stay fp32. Needs stage 1-3. DeepSpeed also needs Adam offloaded to "
        "the CPU, for want of another kernel; here Adam, AdamW, Lion, Adagrad and SGD do it "
        "wherever they run.",
    )
