"""What is sound, but does less than its writer may expect: told as notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.report import Report
from hadal.config.rules.precision import scales_by_fp16
from hadal.config.top_level import Config


def tell_advice(config: Config, prepared: Mapping[str, Any], report: Report) -> None:
    """Tell what keys that were written do not do, given the keys beside them."""
    given = prepared.get("fp16")
    written = given if isinstance(given, Mapping) else {}
    is_dynamic = scales_by_fp16(config) and config.fp16.loss_scale == 0
    if is_dynamic and config.zero_optimization.stage == 0:
        for name in ("hysteresis", "consecutive_hysteresis"):
            if name in written:
                report.note(
                    f"fp16.{name}",
                    "has no effect at zero_optimization.stage 0, where every overflow halves the"
                    " loss scale",
                )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        report.note(
            "gradient_predivide_factor",
            "has no effect: prescale_gradients does all of the division before adding up",
        )
