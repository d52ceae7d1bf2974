"""`monitor`: which scalars the monitors write.

Tests: tests/config/test_every_key.py
"""

from hadal.config.section import Section, key
from hadal.config.values import Boolean


class Monitor(Section):
    """Which scalars the monitors write. A section of Hadal's own."""

    extra: Boolean = key(
        True,
        "Also write what DeepSpeed does not: gradient norm, samples and tokens per second, skipped"
        " updates, peak memory.",
    )
