"""Values that contradict each other: one function per contradiction."""

from __future__ import annotations

from hadal.config.report import Report
from hadal.config.rules import batch, data_efficiency, optimizers, precision, sections, zero
from hadal.config.top_level import Config

RULES = (
    *batch.RULES,
    *precision.RULES,
    *zero.RULES,
    *optimizers.RULES,
    *data_efficiency.RULES,
    *sections.RULES,
)


def report_contradictions(config: Config, report: Report) -> None:
    """Report every contradiction except those that a faulty key may have caused."""
    found = [
        fault for rule in RULES if not report.is_faulty(rule.reads) for fault in rule.check(config)
    ]
    for fault in found:
        report.fault(fault.path, fault.message)
