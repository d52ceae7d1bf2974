"""`fp16`, `bf16`, `amp`, `torch_autocast` and `data_types`: the dtypes of training."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt
from pydantic import BeforeValidator

from hadal.config.optimizer import in_blocks
from hadal.config.section import NO_EFFECT, Section, Switched, key, rule
from hadal.config.values import Boolean, Dtype, DtypeName, Integer, Number, Spelled, Texts
from hadal.errors import Fault


class Fp16(Switched):
    """Weights and gradients in fp16; loss scaling preserves small gradients."""

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


_NEVER_SCALED = "ignored: bf16 has the range of fp32, its loss is never scaled"


class Bf16(Switched):
    """Weights and gradients in bfloat16, without loss scaling; masters in fp32."""

    leftovers: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("loss_scale", "loss_scale_window", "initial_scale_power"), _NEVER_SCALED),
        **dict.fromkeys(("hysteresis", "min_loss_scale"), _NEVER_SCALED),
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
        True, "Skip an update whose gradients contain an infinity or a NaN; false applies it."
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


class Amp(Switched):
    """Mixed precision with Apex's levels and keywords, implemented with torch.amp. Stage 0 only.

    O0 trains in fp32. O1 runs the forward pass under fp16 autocast. O2 casts weights, buffers and
    inputs to fp16, except those of batch norm, and keeps fp32 masters. O3 casts everything and
    keeps no masters. O1 and O2 scale the loss dynamically: the scale starts at 2^16, doubles after
    2000 updates without overflow and halves at each overflow. The other keys override a level's
    choices; null keeps the level's own.
    """

    required = ("enabled",)

    enabled: Boolean = key(
        False, "Train in mixed precision. Required; excludes fp16, bf16 and ZeRO."
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key("O1", "Apex's level; see above.")
    cast_model_type: DtypeName | None = key(
        None,
        "Dtype to cast weights, buffers and inputs to (`torch.float16` and the like are "
        "accepted too); null is fp32 at O0, no cast at O1, fp16 at O2 and O3.",
    )
    patch_torch_functions: Boolean | None = key(
        None,
        "Run the forward pass under fp16 autocast; null is true at O1 and false elsewhere. "
        "Cannot be combined with casting the model.",
    )
    keep_batchnorm_fp32: Boolean | None = key(
        None,
        "Keep batch norm's weights and buffers in fp32 when the model is cast; null is true at "
        "O2 and false elsewhere.",
    )
    master_weights: Boolean | None = key(
        None,
        "Keep fp32 masters of cast weights; null is true at O2 and false elsewhere. Moments are "
        "fp32 in any case.",
    )
    loss_scale: Literal["dynamic"] | Annotated[Number, Gt(0)] | None = key(
        None,
        '"dynamic", or a fixed number; null is "dynamic" at O1 and O2, 1 at O0 and O3. Updates '
        "that overflow are skipped if anything is fp16.",
    )
    min_loss_scale: Annotated[Number, Gt(0)] | None = key(
        None, "Lower bound of a dynamic scale; null sets none."
    )
    max_loss_scale: Annotated[Number, Gt(0)] = key(
        16777216.0, "Upper bound of a dynamic scale (2^24)."
    )
    cast_model_outputs: DtypeName | None = key(
        None,
        "Dtype to cast the model's floating-point output tensors to; null is fp32 when inputs "
        "are cast, and no cast otherwise.",
    )
    num_losses: Annotated[Integer, Ge(1)] = key(
        1,
        "Number of losses with a scale of their own. An engine uses one scale for all losses.",
        mark=NO_EFFECT,
    )
    verbosity: Integer = key(1, "Verbosity of Apex's messages. There are none.", mark=NO_EFFECT)

    @rule("enabled", "opt_level", "cast_model_type", "patch_torch_functions")
    def _patched_and_cast(self) -> Iterator[Fault]:
        is_o1, is_patched = self.opt_level == "O1", self.patch_torch_functions
        if is_patched is None:
            is_patched = is_o1
        if self.enabled and is_patched and (self.cast_model_type is not None or not is_o1):
            yield Fault(
                "cast_model_type" if is_o1 else "patch_torch_functions",
                "autocast casts where operations need it, so the model is not cast beforehand; use "
                "O1 without cast_model_type, or O2 without patch_torch_functions",
            )

    @rule("enabled", "min_loss_scale", "max_loss_scale")
    def _scales(self) -> Iterator[Fault]:
        least, most = self.min_loss_scale, self.max_loss_scale
        if least and least > most:
            message = f"{least:g} is above amp.max_loss_scale {most:g}; lower it"
            yield Fault("min_loss_scale", message)


_SPELLINGS = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
}
_Name: TypeAlias = Annotated[Literal["bf16", "fp16"], BeforeValidator(Spelled(_SPELLINGS))]


class TorchAutocast(Switched):
    """Weights keep their dtype; operations that are safe at lower precision use it.

    Autocast covers the engine's forward only; a loss computed outside it is not covered. Autocast
    keeps its casts of weights from forward to backward, at stage 3 too: if memory is short, weights
    in bf16 or fp16 (sections `bf16`, `fp16`) take less.
    """

    enabled: Boolean = key(
        False,
        "Run the forward pass under `torch.autocast`, regardless of the caller's own autocast.",
    )
    dtype: _Name | None = key(
        None,
        "Precision of autocast: bf16 (also `bfloat16`, `torch.bfloat16`) or fp16 (also `half`, "
        "`float16`, `torch.float16`); null uses torch's choice for the device (bf16 on CPUs, "
        "fp16 on CUDA). With fp16 the loss is scaled, at every stage, with the numbers of "
        "section `fp16`, which need not be enabled.",
    )
    lower_precision_safe_modules: Texts | None = key(
        None,
        "Import paths of module classes whose parameters' gradients are sent in that dtype; "
        "other gradients are sent in their own. null means `torch.nn.Linear`, `Conv1d`, "
        "`Conv2d` and `Conv3d`. On an accelerator they are also summed in it; [] keeps sums in "
        "fp32. `communication_data_type`, if given, applies to all of them. Weights are "
        "gathered in their own dtype.",
    )


class DataTypes(Section):
    """Dtypes that otherwise follow the model's precision."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "Dtype in which the gradients of micro-batches are accumulated, at every stage; null is "
        "the model's dtype. It is also the dtype on the wire, unless `communication_data_type` "
        "sets another one.",
    )
    param_dtype: Dtype | None = key(
        None, "Dtype of the weights; if given, it must be the one that fp16 or bf16 implies."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype to cast floating-point buffers to; null leaves them unchanged, so that a "
        "rotary embedding's frequencies stay exact. Only running statistics (of batch and "
        "instance norms) then take their module's dtype, as torch requires. If a module adds a "
        "buffer to 16-bit values and passes the sum to a layer, set the model's dtype.",
    )
    keep_in_fp32_modules: Literal["auto"] | Texts = key(
        "auto",
        "Modules whose floating-point buffers are not cast: regular expressions for one or more "
        "whole components of a buffer's full name (`norm` matches `blocks.0.norm.mean`, not "
        "`layernorm.mean`). auto uses the model's own lists, `_keep_in_fp32_modules` and "
        "`_keep_in_fp32_modules_strict`; [] is none. Parameters of these modules are cast like "
        "any other; their masters are fp32.",
    )
    early_rounding: Boolean | None = key(
        None,
        "Round as early as DeepSpeed does: fp32 masters of cast weights start from the rounded "
        "weights, and a micro-batch's mean gradient is rounded to the accumulation dtype before "
        "it is added. false: masters start from the weights as given, and a sum is rounded "
        "once, which is closer to training in fp32. null is true under the name of DeepSpeed, "
        "whose numbers programs expect there, and false elsewhere. Hadal's own key.",
    )

    @rule("keep_in_fp32_modules")
    def _patterns(self) -> Iterator[Fault]:
        patterns = self.keep_in_fp32_modules
        for index, pattern in enumerate(() if isinstance(patterns, str) else patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                yield Fault(
                    f"keep_in_fp32_modules[{index}]",
                    f'"{pattern}" is not a valid regular expression ({error}); correct it',
                )
