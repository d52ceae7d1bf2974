"""`comms_logger`: timing every collective."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Texts


class CommsLogger(Section):
    """Records name, bytes and time of collectives; waits for each, so it slows training."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Record collectives.", mark=UNBUILT)
    verbose: Boolean = key(False, "Print each one.")
    prof_all: Boolean = key(True, "Record all kinds; false records prof_ops only.")
    debug: Boolean = key(False, "Note who called.")
    prof_ops: Texts = key((), "Kinds to record where prof_all is false.")
