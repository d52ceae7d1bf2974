"""`compression_training`, and the sections of its first form: quantizing and pruning a model."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Section, Switched, key, rule, section, shown, under
from hadal.config.values import Boolean, Integer, Integers, Number, Text, TextOrTexts, Texts, whole
from hadal.errors import Fault


class Eigenvalue(Switched):
    """The dominant eigenvalue of each block's Hessian, by power iteration."""

    enabled: Boolean = key(False, "Compute eigenvalues. Requires layer_num.")
    verbose: Boolean = key(False, "Log each one.")
    max_iter: Integer = key(100, "Most iterations for each block.", ge=1)
    tol: Number = key(1e-2, "Relative change at which to stop.", ge=0)
    stability: Number = key(1e-6, "Added to norms.", ge=0)
    gas_boundary_resolution: Integer = key(1, "Updates from one computation to the next.", ge=1)
    layer_name: Text = key("bert.encoder.layer", "Full name of the list of blocks.")
    layer_num: Integer = key(0, "Number of blocks, from the first.", ge=0)


class QuantizeBits(Section):
    """Bits at the start and at the end."""

    start_bits: Integer = key(16, "Bits at the start.", ge=1)
    target_bits: Integer = key(16, "Bits at the end.", ge=1)


class QuantizeSchedule(Section):
    """Schedule of the bit width."""

    quantize_period: Integer = key(
        100,
        "Updates until the bit width is reduced by one; doubles each time. 0: one bit per update.",
        ge=0,
    )
    schedule_offset: Integer = key(100, "Updates before it starts.", ge=0)


class QuantizeAlgo(Section):
    """Rounding of values."""

    q_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "Scales without (symmetric) or with an offset; before quantize_type."
    )
    rounding: Literal["nearest", "stochastic"] = key("nearest", "Rounding mode.")


class MixedQuantize(Switched):
    """A blend of unquantized and quantized weights."""

    enabled: Boolean = key(False, "Blend; without quantize_weight_in_forward.")
    quantize_change_ratio: Number = key(
        0.001, "Growth of the quantized fraction per update.", gt=0, le=1
    )


