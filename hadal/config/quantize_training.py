"""`quantize_training`: the first form of quantized training, before `compression_training`.

Tests: tests/config/test_every_key.py
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hadal.config.section import NO_EFFECT, UNBUILT, Section, key, section
from hadal.config.values import Boolean, Integer, Number, Text

_OLD = "Superseded by compression_training.weight_quantization."


class QuantizeEigenvalue(Section):
    """Curvature of blocks by power iteration."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Compute eigenvalues.", mark=UNBUILT)
    verbose: Boolean = key(False, "Log them.")
    max_iter: Integer = key(100, "Maximum number of iterations.", ge=1)
    tol: Number = key(1e-2, "Relative change at which to stop.", ge=0)
    stability: Number = key(1e-6, "Added to norms.", ge=0)
    gas_boundary_resolution: Integer = key(1, "Updates between two computations.", ge=1)
    layer_name: Text = key("bert.encoder.layer", "Name of the list of blocks.")
    layer_num: Integer = key(0, "Number of blocks.", ge=0)


class QuantizeBits(Section):
    """Bits at the start and at the end."""

    start_bits: Integer = key(16, _OLD, mark=NO_EFFECT)
    target_bits: Integer = key(16, _OLD, mark=NO_EFFECT)


class QuantizeSchedule(Section):
    """Schedule of the bit width."""

    quantize_period: Integer = key(100, _OLD, mark=NO_EFFECT)
    schedule_offset: Integer = key(100, _OLD, mark=NO_EFFECT)


class QuantizeAlgo(Section):
    """Rounding of values."""

    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", _OLD, mark=NO_EFFECT)
    rounding: Literal["nearest", "stochastic"] = key("nearest", _OLD, mark=NO_EFFECT)


class QuantizeTraining(Section):
    """Options of quantized training (Mixture of Quantization)."""

    aliases: ClassVar[Mapping[str, str]] = {
        "quantize-algo": "quantize_algo",
        "quantize-bits": "quantize_bits",
        "quantize-schedule": "quantize_schedule",
    }

    enabled: Boolean = key(False, _OLD, mark=NO_EFFECT)
    quantize_verbose: Boolean = key(False, _OLD, mark=NO_EFFECT)
    quantizer_kernel: Boolean = key(False, _OLD, mark=NO_EFFECT)
    quantize_type: Literal["symmetric", "asymmetric"] = key("symmetric", _OLD, mark=NO_EFFECT)
    quantize_groups: Integer = key(1, _OLD, mark=NO_EFFECT)
    quantize_bits: QuantizeBits = section(QuantizeBits, _OLD)
    quantize_schedule: QuantizeSchedule = section(QuantizeSchedule, _OLD)
    quantize_algo: QuantizeAlgo = section(QuantizeAlgo, _OLD)
    eigenvalue: QuantizeEigenvalue = section(QuantizeEigenvalue, "Curvature of blocks.")
