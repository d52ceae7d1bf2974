"""`eigenvalue`: curvature of blocks, as a top-level section.

Tests: tests/config/test_every_key.py
"""

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean


class Eigenvalue(Section):
    """Never read at this place, in any release of DeepSpeed."""

    enabled: Boolean = key(False, "Compute eigenvalues.", mark=NO_EFFECT)