class QuantizeTraining(Section):
    """Options of quantized training (Mixture of Quantization), before `compression_training`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "quantize-algo": "quantize_algo",
        "quantize-bits": "quantize_bits",
        "quantize-schedule": "quantize_schedule",
    }

    enabled: Boolean = key(
        False,
        "Quantize the weights of all suitable modules bit by bit;"
        " compression_training.weight_quantization can select modules, and has more settings.",
    )
    quantize_verbose: Boolean = key(False, "Log changes.")
    quantizer_kernel: Boolean = key(
        False, "Use a dedicated kernel; Hadal has one path, in torch.", mark=NO_EFFECT
    )
    quantize_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "The same as quantize_algo.q_type, which comes first if both are given."
    )
    quantize_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantize_bits: QuantizeBits = section(QuantizeBits, "Bits at the start and at the end.")
    quantize_schedule: QuantizeSchedule = section(QuantizeSchedule, "Schedule of the bit width.")
    quantize_algo: QuantizeAlgo = section(QuantizeAlgo, "Rounding of values.")
    fp16_mixed_quantize: MixedQuantize = section(
        MixedQuantize, "Blend of unquantized and quantized weights."
    )
    eigenvalue: Eigenvalue = section(
        Eigenvalue, "Curvature of blocks, which makes their bits fall more slowly."
    )

    @rule()
    def _bits(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        bits, given = self.quantize_bits, self.quantize_algo.model_fields_set
        kind = self.quantize_algo.q_type if "q_type" in given else self.quantize_type
        here = "quantize_bits.target_bits"
        if bits.target_bits > bits.start_bits:
            yield Fault(here, f"{bits.target_bits} is more than start_bits {bits.start_bits}")
        elif bits.target_bits <= 2 and kind != "symmetric":
            yield Fault(here, f'{bits.target_bits} needs quantize_algo.q_type "symmetric"')
        elif bits.target_bits <= 2 and self.quantize_algo.rounding != "nearest":
            yield Fault(here, f'{bits.target_bits} needs quantize_algo.rounding "nearest"')


_Symmetry: TypeAlias = Literal["symmetric", "asymmetric"]
_Related: TypeAlias = tuple[Texts, ...]
_OFFSET = "Updates before it starts."
_OWN_OFFSET = "Updates before it starts in this group; null is that of shared_parameters."
_MODULES = "Regular expressions searched in module names; `*` matches every suitable module."
_RELATED = (
    "Regular expressions of modules that get smaller along with these, one list for each entry of"
    " modules. Without it, pruned weights become zeros."
)
_UNREAD = "Accepted for every technique; has no meaning here."
_KEPT = "Fraction to keep."
_GROUPS = "Maps a free name to a group: its modules and settings."


class LayerReduction(Switched):
    """A shallower student initialized from some of the teacher's layers."""

    enabled: Boolean = key(
        False, "Let `init_compression` copy the teacher's layers into the student."
    )
    keep_number_layer: Integer | None = key(
        None, "Number of layers in the student, as many as in teacher_layer.", ge=1
    )
    module_name_prefix: Text | None = key(None, "Name of the list of layers. Required.")
    teacher_layer: Integers | None = key(None, "Teacher layers to copy, from 0. Required.")
    other_module_name: Texts | None = key(None, "Other modules to copy.")

    @rule()
    def _layers(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        yield from self.needs("module_name_prefix", "teacher_layer")
        kept, chosen = self.keep_number_layer, self.teacher_layer
        if kept is not None and chosen is not None and kept != len(chosen):
            yield Fault(
                "keep_number_layer", f"{kept}, but teacher_layer names {len(chosen)} layers"
            )


class WeightQuantizationShared(Switched):
    """Settings shared by all groups of weights."""

    enabled: Boolean = key(False, "Quantize weights. Requires different_groups.")
    schedule_offset: Integer = key(0, _OFFSET, ge=0)
    quantizer_kernel: Boolean = key(
        False, "Use a dedicated kernel; Hadal has one path, in torch.", mark=NO_EFFECT
    )
    quantize_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantize_verbose: Boolean = key(False, "Log changes.")
    quantization_type: _Symmetry = key(
        "symmetric", "Scales without (symmetric) or with an offset (asymmetric)."
    )
    rounding: Literal["nearest", "stochastic"] = key("nearest", "Rounding mode.")
    quantize_weight_in_forward: Boolean = key(
        False,
        "Quantize to target_bits at once. If false, the bits fall from start_bits to target_bits"
        " (MoQ). Both happen in the forward pass, in every dtype.",
    )
    fp16_mixed_quantize: MixedQuantize = section(
        MixedQuantize, "Blend of unquantized and quantized weights."
    )


class WeightQuantizationParams(Section):
    """Bit widths of one group of weights."""

    start_bits: Integer | None = key(None, "Bits at the start. Required.", ge=1)
    target_bits: Integer | None = key(None, "Bits at the end. Required.", ge=1)
    quantization_period: Integer = key(
        1,
        "Updates until the bit width is reduced by one; doubles each time. 0: one bit per update.",
        ge=0,
    )
    schedule_offset: Integer | None = key(None, _OWN_OFFSET, ge=0)


class _Scope(Section):
    """The modules of a group."""

    modules: TextOrTexts = key(["*"], _MODULES)


class _Technique(Section):
    """A technique: `shared_parameters`, and `different_groups` of modules."""

    switch = "shared_parameters.enabled"

    @rule()
    def _groups(self) -> Iterator[Fault]:
        technique: Any = self
        shared = technique.shared_parameters
        # snip_momentum prunes all modules.
        if not shared.enabled or getattr(shared, "method", "") == "snip_momentum":
            return
        yield from self.needs("different_groups")
        for group, content in (technique.different_groups or {}).items():
            here, params = f"different_groups.{group}.params", content.params
            if params is None:
                yield Fault(here, "required while the technique is on; add it")
                continue
            needed = ("start_bits", "target_bits", "bits", "dense_ratio")
            yield from under(here, params.needs(*(n for n in needed if hasattr(params, n))))


class WeightQuantizationGroup(_Scope):
    """One group of weights."""

    params: WeightQuantizationParams | None = key(None, "Bit widths.")
    related_modules: _Related | None = key(None, _UNREAD, mark=NO_EFFECT)


class WeightQuantizationSection(_Technique):
    """Weights in fewer bits."""

    shared_parameters: WeightQuantizationShared = section(
        WeightQuantizationShared, "Settings of all groups."
    )
    different_groups: dict[str, WeightQuantizationGroup] | None = key(None, _GROUPS)

    @rule()
    def _bits(self) -> Iterator[Fault]:
        shared = self.shared_parameters
        if not shared.enabled:
            return
        for group, content in (self.different_groups or {}).items():
            here, params = f"different_groups.{group}.params.target_bits", content.params
            if params is None or params.start_bits is None or params.target_bits is None:
                continue
            if params.target_bits > params.start_bits:
                message = f"{params.target_bits} is more than start_bits {params.start_bits}"
                yield Fault(here, message)
            elif params.target_bits <= 2 and shared.quantization_type != "symmetric":
                yield Fault(here, f'{params.target_bits} needs quantization_type "symmetric"')
            elif params.target_bits <= 2 and shared.rounding != "nearest":
                yield Fault(here, f'{params.target_bits} needs rounding "nearest"')
        if shared.fp16_mixed_quantize.enabled and shared.quantize_weight_in_forward:
            yield Fault(
                "shared_parameters.fp16_mixed_quantize.enabled",
                "only works with quantization in the optimizer step; set"
                " quantize_weight_in_forward to false",
            )


class ActivationQuantizationShared(Switched):
    """Settings shared by all groups of activations."""

    enabled: Boolean = key(False, "Quantize activations. Requires different_groups.")
    schedule_offset: Integer = key(1000, _OFFSET, ge=0)
    quantization_type: _Symmetry = key(
        "symmetric", "Scales without (symmetric) or with an offset (asymmetric)."
    )
    range_calibration: Literal["dynamic", "static"] = key(
        "dynamic",
        "Range measured per token (dynamic) or tracked by a running average (static). DeepSpeed's "
        "default is dynamic too, although its documentation says static.",
    )


class ActivationQuantizationParams(Section):
    """Bit width of one group of activations."""

    bits: Annotated[Literal[4, 8], BeforeValidator(whole)] | None = key(
        None, "Bit width. Required."
    )
    schedule_offset: Integer | None = key(None, _OWN_OFFSET, ge=0)


class ActivationQuantizationGroup(_Scope):
    """One group of activations."""

    params: ActivationQuantizationParams | None = key(None, "Bit width.")
    related_modules: _Related | None = key(None, _UNREAD, mark=NO_EFFECT)


class ActivationQuantizationSection(_Technique):
    """Activations in fewer bits."""

    shared_parameters: ActivationQuantizationShared = section(
        ActivationQuantizationShared, "Settings of all groups."
    )
    different_groups: dict[str, ActivationQuantizationGroup] | None = key(None, _GROUPS)


class _PruningShared(Switched):
    """Settings shared by all kinds of pruning."""

    enabled: Boolean = key(False, "Prune. Requires different_groups.")
    schedule_offset: Integer = key(1000, _OFFSET, ge=0)


class SparsePruningShared(_PruningShared):
    """Settings shared by all groups of sparse pruning."""

    enabled: Boolean = key(False, "Prune. Requires different_groups, except for snip_momentum.")
    method: Literal["l1", "topk", "snip_momentum"] = key(
        "l1",
        "Keep the largest of the first weights (l1), those with the largest trained scores (topk),"
        " or blocks by a running mean of weight times gradient, in all modules (snip_momentum).",
    )
    schedule_offset_end: Integer | None = key(
        None, "snip_momentum: last update that prunes; null is schedule_offset.", ge=0
    )
    schedule_offset_stride: Integer = key(1, "snip_momentum: updates between prunings.", ge=1)
    block_pattern: Text = key(
        "4x1",
        'snip_momentum: blocks of N rows and M columns ("4x1"), or N of every M inputs ("2:4").',
    )
    dense_ratio: Number = key(0.1, "snip_momentum: fraction to keep.", gt=0, lt=1)
    excluded_modules: Texts = key(
        (), "snip_momentum: regular expressions of modules to leave unpruned."
    )

    @rule()
    def _end_and_pattern(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        end = self.schedule_offset_end
        if end is not None and end < self.schedule_offset:
            message = f"{end} is before schedule_offset {self.schedule_offset}; raise it"
            yield Fault("schedule_offset_end", message)
        if self.method != "snip_momentum":
            return
        found = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", self.block_pattern)
        if found is None or (found[2] == ":" and int(found[1]) >= int(found[3])):
            expected = 'expected rows x columns, such as "4x1", or N of M with N < M, such as "2:4"'
            yield Fault("block_pattern", f"{shown(self.block_pattern)}; {expected}")
        elif found[2] == ":" and 1 - self.dense_ratio > int(found[1]) / int(found[3]) + 1e-9:
            most = f"{found[1]} of {found[3]} pruned leave {1 - int(found[1]) / int(found[3]):g}"
            yield Fault("dense_ratio", f"{self.dense_ratio:g} is too few: {most}; raise it")


class RowPruningShared(_PruningShared):
    """Settings shared by all groups of row pruning."""

    method: Literal["l1", "topk"] = key(
        "l1", "Keep the largest rows of the first weights (l1), or the largest scores (topk)."
    )


class HeadPruningShared(_PruningShared):
    """Settings shared by all groups of head pruning."""

    method: Literal["topk"] = key("topk", "Keep the largest trained scores.")
    num_heads: Integer | None = key(None, "Number of attention heads. Required.", ge=1)

    @rule()
    def _heads(self) -> Iterator[Fault]:
        yield from self.needs("num_heads") if self.enabled else ()


class ChannelPruningShared(_PruningShared):
    """Settings shared by all groups of channel pruning."""

    method: Literal["l1", "topk"] = key(
        "l1", "Keep the largest channels of the first weights (l1), or the largest scores (topk)."
    )


class PruningParams(Section):
    """Fraction of one group to keep."""

    dense_ratio: Number | None = key(None, _KEPT + " Required.", gt=0, le=1)
    schedule_offset: Integer | None = key(None, _OWN_OFFSET, ge=0)


class PruningGroup(_Scope):
    """One group of modules."""

    params: PruningParams | None = key(None, "Fraction to keep.")
    related_modules: _Related | None = key(None, _RELATED)


class SparsePruningGroup(_Scope):
    """One group of modules."""

    params: PruningParams | None = key(None, "Fraction to keep.")
    related_modules: _Related | None = key(None, _UNREAD, mark=NO_EFFECT)


class SparsePruningSection(_Technique):
    """Pruning of single weights, which become zero."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "Settings of all groups.")
    different_groups: dict[str, SparsePruningGroup] | None = key(None, _GROUPS)


class RowPruningSection(_Technique):
    """Pruning of output rows."""

    shared_parameters: RowPruningShared = section(RowPruningShared, "Settings of all groups.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class HeadPruningSection(_Technique):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "Settings of all groups.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class ChannelPruningSection(_Technique):
    """Pruning of convolution channels."""

    shared_parameters: ChannelPruningShared = section(
        ChannelPruningShared, "Settings of all groups."
    )
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class CompressionTraining(Section):
    """Compression of the model during training."""

    layer_reduction: LayerReduction = section(LayerReduction, "Fewer layers.")
    weight_quantization: WeightQuantizationSection = section(
        WeightQuantizationSection, "Weights in fewer bits."
    )
    activation_quantization: ActivationQuantizationSection = section(
        ActivationQuantizationSection, "Activations in fewer bits."
    )
    sparse_pruning: SparsePruningSection = section(SparsePruningSection, "Sparse weights.")
    row_pruning: RowPruningSection = section(RowPruningSection, "Fewer rows.")
    head_pruning: HeadPruningSection = section(HeadPruningSection, "Fewer heads.")
    channel_pruning: ChannelPruningSection = section(ChannelPruningSection, "Fewer channels.")

    @property
    def changes_modules(self) -> bool:
        """True if any technique is on that changes modules: all but fewer layers."""
        return any(
            technique.is_on
            for name in type(self).model_fields
            if name != "layer_reduction" and isinstance(technique := getattr(self, name), Section)
        )
