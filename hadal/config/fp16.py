"""`fp16`: training with half-precision weights and loss scaling."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.optimizer_kinds import in_blocks
from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number


class Fp16(Section):
    """Weights and gradients in fp16; loss scaling preserves small gradients."""

    switch: ClassVar[str | None] = "enabled"
    leftovers: ClassVar[Mapping[str, str]] = {
        "fp16": "ignored: another program reads it",
        "fp16_scale_tolerance": "ignored: another program reads it",
        "opt_level": "ignored: a level of Apex, which only `amp` has",
    }

    enabled: Boolean = key(False, "Train in fp16. Excludes `bf16.enabled` and `amp.enabled`.")
    auto_cast: Boolean = key(
        False, "Cast floating-point tensors in the model's inputs to fp16, including nested ones."
    )
    loss_scale: Number = key(
        0,
        "Loss scale; 0 adjusts it during training (dynamic). An update whose gradients overflow "
        "is skipped either way.",
        ge=0,
    )
    initial_scale_power: Integer = key(
        16, "A dynamic scale starts at 2 to this power.", ge=0, le=127
    )
    loss_scale_window: Integer = key(
        1000,
        "Updates without overflow after which a dynamic scale doubles (one more after the start "
        "and after an overflow).",
    )
    hysteresis: Integer = key(
        2,
        "The overflow, counted from the start or the last doubling, from which on each overflow "
        "halves a dynamic scale: 1 halves at the first, 2 tolerates one. Applies at stages 1-3; "
        "at stage 0 every overflow halves the scale.",
        ge=1,
    )
    consecutive_hysteresis: Boolean = key(
        False,
        "Reset the count of overflows after each update without one, not only when the scale "
        "doubles. Applies at stages 1-3.",
    )
    min_loss_scale: Integer = key(
        1,
        "Lower bound of a dynamic scale. An overflow at this scale ends training at stages 1-3; "
        "at stage 0 the scale stays there.",
    )
    fp16_master_weights_and_grads: Boolean = key(
        False,
        "Keep no fp32 masters: the optimizer updates the fp16 weights directly (computing in "
        "fp32), and its moments stay fp32. Requires stage 1-3. DeepSpeed also requires Adam "
        f"offloaded to the CPU, for lack of another kernel; here {in_blocks('and')} support it in "
        "every tier.",
    )
