"""`quantize_training`: the first form of quantized training, before `compression_training`."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hadal.config.eigenvalue import Eigenvalue
from hadal.config.section import NO_EFFECT, Section, key, section
from hadal.config.values import Boolean, Integer


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
    eigenvalue: Eigenvalue = section(
        Eigenvalue, "Curvature of blocks, which makes their bits fall more slowly."
    )
