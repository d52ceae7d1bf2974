"""`nebula`: checkpoints through Azure Nebula."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Text


class Nebula(Section):
    """Checkpoints kept in memory and persisted by a service."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Use the service.", mark=UNBUILT)
    nebula_load_path: Text | None = key(
        None, "Directory to resume from; null is persistent_storage_path."
    )
    enable_nebula_load: Boolean = key(True, "Load through the service.")
    persistent_storage_path: Text | None = key(None, "Directory to persist to.")
    persistent_time_interval: Integer = key(100, "Seconds between two persisted copies.", gt=0)
    num_of_version_in_retention: Integer = key(2, "Copies kept in memory.", ge=1)
