"""`compression_training`: quantising, pruning and shortening a model while it trains."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import UNBUILT, Section, key, section
from hadal.config.values import Boolean, Integer, Integers, Number, Text, TextOrTexts, Texts, whole

_Symmetry: TypeAlias = Literal["symmetric", "asymmetric"]
_Related: TypeAlias = tuple[Texts, ...]
_OFFSET = "Updates before it starts."
_MODULES = "Regular expressions searched in modules' names; `*` is every module that fits."
_RELATED = "Modules that shrink along, one list for each entry of modules."
_UNREAD = "Read for every technique; means nothing here."
_KEPT = "Share that is kept."
_GROUPS = "Own name, and what is done to which modules."


class LayerReduction(Section):
    """A shallower student that starts from some of the teacher's layers."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Make a student.", mark=UNBUILT)
    keep_number_layer: Integer | None = key(None, "Layers of the student.", ge=1)
    module_name_prefix: Text | None = key(None, "Name of the list of layers.")
    teacher_layer: Integers | None = key(None, "Teacher's layers to copy, in order.")
    other_module_name: Texts | None = key(None, "Other modules to copy.")


class MixedQuantize(Section):
    """A blend of fp16 and quantised weights."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Blend.")
    quantize_change_ratio: Number = key(
        0.001, "Growth of the quantised share per update.", gt=0, le=1
    )


class WeightQuantizationShared(Section):
    """What all groups of weights share."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Quantise weights. Needs different_groups.", mark=UNBUILT)
    schedule_offset: Integer = key(0, _OFFSET, ge=0)
    quantizer_kernel: Boolean = key(False, "Use a kernel of its own.")
    quantize_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantize_verbose: Boolean = key(False, "Log changes.")
    quantization_type: _Symmetry = key("symmetric", "Scales without or with an offset.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "How values are rounded.")
    quantize_weight_in_forward: Boolean = key(
        False, "Quantise in the forward pass rather than in the update; needed without fp16."
    )
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "A blend.")


class WeightQuantizationParams(Section):
    """Bits of one group of weights."""

    start_bits: Integer | None = key(None, "Bits at the start. Must be said.", ge=1)
    target_bits: Integer | None = key(None, "Bits in the end. Must be said.", ge=1)
    quantization_period: Integer = key(
        1, "Updates before the next bit falls; 0 where both numbers of bits are the same.", ge=0
    )


class _Scope(Section):
    """Which modules a group holds."""

    modules: TextOrTexts = key(("*",), _MODULES)


class WeightQuantizationGroup(_Scope):
    """One group of weights."""

    params: WeightQuantizationParams | None = key(None, "Bits.")
    related_modules: _Related | None = key(None, _UNREAD)


class WeightQuantizationSection(Section):
    """Weights in fewer bits."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: WeightQuantizationShared = section(WeightQuantizationShared, "For all.")
    different_groups: dict[str, WeightQuantizationGroup] | None = key(None, _GROUPS)


class ActivationQuantizationShared(Section):
    """What all groups of activations share."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Quantise activations. Needs different_groups.", mark=UNBUILT)
    schedule_offset: Integer = key(1000, _OFFSET, ge=0)
    quantization_type: _Symmetry = key("symmetric", "Scales without or with an offset.")
    range_calibration: Literal["dynamic", "static"] = key(
        "dynamic", "Range found for each token, or followed by a running average."
    )


class ActivationQuantizationParams(Section):
    """Bits of one group of activations."""

    bits: Annotated[Literal[4, 8], BeforeValidator(whole)] | None = key(None, "Bits. Must be said.")


class ActivationQuantizationGroup(_Scope):
    """One group of activations."""

    params: ActivationQuantizationParams | None = key(None, "Bits.")
    related_modules: _Related | None = key(None, _UNREAD)


class ActivationQuantizationSection(Section):
    """Activations in fewer bits."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: ActivationQuantizationShared = section(
        ActivationQuantizationShared, "For all."
    )
    different_groups: dict[str, ActivationQuantizationGroup] | None = key(None, _GROUPS)


class _PruningShared(Section):
    """What all kinds of pruning share."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Prune. Needs different_groups.", mark=UNBUILT)
    schedule_offset: Integer = key(1000, _OFFSET, ge=0)


class SparsePruningShared(_PruningShared):
    """What all groups of single weights share."""

    method: Literal["l1", "topk", "snip_momentum"] = key("l1", "What decides.")
    schedule_offset_end: Integer | None = key(
        None, "snip_momentum: last update that prunes; null is schedule_offset.", ge=0
    )
    schedule_offset_stride: Integer = key(1, "snip_momentum: updates between prunings.", ge=1)
    block_pattern: Text = key("4x1", "snip_momentum: NxM blocks, or N of M.")
    dense_ratio: Number = key(0.1, "snip_momentum: share that is kept.", gt=0, lt=1)
    excluded_modules: Texts = key((), "snip_momentum: modules left alone.")


class RowPruningShared(_PruningShared):
    """What all groups of rows share."""

    method: Literal["l1", "topk"] = key("l1", "What decides.")


class HeadPruningShared(_PruningShared):
    """What all groups of heads share."""

    method: Literal["topk"] = key("topk", "What decides.")
    num_heads: Integer | None = key(None, "Heads of the model. Must be said.", ge=1)


class ChannelPruningShared(_PruningShared):
    """What all groups of channels share."""

    method: Literal["l1", "topk"] = key("l1", "What decides.")


class PruningParams(Section):
    """How much of one group is kept."""

    dense_ratio: Number | None = key(None, _KEPT + " Must be said.", gt=0, le=1)


class PruningGroup(_Scope):
    """One group of modules."""

    params: PruningParams | None = key(None, "How much is kept.")
    related_modules: _Related | None = key(None, _RELATED)


class SparsePruningSection(Section):
    """Single weights set to zero."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "For all.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class RowPruningSection(Section):
    """Output rows taken out."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: RowPruningShared = section(RowPruningShared, "For all.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class HeadPruningSection(Section):
    """Attention heads taken out."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "For all.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class ChannelPruningSection(Section):
    """Channels of convolutions taken out."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: ChannelPruningShared = section(ChannelPruningShared, "For all.")
    different_groups: dict[str, PruningGroup] | None = key(None, _GROUPS)


class CompressionTraining(Section):
    """A smaller model, made while training."""

    layer_reduction: LayerReduction = section(LayerReduction, "Fewer layers.")
    weight_quantization: WeightQuantizationSection = section(
        WeightQuantizationSection, "Weights in fewer bits."
    )
    activation_quantization: ActivationQuantizationSection = section(
        ActivationQuantizationSection, "Activations in fewer bits."
    )
    sparse_pruning: SparsePruningSection = section(SparsePruningSection, "Zeros in weights.")
    row_pruning: RowPruningSection = section(RowPruningSection, "Fewer rows.")
    head_pruning: HeadPruningSection = section(HeadPruningSection, "Fewer heads.")
    channel_pruning: ChannelPruningSection = section(ChannelPruningSection, "Fewer channels.")
